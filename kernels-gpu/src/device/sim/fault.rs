//! What the simulator reports instead of a result: where it happened, what was done, what it conflicts with.

use core::fmt;
use core::panic::Location;
use std::string::String;

use super::launch::SHARED_BASE;

/// A kernel broke a rule of the machine; the launch stopped there.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Name of the launch.
    pub kernel: &'static str,
    /// `blockIdx`.
    pub block: [u32; 3],
    /// `threadIdx.x`.
    pub thread: u32,
    /// The source line that called the device function; none after a panic in the kernel.
    pub at: Option<&'static Location<'static>>,
    /// The rule.
    pub kind: FaultKind,
}

/// The rule that was broken.
#[derive(Clone, Debug, PartialEq)]
pub enum FaultKind {
    /// The access leaves the shared memory or every registered buffer.
    OutOfBounds {
        /// What was tried.
        access: Access,
        /// The buffer it misses by the least, and by how much.
        nearest: String,
    },
    /// The address is not a multiple of what the access needs.
    Misaligned {
        /// What was tried.
        access: Access,
        /// What it must be a multiple of.
        alignment: u32,
    },
    /// A store to a buffer that was registered as an input.
    ReadOnly {
        /// What was tried.
        access: Access,
        /// The buffer.
        buffer: &'static str,
    },
    /// A read of memory that nobody wrote.
    Uninitialised {
        /// What was tried.
        access: Access,
        /// First address of the access that nobody wrote.
        first: u64,
    },
    /// The access touches the destination of a `cp.async` that it is not ordered after.
    UseBeforeWait {
        /// What was tried.
        access: Access,
        /// The thread that issued the copy.
        copier: u32,
        /// Whether that thread has waited for it; then a barrier after the wait is what is missing.
        waited: bool,
    },
    /// The access touches the destination of a tensor copy, and no wait for the phase of its mbarrier comes before.
    UseBeforeLanding {
        /// What was tried.
        access: Access,
        /// Offset of the mbarrier in shared memory.
        barrier: u32,
        /// Whether the bytes have arrived; then this thread's wait for the phase is what is missing.
        landed: bool,
    },
    /// The asynchronous proxy reads what an ordinary store wrote, and the thread that wrote did not execute
    /// `fence_proxy_async` in between, before the barrier.
    MissingProxyFence {
        /// What was tried.
        access: Access,
        /// The thread that wrote.
        writer: u32,
    },
    /// The access touches an mbarrier.
    TouchesBarrier {
        /// What was tried.
        access: Access,
    },
    /// An mbarrier is not used as it must be.
    Barrier {
        /// Its offset in shared memory.
        barrier: u32,
        /// What is wrong.
        problem: BarrierProblem,
    },
    /// An accumulator of products in flight was changed before `wgmma_wait_group`.
    TouchedAccumulator,
    /// An operand that the instruction does not take.
    Invalid {
        /// What is wrong with it.
        what: String,
    },
    /// Nobody can run, and nothing is on its way. `thread` is one that waits.
    Deadlock {
        /// Offset of the mbarrier that `thread` waits for.
        barrier: u32,
        /// Number of the phase that does not complete.
        phase: u32,
        /// Arrivals it lacks.
        pending: u32,
        /// Bytes it lacks.
        missing_bytes: u32,
        /// What every thread is doing.
        everybody: String,
    },
    /// Two threads of a block touch the same bytes, one of them writing, with no barrier in between.
    Race {
        /// The later access.
        access: Access,
        /// The thread of the earlier access.
        other: u32,
        /// Whether the earlier access wrote.
        other_wrote: bool,
    },
    /// Two blocks of one launch touch the same bytes, one of them writing.
    BlockRace {
        /// The later access.
        access: Access,
        /// The buffer.
        buffer: &'static str,
        /// The block of the earlier access.
        other: [u32; 3],
        /// Whether the earlier access wrote.
        other_wrote: bool,
    },
    /// Threads that must meet never do: some exited, or wait somewhere else. `thread` is one that waits.
    Divergence {
        /// What `thread` waits at.
        waits_at: Meeting,
        /// A thread that does not come.
        other: u32,
        /// What that thread does instead.
        other_is: Standing,
    },
    /// The kernel panicked.
    Panic {
        /// Its message.
        message: String,
    },
}

