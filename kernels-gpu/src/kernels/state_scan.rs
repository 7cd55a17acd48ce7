//! From each segment's contribution to the state that enters it (F5), in place and in fixed order:
//!
//! ```text
//! S_0 = 0       S_{g+1} = λ^T S_g + U_g
//! ```
//!
//! A thread carries four values along the segments: `16 · segments` bytes read and written. Loads run four segments
//! ahead of the sum, since each takes as long as a trip to L2.

use super::{application, div_rem, head_decay};
use crate::abi::{Params, TensorMap};
use crate::device::{block_idx_x, ld_global_f32x4, st_global_f32x4, thread_idx_x};
use crate::tile::unroll;
use crate::variants::SCAN_ELEMENTS;

/// The kernel.
///
/// # Safety
/// `params` come from a validated plan; the grid is `batch · heads · state_len / 512` by applications.
#[inline(always)]
pub unsafe fn state_scan(params: &Params, _: *const TensorMap) {
    let app = application(params);
    let (sequence, part) = div_rem(block_idx_x(), params.state_len / SCAN_ELEMENTS);
    let (_, head) = div_rem(sequence, params.heads);
    // SAFETY: `slopes` holds a value for each head.
    let segment_decay = unsafe { head_decay(params, head) }.pow(params.segment_len);
    let first = sequence as usize * params.segments as usize * params.state_len as usize
        + (part * SCAN_ELEMENTS + 4 * thread_idx_x()) as usize;
    let states = (app.states as *mut f32).wrapping_add(first);
    let at = |segment: u32| states.wrapping_add(segment as usize * params.state_len as usize);

    let mut s = [0.0f32; 4];
    let mut segment = 0;
    while segment < params.segments {
        let mut u = [[0.0; 4]; 4];
        unroll!(I in 4 {
            // The last segment contributes to nothing.
            if segment + (I as u32) + 1 < params.segments {
                // SAFETY: the state kernel has written the contributions of all segments but the last.
                u[I] = unsafe { ld_global_f32x4(at(segment + I as u32)) };
            }
        });
        unroll!(I in 4 {
            if segment + (I as u32) < params.segments {
                // SAFETY: the workspace holds a state for each segment; this thread owns these four values.
                unsafe { st_global_f32x4(at(segment + I as u32), s) };
            }
            unroll!(V in 4 {
                s[V] = segment_decay * s[V] + u[I][V];
            });
        });
        segment += 4;
    }
}
