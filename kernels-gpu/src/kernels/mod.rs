//! The kernels: equations in each operation's `mod.rs`, schedules in its `sm80.rs`.

pub mod chunk_output;
pub mod chunk_state;
pub mod gradients;
mod state;
pub mod state_scan;
mod warpgroup;

#[cfg(target_arch = "nvptx64")]
use crate::abi::TensorMaps;
use crate::abi::{Application, Params, TensorMap};
use crate::decay::Decay;
use crate::device::{block_idx_x, block_idx_y, ld_global_f32};
use crate::variants::{for_each_variant, is_accurate};

/// Threads of a block of the portable kernels.
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
    /// Which of the blocks that share the slab.
    share: u32,
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
        let (rest, share) = div_rem(block_idx_x(), params.sharers);
        let (rest, slab) = div_rem(rest, params.slabs);
        let (segment, sequence) = div_rem(rest, params.batch * params.heads);
        let (batch, head) = div_rem(sequence, params.heads);
        WorkItem::new(params, [slab, share, batch, head, segment])
    }

    /// For the state kernel: the last segment of each sequence is left out. Slopes fall from head to head in the models that there are,
    /// and the last heads, which remember longest, begin first.
    #[inline(always)]
    fn of_state_block(params: &Params) -> Self {
        let (rest, slab) = div_rem(block_idx_x(), params.slabs);
        let (rest, segment) = div_rem(rest, params.segments - 1);
        let (from_last, batch) = div_rem(rest, params.batch);
        WorkItem::new(params, [slab, 0, batch, params.heads - 1 - from_last, segment])
    }

    #[inline(always)]
    fn new(params: &Params, [slab, share, batch, head, segment]: [u32; 5]) -> Self {
        let first_row = segment * params.segment_len;
        let num_rows = (params.seq_len - first_row).min(params.segment_len);
        WorkItem { slab, share, sequence: batch * params.heads + head, batch, head, segment, first_row, num_rows }
    }
}

/// Index of the state that enters a segment of a sequence, in walking order.
#[inline(always)]
fn state_index(params: &Params, sequence: u32, segment: u32) -> usize {
    let of_sequence = params.parts * (params.segments - 1) + 1;
    sequence as usize * of_sequence as usize + (params.parts * segment) as usize
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

/// A kernel: its parameters, and its tensor maps where its architecture has them.
pub type Body = unsafe fn(&Params, *const TensorMap);

/// The body of a table row.
macro_rules! body {
    (ChunkState, Sm80, $element:ident, $d:literal, $e:literal, $stages:literal $(, $accurate:ident)?) => {
        chunk_state::sm80::chunk_state::<crate::element::$element, $d, $stages, { is_accurate!($($accurate)?) }>
    };
    (ChunkState, Sm90, $element:ident, $d:literal, $e:literal, $stages:literal) => {
        chunk_state::sm90::chunk_state::<crate::element::$element, $d, $e, $stages>
    };
    (ChunkOutput, Sm80, $element:ident, $d:literal, $e:literal, $stages:literal $(, $accurate:ident)?) => {
        chunk_output::sm80::chunk_output::<crate::element::$element, $d, $stages, { is_accurate!($($accurate)?) }>
    };
    (ChunkOutput, Sm90, $element:ident, $d:literal, $e:literal, $stages:literal $(, $accurate:ident)?) => {
        chunk_output::sm90::chunk_output::<crate::element::$element, $d, $e, $stages, { is_accurate!($($accurate)?) }>
    };
    (Gradients, Sm90, $element:ident, $d:literal, $e:literal, $stages:literal) => {
        gradients::sm90::gradients::<crate::element::$element, $d, $e, $stages>
    };
    (PairedGradients, Sm90, $element:ident, $d:literal, $e:literal, $stages:literal) => {
        gradients::paired::paired_gradients::<
            crate::element::$element,
            $d,
            $e,
            $stages,
            { crate::variants::kv_stages($d, $e) },
        >
    };
    (StateScan, Sm80, $element:ident, $d:literal, $e:literal, $stages:literal) => {
        state_scan::state_scan
    };
}

/// The PTX entry of a table row.
#[cfg(target_arch = "nvptx64")]
macro_rules! entry {
    (Sm80, $entry:ident, $body:expr) => {
        /// # Safety
        /// Launched by the host with parameters that it validated.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $entry(params: Params) {
            // SAFETY: the host's contract.
            unsafe { $body(&params, core::ptr::null()) }
        }
    };
    (Sm90, $entry:ident, $body:expr) => {
        /// # Safety
        /// Launched by the host with parameters and tensor maps that it validated.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $entry(_maps: TensorMaps, params: Params) {
            let maps: *const TensorMap;
            // A reference to the parameter would be one to a local copy, which the copy engine cannot read.
            // SAFETY: takes the address of the first parameter.
            unsafe {
                core::arch::asm!(
                    concat!("{{ .reg .b64 t; mov.b64 t, ", stringify!($entry), "_param_0; cvta.param.u64 {0}, t; }}"),
                    out(reg64) maps,
                    options(pure, nomem, nostack)
                );
            }
            // SAFETY: the host's contract.
            unsafe { $body(&params, maps) }
        }
    };
}

macro_rules! entries {
    ($($entry:ident: $op:ident, $arch:ident, $element:ident, $d:literal, $e:literal, $stages:literal, $threads:literal, $blocks:literal $(, $accurate:ident)?;)*) => {
        #[cfg(target_arch = "nvptx64")]
        mod entries {
            use super::*;
            $(entry!($arch, $entry, body!($op, $arch, $element, $d, $e, $stages $(, $accurate)?));)*
        }

        /// The kernel of that entry name, to run on the simulator.
        #[cfg(not(target_arch = "nvptx64"))]
        pub fn body_of(entry: &str) -> Option<Body> {
            match entry {
                $(stringify!($entry) => Some(body!($op, $arch, $element, $d, $e, $stages $(, $accurate)?)),)*
                _ => None,
            }
        }
    };
}
for_each_variant!(entries);
