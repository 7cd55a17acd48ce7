//! The driver calls of this backend: cust's where cust has one, cust_raw's where it lacks it; failures become [`Error`].

use core::ffi::{CStr, c_void};
use core::ptr;
use std::sync::Arc;

use cust::device::DeviceAttribute;
use cust::error::CudaError;
use cust::sys::{
    self, CUcontext, CUdeviceptr, CUfunction, CUfunction_attribute, CUpointer_attribute, CUresult, CUstream,
};

use lightning_attention_kernels::abi::{BOX_COLS, TensorMap, TensorMapSource};

use crate::plan::Device;
use crate::{DType, Error, Result};

/// `CU_MEMORYTYPE_DEVICE`.
const MEMORY_TYPE_DEVICE: u32 = 2;

/// Turns a driver's code into our error.
pub(super) fn check(call: &'static str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Error::Driver { call, name: name(code), code: code as u32 }),
    }
}

/// Turns cust's error into ours.
pub(super) fn from_cust(call: &'static str) -> impl Fn(CudaError) -> Error {
    move |error| Error::Driver { call, name: format!("{error:?}"), code: error as u32 }
}

fn name(code: CUresult) -> String {
    let mut text = ptr::null();
    // SAFETY: the driver writes a pointer to a static C string, or fails.
    let got = unsafe { sys::cuGetErrorName(code, &mut text) };
    if got != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{code:?}");
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Starts the driver; [`Error::NoDriver`] when there is none, [`Error::NoDevice`] when it sees no device.
pub(super) fn init(device_index: usize) -> Result<()> {
    // SAFETY: no preconditions; may be called any number of times.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(Error::NoDevice { got: device_index, count: 0 }),
        code => Err(Error::NoDriver { reason: format!("cuInit returned {} ({})", name(code), code as u32) }),
    }
}

/// The `index`-th device.
pub(super) fn device(index: usize) -> Result<cust::device::Device> {
    let count = cust::device::Device::num_devices().map_err(from_cust("cuDeviceGetCount"))? as usize;
    if index >= count {
        return Err(Error::NoDevice { got: index, count });
    }
    cust::device::Device::get_device(index as u32).map_err(from_cust("cuDeviceGet"))
}

/// What the planner asks of a device.
pub(super) fn describe(device: cust::device::Device) -> Result<Device> {
    let attribute =
        |which| device.get_attribute(which).map(|value| value as u32).map_err(from_cust("cuDeviceGetAttribute"));
    Ok(Device {
        compute_capability: (
            attribute(DeviceAttribute::ComputeCapabilityMajor)?,
            attribute(DeviceAttribute::ComputeCapabilityMinor)?,
        ),
        multiprocessors: attribute(DeviceAttribute::MultiprocessorCount)?,
        shared_bytes_per_multiprocessor: attribute(DeviceAttribute::MaxSharedMemoryPerMultiprocessor)?,
    })
}

/// A CUDA context this backend works in.
#[derive(Debug)]
pub(super) struct Context {
    raw: CUcontext,
    ordinal: i32,
    /// Keeps the primary context alive; `None` for a context that the caller keeps alive.
    _retained: Option<cust::context::Context>,
}

