//! Shared memory: bytes, their history, and the asynchronous copies on their way into them.

use std::boxed::Box;
use std::collections::VecDeque;
use std::format;
use std::vec;
use std::vec::Vec;

use super::clocks::{Epoch, View};
use super::fault::{Access, Action, FaultKind, Space};
use super::launch::SHARED_BASE;
use super::shadow::{Fences, Lists, Origin, Trouble, WORD_BYTES, Word, words_of};

/// What a destination holds while its copy is in flight: a NaN in every element type.
const POISON: u8 = 0xff;

/// The shared memory of one block.
pub(super) struct Shared {
    bytes: Vec<u8>,
    words: Vec<Word>,
    lists: Lists,
    /// Per thread.
    copies: Vec<Copies>,
    /// `fence_proxy_async`.
    pub fences: Fences,
}

/// The asynchronous copies of a thread, oldest first.
#[derive(Default)]
struct Copies {
    pending: VecDeque<Copy>,
    /// Copies in each committed group.
    groups: VecDeque<usize>,
    uncommitted: usize,
}

struct Copy {
    dst: usize,
    data: [u8; 16],
}

impl Shared {
    pub(super) fn new(bytes: u32, threads: u32) -> Self {
        Self {
            bytes: vec![0; bytes as usize],
            words: vec![Word::default(); (bytes as usize).div_ceil(WORD_BYTES)],
            lists: Lists::default(),
            copies: (0..threads).map(|_| Copies::default()).collect(),
            fences: Fences::new(threads as usize),
        }
    }

    /// The beginning of a block.
    pub(super) fn reset(&mut self) {
        self.bytes.fill(0);
        self.words.fill(Word::default());
        self.lists.clear();
        self.fences.clear();
        for copies in &mut self.copies {
            copies.pending.clear();
            copies.groups.clear();
            copies.uncommitted = 0;
        }
    }

    pub(super) fn load<const N: usize>(
        &mut self,
        action: Action,
        addr: u32,
        by: &View<'_>,
    ) -> Result<[u8; N], Box<FaultKind>> {
        let access = shared(action, addr, N);
        let at = self.offset(access)?;
        for (i, word) in self.words[at / WORD_BYTES..][..words_of::<N>()].iter_mut().enumerate() {
            word.read(&mut self.lists, by).map_err(|trouble| explain(trouble, access, i))?;
        }
        Ok(self.bytes[at..at + N].try_into().expect("N bytes"))
    }

    pub(super) fn store<const N: usize>(
        &mut self,
        addr: u32,
        data: [u8; N],
        by: &View<'_>,
    ) -> Result<(), Box<FaultKind>> {
        self.store_as(Action::Store, addr, data, by)
    }

    pub(super) fn store_as<const N: usize>(
        &mut self,
        action: Action,
        addr: u32,
        data: [u8; N],
        by: &View<'_>,
    ) -> Result<(), Box<FaultKind>> {
        let at = self.write::<N>(action, addr, by, Origin::Store)?;
        self.bytes[at..at + N].copy_from_slice(&data);
        Ok(())
    }

    /// Issues a copy, which overwrites its destination from now on in no particular order.
    pub(super) fn copy(&mut self, addr: u32, data: [u8; 16], by: &View<'_>) -> Result<(), Box<FaultKind>> {
        let dst = self.write::<16>(Action::AsyncCopy, addr, by, Origin::CopyInFlight)?;
        self.bytes[dst..dst + 16].fill(POISON);
        let copies = &mut self.copies[by.epoch.thread() as usize];
        copies.pending.push_back(Copy { dst, data });
        copies.uncommitted += 1;
        Ok(())
    }

    /// The destination of a copy that will be issued next, checked before its source is.
    pub(super) fn check_copy(&self, addr: u32) -> Result<(), Box<FaultKind>> {
        self.offset(shared(Action::AsyncCopy, addr, 16)).map(drop)
    }

    pub(super) fn commit_group(&mut self, thread: usize) {
        let copies = &mut self.copies[thread];
        copies.groups.push_back(core::mem::take(&mut copies.uncommitted));
    }

    /// Completes all but the `most_recent` groups: only now does their data arrive.
    pub(super) fn wait_group(&mut self, most_recent: usize, by: &View<'_>) {
        let copies = &mut self.copies[by.epoch.thread() as usize];
        while copies.groups.len() > most_recent {
            let group = copies.groups.pop_front().expect("there are groups left");
            for Copy { dst, data } in copies.pending.drain(..group) {
                self.bytes[dst..dst + 16].copy_from_slice(&data);
                self.words[dst / WORD_BYTES..][..words_of::<16>()].iter_mut().for_each(|word| word.land(by));
            }
        }
    }

