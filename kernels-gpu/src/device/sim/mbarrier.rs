//! The mbarriers of a block.

use std::boxed::Box;
use std::format;
use std::vec::Vec;

use super::clocks::{Clocks, View};
use super::fault::{Access, Action, BarrierProblem, FaultKind, Space};
use super::launch::SHARED_BASE;
use super::shadow::{Fences, Origin};
use super::shared::Shared;

/// Most arrivals, and most bytes, of a phase.
const MAX_COUNT: u32 = (1 << 20) - 1;

/// One mbarrier. What is in shared memory is only that it is there.
pub(super) struct Mbarrier {
    pub addr: u32,
    /// Its track: landing in phase `p` is moment `p + 1`.
    pub track: usize,
    /// Arrivals of a phase.
    count: u32,
    /// Arrivals that the phase lacks.
    pub pending: u32,
    /// Bytes that the phase lacks.
    pub missing_bytes: u32,
    /// Those of them for which a copy was issued.
    issued_bytes: u32,
    /// Phases that are complete.
    pub phase: u32,
    /// What was released into the phase in progress.
    gathered: Vec<u32>,
    /// What was released into the last phase.
    released: Vec<u32>,
    waiters: Vec<usize>,
}

/// All of them.
pub(super) struct Barriers {
    pub all: Vec<Mbarrier>,
    /// `fence_mbarrier_init`.
    pub fences: Fences,
}

impl Barriers {
    pub(super) fn new(threads: usize) -> Self {
        Self { all: Vec::new(), fences: Fences::new(threads) }
    }

    pub(super) fn reset(&mut self) {
        self.all.clear();
        self.fences.clear();
    }

    /// Makes a barrier of 8 bytes of shared memory; its track.
    pub(super) fn init(
        &mut self,
        (addr, count): (u32, u32),
        thread: usize,
        clocks: &mut Clocks,
        shared: &mut Shared,
    ) -> Result<usize, Box<FaultKind>> {
        if count == 0 || count > MAX_COUNT {
            let what = format!("mbarrier.init takes 1 to {MAX_COUNT} arrivals, not {count}");
            return Err(Box::new(FaultKind::Invalid { what }));
        }
        shared.claim(Action::Barrier, addr, (8, 8), &clocks.view(thread), Origin::Barrier)?;
        let track = clocks.track();
        self.all.push(Mbarrier {
            addr,
            track,
            count,
            pending: count,
            missing_bytes: 0,
            issued_bytes: 0,
            phase: 0,
            gathered: Vec::new(),
            released: Vec::new(),
            waiters: Vec::new(),
        });
        Ok(track)
    }

    /// The barrier at `addr`, as seen by a thread, or by the copy engine on its behalf.
    pub(super) fn find(
        &self,
        addr: u32,
        by_engine: bool,
        by: &View<'_>,
        shared: &Shared,
    ) -> Result<usize, Box<FaultKind>> {
        let trouble = |problem| Box::new(FaultKind::Barrier { barrier: addr - SHARED_BASE, problem });
        let init = shared.barrier(addr)?;
        let found = init.and_then(|init| Some((init, self.all.iter().position(|barrier| barrier.addr == addr)?)));
        let (init, at) = found.ok_or_else(|| trouble(BarrierProblem::Uninitialised))?;
        if !init.in_past_of(by.seen) {
            let access = Access { space: Space::Shared, action: Action::Barrier, addr: addr.into(), bytes: 8 };
            return Err(Box::new(FaultKind::Race { access, other: init.thread(), other_wrote: true }));
        }
        if by_engine && !self.fences.cover(init, by.seen) {
            return Err(trouble(BarrierProblem::NotFenced));
        }
        Ok(at)
    }
}

impl Mbarrier {
    pub(super) fn offset(&self) -> u32 {
        self.addr - SHARED_BASE
    }

    fn trouble(&self, problem: BarrierProblem) -> Box<FaultKind> {
        Box::new(FaultKind::Barrier { barrier: self.offset(), problem })
    }

    /// An arrival that makes the phase expect so many bytes more; who may go on.
    pub(super) fn arrive(
        &mut self,
        bytes: u32,
        thread: usize,
        clocks: &mut Clocks,
    ) -> Result<Vec<usize>, Box<FaultKind>> {
        if self.pending == 0 {
            return Err(self.trouble(BarrierProblem::TooManyArrivals));
        }
        self.missing_bytes += bytes;
        if bytes > MAX_COUNT || self.missing_bytes > MAX_COUNT {
            let what = format!("an mbarrier counts at most {MAX_COUNT} bytes a phase");
            return Err(Box::new(FaultKind::Invalid { what }));
        }
        clocks.release_into(thread, &mut self.gathered);
        self.pending -= 1;
        Ok(self.complete(clocks))
    }

    /// A copy of so many bytes is on its way.
    pub(super) fn issue(&mut self, bytes: u32) -> Result<(), Box<FaultKind>> {
        self.issued_bytes += bytes;
        if self.issued_bytes > self.missing_bytes {
            return Err(self.trouble(BarrierProblem::UnexpectedBytes));
        }
        Ok(())
    }

    /// A copy of so many bytes arrived; who may go on.
    pub(super) fn land(&mut self, bytes: u32, clocks: &mut Clocks) -> Vec<usize> {
        self.issued_bytes -= bytes;
        self.missing_bytes -= bytes;
        if self.gathered.len() <= self.track {
            self.gathered.resize(self.track + 1, 0);
        }
        self.gathered[self.track] = self.phase + 1;
        self.complete(clocks)
    }

    /// `thread` waits for the phase of this parity: whether it is complete.
    pub(super) fn wait(&mut self, parity: u32, thread: usize, clocks: &mut Clocks) -> bool {
        if self.phase % 2 == parity {
            self.waiters.push(thread);
            return false;
        }
        clocks.acquire(thread, &self.released);
        true
    }

    fn complete(&mut self, clocks: &mut Clocks) -> Vec<usize> {
        if self.pending > 0 || self.missing_bytes > 0 {
            return Vec::new();
        }
        (self.phase, self.pending) = (self.phase + 1, self.count);
        core::mem::swap(&mut self.gathered, &mut self.released);
        self.gathered.fill(0);
        for &waiter in &self.waiters {
            clocks.acquire(waiter, &self.released);
        }
        core::mem::take(&mut self.waiters)
    }
}
