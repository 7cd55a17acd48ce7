//! What the simulator remembers of every 4-byte word: its last write, and the reads since that are not ordered.
//!
//! This is FastTrack with reader lists in place of reader clocks: a list keeps only reads that no later read of the
//! word is ordered after, so between two barriers it holds at most one entry per reading thread, and mostly very few.

use std::vec;
use std::vec::Vec;

use super::clocks::{Epoch, View};

/// Bytes of a word, the unit of memory that is tracked; every access is whole words.
pub(super) const WORD_BYTES: usize = 4;

/// The words of an access of `N` bytes.
pub(super) const fn words_of<const N: usize>() -> usize {
    const { assert!(N.is_multiple_of(WORD_BYTES), "smaller accesses need smaller words: lower WORD_BYTES") };
    N / WORD_BYTES
}

/// How the bytes of a word got there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Origin {
    /// Nobody wrote them.
    #[default]
    Nobody,
    /// A store, or data from before the launch.
    Store,
    /// A `cp.async` that its thread has waited for.
    CopyDone,
    /// A tensor copy that is there; the write is a moment on the track of its mbarrier.
    LoadDone,
    /// A `cp.async` that its thread has not waited for. From here on, nobody may touch them.
    CopyInFlight,
    /// A tensor copy that is not there yet.
    LoadInFlight,
    /// An mbarrier, initialised by that write.
    Barrier,
}

impl Origin {
    fn may_be_touched(self) -> bool {
        (self as u8) < Self::CopyInFlight as u8
    }
}

/// The history of one word.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Word {
    /// The last write: for a copy its issue, and once it was waited for, that wait.
    pub write: Epoch,
    /// List of unordered reads since.
    pub readers: List,
    pub origin: Origin,
}

/// Why an access is not in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Unwritten,
    Copy { copier: u32, waited: bool },
    Load { track: u32, landed: bool },
    Race { other: u32, other_wrote: bool },
    Barrier,
    NoFence { writer: u32 },
}

impl Word {
    /// Checks and records a read.
    #[inline(always)]
    pub(super) fn read(&mut self, lists: &mut Lists, by: &View<'_>) -> Result<(), Trouble> {
        if self.origin == Origin::Nobody {
            return Err(Trouble::Unwritten);
        }
        self.is_written_before(by)?;
        lists.note(&mut self.readers, by);
        Ok(())
    }

    /// Checks and records a write.
    #[inline(always)]
    pub(super) fn write(&mut self, lists: &mut Lists, by: &View<'_>, origin: Origin) -> Result<(), Trouble> {
        self.is_written_before(by)?;
        if let Some(other) = lists.unordered(self.readers, by) {
            return Err(Trouble::Race { other, other_wrote: false });
        }
        lists.free(&mut self.readers);
        (self.write, self.origin) = (by.epoch, origin);
        Ok(())
    }

    /// Checks a read by the asynchronous proxy, in the past of which lies what everybody concerned has seen.
    pub(super) fn check_async_read(&self, seen: &View<'_>, fences: &Fences) -> Result<(), Trouble> {
        if self.origin == Origin::Nobody {
            return Err(Trouble::Unwritten);
        }
        self.is_written_before(seen)?;
        let is_generic = matches!(self.origin, Origin::Store | Origin::CopyDone);
        if is_generic && !fences.cover(self.write, seen.seen_by_all) {
            return Err(Trouble::NoFence { writer: self.write.thread() });
        }
        Ok(())
    }

    /// Records a read that [`Word::check_async_read`] allowed: it goes on until the moment `by.epoch` is seen.
    pub(super) fn note_async_read(&mut self, lists: &mut Lists, by: &View<'_>) {
        lists.note(&mut self.readers, by);
    }

    /// The tensor copy into this word arrived.
    pub(super) fn arrive(&mut self) {
        debug_assert_eq!(self.origin, Origin::LoadInFlight);
        self.origin = Origin::LoadDone;
    }

    /// The copy into this word was waited for.
    pub(super) fn land(&mut self, by: &View<'_>) {
        debug_assert_eq!(self.origin, Origin::CopyInFlight);
        (self.write, self.origin) = (by.epoch, Origin::CopyDone);
    }

    #[inline(always)]
    fn is_written_before(&self, by: &View<'_>) -> Result<(), Trouble> {
        if self.origin.may_be_touched() && self.write.in_past_of(by.seen_by_all) {
            return Ok(());
        }
        let writer = self.write.thread();
        Err(match self.origin {
            Origin::CopyInFlight => Trouble::Copy { copier: writer, waited: false },
            Origin::CopyDone => Trouble::Copy { copier: writer, waited: true },
            Origin::LoadInFlight => Trouble::Load { track: writer, landed: false },
            Origin::LoadDone => Trouble::Load { track: writer, landed: true },
            Origin::Barrier => Trouble::Barrier,
            Origin::Nobody | Origin::Store => Trouble::Race { other: writer, other_wrote: true },
        })
    }
}