    /// Claims `bytes` bytes for a tensor copy, or for an mbarrier.
    pub(super) fn claim(
        &mut self,
        action: Action,
        addr: u32,
        (bytes, alignment): (u32, u32),
        by: &View<'_>,
        origin: Origin,
    ) -> Result<(), Box<FaultKind>> {
        let access = shared(action, addr, bytes as usize);
        let at = self.place(access, alignment)?;
        for (i, word) in self.words[at / WORD_BYTES..][..bytes as usize / WORD_BYTES].iter_mut().enumerate() {
            word.write(&mut self.lists, by, origin).map_err(|trouble| explain(trouble, access, i))?;
        }
        self.bytes[at..at + bytes as usize].fill(POISON);
        Ok(())
    }

    /// Sixteen bytes of a tensor copy arrive.
    pub(super) fn land(&mut self, addr: u32, data: [u8; 16]) {
        let at = (addr - SHARED_BASE) as usize;
        self.bytes[at..at + 16].copy_from_slice(&data);
        self.words[at / WORD_BYTES..][..words_of::<16>()].iter_mut().for_each(|word| word.arrive());
    }

    /// Sixteen bytes that the asynchronous proxy reads, of what everybody concerned has `seen`, until all moments of
    /// `until` have been seen.
    pub(super) fn load_async(
        &mut self,
        action: Action,
        addr: u32,
        seen: &View<'_>,
        until: &[View<'_>],
    ) -> Result<[u8; 16], Box<FaultKind>> {
        let access = shared(action, addr, 16);
        let at = self.offset(access)?;
        for (i, word) in self.words[at / WORD_BYTES..][..words_of::<16>()].iter_mut().enumerate() {
            word.check_async_read(seen, &self.fences).map_err(|trouble| explain(trouble, access, i))?;
            until.iter().for_each(|by| word.note_async_read(&mut self.lists, by));
        }
        Ok(self.bytes[at..at + 16].try_into().expect("16 bytes"))
    }

    /// Bytes that an earlier [`Shared::load_async`] has checked.
    pub(super) fn peek(&self, addr: u32) -> [u8; 16] {
        let at = (addr - SHARED_BASE) as usize;
        self.bytes[at..at + 16].try_into().expect("16 bytes")
    }

    /// When the mbarrier at `addr` was initialised, if there is one.
    pub(super) fn barrier(&self, addr: u32) -> Result<Option<Epoch>, Box<FaultKind>> {
        let at = self.offset(shared(Action::Barrier, addr, 8))?;
        let word = &self.words[at / WORD_BYTES];
        Ok((word.origin == Origin::Barrier).then_some(word.write))
    }

    /// Checks that an address is one of a whole word, and nothing else.
    pub(super) fn check_address(&self, addr: u32) -> Result<(), Box<FaultKind>> {
        self.offset(shared(Action::Store, addr, WORD_BYTES)).map(drop)
    }

    fn write<const N: usize>(
        &mut self,
        action: Action,
        addr: u32,
        by: &View<'_>,
        origin: Origin,
    ) -> Result<usize, Box<FaultKind>> {
        let access = shared(action, addr, N);
        let at = self.offset(access)?;
        for (i, word) in self.words[at / WORD_BYTES..][..words_of::<N>()].iter_mut().enumerate() {
            word.write(&mut self.lists, by, origin).map_err(|trouble| explain(trouble, access, i))?;
        }
        Ok(at)
    }

    #[inline(always)]
    fn offset(&self, access: Access) -> Result<usize, Box<FaultKind>> {
        self.place(access, access.bytes)
    }

    #[inline(always)]
    pub(super) fn place(&self, access: Access, alignment: u32) -> Result<usize, Box<FaultKind>> {
        let offset = access.addr.wrapping_sub(u64::from(SHARED_BASE));
        let size = self.bytes.len() as u64;
        if offset >= size || size - offset < u64::from(access.bytes) {
            let nearest = format!("the block has {size} bytes of shared memory");
            return Err(Box::new(FaultKind::OutOfBounds { access, nearest }));
        }
        if !access.addr.is_multiple_of(u64::from(alignment)) {
            return Err(Box::new(FaultKind::Misaligned { access, alignment }));
        }
        Ok(offset as usize)
    }
}

#[inline(always)]
pub(super) fn shared(action: Action, addr: u32, bytes: usize) -> Access {
    Access { space: Space::Shared, action, addr: u64::from(addr), bytes: bytes as u32 }
}

/// Trouble with word `word` of an access, as a fault.
#[cold]
pub(super) fn explain(trouble: Trouble, access: Access, word: usize) -> Box<FaultKind> {
    Box::new(match trouble {
        Trouble::Unwritten => FaultKind::Uninitialised { access, first: access.addr + (WORD_BYTES * word) as u64 },
        Trouble::Copy { copier, waited } => FaultKind::UseBeforeWait { access, copier, waited },
        Trouble::Race { other, other_wrote } => FaultKind::Race { access, other, other_wrote },
        Trouble::Load { track, landed } => FaultKind::UseBeforeLanding { access, barrier: track, landed },
        Trouble::Barrier => FaultKind::TouchesBarrier { access },
        Trouble::NoFence { writer } => FaultKind::MissingProxyFence { access, writer },
    })
}
