//! Tensors as they are passed in: a buffer, a shape `[batch, heads, seq_len, dim]` and strides.

use core::fmt;

use half::slice::HalfFloatSliceExt;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision, [`half::f16`].
    F16,
    /// bfloat16, [`half::bf16`].
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        })
    }
}

/// A Rust type that tensors are made of.
pub trait Element: Copy + Send + Sync + 'static {
    /// Its [`DType`].
    const DTYPE: DType;
    /// The value as f32 (exact).
    fn to_f32(self) -> f32;
    /// The nearest value of this type, ties to even.
    fn from_f32(x: f32) -> Self;
    /// [`Element::to_f32`] of a row; both slices have one length.
    fn widen(row: &[Self], out: &mut [f32]);
    /// [`Element::from_f32`] of a row; both slices have one length.
    fn narrow(row: &[f32], out: &mut [Self]);
}

macro_rules! element {
    ($ty:ty, $dtype:ident, $to:expr, $from:expr, $widen:expr, $narrow:expr) => {
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $from(x)
            }
            #[inline]
            fn widen(row: &[Self], out: &mut [f32]) {
                $widen(row, out)
            }
            #[inline]
            fn narrow(row: &[f32], out: &mut [Self]) {
                $narrow(out, row)
            }
        }
    };
}
element!(
    f32,
    F32,
    core::convert::identity,
    core::convert::identity,
    |row: &[f32], out: &mut [f32]| out.copy_from_slice(row),
    <[f32]>::copy_from_slice
);
element!(
    half::f16,
    F16,
    half::f16::to_f32,
    half::f16::from_f32,
    <[half::f16]>::convert_to_f32_slice,
    <[half::f16]>::convert_from_f32_slice
);
element!(
    half::bf16,
    Bf16,
    half::bf16::to_f32,
    half::bf16::from_f32,
    <[half::bf16]>::convert_to_f32_slice,
    <[half::bf16]>::convert_from_f32_slice
);

/// The two contiguous memory orders in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[batch, heads, seq_len, dim]`: the official kernels' order.
    Bhnd,
    /// `[batch, seq_len, heads, dim]`: what a projection of `[batch, seq_len, hidden]` yields.
    Bnhd,
}

/// Elements from one index to the next along batch, head and row; the stride within a row is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// Batch to batch.
    pub batch: usize,
    /// Head to head.
    pub head: usize,
    /// Row (token) to row.
    pub row: usize,
}

impl Strides {
    /// Strides of a contiguous tensor of logical shape `[batch, heads, seq_len, dim]` in the given memory order.
    pub const fn contiguous(shape: [usize; 4], layout: Layout) -> Self {
        let [_, heads, seq_len, dim] = shape;
        match layout {
            Layout::Bhnd => Strides { batch: heads * seq_len * dim, head: seq_len * dim, row: dim },
            Layout::Bnhd => Strides { batch: seq_len * heads * dim, head: dim, row: heads * dim },
        }
    }
}

/// Where a tensor lies, without its data: shape and strides.
///
/// The shape is always the logical `[batch, heads, seq_len, dim]`, whatever the memory order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// `[batch, heads, seq_len, dim]`.
    pub shape: [usize; 4],
    /// Strides in elements.
    pub strides: Strides,
}

impl Extent {
    /// A contiguous tensor.
    pub const fn contiguous(shape: [usize; 4], layout: Layout) -> Self {
        Extent { shape, strides: Strides::contiguous(shape, layout) }
    }

    /// Elements from the first to one past the last; `None` on overflow.
    pub fn span(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let [batch, heads, rows, dim] = self.shape;
        let steps = [(batch, self.strides.batch), (heads, self.strides.head), (rows, self.strides.row)];
        steps.iter().try_fold(dim, |span, &(len, stride)| span.checked_add((len - 1).checked_mul(stride)?))
    }
}

/// An input tensor in host memory.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    /// The elements; element `[b, h, n, d]` is at `b·batch + h·head + n·row + d`.
    pub data: &'a [T],
    /// Shape and strides.
    pub extent: Extent,
}

impl<'a, T> View<'a, T> {
    /// A contiguous tensor of logical shape `[batch, heads, seq_len, dim]`.
    pub fn contiguous(data: &'a [T], shape: [usize; 4], layout: Layout) -> Self {
        View { data, extent: Extent::contiguous(shape, layout) }
    }
}

/// An output tensor in host memory.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    /// The elements, as in [`View`].
    pub data: &'a mut [T],
    /// Shape and strides.
    pub extent: Extent,
}

impl<'a, T> ViewMut<'a, T> {
    /// A contiguous tensor of logical shape `[batch, heads, seq_len, dim]`.
    pub fn contiguous(data: &'a mut [T], shape: [usize; 4], layout: Layout) -> Self {
        ViewMut { data, extent: Extent::contiguous(shape, layout) }
    }
}

/// Tensors of the forward pass: `q, k: [B,H,N,D]`, `v, o: [B,H,N,E]`.
#[derive(Clone, Copy, Debug)]
pub struct Forward<I, O> {
    /// Queries, `[B,H,N,D]`.
    pub q: I,
    /// Keys, `[B,H,N,D]`.
    pub k: I,
    /// Values, `[B,H,N,E]`.
    pub v: I,
    /// Output, `[B,H,N,E]`.
    pub o: O,
}

/// Tensors of the backward pass: `q, k, dq, dk: [B,H,N,D]`, `v, do_, dv: [B,H,N,E]`.
#[derive(Clone, Copy, Debug)]
pub struct Backward<I, O> {
    /// Queries, `[B,H,N,D]`.
    pub q: I,
    /// Keys, `[B,H,N,D]`.
    pub k: I,
    /// Values, `[B,H,N,E]`.
    pub v: I,
    /// Gradient of the output, `[B,H,N,E]`.
    pub do_: I,
    /// Gradient of the queries, `[B,H,N,D]`.
    pub dq: O,
    /// Gradient of the keys, `[B,H,N,D]`.
    pub dk: O,
    /// Gradient of the values, `[B,H,N,E]`.
    pub dv: O,
}
