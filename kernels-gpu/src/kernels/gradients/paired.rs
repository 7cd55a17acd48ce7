//! Hopper schedule from checkpoints every two chunks: each chunk is loaded once for dQ, dK and dV, and only G is carried.
//!
//! Block: four warpgroups, one segment, walked backwards by pairs of chunks. Where there are fewer segments than multiprocessors several
//! blocks share one: all carry G along, and each outputs every `sharers`-th pair. None waits for another.
//!
//! | warpgroup, `E` = 64 | 128 | registers, `D` = `E` = 64, `E` = 64, 128 | work |
//! |---|---|---|---|
//! | 0 state | 0, 1 | 112, 120, 136 | 64 rows of Gᵀ `[E, D]` in f32: publishes them rounded and updates them |
//! | 1, 2 output | 2 | 184, 184, 200 | of a pair dK and dV of the second chunk, dQ of both, dK and dV of the first |
//! | 3 copies | 3 | 32, 24, 40 | one thread loads Q and dO, one K, V and the checkpoints, one for each output warpgroup stores |
//!
//! The second chunk's dQ takes the checkpoint and the first chunk's K and V:
//!
//! ```text
//! dQ₁ = c ((dO₁ V₁ᵀ ⊙ M) K₁ + (dO₁ V₀ᵀ ⊙ λ^{64+i-j}) K₀ + λ^64 Λ dO₁ S_cᵀ)
//! ```
//!
//! | shared memory | bytes |
//! |---|---|
//! | ring of `STAGES`: Q and dO, `[64, D]` and `[64, E]` | `STAGES · 128 (D + E)` |
//! | ring of `KV_STAGES`: K and V | `KV_STAGES · 128 (D + E)` |
//! | S_cᵀ `[E, D]`, 16 bits | `2 D E` |
//! | ring of 2: Gᵀ `[E, D]` | `4 D E` |
//! | dQ, dK or dV of each output warpgroup | `128 max(D, E)` each |
//! | barriers, scratch | 288 |
//! | powers of λ | 1808 |

use super::super::chunk_output::FEW_ROWS;
use super::super::warpgroup::{
    DecayTable, Rows, StatePlace, WARPS, load_scaled_columns, store_rounded, update_state, wait,
};
use super::super::{WorkItem, head_decay, state_index};
use super::Roles;
use super::output::{Operands, OutputWarp, here, map};
use crate::abi::{Params, TensorMap};
use crate::decay::Decay;
use crate::device::{
    cp_async_bulk_commit_group, cp_async_bulk_tensor_load_if, cp_async_bulk_tensor_store_if, cp_async_bulk_wait_group,
    cp_async_bulk_wait_group_read, createpolicy_evict_first, createpolicy_evict_normal, dynamic_smem,
    fence_mbarrier_init, fence_proxy_async, keep_alive, mbarrier_arrive_expect_tx_if, mbarrier_arrive_if, syncthreads,
    syncwarp, thread_idx_x,
};
use crate::element::Element;
use crate::tile::pipeline::{Ring, Slot};
use crate::tile::shared::{PANEL_BYTES, ROW_BYTES};
use crate::tile::unroll;
use crate::variants::{BARRIER_BYTES, CHUNK};