/// What is wrong with the use of an mbarrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierProblem {
    /// There is none at that address.
    Uninitialised,
    /// The copy engine uses it, but its initialisation was not followed by `fence_mbarrier_init`, in the thread that
    /// initialised it, before the barrier.
    NotFenced,
    /// More threads arrive in a phase than it was initialised for.
    TooManyArrivals,
    /// Copies bring more bytes than the phase has been told to expect until they are issued.
    UnexpectedBytes,
}

/// One access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Which memory.
    pub space: Space,
    /// Which way.
    pub action: Action,
    /// First byte.
    pub addr: u64,
    /// Size.
    pub bytes: u32,
}

/// A memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// The block's shared memory.
    Shared,
    /// Global memory.
    Global,
}

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// `ld`.
    Load,
    /// `st`.
    Store,
    /// `cp.async`, on its source or its destination.
    AsyncCopy,
    /// `ldmatrix`, one row of a matrix.
    MatrixLoad,
    /// `stmatrix`, one row of a matrix.
    MatrixStore,
    /// `cp.async.bulk.tensor` to shared memory: its destination, or one row of its source.
    TensorLoad,
    /// `cp.async.bulk.tensor` to global memory: 16 bytes of its source, or one row of its destination.
    TensorStore,
    /// `wgmma`, 16 bytes of B.
    Product,
    /// An mbarrier instruction.
    Barrier,
}

/// A place where threads wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// `bar.sync 0`.
    Syncthreads,
    /// `bar.warp.sync`.
    Syncwarp,
    /// `ldmatrix`.
    Ldmatrix,
    /// `ldmatrix.trans`.
    LdmatrixTrans,
    /// `mma` of bf16 operands.
    MmaBf16,
    /// `mma` of f16 operands.
    MmaF16,
    /// `stmatrix`.
    Stmatrix,
    /// `elect.sync`.
    Elect,
    /// `wgmma.fence`.
    WgmmaFence,
    /// `wgmma.commit_group`.
    WgmmaCommitGroup,
    /// `wgmma.wait_group` for all but so many groups.
    WgmmaWaitGroup(u32),
    /// `wgmma.mma_async`.
    Wgmma(Product),
    /// `setmaxnreg` to so many registers.
    Setmaxnreg(u32),
}

impl Meeting {
    /// Whether a warpgroup meets here, not a warp.
    pub(super) fn is_of_warpgroup(self) -> bool {
        matches!(self, Self::Wgmma(_) | Self::Setmaxnreg(_))
    }
}

/// Which asynchronous product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Columns of B and D.
    pub columns: u32,
    /// Whether B is stored `[k, n]`.
    pub transposed: bool,
    /// Whether the elements are bf16; otherwise f16.
    pub bf16: bool,
}

/// What a thread is doing when it is not running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing keeps it from running.
    Ready,
    /// It waits for others, at this source line.
    Waits(Meeting, &'static Location<'static>),
    /// It waits for a phase of an mbarrier.
    Blocked {
        /// Offset of the mbarrier in shared memory.
        barrier: u32,
        /// The source line.
        at: &'static Location<'static>,
    },
    /// It returned from the kernel.
    Exited,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { kernel, block: [x, y, z], thread, at, kind } = self;
        write!(f, "kernel `{kernel}`, block ({x}, {y}, {z}), {}", Thread(*thread))?;
        if let Some(at) = at {
            write!(f, ", at {at}")?;
        }
        write!(f, ": {kind}")
    }
}

