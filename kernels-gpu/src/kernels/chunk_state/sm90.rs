//! Hopper schedule: `wgmma` fed by TMA, the state part of [`chunk_output`](super::super::chunk_output) alone.
//!
//! Block: `E / 64` warpgroups with 64 rows of Uᵀ `[E, D]` in f32 each, and one of which a thread issues the loads. Per row that the state
//! remembers it reads `2 (D + E)` bytes and does `2 D E` FLOP; writes `4 D E` bytes once.
//!
//! | shared memory | bytes |
//! |---|---|
//! | ring of `STAGES`: Y `[64, D]`, Z `[64, E]` | `STAGES · 128 (D + E)` |
//! | barriers, scratch | 288 |

use super::super::warpgroup::{StatePlace, WARPS, load_scaled_columns, row_decay, update_state, wait};
use super::super::{WorkItem, application, head_decay, state_index};
use super::remembered_rows;
use crate::abi::{MAPS_PER_APPLICATION, Params, TensorMap};
use crate::device::{
    block_idx_y, cp_async_bulk_tensor_load_if, createpolicy_evict_normal, dynamic_smem, fence_mbarrier_init,
    keep_alive, mbarrier_arrive_expect_tx_if, mbarrier_arrive_if, syncthreads, syncwarp, thread_idx_x,
};
use crate::element::Element;
use crate::tile::pipeline::Ring;
use crate::tile::shared::PANEL_BYTES;
use crate::tile::unroll;
use crate::variants::{BARRIER_BYTES, CHUNK};

/// The kernel.
///
/// # Safety
/// `params` and `maps` come from a validated plan; the grid is `(segments - 1) · batch · heads` by applications.
#[inline(always)]
pub unsafe fn chunk_state<T: Element, const D: u32, const E: u32, const STAGES: u32>(
    params: &Params,
    maps: *const TensorMap,
) {
    let (states, panels) = (E / 64, D / 64);
    let (thread, base) = (thread_idx_x(), dynamic_smem());
    let barriers = base + STAGES * (panels + states) * PANEL_BYTES;
    let ring = Ring::<STAGES>::new(base, (panels + states) * PANEL_BYTES, barriers);
    let scratch = barriers + BARRIER_BYTES - 16;
    // SAFETY: before anything else, and a barrier follows.
    unsafe { ring.init(1, states * WARPS, thread == 0) };
    fence_mbarrier_init();
    syncthreads();

    let app = application(params);
    let item = WorkItem::of_state_block(params);
    // SAFETY: `slopes` holds a value for each head.
    let decay = unsafe { head_decay(params, item.head) };
    let backwards = app.y.row_stride < 0;
    let remembered = remembered_rows(decay, item.num_rows);
    let num_chunks = remembered / CHUNK;
    let (warpgroup, thread) = (thread / 128, thread % 128);
    if warpgroup == states {
        if thread == 0 {
            let maps = maps.wrapping_add(MAPS_PER_APPLICATION * block_idx_y() as usize);
            let (y_map, z_map) = (maps.wrapping_add(1), maps.wrapping_add(2));
            // Row of the tensor that is row 0 of the chunk in shared memory.
            let first = (item.first_row + item.num_rows - remembered) as i32;
            let (mut row, step) = if backwards {
                (params.seq_len as i32 - CHUNK as i32 - first, -(CHUNK as i32))
            } else {
                (first, CHUNK as i32)
            };
            let (head, batch, policy) = (item.head as i32, item.batch as i32, createpolicy_evict_normal());
            let mut chunk = 0;
            while chunk < num_chunks {
                let slot = ring.at(chunk);
                // SAFETY: the slot is free once its empty barrier says so; the maps are those of this launch.
                unsafe {
                    slot.wait_empty();
                    mbarrier_arrive_expect_tx_if(slot.full, (panels + states) * PANEL_BYTES, true);
                    unroll!(P in 2 {
                        let (at, panel) = ([64 * P as i32, row, head, batch], slot.address + P as u32 * PANEL_BYTES);
                        cp_async_bulk_tensor_load_if(panel, y_map, at, slot.full, policy, (P as u32) < panels);
                        let panel = panel + panels * PANEL_BYTES;
                        cp_async_bulk_tensor_load_if(panel, z_map, at, slot.full, policy, (P as u32) < states);
                    });
                }
                row += step;
                chunk += 1;
            }
        }
        return;
    }

    let (warp, lane) = (thread / 32, thread % 32);
    let row_decay = row_decay(decay, lane, backwards);
    let chunk_decay = decay.pow(CHUNK);
    let load_z = |slot: u32| {
        let panel = slot + (panels + warpgroup) * PANEL_BYTES;
        // SAFETY: the slot is full.
        unsafe { load_scaled_columns::<T>(panel, warp, lane, |k| row_decay[k]) }
    };
    let mut u = [0.0f32; 64];
    let mut slot = ring.at(0);
    // SAFETY: the first filling.
    unsafe { slot.wait_full() };
    let mut a = load_z(slot.address);
    let mut chunk = 0;
    while chunk < num_chunks {
        // SAFETY: the slot is full; `a` is kept, and `u` left alone, until the wait below.
        unsafe { update_state::<T, D>(&mut u, chunk_decay, &a, slot.address) };
        // Meanwhile the next chunk's A.
        let next = ring.at(chunk + 1);
        let mut next_a = a;
        if chunk + 1 < num_chunks {
            // SAFETY: the next filling.
            unsafe { next.wait_full() };
            next_a = load_z(next.address);
        }
        wait::<D>(&mut u);
        // SAFETY: scratch is for this; this warp has read its part of the slot.
        unsafe {
            keep_alive(&a, scratch);
            // One lane speaks for what all have read.
            syncwarp();
            mbarrier_arrive_if(slot.empty, lane == 0);
        }
        (a, slot) = (next_a, next);
        chunk += 1;
    }
    let at = state_index(params, item.sequence, item.segment) * params.state_len as usize;
    let strides = [app.state_row_stride as usize, app.state_col_stride as usize];
    let state = (app.states as *const f32).wrapping_add(at);
    // SAFETY: the workspace holds a state for each sequence and segment, this block owns this one.
    unsafe { StatePlace::new(state, strides, 64 * warpgroup, warp, lane).store::<D>(&u) };
}
