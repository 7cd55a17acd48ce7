//! The state of the block that is running, and how a device function finds it.

use core::cell::RefCell;
use core::panic::Location;
use core::ptr::NonNull;
use std::boxed::Box;
use std::format;
use std::rc::Rc;
use std::thread_local;
use std::vec;
use std::vec::Vec;

use corosensei::Yielder;

use super::bulk::{Load, Stores};
use super::clocks::Clocks;
use super::fault::{Action, Fault, FaultKind, Meeting, Standing};
use super::global::Global;
use super::launch::{Launch, SHARED_BASE};
use super::matrix::{Exchange, LANES, decode_bf16, decode_f16};
use super::mbarrier::Barriers;
use super::shared::Shared;
use super::wgmma::{GROUP, GroupExchange, Groups};

/// Why a coroutine suspends.
pub(super) enum Pause {
    /// It waits for other threads.
    Meeting,
    /// It must not go on.
    Fault,
}

type Handle = NonNull<Yielder<(), Pause>>;

pub(super) struct Machine {
    kernel: &'static str,
    pub block: [u32; 3],
    /// The thread that runs, or [`NOBODY`].
    pub current: usize,
    pub threads: Vec<Thread>,
    pub exchanges: Vec<Exchange>,
    pub clocks: Clocks,
    pub shared: Shared,
    pub global: Rc<RefCell<Global>>,
    pub barriers: Barriers,
    /// Tensor copies on their way to shared memory, in the order of their issue.
    pub loads: Vec<Load>,
    /// Per thread.
    pub stores: Vec<Stores>,
    /// Per warp.
    pub groups: Vec<Groups>,
    /// Per warpgroup, once it multiplies.
    pub group_exchanges: Vec<Option<GroupExchange>>,
    /// Per warpgroup, what it asked for.
    registers: Vec<Option<u32>>,
    /// Warps that may run on.
    pub woken: Vec<usize>,
    /// The thread of each track, or the offset of the barrier.
    pub owners: Vec<u32>,
    fault: Option<Box<Fault>>,
}

#[derive(Clone, Copy)]
pub(super) struct Thread {
    pub standing: Standing,
    /// Suspends the thread, once it has started.
    handle: Option<Handle>,
}

/// What the lanes of a warp are up to, when none of them runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WarpState {
    Ready,
    /// It waits for other warps or for copies, or has exited.
    Stopped,
}

/// Not a thread: a destructor that uses the device while a faulty kernel is unwound panics on it.
pub(super) const NOBODY: usize = usize::MAX;

thread_local! {
    static MACHINE: RefCell<Option<Box<Machine>>> = const { RefCell::new(None) };
}

/// Keeps a machine in place for the device functions of this OS thread.
pub(super) struct Installed(());

impl Installed {
    pub(super) fn new(machine: Machine) -> Self {
        MACHINE.with_borrow_mut(|slot| {
            assert!(slot.is_none(), "a kernel cannot launch another kernel");
            *slot = Some(Box::new(machine));
        });
        Self(())
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        MACHINE.with_borrow_mut(|slot| *slot = None);
    }
}

/// The machine of the thread that calls; never held across a suspension.
#[inline(always)]
pub(super) fn with<R>(f: impl FnOnce(&mut Machine) -> R) -> R {
    MACHINE.with_borrow_mut(|slot| f(slot.as_deref_mut().expect("device functions run only inside `sim::launch`")))
}

/// An access of the current thread; does not return if it is a fault.
#[inline(always)]
pub(super) fn access<R>(
    at: &'static Location<'static>,
    f: impl FnOnce(&mut Machine) -> Result<R, Box<FaultKind>>,
) -> R {
    let result = with(|m| f(m).map_err(|kind| m.stop(*kind, at)));
    match result {
        Ok(value) => value,
        Err(handle) => loop {
            suspend(handle, Pause::Fault);
        },
    }
}

/// The current thread waits at `meeting`; `hand_in` leaves what it brings, under its lane number.
#[inline(always)]
pub(super) fn meet(meeting: Meeting, at: &'static Location<'static>, hand_in: impl FnOnce(&mut Exchange, usize)) {
    let handle = with(|m| {
        let thread = m.current;
        hand_in(&mut m.exchanges[thread / LANES], thread % LANES);
        m.threads[thread].standing = Standing::Waits(meeting, at);
        m.threads[thread].handle()
    });
    suspend(handle, Pause::Meeting);
}

