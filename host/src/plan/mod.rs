//! Problem + device → which kernels run, on what grid, over how many segments. Pure functions of plain data.

mod cost;
mod launches;

use core::fmt;

use lightning_attention_kernels::abi::MAX_APPLICATIONS;
use lightning_attention_kernels::variants::{Arch, CHUNK, ElementType, Op, PAIR, SLAB, VARIANTS, Variant};

use crate::problem::Region;
use crate::view::DType;
use crate::{Error, Precision, Problem, Result};
use cost::{Pinned, cost, each, schedule, sweep, sweep_cost};
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
    /// Parts of a segment, whose contributions to the state are made by blocks of their own.
    pub parts: u32,
    /// Blocks that share a slab of a segment, for each output of the pass (o; dq, dk, dv).
    pub sharers: [u32; MAX_APPLICATIONS],
    /// Value columns of a slab, for each output of the pass.
    pub value_tiles: [u32; MAX_APPLICATIONS],
    /// How one sweep makes dq, dk and dv; else each output has a kernel of its own.
    pub sweep: Option<Sweep>,
    /// f32 states kept between the kernels of the pass or within one, bytes.
    pub workspace_bytes: usize,
    /// What the cost model expects, microseconds on an H200.
    pub predicted_us: f64,
    /// What it expects without cutting the sequence.
    pub uncut_us: f64,
}

/// One kernel for dq, dk and dv.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Without checkpoints, walking each segment forward for dq and then backward (`docs/algorithm.md`, B8).
    Lean,
    /// From checkpoints, walking each segment backward by pairs of chunks (B9).
    Paired,
}

impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Sweep::Lean => "lean",
            Sweep::Paired => "paired",
        })
    }
}

/// States that a forward pass stores, rounded to the element type, so that backward need not make them again.
///
/// Only GPUs of [`Arch::Sm90`] have kernels for them, for sequences of at least 128 rows and where one of the dims is at most 64.
/// Elsewhere, and for [`Precision::Accurate`], the checkpointed passes are the plain ones and need no memory, so that callers may always use that pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpoints {
    /// States `[batch·heads, ⌈N / 128⌉, D / 64, E, 64]` of the problem's element type, dims padded to multiples of 64, bytes.
    pub bytes: usize,
    /// How the forward pass runs that stores them.
    pub forward: Schedule,
    /// How the backward pass runs that reads them.
    pub backward: Schedule,
}

