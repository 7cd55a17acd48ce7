//! `mma.sync` schedule.
//!
//! Block: 128 threads, one slab of 64 value columns of one segment. Per row that the state remembers it reads `2 (D + 64)` bytes and does
//! `2 · 64 · D` FLOP, twice that where `ACCURATE`; writes `256 D` bytes once. Shared memory: `STAGES` × (Y `[64, D]`,
//! Z `[64, 64]`), a ring with one barrier for each chunk.

use super::super::state::State;
use super::super::{WorkItem, application, head_decay};
use super::remembered_rows;
use crate::abi::{Params, TensorMap};
use crate::device::{cp_async_commit_group, cp_async_wait_group, dynamic_smem, syncthreads, thread_idx_x};
use crate::element::Element;
use crate::tile::global::{Copier, RowPointer};
use crate::tile::register::load_rows;
use crate::tile::shared::{BlockAddress, PANEL_BYTES};
use crate::tile::unroll;
use crate::variants::{CHUNK, SLAB};

/// The kernel.
///
/// # Safety
/// `params` come from a validated plan; the grid is `slabs · (segments - 1) · batch · heads` by applications.
#[inline(always)]
pub unsafe fn chunk_state<T: Element, const D: u32, const STAGES: u32, const ACCURATE: bool>(
    params: &Params,
    _: *const TensorMap,
) {
    const { assert!(STAGES == 3, "the waits below are written for three stages") };
    let y_bytes = D / 64 * PANEL_BYTES;
    let stage_bytes = y_bytes + PANEL_BYTES;
    let (thread, ring) = (thread_idx_x(), dynamic_smem());
    let (warp, lane) = (thread / 32, thread % 32);
    let app = application(params);
    let item = WorkItem::of_state_block(params);
    // SAFETY: `slopes` holds a value for each head.
    let decay = unsafe { head_decay(params, item.head) };

    // What will have decayed to nothing at the end of the segment is not read.
    let remembered = remembered_rows(decay, item.num_rows);
    let first_row = item.first_row + item.num_rows - remembered;
    let row = |rows, col| RowPointer::new(rows, item.batch, item.head, first_row, col);
    let mut y_copy = Copier::<D>::new(row(&app.y, 0), app.key_dim, thread);
    let mut z_copy = Copier::<64>::new(row(&app.z, item.slab * SLAB), app.value_dim - item.slab * SLAB, thread);
    let num_chunks = remembered / CHUNK;
    let mut chunks_to_load = num_chunks;
    let mut load = |stage: u32| {
        if chunks_to_load > 0 {
            // SAFETY: the stage is free: its readers passed a barrier.
            unsafe {
                y_copy.copy_next(stage, CHUNK);
                z_copy.copy_next(stage + y_bytes, CHUNK);
            }
            chunks_to_load -= 1;
        }
        cp_async_commit_group();
    };
    let next = |stage: u32| if stage == ring + (STAGES - 1) * stage_bytes { ring } else { stage + stage_bytes };

    load(ring);
    load(ring + stage_bytes);
    let mut state = State::<D>::zero(decay, warp, lane);
    let z_address = BlockAddress::rows_first(lane);
    let (mut stage, mut free_stage) = (ring, ring + 2 * stage_bytes);
    for _ in 0..num_chunks {
        cp_async_wait_group::<1>();
        // This chunk has landed for all threads, and all are done with the one before, whose stage is free now.
        syncthreads();
        load(free_stage);

        // U ← λ^64 U + (K̄ Y)ᵀ Z
        state.decay();
        unroll!(STEP in 4 {
            // SAFETY: the stage's copies were waited for, and a barrier passed.
            unsafe {
                let z = load_rows(z_address, stage + y_bytes, STEP as u32);
                state.update::<T, STEP, ACCURATE>(stage, &z);
            }
        });
        free_stage = stage;
        stage = next(stage);
    }
    // SAFETY: the workspace holds a state for each sequence and segment, this block owns a slab of this one.
    unsafe { state.store(params, &app, &item, lane) };
}
