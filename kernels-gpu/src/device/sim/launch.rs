//! Runs a kernel: every block of the grid, every thread of a block on a stack of its own.

use core::cell::RefCell;
use core::panic::AssertUnwindSafe;
use std::boxed::Box;
use std::panic::catch_unwind;
use std::string::{String, ToString};
use std::thread_local;
use std::vec;
use std::vec::Vec;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult};

use super::clocks::MAX_THREADS;
use super::fault::{Fault, FaultKind, Standing};
use super::global::GlobalMemory;
use super::machine::{Installed, Machine, NOBODY, Pause, WarpState, with};
use super::matrix::LANES;

/// Where shared memory begins: not at zero, and aligned to 1024 bytes and no more.
pub(super) const SHARED_BASE: u32 = 3 * 1024;

/// Most shared memory a block can have.
const MAX_SHARED_BYTES: u32 = 227 * 1024;

/// Stack of one thread; a kernel built without optimisation keeps every fragment in memory several times. Pages that
/// are never touched cost nothing.
const STACK_BYTES: usize = 512 * 1024;

/// What to launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name, for faults.
    pub name: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block: whole warps.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Who runs when.
    pub schedule: Schedule,
}

/// The order in which blocks, warps and lanes run. Each is deterministic, and no kernel may depend on which it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// By rising index; a warp runs until it waits for other warps.
    #[default]
    InOrder,
    /// By falling index.
    Reversed,
    /// Drawn at random from this seed, anew every time a warp can run on.
    Seeded(u64),
}

type Coro = Coroutine<(), Pause, (), DefaultStack>;