/// The current thread waits for a phase of an mbarrier.
pub(super) fn wait_for_phase(addr: u32, parity: u32, at: &'static Location<'static>) {
    if let Some(handle) = access(at, |m| m.wait_for_phase(addr, parity, at)) {
        suspend(handle, Pause::Meeting);
    }
}

/// What the current thread takes home from a meeting.
#[inline(always)]
pub(super) fn take<R>(f: impl FnOnce(&Exchange, usize) -> R) -> R {
    with(|m| f(&m.exchanges[m.current / LANES], m.current % LANES))
}

#[inline(always)]
fn suspend(handle: Handle, pause: Pause) {
    // SAFETY: it is the handle of the coroutine that runs, whose yielder lives as long as the coroutine does.
    unsafe { handle.as_ref() }.suspend(pause);
}

impl Thread {
    const NEW: Self = Self { standing: Standing::Ready, handle: None };

    pub(super) fn start(&mut self, yielder: &Yielder<(), Pause>) {
        self.handle = Some(NonNull::from(yielder));
    }

    #[inline(always)]
    fn handle(&self) -> Handle {
        self.handle.expect("a thread that runs has started")
    }
}

impl Machine {
    pub(super) fn new(launch: &Launch, global: Rc<RefCell<Global>>) -> Self {
        let threads = launch.threads as usize;
        Self {
            kernel: launch.name,
            block: [0; 3],
            current: NOBODY,
            threads: vec![Thread::NEW; threads],
            exchanges: (0..threads / LANES).map(|_| Exchange::new()).collect(),
            clocks: Clocks::new(threads),
            shared: Shared::new(launch.shared_bytes, launch.threads),
            global,
            barriers: Barriers::new(threads),
            loads: Vec::new(),
            stores: (0..threads).map(|_| Stores::default()).collect(),
            groups: vec![Groups::default(); threads / LANES],
            group_exchanges: (0..threads.div_ceil(GROUP)).map(|_| None).collect(),
            registers: vec![None; threads.div_ceil(GROUP)],
            woken: Vec::new(),
            owners: Vec::new(),
            fault: None,
        }
    }

    pub(super) fn begin_block(&mut self, linear: u32) {
        self.block = self.global.borrow_mut().begin_block(linear);
        self.threads.fill(Thread::NEW);
        self.clocks.reset();
        self.shared.reset();
        self.barriers.reset();
        self.loads.clear();
        self.stores.fill_with(Stores::default);
        self.groups.fill(Groups::default());
        self.group_exchanges.fill_with(|| None);
        self.registers.fill(None);
        self.woken.clear();
        self.owners.clear();
    }

    /// A track of `owner`.
    pub(super) fn track(&mut self, owner: u32) -> usize {
        self.owners.push(owner);
        self.clocks.track()
    }

    /// A fault of `thread` in this block.
    pub(super) fn fault(
        &self,
        thread: usize,
        mut kind: FaultKind,
        at: Option<&'static Location<'static>>,
    ) -> Box<Fault> {
        if let FaultKind::UseBeforeLanding { barrier: track, .. } | FaultKind::Race { other: track, .. } = &mut kind
            && let Some(index) = (*track as usize).checked_sub(self.threads.len())
        {
            *track = self.owners[index];
        }
        Box::new(Fault { kernel: self.kernel, block: self.block, thread: thread as u32, at, kind })
    }

    /// The fault that a thread suspended with.
    pub(super) fn take_fault(&mut self) -> Box<Fault> {
        self.fault.take().expect("a thread that stops leaves its fault")
    }

    #[cold]
    fn stop(&mut self, kind: FaultKind, at: &'static Location<'static>) -> Handle {
        self.fault = Some(self.fault(self.current, kind, Some(at)));
        self.threads[self.current].handle()
    }

