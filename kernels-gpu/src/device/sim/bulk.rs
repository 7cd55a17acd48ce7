//! The copy engine: boxes of a tensor to shared memory and back.
//!
//! It does everything as late as it may: a load lands when no thread can run without it, a store reads shared memory
//! when its thread waits for that.

use core::panic::Location;
use std::boxed::Box;
use std::collections::VecDeque;
use std::format;
use std::vec::Vec;

use super::clocks::{Epoch, View};
use super::fault::{Action, Fault, FaultKind};
use super::launch::SHARED_BASE;
use super::machine::Machine;
use super::matrix::LANES;
use super::shadow::Origin;
use super::shared::shared;
use super::wgmma::Groups;
use crate::abi::{BOX_COLS, TensorMap, TensorMapSource};

/// Bytes of a row of a box: one period of the swizzle.
const ROW_BYTES: u32 = 2 * BOX_COLS;

/// What a swizzled box must be aligned to.
const ALIGNMENT: u32 = 1024;

/// First word of a tensor map.
const MAGIC: u64 = u64::from_le_bytes(*b"box 64x2");

/// What the policy functions return.
pub(super) const POLICIES: [u64; 2] = [0x12f0_0000_0000_0000, 0x14f0_0000_0000_0000];

type At = &'static Location<'static>;

/// The tensor map of the simulator's copy engine.
///
/// # Panics
/// If the engine of a GPU could not take it: addresses and strides that are no multiples of 16, no rows in a box or more
/// than 256, no element.
pub fn encode_tensor_map(source: &TensorMapSource) -> TensorMap {
    let TensorMapSource { address, dims, strides, box_rows } = *source;
    assert!(address.is_multiple_of(16), "a tensor must be 16-byte aligned: {source:?}");
    assert!(strides.iter().all(|&stride| stride.is_multiple_of(16)), "strides must be multiples of 16: {source:?}");
    assert!((1..=256).contains(&box_rows), "a box has 1 to 256 rows: {source:?}");
    assert!(dims.iter().all(|&dim| dim > 0), "a tensor must have an element: {source:?}");
    let pair = |lo: u32, hi: u32| u64::from(lo) | u64::from(hi) << 32;
    let mut words = [0; 16];
    words[..4].copy_from_slice(&[MAGIC, address, pair(dims[0], dims[1]), pair(dims[2], dims[3])]);
    words[4..7].copy_from_slice(&strides);
    words[7] = box_rows.into();
    TensorMap(words)
}

/// A box of a tensor.
#[derive(Clone, Copy)]
struct TensorBox {
    source: TensorMapSource,
    at: [i32; 4],
}

impl TensorBox {
    /// # Safety
    /// `map` may be read.
    unsafe fn new(map: *const TensorMap, at: [i32; 4], policy: u64) -> Result<Self, Box<FaultKind>> {
        if !POLICIES.contains(&policy) {
            let what = format!("{policy:#x} is no cache policy: it comes from no `createpolicy` function");
            return Err(Box::new(FaultKind::Invalid { what }));
        }
        // SAFETY: the caller's contract; any alignment and any bits will do.
        let TensorMap(words) = unsafe { map.read_unaligned() };
        if words[0] != MAGIC {
            let what = "there is no tensor map at this address".into();
            return Err(Box::new(FaultKind::Invalid { what }));
        }
        let pair = |word: u64| [word as u32, (word >> 32) as u32];
        let ([d0, d1], [d2, d3]) = (pair(words[2]), pair(words[3]));
        let source = TensorMapSource {
            address: words[1],
            dims: [d0, d1, d2, d3],
            strides: [words[4], words[5], words[6]],
            box_rows: words[7] as u32,
        };
        Ok(Self { source, at })
    }

    fn bytes(&self) -> u32 {
        ROW_BYTES * self.source.box_rows
    }

    /// The bytes of row `row` of the box that lie in the tensor, and their address.
    fn inside(&self, row: u32) -> Option<(core::ops::Range<usize>, u64)> {
        let TensorMapSource { address, dims, strides, .. } = self.source;
        let at = self.at.map(i64::from);
        let outer = [at[1] + i64::from(row), at[2], at[3]];
        if outer.iter().zip(&dims[1..]).any(|(index, &dim)| !(0..i64::from(dim)).contains(index)) {
            return None;
        }
        let first = (-at[0]).max(0);
        let end = (i64::from(dims[0]) - at[0]).min(BOX_COLS.into());
        if first >= end {
            return None;
        }
        let offset: u64 = outer.iter().zip(strides).map(|(&index, stride)| index as u64 * stride).sum();
        let addr = address.wrapping_add(offset).wrapping_add(2 * (at[0] + first) as u64);
        Some((2 * first as usize..2 * end as usize, addr))
    }
}