/// The kernel.
///
/// # Safety
/// `params` and `maps` come from a validated plan; the grid is `sharers · batch · heads · segments`.
#[inline(always)]
pub unsafe fn paired_gradients<T: Element, const D: u32, const E: u32, const STAGES: u32, const KV_STAGES: u32>(
    params: &Params,
    maps: *const TensorMap,
) {
    let thread = thread_idx_x();
    let (states, outputs) = (Roles::<D, E>::STATES, Roles::<D, E>::OUTPUTS);
    let block = Block::<D, E, STAGES, KV_STAGES>::new(params, maps);
    // SAFETY: `slopes` holds a value for each head.
    let decay = unsafe { head_decay(params, block.item.head) };
    // SAFETY: before anything else, and a barrier follows.
    unsafe {
        block.q_do.init(1, (states + outputs) * WARPS, thread == 0);
        block.kv.init(1, outputs * WARPS, thread == 0);
        block.s.init(1, outputs * WARPS, thread == 0);
        block.g.init(states * WARPS, outputs * WARPS, thread == 0);
        block.staging(0).init(WARPS, 1, thread == 0);
        if outputs == 2 {
            block.staging(1).init(WARPS, 1, thread == 0);
        }
        block.table.fill(decay, params.scale, thread);
    }
    fence_mbarrier_init();
    syncthreads();
    let (warpgroup, thread) = (thread / 128, thread % 128);
    if warpgroup == 3 {
        Roles::<D, E>::become_copies();
        // SAFETY: one thread of the block each.
        unsafe {
            if thread == 0 {
                block.produce_q_do();
            } else if thread == 32 {
                block.produce_kv();
            } else if thread.is_multiple_of(32) && thread / 32 - 2 < outputs {
                block.store(thread / 32 - 2);
            }
        }
        return;
    }
    if warpgroup < states {
        Roles::<D, E>::become_state();
        // SAFETY: the state warpgroups of the block, numbered.
        unsafe { block.carry_g::<T>(params, decay, warpgroup, thread) };
    } else {
        Roles::<D, E>::become_output();
        // SAFETY: the output warpgroups of the block, numbered.
        unsafe { block.output::<T>(warpgroup - states, thread) };
    }
}

/// What the roles share.
struct Block<const D: u32, const E: u32, const STAGES: u32, const KV_STAGES: u32> {
    q_do: Ring<STAGES>,
    kv: Ring<KV_STAGES>,
    s: Ring<1>,
    g: Ring<2>,
    o_panels: u32,
    o_barriers: u32,
    scratch: u32,
    table: DecayTable,
    maps: *const TensorMap,
    segment_len: u32,
    sharers: u32,
    seq_len: u32,
    item: WorkItem,
}

impl<const D: u32, const E: u32, const STAGES: u32, const KV_STAGES: u32> Block<D, E, STAGES, KV_STAGES> {
    #[inline(always)]
    fn new(params: &Params, maps: *const TensorMap) -> Self {
        let (slot_bytes, state_bytes) = (Roles::<D, E>::SLOT_BYTES, Roles::<D, E>::STATE_BYTES);
        let base = dynamic_smem();
        let kv_slots = base + STAGES * slot_bytes;
        let s_slot = kv_slots + KV_STAGES * slot_bytes;
        let g_slots = s_slot + state_bytes;
        let o_panels = g_slots + 2 * state_bytes;
        let barriers = o_panels + Roles::<D, E>::OUTPUTS * Roles::<D, E>::OUTPUT_BYTES;
        let kv_barriers = barriers + Ring::<STAGES>::BARRIER_BYTES;
        let s_barriers = kv_barriers + Ring::<KV_STAGES>::BARRIER_BYTES;
        let g_barriers = s_barriers + Ring::<1>::BARRIER_BYTES;
        let item = WorkItem::of_block(params);
        Block {
            q_do: Ring::new(base, slot_bytes, barriers),
            kv: Ring::new(kv_slots, slot_bytes, kv_barriers),
            s: Ring::new(s_slot, state_bytes, s_barriers),
            g: Ring::new(g_slots, state_bytes, g_barriers),
            o_panels,
            o_barriers: g_barriers + Ring::<2>::BARRIER_BYTES,
            scratch: barriers + BARRIER_BYTES - 16,
            table: DecayTable(barriers + BARRIER_BYTES),
            maps,
            segment_len: params.segment_len,
            sharers: params.sharers,
            seq_len: params.seq_len,
            item,
        }
    }

    /// Chunks of the segment; from the parameters each time, to save a register.
    #[inline(always)]
    fn num_chunks(&self) -> u32 {
        (self.seq_len - self.item.first_row).min(self.segment_len).div_ceil(CHUNK)
    }

    /// First chunk of the last pair, which may have no other.
    #[inline(always)]
    fn last_pair(&self) -> u32 {
        (self.num_chunks() - 1) & !1
    }

    /// First chunk of this block's last pair, if it has any.
    #[inline(always)]
    fn last_own_pair(&self) -> Option<u32> {
        self.last_pair().checked_sub(2 * self.item.share)
    }

