//! Hopper schedule: warp-specialised `wgmma` fed by TMA.
//!
//! Block: four warpgroups, one slab of `E` = 64 or 128 value columns of one segment. Where there are fewer segments than multiprocessors
//! several blocks share one: all carry the state along, each outputs one of every `sharers` chunks, and none waits for another. From
//! round to round they take them in opposite order, or only some would store checkpoints, fall behind, and find nothing left in L2.
//!
//! | warpgroup, `E` = 64 | 128 | registers | work, for each chunk |
//! |---|---|---|---|
//! | 0 state | 0, 1 | 136 | 64 rows of Sᵀ `[E, D]` in f32: publishes them rounded, then Sᵀ ← λ^64 Sᵀ + (K̄ Z)ᵀ Y |
//! | 1, 2 output | 2 | 168, 200 | P = X Yᵀ, O = X S, P ⊙ M, O ← Λ O + P Z, store; two of them alternate |
//! | 3 producer | 3 | 40 | one thread issues the loads |
//!
//! Where `ACCURATE`, with `E` = 64, what was rounded off Sᵀ, P ⊙ M and K̄ Z is multiplied too; registers are 152, 168, 24.
//!
//! A operands come from registers (`ldmatrix`), so that shared memory serves B alone: with A from there too it would be the
//! limit. Every arrival on a barrier is one warp's; there is no other barrier after the first.
//!
//! | shared memory | bytes |
//! |---|---|
//! | ring of `STAGES`: Y `[64, D]`, Z `[64, E]` | `STAGES · 128 (D + E)` |
//! | ring of 2: X `[64, D]` | `256 D` |
//! | ring of 2: Sᵀ `[E, D]`, and where `ACCURATE` what was rounded off it | `4 D E`, `8 D E` |
//! | O `[64, E]` of each output warpgroup | 16384 |
//! | barriers, scratch | 288 |
//!
//! Walking backwards, a chunk's rows lie in shared memory in the order of memory, that is reversed; M, Λ and K̄ are
//! reversed instead. Rows and columns outside the tensor read as zero and are not written, by the copy engine; only what
//! begins before the first row must be kept from it (an illegal instruction).

use super::super::warpgroup::{
    Masks, StatePlace, WARPS, enqueue_scores, enqueue_values, load_columns_remainder, load_fragments,
    load_scaled_columns, product, row_decay, step, store_remainder, store_rounded, update_state, wait,
};
use super::super::{WorkItem, application, head_decay, state_index};
use super::FEW_ROWS;
use crate::abi::{Application, MAPS_PER_APPLICATION, Params, TensorMap};
use crate::decay::Decay;
use crate::device::{
    block_idx_y, cp_async_bulk_commit_group, cp_async_bulk_tensor_load_if, cp_async_bulk_tensor_store_if,
    cp_async_bulk_wait_group, cp_async_bulk_wait_group_read, createpolicy_evict_first, createpolicy_evict_normal,
    dynamic_smem, fence_mbarrier_init, fence_proxy_async, keep_alive, mbarrier_arrive_expect_tx_if, mbarrier_arrive_if,
    setmaxnreg_dec_either, setmaxnreg_inc, setmaxnreg_inc_either, syncthreads, syncwarp, thread_idx_x,
    wgmma_commit_group, wgmma_fence, wgmma_wait_group,
};
use crate::element::Element;
use crate::tile::descriptor::Descriptor;
use crate::tile::pipeline::Ring;
use crate::tile::shared::{PANEL_BYTES, ROW_BYTES};
use crate::tile::unroll;
use crate::variants::{BARRIER_BYTES, CHUNK};

