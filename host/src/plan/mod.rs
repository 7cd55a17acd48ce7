//! Problem + device → which kernels run, on what grid, over how many segments. Pure functions of plain data.

mod cost;
mod launches;

use core::fmt;

use lightning_attention_kernels::abi::MAX_APPLICATIONS;
use lightning_attention_kernels::variants::{Arch, CHUNK, ElementType, Op, SLAB, VARIANTS, Variant};

use crate::view::DType;
use crate::{Error, Problem, Result};
use cost::{Pinned, cost, schedule};
pub use launches::{Auxiliary, Launch, Launches};

/// Bytes to which every row of a tensor is aligned on the device.
pub const ROW_ALIGNMENT: usize = 16;

/// What the planner needs to know of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory one multiprocessor has, bytes.
    pub shared_bytes_per_multiprocessor: u32,
}

impl Device {
    /// NVIDIA H200 (SXM).
    pub const H200: Device =
        Device { compute_capability: (9, 0), multiprocessors: 132, shared_bytes_per_multiprocessor: 228 * 1024 };

    /// Blocks of `variant` that one multiprocessor holds at a time.
    fn resident_blocks(&self, variant: &Variant) -> u32 {
        // The driver reserves 1 KiB of shared memory for each block.
        (self.shared_bytes_per_multiprocessor / (variant.shared_bytes + 1024)).clamp(1, variant.min_blocks)
    }
}

/// How one pass (forward or backward) is carried out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Family of the kernels that compute the outputs.
    pub arch: Arch,
    /// Segments a sequence is cut into.
    pub segments: u32,
    /// Rows of every segment but the last.
    pub segment_len: u32,
    /// Blocks that share a slab of a segment, for each output of the pass (o; dq, dk, dv).
    pub sharers: [u32; MAX_APPLICATIONS],
    /// Value columns of a slab, for each output of the pass.
    pub value_tiles: [u32; MAX_APPLICATIONS],
    /// f32 states kept between the kernels of the pass, bytes.
    pub workspace_bytes: usize,
    /// What the cost model expects, microseconds on an H200.
    pub predicted_us: f64,
    /// What it expects without cutting the sequence.
    pub uncut_us: f64,
}

/// How a problem is run on a device; prints itself with its reasons.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    problem: Problem,
    device: Device,
    forward: Schedule,
    backward: Schedule,
}