    /// First chunk of this block's pair before.
    #[inline(always)]
    fn own_pair_before(&self, first: u32) -> Option<u32> {
        first.checked_sub(2 * self.sharers)
    }

    /// Whether a pair has a second chunk.
    #[inline(always)]
    fn is_whole(&self, first: u32) -> bool {
        first + 1 < self.num_chunks()
    }

    /// Row of the tensors that is row 0 of a chunk.
    #[inline(always)]
    fn tensor_row(&self, chunk: u32) -> i32 {
        (self.item.first_row + chunk * CHUNK) as i32
    }

    /// Loads a chunk of a wide and a narrow tensor.
    #[inline(always)]
    unsafe fn load(&self, slot: Slot, maps: [usize; 2], chunk: u32, policy: u64) {
        let (row, head, batch) = (self.tensor_row(chunk), self.item.head as i32, self.item.batch as i32);
        // SAFETY: the slot is free once its empty barrier says so; the maps are those of this launch.
        unsafe {
            slot.wait_empty();
            mbarrier_arrive_expect_tx_if(
                slot.full,
                (Roles::<D, E>::PANELS[0] + Roles::<D, E>::PANELS[1]) * PANEL_BYTES,
                true,
            );
            let load = |map: usize, address: u32, panels: u32| {
                unroll!(P in 2 {
                    cp_async_bulk_tensor_load_if(
                        address + P as u32 * PANEL_BYTES, self.maps.wrapping_add(map), [64 * P as i32, row, head, batch],
                        slot.full, policy, (P as u32) < panels,
                    );
                });
            };
            load(maps[0], slot.address, Roles::<D, E>::PANELS[0]);
            load(maps[1], slot.address + Roles::<D, E>::NARROW, Roles::<D, E>::PANELS[1]);
        }
    }

    /// The filling of the `count`-th chunk that this block outputs, or of those that it does not. Each have half of the ring, so that none
    /// wait behind the others.
    #[inline(always)]
    fn q_do_slot(&self, owned: bool, count: u32) -> Slot {
        if self.sharers == 1 {
            return self.q_do.at(count);
        }
        let half = const { STAGES / 2 };
        let first = if owned { 0 } else { half };
        self.q_do.at(count / half * STAGES + first + count % half)
    }

    /// Loads Q and dO of all chunks.
    #[inline(always)]
    unsafe fn produce_q_do(&self) {
        // The other sharers read them too.
        let policy = createpolicy_evict_normal();
        let (mut own, mut others) = (0, 0);
        // SAFETY: by this function's contract.
        let mut load = |owned: bool, chunk: u32| unsafe {
            let count = if owned { &mut own } else { &mut others };
            self.load(self.q_do_slot(owned, *count), [map::Q, map::DO], chunk, policy);
            *count += 1;
        };
        let mut turns = self.item.share;
        let mut first = self.last_pair();
        // A pair's first chunk has to wait for that of the pair before; what needs not comes first.
        let mut postponed = None;
        loop {
            let is_owned = turns == 0;
            if self.is_whole(first) {
                load(is_owned, first + 1);
            }
            if is_owned && self.sharers > 1 {
                postponed = Some(first);
            } else {
                load(is_owned, first);
                if let Some(chunk) = postponed.take() {
                    load(true, chunk);
                }
            }
            if first == 0 {
                break;
            }
            first -= 2;
            turns = if is_owned { self.sharers - 1 } else { turns - 1 };
        }
        if let Some(chunk) = postponed {
            load(true, chunk);
        }
    }

    /// Loads K and V of this block's pairs, and the checkpoint that enters each.
    #[inline(always)]
    unsafe fn produce_kv(&self) {
        let policy = createpolicy_evict_normal();
        let maps = [map::K, map::V];
        let mut pair = self.last_own_pair();
        let (mut index, mut own) = (0, 0);
        while let Some(first) = pair {
            // SAFETY: as above.
            unsafe {
                if self.is_whole(first) {
                    self.load(self.kv.at(index), maps, first + 1, policy);
                    index += 1;
                }
                let s = self.s.at(own);
                s.wait_empty();
                let panels = D * E / (64 * 64);
                mbarrier_arrive_expect_tx_if(s.full, panels * PANEL_BYTES, true);
                let number = (self.item.first_row / CHUNK + first) / 2;
                unroll!(P in 2 {
                    // The panels lie one after the other.
                    let at = [0, 64 * P as i32, number as i32, self.item.sequence as i32];
                    cp_async_bulk_tensor_load_if(
                        s.address + P as u32 * PANEL_BYTES, self.maps.wrapping_add(map::CHECKPOINTS), at, s.full, policy,
                        (P as u32) < panels,
                    );
                });
                self.load(self.kv.at(index), maps, first, policy);
            }
            index += 1;
            own += 1;
            pair = self.own_pair_before(first);
        }
    }

