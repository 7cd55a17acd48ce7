use core::fmt;

use cust::memory::DeviceBuffer;
use cust::stream::Stream;
use cust::sys::{self, CUstream};
use lightning_attention_kernels::abi::{TensorMap, TensorMapSource, TensorMaps};

use super::driver::{self, Memory, TensorMapEncoder};
use super::launch::launch;
use super::module::Kernel;
use super::view::{DeviceElement, DeviceView, DeviceViewMut, RawTensor};
use super::{Engine, LoadTime};
use crate::plan::{Auxiliary, Launch, Launches, ROW_ALIGNMENT};
use crate::problem::Region;
use crate::{Backward, DType, Error, Extent, Forward, Layout, Plan, Problem, Result};

/// A problem made ready on a GPU: kernels loaded, slopes and workspace in device memory. Runs any number of passes.
///
/// May be moved to another thread. Its workspace serves one pass at a time; see the [module](super) for what that asks
/// of a caller who does not wait.
#[derive(Debug)]
pub struct Attention {
    plan: Plan,
    kernels: Vec<Kernel>,
    auxiliary: Auxiliary,
    check_pointers: bool,
    tensor_maps: MapCache,
    // Fields drop in this order: memory before the engine that may be its context's last owner.
    _slopes: Memory,
    _workspace: Option<Memory>,
    engine: Engine,
}

impl Attention {
    pub(super) fn new(engine: Engine, plan: Plan, workspace: u64, owned: Option<Memory>) -> Result<Self> {
        let slopes = Memory::of(&engine.shared.context, "slopes", &plan.problem().validate()?)?;
        let kernels =
            plan.variants().into_iter().map(|v| engine.shared.modules.kernel(v)).collect::<Result<Vec<Kernel>>>()?;
        let auxiliary = Auxiliary { slopes: slopes.address(), workspace, checkpoints: 0 };
        let tensor_maps = MapCache::new(engine.shared.tensor_maps, plan.problem().dtype);
        Ok(Attention {
            plan,
            kernels,
            auxiliary,
            check_pointers: true,
            tensor_maps,
            _slopes: slopes,
            _workspace: owned,
            engine,
        })
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        self.plan.problem()
    }

    /// How it is run.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The engine that prepared this.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Whether [`Attention::forward_raw`] and [`Attention::backward_raw`] ask the driver what their pointers are, which
    /// costs some hundred nanoseconds for each tensor. On at first; the typed calls always ask.
    pub fn check_raw_pointers(&mut self, check: bool) {
        self.check_pointers = check;
    }

    /// Runs the forward pass on `stream` and waits for the stream.
    ///
    /// # Errors
    /// Those of [`Problem::check_forward`] with rows aligned to 16 bytes;
    /// [`Error::WrongContext`](crate::Error::WrongContext), [`Error::NotDeviceMemory`](crate::Error::NotDeviceMemory);
    /// [`Error::Driver`](crate::Error::Driver) when the launch, or work enqueued before it, failed.
    pub fn forward_blocking<T: DeviceElement>(
        &mut self,
        stream: &Stream,
        tensors: Forward<DeviceView<'_, T>, DeviceViewMut<'_, T>>,
    ) -> Result<()> {
        // SAFETY: the views borrow their buffers until the stream has passed the work.
        let enqueued = unsafe { self.forward(stream, tensors) };
        self.wait(stream, enqueued)
    }

    /// Runs the backward pass on `stream` and waits for the stream.
    ///
    /// # Errors
    /// As [`Attention::forward_blocking`], with [`Problem::check_backward`].
    pub fn backward_blocking<T: DeviceElement>(
        &mut self,
        stream: &Stream,
        tensors: Backward<DeviceView<'_, T>, DeviceViewMut<'_, T>>,
    ) -> Result<()> {
        // SAFETY: the views borrow their buffers until the stream has passed the work.
        let enqueued = unsafe { self.backward(stream, tensors) };
        self.wait(stream, enqueued)
    }

    /// Enqueues the forward pass on `stream`.
    ///
    /// # Safety
    /// Until the stream has passed the work, the buffers must stay allocated, nothing else may write the inputs or touch
    /// the output, `self` must live, and it may be enqueued on other streams only in an order that events enforce.
    ///
    /// # Errors
    /// As [`Attention::forward_blocking`], except for failures of the kernels themselves.
    pub unsafe fn forward<T: DeviceElement>(
        &mut self,
        stream: &Stream,
        tensors: Forward<DeviceView<'_, T>, DeviceViewMut<'_, T>>,
    ) -> Result<()> {
        let regions = forward_views(tensors);
        // SAFETY: by this function's contract.
        unsafe { self.forward_regions(stream.as_inner(), regions, None, true) }
    }