thread_local! {
    /// Stacks between launches.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// Runs `kernel` once per thread of the grid; it finds its indices and its shared memory through the device functions.
///
/// Blocks run one after the other, but are checked as if they ran at once. The first fault ends the launch; what
/// was written by then stays written.
///
/// # Panics
/// If `launch` asks for partial warps, or for more threads or shared memory than a GPU gives a block.
pub fn launch(launch: &Launch, memory: &GlobalMemory<'_>, kernel: &dyn Fn()) -> Result<(), Fault> {
    let Launch { grid, threads, shared_bytes, schedule, .. } = *launch;
    assert!(threads > 0 && threads.is_multiple_of(32), "a block is whole warps: {threads} threads are not");
    assert!(threads <= MAX_THREADS, "a block has at most {MAX_THREADS} threads, not {threads}");
    assert!(shared_bytes <= MAX_SHARED_BYTES, "a block has at most {MAX_SHARED_BYTES} bytes, not {shared_bytes}");

    memory.shared.borrow_mut().begin_launch(grid);
    let _installed = Installed::new(Machine::new(launch, memory.shared.clone()));
    let mut order = Order::new(schedule);
    let blocks = grid.iter().product();
    let mut sequence: Vec<u32> = (0..blocks).collect();
    order.arrange(&mut sequence);
    for block in sequence {
        with(|m| m.begin_block(block));
        run_block(threads as usize, &mut order, kernel).map_err(|fault| *fault)?;
    }
    Ok(())
}

fn run_block(threads: usize, order: &mut Order, kernel: &dyn Fn()) -> Result<(), Box<Fault>> {
    // On a fault, dropping them unwinds the kernels where they stand.
    let mut coros: Vec<Coro> = (0..threads).map(|_| coroutine(kernel)).collect();
    let mut ready: Vec<usize> = (0..threads / LANES).collect();
    let mut is_ready = vec![true; ready.len()];
    order.arrange(&mut ready);
    let mut lanes: [usize; LANES] = core::array::from_fn(|lane| lane);
    order.arrange(&mut lanes);
    loop {
        while !ready.is_empty() {
            let pick = order.pick(ready.len());
            let warp = ready[pick];
            order.rearrange(&mut lanes);
            for lane in lanes {
                resume(&mut coros, warp * LANES + lane)?;
            }
            with(|m| {
                if m.settle(warp)? == WarpState::Stopped {
                    ready.remove(pick);
                    is_ready[warp] = false;
                }
                m.woken.drain(..).for_each(|warp| enqueue(warp, &mut ready, &mut is_ready));
                Ok::<_, Box<Fault>>(())
            })?;
        }
        let goes_on = with(|m| {
            let goes_on = m.settle_block(|copies| order.pick_copy(copies));
            m.woken.drain(..).for_each(|warp| enqueue(warp, &mut ready, &mut is_ready));
            goes_on
        });
        if !goes_on? {
            break;
        }
        order.arrange_sorted(&mut ready);
    }
    STACKS.with_borrow_mut(|stacks| stacks.extend(coros.into_iter().map(Coro::into_stack)));
    Ok(())
}

/// A warp may run on.
fn enqueue(warp: usize, ready: &mut Vec<usize>, is_ready: &mut [bool]) {
    if !core::mem::replace(&mut is_ready[warp], true) {
        ready.push(warp);
    }
}

fn coroutine(kernel: &dyn Fn()) -> Coro {
    let stack = STACKS.with_borrow_mut(Vec::pop);
    let stack = stack.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for the stack of a GPU thread"));
    // SAFETY: `run_block` drops the coroutine, or sees it return, before its borrow of `kernel` ends.
    unsafe {
        Coro::with_stack_unchecked(stack, move |yielder, ()| {
            with(|m| m.threads[m.current].start(yielder));
            kernel();
        })
    }
}

/// Runs a thread until it waits or exits, unless it does already.
#[inline(always)]
fn resume(coros: &mut [Coro], thread: usize) -> Result<(), Box<Fault>> {
    let is_ready = with(|m| {
        let is_ready = matches!(m.threads[thread].standing, Standing::Ready);
        m.current = if is_ready { thread } else { NOBODY };
        is_ready
    });
    if !is_ready {
        return Ok(());
    }
    // Nothing of a kernel that panicked is looked at again.
    let result = catch_unwind(AssertUnwindSafe(|| coros[thread].resume(())));
    with(|m| {
        m.current = NOBODY;
        match result {
            Ok(CoroutineResult::Yield(Pause::Meeting)) => Ok(()),
            Ok(CoroutineResult::Yield(Pause::Fault)) => Err(m.take_fault()),
            Ok(CoroutineResult::Return(())) => {
                m.threads[thread].standing = Standing::Exited;
                Ok(())
            }
            Err(payload) => {
                let text = payload.downcast_ref::<&str>().map(ToString::to_string);
                let message = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
                Err(m.fault(thread, FaultKind::Panic { message }, None))
            }
        }
    })
}

/// A schedule in progress.
struct Order {
    schedule: Schedule,
    state: u64,
}

impl Order {
    fn new(schedule: Schedule) -> Self {
        Self { schedule, state: if let Schedule::Seeded(seed) = schedule { seed } else { 0 } }
    }

    /// Puts rising indices in order.
    fn arrange<T>(&mut self, items: &mut [T]) {
        match self.schedule {
            Schedule::InOrder => {}
            Schedule::Reversed => items.reverse(),
            Schedule::Seeded(_) => self.shuffle(items),
        }
    }

    /// Puts what was arranged before in order once more.
    #[inline(always)]
    fn rearrange<T>(&mut self, items: &mut [T]) {
        if let Schedule::Seeded(_) = self.schedule {
            self.shuffle(items);
        }
    }

    /// Which of `n` things comes next.
    fn pick(&mut self, n: usize) -> usize {
        match self.schedule {
            Schedule::InOrder | Schedule::Reversed => 0,
            Schedule::Seeded(_) => self.below(n),
        }
    }

    /// Which of `n` copies, in the order of their issue, lands next.
    fn pick_copy(&mut self, n: usize) -> usize {
        match self.schedule {
            Schedule::InOrder => 0,
            Schedule::Reversed => n - 1,
            Schedule::Seeded(_) => self.below(n),
        }
    }

    /// Puts indices in order that may be in any.
    fn arrange_sorted(&mut self, items: &mut [usize]) {
        items.sort_unstable();
        self.arrange(items);
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (2..=items.len()).rev() {
            items.swap(end - 1, self.below(end));
        }
    }

    /// SplitMix64, scaled.
    fn below(&mut self, n: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * n as u128) >> 64) as usize
    }
}
