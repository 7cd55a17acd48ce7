//! Rows of a tensor: safe slices of an input, and an output that several threads write by disjoint rows.

use core::marker::PhantomData;

use crate::problem::Region;
use crate::{DType, Element, Extent, Strides, View, ViewMut};

/// Where an output lies: what several threads share while each writes rows of its own.
///
/// A `&mut [T]` cannot be split by safe code when heads interleave (`[B, N, H, D]`, gaps between rows).
pub(super) struct OutputRows<'a, T> {
    data: *mut T,
    extent: Extent,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: the elements are borrowed exclusively for `'a`; the contract of `row` keeps threads on distinct rows.
unsafe impl<T: Send> Sync for OutputRows<'_, T> {}

impl<'a, T: Element> OutputRows<'a, T> {
    /// # Safety
    /// `view` has passed [`crate::Problem::check_forward`] or `check_backward`: every row lies in `view.data`, and
    /// distinct rows share no element.
    pub unsafe fn new(view: ViewMut<'a, T>) -> Self {
        OutputRows { data: view.data.as_mut_ptr(), extent: view.extent, lifetime: PhantomData }
    }

    /// Row `[batch, head, n]`.
    ///
    /// # Safety
    /// No other slice of the same row is alive.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row(&self, batch: usize, head: usize, n: usize) -> &mut [T] {
        let offset = offset(&self.extent, batch, head, n);
        // SAFETY: the offset is within the shape (asserted), hence within the buffer and away from other rows by
        // `new`'s contract; nobody else holds this row by this function's.
        unsafe { core::slice::from_raw_parts_mut(self.data.add(offset), self.extent.shape[3]) }
    }
}

/// Row `[batch, head, n]` of an input.
pub(super) fn row<'a, T>(view: &View<'a, T>, batch: usize, head: usize, n: usize) -> &'a [T] {
    &view.data[offset(&view.extent, batch, head, n)..][..view.extent.shape[3]]
}

fn offset(extent: &Extent, batch: usize, head: usize, n: usize) -> usize {
    let Extent { shape, strides: Strides { batch: batch_stride, head: head_stride, row: row_stride } } = *extent;
    assert!(batch < shape[0] && head < shape[1] && n < shape[2], "row [{batch}, {head}, {n}] of {shape:?}");
    batch * batch_stride + head * head_stride + n * row_stride
}

/// What validation looks at.
pub(super) fn region<T: Element>(data: &[T], extent: Extent) -> Region {
    const { assert!(T::DTYPE.size() == size_of::<T>(), "an element is as large as its type says") };
    let dtype: DType = T::DTYPE;
    Region { address: data.as_ptr().addr() as u64, len: Some(data.len()), dtype, extent }
}
