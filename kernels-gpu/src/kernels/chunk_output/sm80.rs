//! `mma.sync` schedule.
//!
//! Block: 128 threads, one slab of 64 value columns of one segment. Per row it reads `2 (2 D + 64)` bytes, writes 128, and
//! does `2 · 64 (3 D + 64)` FLOP. Warp `w` computes rows `16 w …` of P and O, and keeps rows `D/4 · w …` of S.
//!
//! | shared memory | bytes |
//! |---|---|
//! | ring of `STAGES`: X `[64, D]`, Y `[64, D]`, Z `[64, 64]` | `STAGES · (256 D + 8192)` |
//! | S `[D, 64]`, rounded to the element type | `128 D` |
//!
//! A chunk takes two barriers: one before it is read, one before S and the stage are overwritten. Where `ACCURATE`, all
//! products but P = X Yᵀ are done twice, and two more barriers put what was rounded off S in its place: it does not fit
//! beside it. O leaves through the warp's own rows of X, which nobody reads any more, so that stores are whole 128-byte rows.

use super::super::state::State;
use super::super::{WorkItem, application, head_decay};
use super::FEW_ROWS;
use crate::abi::{Params, TensorMap};
use crate::decay::Decay;
use crate::device::{
    cp_async_commit_group, cp_async_wait_group, dynamic_smem, ldmatrix_x4, opaque, syncthreads, syncwarp, thread_idx_x,
};
use crate::element::Element;
use crate::tile::global::{Copier, RowPointer, store_rows};
use crate::tile::register::{Accumulator, ZERO, load_rows, mm_ab, scale_rows, store_panel};
use crate::tile::shared::{BlockAddress, PANEL_BYTES, ROW_BYTES};
use crate::tile::unroll;
use crate::variants::{CHUNK, SLAB};

/// The kernel.
///
/// # Safety
/// `params` come from a validated plan; the grid is `slabs · batch · heads · segments` by applications.
#[inline(always)]
pub unsafe fn chunk_output<T: Element, const D: u32, const STAGES: u32, const ACCURATE: bool>(
    params: &Params,
    _: *const TensorMap,
) {
    const { assert!(STAGES == 2, "the waits below are written for two stages") };
    let x_bytes = D / 64 * PANEL_BYTES;
    let stage_bytes = 2 * x_bytes + PANEL_BYTES;
    let (thread, ring) = (thread_idx_x(), dynamic_smem());
    let (warp, lane) = (thread / 32, thread % 32);
    let s_panel = ring + STAGES * stage_bytes;
    let app = application(params);
    let item = WorkItem::of_block(params);
    // SAFETY: `slopes` holds a value for each head.
    let decay = unsafe { head_decay(params, item.head) };

    let row = |rows, first_row, col| RowPointer::new(rows, item.batch, item.head, first_row, col);
    let valid_cols = app.value_dim - item.slab * SLAB;
    let mut x_copy = Copier::<D>::new(row(&app.x, item.first_row, 0), app.key_dim, thread);
    let mut y_copy = Copier::<D>::new(row(&app.y, item.first_row, 0), app.key_dim, thread);
    let mut z_copy = Copier::<64>::new(row(&app.z, item.first_row, item.slab * SLAB), valid_cols, thread);
    let mut rows_to_load = item.num_rows;
    let mut load = |stage: u32| {
        if rows_to_load > 0 {
            // SAFETY: the stage is free: its readers passed a barrier.
            unsafe {
                x_copy.copy_next(stage, rows_to_load);
                y_copy.copy_next(stage + x_bytes, rows_to_load);
                z_copy.copy_next(stage + 2 * x_bytes, rows_to_load);
            }
            rows_to_load = rows_to_load.saturating_sub(CHUNK);
        }
        cp_async_commit_group();
    };

    load(ring);
    load(ring + stage_bytes);
    let mut state = State::<D>::zero(decay, warp, lane);
    if app.states != 0 {
        // SAFETY: the scan kernel has filled the workspace.
        unsafe { state.load(params, &app, &item, lane) };
    }
    // SAFETY: nobody reads S before the first barrier.
    unsafe { state.publish::<T>(s_panel, lane) };

    let mask = Mask::new(decay, warp, lane);
    let first = 16 * warp + lane / 4;
    let lambda = [decay.pow(first + 1), decay.pow(first + 9)];
    let (rows_first, columns_first) = (BlockAddress::rows_first(lane), BlockAddress::columns_first(lane));
    let mut stage = ring;
    let mut o_rows = row(&app.o, item.first_row + 16 * warp, item.slab * SLAB);
    let mut rows_left = item.num_rows as i32;
    while rows_left > 0 {
        let (x, y, z) = (stage, stage + x_bytes, stage + 2 * x_bytes);
        cp_async_wait_group::<1>();
        // This chunk and S are there for all threads.
        syncthreads();

        // P = X Yᵀ and O = X S
        let (mut p, mut o) = (ZERO, ZERO);
        unroll!(STEP in 8 {
            if (STEP as u32) < D / 16 {
                // SAFETY: the stage's copies were waited for, and a barrier passed.
                unsafe {
                    let a = ldmatrix_x4(rows_first.at(x, 16 * warp, STEP as u32));
                    unroll!(J in 4 {
                        // Above the diagonal P is zero.
                        if J as u32 <= warp {
                            let b = ldmatrix_x4(columns_first.at(y, 16 * J as u32, STEP as u32));
                            T::mma(&mut p[2 * J], a, [b[0], b[1]]);
                            T::mma(&mut p[2 * J + 1], a, [b[2], b[3]]);
                        }
                    });
                    mm_ab::<T>(&mut o, a, &load_rows(rows_first, s_panel, STEP as u32));
                }
            }
        });

        if ACCURATE {
            // All are done with the rounded S; what was rounded off takes its place.
            syncthreads();
            // SAFETY: nobody reads the panel before the next barrier.
            unsafe { state.publish_remainder::<T>(s_panel, lane) };
            syncthreads();
            unroll!(STEP in 8 {
                if (STEP as u32) < D / 16 {
                    // SAFETY: as above.
                    unsafe {
                        let a = ldmatrix_x4(rows_first.at(x, 16 * warp, STEP as u32));
                        mm_ab::<T>(&mut o, a, &load_rows(rows_first, s_panel, STEP as u32));
                    }
                }
            });
        }

        // P ⊙ M as the next A operand;  O ← Λ O;  S ← λ^64 S
        scale_rows(&mut o, lambda);
        if ACCURATE || rows_left < CHUNK as i32 || params.seq_len <= FEW_ROWS {
            unroll!(STEP in 4 {
                if STEP as u32 <= warp {
                    let exact = mask.apply::<STEP>(&p);
                    let remainder = exact.map(|pair| T::remainder(pair, T::pack(pair[0], pair[1])));
                    // SAFETY: as above.
                    mm_ab::<T>(&mut o, remainder, &unsafe { load_rows(rows_first, z, STEP as u32) });
                }
            });
        }
        let mut a = [[0; 4]; 4];
        unroll!(STEP in 4 {
            if STEP as u32 <= warp {
                a[STEP] = mask.apply::<STEP>(&p).map(|pair| T::pack(pair[0], pair[1]));
            }
        });
        state.decay();

        // O += P Z;  S += (K̄ Y)ᵀ Z
        unroll!(STEP in 4 {
            // SAFETY: as above.
            unsafe {
                let z = load_rows(rows_first, z, STEP as u32);
                if STEP as u32 <= warp {
                    mm_ab::<T>(&mut o, a[STEP], &z);
                }
                state.update::<T, STEP, ACCURATE>(y, &z);
            }
        });

        scale_rows(&mut o, [params.scale; 2]);
        // SAFETY: only this warp reads these rows of X, and it has; the rows of O are this block's.
        unsafe {
            syncwarp();
            store_panel::<T>(x, 16 * warp, lane, &o);
            syncwarp();
            store_rows(o_rows, x + 16 * warp * ROW_BYTES, lane, rows_left - 16 * warp as i32, valid_cols);
        }

        // All are done with S and this stage.
        syncthreads();
        // SAFETY: nobody reads S before the next barrier.
        unsafe { state.publish::<T>(s_panel, lane) };
        load(stage);
        o_rows = o_rows.advance(CHUNK);
        stage = 2 * ring + stage_bytes - stage;
        rows_left -= CHUNK as i32;
    }
}