/// When each thread executed a fence of one kind.
pub(super) struct Fences {
    /// Per thread, the last moments before its fences, rising.
    of: Vec<Vec<u32>>,
}

impl Fences {
    pub(super) fn new(threads: usize) -> Self {
        Self { of: vec![Vec::new(); threads] }
    }

    pub(super) fn clear(&mut self) {
        self.of.iter_mut().for_each(Vec::clear);
    }

    /// `thread` executes a fence that separates `time` from what follows.
    pub(super) fn push(&mut self, thread: usize, time: u32) {
        self.of[thread].push(time);
    }

    /// Whether whoever has seen this has seen a fence by the thread of `moment`, after it.
    pub(super) fn cover(&self, moment: Epoch, seen: &[u32]) -> bool {
        let (thread, time) = (moment.thread() as usize, moment.time());
        let of = &self.of[thread];
        let covers = |&fence: &u32| fence < seen[thread];
        if of.last().is_some_and(|fence| *fence >= time && covers(fence)) {
            return true;
        }
        of.get(of.partition_point(|&fence| fence < time)).is_some_and(covers)
    }
}

/// A list in [`Lists`]; the default is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct List(u32);

#[derive(Clone, Copy, Default)]
struct Node {
    epoch: Epoch,
    next: u32,
}

/// The nodes of all reader lists of one memory.
pub(super) struct Lists {
    /// Node 0 is no node.
    nodes: Vec<Node>,
    free: u32,
}

impl Default for Lists {
    fn default() -> Self {
        Self { nodes: vec![Node::default()], free: 0 }
    }
}

impl Lists {
    /// Forgets every list; the words that hold them must forget them too.
    pub(super) fn clear(&mut self) {
        self.nodes.truncate(1);
        self.free = 0;
    }

    /// Adds a read, and drops those it is ordered after: who is ordered after this one is ordered after them.
    #[inline(always)]
    fn note(&mut self, list: &mut List, by: &View<'_>) {
        let (mut at, mut kept, mut placed) = (list.0, 0, false);
        while at != 0 {
            let Node { epoch, next } = self.nodes[at as usize];
            if epoch == by.epoch {
                return;
            }
            if !epoch.in_past_of(by.seen) {
                kept = at;
            } else if !placed {
                self.nodes[at as usize].epoch = by.epoch;
                (kept, placed) = (at, true);
            } else {
                self.nodes[kept as usize].next = next;
                self.nodes[at as usize].next = self.free;
                self.free = at;
            }
            at = next;
        }
        if !placed {
            let node = Node { epoch: by.epoch, next: list.0 };
            if self.free == 0 {
                list.0 = self.nodes.len() as u32;
                self.nodes.push(node);
            } else {
                list.0 = self.free;
                self.free = core::mem::replace(&mut self.nodes[list.0 as usize], node).next;
            }
        }
    }

    /// A thread whose read is not ordered before `by`.
    #[inline(always)]
    fn unordered(&self, list: List, by: &View<'_>) -> Option<u32> {
        let mut at = list.0;
        while at != 0 {
            let Node { epoch, next } = self.nodes[at as usize];
            if !epoch.in_past_of(by.seen_by_all) {
                return Some(epoch.thread());
            }
            at = next;
        }
        None
    }

    #[inline(always)]
    fn free(&mut self, list: &mut List) {
        let mut at = core::mem::take(&mut list.0);
        while at != 0 {
            let next = core::mem::replace(&mut self.nodes[at as usize].next, self.free);
            self.free = at;
            at = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::clocks::Clocks;
    use super::*;

    #[test]
    fn reader_lists_stay_short_and_lose_nobody() {
        let mut clocks = Clocks::new(64);
        clocks.reset();
        let (mut lists, mut word) = (Lists::default(), Word { origin: Origin::Store, ..Word::default() });
        for _ in 0..3 {
            for thread in 0..64 {
                word.read(&mut lists, &clocks.view(thread)).unwrap();
                word.read(&mut lists, &clocks.view(thread)).unwrap();
            }
            clocks.barrier(0..64);
        }
        assert_eq!(lists.nodes.len(), 65);
        word.read(&mut lists, &clocks.view(7)).unwrap();
        let race = Trouble::Race { other: 7, other_wrote: false };
        assert_eq!(word.write(&mut lists, &clocks.view(8), Origin::Store), Err(race));
        assert_eq!(word.write(&mut lists, &clocks.view(7), Origin::Store), Ok(()));
        assert_eq!(word.readers, List(0));
    }
}
