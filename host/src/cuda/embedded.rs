//! The kernels' machine code and PTX, compiled into the library.

use core::ffi::CStr;

/// A kernel as the driver loads it.
#[allow(dead_code)] // A build without kernels makes none.
pub(crate) enum Image {
    /// Machine code.
    Cubin(&'static [u8]),
    /// PTX.
    Ptx(&'static CStr),
}

/// The image of kernel `entry` for a device of that compute capability.
pub(crate) fn image(_entry: &str, _capability: (u32, u32)) -> Option<Image> {
    None
}