/// Where the swizzle puts the 16 bytes that belong at `addr`.
pub(super) fn swizzle_128b(addr: u32) -> u32 {
    addr ^ (addr >> 7 & 7) << 4
}

/// A load on its way.
pub(super) struct Load {
    from: TensorBox,
    dst: u32,
    barrier: usize,
    thread: usize,
    at: At,
}

/// A store that was issued.
struct Store {
    to: TensorBox,
    src: u32,
    /// What was read, once it was read.
    rows: Option<Vec<[u8; ROW_BYTES as usize]>>,
    at: At,
}

/// The stores of a thread.
#[derive(Default)]
pub(super) struct Stores {
    /// Its reads of shared memory: group `g` ends at moment `g + 1`.
    track: Option<usize>,
    uncommitted: Vec<Store>,
    /// Groups that are not written yet, oldest first.
    groups: VecDeque<Vec<Store>>,
    /// Groups that are written.
    written: u32,
}

impl Stores {
    fn committed(&self) -> u32 {
        self.written + self.groups.len() as u32
    }
}

impl Machine {
    /// # Safety
    /// `map` may be read.
    pub(super) unsafe fn issue_load(
        &mut self,
        dst: u32,
        (map, at, policy): (*const TensorMap, [i32; 4], u64),
        mbarrier: u32,
        line: At,
    ) -> Result<(), Box<FaultKind>> {
        // SAFETY: the caller's contract.
        let from = unsafe { TensorBox::new(map, at, policy) }?;
        let thread = self.current;
        let view = self.clocks.view(thread);
        let index = self.barriers.find(mbarrier, true, &view, &self.shared)?;
        let barrier = &mut self.barriers.all[index];
        let epoch = Epoch::new(barrier.track, barrier.phase + 1);
        let by = View { epoch, ..view };
        let size = (from.bytes(), ALIGNMENT);
        self.shared.place(shared(Action::TensorLoad, dst, size.0 as usize), size.1)?;
        barrier.issue(size.0)?;
        self.shared.claim(Action::TensorLoad, dst, size, &by, Origin::LoadInFlight)?;
        self.loads.push(Load { from, dst, barrier: index, thread, at: line });
        Ok(())
    }

    /// Load number `index` lands.
    pub(super) fn land(&mut self, index: usize) -> Result<(), Box<Fault>> {
        let Load { from, dst, barrier, thread, at } = self.loads.remove(index);
        for row in 0..from.source.box_rows {
            let mut data = [0; ROW_BYTES as usize];
            if let Some((range, addr)) = from.inside(row) {
                let loaded = self.global.borrow_mut().load_row(addr, &mut data[range], &self.clocks.view(thread));
                loaded.map_err(|kind| self.fault(thread, *kind, Some(at)))?;
            }
            let (units, _) = data.as_chunks::<16>();
            for (unit, &data) in units.iter().enumerate() {
                self.shared.land(swizzle_128b(dst + ROW_BYTES * row + 16 * unit as u32), data);
            }
        }
        let woken = self.barriers.all[barrier].land(from.bytes(), &mut self.clocks);
        self.wake(&woken);
        Ok(())
    }

    /// # Safety
    /// `map` may be read.
    pub(super) unsafe fn issue_store(
        &mut self,
        (map, at, policy): (*const TensorMap, [i32; 4], u64),
        src: u32,
        line: At,
    ) -> Result<(), Box<FaultKind>> {
        // SAFETY: the caller's contract.
        let to = unsafe { TensorBox::new(map, at, policy) }?;
        if at.iter().any(|&index| index < 0) {
            let what = format!("a tensor store must not begin before the tensor, as at {at:?}");
            return Err(Box::new(FaultKind::Invalid { what }));
        }
        let thread = self.current;
        self.shared.place(shared(Action::TensorStore, src, to.bytes() as usize), ROW_BYTES)?;
        let track = self.stores[thread].track;
        let track = track.unwrap_or_else(|| self.track(thread as u32));
        self.stores[thread].track = Some(track);
        let view = self.clocks.view(thread);
        let until = Epoch::new(track, self.stores[thread].committed() + 1);
        let until = [View { epoch: until, ..view }];
        for unit in (0..to.bytes()).step_by(16) {
            self.shared.load_async(Action::TensorStore, src + unit, &view, &until)?;
        }
        self.stores[thread].uncommitted.push(Store { to, src, rows: None, at: line });
        Ok(())
    }