    /// All lanes of `warp` ran until they could not: does what they met for.
    pub(super) fn settle(&mut self, warp: usize) -> Result<WarpState, Box<Fault>> {
        let lanes = warp * LANES..(warp + 1) * LANES;
        let first = self.threads[lanes.start].standing;
        if let Some(odd) = self.threads[lanes.clone()].iter().position(|thread| thread.standing != first) {
            return self.settle_apart(lanes.start, lanes.start + odd);
        }
        let (meeting, at) = match first {
            Standing::Waits(meeting, at) => (meeting, at),
            Standing::Exited | Standing::Blocked { .. } => return Ok(WarpState::Stopped),
            // A copy was what they waited for.
            Standing::Ready => return Ok(WarpState::Ready),
        };
        match meeting {
            Meeting::Syncthreads => return Ok(WarpState::Stopped),
            Meeting::Syncwarp => self.clocks.barrier(lanes.clone()),
            Meeting::Ldmatrix => {
                let rows = self.matrix_rows(warp, at)?;
                self.exchanges[warp].distribute(&rows);
            }
            Meeting::LdmatrixTrans => {
                let rows = self.matrix_rows(warp, at)?;
                self.exchanges[warp].distribute_transposed(&rows);
            }
            Meeting::MmaBf16 => self.exchanges[warp].multiply(decode_bf16),
            Meeting::MmaF16 => self.exchanges[warp].multiply(decode_f16),
            Meeting::Stmatrix => self.store_matrix_rows(warp, at)?,
            // Orders nothing between the lanes.
            Meeting::Elect => {}
            Meeting::WgmmaFence => self.fence_products(warp),
            Meeting::WgmmaCommitGroup => self.commit_products(warp),
            Meeting::WgmmaWaitGroup(most_recent) => self.wait_for_products(warp, most_recent),
            Meeting::Wgmma(_) | Meeting::Setmaxnreg(_) => return self.settle_group(warp, meeting, at),
        }
        self.make_ready(lanes);
        Ok(WarpState::Ready)
    }

    /// Threads `a` and `b` of a warp are up to different things.
    #[cold]
    fn settle_apart(&self, a: usize, b: usize) -> Result<WarpState, Box<Fault>> {
        let first = a / LANES * LANES;
        let lanes = &self.threads[first..first + LANES];
        if lanes.iter().any(|lane| lane.standing == Standing::Ready) {
            return Ok(WarpState::Ready);
        }
        if lanes.iter().any(|lane| matches!(lane.standing, Standing::Blocked { .. })) {
            return Ok(WarpState::Stopped);
        }
        Err(self.divergence(a, b))
    }

    /// All lanes of `warp` wait for the other warps of their warpgroup.
    fn settle_group(
        &mut self,
        warp: usize,
        meeting: Meeting,
        at: &'static Location<'static>,
    ) -> Result<WarpState, Box<Fault>> {
        let group = warp * LANES / GROUP;
        let members = group * GROUP..(group + 1) * GROUP;
        if members.end > self.threads.len() {
            let what = format!("{meeting} takes a whole warpgroup, which these warps of the block are not");
            return Err(self.fault(warp * LANES, FaultKind::Invalid { what }, Some(at)));
        }
        let here = Standing::Waits(meeting, at);
        if self.threads[members.clone()].iter().any(|thread| thread.standing != here) {
            return Ok(WarpState::Stopped);
        }
        match meeting {
            Meeting::Wgmma(product) => {
                self.multiply(warp, product).map_err(|(thread, kind)| self.fault(thread, *kind, Some(at)))?;
            }
            Meeting::Setmaxnreg(registers) => {
                self.registers[group] = Some(registers);
                let all: Option<u32> = self.registers.iter().copied().sum();
                if let Some(all) = all.filter(|all| all * GROUP as u32 > 64 * 1024) {
                    let what = format!("{all} registers for 128 threads each are more than the 65536 there are");
                    return Err(self.fault(members.start, FaultKind::Invalid { what }, Some(at)));
                }
            }
            _ => unreachable!("a warpgroup does not meet at {meeting}"),
        }
        self.make_ready(members.clone());
        self.woken.extend((members.start / LANES..members.end / LANES).filter(|&other| other != warp));
        Ok(WarpState::Ready)
    }