impl Plan {
    /// Plans `problem` for `device`.
    ///
    /// # Errors
    /// Those of [`Problem::validate`]; [`Error::DeviceTooOld`]; [`Error::UnsupportedElementType`] and
    /// [`Error::Dimension`] where no kernel exists: the device takes bf16 and f16, dims that are multiples of 8 up to 128.
    pub fn new(problem: &Problem, device: Device) -> Result<Self> {
        problem.validate()?;
        if device.compute_capability < (8, 0) {
            return Err(Error::DeviceTooOld { got: device.compute_capability, expected: (8, 0) });
        }
        if element(problem.dtype).is_none() {
            return Err(Error::UnsupportedElementType { got: problem.dtype, expected: "bf16 or f16" });
        }
        for (argument, got) in [("head_dim", problem.head_dim), ("value_dim", problem.value_dim)] {
            if got % 8 != 0 || got > 128 {
                return Err(Error::Dimension { argument, got, expected: "a multiple of 8 up to 128 on CUDA" });
            }
        }
        if problem.batch * problem.heads > 1 << 20 {
            let expected = "batch · heads up to 2^20";
            return Err(Error::Dimension { argument: "batch", got: problem.batch, expected });
        }
        let best = |roles| {
            let schedules = families(problem, &device).iter().map(|&arch| schedule(problem, &device, arch, roles));
            schedules.min_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us)).expect("there is a family")
        };
        let (forward, backward) = (best(&FORWARD), best(&BACKWARD));
        Ok(Plan { problem: problem.clone(), device, forward, backward })
    }

    /// The plan with the family of the output kernels pinned, for tests and tuning. [`Arch::Sm90`] is ignored where it does
    /// not run: on other devices, and on sequences shorter than a chunk.
    pub fn with_family(mut self, arch: Arch) -> Self {
        let arch = if families(&self.problem, &self.device).contains(&arch) { arch } else { Arch::Sm80 };
        self.forward = schedule(&self.problem, &self.device, arch, &FORWARD);
        self.backward = schedule(&self.problem, &self.device, arch, &BACKWARD);
        self
    }

    /// The plan with the number of segments pinned, forward and backward, for tests and tuning. Clamped to what the
    /// sequence length allows.
    pub fn with_segments(mut self, forward: u32, backward: u32) -> Self {
        self.forward = self.repin(&self.forward, &FORWARD, forward, Pinned::default());
        self.backward = self.repin(&self.backward, &BACKWARD, backward, Pinned::default());
        self
    }

    /// The plan with the number of blocks that share a slab of a segment pinned, and the value columns of a slab, for
    /// tests and tuning. Only kernels of [`Arch::Sm90`] share; slabs of 128 columns are for dims above 64.
    pub fn with_sharers(mut self, sharers: u32, value_tile: u32) -> Self {
        let pinned = Pinned { sharers: Some(sharers), value_tile: Some(value_tile) };
        self.forward = self.repin(&self.forward, &FORWARD, self.forward.segments, pinned);
        self.backward = self.repin(&self.backward, &BACKWARD, self.backward.segments, pinned);
        self
    }

    fn repin(&self, schedule: &Schedule, roles: &[Role], segments: u32, pinned: Pinned) -> Schedule {
        cost(&self.problem, &self.device, schedule.arch, roles, segments, pinned)
    }

    /// The problem that was planned.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// How forward runs.
    pub fn forward(&self) -> &Schedule {
        &self.forward
    }

    /// How backward runs.
    pub fn backward(&self) -> &Schedule {
        &self.backward
    }

    /// Workspace that serves both passes, bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.forward.workspace_bytes.max(self.backward.workspace_bytes)
    }

    /// The kernels this plan launches.
    pub fn variants(&self) -> Vec<&'static Variant> {
        let dtype = self.problem.dtype;
        let mut variants: Vec<&'static Variant> = Vec::new();
        let mut push = |variant| {
            if !variants.contains(&variant) {
                variants.push(variant);
            }
        };
        for (schedule, roles) in [(&self.forward, &FORWARD[..]), (&self.backward, &BACKWARD[..])] {
            if schedule.segments > 1 {
                push(find(Op::ChunkState, Arch::Sm80, dtype, tile(self.problem.head_dim), SLAB));
                push(find(Op::StateScan, Arch::Sm80, dtype, 0, 0));
            }
            for (role, &value_tile) in roles.iter().zip(&schedule.value_tiles) {
                push(find(Op::ChunkOutput, schedule.arch, dtype, tile(role.dims(&self.problem).0), value_tile));
            }
        }
        variants
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.problem;
        writeln!(
            f,
            "{}×{}×{}×{}×{} {} on {} multiprocessors of compute capability {}.{}",
            p.batch,
            p.heads,
            p.seq_len,
            p.head_dim,
            p.value_dim,
            p.dtype,
            self.device.multiprocessors,
            self.device.compute_capability.0,
            self.device.compute_capability.1
        )?;
        for (name, s, roles) in [("forward", &self.forward, 1), ("backward", &self.backward, 3)] {
            writeln!(
                f,
                "{name}: {:?}, {} segment(s) of {} rows, {:?} sharing slabs of {:?}, predicted {:.0} µs against {:.0} µs uncut, \
                 workspace {} bytes",
                s.arch,
                s.segments,
                s.segment_len,
                &s.sharers[..roles],
                &s.value_tiles[..roles],
                s.predicted_us,
                s.uncut_us,
                s.workspace_bytes
            )?;
        }
        Ok(())
    }
}

/// The output an application computes (B7); with it, which dim is the key dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    O,
    Dq,
    Dk,
    Dv,
}

const FORWARD: [Role; 1] = [Role::O];
const BACKWARD: [Role; 3] = [Role::Dq, Role::Dk, Role::Dv];

impl Role {
    /// `(key_dim, value_dim)` of the application.
    fn dims(self, problem: &Problem) -> (usize, usize) {
        match self {
            Role::O | Role::Dv => (problem.head_dim, problem.value_dim),
            Role::Dq | Role::Dk => (problem.value_dim, problem.head_dim),
        }
    }
}

/// The families that run a problem.
fn families(problem: &Problem, device: &Device) -> &'static [Arch] {
    if device.compute_capability == (9, 0) && problem.seq_len >= CHUNK as usize {
        &[Arch::Sm90, Arch::Sm80]
    } else {
        &[Arch::Sm80]
    }
}

fn element(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::Bf16 => Some(ElementType::Bf16),
        DType::F16 => Some(ElementType::F16),
        DType::F32 => None,
    }
}

/// The tile that holds `dim` columns.
fn tile(dim: usize) -> u32 {
    (dim as u32).next_multiple_of(SLAB)
}

fn find(op: Op, arch: Arch, dtype: DType, key_tile: u32, value_tile: u32) -> &'static Variant {
    let wanted = |v: &&Variant| {
        (v.op, v.arch, v.key_tile, v.value_tile) == (op, arch, key_tile, value_tile)
            && (op == Op::StateScan || Some(v.element) == element(dtype))
    };
    VARIANTS.iter().find(wanted).expect("Plan::new admits only what the table covers")
}
