//! Lightning Attention-2 (causal linear attention with per-head decay), forward and backward, on the CPU and on NVIDIA
//! GPUs.
//!
//! Per batch and head, with a slope `s ≥ 0`, the decay `λ = exp(-s)` and a scale `c`:
//!
//! ```text
//! S_i = λ S_{i-1} + k_iᵀ v_i        S_{-1} = 0        q, k: [N, D]   v, o: [N, E]   S: [D, E]
//! o_i = c · q_i S_i
//! ```
//!
//! There is no softmax, and the cost grows with `N`, not with its square.
//!
//! # Three steps
//!
//! 1. A [`Problem`] says what is to be computed: sizes, element type, [`Slopes`], scale.
//! 2. A [`View`] says where a tensor lies: a slice, a shape and strides. Nothing is copied.
//! 3. [`cpu::forward`] and [`cpu::backward`] compute it.
//!
//! ```
//! use lightning_attention::{Backward, DType, Forward, Layout, Problem, Slopes, View, ViewMut, cpu};
//!
//! // Batch 1, 2 heads, 100 tokens, D = 16, E = 8.
//! let problem = Problem::new(1, 2, 100, 16, 8).dtype(DType::F32).slopes(Slopes::None).scale(0.25);
//! let (key, value) = (problem.key_shape(), problem.value_shape());
//! let (q, k) = (vec![0.5_f32; 2 * 100 * 16], vec![0.5_f32; 2 * 100 * 16]);
//! let (v, do_) = (vec![1.0_f32; 2 * 100 * 8], vec![1.0_f32; 2 * 100 * 8]);
//!
//! let mut o = vec![0.0; v.len()];
//! let q = View::contiguous(&q, key, Layout::Bhnd);
//! let k = View::contiguous(&k, key, Layout::Bhnd);
//! let v = View::contiguous(&v, value, Layout::Bhnd);
//! cpu::forward(&problem, Forward { q, k, v, o: ViewMut::contiguous(&mut o, value, Layout::Bhnd) })?;
//! // The first token sees itself, the last one all hundred: 0.25 · 16 columns of 0.5 · 0.5 each.
//! assert_eq!((o[0], o[99 * 8]), (1.0, 100.0));
//!
//! let (mut dq, mut dk, mut dv) = (vec![0.0; 3200], vec![0.0; 3200], vec![0.0; 1600]);
//! let tensors = Backward {
//!     q,
//!     k,
//!     v,
//!     do_: View::contiguous(&do_, value, Layout::Bhnd),
//!     dq: ViewMut::contiguous(&mut dq, key, Layout::Bhnd),
//!     dk: ViewMut::contiguous(&mut dk, key, Layout::Bhnd),
//!     dv: ViewMut::contiguous(&mut dv, value, Layout::Bhnd),
//! };
//! cpu::backward(&problem, tensors)?;
//! // The first value reaches all hundred outputs, the last one its own.
//! assert_eq!((dv[0], dv[99 * 8]), (100.0, 1.0));
//! # Ok::<(), lightning_attention::Error>(())
//! ```
//!
//! # On a GPU
//!
//! With feature `cuda` there is a module `cuda`: an engine for each GPU, which prepares a problem (plans it, loads its
//! kernels, allocates its workspace) and then runs it any number of times.
//!
#![cfg_attr(feature = "cuda", doc = "```no_run")]
#![cfg_attr(not(feature = "cuda"), doc = "```text")]
//! use half::bf16;
//! use lightning_attention::cuda::cust::stream::{Stream, StreamFlags};
//! use lightning_attention::cuda::{self, DeviceView, DeviceViewMut, Engine};
//! use lightning_attention::{Forward, Layout, Problem};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::new(0)?;
//! let stream = Stream::new(StreamFlags::DEFAULT, None)?;
//! let problem = Problem::new(6, 8, 2048, 128, 64); // bf16, ALiBi slopes, scale 1
//! let mut attention = engine.prepare(&problem)?;
//!
//! let (key, value) = (problem.key_shape(), problem.value_shape());
//! let q = cuda::upload(&vec![bf16::ONE; key.iter().product()])?;
//! let k = cuda::upload(&vec![bf16::ONE; key.iter().product()])?;
//! let v = cuda::upload(&vec![bf16::ONE; value.iter().product()])?;
//! let mut o = cuda::upload(&vec![bf16::ZERO; value.iter().product()])?;
//! let tensors = Forward {
//!     q: DeviceView::contiguous(&q, key, Layout::Bhnd),
//!     k: DeviceView::contiguous(&k, key, Layout::Bhnd),
//!     v: DeviceView::contiguous(&v, value, Layout::Bhnd),
//!     o: DeviceViewMut::contiguous(&mut o, value, Layout::Bhnd),
//! };
//! attention.forward_blocking::<bf16>(&stream, tensors)?;
//! let o: Vec<bf16> = cuda::download(&o)?;
//! # Ok(())
//! # }
//! ```
//!
//! Its documentation goes on to calls that only enqueue, to CUDA graphs, and to tensors of other libraries.
//!
//! Two families of kernels compute the outputs: portable ones from Ampere on, and Hopper's. Where training runs forward and
//! backward as a pair, the calls `forward_checkpointed` and `backward_checkpointed` hand over states in memory of the
//! caller's, [`Plan::checkpoint_bytes`] of it: at most a fifth of q, k, v and o, and 0 where the plan has no checkpoints and they are the
//! plain calls. [`Plan::with_checkpoints`] tells a plan to have them or not.
//!
//! # What there is
//!
//! | | CPU | CUDA |
//! |---|---|---|
//! | forward `o`; backward `dq, dk, dv` | yes | yes |
//! | element types | f32, f16, bf16 | f16, bf16 |
//! | `D`, `E` | 1 to 256 | multiples of 8 up to 128 |
//! | `N` | 0 to 2^30 | 0 to 2^30 |
//! | rows begin | anywhere | at multiples of 16 bytes |
//! | memory beside the tensors | at most 64 MiB | [`Plan::workspace_bytes`] and the slopes |
//!
//! Sums and states are f32 on both. On a GPU, what enters a matrix product is rounded to the element type, so that results
//! are off by more than their own rounding; a problem of [`Precision::Accurate`] has that multiplied too, for more time. The CPU
//! takes either, and is that exact with both. The same input gives the same bits, whatever the number of threads or the timing.
//!
//! # Layouts
//!
//! A shape is always `[batch, heads, seq_len, dim]`; what differs is the strides. [`Layout::Bhnd`] and [`Layout::Bnhd`]
//! are the two contiguous orders. Any other [`Strides`] will do as long as the elements of a row are neighbours, so a
//! slice of a projection `[B, N, H, q k v]` is passed as it lies:
//!
//! ```
//! use lightning_attention::{Extent, Problem, Strides, View};
//!
//! let problem = Problem::new(2, 3, 130, 64, 32);
//! let head = 64 + 64 + 32;
//! let strides = Strides { batch: 130 * 3 * head, head, row: 3 * head };
//! let qkv = vec![0.0_f32; 2 * 130 * 3 * head];
//! let k = View { data: &qkv[64..], extent: Extent { shape: problem.key_shape(), strides } };
//! # assert!(k.extent.span().unwrap() <= k.data.len());
//! ```
//!
//! Inputs may overlap each other or themselves (a stride of 0 shares keys between heads); an output may overlap nothing.
//!
//! # Slopes
//!
//! Weights trained with one schedule are garbage under another, so schedules are named and documented by their formula:
//! [`Slopes::Alibi`], [`Slopes::MiniMax`], [`Slopes::None`], [`Slopes::Custom`]. They are always f32.
//!
//! # Errors
//!
//! A pass checks its arguments before it writes or enqueues anything, and returns an [`Error`] that names the argument,
//! what was given and what is expected. Bad input is never a panic, nor a way to memory that is not the caller's.
//!
//! ```
//! use lightning_attention::{Problem, Slopes};
//!
//! let error = Problem::new(1, 2, 100, 64, 64).slopes(Slopes::Custom(vec![0.1, -1.0])).validate().unwrap_err();
//! assert_eq!(error.to_string(), "`slopes[1]` is -1, expected a finite value >= 0");
//! ```
//!
//! # Looking inside
//!
//! A [`Plan`] is plain data that prints itself, and needs no GPU: which kernels a GPU would run, over how many segments,
//! with how much workspace.
//!
//! ```
//! use lightning_attention::plan::Device;
//! use lightning_attention::{Plan, Problem};
//!
//! let plan = Plan::new(&Problem::new(4, 32, 8192, 128, 128), Device::H200)?;
//! assert_eq!((plan.forward().segments, plan.workspace_bytes()), (1, 0));
//! println!("{plan}");
//! # Ok::<(), lightning_attention::Error>(())
//! ```
//!
//! [`mod@reference`] is the oracle of the tests: the recurrence and all its gradients in f64, token by token.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(all(test, not(feature = "cuda")))]
#[path = "cuda/embedded.rs"]
mod embedded;
mod error;
pub mod plan;
pub mod problem;
pub mod reference;
mod slopes;
mod view;

pub use error::{Error, Result};
pub use plan::Plan;
pub use problem::{Precision, Problem};
pub use slopes::Slopes;
pub use view::{Backward, DType, Element, Extent, Forward, Layout, Strides, View, ViewMut};
