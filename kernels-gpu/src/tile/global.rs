//! Rows of a tensor in global memory: 64-bit strides, zero fill past the valid rows and columns.

use super::shared::{PANEL_BYTES, ROW_BYTES, unit_offset};
use super::unroll;
use crate::abi::Rows;
use crate::device::{cp_async_cg_16, ld_shared_b32x4, st_global_b32x4};
use crate::kernels::THREADS;

/// Bytes of an element.
const ELEMENT: i64 = 2;

/// Address of a row of one sequence.
#[derive(Clone, Copy)]
pub struct RowPointer {
    row: *mut u8,
    stride: i64,
}

impl RowPointer {
    /// Row `row` of sequence (`batch`, `head`), at column `col`.
    #[inline(always)]
    pub fn new(rows: &Rows, batch: u32, head: u32, row: u32, col: u32) -> Self {
        let offset = batch as i64 * rows.batch_stride
            + head as i64 * rows.head_stride
            + row as i64 * rows.row_stride
            + col as i64;
        RowPointer {
            row: (rows.ptr as *mut u8).wrapping_offset((offset * ELEMENT) as isize),
            stride: rows.row_stride * ELEMENT,
        }
    }

    /// The pointer `rows` rows on.
    #[inline(always)]
    pub fn advance(self, rows: u32) -> Self {
        RowPointer { row: self.row.wrapping_offset((rows as i64 * self.stride) as isize), ..self }
    }
}

/// This thread's share of copying `[64, COLS]` operands to shared memory, 16 bytes at a time.
#[derive(Clone, Copy)]
pub struct Copier<const COLS: u32> {
    source: RowPointer,
    row: u32,
    destination: u32,
    /// 16 where this thread's columns exist, else 0.
    bytes: u32,
}

impl<const COLS: u32> Copier<COLS> {
    const UNITS: u32 = COLS / 8;
    /// Rows all threads copy at once; a multiple of 8, so that the swizzle of a thread's rows is one and the same.
    const STEP: u32 = THREADS / Self::UNITS;

    /// `source` is row 0 of the first chunk; columns at or past `dim` read as zero.
    #[inline(always)]
    pub fn new(source: RowPointer, dim: u32, thread: u32) -> Self {
        const { assert!(COLS == 64 || COLS == 128, "operands are one or two panels wide") };
        let (row, unit) = (thread / Self::UNITS, thread % Self::UNITS);
        Copier {
            source: RowPointer { row: source.advance(row).row.wrapping_add(unit as usize * 16), stride: source.stride },
            row,
            destination: (unit / 8) * PANEL_BYTES + unit_offset(row, unit % 8),
            bytes: if unit * 8 < dim { 16 } else { 0 },
        }
    }

    /// Starts the copy of the next chunk to `operand`; rows at or past `valid_rows` become zero.
    ///
    /// # Safety
    /// `operand` is 64 rows of shared memory nobody else uses until the copy's group was waited for; the valid rows and
    /// columns can be read.
    #[inline(always)]
    pub unsafe fn copy_next(&mut self, operand: u32, valid_rows: u32) {
        let mut from = self.source.row;
        let step = (Self::STEP as i64 * self.source.stride) as isize;
        unroll!(I in 8 {
            let rows = I as u32 * Self::STEP;
            if rows < 64 {
                let bytes = if self.row + rows < valid_rows { self.bytes } else { 0 };
                // SAFETY: the caller's contract; no byte is read where `bytes` is 0.
                unsafe { cp_async_cg_16(operand + self.destination + rows * ROW_BYTES, from, bytes) };
                from = from.wrapping_offset(step);
            }
        });
        self.source.row = from;
    }
}

/// Stores this warp's 16 rows of a panel to global memory, 16 bytes a lane.
///
/// # Safety
/// `rows` is this warp's first row, of which `valid_rows` exist (may be ≤ 0); they and the valid columns can be written, by
/// this warp alone; `panel_rows`, the same rows of the panel, were written by this warp before a `syncwarp`.
#[inline(always)]
pub unsafe fn store_rows(rows: RowPointer, panel_rows: u32, lane: u32, valid_rows: i32, valid_cols: u32) {
    let (first, unit) = (lane >> 3, lane & 7);
    let mut to = rows.advance(first).row.wrapping_add(unit as usize * 16);
    let step = (4 * rows.stride) as isize;
    // Stepping, not multiplying: multiples of the stride would be kept in registers.
    unroll!(I in 4 {
        let row = first + 4 * I as u32;
        if (row as i32) < valid_rows && unit * 8 < valid_cols {
            // SAFETY: the caller's contract.
            unsafe { st_global_b32x4(to, ld_shared_b32x4(panel_rows + unit_offset(row, unit))) };
        }
        to = to.wrapping_offset(step);
    });
    let _past_the_last = to;
}
