//! Hopper schedule without checkpoints: warp-specialised `wgmma` fed by TMA, as that of the outputs
//! ([`chunk_output`](super::super::chunk_output)).
//!
//! Block: four warpgroups, one segment, walked forward for dQ and then backward for dK and dV. Where there are fewer segments than
//! multiprocessors several blocks share one: all carry the states along, and each outputs every `sharers`-th chunk. None waits for another.
//!
//! | warpgroup, `E` = 64 | 128 | registers, `D` = `E` = 64, `E` = 64, 128 | work |
//! |---|---|---|---|
//! | 0 state | 0, 1 | 112, 120, 136 | 64 rows of Sᵀ, then Gᵀ, `[E, D]` in f32: publishes them rounded and updates them |
//! | 1, 2 output | 2 | 184, 184, 200 | dQ, or dK and dV, of a chunk: two take turns at dQ, and have one of the others each |
//! | 3 producer | 3 | 32, 24, 40 | one thread issues the loads |
//!
//! | shared memory | bytes |
//! |---|---|
//! | ring of `SLOTS`: Q and dO, K and V, or dO alone, `[64, D]` and `[64, E]` | `SLOTS · 128 (D + E)` |
//! | ring of 2: Sᵀ or Gᵀ `[E, D]` | `4 D E` |
//! | dQ, dK or dV of each output warpgroup | `128 max(D, E)` each |
//! | barriers, scratch | 288 |
//! | powers of λ | 1808 |
//!
//! Chunks are counted from the first row, so the copy engine never begins before a tensor; rows and columns outside read
//! as zero and are not written.

use super::super::chunk_output::FEW_ROWS;
use super::super::warpgroup::{
    DecayTable, Rows, StatePlace, TableMasks, WARPS, load_scaled_columns, store_rounded, update_state, wait,
};
use super::super::{WorkItem, head_decay, state_index};
use super::Roles;
use super::output::{Operands, OutputWarp, map};
use crate::abi::{Params, TensorMap};
use crate::decay::Decay;
use crate::device::{
    cp_async_bulk_commit_group, cp_async_bulk_tensor_load_if, cp_async_bulk_tensor_store_elect,
    cp_async_bulk_wait_group, cp_async_bulk_wait_group_read, createpolicy_evict_first, createpolicy_evict_normal,
    dynamic_smem, fence_mbarrier_init, fence_proxy_async, keep_alive, mbarrier_arrive_expect_tx_if, mbarrier_arrive_if,
    syncthreads, syncwarp, thread_idx_x,
};
use crate::element::Element;
use crate::tile::pipeline::Ring;
use crate::tile::shared::{PANEL_BYTES, ROW_BYTES};
use crate::tile::unroll;
use crate::variants::{BARRIER_BYTES, CHUNK};

/// The kernel.
///
/// # Safety
/// `params` and `maps` come from a validated plan; the grid is `sharers · batch · heads · segments`.
#[inline(always)]
pub unsafe fn gradients<T: Element, const D: u32, const E: u32, const SLOTS: u32>(
    params: &Params,
    maps: *const TensorMap,
) {
    let thread = thread_idx_x();
    let (states, outputs) = (Roles::<D, E>::STATES, Roles::<D, E>::OUTPUTS);
    let block = Block::<D, E, SLOTS>::new(params, maps);
    // SAFETY: `slopes` holds a value for each head.
    let decay = unsafe { head_decay(params, block.item.head) };
    // SAFETY: before anything else, and a barrier follows.
    unsafe {
        block.inputs.init(1, (states + outputs) * WARPS, thread == 0);
        block.s.init(states * WARPS, outputs * WARPS, thread == 0);
        block.table.fill(decay, params.scale, thread);
    }
    fence_mbarrier_init();
    syncthreads();
    let (warpgroup, thread) = (thread / 128, thread % 128);
    if warpgroup == 3 {
        Roles::<D, E>::become_copies();
        if thread == 0 {
            // SAFETY: one thread of the block.
            unsafe { block.produce() };
        }
        return;
    }
    if warpgroup < states {
        Roles::<D, E>::become_state();
        // SAFETY: the state warpgroups of the block, numbered.
        unsafe { block.carry_states::<T>(params, decay, warpgroup, thread) };
    } else {
        Roles::<D, E>::become_output();
        // SAFETY: the output warpgroups of the block, numbered.
        unsafe { block.output::<T>(warpgroup - states, thread) };
    }
}