    /// Carries rows `64 · index …` of Gᵀ through all chunks, backwards.
    #[inline(always)]
    unsafe fn carry_g<T: Element>(&self, params: &Params, decay: Decay, index: u32, thread: u32) {
        let (warp, lane) = (thread / 32, thread % 32);
        let elected = lane == 0;
        let chunk_decay = decay.pow(CHUNK);
        let load_do = |slot: u32| {
            let panel = slot + Roles::<D, E>::NARROW + index * PANEL_BYTES;
            // SAFETY: the slot is full.
            unsafe { load_scaled_columns::<T>(panel, warp, lane, |k| self.table.row_decay(lane, true, k)) }
        };
        let mut g = [0.0f32; 64];
        // As the scan counts them, from the end.
        let segment = params.segments - 1 - self.item.segment;
        if segment > 0 {
            let at = state_index(params, self.item.sequence, segment);
            let state = params.applications[1].states as *const f32;
            let state = state.wrapping_add(at * params.state_len as usize);
            // SAFETY: the scan kernel has filled the workspace.
            unsafe { StatePlace::new(state, [E as usize, 1], 64 * index, warp, lane).load::<D>(&mut g) };
        }

        // Pairs until this block outputs one; 0 when it does.
        let mut turns = self.item.share;
        let mut slot = self.q_do_slot(turns == 0, 0);
        // SAFETY: the first filling.
        unsafe { slot.wait_full() };
        let mut a = load_do(slot.address);
        let (mut chunk, mut own) = (self.num_chunks() - 1, 0);
        loop {
            let owned = turns == 0;
            if owned {
                let copy = self.g.at(own);
                // SAFETY: the slot is free; each warp stores its own 16 rows and says so.
                unsafe {
                    copy.wait_empty();
                    store_rounded::<T, D>(
                        copy.address,
                        Roles::<D, E>::STATE_PANEL_BYTES,
                        64 * index + 16 * warp,
                        lane,
                        &g,
                    );
                    fence_proxy_async();
                    syncwarp();
                    mbarrier_arrive_if(copy.full, elected);
                }
                own += 1;
            }
            // SAFETY: the slot is full; `a` is kept, and `g` left alone, until the wait below.
            unsafe { update_state::<T, D>(&mut g, chunk_decay, &a, slot.address) };
            // Meanwhile the next chunk's A.
            // The first chunk of a pair comes last.
            let next_turns = match turns {
                _ if !chunk.is_multiple_of(2) => turns,
                0 => self.sharers - 1,
                _ => turns - 1,
            };
            let passed = self.num_chunks() - chunk;
            let is_next_owned = next_turns == 0;
            let next_slot = self.q_do_slot(is_next_owned, if is_next_owned { own } else { passed - own });
            let mut next_a = a;
            if chunk > 0 {
                // SAFETY: the next filling.
                unsafe { next_slot.wait_full() };
                next_a = load_do(next_slot.address);
            }
            wait::<D>(&mut g);
            // SAFETY: scratch is for this; this warp has read its part of the slot.
            unsafe {
                keep_alive(&a, self.scratch);
                // One lane speaks for what all have read.
                syncwarp();
                mbarrier_arrive_if(slot.empty, elected);
                // What nobody here outputs is free as far as the output warpgroups are concerned.
                mbarrier_arrive_if(slot.empty, elected && !owned && index == 0);
                if Roles::<D, E>::OUTPUTS == 2 {
                    mbarrier_arrive_if(slot.empty, elected && !owned && index == 0);
                }
            }
            if chunk == 0 {
                break;
            }
            chunk -= 1;
            (a, slot, turns) = (next_a, next_slot, next_turns);
        }
    }