/// The kernel.
///
/// # Safety
/// `params` and `maps` come from a validated plan; the grid is `sharers · slabs · batch · heads · segments` by applications.
#[inline(always)]
pub unsafe fn chunk_output<T: Element, const D: u32, const E: u32, const STAGES: u32, const ACCURATE: bool>(
    params: &Params,
    maps: *const TensorMap,
) {
    const { assert!(E == 64 || E == 128, "a state warpgroup has 64 rows") };
    const { assert!(E == 64 || !ACCURATE, "two state warpgroups would need more registers than there are") };
    let (x_bytes, z_bytes) = (D / 64 * PANEL_BYTES, E / 64 * PANEL_BYTES);
    let s_bytes = if ACCURATE { 2 } else { 1 } * 2 * D * E;
    let (thread, base) = (thread_idx_x(), dynamic_smem());
    let x_slots = base + STAGES * (x_bytes + z_bytes);
    let s_slots = x_slots + 2 * x_bytes;
    let o_panels = s_slots + 2 * s_bytes;
    let barriers = o_panels + 2 * PANEL_BYTES;
    let app = application(params);
    let item = WorkItem::of_block(params);
    let block = Block::<D, E, STAGES, ACCURATE> {
        yz: Ring::new(base, x_bytes + z_bytes, barriers),
        x: Ring::new(x_slots, x_bytes, barriers + Ring::<STAGES>::BARRIER_BYTES),
        s: Ring::new(s_slots, s_bytes, barriers + Ring::<STAGES>::BARRIER_BYTES + Ring::<2>::BARRIER_BYTES),
        o_panels,
        scratch: barriers + BARRIER_BYTES - 16,
        maps: maps.wrapping_add(MAPS_PER_APPLICATION * block_idx_y() as usize),
        num_chunks: item.num_rows.div_ceil(CHUNK),
        sharers: params.sharers,
        backwards: app.y.row_stride < 0,
        seq_len: params.seq_len,
        item,
        stores_checkpoints: !ACCURATE && params.stores_checkpoints != 0,
        state_rows: params.state_len / D,
    };
    let (states, outputs) = (Block::<D, E, STAGES, ACCURATE>::STATES, Block::<D, E, STAGES, ACCURATE>::OUTPUTS);
    // SAFETY: before anything else, and a barrier follows.
    unsafe {
        // A chunk is read by the state warpgroups and by one that outputs it.
        block.yz.init(1, (states + 1) * WARPS, thread == 0);
        block.x.init(1, WARPS, thread == 0);
        block.s.init(states * WARPS, WARPS, thread == 0);
    }
    fence_mbarrier_init();
    syncthreads();
    let (warpgroup, thread) = (thread / 128, thread % 128);
    if warpgroup == 3 {
        setmaxnreg_dec_either::<ACCURATE, 24, 40>();
        if thread == 0 {
            // SAFETY: one thread of the block.
            unsafe { block.produce() };
        }
        return;
    }
    // SAFETY: `slopes` holds a value for each head.
    let decay = unsafe { head_decay(params, block.item.head) };
    if warpgroup < states {
        setmaxnreg_inc_either::<ACCURATE, 152, 136>();
        // SAFETY: the state warpgroups of the block, numbered.
        unsafe { block.carry_state::<T>(params, &app, decay, warpgroup, thread) };
    } else {
        if outputs == 2 {
            setmaxnreg_inc::<168>();
        } else {
            setmaxnreg_inc::<200>();
        }
        // SAFETY: the output warpgroups of the block, numbered.
        unsafe { block.output::<T>(params.scale, decay, warpgroup - states, thread) };
    }
}

/// What the roles share.
struct Block<const D: u32, const E: u32, const STAGES: u32, const ACCURATE: bool> {
    yz: Ring<STAGES>,
    x: Ring<2>,
    s: Ring<2>,
    o_panels: u32,
    scratch: u32,
    /// Of this application.
    maps: *const TensorMap,
    num_chunks: u32,
    sharers: u32,
    backwards: bool,
    seq_len: u32,
    item: WorkItem,
    stores_checkpoints: bool,
    /// Rows of a panel of the whole Sᵀ.
    state_rows: u32,
}

