//! Happens-before between the threads of a block, by vector clocks.
//!
//! Thread `t` knows, of every thread `u`, up to which moment of `u`'s own time it is ordered after `u`: `seen[t][u]`.
//! A thread's time advances whenever it releases. An access carries its [`Epoch`] (thread, time), and happens before
//! everything that thread `t` does from now on if `t` has seen that time.
//!
//! Whatever orders memory is a [`Clocks::release`] into a clock by those who arrive, and a [`Clocks::acquire`] from
//! it by those who leave: a barrier is both for all its members; an mbarrier keeps its clock between the two.

use core::ops::Range;
use std::vec;
use std::vec::Vec;

/// A moment in the life of one thread. The default is before everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Epoch(u32);

const TIME_BITS: u32 = 22;

/// Most threads a block can have.
pub(super) const MAX_THREADS: u32 = 1 << (32 - TIME_BITS);

impl Epoch {
    fn new(thread: usize, time: u32) -> Self {
        assert!(time < 1 << TIME_BITS, "a thread of this block synchronised more often than the simulator can count");
        Self((thread as u32) << TIME_BITS | time)
    }

    pub(super) fn thread(self) -> u32 {
        self.0 >> TIME_BITS
    }

    /// Whether this moment lies in what a thread has seen.
    #[inline(always)]
    pub(super) fn in_past_of(self, seen: &[u32]) -> bool {
        self.0 & ((1 << TIME_BITS) - 1) <= seen[self.thread() as usize]
    }
}

/// What decides whether an access is in order.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    /// The moment of the access.
    pub epoch: Epoch,
    /// What the accessing thread has seen.
    pub seen: &'a [u32],
    /// What everybody who gets the data has seen: `seen`, except for a warp-wide read.
    pub seen_by_all: &'a [u32],
}

/// The clocks of a block.
pub(super) struct Clocks {
    threads: usize,
    /// `[thread, thread]`
    seen: Vec<u32>,
    /// `[warp, thread]`: the least that a lane of the warp has seen.
    floor: Vec<u32>,
    floor_is_current: Vec<bool>,
    /// Scratch of `barrier`.
    joined: Vec<u32>,
}

impl Clocks {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads,
            seen: vec![0; threads * threads],
            floor: vec![0; threads.div_ceil(32) * threads],
            floor_is_current: vec![false; threads.div_ceil(32)],
            joined: vec![0; threads],
        }
    }

    /// The beginning of a block: everybody at time 1, having seen nothing of anybody else.
    pub(super) fn reset(&mut self) {
        self.seen.fill(0);
        self.seen.iter_mut().step_by(self.threads + 1).for_each(|own| *own = 1);
        self.floor_is_current.fill(false);
    }

    /// An access by one thread.
    #[inline(always)]
    pub(super) fn view(&self, thread: usize) -> View<'_> {
        let seen = &self.seen[thread * self.threads..][..self.threads];
        View { epoch: Epoch::new(thread, seen[thread]), seen, seen_by_all: seen }
    }

    /// A read by `thread` on behalf of its whole warp. [`Clocks::settle_floor`] must have been called.
    #[inline(always)]
    pub(super) fn warp_view(&self, thread: usize) -> View<'_> {
        debug_assert!(self.floor_is_current[thread / 32]);
        View { seen_by_all: &self.floor[thread / 32 * self.threads..][..self.threads], ..self.view(thread) }
    }

    /// Makes [`Clocks::warp_view`] of this warp's threads current.
    pub(super) fn settle_floor(&mut self, warp: usize) {
        if core::mem::replace(&mut self.floor_is_current[warp], true) {
            return;
        }
        let floor = &mut self.floor[warp * self.threads..][..self.threads];
        floor.fill(u32::MAX);
        for seen in self.seen[warp * 32 * self.threads..].chunks_exact(self.threads).take(32) {
            floor.iter_mut().zip(seen).for_each(|(least, &time)| *least = time.min(*least));
        }
    }

    /// What `thread` did until now happens before whatever acquires `clock` from now on.
    pub(super) fn release(&mut self, thread: usize, clock: &mut [u32]) {
        let seen = &mut self.seen[thread * self.threads..][..self.threads];
        clock.iter_mut().zip(&*seen).for_each(|(joined, &time)| *joined = time.max(*joined));
        seen[thread] += 1;
        self.floor_is_current[thread / 32] = false;
    }

    /// What was released into `clock` happens before what `thread` does from now on.
    pub(super) fn acquire(&mut self, thread: usize, clock: &[u32]) {
        let seen = &mut self.seen[thread * self.threads..][..self.threads];
        seen.iter_mut().zip(clock).for_each(|(time, &joined)| *time = joined.max(*time));
        self.floor_is_current[thread / 32] = false;
    }

    /// A barrier of all these threads.
    pub(super) fn barrier(&mut self, members: Range<usize>) {
        let mut joined = core::mem::take(&mut self.joined);
        joined.fill(0);
        for thread in members.clone() {
            self.release(thread, &mut joined);
        }
        for thread in members {
            self.acquire(thread, &joined);
        }
        self.joined = joined;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_orders_its_members_and_nobody_else() {
        let mut clocks = Clocks::new(96);
        clocks.reset();
        let before = clocks.view(3).epoch;
        assert!(before.in_past_of(clocks.view(3).seen));
        assert!(!before.in_past_of(clocks.view(4).seen));
        clocks.barrier(0..32);
        let after = clocks.view(3).epoch;
        assert!(before.in_past_of(clocks.view(4).seen));
        assert!(!after.in_past_of(clocks.view(4).seen));
        assert!(!before.in_past_of(clocks.view(40).seen));
        // 31 carries it on: order is transitive.
        clocks.barrier(31..96);
        assert!(before.in_past_of(clocks.view(40).seen));
        assert!(!after.in_past_of(clocks.view(40).seen));
    }

    #[test]
    fn a_warp_has_seen_what_its_last_lane_has() {
        let mut clocks = Clocks::new(64);
        clocks.reset();
        let write = clocks.view(40).epoch;
        clocks.barrier(31..41);
        clocks.settle_floor(0);
        assert!(write.in_past_of(clocks.warp_view(31).seen));
        assert!(!write.in_past_of(clocks.warp_view(31).seen_by_all));
        clocks.barrier(0..32);
        clocks.settle_floor(0);
        assert!(write.in_past_of(clocks.warp_view(0).seen_by_all));
    }
}
