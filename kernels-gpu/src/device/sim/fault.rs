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
    /// The address is not a multiple of the access size.
    Misaligned {
        /// What was tried.
        access: Access,
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
}

/// What a thread is doing when it is not running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing keeps it from running.
    Ready,
    /// It waits for others, at this source line.
    Waits(Meeting, &'static Location<'static>),
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
            Self::Misaligned { access } => write!(f, "{access} is not {}-byte aligned", access.bytes),
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
            Self::Syncthreads => "syncthreads",
            Self::Syncwarp => "syncwarp",
            Self::Ldmatrix => "ldmatrix",
            Self::LdmatrixTrans => "ldmatrix.trans",
            Self::MmaBf16 => "mma (bf16)",
            Self::MmaF16 => "mma (f16)",
        })
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("is ready to run"),
            Self::Waits(meeting, at) => write!(f, "waits at {meeting}, {at}"),
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