// SAFETY: a context handle may be used from any thread; the driver does its own locking.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of `device` and makes it current.
    pub(super) fn primary(device: cust::device::Device) -> Result<Self> {
        let context = cust::context::Context::new(device).map_err(from_cust("cuDevicePrimaryCtxRetain"))?;
        Ok(Context { raw: context.as_raw(), ordinal: device.as_raw(), _retained: Some(context) })
    }

    /// The calling thread's current context.
    ///
    /// # Safety
    /// It must outlive the value.
    pub(super) unsafe fn current() -> Result<(Self, cust::device::Device)> {
        let raw = current()?;
        if raw.is_null() {
            let name = "no context is current".to_string();
            return Err(Error::Driver { call: "cuCtxGetCurrent", name, code: 201 });
        }
        let device = cust::context::CurrentContext::get_device().map_err(from_cust("cuCtxGetDevice"))?;
        Ok((Context { raw, ordinal: device.as_raw(), _retained: None }, device))
    }

    /// Makes this context the calling thread's current one.
    pub(super) fn make_current(&self) -> Result<()> {
        // SAFETY: the context is alive as long as `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Runs `body` with this context current, and restores what was current before.
    pub(super) fn with<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        if current()? == self.raw {
            return body();
        }
        // SAFETY: the context is alive as long as `self`.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.raw) })?;
        let _pop = Pop;
        body()
    }

    /// Refuses a stream of another context. Must run inside [`Context::with`]: the null stream is the current context's.
    pub(super) fn check_stream(&self, stream: CUstream) -> Result<()> {
        let mut context = ptr::null_mut();
        // SAFETY: the caller vouches for the stream handle; the result is written to a local.
        check("cuStreamGetCtx", unsafe { sys::cuStreamGetCtx(stream, &mut context) })?;
        if context == self.raw { Ok(()) } else { Err(Error::WrongContext { argument: "stream" }) }
    }

    /// Refuses an address that is not device memory of this context.
    pub(super) fn check_pointer(&self, argument: &'static str, address: u64) -> Result<()> {
        let mut context: CUcontext = ptr::null_mut();
        let (mut memory_type, mut ordinal) = (0_u32, -2_i32);
        let mut attributes = [
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        ];
        let mut data =
            [(&raw mut context).cast::<c_void>(), (&raw mut memory_type).cast(), (&raw mut ordinal).cast::<c_void>()];
        // SAFETY: three attributes, three places of the documented types; any address is allowed, unknown ones leave
        // null values.
        let code = unsafe { sys::cuPointerGetAttributes(3, attributes.as_mut_ptr(), data.as_mut_ptr(), address) };
        check("cuPointerGetAttributes", code)?;
        if memory_type != MEMORY_TYPE_DEVICE {
            return Err(Error::NotDeviceMemory { argument, address });
        }
        // Memory of a pool or of the virtual memory calls belongs to a device, not to a context.
        let ours = if context.is_null() { ordinal == self.ordinal } else { context == self.raw };
        if ours { Ok(()) } else { Err(Error::WrongContext { argument }) }
    }
}

struct Pop;

impl Drop for Pop {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: pops what `Context::with` pushed.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut context) };
    }
}

fn current() -> Result<CUcontext> {
    let mut context = ptr::null_mut();
    // SAFETY: the result is written to a local.
    check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut context) })?;
    Ok(context)
}

/// Device memory owned by this backend, freed in its context from whatever thread drops it.
#[derive(Debug)]
pub(super) struct Memory {
    context: Arc<Context>,
    address: CUdeviceptr,
}

impl Memory {
    /// `bytes` uninitialised bytes; no allocation for 0.
    pub(super) fn new(context: &Arc<Context>, what: &'static str, bytes: usize) -> Result<Self> {
        let mut address = 0;
        if bytes > 0 {
            context.with(|| {
                // SAFETY: the result is written to a local.
                match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
                    CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(Error::OutOfMemory { what, bytes }),
                    code => check("cuMemAlloc", code),
                }
            })?;
        }
        Ok(Memory { context: context.clone(), address })
    }

    /// A copy of `values`, complete on the device for every stream when this returns.
    pub(super) fn of(context: &Arc<Context>, what: &'static str, values: &[f32]) -> Result<Self> {
        let memory = Memory::new(context, what, size_of_val(values))?;
        context.with(|| {
            // SAFETY: the allocation has the size of the slice.
            let code =
                unsafe { sys::cuMemcpyHtoD_v2(memory.address, values.as_ptr().cast::<c_void>(), size_of_val(values)) };
            check("cuMemcpyHtoD", code)?;
            // A copy from pageable memory may return before its last transfer, and only the null stream waits for it.
            // SAFETY: the null stream always exists.
            check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(ptr::null_mut()) })
        })?;
        Ok(memory)
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.address != 0 {
            // An error here is one of earlier work, which its stream reports.
            // SAFETY: allocated by `new` in this context and freed once; the driver waits for kernels that use it.
            let _ = self.context.with(|| check("cuMemFree", unsafe { sys::cuMemFree_v2(self.address) }));
        }
    }
}