    pub(super) fn commit_stores(&mut self) {
        let stores = &mut self.stores[self.current];
        let group = core::mem::take(&mut stores.uncommitted);
        stores.groups.push_back(group);
    }

    /// All but the `most_recent` groups of a thread are read from shared memory.
    pub(super) fn read_stores(&mut self, thread: usize, most_recent: u32) {
        let stores = &mut self.stores[thread];
        let groups = stores.groups.len().saturating_sub(most_recent as usize);
        for store in stores.groups.iter_mut().take(groups).flatten() {
            let row = |row: u32| {
                let mut data = [0; ROW_BYTES as usize];
                let (units, _) = data.as_chunks_mut::<16>();
                for (unit, data) in units.iter_mut().enumerate() {
                    *data = self.shared.peek(swizzle_128b(store.src + ROW_BYTES * row + 16 * unit as u32));
                }
                data
            };
            store.rows.get_or_insert_with(|| (0..store.to.source.box_rows).map(row).collect());
        }
        if let Some(track) = stores.track {
            self.clocks.see(thread, track, stores.committed().saturating_sub(most_recent));
        }
    }

    /// All but the `most_recent` groups of a thread are written to global memory.
    pub(super) fn write_stores(&mut self, thread: usize, most_recent: u32) -> Result<(), Box<FaultKind>> {
        self.read_stores(thread, most_recent);
        let stores = &mut self.stores[thread];
        while stores.groups.len() > most_recent as usize {
            let group = stores.groups.pop_front().expect("there are groups left");
            stores.written += 1;
            for Store { to, rows, .. } in group {
                for (row, data) in rows.iter().flatten().enumerate() {
                    if let Some((range, addr)) = to.inside(row as u32) {
                        let view = self.clocks.view(thread);
                        self.global.borrow_mut().store_row(addr, &data[range], &view)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Every thread exited: nothing may touch the shared memory any more.
    pub(super) fn end(&mut self) -> Result<(), Box<Fault>> {
        if let Some(&Load { thread, at, ref from, .. }) = self.loads.first() {
            let what = format!("the kernel ends before this load of {} bytes has landed", from.bytes());
            return Err(self.fault(thread, FaultKind::Invalid { what }, Some(at)));
        }
        if let Some(warp) = self.groups.iter().position(Groups::are_in_flight) {
            let what = "the kernel ends with no wait for the last product of this warp".into();
            return Err(self.fault(warp * LANES, FaultKind::Invalid { what }, None));
        }
        for thread in 0..self.stores.len() {
            let Stores { uncommitted, groups, .. } = &self.stores[thread];
            let unread = groups.iter().flatten().chain(uncommitted).find(|store| store.rows.is_none());
            if let Some(&Store { at, src, .. }) = unread {
                let offset = src - SHARED_BASE;
                let what = format!("the kernel ends with no wait for this store to have read from offset {offset}");
                return Err(self.fault(thread, FaultKind::Invalid { what }, Some(at)));
            }
            self.write_stores(thread, 0).map_err(|kind| self.fault(thread, *kind, None))?;
        }
        Ok(())
    }

    /// Makes an mbarrier.
    pub(super) fn init_barrier(&mut self, addr: u32, count: u32) -> Result<(), Box<FaultKind>> {
        self.barriers.init((addr, count), self.current, &mut self.clocks, &mut self.shared)?;
        self.owners.push(addr - SHARED_BASE);
        Ok(())
    }

    /// The current thread arrives at an mbarrier, and makes it expect so many bytes.
    pub(super) fn arrive(&mut self, addr: u32, bytes: u32) -> Result<(), Box<FaultKind>> {
        let barrier = self.barriers.find(addr, false, &self.clocks.view(self.current), &self.shared)?;
        let woken = self.barriers.all[barrier].arrive(bytes, self.current, &mut self.clocks)?;
        self.wake(&woken);
        Ok(())
    }
}