    /// Enqueues the backward pass on `stream`.
    ///
    /// # Safety
    /// As [`Attention::forward`].
    ///
    /// # Errors
    /// As [`Attention::backward_blocking`], except for failures of the kernels themselves.
    pub unsafe fn backward<T: DeviceElement>(
        &mut self,
        stream: &Stream,
        tensors: Backward<DeviceView<'_, T>, DeviceViewMut<'_, T>>,
    ) -> Result<()> {
        let regions = backward_views(tensors);
        // SAFETY: by this function's contract.
        unsafe { self.backward_regions(stream.as_inner(), regions, None, true) }
    }

    /// As [`Attention::forward_blocking`], storing checkpoints for [`Attention::backward_checkpointed_blocking`]. The buffer holds at
    /// least [`Plan::checkpoint_bytes`] bytes; where that is 0 it is not used, and the pass is the plain one.
    ///
    /// # Errors
    /// As [`Attention::forward_blocking`], and those of [`Plan::check_checkpoints`].
    pub fn forward_checkpointed_blocking<T: DeviceElement>(
        &mut self,
        stream: &Stream,
        tensors: Forward<DeviceView<'_, T>, DeviceViewMut<'_, T>>,
        checkpoints: &mut DeviceBuffer<T::Storage>,
    ) -> Result<()> {
        // SAFETY: the views and the buffer are borrowed until the stream has passed the work.
        let enqueued = unsafe { self.forward_checkpointed(stream, tensors, checkpoints) };
        self.wait(stream, enqueued)
    }

    /// As [`Attention::backward_blocking`], from the checkpoints that [`Attention::forward_checkpointed_blocking`] has stored for the
    /// same q, k and v, with the same plan.
    ///
    /// # Errors
    /// As [`Attention::backward_blocking`], and those of [`Plan::check_checkpoints`].
    pub fn backward_checkpointed_blocking<T: DeviceElement>(
        &mut self,
        stream: &Stream,
        tensors: Backward<DeviceView<'_, T>, DeviceViewMut<'_, T>>,
        checkpoints: &DeviceBuffer<T::Storage>,
    ) -> Result<()> {
        // SAFETY: the views and the buffer are borrowed until the stream has passed the work.
        let enqueued = unsafe { self.backward_checkpointed(stream, tensors, checkpoints) };
        self.wait(stream, enqueued)
    }

    /// Enqueues what [`Attention::forward_checkpointed_blocking`] waits for.
    ///
    /// # Safety
    /// As [`Attention::forward`], for the checkpoints too.
    ///
    /// # Errors
    /// As [`Attention::forward_checkpointed_blocking`], except for failures of the kernels themselves.
    pub unsafe fn forward_checkpointed<T: DeviceElement>(
        &mut self,
        stream: &Stream,
        tensors: Forward<DeviceView<'_, T>, DeviceViewMut<'_, T>>,
        checkpoints: &mut DeviceBuffer<T::Storage>,
    ) -> Result<()> {
        let checkpoints = self.checkpoint_region::<T>(checkpoints);
        // SAFETY: by this function's contract.
        unsafe { self.forward_regions(stream.as_inner(), forward_views(tensors), Some(checkpoints), true) }
    }

    /// Enqueues what [`Attention::backward_checkpointed_blocking`] waits for.
    ///
    /// # Safety
    /// As [`Attention::backward`], for the checkpoints too.
    ///
    /// # Errors
    /// As [`Attention::backward_checkpointed_blocking`], except for failures of the kernels themselves.
    pub unsafe fn backward_checkpointed<T: DeviceElement>(
        &mut self,
        stream: &Stream,
        tensors: Backward<DeviceView<'_, T>, DeviceViewMut<'_, T>>,
        checkpoints: &DeviceBuffer<T::Storage>,
    ) -> Result<()> {
        let checkpoints = self.checkpoint_region::<T>(checkpoints);
        // SAFETY: by this function's contract.
        unsafe { self.backward_regions(stream.as_inner(), backward_views(tensors), Some(checkpoints), true) }
    }

