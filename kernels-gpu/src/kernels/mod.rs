//! The kernels: equations in each operation's `mod.rs`, schedules in its `sm80.rs`.

pub mod chunk_output;
pub mod chunk_state;
mod state;
pub mod state_scan;

use crate::abi::{Application, Params};
use crate::decay::Decay;
use crate::device::{block_idx_x, block_idx_y, ld_global_f32};
use crate::variants::for_each_variant;

/// Threads of every block.
pub const THREADS: u32 = 128;

/// `a / b` and `a % b` for `b` > 0, without the check that would need a panic handler.
#[inline(always)]
fn div_rem(a: u32, b: u32) -> (u32, u32) {
    if b == 0 {
        // SAFETY: divisors are counts of batches, heads and slabs, which the host has checked to be at least 1.
        unsafe { core::hint::unreachable_unchecked() }
    }
    (a / b, a % b)
}

/// The application `blockIdx.y` names. Constant indices: a run-time one would copy the parameters to local memory.
#[inline(always)]
fn application(params: &Params) -> Application {
    match block_idx_y() {
        0 => params.applications[0],
        1 => params.applications[1],
        _ => params.applications[2],
    }
}

/// One block's share of the work: a slab of 64 value columns of a segment of a sequence.
struct WorkItem {
    slab: u32,
    /// Index of the sequence, `batch · heads + head`.
    sequence: u32,
    batch: u32,
    head: u32,
    segment: u32,
    /// First row, in walking order.
    first_row: u32,
    /// Rows of the segment.
    num_rows: u32,
}

impl WorkItem {
    /// Slabs of a segment are neighbours, so that what they share is still in L2; segments come last.
    #[inline(always)]
    fn of_block(params: &Params) -> Self {
        let (rest, slab) = div_rem(block_idx_x(), params.slabs);
        let (segment, sequence) = div_rem(rest, params.batch * params.heads);
        let (batch, head) = div_rem(sequence, params.heads);
        let first_row = segment * params.segment_len;
        let num_rows = (params.seq_len - first_row).min(params.segment_len);
        WorkItem { slab, sequence, batch, head, segment, first_row, num_rows }
    }
}

/// λ of head `head`.
///
/// # Safety
/// `params.slopes` is valid for reads of `heads` values.
#[inline(always)]
unsafe fn head_decay(params: &Params, head: u32) -> Decay {
    // SAFETY: the caller's contract.
    Decay::of_slope(unsafe { ld_global_f32((params.slopes as *const f32).wrapping_add(head as usize)) })
}

/// The body of a table row.
macro_rules! body {
    (ChunkState, $element:ident, $d:literal, $stages:literal) => {
        chunk_state::sm80::chunk_state::<crate::element::$element, $d, $stages>
    };
    (ChunkOutput, $element:ident, $d:literal, $stages:literal) => {
        chunk_output::sm80::chunk_output::<crate::element::$element, $d, $stages>
    };
    (StateScan, $element:ident, $d:literal, $stages:literal) => {
        state_scan::state_scan
    };
}

macro_rules! entries {
    ($($entry:ident: $op:ident, $arch:ident, $element:ident, $d:literal, $stages:literal, $threads:literal, $blocks:literal;)*) => {
        $(const _: () = assert!($threads == THREADS, "the lane maps are made for 128 threads");)*

        #[cfg(target_arch = "nvptx64")]
        mod entries {
            use super::*;
            $(
                /// # Safety
                /// Launched by the host with parameters that it validated.
                #[unsafe(no_mangle)]
                pub unsafe extern "ptx-kernel" fn $entry(params: Params) {
                    // SAFETY: the host's contract.
                    unsafe { body!($op, $element, $d, $stages)(&params) }
                }
            )*
        }

        /// The kernel of that entry name, to run on the simulator.
        #[cfg(not(target_arch = "nvptx64"))]
        pub fn body_of(entry: &str) -> Option<unsafe fn(&Params)> {
            match entry {
                $(stringify!($entry) => Some(body!($op, $element, $d, $stages)),)*
                _ => None,
            }
        }
    };
}
for_each_variant!(entries);