/// How a problem is run on a device; prints itself with its reasons.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    problem: Problem,
    device: Device,
    forward: Schedule,
    backward: Schedule,
    checkpoints: Option<Checkpoints>,
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
        let plan = Plan { problem: problem.clone(), device, forward, backward, checkpoints: None };
        let plan = plan.with_checkpoints(true);
        let us = |forward: &Schedule, backward: &Schedule| forward.predicted_us + backward.predicted_us;
        let pays = |c: &Checkpoints| {
            let row_bytes = 2 * (problem.head_dim + problem.value_dim) * problem.dtype.size();
            5 * c.bytes <= problem.batch * problem.heads * problem.seq_len * row_bytes
                && us(&c.forward, &c.backward) < us(&plan.forward, &plan.backward)
        };
        let pays = plan.checkpoints.as_ref().is_some_and(pays);
        Ok(if pays { plan } else { plan.with_checkpoints(false) })
    }

    /// The plan with checkpoints, where there are kernels for them, or without: the checkpointed passes are then the plain ones. Plans
    /// have them where that is faster and takes at most a fifth of the memory of q, k, v and o.
    pub fn with_checkpoints(mut self, wanted: bool) -> Self {
        let problem = &self.problem;
        let runs = sweeps(problem, &self.device)
            && problem.seq_len >= PAIR as usize
            && tile(problem.head_dim).min(tile(problem.value_dim)) == SLAB;
        self.checkpoints = (wanted && runs).then(|| Checkpoints {
            bytes: problem.batch * problem.heads * pairs(problem) * state_len(problem) * problem.dtype.size(),
            forward: schedule(problem, &self.device, Arch::Sm90, &FORWARD).with_checkpoints(problem),
            backward: sweep(problem, &self.device, Sweep::Paired),
        });
        self
    }

    /// The plan with dq, dk and dv from one sweep, or with a kernel for each. There is no sweep but on GPUs of [`Arch::Sm90`], nor for
    /// [`Precision::Accurate`]; checkpointed passes always sweep.
    pub fn with_sweep(mut self, wanted: bool) -> Self {
        if wanted && sweeps(&self.problem, &self.device) {
            self.backward = sweep(&self.problem, &self.device, Sweep::Lean);
        } else if self.backward.sweep.is_some() {
            self.backward = each(&self.problem, &self.device, Arch::Sm90, &BACKWARD);
        }
        self
    }

    /// The plan with the family of the output kernels pinned, for tests and tuning. [`Arch::Sm90`] is ignored where it does
    /// not run: on other devices, and on sequences shorter than a chunk. The portable family has no checkpoints.
    pub fn with_family(mut self, arch: Arch) -> Self {
        let arch = if families(&self.problem, &self.device).contains(&arch) { arch } else { Arch::Sm80 };
        self.forward = schedule(&self.problem, &self.device, arch, &FORWARD);
        self.backward = schedule(&self.problem, &self.device, arch, &BACKWARD);
        if arch == Arch::Sm80 {
            self.checkpoints = None;
        }
        self
    }

    /// The plan with the number of segments pinned, forward and backward, for tests and tuning. Clamped to what the
    /// sequence length allows.
    pub fn with_segments(mut self, forward: u32, backward: u32) -> Self {
        self.repin([Some(forward), Some(backward)], Pinned::default());
        self
    }

    /// The plan with the number of blocks that share a slab of a segment pinned, and the value columns of a slab, for
    /// tests and tuning. Only kernels of [`Arch::Sm90`] share; slabs of 128 columns are for dims above 64 and [`Precision::Fast`].
    pub fn with_sharers(mut self, sharers: u32, value_tile: u32) -> Self {
        self.repin([None, None], Pinned { sharers: Some(sharers), value_tile: Some(value_tile) });
        self
    }

    /// Plans anew with so many segments forward and backward, or as many as there were.
    fn repin(&mut self, [forward, backward]: [Option<u32>; 2], pinned: Pinned) {
        let (problem, device) = (&self.problem, &self.device);
        let again = |s: &Schedule, roles: &[Role], segments: Option<u32>| {
            let segments = segments.unwrap_or(s.segments);
            match s.sweep {
                Some(sweep) => sweep_cost(problem, device, segments, pinned.sharers, sweep),
                None => cost(problem, device, s.arch, roles, segments, pinned),
            }
        };
        self.forward = again(&self.forward, &FORWARD, forward);
        self.backward = again(&self.backward, &BACKWARD, backward);
        if let Some(c) = &mut self.checkpoints {
            c.forward = again(&c.forward, &FORWARD, forward).with_checkpoints(problem);
            c.backward = again(&c.backward, &BACKWARD, backward);
        }
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

    /// What the checkpointed passes hand over; `None` where they are the plain passes.
    pub fn checkpoints(&self) -> Option<&Checkpoints> {
        self.checkpoints.as_ref()
    }

    /// Memory that lives from a checkpointed forward pass to its backward pass, bytes; 0 where none is used.
    pub fn checkpoint_bytes(&self) -> usize {
        self.checkpoints.map_or(0, |checkpoints| checkpoints.bytes)
    }

    /// Checks the memory of the checkpoints, of the problem's element type, beside the tensors of a forward pass that writes them, all of
    /// them, or of a backward pass that reads them, the written ones. No checkpoints need no memory.
    ///
    /// # Errors
    /// [`Error::BufferTooShort`], [`Error::Alignment`], [`Error::ElementType`] for `checkpoints`; [`Error::Overlap`].
    pub fn check_checkpoints(
        &self,
        region: &Region,
        tensors: &[(&'static str, Region)],
        is_written: bool,
    ) -> Result<()> {
        if self.checkpoints.is_none() {
            return Ok(());
        }
        region.check("checkpoints", self.checkpoint_shape(), self.problem.dtype, ROW_ALIGNMENT)?;
        for &(tensor, ref other) in tensors {
            if region.overlaps(other) {
                let (output, other) = if is_written { ("checkpoints", tensor) } else { (tensor, "checkpoints") };
                return Err(Error::Overlap { output, other });
            }
        }
        Ok(())
    }

    /// The checkpoints as one row.
    pub(crate) fn checkpoint_shape(&self) -> [usize; 4] {
        [1, 1, 1, self.checkpoint_bytes() / self.problem.dtype.size()]
    }

    /// The schedules of all passes.
    fn schedules(&self) -> impl Iterator<Item = (&Schedule, &'static [Role])> {
        let checkpointed = self.checkpoints.iter().flat_map(|c| [(&c.forward, &FORWARD[..]), (&c.backward, &BACKWARD)]);
        [(&self.forward, &FORWARD[..]), (&self.backward, &BACKWARD)].into_iter().chain(checkpointed)
    }

    /// Workspace that serves all passes, bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.schedules().map(|(schedule, _)| schedule.workspace_bytes).max().unwrap_or(0)
    }

    /// The kernels this plan launches.
    pub fn variants(&self) -> Vec<&'static Variant> {
        let problem = &self.problem;
        let mut variants: Vec<&'static Variant> = Vec::new();
        let mut push = |variant| {
            if !variants.contains(&variant) {
                variants.push(variant);
            }
        };
        for (schedule, roles) in self.schedules() {
            if schedule.segments > 1 {
                push(chunk_state(problem, schedule.arch));
                push(find(Op::StateScan, Arch::Sm80, problem, 0, 0));
            }
            if let Some(sweep) = schedule.sweep {
                push(gradients(problem, sweep));
                continue;
            }
            for (role, &value_tile) in roles.iter().zip(&schedule.value_tiles) {
                push(find(Op::ChunkOutput, schedule.arch, problem, tile(role.dims(problem).0), value_tile));
            }
        }
        variants
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.problem;
        let precision = if is_accurate(p) { ", accurate," } else { "" };
        writeln!(
            f,
            "{}×{}×{}×{}×{} {}{precision} on {} multiprocessors of compute capability {}.{}",
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
        let names = ["forward", "backward", "checkpointed forward", "checkpointed backward"];
        for (name, (s, roles)) in names.into_iter().zip(self.schedules()) {
            write!(f, "{name}: {:?}, {} segment(s) of {} rows, ", s.arch, s.segments, s.segment_len)?;
            if s.parts > 1 {
                write!(f, "states by {} parts, ", s.parts)?;
            }
            match s.sweep {
                None => {
                    let (sharers, value_tiles) = (&s.sharers[..roles.len()], &s.value_tiles[..roles.len()]);
                    write!(f, "{sharers:?} sharing slabs of {value_tiles:?}")?;
                }
                Some(Sweep::Lean) => write!(f, "{} sharing one sweep", s.sharers[0])?,
                Some(Sweep::Paired) => write!(f, "{} sharing one sweep by pairs of chunks", s.sharers[0])?,
            }
            let Schedule { predicted_us, uncut_us, workspace_bytes, .. } = s;
            writeln!(
                f,
                ", predicted {predicted_us:.0} µs against {uncut_us:.0} µs uncut, workspace {workspace_bytes} bytes"
            )?;
        }
        match &self.checkpoints {
            Some(c) => writeln!(f, "checkpoints: every {PAIR} rows, {} bytes", c.bytes),
            None => Ok(()),
        }
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

/// f32 elements of a state, both dims padded to the tile.
fn state_len(problem: &Problem) -> usize {
    (tile(problem.head_dim) * tile(problem.value_dim)) as usize
}

/// Whether what rounding leaves is multiplied too.
fn is_accurate(problem: &Problem) -> bool {
    problem.precision == Precision::Accurate
}

/// Whether there are kernels that make dq, dk and dv in one sweep.
fn sweeps(problem: &Problem, device: &Device) -> bool {
    families(problem, device).contains(&Arch::Sm90) && !is_accurate(problem)
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

/// Pairs of chunks of a sequence.
fn pairs(problem: &Problem) -> usize {
    problem.seq_len.div_ceil(PAIR as usize)
}

/// The state kernel of a problem.
fn chunk_state(problem: &Problem, arch: Arch) -> &'static Variant {
    let (key_tile, value_tile) = (tile(problem.head_dim), tile(problem.value_dim));
    match arch {
        Arch::Sm90 if !is_accurate(problem) => find(Op::ChunkState, Arch::Sm90, problem, key_tile, value_tile),
        _ => find(Op::ChunkState, Arch::Sm80, problem, key_tile, SLAB),
    }
}

/// The gradient kernel of a problem.
fn gradients(problem: &Problem, sweep: Sweep) -> &'static Variant {
    let op = match sweep {
        Sweep::Lean => Op::Gradients,
        Sweep::Paired => Op::PairedGradients,
    };
    find(op, Arch::Sm90, problem, tile(problem.head_dim), tile(problem.value_dim))
}

fn find(op: Op, arch: Arch, problem: &Problem, key_tile: u32, value_tile: u32) -> &'static Variant {
    let numbers = (element(problem.dtype), is_accurate(problem));
    let wanted = |v: &&Variant| {
        (v.op, v.arch, v.key_tile, v.value_tile) == (op, arch, key_tile, value_tile)
            && (op == Op::StateScan || (Some(v.element), v.accurate) == numbers)
    };
    VARIANTS.iter().find(wanted).expect("Plan::new admits only what the table covers")
}