/// A block's turns among those that share a segment.
#[derive(Clone, Copy)]
struct Turns {
    /// Chunks until its next.
    until: u32,
    /// Chunks from that to the one after it, and from there to the third, and so on in turn.
    gaps: [u32; 2],
}

impl Turns {
    #[inline(always)]
    fn is_own(&self) -> bool {
        self.until == 0
    }

    /// Goes on to the next chunk.
    #[inline(always)]
    fn step(&mut self) {
        if self.is_own() {
            self.until = self.gaps[0];
            self.gaps.reverse();
        }
        self.until -= 1;
    }
}

impl<const D: u32, const E: u32, const STAGES: u32, const ACCURATE: bool> Block<D, E, STAGES, ACCURATE> {
    /// State warpgroups, 64 rows of Sᵀ each; as many panels has Z.
    const STATES: u32 = E / 64;
    /// Output warpgroups.
    const OUTPUTS: u32 = 3 - Self::STATES;
    /// Panels of X and Y.
    const PANELS: u32 = D / 64;
    /// Bytes of a panel of Sᵀ, `[E, 64]`.
    const S_PANEL_BYTES: u32 = E * ROW_BYTES;
    /// From Sᵀ to what was rounded off it.
    const S_REMAINDER: u32 = 2 * D * E;

    /// Which chunks are this block's own.
    #[inline(always)]
    fn turns(&self) -> Turns {
        let share = self.item.share;
        Turns { until: share, gaps: [2 * (self.sharers - share) - 1, 2 * share + 1] }
    }

    /// First value column of the slab.
    #[inline(always)]
    fn first_col(&self) -> i32 {
        (self.item.slab * E) as i32
    }

    /// Row of the tensor that is row 0 of a chunk in shared memory; before the tensor's first for a short chunk
    /// backwards.
    #[inline(always)]
    fn tensor_row(&self, chunk: u32) -> i32 {
        let row = (self.item.first_row + chunk * CHUNK) as i32;
        if self.backwards { self.seq_len as i32 - CHUNK as i32 - row } else { row }
    }

    /// Whether what was rounded off P counts in a chunk.
    #[inline(always)]
    fn counts_remainder(&self, chunk: u32) -> bool {
        let is_short = self.item.first_row + (chunk + 1) * CHUNK > self.seq_len;
        ACCURATE || is_short || self.seq_len <= FEW_ROWS
    }

    /// Loads Y and Z of every chunk, and X of this block's own.
    #[inline(always)]
    unsafe fn produce(&self) {
        let (first, normal) = (createpolicy_evict_first(), createpolicy_evict_normal());
        // Which is faster was measured (`docs/kernels.md`). Other slabs read X and Y too, other sharers Y and Z.
        let x_policy = if self.stores_checkpoints || self.state_rows > E || E == 128 && self.sharers == 1 {
            normal
        } else {
            first
        };
        let yz_policy = if self.sharers > 1 { normal } else { x_policy };
        let (head, batch, first_col) = (self.item.head as i32, self.item.batch as i32, self.first_col());
        let (x_map, y_map, z_map) = (self.maps, self.maps.wrapping_add(1), self.maps.wrapping_add(2));
        let (mut chunk, mut own, mut turns) = (0, 0, self.turns());
        while chunk < self.num_chunks {
            let row = self.tensor_row(chunk);
            let yz = self.yz.at(chunk);
            // SAFETY: the slot is free once its empty barrier says so; the maps are those of this launch.
            unsafe {
                yz.wait_empty();
                mbarrier_arrive_expect_tx_if(yz.full, (Self::PANELS + Self::STATES) * PANEL_BYTES, true);
                unroll!(P in 2 {
                    cp_async_bulk_tensor_load_if(
                        yz.address + P as u32 * PANEL_BYTES, y_map, [64 * P as i32, row, head, batch], yz.full,
                        yz_policy, (P as u32) < Self::PANELS,
                    );
                });
                unroll!(P in 2 {
                    cp_async_bulk_tensor_load_if(
                        yz.address + (Self::PANELS + P as u32) * PANEL_BYTES,
                        z_map,
                        [first_col + 64 * P as i32, row, head, batch],
                        yz.full,
                        yz_policy,
                        (P as u32) < Self::STATES,
                    );
                });
            }
            if turns.is_own() {
                let x = self.x.at(own);
                // SAFETY: as above.
                unsafe {
                    x.wait_empty();
                    mbarrier_arrive_expect_tx_if(x.full, Self::PANELS * PANEL_BYTES, true);
                    unroll!(P in 2 {
                        cp_async_bulk_tensor_load_if(
                            x.address + P as u32 * PANEL_BYTES, x_map, [64 * P as i32, row, head, batch], x.full, x_policy,
                            (P as u32) < Self::PANELS,
                        );
                    });
                }
                own += 1;
            }
            turns.step();
            chunk += 1;
        }
    }

