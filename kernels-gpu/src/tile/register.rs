//! Accumulators and the products that fill them.
//!
//! Lane `l` of a warp holds, of a 16×8 fragment, columns `2 (l % 4)` and `+1` of rows `l / 4` (values 0, 1) and
//! `l / 4 + 8` (values 2, 3), as `mma.m16n8k16` wants it.

use super::shared::{BlockAddress, unit_offset};
use super::unroll;
use crate::device::{ldmatrix_x4_trans, st_shared_b32};
use crate::element::Element;

/// 16 rows by 64 columns in f32, spread over a warp.
pub type Accumulator = [[f32; 4]; 8];

/// An accumulator of zeros.
pub const ZERO: Accumulator = [[0.0; 4]; 8];

/// B fragments of 16 rows (k) by 64 columns (n).
pub type RowFragments = [[u32; 4]; 4];

/// Rows `16 · step …` of an operand stored `[k, n]`, as B fragments of all its 64 columns.
///
/// # Safety
/// All lanes together; the 16 rows are initialised and visible to this warp.
#[inline(always)]
pub unsafe fn load_rows(address: BlockAddress, operand: u32, step: u32) -> RowFragments {
    let mut b = [[0; 4]; 4];
    unroll!(J in 4 {
        // SAFETY: the caller's contract.
        b[J] = unsafe { ldmatrix_x4_trans(address.at(operand, 16 * step, J as u32)) };
    });
    b
}

/// D += A B over one step of 16, all 64 columns.
#[inline(always)]
pub fn mm_ab<T: Element>(d: &mut Accumulator, a: [u32; 4], b: &RowFragments) {
    unroll!(J in 4 {
        T::mma(&mut d[2 * J], a, [b[J][0], b[J][1]]);
        T::mma(&mut d[2 * J + 1], a, [b[J][2], b[J][3]]);
    });
}

/// Multiplies every value by its row's factor.
#[inline(always)]
pub fn scale_rows(d: &mut Accumulator, factors: [f32; 2]) {
    unroll!(J in 8 {
        d[J][0] *= factors[0];
        d[J][1] *= factors[0];
        d[J][2] *= factors[1];
        d[J][3] *= factors[1];
    });
}

/// Stores an accumulator, rounded, to rows `row …` of a panel.
///
/// # Safety
/// The 16 rows are shared memory that only this warp uses until the next barrier.
#[inline(always)]
pub unsafe fn store_panel<T: Element>(panel: u32, row: u32, lane: u32, d: &Accumulator) {
    // SAFETY: the caller's contract.
    unsafe { store_pairs(panel, row, lane, d, |[lo, hi]| T::pack(lo, hi)) }
}

/// Stores what [`store_panel`] rounded off, in the same way.
///
/// # Safety
/// As [`store_panel`].
#[inline(always)]
pub unsafe fn store_panel_remainder<T: Element>(panel: u32, row: u32, lane: u32, d: &Accumulator) {
    // SAFETY: the caller's contract.
    unsafe { store_pairs(panel, row, lane, d, |pair| T::remainder(pair, T::pack(pair[0], pair[1]))) }
}

#[inline(always)]
unsafe fn store_pairs(panel: u32, row: u32, lane: u32, d: &Accumulator, pack: impl Fn([f32; 2]) -> u32) {
    let (row, col_bytes) = (row + lane / 4, (lane % 4) * 4);
    unroll!(J in 8 {
        // SAFETY: the caller's contract.
        unsafe {
            st_shared_b32(panel + unit_offset(row, J as u32) + col_bytes, pack([d[J][0], d[J][1]]));
            st_shared_b32(panel + unit_offset(row + 8, J as u32) + col_bytes, pack([d[J][2], d[J][3]]));
        }
    });
}
