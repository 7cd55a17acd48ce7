//! The state of the block that is running, and how a device function finds it.

use core::cell::RefCell;
use core::panic::Location;
use core::ptr::NonNull;
use std::boxed::Box;
use std::rc::Rc;
use std::thread_local;
use std::vec;
use std::vec::Vec;

use corosensei::Yielder;

use super::clocks::Clocks;
use super::fault::{Action, Fault, FaultKind, Meeting, Standing};
use super::global::Global;
use super::launch::Launch;
use super::matrix::{Exchange, LANES, decode_bf16, decode_f16};
use super::shared::Shared;

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
    fault: Option<Box<Fault>>,
}

#[derive(Clone, Copy)]
pub(super) struct Thread {
    pub standing: Standing,
    /// Suspends the thread, once it has started.
    handle: Option<Handle>,
}

/// What the lanes of a warp are up to, when none of them runs.
pub(super) enum WarpState {
    Ready,
    AtBlockBarrier,
    Exited,
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
            fault: None,
        }
    }

    pub(super) fn begin_block(&mut self, linear: u32) {
        self.block = self.global.borrow_mut().begin_block(linear);
        self.threads.fill(Thread::NEW);
        self.clocks.reset();
        self.shared.reset();
    }

    /// A fault of `thread` in this block.
    pub(super) fn fault(&self, thread: usize, kind: FaultKind, at: Option<&'static Location<'static>>) -> Box<Fault> {
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
            return Err(self.divergence(lanes.start, lanes.start + odd));
        }
        let (meeting, at) = match first {
            Standing::Waits(meeting, at) => (meeting, at),
            Standing::Exited => return Ok(WarpState::Exited),
            Standing::Ready => unreachable!("every lane ran until it waits or exits"),
        };
        match meeting {
            Meeting::Syncthreads => return Ok(WarpState::AtBlockBarrier),
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
        }
        self.make_ready(lanes);
        Ok(WarpState::Ready)
    }

    /// No thread can run any more: the end of the block (`false`), or of a block barrier (`true`).
    pub(super) fn settle_block(&mut self) -> Result<bool, Box<Fault>> {
        let waits = |thread: &Thread| matches!(thread.standing, Standing::Waits(..));
        let all = 0..self.threads.len();
        match (self.threads.iter().position(waits), self.threads.iter().position(|thread| !waits(thread))) {
            (None, _) => Ok(false),
            (Some(_), None) => {
                self.clocks.barrier(all.clone());
                self.make_ready(all);
                Ok(true)
            }
            (Some(waiting), Some(missing)) => Err(self.divergence(waiting, missing)),
        }
    }

    fn make_ready(&mut self, threads: core::ops::Range<usize>) {
        self.threads[threads].iter_mut().for_each(|thread| thread.standing = Standing::Ready);
    }

    /// Threads `a` and `b` should have met and do not; at most one of them exited.
    #[cold]
    fn divergence(&self, a: usize, b: usize) -> Box<Fault> {
        let (waiting, other, at, waits_at) = match (self.threads[a].standing, self.threads[b].standing) {
            (Standing::Waits(meeting, at), _) => (a, b, at, meeting),
            (_, Standing::Waits(meeting, at)) => (b, a, at, meeting),
            _ => unreachable!("one of two that do not meet waits"),
        };
        let other_is = self.threads[other].standing;
        self.fault(waiting, FaultKind::Divergence { waits_at, other: other as u32, other_is }, Some(at))
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
