//! Global memory: the host buffers a kernel may touch, and their history.

use core::cell::RefCell;
use core::marker::PhantomData;
use std::boxed::Box;
use std::format;
use std::rc::Rc;
use std::vec;
use std::vec::Vec;

use super::buffer::Element;
use super::clocks::{Epoch, View};
use super::fault::{Access, Action, FaultKind, Space};
use super::shadow::{List, Lists, Origin, WORD_BYTES, Word, words_of};
use super::shared::explain;

/// The buffers that a kernel may touch. It borrows them, and hands out their addresses.
///
/// Kernels address the host's memory directly, so an address is what a kernel gets in its parameters; every access is
/// looked up here. An overrun that ends in another registered buffer is an access to that one; [`Buffer`](super::Buffer)
/// keeps them apart. The memory remembers across launches what was written; launches are ordered, their blocks are not.
#[derive(Default)]
pub struct GlobalMemory<'a> {
    pub(super) shared: Rc<RefCell<Global>>,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> GlobalMemory<'a> {
    /// No buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// A buffer that kernels only read.
    pub fn input<T: Element>(&mut self, name: &'static str, data: &'a [T]) -> u64 {
        self.register(name, data.as_ptr().cast_mut().cast(), size_of_val(data), None)
    }

    /// A buffer that kernels may write, and may read only what they wrote.
    pub fn output<T: Element>(&mut self, name: &'static str, data: &'a mut [T]) -> u64 {
        self.register(name, data.as_mut_ptr().cast(), size_of_val(data), Some(Origin::Nobody))
    }

    /// A buffer that kernels may read and write.
    pub fn in_out<T: Element>(&mut self, name: &'static str, data: &'a mut [T]) -> u64 {
        self.register(name, data.as_mut_ptr().cast(), size_of_val(data), Some(Origin::Store))
    }

    /// How many 4-byte words of the output at `address` no kernel has written.
    ///
    /// # Panics
    /// If no output or in-out buffer was registered at `address`.
    pub fn unwritten_words(&self, address: u64) -> usize {
        let global = self.shared.borrow();
        let region = global.regions.iter().find(|region| region.start == address && region.writable);
        let region = region.expect("the address of an output");
        region.words.iter().filter(|word| word.word.origin == Origin::Nobody).count()
    }

    fn register(&mut self, name: &'static str, base: *mut u8, len: usize, written: Option<Origin>) -> u64 {
        let start = base as u64;
        let history = |origin| {
            vec![GlobalWord { word: Word { origin, ..Word::default() }, ..GlobalWord::default() }; words(start, len)]
        };
        let words = written.map(history).unwrap_or_default();
        if len > 0 {
            let region = Region { name, start, base, len, writable: written.is_some(), words };
            self.shared.borrow_mut().regions.push(region);
        }
        start
    }
}

/// Words that `len` bytes at `start` touch.
fn words(start: u64, len: usize) -> usize {
    (start as usize % WORD_BYTES + len).div_ceil(WORD_BYTES)
}

/// What [`GlobalMemory`] shares with a launch that is running.
#[derive(Default)]
pub(super) struct Global {
    regions: Vec<Region>,
    /// The region of the last access.
    last: usize,
    lists: Lists,
    launch: Blocks,
}

struct Region {
    name: &'static str,
    start: u64,
    base: *mut u8,
    len: usize,
    writable: bool,
    /// Empty for an input.
    words: Vec<GlobalWord>,
}

/// The history of one word. Blocks are numbered through all launches, from 1 on.
#[derive(Clone, Copy, Default)]
struct GlobalWord {
    /// The history within the block `writer` (writes) and `reader` (reads).
    word: Word,
    writer: u32,
    /// The last block that read it.
    reader: u32,
    /// Another block that read it, if any did.
    other_reader: u32,
}

/// The blocks of the running launch.
#[derive(Clone, Copy, Default)]
struct Blocks {
    /// Number of block (0, 0, 0).
    first: u32,
    /// Number after the last one's.
    end: u32,
    grid: [u32; 3],
    current: u32,
}

impl Blocks {
    /// Whether an access of block `number` is not ordered before the current block.
    #[inline(always)]
    fn is_concurrent(&self, number: u32) -> bool {
        number >= self.first && number != self.current
    }

    fn index(&self, number: u32) -> [u32; 3] {
        let ([x, y, _], linear) = (self.grid, number - self.first);
        [linear % x, linear / x % y, linear / x / y]
    }
}

impl Global {
    /// A launch of `grid` blocks begins, after everything before it.
    pub(super) fn begin_launch(&mut self, grid: [u32; 3]) {
        let first = self.launch.end.max(1);
        let blocks = grid.iter().try_fold(1u32, |product, &n| product.checked_mul(n));
        let end = blocks.and_then(|blocks| first.checked_add(blocks)).expect("fewer than 2^32 blocks per memory");
        self.launch = Blocks { first, end, grid, current: 0 };
    }

    /// Block number `linear` of the launch begins.
    pub(super) fn begin_block(&mut self, linear: u32) -> [u32; 3] {
        self.launch.current = self.launch.first + linear;
        self.lists.clear();
        self.launch.index(self.launch.current)
    }

    pub(super) fn load<const N: usize>(
        &mut self,
        action: Action,
        addr: u64,
        by: &View<'_>,
    ) -> Result<[u8; N], Box<FaultKind>> {
        let source = self.access::<N>(action, addr, by)?;
        let mut data = [0; N];
        // SAFETY: `access` returns a pointer to N bytes of a registered buffer, which `GlobalMemory` borrows.
        unsafe { source.copy_to_nonoverlapping(data.as_mut_ptr(), N) };
        Ok(data)
    }

