//! Tensors in device memory.

use core::marker::PhantomData;

use cust::error::CudaError;
use cust::memory::{CopyDestination, DeviceBuffer, DeviceCopy, DeviceSlice};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

use super::driver::from_cust;
use crate::problem::Region;
use crate::{DType, Element, Error, Extent, Layout, Result};

/// An element type with its stand-in in cust's buffers. cust knows an older `half` only, so 16-bit floats are kept as
/// their bits, `u16`.
pub trait DeviceElement: Element {
    /// What cust's buffers hold.
    type Storage: DeviceCopy + Default;
    /// The bits of host values.
    fn to_storage(values: &[Self]) -> &[Self::Storage];
    /// Host values from their bits.
    fn from_storage(storage: Vec<Self::Storage>) -> Vec<Self>;
}

impl DeviceElement for f32 {
    type Storage = f32;
    fn to_storage(values: &[Self]) -> &[f32] {
        values
    }
    fn from_storage(storage: Vec<f32>) -> Vec<Self> {
        storage
    }
}

macro_rules! sixteen_bit {
    ($($ty:ty),*) => {$(
        impl DeviceElement for $ty {
            type Storage = u16;
            fn to_storage(values: &[Self]) -> &[u16] {
                values.reinterpret_cast()
            }
            fn from_storage(storage: Vec<u16>) -> Vec<Self> {
                storage.reinterpret_into()
            }
        }
    )*};
}
sixteen_bit!(bf16, f16);

/// Copies `values` into a new device buffer of the current context.
///
/// # Errors
/// [`Error::OutOfMemory`]; [`Error::Driver`] when no context is current or work enqueued before failed.
pub fn upload<T: DeviceElement>(values: &[T]) -> Result<DeviceBuffer<T::Storage>> {
    DeviceBuffer::from_slice(T::to_storage(values)).map_err(|error| match error {
        CudaError::OutOfMemory => Error::OutOfMemory { what: "buffer", bytes: size_of_val(values) },
        error => from_cust("cuMemcpyHtoD")(error),
    })
}

/// Copies a device buffer back. Waits for the work enqueued on cust's streams before.
///
/// # Errors
/// [`Error::Driver`] when the copy, or work enqueued before it, failed.
pub fn download<T: DeviceElement>(buffer: &DeviceBuffer<T::Storage>) -> Result<Vec<T>> {
    let mut storage = vec![T::Storage::default(); buffer.len()];
    if !storage.is_empty() {
        buffer.copy_to(&mut storage).map_err(from_cust("cuMemcpyDtoH"))?;
    }
    Ok(T::from_storage(storage))
}

/// An input tensor in device memory.
///
/// The safe constructors borrow a [`DeviceBuffer`]: cust's [`DeviceSlice`] is `Copy` and may outlive its memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a, T> {
    pub(super) region: Region,
    buffer: PhantomData<&'a [T]>,
}

impl<'a, T: DeviceElement> DeviceView<'a, T> {
    /// The tensor of that extent whose element `[0, 0, 0, 0]` is `buffer[offset]`.
    ///
    /// Whether it fits is checked where the view is used.
    pub fn new(buffer: &'a DeviceBuffer<T::Storage>, offset: usize, extent: Extent) -> Self {
        DeviceView { region: region::<T>(buffer, offset, extent), buffer: PhantomData }
    }

    /// A contiguous tensor of logical shape `[batch, heads, seq_len, dim]` at the start of `buffer`.
    pub fn contiguous(buffer: &'a DeviceBuffer<T::Storage>, shape: [usize; 4], layout: Layout) -> Self {
        Self::new(buffer, 0, Extent::contiguous(shape, layout))
    }

    /// As [`DeviceView::new`], on a slice.
    ///
    /// # Safety
    /// The memory behind `slice` must stay allocated for `'a`.
    pub unsafe fn from_slice(slice: &DeviceSlice<T::Storage>, offset: usize, extent: Extent) -> Self {
        DeviceView { region: region::<T>(slice, offset, extent), buffer: PhantomData }
    }
}

/// An output tensor in device memory; see [`DeviceView`].
#[derive(Debug)]
pub struct DeviceViewMut<'a, T> {
    pub(super) region: Region,
    buffer: PhantomData<&'a mut [T]>,
}

impl<'a, T: DeviceElement> DeviceViewMut<'a, T> {
    /// The tensor of that extent whose element `[0, 0, 0, 0]` is `buffer[offset]`.
    pub fn new(buffer: &'a mut DeviceBuffer<T::Storage>, offset: usize, extent: Extent) -> Self {
        DeviceViewMut { region: region::<T>(buffer, offset, extent), buffer: PhantomData }
    }

    /// A contiguous tensor of logical shape `[batch, heads, seq_len, dim]` at the start of `buffer`.
    pub fn contiguous(buffer: &'a mut DeviceBuffer<T::Storage>, shape: [usize; 4], layout: Layout) -> Self {
        Self::new(buffer, 0, Extent::contiguous(shape, layout))
    }

    /// As [`DeviceViewMut::new`], on a slice; several outputs may lie interleaved in one buffer this way.
    ///
    /// # Safety
    /// The memory behind `slice` must stay allocated for `'a`, and for that long nothing else may touch the elements
    /// that the extent reaches.
    pub unsafe fn from_slice(slice: &DeviceSlice<T::Storage>, offset: usize, extent: Extent) -> Self {
        DeviceViewMut { region: region::<T>(slice, offset, extent), buffer: PhantomData }
    }
}

fn region<T: DeviceElement>(slice: &DeviceSlice<T::Storage>, offset: usize, extent: Extent) -> Region {
    let bytes = (offset as u64).wrapping_mul(size_of::<T>() as u64);
    Region {
        address: slice.as_device_ptr().as_raw().wrapping_add(bytes),
        len: Some(slice.len().saturating_sub(offset)),
        dtype: T::DTYPE,
        extent,
    }
}

/// A tensor given by its address alone, for memory of other libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawTensor {
    /// Device address of element `[0, 0, 0, 0]`.
    pub ptr: u64,
    /// Element type.
    pub dtype: DType,
    /// Shape and strides.
    pub extent: Extent,
}

impl RawTensor {
    pub(super) fn region(&self) -> Region {
        Region { address: self.ptr, len: None, dtype: self.dtype, extent: self.extent }
    }
}

#[cfg(test)]
mod tests {
    use cust::memory::DevicePointer;

    use super::*;

    #[test]
    fn offsets_count_elements_and_end_with_the_buffer() {
        // SAFETY: an address and a length, which nobody follows.
        let slice = unsafe { DeviceSlice::from_raw_parts(DevicePointer::from_raw(0x1000), 100) };
        let extent = Extent::contiguous([1, 1, 1, 8], Layout::Bhnd);
        let at = |offset| region::<bf16>(&slice, offset, extent);
        assert_eq!((at(0).address, at(0).len), (0x1000, Some(100)));
        assert_eq!((at(24).address, at(24).len), (0x1030, Some(76)));
        assert_eq!(at(101).len, Some(0));
    }

    #[test]
    fn storage_keeps_the_bits() {
        let values = [f16::ONE, f16::from_bits(0x7e01)];
        assert_eq!(f16::to_storage(&values), [0x3c00, 0x7e01]);
        assert_eq!(f16::from_storage(vec![0x3c00]), [f16::ONE]);
    }
}
