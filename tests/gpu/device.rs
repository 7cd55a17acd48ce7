//! The device under test, the adapter that puts it through the shared cases, and the record of errors.

use std::fs::OpenOptions;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use lightning_attention::cuda::cust::memory::{CopyDestination, DeviceBuffer};
use lightning_attention::cuda::{Attention, RawTensor};
use lightning_attention::{Backward, Element, Error, Extent, Forward, Plan, Precision, Problem, Result, View, ViewMut};
use lightning_attention_kernels::variants::Arch;

use crate::bench::gpu::Gpu;
use crate::bench::record::{commit, date};
use crate::common::Backend;

/// The device, or nothing where tests are to be skipped. Makes its context current on the test's thread.
pub fn device() -> Option<&'static Gpu> {
    static DEVICE: OnceLock<std::result::Result<Gpu, String>> = OnceLock::new();
    let open = || {
        Gpu::new(0).map_err(|error| match error.downcast_ref() {
            Some(Error::NoDriver { .. } | Error::NoDevice { .. }) => error.to_string(),
            _ => panic!("{error}"),
        })
    };
    match DEVICE.get_or_init(open) {
        Ok(gpu) => {
            gpu.engine.make_current().unwrap();
            Some(gpu)
        }
        Err(reason) => {
            crate::skip(reason);
            None
        }
    }
}

/// One test at a time on the device: copies on the null stream would break another thread's capture.
pub fn exclusive() -> MutexGuard<'static, ()> {
    static DEVICE: Mutex<()> = Mutex::new(());
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The CUDA backend on tensors in host memory, for the shared runner.
pub struct Cuda {
    pub gpu: &'static Gpu,
    pub pinned: Pinned,
}

/// The precision, and what of a plan is not left to the planner.
#[derive(Clone, Copy, Default)]
pub struct Pinned {
    pub precision: Precision,
    pub family: Option<Arch>,
    pub segments: Option<u32>,
    /// Sharers, and value columns of a slab.
    pub sharers: Option<(u32, u32)>,
    /// Whether dq, dk and dv come from one sweep.
    pub sweep: Option<bool>,
    /// Takes the checkpointed passes.
    pub checkpoints: bool,
}

impl Pinned {
    /// The plan, with what is pinned.
    pub fn pin(&self, mut plan: Plan) -> Plan {
        if let Some(family) = self.family {
            plan = plan.with_family(family);
        }
        if let Some(sweep) = self.sweep {
            plan = plan.with_sweep(sweep);
        }
        if self.checkpoints {
            plan = plan.with_checkpoints(true);
        }
        if let Some(segments) = self.segments {
            plan = plan.with_segments(segments, segments);
        }
        if let Some((sharers, value_tile)) = self.sharers {
            plan = plan.with_sharers(sharers, value_tile);
        }
        plan
    }
}

impl core::fmt::Display for Pinned {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.precision != Precision::default() {
            write!(f, " {}", self.precision)?;
        }
        if let Some(family) = self.family {
            write!(f, " {family:?}")?;
        }
        if let Some(sweep) = self.sweep {
            write!(f, " {}", if sweep { "one sweep" } else { "one kernel each" })?;
        }
        if self.checkpoints {
            write!(f, " from checkpoints")?;
        }
        if let Some(segments) = self.segments {
            write!(f, " in {segments} segments")?;
        }
        if let Some((sharers, value_tile)) = self.sharers {
            write!(f, " shared by {sharers} in slabs of {value_tile}")?;
        }
        Ok(())
    }
}

impl Cuda {
    /// Prepares with a workspace full of NaN.
    fn prepare(&self, problem: &Problem) -> Result<(Attention, [DeviceBuffer<u8>; 2])> {
        let plan = self.pinned.pin(self.gpu.engine.plan(problem)?);
        let bytes = plan.workspace_bytes();
        let [workspace, checkpoints] = [bytes, plan.checkpoint_bytes()]
            .map(|bytes| DeviceBuffer::from_slice(&vec![0xff_u8; bytes.max(1)]).unwrap());
        // SAFETY: the caller keeps the buffer as long as the attention.
        let attention =
            unsafe { self.gpu.engine.prepare_with_workspace(plan, workspace.as_device_ptr().as_raw(), bytes)? };
        Ok((attention, [workspace, checkpoints]))
    }

    /// # Safety
    /// As [`Attention::forward_raw`].
    unsafe fn enqueue_forward(
        &self,
        attention: &mut Attention,
        raw: Forward<RawTensor, RawTensor>,
        checkpoints: &DeviceBuffer<u8>,
    ) -> Result<()> {
        let stream = self.gpu.stream.as_inner();
        // SAFETY: the caller's contract; the checkpoints have the plan's size.
        unsafe {
            if self.pinned.checkpoints {
                attention.forward_checkpointed_raw(stream, raw, checkpoints.as_device_ptr().as_raw())
            } else {
                attention.forward_raw(stream, raw)
            }
        }
    }
}

