//! Host memory that lies as a device allocation would.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use std::vec;
use std::vec::Vec;

/// A type whose every bit pattern is a value and that has no padding.
///
/// # Safety
/// Both must hold.
pub unsafe trait Element: Copy {}

macro_rules! elements {
    ($($ty:ty),*) => {
        // SAFETY: integers and floats, or wrappers of an integer.
        $(unsafe impl Element for $ty {})*
    };
}
elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::bf16, half::f16);

/// A slice that is 256-byte aligned, as `cudaMalloc` has it, and far from every other buffer, so that an overrun of
/// less than [`Buffer::GUARD_BYTES`] does not end in one.
pub struct Buffer<T: Element> {
    lines: Vec<Line>,
    len: usize,
    element: PhantomData<T>,
}

#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct Line([u8; 256]);

/// Behind the data; what lies before it is the guard of another buffer, or memory that is no buffer.
const GUARD_LINES: usize = 256;

impl<T: Element> Buffer<T> {
    /// Bytes between two buffers, at least.
    pub const GUARD_BYTES: usize = GUARD_LINES * size_of::<Line>();

    /// A copy of `data`.
    pub fn new(data: impl AsRef<[T]>) -> Self {
        let data = data.as_ref();
        let lines = vec![Line([0; 256]); size_of_val(data).div_ceil(size_of::<Line>()) + GUARD_LINES];
        let mut buffer = Self { lines, len: data.len(), element: PhantomData };
        buffer.copy_from_slice(data);
        buffer
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new` made room for `len` elements; they are aligned, and any bits are a value of `T`.
        unsafe { core::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `Line` takes any bits, too.
        unsafe { core::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