impl std::error::Error for Fault {}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = |wrote: bool| if wrote { "wrote" } else { "read" };
        match self {
            Self::OutOfBounds { access, nearest } => write!(f, "{access} is out of bounds: {nearest}"),
            Self::Misaligned { access, alignment } => write!(f, "{access} is not {alignment}-byte aligned"),
            Self::ReadOnly { access, buffer } => write!(f, "{access} writes to the input `{buffer}`"),
            Self::Uninitialised { access, first } => {
                write!(f, "{access} reads memory nobody wrote, from {first:#x} on")
            }
            Self::UseBeforeWait { access, copier, waited: false } => {
                write!(
                    f,
                    "{access} touches a cp.async in flight: {} issued it and has not waited for it",
                    Thread(*copier)
                )
            }
            Self::UseBeforeWait { access, copier, waited: true } => {
                write!(
                    f,
                    "{access} touches a cp.async of {}, which waited for it, but no barrier after that wait orders \
                     this access",
                    Thread(*copier)
                )
            }
            Self::UseBeforeLanding { access, barrier, landed } => {
                let state = if *landed { "has landed, but no wait" } else { "is in flight, with no wait" };
                write!(f, "{access} touches a tensor copy that {state} for its mbarrier at offset {barrier} before")
            }
            Self::MissingProxyFence { access, writer } => {
                write!(f, "{access} through the asynchronous proxy: no fence_proxy_async by {} ", Thread(*writer))?;
                f.write_str("between its store there and the barrier")
            }
            Self::TouchesBarrier { access } => write!(f, "{access} touches an mbarrier"),
            Self::Barrier { barrier, problem } => {
                let problem = match problem {
                    BarrierProblem::Uninitialised => "is none: nobody initialised it",
                    BarrierProblem::NotFenced => "lacks fence_mbarrier_init between its initialisation and the barrier",
                    BarrierProblem::TooManyArrivals => "gets more arrivals in a phase than it was initialised for",
                    BarrierProblem::UnexpectedBytes => "gets more bytes than its phase was told to expect",
                };
                write!(f, "the mbarrier at offset {barrier} {problem}")
            }
            Self::TouchedAccumulator => {
                f.write_str("an accumulator was changed before the wgmma_wait_group that makes it readable")
            }
            Self::Invalid { what } => f.write_str(what),
            Self::Deadlock { barrier, phase, pending, missing_bytes, everybody } => {
                write!(
                    f,
                    "waits for phase {phase} of the mbarrier at offset {barrier}, which lacks {pending} arrivals and \
                     {missing_bytes} bytes, and nobody can run: {everybody}"
                )
            }
            Self::Race { access, other, other_wrote } => {
                write!(f, "{access} races: {} {} there, with no barrier in between", Thread(*other), verb(*other_wrote))
            }
            Self::BlockRace { access, buffer, other: [x, y, z], other_wrote } => {
                write!(
                    f,
                    "{access} races in `{buffer}`: block ({x}, {y}, {z}) of the same launch {} there",
                    verb(*other_wrote)
                )
            }
            Self::Divergence { waits_at, other, other_is } => {
                write!(f, "waits at {waits_at}, where {} never comes: it {other_is}", Thread(*other))
            }
            Self::Panic { message } => write!(f, "the kernel panicked: {message}"),
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = match self.action {
            Action::Load => "load",
            Action::Store => "store",
            Action::AsyncCopy => "cp.async",
            Action::MatrixLoad => "ldmatrix row",
            Action::MatrixStore => "stmatrix row",
            Action::TensorLoad => "tensor load",
            Action::TensorStore => "tensor store",
            Action::Product => "wgmma operand",
            Action::Barrier => "mbarrier",
        };
        let Access { addr, bytes, .. } = self;
        match self.space {
            Space::Global => write!(f, "{bytes}-byte global {action} at {addr:#x}"),
            Space::Shared => {
                write!(f, "{bytes}-byte shared {action} at offset {}", *addr as i64 - i64::from(SHARED_BASE))
            }
        }
    }
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WgmmaWaitGroup(most_recent) => return write!(f, "wgmma.wait_group {most_recent}"),
            Self::Setmaxnreg(registers) => return write!(f, "setmaxnreg {registers}"),
            Self::Wgmma(Product { columns, transposed, bf16 }) => {
                let (element, order) =
                    (if *bf16 { "bf16" } else { "f16" }, if *transposed { "[k, n]" } else { "[n, k]" });
                return write!(f, "wgmma m64n{columns}k16 ({element}, B {order})");
            }
            Self::Syncthreads => "syncthreads",
            Self::Syncwarp => "syncwarp",
            Self::Ldmatrix => "ldmatrix",
            Self::LdmatrixTrans => "ldmatrix.trans",
            Self::MmaBf16 => "mma (bf16)",
            Self::MmaF16 => "mma (f16)",
            Self::Stmatrix => "stmatrix",
            Self::Elect => "elect.sync",
            Self::WgmmaFence => "wgmma.fence",
            Self::WgmmaCommitGroup => "wgmma.commit_group",
        })
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("is ready to run"),
            Self::Waits(meeting, at) => write!(f, "waits at {meeting}, {at}"),
            Self::Blocked { barrier, at } => write!(f, "waits for the mbarrier at offset {barrier}, {at}"),
            Self::Exited => f.write_str("exited"),
        }
    }
}

struct Thread(u32);

impl fmt::Display for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread {} (warp {}, lane {})", self.0, self.0 / 32, self.0 % 32)
    }
}