    /// Carries rows `64 · index …` of Sᵀ through all chunks (F3).
    #[inline(always)]
    unsafe fn carry_state<T: Element>(
        &self,
        params: &Params,
        app: &Application,
        decay: Decay,
        index: u32,
        thread: u32,
    ) {
        let (warp, lane) = (thread / 32, thread % 32);
        let mut s = [0.0f32; 64];
        let strides = [app.state_row_stride as usize, app.state_col_stride as usize];
        let row = self.item.slab * E + 64 * index;
        if app.states != 0 {
            let at = state_index(params, self.item.sequence, self.item.segment);
            let state = (app.states as *const f32).wrapping_add(at * params.state_len as usize);
            // SAFETY: the scan kernel has filled the workspace.
            unsafe { StatePlace::new(state, strides, row, warp, lane).load::<D>(&mut s) };
        }
        let row_decay = row_decay(decay, lane, self.backwards);
        let chunk_decay = decay.pow(CHUNK);
        let elected = lane == 0;
        let load_z = |yz: u32| {
            let panel = yz + (Self::PANELS + index) * PANEL_BYTES;
            // SAFETY: the slot is full.
            unsafe { load_scaled_columns::<T>(panel, warp, lane, |k| row_decay[k]) }
        };

        let mut yz = self.yz.at(0);
        // SAFETY: the first filling.
        unsafe { yz.wait_full() };
        let mut a = load_z(yz.address);
        let (mut chunk, mut own, mut turns) = (0, 0, self.turns());
        while chunk < self.num_chunks {
            let publish = turns.is_own();
            if publish {
                let slot = self.s.at(own);
                // SAFETY: the slot is free; each warp stores its own 16 rows and says so.
                unsafe {
                    slot.wait_empty();
                    store_rounded::<T, D>(slot.address, Self::S_PANEL_BYTES, 64 * index + 16 * warp, lane, &s);
                    if ACCURATE {
                        let remainder = slot.address + Self::S_REMAINDER;
                        store_remainder::<T, D>(remainder, Self::S_PANEL_BYTES, 64 * index + 16 * warp, lane, &s);
                    }
                    fence_proxy_async();
                    syncwarp();
                    mbarrier_arrive_if(slot.full, elected);
                }
                own += 1;
            }
            turns.step();
            // SAFETY: the slot is full; `a` is kept, and `s` left alone, until the wait below.
            unsafe { update_state::<T, D>(&mut s, chunk_decay, &a, yz.address) };
            let mut rest = [0; 16];
            if ACCURATE {
                let panel = yz.address + (Self::PANELS + index) * PANEL_BYTES;
                // Only now, when it is needed: registers are few.
                // SAFETY: the slot is full; `rest` is kept until the wait below.
                unsafe {
                    rest = load_columns_remainder::<T>(panel, warp, lane, |k| row_decay[k]);
                    enqueue_values::<T, D>(&mut s, &rest, Descriptor::new(yz.address));
                }
            }
            // Meanwhile the next chunk's A.
            let next = self.yz.at(chunk + 1);
            let mut next_a = a;
            if chunk + 1 < self.num_chunks {
                // SAFETY: the next filling.
                unsafe { next.wait_full() };
                next_a = load_z(next.address);
            }
            wait::<D>(&mut s);
            // SAFETY: scratch is for this; this warp has read its part of the slot.
            unsafe {
                keep_alive(&a, self.scratch);
                if ACCURATE {
                    keep_alive(&rest, self.scratch);
                }
                // One lane speaks for what all have read.
                syncwarp();
                mbarrier_arrive_if(yz.empty, elected);
                // What nobody here outputs is free as far as the output warpgroups are concerned.
                mbarrier_arrive_if(yz.empty, elected && !publish && index == 0);
            }
            a = next_a;
            yz = next;
            chunk += 1;
        }
    }

