//! From the contribution of each part of a segment to the state that enters each segment (F5), in place and in fixed order:
//!
//! ```text
//! S_0 = 0       S_{p+1} = λ^T S_p + U_p, where T is the rows of a part
//! ```
//!
//! A thread carries four values along the parts: 16 bytes of each read, and 16 for each segment written. Loads run eight parts
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
    let (sequence, block) = div_rem(block_idx_x(), params.state_len / SCAN_ELEMENTS);
    let (_, head) = div_rem(sequence, params.heads);
    // SAFETY: `slopes` holds a value for each head.
    let part_decay = unsafe { head_decay(params, head) }.pow(params.segment_len);
    let first = sequence as usize * params.segments as usize * params.state_len as usize
        + (block * SCAN_ELEMENTS + 4 * thread_idx_x()) as usize;
    let states = (app.states as *mut f32).wrapping_add(first);
    let at = |part: u32| states.wrapping_add(part as usize * params.state_len as usize);

    let mut s = [0.0f32; 4];
    let mut part = 0;
    while part < params.segments {
        let mut u = [[0.0; 4]; 8];
        unroll!(I in 8 {
            // The last one contributes to nothing.
            if part + (I as u32) + 1 < params.segments {
                // SAFETY: the state kernel has written the contributions of all parts but the last.
                u[I] = unsafe { ld_global_f32x4(at(part + I as u32)) };
            }
        });
        unroll!(I in 8 {
            let entered = part + I as u32;
            if entered < params.segments && entered & (params.parts - 1) == 0 {
                // SAFETY: the workspace holds a state for each part; this thread owns these four values.
                unsafe { st_global_f32x4(at(entered), s) };
            }
            unroll!(V in 4 {
                s[V] = part_decay * s[V] + u[I][V];
            });
        });
        part += 8;
    }
}
