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

/// Whose releases a wait acquires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Those of the barrier's block.
    Block,
    /// Those of all blocks of the cluster.
    Cluster,
}

/// What was released into a phase.
#[derive(Default)]
struct Released {
    /// By the barrier's block, and by copies.
    here: Vec<u32>,
    /// By other blocks.
    elsewhere: Vec<u32>,
}

impl Released {
    fn acquire(&self, thread: usize, scope: Scope, clocks: &mut Clocks) {
        clocks.acquire(thread, &self.here);
        if scope == Scope::Cluster {
            clocks.acquire(thread, &self.elsewhere);
        }
    }
}

/// One mbarrier. What is in shared memory is only that it is there.
pub(super) struct Mbarrier {
    pub addr: u32,
    /// Its track: landing in phase `p` is moment `p + 1`.
    pub track: usize,
    /// Arrivals of a phase.
    count: u32,
    /// Arrivals that the phase lacks.
    pub pending: u32,
    /// Bytes that the phase lacks; fewer than none where another block's copy landed before they were expected.
    pub missing_bytes: i32,
    /// Bytes for which a copy was issued.
    issued_bytes: i32,
    /// Phases that are complete.
    pub phase: u32,
    /// What was released into the phase in progress.
    gathered: Released,
    /// What was released into the last phase.
    released: Released,
    waiters: Vec<(usize, Scope)>,
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
            gathered: Released::default(),
            released: Released::default(),
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

    /// An arrival, from this block or another, that makes the phase expect so many bytes more; who may go on.
    pub(super) fn arrive(
        &mut self,
        bytes: u32,
        (thread, is_remote): (usize, bool),
        clocks: &mut Clocks,
    ) -> Result<Vec<usize>, Box<FaultKind>> {
        if self.pending == 0 {
            return Err(self.trouble(BarrierProblem::TooManyArrivals));
        }
        self.missing_bytes = self.missing_bytes.saturating_add_unsigned(bytes);
        if bytes > MAX_COUNT || self.missing_bytes > MAX_COUNT as i32 {
            let what = format!("an mbarrier counts at most {MAX_COUNT} bytes a phase");
            return Err(Box::new(FaultKind::Invalid { what }));
        }
        let gathered = if is_remote { &mut self.gathered.elsewhere } else { &mut self.gathered.here };
        clocks.release_into(thread, gathered);
        self.pending -= 1;
        self.complete(clocks)
    }

    /// A copy of so many bytes is on its way, from this block or another.
    pub(super) fn issue(&mut self, bytes: u32, is_remote: bool) -> Result<(), Box<FaultKind>> {
        self.issued_bytes += bytes as i32;
        if !is_remote && self.issued_bytes > self.missing_bytes {
            return Err(self.trouble(BarrierProblem::UnexpectedBytes));
        }
        Ok(())
    }

    /// A copy of so many bytes arrived; who may go on.
    pub(super) fn land(&mut self, bytes: u32, clocks: &mut Clocks) -> Result<Vec<usize>, Box<FaultKind>> {
        self.issued_bytes -= bytes as i32;
        self.missing_bytes -= bytes as i32;
        let gathered = &mut self.gathered.here;
        if gathered.len() <= self.track {
            gathered.resize(self.track + 1, 0);
        }
        gathered[self.track] = self.phase + 1;
        self.complete(clocks)
    }

    /// A thread waits for the phase of this parity: whether it is complete.
    pub(super) fn wait(&mut self, parity: u32, (thread, scope): (usize, Scope), clocks: &mut Clocks) -> bool {
        if self.phase % 2 == parity {
            self.waiters.push((thread, scope));
            return false;
        }
        self.released.acquire(thread, scope, clocks);
        true
    }

    fn complete(&mut self, clocks: &mut Clocks) -> Result<Vec<usize>, Box<FaultKind>> {
        if self.pending > 0 || self.missing_bytes > 0 {
            return Ok(Vec::new());
        }
        if self.missing_bytes < 0 {
            return Err(self.trouble(BarrierProblem::UnexpectedBytes));
        }
        (self.phase, self.pending) = (self.phase + 1, self.count);
        core::mem::swap(&mut self.gathered, &mut self.released);
        self.gathered.here.fill(0);
        self.gathered.elsewhere.fill(0);
        for &(waiter, scope) in &self.waiters {
            self.released.acquire(waiter, scope, clocks);
        }
        Ok(self.waiters.drain(..).map(|(waiter, _)| waiter).collect())
    }
}
