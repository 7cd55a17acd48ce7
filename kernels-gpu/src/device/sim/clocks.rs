//! Happens-before between the threads of a block, by vector clocks.
//!
//! Thread `t` knows, of every thread `u`, up to which moment of `u`'s own time it is ordered after `u`: `seen[t][u]`.
//! A thread's time advances whenever it releases. An access carries its [`Epoch`] (thread, time), and happens before
//! everything that thread `t` does from now on if `t` has seen that time.
//!
//! Whatever orders memory is a [`Clocks::release`] into a clock by those who arrive, and a [`Clocks::acquire`] from
//! it by those who leave: a barrier is both for all its members; an mbarrier keeps its clock between the two.
//!
//! What happens asynchronously has no thread, but it has a [*track*](Clocks::track): a column of its own in every
//! clock. The bytes a barrier brings, the products of a warp and the stores of a thread are each a track whose time is the
//! number of the phase or group; whoever waits for it has [`Clocks::see`]n that time, and passes it on as any other.

use core::ops::Range;
use std::vec;
use std::vec::Vec;

/// A moment in the life of one thread. The default is before everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Epoch(u32);

const TIME_BITS: u32 = 21;

/// Most threads a block can have; as many tracks are left.
pub(super) const MAX_THREADS: u32 = 1 << (31 - TIME_BITS);

/// Tracks that are added at a time.
const MORE_TRACKS: usize = 16;

impl Epoch {
    /// Moment `time` of a thread or track.
    pub(super) fn new(thread: usize, time: u32) -> Self {
        assert!(time < 1 << TIME_BITS, "a thread of this block synchronised more often than the simulator can count");
        Self((thread as u32) << TIME_BITS | time)
    }

    pub(super) fn thread(self) -> u32 {
        self.0 >> TIME_BITS
    }

    pub(super) fn time(self) -> u32 {
        self.0 & ((1 << TIME_BITS) - 1)
    }

    /// Whether this moment lies in what a thread has seen.
    #[inline(always)]
    pub(super) fn in_past_of(self, seen: &[u32]) -> bool {
        self.time() <= seen[self.thread() as usize]
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
    /// Threads and tracks, and tracks to be.
    width: usize,
    /// Threads and tracks.
    used: usize,
    /// `[thread, thread or track]`
    seen: Vec<u32>,
    /// `[warp, thread or track]`: the least that a lane of the warp has seen.
    floor: Vec<u32>,
    floor_is_current: Vec<bool>,
    /// Scratch of `barrier`.
    joined: Vec<u32>,
    /// The least that a thread of a warpgroup has seen.
    group_floor: Vec<u32>,
}

impl Clocks {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads,
            width: threads,
            used: threads,
            seen: vec![0; threads * threads],
            floor: vec![0; threads.div_ceil(32) * threads],
            floor_is_current: vec![false; threads.div_ceil(32)],
            joined: vec![0; threads],
            group_floor: vec![0; threads],
        }
    }

    /// The beginning of a block: everybody at time 1, having seen nothing of anybody else.
    pub(super) fn reset(&mut self) {
        self.seen.fill(0);
        self.seen.iter_mut().step_by(self.width + 1).take(self.threads).for_each(|own| *own = 1);
        self.used = self.threads;
        self.floor_is_current.fill(false);
    }

    /// A track that nobody has seen anything of.
    pub(super) fn track(&mut self) -> usize {
        if self.used == self.width {
            let (old, new) = (self.width, self.width + MORE_TRACKS);
            let widen = |rows: &Vec<u32>| {
                let mut wide = vec![0; rows.len() / old * new];
                for (wide, row) in wide.chunks_exact_mut(new).zip(rows.chunks_exact(old)) {
                    wide[..old].copy_from_slice(row);
                }
                wide
            };
            (self.seen, self.floor) = (widen(&self.seen), widen(&self.floor));
            (self.joined, self.group_floor) = (vec![0; new], vec![0; new]);
            self.width = new;
        }
        self.used += 1;
        self.used - 1
    }

    /// `thread` has waited for a track up to `time`.
    pub(super) fn see(&mut self, thread: usize, track: usize, time: u32) {
        let seen = &mut self.seen[thread * self.width + track];
        *seen = time.max(*seen);
        self.floor_is_current[thread / 32] = false;
    }

    /// A fence by `thread`: its time advances, and everything before is what the fence is about. The time before.
    pub(super) fn fence(&mut self, thread: usize) -> u32 {
        let own = &mut self.seen[thread * self.width + thread];
        *own += 1;
        self.floor_is_current[thread / 32] = false;
        *own - 1
    }

    /// An access by one thread.
    #[inline(always)]
    pub(super) fn view(&self, thread: usize) -> View<'_> {
        let seen = &self.seen[thread * self.width..][..self.width];
        View { epoch: Epoch::new(thread, seen[thread]), seen, seen_by_all: seen }
    }

    /// A read by `thread` on behalf of its whole warp. [`Clocks::settle_floor`] must have been called.
    #[inline(always)]
    pub(super) fn warp_view(&self, thread: usize) -> View<'_> {
        debug_assert!(self.floor_is_current[thread / 32]);
        View { seen_by_all: &self.floor[thread / 32 * self.width..][..self.width], ..self.view(thread) }
    }

    /// Makes [`Clocks::warp_view`] of this warp's threads current.
    pub(super) fn settle_floor(&mut self, warp: usize) {
        if core::mem::replace(&mut self.floor_is_current[warp], true) {
            return;
        }
        let floor = &mut self.floor[warp * self.width..][..self.width];
        floor.fill(u32::MAX);
        for seen in self.seen[warp * 32 * self.width..].chunks_exact(self.width).take(32) {
            floor.iter_mut().zip(seen).for_each(|(least, &time)| *least = time.min(*least));
        }
    }

    /// Makes [`Clocks::group_floor`] that of the warpgroup of `warp`, and [`Clocks::warp_view`] of its threads current.
    pub(super) fn settle_group(&mut self, warp: usize) {
        let first = warp / 4 * 4;
        (first..first + 4).for_each(|warp| self.settle_floor(warp));
        let mut floors = self.floor[first * self.width..].chunks_exact(self.width).take(4);
        self.group_floor.copy_from_slice(floors.next().expect("four warps"));
        for floor in floors {
            self.group_floor.iter_mut().zip(floor).for_each(|(least, &time)| *least = time.min(*least));
        }
    }

    /// The least that the threads of the warpgroup settled last have seen.
    pub(super) fn group_floor(&self) -> &[u32] {
        &self.group_floor
    }

    /// What `thread` did until now happens before whatever acquires `clock` from now on.
    pub(super) fn release(&mut self, thread: usize, clock: &mut [u32]) {
        let seen = &mut self.seen[thread * self.width..][..self.width];
        clock.iter_mut().zip(&*seen).for_each(|(joined, &time)| *joined = time.max(*joined));
        seen[thread] += 1;
        self.floor_is_current[thread / 32] = false;
    }

    /// As [`Clocks::release`], into a clock that may have been made before there were as many tracks.
    pub(super) fn release_into(&mut self, thread: usize, clock: &mut Vec<u32>) {
        if clock.len() < self.width {
            clock.resize(self.width, 0);
        }
        self.release(thread, clock);
    }

    /// What was released into `clock` happens before what `thread` does from now on.
    pub(super) fn acquire(&mut self, thread: usize, clock: &[u32]) {
        let seen = &mut self.seen[thread * self.width..][..self.width];
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