    /// Stores the published state that enters a chunk, if it enters a pair: what was waited for is there for the copy engine too.
    #[inline(always)]
    fn store_checkpoint(&self, chunk: u32, state: u32, one_thread: bool) -> bool {
        let chunk = self.item.first_row / CHUNK + chunk;
        let stores = self.stores_checkpoints && chunk.is_multiple_of(2);
        if stores {
            // After those of the only application.
            let map = self.maps.wrapping_add(MAPS_PER_APPLICATION);
            let policy = createpolicy_evict_first();
            unroll!(P in 4 {
                // Panels of 64 columns, in boxes of 64 rows.
                let (panel, block) = (P as u32 / Self::STATES, P as u32 % Self::STATES);
                let row = panel * self.state_rows + self.item.slab * E + 64 * block;
                let at = [0, row as i32, (chunk / 2) as i32, self.item.sequence as i32];
                let exists = (P as u32) < Self::PANELS * Self::STATES;
                // SAFETY: the state is published, and its slot is not freed before it is read.
                unsafe {
                    cp_async_bulk_tensor_store_if(map, at, state + P as u32 * PANEL_BYTES, policy, exists && one_thread);
                }
            });
            cp_async_bulk_commit_group();
        }
        stores
    }

    /// Computes this block's chunks (F2), or every second of them.
    #[inline(always)]
    unsafe fn output<T: Element>(&self, scale: f32, decay: Decay, index: u32, thread: u32) {
        let (warp, lane) = (thread / 32, thread % 32);
        let elected = lane == 0;
        let mask = Masks::new(decay, scale, warp, lane, self.backwards);
        let o_panels = self.o_panels + index * PANEL_BYTES;
        let (o_map, o_row_map) = (self.maps.wrapping_add(3), self.maps.wrapping_add(4));
        let policy = createpolicy_evict_first();
        let (mut p, mut o) = ([0.0f32; 32], [0.0f32; 64]);
        let mut own = index;
        let mut turns = self.turns();
        let mut chunk = turns.until;
        if index == 1 {
            chunk += turns.gaps[0];
        }
        while chunk < self.num_chunks {
            let (yz, x_slot, s_slot) = (self.yz.at(chunk), self.x.at(own), self.s.at(own));
            // SAFETY: X of this chunk is loaded right after its Y and Z, so this is less than two fillings behind there too.
            unsafe { x_slot.wait_full() };
            // SAFETY: the slot is full.
            let x = unsafe { load_fragments::<D>(x_slot.address, warp, lane) };

            // P = X Yᵀ
            // SAFETY: the slot is full; operands are kept until the waits below.
            unsafe {
                yz.wait_full();
                enqueue_scores::<T, D>(&mut p, &x, yz.address);
                // X is in registers, where the products take it from: one lane speaks for what all have read. Where checkpoints leave,
                // freeing it later is faster (`docs/kernels.md`).
                syncwarp();
                mbarrier_arrive_if(x_slot.empty, elected && !self.stores_checkpoints);
            }
            // O = X S
            // SAFETY: as above.
            unsafe { s_slot.wait_full() };
            let stores_checkpoint = self.store_checkpoint(chunk, s_slot.address, warp == 0 && elected);
            wgmma_fence();
            let s = Descriptor::new(s_slot.address);
            unroll!(K in 8 {
                if (K as u32) < D / 16 {
                    // SAFETY: as above.
                    unsafe {
                        let b = s.columns(K as u32, Self::S_PANEL_BYTES);
                        product::<T, E, 0>(&mut o, step(&x[K / 4], K % 4), b, K != 0);
                    }
                }
            });
            if ACCURATE {
                let s = Descriptor::new(s_slot.address + Self::S_REMAINDER);
                unroll!(K in 8 {
                    if (K as u32) < D / 16 {
                        // SAFETY: as above.
                        unsafe {
                            let b = s.columns(K as u32, Self::S_PANEL_BYTES);
                            product::<T, E, 0>(&mut o, step(&x[K / 4], K % 4), b, true);
                        }
                    }
                });
            }
            wgmma_commit_group();

            wgmma_wait_group::<1, 32>(&mut p);
            let a = mask.apply::<T>(&p);
            wait::<E>(&mut o);
            // SAFETY: scratch is for this; this warp has read its part of both slots.
            unsafe {
                keep_alive(&x[0], self.scratch);
                if D == 128 {
                    keep_alive(&x[1], self.scratch);
                }
                if stores_checkpoint {
                    cp_async_bulk_wait_group_read::<0>();
                }
                // One lane speaks for what all have read.
                syncwarp();
                mbarrier_arrive_if(x_slot.empty, elected && self.stores_checkpoints);
                mbarrier_arrive_if(s_slot.empty, elected);
            }

            // O ← c Λ O + (c P ⊙ M) Z
            mask.scale_rows::<E>(&mut o);
            let z = Descriptor::new(yz.address + Self::PANELS * PANEL_BYTES);
            // SAFETY: as above.
            unsafe { enqueue_values::<T, E>(&mut o, &a, z) };
            if self.counts_remainder(chunk) {
                let rest = mask.remainder::<T>(&p, &a);
                // SAFETY: as above.
                unsafe { enqueue_values::<T, E>(&mut o, &rest, z) };
                wait::<E>(&mut o);
                // SAFETY: scratch is for this.
                unsafe { keep_alive(&rest, self.scratch) };
            }
            // The store before has left the panel.
            cp_async_bulk_wait_group_read::<0>();
            syncwarp();
            wait::<E>(&mut o);
            // SAFETY: as above; each warp stores its own 16 rows.
            unsafe {
                keep_alive(&a, self.scratch);
                mbarrier_arrive_if(yz.empty, elected);
                store_rounded::<T, E>(o_panels, PANEL_BYTES, 16 * warp, lane, &o);
                fence_proxy_async();
                syncwarp();
                let row = self.tensor_row(chunk) + 16 * warp as i32;
                // A store must not begin before the tensor, though a load may: there each lane stores a row that exists.
                let lane_row = row + lane as i32;
                let exists = row < 0 && lane < 16 && lane_row >= 0;
                unroll!(P in 2 {
                    let is_panel = (P as u32) < Self::STATES;
                    let col = self.first_col() + 64 * P as i32;
                    let at = |row| [col, row, self.item.head as i32, self.item.batch as i32];
                    let rows = o_panels + P as u32 * PANEL_BYTES + 16 * warp * ROW_BYTES;
                    let whole = is_panel && elected && row >= 0;
                    cp_async_bulk_tensor_store_if(o_map, at(row), rows, policy, whole);
                    let single = is_panel && exists;
                    cp_async_bulk_tensor_store_if(o_row_map, at(lane_row), rows + lane * ROW_BYTES, policy, single);
                });
                cp_async_bulk_commit_group();
            }
            own += Self::OUTPUTS;
            chunk += if Self::OUTPUTS == 2 { 2 * self.sharers } else { turns.gaps[0] };
            turns.gaps.reverse();
        }
        cp_async_bulk_wait_group::<0>();
    }
}