    /// Computes the outputs of this block's pairs. dK, and dQ of the first chunk, are the first warpgroup's; dV, and dQ of the second chunk,
    /// the other's.
    #[inline(always)]
    unsafe fn output<T: Element>(&self, index: u32, thread: u32) {
        let output = OutputWarp { scratch: self.scratch, warp: thread / 32, lane: thread % 32 };
        let mut pair = self.last_own_pair();
        let (mut own, mut staged) = (0, 0);
        while let Some(first) = pair {
            // SAFETY: by this function's contract.
            unsafe { self.output_pair::<T>(output, index, first, own, &mut staged) };
            own += 1;
            pair = self.own_pair_before(first);
        }
    }

    /// Where a warpgroup leaves its outputs to be stored.
    #[inline(always)]
    fn staging(&self, index: u32) -> Ring<1> {
        let barriers = self.o_barriers + index * Ring::<1>::BARRIER_BYTES;
        Ring::new(self.o_panels + index * Roles::<D, E>::OUTPUT_BYTES, Roles::<D, E>::OUTPUT_BYTES, barriers)
    }

    /// Leaves a warp's 16 rows of an output, `N` columns, to be stored.
    #[inline(always)]
    unsafe fn stage<T: Element, const N: u32>(&self, output: OutputWarp, index: u32, staged: &mut u32, o: &Rows) {
        let OutputWarp { warp, lane, .. } = output;
        let slot = self.staging(index).at(*staged);
        // SAFETY: the slot is free; each warp stores its own 16 rows and says so.
        unsafe {
            slot.wait_empty();
            store_rounded::<T, N>(slot.address, PANEL_BYTES, 16 * warp, lane, o);
            fence_proxy_async();
            syncwarp();
            mbarrier_arrive_if(slot.full, lane == 0);
        }
        *staged += 1;
    }

    /// Stores what an output warpgroup leaves.
    #[inline(always)]
    unsafe fn store(&self, index: u32) {
        let (head, batch) = (self.item.head as i32, self.item.batch as i32);
        let policy = createpolicy_evict_first();
        let mut staged = 0;
        let mut store = |map: usize, chunk: u32, panels: u32| {
            let slot = self.staging(index).at(staged);
            staged += 1;
            // SAFETY: the slot is full, and freed when it was read.
            unsafe {
                slot.wait_full();
                let mut row = 0;
                while row < CHUNK {
                    unroll!(P in 2 {
                        let at = [64 * P as i32, self.tensor_row(chunk) + row as i32, head, batch];
                        let from = slot.address + P as u32 * PANEL_BYTES + row * ROW_BYTES;
                        cp_async_bulk_tensor_store_if(self.maps.wrapping_add(map), at, from, policy, (P as u32) < panels);
                    });
                    row += 16;
                }
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read::<0>();
                mbarrier_arrive_if(slot.empty, true);
            }
        };
        let mut pair = self.last_own_pair();
        while let Some(first) = pair {
            let mut stage = self.first_stage(first);
            while stage < 4 {
                let (of_second, is_dq) = (stage < 2, stage == 1 || stage == 2);
                let chunk = first + u32::from(of_second);
                if !is_dq && index == Roles::<D, E>::OUTPUTS - 1 {
                    store(map::DV, chunk, Roles::<D, E>::PANELS[1]);
                }
                if is_dq && self.makes_dq(index, of_second) {
                    store(map::DQ, chunk, Roles::<D, E>::PANELS[0]);
                }
                if !is_dq && index == 0 {
                    store(map::DK, chunk, Roles::<D, E>::PANELS[0]);
                }
                stage += 1;
            }
            pair = self.own_pair_before(first);
        }
        cp_async_bulk_wait_group::<0>();
    }

    /// The stages of a pair: 0, dK and dV of the second chunk, if there is one; 1 and 2, its dQ and the first one's; 3, dK and dV of the
    /// first. This is where they begin.
    #[inline(always)]
    fn first_stage(&self, first: u32) -> u32 {
        if self.is_whole(first) { 0 } else { 2 }
    }