/// What the roles share.
struct Block<const D: u32, const E: u32, const SLOTS: u32> {
    inputs: Ring<SLOTS>,
    s: Ring<2>,
    o_panels: u32,
    scratch: u32,
    table: DecayTable,
    maps: *const TensorMap,
    num_chunks: u32,
    sharers: u32,
    seq_len: u32,
    item: WorkItem,
}

/// A chunk on its way through a block.
#[derive(Clone, Copy)]
struct Visit {
    /// Chunks before it on this way.
    at: u32,
    /// Chunks until it is this block's turn to output; 0 when it is.
    turns: u32,
    /// Whether for dQ; otherwise for dK and dV.
    forward: bool,
    /// Whether there are no more visits and this is none.
    is_over: bool,
}

impl Visit {
    /// Whether this block outputs the chunk.
    #[inline(always)]
    fn is_owned(&self) -> bool {
        self.turns == 0
    }
}

impl<const D: u32, const E: u32, const SLOTS: u32> Block<D, E, SLOTS> {
    #[inline(always)]
    fn new(params: &Params, maps: *const TensorMap) -> Self {
        let (slot_bytes, state_bytes) = (Roles::<D, E>::SLOT_BYTES, Roles::<D, E>::STATE_BYTES);
        let base = dynamic_smem();
        let s_slots = base + SLOTS * slot_bytes;
        let o_panels = s_slots + 2 * state_bytes;
        let barriers = o_panels + Roles::<D, E>::OUTPUTS * Roles::<D, E>::OUTPUT_BYTES;
        let item = WorkItem::of_block(params);
        Block {
            inputs: Ring::new(base, slot_bytes, barriers),
            s: Ring::new(s_slots, state_bytes, barriers + Ring::<SLOTS>::BARRIER_BYTES),
            o_panels,
            scratch: barriers + BARRIER_BYTES - 16,
            table: DecayTable(barriers + BARRIER_BYTES),
            maps,
            num_chunks: item.num_rows.div_ceil(CHUNK),
            sharers: params.sharers,
            seq_len: params.seq_len,
            item,
        }
    }

    /// The first visit.
    #[inline(always)]
    fn first_visit(&self) -> Visit {
        Visit { at: 0, turns: self.item.share, forward: true, is_over: false }
    }

    /// The visit after `visit`.
    #[inline(always)]
    fn next(&self, visit: Visit) -> Visit {
        let Visit { at, turns, forward, .. } = visit;
        if at + 1 < self.num_chunks {
            Visit { at: at + 1, turns: if turns == 0 { self.sharers - 1 } else { turns - 1 }, ..visit }
        } else {
            Visit { forward: false, is_over: !forward, ..self.first_visit() }
        }
    }

    /// The chunk that is the `at`-th on the way.
    #[inline(always)]
    fn chunk(&self, at: u32, forward: bool) -> u32 {
        if forward { at } else { self.num_chunks - 1 - at }
    }

    /// Row of the tensors that is row 0 of a chunk.
    #[inline(always)]
    fn tensor_row(&self, chunk: u32) -> i32 {
        (self.item.first_row + chunk * CHUNK) as i32
    }

    /// Loads what each visit takes: a slot for the state's update, and another where this block outputs.
    #[inline(always)]
    unsafe fn produce(&self) {
        let policy = createpolicy_evict_normal();
        let (head, batch) = (self.item.head as i32, self.item.batch as i32);
        let mut visit = self.first_visit();
        let mut index = 0;
        while !visit.is_over {
            let row = self.tensor_row(self.chunk(visit.at, visit.forward));
            let load = |index: u32, kv: bool, q: bool, do_: bool| {
                let slot = self.inputs.at(index);
                let wide_panels = if kv || q { Roles::<D, E>::PANELS[0] } else { 0 };
                // SAFETY: the slot is free once its empty barrier says so; the maps are those of this launch.
                unsafe {
                    slot.wait_empty();
                    mbarrier_arrive_expect_tx_if(
                        slot.full,
                        (wide_panels + Roles::<D, E>::PANELS[1]) * PANEL_BYTES,
                        true,
                    );
                    unroll!(P in 2 {
                        let load = |offset: u32, map: usize, is| {
                            let (to, at) = (slot.address + offset + P as u32 * PANEL_BYTES, [64 * P as i32, row, head, batch]);
                            let map = self.maps.wrapping_add(map);
                            cp_async_bulk_tensor_load_if(to, map, at, slot.full, policy, is);
                        };
                        let [wide, narrow] = Roles::<D, E>::PANELS.map(|panels| (P as u32) < panels);
                        load(0, map::K, wide && kv);
                        load(0, map::Q, wide && q);
                        load(Roles::<D, E>::NARROW, map::V, narrow && kv);
                        load(Roles::<D, E>::NARROW, map::DO, narrow && do_);
                    });
                }
            };
            let forward = visit.forward;
            load(index, forward, !forward, !forward);
            index += 1;
            if visit.is_owned() {
                load(index, !forward, false, forward);
                index += 1;
            }
            visit = self.next(visit);
        }
    }

