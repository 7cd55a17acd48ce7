//! Output buffers that are NaN until somebody writes them, and whose gaps must keep their bytes.

use half::{bf16, f16};
use lightning_attention::{Element, Extent, View, ViewMut};

/// Elements before and after a tensor that nobody may touch; a multiple of 16 bytes.
const GUARD: usize = 16;

/// An element with a NaN to recognise.
pub trait Poison: Element + PartialEq + core::fmt::Debug {
    /// A NaN that no arithmetic yields.
    const POISON: Self;
    /// The bit pattern.
    fn bits(self) -> u32;
}

impl Poison for f32 {
    const POISON: Self = f32::from_bits(0x7fc5_a5a5);
    fn bits(self) -> u32 {
        self.to_bits()
    }
}
impl Poison for f16 {
    const POISON: Self = f16::from_bits(0x7ea5);
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}
impl Poison for bf16 {
    const POISON: Self = bf16::from_bits(0x7fe5);
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

/// A poisoned buffer with a tensor in it.
pub struct Output<T> {
    buffer: Vec<T>,
    extent: Extent,
}

impl<T: Poison> Output<T> {
    /// A buffer for `extent`, all poison.
    pub fn poisoned(extent: Extent) -> Self {
        let span = extent.span().expect("the tensor fits in memory");
        Output { buffer: vec![T::POISON; span + 2 * GUARD], extent }
    }

    /// The tensor, without the guards.
    pub fn view(&self) -> View<'_, T> {
        View { data: &self.buffer[GUARD..self.buffer.len() - GUARD], extent: self.extent }
    }

    /// The tensor, without the guards, to write.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        let end = self.buffer.len() - GUARD;
        ViewMut { data: &mut self.buffer[GUARD..end], extent: self.extent }
    }

    /// Whether no byte was written.
    pub fn is_untouched(&self) -> bool {
        self.buffer.iter().all(|x| x.bits() == T::POISON.bits())
    }

    /// The first element of the buffer, gaps included, whose bits differ.
    pub fn first_difference(&self, other: &Self) -> Option<usize> {
        assert_eq!(self.buffer.len(), other.buffer.len());
        self.buffer.iter().zip(&other.buffer).position(|(x, y)| x.bits() != y.bits())
    }

    /// # Panics
    /// When a byte outside the tensor's rows was written.
    pub fn assert_gaps_untouched(&self, what: &str) {
        let mut inside = vec![false; self.buffer.len()];
        for_each_row(&self.extent, |_, offset| inside[GUARD + offset..][..self.extent.shape[3]].fill(true));
        let touched = |&(x, inside): &(&T, bool)| !inside && x.bits() != T::POISON.bits();
        let count = self.buffer.iter().zip(inside.iter().copied()).filter(touched).count();
        let first = self.buffer.iter().zip(inside.iter().copied()).position(|x| touched(&x));
        assert!(count == 0, "{what}: {count} elements outside the rows were written, first at {first:?} - {GUARD}");
    }
}

/// Calls `f` with the index of each row, counted in `[B, H, N]`, and with its offset.
pub fn for_each_row(extent: &Extent, mut f: impl FnMut(usize, usize)) {
    let [batch, heads, seq_len, _] = extent.shape;
    for b in 0..batch {
        for h in 0..heads {
            for n in 0..seq_len {
                let offset = b * extent.strides.batch + h * extent.strides.head + n * extent.strides.row;
                f((b * heads + h) * seq_len + n, offset);
            }
        }
    }
}