/// Makes tensor maps for the copy engine, which cust_raw, being of CUDA 11.4, does not know.
#[derive(Clone, Copy)]
pub(super) struct TensorMapEncoder(EncodeTiled);

/// `cuTensorMapEncodeTiled`, as `cuda.h` 12.0 declares it.
type EncodeTiled = unsafe extern "C" fn(
    tensor_map: *mut TensorMap,
    data_type: u32,
    rank: u32,
    global_address: *mut c_void,
    global_dim: *const u64,
    global_strides: *const u64,
    box_dim: *const u32,
    element_strides: *const u32,
    interleave: u32,
    swizzle: u32,
    l2_promotion: u32,
    oob_fill: u32,
) -> CUresult;

impl core::fmt::Debug for TensorMapEncoder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("TensorMapEncoder")
    }
}

impl TensorMapEncoder {
    /// Asks the driver for its function; `None` where it is older than CUDA 12.0.
    pub(super) fn find() -> Option<Self> {
        let mut function = ptr::null_mut();
        // SAFETY: a C string, and a place for a pointer.
        let code = unsafe { sys::cuGetProcAddress(c"cuTensorMapEncodeTiled".as_ptr(), &raw mut function, 12_000, 0) };
        if code != CUresult::CUDA_SUCCESS || function.is_null() {
            return None;
        }
        // SAFETY: it is the function of that name and version.
        Some(TensorMapEncoder(unsafe { core::mem::transmute::<*mut c_void, EncodeTiled>(function) }))
    }

    /// A map of 16-bit elements in boxes of [`BOX_COLS`] columns, swizzled by 128 bytes, zero outside.
    pub(super) fn encode(self, source: &TensorMapSource, dtype: DType) -> Result<TensorMap> {
        /// `CU_TENSOR_MAP_SWIZZLE_128B`.
        const SWIZZLE_128B: u32 = 3;
        /// `CU_TENSOR_MAP_L2_PROMOTION_L2_256B`.
        const L2_256B: u32 = 3;
        // `CU_TENSOR_MAP_DATA_TYPE_…`
        let data_type = if dtype == DType::Bf16 { 9 } else { 6 };
        // The driver wants the map at a multiple of 64 bytes.
        #[repr(align(64))]
        struct Aligned(TensorMap);
        let mut map = Aligned(TensorMap::default());
        let dims = source.dims.map(u64::from);
        let (box_dims, element_strides) = ([BOX_COLS, source.box_rows, 1, 1], [1_u32; 4]);
        // SAFETY: rank 4: four dims, three strides, four box dims, four element strides; the address is not read.
        let code = unsafe {
            (self.0)(
                &raw mut map.0,
                data_type,
                4,
                source.address as *mut c_void,
                dims.as_ptr(),
                source.strides.as_ptr(),
                box_dims.as_ptr(),
                element_strides.as_ptr(),
                0,
                SWIZZLE_128B,
                L2_256B,
                0,
            )
        };
        check("cuTensorMapEncodeTiled", code)?;
        Ok(map.0)
    }
}

/// Lets `function` use `bytes` of dynamic shared memory.
///
/// # Safety
/// `function` must belong to a loaded module.
pub(super) unsafe fn set_max_shared_bytes(function: CUfunction, bytes: u32) -> Result<()> {
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: by this function's contract.
    check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, attribute, bytes as i32) })
}