    /// Carries rows `64 · index …` of Sᵀ through all chunks, then of Gᵀ.
    #[inline(always)]
    unsafe fn carry_states<T: Element>(&self, params: &Params, decay: Decay, index: u32, thread: u32) {
        let (warp, lane) = (thread / 32, thread % 32);
        let elected = lane == 0;
        let chunk_decay = decay.pow(CHUNK);
        // What the scan left for a segment.
        let entering = |states: u64, segment: u32| {
            let at = state_index(params, self.item.sequence, segment);
            let state = (states as *const f32).wrapping_add(at * params.state_len as usize);
            StatePlace::new(state, [E as usize, 1], 64 * index, warp, lane)
        };
        let load_z = |slot: u32, forward: bool| {
            let panel = slot + Roles::<D, E>::NARROW + index * PANEL_BYTES;
            // SAFETY: the slot is full.
            unsafe { load_scaled_columns::<T>(panel, warp, lane, |k| self.table.row_decay(lane, !forward, k)) }
        };
        let enter = |s: &mut Rows, forward: bool| {
            let segment = if forward { self.item.segment } else { params.segments - 1 - self.item.segment };
            let states = if forward { params.applications[0].states } else { params.applications[1].states };
            *s = [0.0; 64];
            if segment > 0 {
                // SAFETY: the scan kernel has filled the workspace.
                unsafe { entering(states, segment).load::<D>(s) };
            }
        };

        let mut visit = self.first_visit();
        let mut s = [0.0f32; 64];
        enter(&mut s, true);
        let mut slot = self.inputs.at(0);
        // SAFETY: the first filling.
        unsafe { slot.wait_full() };
        let mut a = load_z(slot.address, visit.forward);
        let (mut first, mut own) = (0, 0);
        loop {
            let owned = visit.is_owned();
            if owned {
                let copy = self.s.at(own);
                // SAFETY: the slot is free; each warp stores its own 16 rows and says so.
                unsafe {
                    copy.wait_empty();
                    store_rounded::<T, D>(
                        copy.address,
                        Roles::<D, E>::STATE_PANEL_BYTES,
                        64 * index + 16 * warp,
                        lane,
                        &s,
                    );
                    fence_proxy_async();
                    syncwarp();
                    mbarrier_arrive_if(copy.full, elected);
                }
                own += 1;
            }
            // SAFETY: the slot is full; `a` is kept, and `s` left alone, until the wait below.
            unsafe { update_state::<T, D>(&mut s, chunk_decay, &a, slot.address) };
            // Meanwhile the next visit's A.
            let next = self.next(visit);
            // The second slot, if there is one, is not read here. But a slot passed unseen could be a filling behind when it is
            // waited for again, and that wait pass at once.
            // SAFETY: the next filling, or this one.
            unsafe { self.inputs.at(first + u32::from(owned)).wait_full() };
            first += 1 + u32::from(owned);
            let next_slot = self.inputs.at(first);
            let mut next_a = a;
            if !next.is_over {
                // SAFETY: the next filling.
                unsafe { next_slot.wait_full() };
                next_a = load_z(next_slot.address, next.forward);
            }
            wait::<D>(&mut s);
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
            if next.is_over {
                break;
            }
            if visit.forward && !next.forward {
                enter(&mut s, false);
            }
            (a, slot, visit) = (next_a, next_slot, next);
        }
    }

    /// Computes dQ of this block's chunks forward, dK and dV backward. Two warpgroups take turns at dQ; dK is the first's, dV the other's.
    #[inline(always)]
    unsafe fn output<T: Element>(&self, index: u32, thread: u32) {
        let (warp, lane) = (thread / 32, thread % 32);
        let output = OutputWarp { scratch: self.scratch, warp, lane };
        // Slots before the walk, and chunks that this block has output.
        let (mut slots, mut own) = (0, 0);
        let mut forward = true;
        loop {
            let own_before = own;
            let masks = self.table.masks(warp, lane, !forward);
            let mut at = self.item.share;
            while at < self.num_chunks {
                // Each chunk takes a slot, and one more if this block outputs it.
                let slot = slots + at + (own - own_before);
                // SAFETY: by this function's contract.
                unsafe { self.output_chunk::<T>(output, index, self.chunk(at, forward), forward, slot, own, &masks) };
                own += 1;
                at += self.sharers;
            }
            slots += self.num_chunks + (own - own_before);
            if !forward {
                break;
            }
            forward = false;
        }
        cp_async_bulk_wait_group::<0>();
    }