    pub(super) fn store<const N: usize>(
        &mut self,
        addr: u64,
        data: [u8; N],
        by: &View<'_>,
    ) -> Result<(), Box<FaultKind>> {
        let target = self.access::<N>(Action::Store, addr, by)?;
        // SAFETY: as in `load`; the buffer is writable, so the borrow is exclusive, and its type takes any bits.
        unsafe { target.copy_from_nonoverlapping(data.as_ptr(), N) };
        Ok(())
    }

    /// Reads a piece of a row for the copy engine.
    pub(super) fn load_row(&mut self, addr: u64, data: &mut [u8], by: &View<'_>) -> Result<(), Box<FaultKind>> {
        let access = Access { space: Space::Global, action: Action::TensorLoad, addr, bytes: data.len() as u32 };
        let source = self.access_any(access, false, by)?;
        // SAFETY: `access_any` returns a pointer to so many bytes of a registered buffer.
        unsafe { source.copy_to_nonoverlapping(data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    /// Writes a piece of a row for the copy engine.
    pub(super) fn store_row(&mut self, addr: u64, data: &[u8], by: &View<'_>) -> Result<(), Box<FaultKind>> {
        let access = Access { space: Space::Global, action: Action::TensorStore, addr, bytes: data.len() as u32 };
        let target = self.access_any(access, true, by)?;
        // SAFETY: as in `load_row`; the buffer is writable, so the borrow is exclusive, and its type takes any bits.
        unsafe { target.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        Ok(())
    }

    /// Checks and records an access; a pointer to its bytes.
    fn access<const N: usize>(&mut self, action: Action, addr: u64, by: &View<'_>) -> Result<*mut u8, Box<FaultKind>> {
        const { assert!(words_of::<N>() > 0) };
        let access = Access { space: Space::Global, action, addr, bytes: N as u32 };
        if !addr.is_multiple_of(N as u64) {
            self.find(access)?;
            return Err(Box::new(FaultKind::Misaligned { access, alignment: N as u32 }));
        }
        self.access_any(access, action == Action::Store, by)
    }

    /// As [`Global::access`], of any size and alignment.
    #[inline(always)]
    fn access_any(&mut self, access: Access, writes: bool, by: &View<'_>) -> Result<*mut u8, Box<FaultKind>> {
        let at = self.find(access)?;
        let Access { addr, bytes, .. } = access;
        let Self { regions, lists, launch, .. } = self;
        let Region { name: buffer, start, base, writable, words, .. } = &mut regions[at];
        if writes && !*writable {
            return Err(Box::new(FaultKind::ReadOnly { access, buffer }));
        }
        let offset = (addr - *start) as usize;
        if *writable {
            let first = offset + *start as usize % WORD_BYTES;
            let end = (first + bytes as usize).div_ceil(WORD_BYTES);
            for (i, word) in words[first / WORD_BYTES..end].iter_mut().enumerate() {
                if let Some((other, other_wrote)) = word.enter(launch, writes) {
                    let other = launch.index(other);
                    return Err(Box::new(FaultKind::BlockRace { access, buffer, other, other_wrote }));
                }
                let order = if writes { word.word.write(lists, by, Origin::Store) } else { word.word.read(lists, by) };
                order.map_err(|trouble| explain(trouble, access, i))?;
            }
        }
        // SAFETY: `find` checked that the access lies in the region.
        Ok(unsafe { base.add(offset) })
    }

    /// The region that holds all of an access.
    #[inline(always)]
    fn find(&mut self, access: Access) -> Result<usize, Box<FaultKind>> {
        let Access { addr, bytes, .. } = access;
        let holds = |region: &Region| {
            let offset = addr.wrapping_sub(region.start);
            offset < region.len as u64 && region.len as u64 - offset >= u64::from(bytes)
        };
        if !self.regions.get(self.last).is_some_and(holds) {
            self.last = match self.regions.iter().position(holds) {
                Some(at) => at,
                None => return Err(Box::new(FaultKind::OutOfBounds { access, nearest: self.nearest(access) })),
            };
        }
        Ok(self.last)
    }

    #[cold]
    fn nearest(&self, Access { addr, bytes, .. }: Access) -> std::string::String {
        let gap = |region: &Region| {
            let (end, access_end) = (region.start + region.len as u64, addr.saturating_add(bytes.into()));
            region.start.saturating_sub(addr).max(access_end.saturating_sub(end))
        };
        match self.regions.iter().min_by_key(|region| gap(region)) {
            None => "no buffer is registered".into(),
            Some(region) => {
                let side = if addr < region.start { "before the beginning" } else { "past the end" };
                format!("it reaches {} bytes {side} of `{}` ({} bytes)", gap(region), region.name, region.len)
            }
        }
    }
}

impl GlobalWord {
    /// The current block accesses this word; a block that may do so at the same time, and whether it writes.
    #[inline(always)]
    fn enter(&mut self, launch: &Blocks, writes: bool) -> Option<(u32, bool)> {
        if launch.is_concurrent(self.writer) {
            return Some((self.writer, true));
        }
        if writes {
            let reader = [self.reader, self.other_reader].into_iter().find(|&reader| launch.is_concurrent(reader));
            if let Some(reader) = reader {
                return Some((reader, false));
            }
        }
        if self.writer != launch.current {
            self.word.write = Epoch::default();
        }
        if self.reader != launch.current {
            self.word.readers = List::default();
        }
        if writes {
            self.writer = launch.current;
        } else if self.reader != launch.current {
            self.other_reader = self.reader;
            self.reader = launch.current;
        }
        None
    }
}