    /// Whether a warpgroup makes dQ of the second chunk, or the first. The second one's is more work, as dK is more than dV; where there
    /// is but one warpgroup, it makes both.
    #[inline(always)]
    fn makes_dq(&self, index: u32, of_second: bool) -> bool {
        Roles::<D, E>::OUTPUTS == 1 || (index == 1) == of_second
    }

    /// Computes what this warpgroup does for a pair, the `own`-th of this block.
    #[inline(always)]
    unsafe fn output_pair<T: Element>(&self, output: OutputWarp, index: u32, first: u32, own: u32, staged: &mut u32) {
        // What is computed from `here` is made anew in each stage, to save registers.
        let elected = output.lane == 0;
        let takes_second = self.makes_dq(index, true);
        let mut stage = self.first_stage(first);
        while stage < 4 {
            let (of_second, is_dq) = (stage < 2, stage == 1 || stage == 2);
            let chunk = first + u32::from(of_second);
            // The second chunk, if there is one, comes first.
            let later = u32::from(!of_second && self.is_whole(first));
            // Only the very last pair may have but one chunk.
            let is_odd = self.item.share == 0 && !self.is_whole(self.last_pair());
            let chunks = (2 * own).saturating_sub(u32::from(is_odd));
            let (q, k) = (self.q_do_slot(true, chunks + later), self.kv.at(chunks + later));
            let copy = if is_dq { self.s.at(own) } else { self.g.at(chunks + later) };
            let first_k = || self.kv.at(here(chunks) + 1);
            // SAFETY: this warpgroup has yet to free these fillings, so it is less than two behind.
            unsafe {
                copy.wait_full();
                if stage == 1 {
                    first_k().wait_full();
                } else {
                    q.wait_full();
                    k.wait_full();
                }
            }
            // A lone first chunk's dQ is nobody else's; its checkpoint has to be waited for all the same, or the wait for the next
            // could pass at once.
            if stage != 2 || self.makes_dq(index, false) {
                let is_short = self.item.first_row + (chunk + 1) * CHUNK > self.seq_len;
                let dv = Operands {
                    x: k.address,
                    y: q.address,
                    z: q.address + Roles::<D, E>::NARROW,
                    s: copy.address,
                    counts_remainder: is_short || self.seq_len <= FEW_ROWS,
                    before: None,
                };
                let (x, z) = if is_dq { (q, k) } else { (k, q) };
                let before = (stage == 1).then(|| first_k().address).map(|k| [k + Roles::<D, E>::NARROW, k]);
                let (x, y) = (x.address + Roles::<D, E>::NARROW, z.address + Roles::<D, E>::NARROW);
                let dq_or_dk = Operands { x, y, z: z.address, before, ..dv };
                let masks = self.table.masks(output.warp, here(output.lane), !is_dq);
                let masks = if stage == 1 { masks.of_state_before() } else { masks };
                // SAFETY: the slots and the state are full.
                unsafe {
                    if !is_dq && index == Roles::<D, E>::OUTPUTS - 1 {
                        let o = output.apply::<T, D, E, 0>(&dv, &masks);
                        self.stage::<T, E>(output, index, staged, &o);
                    }
                    if is_dq || index == 0 {
                        let o = output.apply::<T, E, D, 1>(&dq_or_dk, &masks);
                        self.stage::<T, D>(output, index, staged, &o);
                    }
                }
            }
            // The first chunk is done with last; the second when its dQ is, or is the other warpgroup's.
            let frees = elected && (stage == 3 || stage == u32::from(takes_second));
            // Both dQ take the checkpoint.
            let frees_copy = elected && !(stage == 1 && Roles::<D, E>::OUTPUTS == 1);
            // SAFETY: this warp is done with these.
            unsafe {
                mbarrier_arrive_if(q.empty, frees);
                mbarrier_arrive_if(k.empty, frees);
                mbarrier_arrive_if(copy.empty, frees_copy);
            }
            stage = match stage {
                0 if !takes_second => 2,
                1 if Roles::<D, E>::OUTPUTS == 2 => 3,
                _ => stage + 1,
            };
        }
    }
}