    /// Computes what this warpgroup does for a chunk, the `own`-th of this block.
    #[expect(clippy::too_many_arguments)]
    #[inline(always)]
    unsafe fn output_chunk<T: Element>(
        &self,
        output: OutputWarp,
        index: u32,
        chunk: u32,
        forward: bool,
        slot: u32,
        own: u32,
        masks: &TableMasks,
    ) {
        let elected = output.lane == 0;
        // K and V, then dO; backward Q and dO, then K and V.
        let (first, second) = (self.inputs.at(slot), self.inputs.at(slot + 1));
        let copy = self.s.at(own);
        // SAFETY: the state warpgroups passed the first slot before they published the state, and this warpgroup has yet to
        // free it and the second, so this is less than two fillings behind everywhere.
        unsafe {
            copy.wait_full();
            first.wait_full();
            second.wait_full();
        }
        let is_short = self.item.first_row + (chunk + 1) * CHUNK > self.seq_len;
        let dv = Operands {
            x: second.address,
            y: first.address,
            z: first.address + Roles::<D, E>::NARROW,
            s: copy.address,
            counts_remainder: is_short || self.seq_len <= FEW_ROWS,
            before: None,
        };
        let dq_or_dk = Operands {
            x: second.address + Roles::<D, E>::NARROW,
            y: first.address + Roles::<D, E>::NARROW,
            z: first.address,
            ..dv
        };
        // SAFETY: the slots and the state are full.
        unsafe {
            if !forward && index == Roles::<D, E>::OUTPUTS - 1 {
                let o = output.apply::<T, D, E, 0>(&dv, masks);
                self.store::<T, E>(output, index, &o, [map::DV; 2], false, chunk);
            }
            if index == if forward { own % Roles::<D, E>::OUTPUTS } else { 0 } {
                let o = output.apply::<T, E, D, 1>(&dq_or_dk, masks);
                self.store::<T, D>(output, index, &o, [map::DK, map::DQ], forward, chunk);
            }
            mbarrier_arrive_if(first.empty, elected);
            mbarrier_arrive_if(second.empty, elected);
            mbarrier_arrive_if(copy.empty, elected);
            // The state warpgroups do not read the second slot.
            mbarrier_arrive_if(second.empty, elected && index == 0);
            if Roles::<D, E>::STATES == 2 {
                mbarrier_arrive_if(second.empty, elected && index == 0);
            }
        }
    }

    /// Stores a warp's 16 rows of a chunk's output, `N` columns, through its warpgroup's panels, as the first or the second tensor.
    #[inline(always)]
    unsafe fn store<T: Element, const N: u32>(
        &self,
        output: OutputWarp,
        index: u32,
        o: &Rows,
        maps: [usize; 2],
        is_second: bool,
        chunk: u32,
    ) {
        let OutputWarp { warp, lane, .. } = output;
        let panels = self.o_panels + index * Roles::<D, E>::OUTPUT_BYTES;
        // The store before has left the panels.
        cp_async_bulk_wait_group_read::<0>();
        syncwarp();
        // SAFETY: each warp stores its own 16 rows.
        unsafe {
            store_rounded::<T, N>(panels, PANEL_BYTES, 16 * warp, lane, o);
            fence_proxy_async();
            syncwarp();
            let policy = createpolicy_evict_first();
            let row = self.tensor_row(chunk) + 16 * warp as i32;
            let store = |map: usize| {
                unroll!(P in 2 {
                    let at = [64 * P as i32, row, self.item.head as i32, self.item.batch as i32];
                    let rows = panels + P as u32 * PANEL_BYTES + 16 * warp * ROW_BYTES;
                    if (P as u32) < N / 64 {
                        cp_async_bulk_tensor_store_elect(self.maps.wrapping_add(map), at, rows, policy);
                    }
                });
            };
            // Constants, or the map's address would be a select.
            if is_second {
                store(maps[1]);
            } else {
                store(maps[0]);
            }
            cp_async_bulk_commit_group();
        }
    }
}