/// The causal mask M, `λ^{i-j}` for `i ≥ j`, as factors of at most 1 of which a lane needs few.
///
/// In the 8×8 block that lies `n` blocks below the diagonal, `i - j = δ + 8 (n - 1)` with `δ = i % 8 - j % 8 + 8`.
struct Mask {
    /// M in a block on the diagonal, at this lane's two columns.
    diagonal: [f32; 2],
    /// λ^δ.
    below: [f32; 2],
    /// λ^8.
    block: f32,
    /// λ^(16 (warp - 1 - K)): what the 16 columns of step K, left of the diagonal, are away from it.
    step: [f32; 3],
    warp: u32,
}

impl Mask {
    #[inline(always)]
    fn new(decay: Decay, warp: u32, lane: u32) -> Self {
        let distance = (lane / 4) as i32 - (2 * (lane % 4)) as i32;
        let away = |step: i32| decay.pow_causal(16 * (warp as i32 - 1 - step));
        Mask {
            diagonal: [decay.pow_causal(distance), decay.pow_causal(distance - 1)],
            below: [decay.pow_causal(distance + 8), decay.pow_causal(distance + 7)],
            block: decay.pow(8),
            step: [away(0), away(1), away(2)],
            warp,
        }
    }

    /// P ⊙ M in the 16 columns of step `K`, at or left of the diagonal, in the order of an A fragment's registers.
    #[inline(always)]
    fn apply<const K: usize>(&self, p: &Accumulator) -> [[f32; 2]; 4] {
        let [left, right] = [p[2 * K], p[2 * K + 1]];
        let p = [[left[0], left[1]], [left[2], left[3]], [right[0], right[1]], [right[2], right[3]]];
        let times = |p: [f32; 2], m: [f32; 2]| [p[0] * m[0], p[1] * m[1]];
        if self.warp == K as u32 {
            // Not multiplied above the diagonal: 0 · inf is NaN.
            let masked =
                |p: [f32; 2]| [0, 1].map(|i| if self.diagonal[i] > 0.0 { p[i] * self.diagonal[i] } else { 0.0 });
            [masked(p[0]), times(p[1], self.below), [0.0; 2], masked(p[3])]
        } else {
            // 2 (warp - K) blocks below, one less or more off the middle
            let nearest = self.below.map(|x| x * opaque(self.step[K % 3]));
            let middle = nearest.map(|x| x * self.block);
            let farthest = middle.map(|x| x * self.block);
            [times(p[0], middle), times(p[1], farthest), times(p[2], nearest), times(p[3], middle)]
        }
    }
}