impl Backend for Cuda {
    fn forward<T: Element>(&self, problem: &Problem, tensors: Forward<View<'_, T>, ViewMut<'_, T>>) -> Result<()> {
        let _exclusive = exclusive();
        let (mut attention, [_workspace, checkpoints]) = self.prepare(problem)?;
        let [q, k, v] = [tensors.q, tensors.k, tensors.v].map(|view| OnDevice::new(view.data, view.extent));
        let o = OnDevice::new(tensors.o.data, tensors.o.extent);
        let raw = Forward { q: q.raw, k: k.raw, v: v.raw, o: o.raw };
        // SAFETY: the buffers hold what the extents reach, and live until the stream has passed the work.
        unsafe { self.enqueue_forward(&mut attention, raw, &checkpoints)? };
        self.gpu.stream.synchronize().unwrap();
        o.download(tensors.o.data);
        Ok(())
    }

    fn backward<T: Element>(&self, problem: &Problem, tensors: Backward<View<'_, T>, ViewMut<'_, T>>) -> Result<()> {
        let _exclusive = exclusive();
        let (mut attention, [_workspace, checkpoints]) = self.prepare(problem)?;
        let Backward { q, k, v, do_, dq, dk, dv } = tensors;
        let do_data = do_.data;
        let [q, k, v, do_] = [q, k, v, do_].map(|view| OnDevice::new(view.data, view.extent));
        let outputs = [dq, dk, dv].map(|view| (OnDevice::new(view.data, view.extent), view.data));
        let [dq, dk, dv] = outputs.each_ref().map(|(output, _)| output.raw);
        let raw = Backward { q: q.raw, k: k.raw, v: v.raw, do_: do_.raw, dq, dk, dv };
        // SAFETY: as above.
        unsafe {
            if self.pinned.checkpoints {
                let o = OnDevice::new(&vec![T::from_f32(f32::NAN); do_data.len()], raw.do_.extent);
                let forward = Forward { q: raw.q, k: raw.k, v: raw.v, o: o.raw };
                self.enqueue_forward(&mut attention, forward, &checkpoints)?;
                let address = checkpoints.as_device_ptr().as_raw();
                attention.backward_checkpointed_raw(self.gpu.stream.as_inner(), raw, address)?;
                self.gpu.stream.synchronize().unwrap();
            } else {
                attention.backward_raw(self.gpu.stream.as_inner(), raw)?;
            }
        }
        self.gpu.stream.synchronize().unwrap();
        outputs.into_iter().for_each(|(output, host)| output.download(host));
        Ok(())
    }
}

/// A host buffer's copy, with guards around it that nobody may write.
struct OnDevice {
    buffer: DeviceBuffer<u8>,
    raw: RawTensor,
}

const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xa5;

impl OnDevice {
    fn new<T: Element>(data: &[T], extent: Extent) -> Self {
        let len = size_of_val(data);
        let mut bytes = vec![GUARD_BYTE; len + 2 * GUARD];
        // SAFETY: elements are plain numbers, without padding.
        let source = unsafe { core::slice::from_raw_parts(data.as_ptr().cast::<u8>(), len) };
        bytes[GUARD..GUARD + len].copy_from_slice(source);
        let buffer = DeviceBuffer::from_slice(&bytes).unwrap();
        let raw = RawTensor { ptr: buffer.as_device_ptr().as_raw() + GUARD as u64, dtype: T::DTYPE, extent };
        OnDevice { buffer, raw }
    }

    fn download<T: Element>(&self, data: &mut [T]) {
        let len = size_of_val(data);
        let mut bytes = vec![0; self.buffer.len()];
        self.buffer.copy_to(&mut bytes).unwrap();
        let guards = bytes[..GUARD].iter().chain(&bytes[GUARD + len..]);
        assert!(guards.copied().all(|byte| byte == GUARD_BYTE), "bytes outside the buffer were written");
        // SAFETY: any bits are an element, and the lengths agree.
        let target = unsafe { core::slice::from_raw_parts_mut(data.as_mut_ptr().cast::<u8>(), len) };
        target.copy_from_slice(&bytes[GUARD..GUARD + len]);
    }
}

/// Appends an error to the record, when one is asked for.
pub fn record(gpu: &Gpu, case: &str, output: &str, error: f64, bound: f64) {
    let Some(path) = std::env::var_os("LIGHTNING_ATTENTION_RECORD") else { return };
    let _exclusive = exclusive();
    let is_new = std::fs::metadata(&path).map_or(true, |meta| meta.len() == 0);
    let mut writer = csv::Writer::from_writer(OpenOptions::new().create(true).append(true).open(&path).unwrap());
    if is_new {
        writer.write_record(["date", "commit", "gpu", "driver", "case", "output", "error", "bound"]).unwrap();
    }
    let (error, bound) = (format!("{error:.3e}"), format!("{bound:.1e}"));
    let (device, driver) = (&gpu.machine.device, &gpu.machine.driver);
    writer.write_record([&date(), &commit(), device, driver, case, output, &error, &bound]).unwrap();
}