    /// Enqueues the forward pass on a raw stream (null: the legacy default stream), on tensors given by address.
    ///
    /// # Safety
    /// As [`Attention::forward`]; besides, `stream` must be a live stream, and every address must be that of memory as
    /// large as its extent reaches.
    ///
    /// # Errors
    /// As [`Attention::forward`]; with [`Attention::check_raw_pointers`] off, pointers are checked for null and
    /// alignment only.
    pub unsafe fn forward_raw(&mut self, stream: CUstream, tensors: Forward<RawTensor, RawTensor>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.forward_regions(stream, raw_forward(tensors), None, self.check_pointers) }
    }

    /// As [`Attention::forward_raw`], storing checkpoints at a device address; see
    /// [`Attention::forward_checkpointed_blocking`].
    ///
    /// # Safety
    /// As [`Attention::forward_raw`]; `checkpoints` must be that of [`Plan::checkpoint_bytes`] bytes.
    ///
    /// # Errors
    /// As [`Attention::forward_raw`], and those of [`Plan::check_checkpoints`].
    pub unsafe fn forward_checkpointed_raw(
        &mut self,
        stream: CUstream,
        tensors: Forward<RawTensor, RawTensor>,
        checkpoints: u64,
    ) -> Result<()> {
        let checkpoints = self.raw_checkpoint_region(checkpoints);
        // SAFETY: by this function's contract.
        unsafe { self.forward_regions(stream, raw_forward(tensors), Some(checkpoints), self.check_pointers) }
    }

    /// Enqueues the backward pass on a raw stream, on tensors given by address.
    ///
    /// # Safety
    /// As [`Attention::forward_raw`].
    ///
    /// # Errors
    /// As [`Attention::forward_raw`].
    pub unsafe fn backward_raw(&mut self, stream: CUstream, tensors: Backward<RawTensor, RawTensor>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.backward_regions(stream, raw_backward(tensors), None, self.check_pointers) }
    }

    /// As [`Attention::backward_raw`], from the checkpoints at a device address; see
    /// [`Attention::backward_checkpointed_blocking`].
    ///
    /// # Safety
    /// As [`Attention::forward_checkpointed_raw`].
    ///
    /// # Errors
    /// As [`Attention::forward_checkpointed_raw`].
    pub unsafe fn backward_checkpointed_raw(
        &mut self,
        stream: CUstream,
        tensors: Backward<RawTensor, RawTensor>,
        checkpoints: u64,
    ) -> Result<()> {
        let checkpoints = self.raw_checkpoint_region(checkpoints);
        // SAFETY: by this function's contract.
        unsafe { self.backward_regions(stream, raw_backward(tensors), Some(checkpoints), self.check_pointers) }
    }

    fn checkpoint_region<T: DeviceElement>(&self, checkpoints: &DeviceBuffer<T::Storage>) -> Region {
        let (address, len) = (checkpoints.as_device_ptr().as_raw(), Some(checkpoints.len()));
        Region { len, dtype: T::DTYPE, ..self.raw_checkpoint_region(address) }
    }

    fn raw_checkpoint_region(&self, address: u64) -> Region {
        let extent = Extent::contiguous(self.plan.checkpoint_shape(), Layout::Bhnd);
        Region { address, len: None, dtype: self.plan.problem().dtype, extent }
    }

    unsafe fn forward_regions(
        &mut self,
        stream: CUstream,
        t: Forward<Region, Region>,
        checkpoints: Option<Region>,
        check_pointers: bool,
    ) -> Result<()> {
        self.problem().check_forward(&t, ROW_ALIGNMENT)?;
        let regions = [("q", t.q), ("k", t.k), ("v", t.v), ("o", t.o)];
        let launches = match checkpoints {
            None => self.plan.forward_launches(&t, self.auxiliary),
            Some(checkpoints) => {
                self.plan.check_checkpoints(&checkpoints, &regions, true)?;
                let auxiliary = Auxiliary { checkpoints: checkpoints.address, ..self.auxiliary };
                self.plan.checkpointed_forward_launches(&t, auxiliary)
            }
        };
        // SAFETY: the launches were made from checked regions; the rest is the caller's contract.
        unsafe { self.enqueue(stream, &launches, &regions, checkpoints, check_pointers) }
    }

    unsafe fn backward_regions(
        &mut self,
        stream: CUstream,
        t: Backward<Region, Region>,
        checkpoints: Option<Region>,
        check_pointers: bool,
    ) -> Result<()> {
        self.problem().check_backward(&t, ROW_ALIGNMENT)?;
        let regions = [("q", t.q), ("k", t.k), ("v", t.v), ("do_", t.do_), ("dq", t.dq), ("dk", t.dk), ("dv", t.dv)];
        let launches = match checkpoints {
            None => self.plan.backward_launches(&t, self.auxiliary),
            Some(checkpoints) => {
                self.plan.check_checkpoints(&checkpoints, &regions[4..], false)?;
                let auxiliary = Auxiliary { checkpoints: checkpoints.address, ..self.auxiliary };
                self.plan.checkpointed_backward_launches(&t, auxiliary)
            }
        };
        // SAFETY: the launches were made from checked regions; the rest is the caller's contract.
        unsafe { self.enqueue(stream, &launches, &regions, checkpoints, check_pointers) }
    }

    /// # Safety
    /// That of [`launch`] for each of `launches`.
    unsafe fn enqueue(
        &mut self,
        stream: CUstream,
        launches: &Launches,
        regions: &[(&'static str, Region)],
        checkpoints: Option<Region>,
        check_pointers: bool,
    ) -> Result<()> {
        if launches.iter().next().is_none() {
            return Ok(());
        }
        let Attention { kernels, tensor_maps, engine, .. } = self;
        let context = &engine.shared.context;
        context.with(|| {
            context.check_stream(stream)?;
            if check_pointers {
                for &(argument, region) in regions {
                    context.check_pointer(argument, region.address)?;
                }
                if let Some(region) = checkpoints.filter(|region| region.extent.shape[3] > 0) {
                    context.check_pointer("checkpoints", region.address)?;
                }
            }
            for next in launches.iter() {
                let kernel = kernels.iter().find(|kernel| kernel.variant.entry == next.variant.entry);
                let kernel = kernel.expect("`Plan::variants` names every kernel of a plan's launches");
                let tensor_maps = tensor_maps.of(next)?;
                // SAFETY: the context is current and the stream is its own; the rest is this function's contract.
                unsafe { launch(*kernel, next, tensor_maps, stream)? };
            }
            Ok(())
        })
    }

    /// Waits even after an error: a launch before the one that failed may still run.
    fn wait(&self, stream: &Stream, enqueued: Result<()>) -> Result<()> {
        let context = &self.engine.shared.context;
        // SAFETY: the stream is alive, it is borrowed.
        let synchronize = || unsafe { sys::cuStreamSynchronize(stream.as_inner()) };
        let waited = context.with(|| driver::check("cuStreamSynchronize", synchronize()));
        enqueued.and(waited)
    }
}

fn forward_views<T>(tensors: Forward<DeviceView<'_, T>, DeviceViewMut<'_, T>>) -> Forward<Region, Region> {
    let Forward { q, k, v, o } = tensors;
    Forward { q: q.region, k: k.region, v: v.region, o: o.region }
}

fn backward_views<T>(tensors: Backward<DeviceView<'_, T>, DeviceViewMut<'_, T>>) -> Backward<Region, Region> {
    let Backward { q, k, v, do_, dq, dk, dv } = tensors;
    Backward { q: q.region, k: k.region, v: v.region, do_: do_.region, dq: dq.region, dk: dk.region, dv: dv.region }
}

fn raw_forward(tensors: Forward<RawTensor, RawTensor>) -> Forward<Region, Region> {
    let Forward { q, k, v, o } = tensors;
    Forward { q: q.region(), k: k.region(), v: v.region(), o: o.region() }
}

fn raw_backward(tensors: Backward<RawTensor, RawTensor>) -> Backward<Region, Region> {
    let Backward { q, k, v, do_, dq, dk, dv } = tensors;
    Backward {
        q: q.region(),
        k: k.region(),
        v: v.region(),
        do_: do_.region(),
        dq: dq.region(),
        dk: dk.region(),
        dv: dv.region(),
    }
}

/// Tensor maps already made: callers pass the same tensors again and again, and a pass uses most of them several times.
#[derive(Debug)]
struct MapCache {
    encoder: Option<TensorMapEncoder>,
    dtype: DType,
    made: Vec<(TensorMapSource, TensorMap)>,
    oldest: usize,
}

impl MapCache {
    /// Those of a forward and a backward pass, twice over.
    const CAPACITY: usize = 48;

    fn new(encoder: Option<TensorMapEncoder>, dtype: DType) -> Self {
        MapCache { encoder, dtype, made: Vec::with_capacity(Self::CAPACITY), oldest: 0 }
    }

    /// The tensor maps of a launch whose kernel takes them.
    fn of(&mut self, launch: &Launch) -> Result<Option<TensorMaps>> {
        let sources = launch.tensor_maps();
        if sources.is_empty() {
            return Ok(None);
        }
        let mut maps = TensorMaps::default();
        for (map, source) in maps.0.iter_mut().zip(sources) {
            *map = self.get(source)?;
        }
        Ok(Some(maps))
    }

    fn get(&mut self, source: &TensorMapSource) -> Result<TensorMap> {
        if let Some((_, map)) = self.made.iter().find(|(made, _)| made == source) {
            return Ok(*map);
        }
        let Some(encoder) = self.encoder else {
            let name = "this driver makes no tensor maps; pin the portable kernels".to_string();
            return Err(Error::Driver { call: "cuGetProcAddress", name, code: 500 });
        };
        let map = encoder.encode(source, self.dtype)?;
        if self.made.len() < Self::CAPACITY {
            self.made.push((*source, map));
        } else {
            self.made[self.oldest] = (*source, map);
            self.oldest = (self.oldest + 1) % Self::CAPACITY;
        }
        Ok(map)
    }
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.plan)?;
        for LoadTime { entry, time, .. } in self.engine.load_times() {
            if self.kernels.iter().any(|kernel| kernel.variant.entry == entry) {
                writeln!(f, "{entry}: loaded in {time:.2?}")?;
            }
        }
        Ok(())
    }
}
