//! The CUDA backend: Lightning Attention-2 on NVIDIA GPUs from Ampere on (feature `cuda`).
//!
//! # In four steps
//!
//! 1. An [`Engine`] stands for one GPU. It loads a kernel when a problem first needs it, and keeps it.
//! 2. [`Engine::prepare`] turns a [`Problem`] into an [`Attention`]: it plans the launches, loads their kernels and
//!    allocates what they need beside the tensors.
//! 3. Tensors stay where they are. A [`DeviceView`] says where: a buffer, a shape and strides.
//! 4. [`Attention::forward_blocking`] and [`Attention::backward_blocking`] run a pass and wait for it. They are safe.
//!
//! ```no_run
//! use half::bf16;
//! use lightning_attention::cuda::cust::stream::{Stream, StreamFlags};
//! use lightning_attention::cuda::{self, DeviceView, DeviceViewMut, Engine};
//! use lightning_attention::{Forward, Layout, Problem};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::new(0)?;
//! let stream = Stream::new(StreamFlags::DEFAULT, None)?;
//!
//! let problem = Problem::new(6, 8, 2048, 128, 64);
//! let mut attention = engine.prepare(&problem)?;
//!
//! let (key, value) = (problem.key_shape(), problem.value_shape());
//! let x = bf16::from_f32(0.1);
//! let q = cuda::upload(&vec![x; key.iter().product()])?;
//! let k = cuda::upload(&vec![x; key.iter().product()])?;
//! let v = cuda::upload(&vec![x; value.iter().product()])?;
//! let mut o = cuda::upload(&vec![bf16::ZERO; value.iter().product()])?;
//!
//! attention.forward_blocking::<bf16>(
//!     &stream,
//!     Forward {
//!         q: DeviceView::contiguous(&q, key, Layout::Bhnd),
//!         k: DeviceView::contiguous(&k, key, Layout::Bhnd),
//!         v: DeviceView::contiguous(&v, value, Layout::Bhnd),
//!         o: DeviceViewMut::contiguous(&mut o, value, Layout::Bhnd),
//!     },
//! )?;
//! let o: Vec<bf16> = cuda::download(&o)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Without waiting
//!
//! [`Attention::forward`] and [`Attention::backward`] only enqueue: they allocate nothing and wait for nothing, so
//! they can be captured in a CUDA graph. They are `unsafe`, because a borrow that ends when the call returns does not
//! keep a buffer from what safe code may do while the kernels still run: `DeviceBuffer::drop_async` frees it in the
//! order of another stream, and another stream's work may write it. (A plain drop of a `DeviceBuffer` is harmless:
//! `cuMemFree` waits for the device.) The caller promises, until the stream has passed the work, that
//!
//! - the buffers stay allocated, and nothing else writes the inputs or touches the outputs;
//! - the same [`Attention`] is enqueued on another stream only in an order that events enforce, since its workspace
//!   serves one pass at a time; two streams take two `Attention`s, which may share an [`Engine`];
//! - the [`Attention`] itself lives, and for a captured graph that lasts as long as the graph is launched.
//!
//! # Tensors of other libraries
//!
//! [`Attention::forward_raw`] and [`Attention::backward_raw`] take device addresses ([`RawTensor`]) and a raw stream
//! handle. [`Engine::new`] retains the device's primary context, the one that the CUDA runtime, and so PyTorch, candle
//! and burn, work in; for any other context there is [`Engine::from_current_context`].
//!
//! # Errors
//!
//! Shapes, strides, alignment, overlap, the stream's context and the pointers' are checked before anything is
//! enqueued; after an error of these the outputs have their old bytes. With a driver library that is a stub or finds
//! no GPU, [`Engine::new`] returns [`Error::NoDriver`](crate::Error::NoDriver) or
//! [`Error::NoDevice`](crate::Error::NoDevice). With no driver library at all the process does not start: the feature
//! links against it.

mod attention;
mod driver;
mod embedded;
mod launch;
mod module;
mod self_test;
mod view;

use core::fmt;
use std::sync::Arc;

pub use attention::Attention;
/// The version of cust whose buffers and streams this crate takes.
pub use cust;
pub use module::LoadTime;
pub use self_test::{SelfTestReport, SelfTestResult};
pub use view::{DeviceElement, DeviceView, DeviceViewMut, RawTensor, download, upload};

use lightning_attention_kernels::variants::Arch;

use crate::plan::Device;
use crate::{Plan, Problem, Result};
use driver::{Context, Memory, TensorMapEncoder, from_cust};
use module::Modules;

/// One GPU with its loaded kernels. Cheap to clone, and usable from every thread.
#[derive(Clone, Debug)]
pub struct Engine {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    // Dropped in this order: modules live in the context.
    modules: Modules,
    context: Arc<Context>,
    device: Device,
    name: String,
    driver_version: (u32, u32),
    tensor_maps: Option<TensorMapEncoder>,
}

impl Engine {
    /// An engine on the `device_index`-th GPU, in its primary context, which becomes current on this thread.
    ///
    /// Loads no kernel yet.
    ///
    /// # Errors
    /// [`Error::NoDriver`](crate::Error::NoDriver), [`Error::NoDevice`](crate::Error::NoDevice),
    /// [`Error::Driver`](crate::Error::Driver). A device that is too old is reported by [`Engine::plan`].
    pub fn new(device_index: usize) -> Result<Self> {
        driver::init(device_index)?;
        let device = driver::device(device_index)?;
        Self::with_context(Context::primary(device)?, device)
    }

