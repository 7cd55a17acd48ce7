//! The one place where a kernel is launched.

use core::ffi::c_void;
use core::ptr;

use cust::sys::{self, CUstream};

use lightning_attention_kernels::abi::TensorMaps;

use super::driver;
use super::module::Kernel;
use crate::Result;
use crate::plan::Launch;

/// Enqueues `launch` on `stream`. Allocates nothing and waits for nothing, so that it can be captured in a graph.
///
/// # Safety
/// `kernel` must be the loaded kernel of `launch.variant`, `tensor_maps` those of `launch` where its kernel takes any, its context current and `stream` one of that context. Every
/// address in `launch.params` must reach memory of that context, as large as the shapes and strides there say, until the
/// kernel has run; what the kernel writes nothing else may touch meanwhile.
pub(super) unsafe fn launch(
    kernel: Kernel,
    launch: &Launch,
    mut tensor_maps: Option<TensorMaps>,
    stream: CUstream,
) -> Result<()> {
    debug_assert_eq!(kernel.variant, launch.variant);
    let [x, y, z] = launch.grid;
    let Launch { variant, params, .. } = launch;
    let params = ptr::from_ref(params).cast_mut().cast::<c_void>();
    let mut arguments = match &mut tensor_maps {
        None => [params, ptr::null_mut()],
        Some(maps) => [ptr::from_mut(maps).cast(), params],
    };
    // SAFETY: the kernel takes its tensor maps, if it has any, and `Params` by value, which the driver copies before it
    // returns; the rest is this function's contract.
    let code = unsafe {
        sys::cuLaunchKernel(
            kernel.function,
            x,
            y,
            z,
            variant.threads,
            1,
            1,
            variant.shared_bytes,
            stream,
            arguments.as_mut_ptr(),
            ptr::null_mut(),
        )
    };
    driver::check("cuLaunchKernel", code)
}