    /// No thread can run any more: the end of the block (`false`), of a block barrier or of the way of a copy (`true`).
    /// `pick` chooses among so many copies.
    pub(super) fn settle_block(&mut self, mut pick: impl FnMut(usize) -> usize) -> Result<bool, Box<Fault>> {
        let all = 0..self.threads.len();
        let is_at_barrier = |thread: &Thread| matches!(thread.standing, Standing::Waits(Meeting::Syncthreads, _));
        if self.threads.iter().all(|thread| thread.standing == Standing::Exited) {
            self.end()?;
            return Ok(false);
        }
        if self.threads.iter().all(is_at_barrier) {
            self.clocks.barrier(all.clone());
            self.make_ready(all.clone());
            self.woken.extend(0..all.end / LANES);
            return Ok(true);
        }
        while !self.loads.is_empty() {
            self.land(pick(self.loads.len()))?;
            if !self.woken.is_empty() {
                return Ok(true);
            }
        }
        Err(self.stuck())
    }

    /// These threads may run on.
    pub(super) fn wake(&mut self, threads: &[usize]) {
        for &thread in threads {
            self.threads[thread].standing = Standing::Ready;
            self.woken.push(thread / LANES);
        }
    }

    /// The current thread waits for a phase: whether that is complete; if not, it must suspend.
    fn wait_for_phase(
        &mut self,
        addr: u32,
        parity: u32,
        at: &'static Location<'static>,
    ) -> Result<Option<Handle>, Box<FaultKind>> {
        let thread = self.current;
        let barrier = self.barriers.find(addr, false, &self.clocks.view(thread), &self.shared)?;
        if self.barriers.all[barrier].wait(parity, thread, &mut self.clocks) {
            return Ok(None);
        }
        self.threads[thread].standing = Standing::Blocked { barrier: addr - SHARED_BASE, at };
        Ok(Some(self.threads[thread].handle()))
    }

    fn make_ready(&mut self, threads: core::ops::Range<usize>) {
        self.threads[threads].iter_mut().for_each(|thread| thread.standing = Standing::Ready);
    }

    /// The lanes of a warp store 32 rows; each write counts as one by the lane that has the address.
    fn store_matrix_rows(&mut self, warp: usize, at: &'static Location<'static>) -> Result<(), Box<Fault>> {
        self.clocks.settle_floor(warp);
        for (lane, row) in self.exchanges[warp].collect().into_iter().enumerate() {
            let (thread, addr) = (warp * LANES + lane, self.exchanges[warp].addr[lane]);
            let view = self.clocks.warp_view(thread);
            let stored = self.shared.store_as(Action::MatrixStore, addr, bytes(row), &view);
            stored.map_err(|kind| self.fault(thread, *kind, Some(at)))?;
        }
        Ok(())
    }

    /// The 32 rows that the lanes of a warp have the addresses of.
    ///
    /// A row must be ordered before every lane, as every lane gets a part of it; the read itself counts as one by the
    /// lane that has the address.
    fn matrix_rows(&mut self, warp: usize, at: &'static Location<'static>) -> Result<[[u32; 4]; LANES], Box<Fault>> {
        self.clocks.settle_floor(warp);
        let mut rows = [[0; 4]; LANES];
        for (lane, row) in rows.iter_mut().enumerate() {
            let (thread, addr) = (warp * LANES + lane, self.exchanges[warp].addr[lane]);
            let loaded = self.shared.load::<16>(Action::MatrixLoad, addr, &self.clocks.warp_view(thread));
            *row = words(loaded.map_err(|kind| self.fault(thread, *kind, Some(at)))?);
        }
        Ok(rows)
    }
}

/// Sixteen bytes as four registers.
pub(super) fn words(bytes: [u8; 16]) -> [u32; 4] {
    let (words, _) = bytes.as_chunks();
    core::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

/// Four registers as sixteen bytes.
pub(super) fn bytes(words: [u32; 4]) -> [u8; 16] {
    let mut bytes = [0; 16];
    let (chunks, _) = bytes.as_chunks_mut();
    chunks.iter_mut().zip(words).for_each(|(chunk, word)| *chunk = word.to_le_bytes());
    bytes
}