    /// An engine in the calling thread's current context.
    ///
    /// # Safety
    /// The context must outlive the engine, its clones and every [`Attention`] prepared by them.
    ///
    /// # Errors
    /// As [`Engine::new`]; [`Error::Driver`](crate::Error::Driver) when no context is current.
    pub unsafe fn from_current_context() -> Result<Self> {
        driver::init(0)?;
        // SAFETY: by this function's contract.
        let (context, device) = unsafe { Context::current()? };
        Self::with_context(context, device)
    }

    fn with_context(context: Context, device: cust::device::Device) -> Result<Self> {
        let context = Arc::new(context);
        let version = cust::CudaApiVersion::get().map_err(from_cust("cuDriverGetVersion"))?;
        let name = device.name().map_err(from_cust("cuDeviceGetName"))?;
        let device = driver::describe(device)?;
        Ok(Engine {
            shared: Arc::new(Shared {
                modules: Modules::new(context.clone(), device.compute_capability),
                context,
                device,
                name,
                driver_version: (version.major() as u32, version.minor() as u32),
                tensor_maps: TensorMapEncoder::find(),
            }),
        })
    }

    /// What the planner knows of the GPU.
    pub fn device(&self) -> Device {
        self.shared.device
    }

    /// The GPU's name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The CUDA version that the driver supports, major and minor.
    pub fn driver_version(&self) -> (u32, u32) {
        self.shared.driver_version
    }

    /// How long each kernel loaded so far took to load.
    pub fn load_times(&self) -> Vec<LoadTime> {
        self.shared.modules.load_times()
    }

    /// Makes the engine's context current on the calling thread, where cust's buffers and streams are then created.
    /// The engine's own calls need no current context.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn make_current(&self) -> Result<()> {
        self.shared.context.make_current()
    }

    /// Plans `problem` for this GPU; touches no device state.
    ///
    /// # Errors
    /// Those of [`Plan::new`].
    pub fn plan(&self, problem: &Problem) -> Result<Plan> {
        let plan = Plan::new(problem, self.shared.device)?;
        // A driver from before Hopper runs the portable kernels.
        Ok(if self.shared.tensor_maps.is_none() { plan.with_family(Arch::Sm80) } else { plan })
    }

    /// Plans `problem`, loads its kernels, uploads its slopes and allocates its workspace.
    ///
    /// # Errors
    /// Those of [`Plan::new`], [`Error::OutOfMemory`](crate::Error::OutOfMemory),
    /// [`Error::NoImage`](crate::Error::NoImage), [`Error::Driver`](crate::Error::Driver).
    pub fn prepare(&self, problem: &Problem) -> Result<Attention> {
        self.prepare_plan(self.plan(problem)?)
    }

    /// As [`Engine::prepare`], with a plan that the caller made or changed.
    ///
    /// # Errors
    /// As [`Engine::prepare`].
    pub fn prepare_plan(&self, plan: Plan) -> Result<Attention> {
        let workspace = Memory::new(&self.shared.context, "workspace", plan.workspace_bytes())?;
        let address = workspace.address();
        Attention::new(self.clone(), plan, address, Some(workspace))
    }

    /// As [`Engine::prepare_plan`], with `bytes` of the caller's device memory at `address` as the workspace. It needs
    /// [`Plan::workspace_bytes`] bytes, 16-byte aligned; its contents do not matter and are overwritten.
    ///
    /// # Safety
    /// The memory must stay allocated, and untouched by others while a pass runs, as long as the [`Attention`] is used.
    ///
    /// # Errors
    /// As [`Engine::prepare`]; [`Error::BufferTooShort`](crate::Error::BufferTooShort),
    /// [`Error::Alignment`](crate::Error::Alignment), [`Error::NotDeviceMemory`](crate::Error::NotDeviceMemory) and
    /// [`Error::WrongContext`](crate::Error::WrongContext) for `workspace`.
    pub unsafe fn prepare_with_workspace(&self, plan: Plan, address: u64, bytes: usize) -> Result<Attention> {
        let needed = plan.workspace_bytes();
        if needed > 0 {
            let argument = "workspace";
            if bytes < needed {
                return Err(crate::Error::BufferTooShort { argument, got: bytes, expected: needed });
            }
            if address == 0 || !address.is_multiple_of(16) {
                return Err(crate::Error::Alignment { argument, got: address, expected: 16 });
            }
            self.shared.context.with(|| self.shared.context.check_pointer(argument, address))?;
        }
        Attention::new(self.clone(), plan, address, None)
    }

    /// Compares this GPU's results on small problems with the CPU backend's.
    ///
    /// # Errors
    /// [`Error::SelfTest`](crate::Error::SelfTest) when they differ; those of [`Engine::prepare`].
    pub fn self_test(&self) -> Result<SelfTestReport> {
        self_test::run(self)
    }
}

const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<Engine>();
    is_send_and_sync::<Attention>();
};

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((major, minor), (cuda_major, cuda_minor)) = (self.device().compute_capability, self.driver_version());
        writeln!(
            f,
            "{}, compute capability {major}.{minor}, {} multiprocessors, driver for CUDA {cuda_major}.{cuda_minor}",
            self.name(),
            self.device().multiprocessors
        )?;
        for LoadTime { entry, time, machine_code } in self.load_times() {
            writeln!(f, "{entry}: {} loaded in {time:.2?}", if machine_code { "machine code" } else { "PTX" })?;
        }
        Ok(())
    }
}
