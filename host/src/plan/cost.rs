//! The cost model: what a schedule takes, in microseconds on an H200.
//!
//! A launch runs in waves of as many blocks as the device holds. A wave takes a ramp, then for each chunk of a segment
//! the longest of what a block computes, what device memory gives and what L2 gives. The constants were fitted to a grid of
//! shapes and pinned schedules, `benches/records/h200/plan.csv`; `tests/plan` holds the choices against it.

use lightning_attention_kernels::variants::{Arch, CHUNK, Op, PAIR, SLAB, Variant};

use super::{Device, Role, Schedule, Sweep, find, gradients, is_accurate, state_len, tile};
use crate::Problem;

/// Launching a kernel after another.
const LAUNCH_US: f64 = 1.9;
/// First loads and last stores of a wave.
const RAMP_US: f64 = 2.5;
/// Device memory, as the kernels use it.
const MEMORY_BYTES_PER_US: f64 = 3.8e6;
/// L2 to the multiprocessors: what blocks that share read again.
const L2_BYTES_PER_US: f64 = 7.0e6;
/// The same for sweeps.
const SWEEP_L2_BYTES_PER_US: f64 = 5.3e6;
/// The states, read and written by the scan.
const SCAN_BYTES_PER_US: f64 = 1.9e6;
/// Sharing a segment beyond this costs more L2 traffic than it brings.
const MOST_SHARERS: u32 = 4;

/// Time of a block per chunk.
#[derive(Clone, Copy)]
enum ChunkTime {
    /// Carrying the state, and the output, which `sharers` blocks divide among them.
    Shared { state_us: f64, output_us: f64 },
    /// Alone on a multiprocessor, and what each neighbour there adds.
    Crowded { alone_us: f64, neighbour_us: f64 },
}

impl ChunkTime {
    fn times(self, factor: f64) -> Self {
        match self {
            ChunkTime::Shared { state_us, output_us } => {
                ChunkTime::Shared { state_us: factor * state_us, output_us: factor * output_us }
            }
            ChunkTime::Crowded { alone_us, neighbour_us } => {
                ChunkTime::Crowded { alone_us: factor * alone_us, neighbour_us: factor * neighbour_us }
            }
        }
    }
}

/// Fitted to what was measured on an H200, but for accurate `ChunkState`, where 2 is the ratio of the products, and the accurate portable
/// kernels, which take the factors of Hopper's.
fn chunk_time(variant: &Variant) -> ChunkTime {
    use ChunkTime::{Crowded, Shared};
    let factor = match (variant.accurate, variant.op, variant.key_tile) {
        (false, _, _) => 1.0,
        (true, Op::ChunkState, _) => 2.0,
        (true, _, 64) => 1.41,
        (true, _, _) => 1.35,
    };
    let time = match (variant.op, variant.arch, variant.key_tile, variant.value_tile) {
        (Op::Gradients, _, 64, 64) => Shared { state_us: 0.20, output_us: 1.50 },
        (Op::Gradients, _, _, 64) => Shared { state_us: 0.40, output_us: 1.80 },
        (Op::Gradients, _, 64, _) => Shared { state_us: 0.30, output_us: 3.10 },
        (Op::Gradients, _, _, _) => Shared { state_us: 0.85, output_us: 3.50 },
        (Op::PairedGradients, _, 64, 64) => Shared { state_us: 0.30, output_us: 1.60 },
        (Op::PairedGradients, _, _, 64) => Shared { state_us: 0.45, output_us: 1.90 },
        (Op::PairedGradients, _, _, _) => Shared { state_us: 0.30, output_us: 3.00 },
        (Op::ChunkOutput, Arch::Sm90, 64, 64) => Shared { state_us: 0.23, output_us: 0.45 },
        (Op::ChunkOutput, Arch::Sm90, _, 64) => Shared { state_us: 0.52, output_us: 0.39 },
        (Op::ChunkOutput, Arch::Sm90, 64, _) => Shared { state_us: 0.41, output_us: 0.72 },
        (Op::ChunkOutput, Arch::Sm90, _, _) => Shared { state_us: 0.74, output_us: 1.00 },
        (Op::ChunkOutput, Arch::Sm80, 64, _) => Crowded { alone_us: 1.95, neighbour_us: 0.49 },
        (Op::ChunkOutput, Arch::Sm80, _, _) => Crowded { alone_us: 2.20, neighbour_us: 1.40 },
        (_, _, 64, _) => Crowded { alone_us: 0.34, neighbour_us: 0.03 },
        (_, _, _, _) => Crowded { alone_us: 0.55, neighbour_us: 0.47 },
    };
    time.times(factor)
}

/// What of a schedule is not left to the model.
#[derive(Clone, Copy, Default)]
pub(super) struct Pinned {
    pub sharers: Option<u32>,
    pub value_tile: Option<u32>,
}

/// Picks between a kernel for each output and, backward, one sweep.
pub(super) fn schedule(problem: &Problem, device: &Device, arch: Arch, roles: &[Role]) -> Schedule {
    let each = each(problem, device, arch, roles);
    if arch == Arch::Sm80 || roles.len() == 1 || is_accurate(problem) {
        return each;
    }
    let sweep = sweep(problem, device, Sweep::Lean);
    if sweep.predicted_us < each.predicted_us { sweep } else { each }
}

/// A kernel for each output.
pub(super) fn each(problem: &Problem, device: &Device, arch: Arch, roles: &[Role]) -> Schedule {
    best_of_segments(problem, device, |segments| cost(problem, device, arch, roles, segments, Pinned::default()))
}

/// One sweep for all gradients.
pub(super) fn sweep(problem: &Problem, device: &Device, sweep: Sweep) -> Schedule {
    best_of_segments(problem, device, |segments| sweep_cost(problem, device, segments, None, sweep))
}

/// Picks the number of segments, in steps of half an octave: between those nothing is to be had.
fn best_of_segments(problem: &Problem, device: &Device, cost: impl Fn(u32) -> Schedule) -> Schedule {
    let chunks = chunks(problem);
    // More segments than multiprocessor slots never help; each is at least one chunk.
    let most = chunks.min(device.multiprocessors * 8);
    let counts = core::iter::successors(Some(1_u32), |&n| {
        Some((n + 1).max((f64::from(n) * core::f64::consts::SQRT_2).round() as u32))
    });
    counts
        .take_while(|&segments| segments <= most.max(1))
        .map(cost)
        .min_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us))
        .expect("one segment is always possible")
}

/// The schedule with `segments` segments, and its cost. Picks sharers and slabs unless they are given.
pub(super) fn cost(
    problem: &Problem,
    device: &Device,
    arch: Arch,
    roles: &[Role],
    segments: u32,
    pinned: Pinned,
) -> Schedule {
    let model = Model::new(problem, device, segments);
    let mut schedule = Schedule {
        arch,
        segments: model.segments,
        segment_len: model.chunks_per_segment * CHUNK,
        sharers: [1; 3],
        value_tiles: [SLAB; 3],
        sweep: None,
        workspace_bytes: 0,
        predicted_us: 0.0,
        uncut_us: 0.0,
    };
    let mut index = 0;
    // As the launches are grouped.
    let key_tile = |role: Role| tile(role.dims(problem).0);
    for group in roles.chunk_by(|a, b| arch == Arch::Sm80 && key_tile(*a) == key_tile(*b)) {
        let (us, sharers, value_tile) = candidates(problem, group[0], arch, pinned, model.chunks_per_segment)
            .map(|(sharers, value_tile)| (model.outputs_us(group, arch, sharers, value_tile), sharers, value_tile))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .expect("there is a candidate");
        schedule.predicted_us += us;
        for _ in group {
            (schedule.sharers[index], schedule.value_tiles[index]) = (sharers, value_tile);
            index += 1;
        }
    }
    if model.segments > 1 {
        let num_states = if roles.len() == 1 { 1 } else { 2 };
        schedule.workspace_bytes = schedule.state_bytes(problem, num_states);
        schedule.predicted_us += model.states_us(num_states, schedule.workspace_bytes);
        schedule.uncut_us = cost(problem, device, arch, roles, 1, pinned).predicted_us;
    } else {
        schedule.uncut_us = schedule.predicted_us;
    }
    schedule
}

/// The schedule of a sweep with about `segments` segments, all of the same length, and its cost. Picks sharers unless they are given.
pub(super) fn sweep_cost(
    problem: &Problem,
    device: &Device,
    segments: u32,
    sharers: Option<u32>,
    sweep: Sweep,
) -> Schedule {
    let chunks = chunks(problem);
    // Chunks that a block outputs together.
    let together = if sweep == Sweep::Paired { PAIR / CHUNK } else { 1 };
    let fits = |segments: &u32| *segments == 1 || (problem.seq_len as u32).is_multiple_of(CHUNK * together * segments);
    let segments = (1..=segments.clamp(1, chunks)).rev().find(fits).expect("one segment is always possible");
    let model = Model::new(problem, device, segments);
    let candidates = match sharers {
        Some(sharers) => sharers.max(1)..=sharers.max(1),
        None => 1..=MOST_SHARERS.min(model.chunks_per_segment.div_ceil(together)),
    };
    let (predicted_us, sharers) = candidates
        .map(|sharers| (model.sweep_us(sharers, sweep), sharers))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .expect("there is a candidate");
    let mut schedule = Schedule {
        arch: Arch::Sm90,
        segments: model.segments,
        segment_len: model.chunks_per_segment * CHUNK,
        sharers: [sharers; 3],
        value_tiles: [tile(problem.head_dim), tile(problem.head_dim), tile(problem.value_dim)],
        sweep: Some(sweep),
        workspace_bytes: 0,
        predicted_us,
        uncut_us: predicted_us,
    };
    if model.segments > 1 {
        // S comes from checkpoints.
        let num_states = if sweep == Sweep::Paired { 1 } else { 2 };
        schedule.workspace_bytes = schedule.state_bytes(problem, num_states);
        schedule.predicted_us += model.states_us(num_states, schedule.workspace_bytes);
        schedule.uncut_us = sweep_cost(problem, device, 1, None, sweep).predicted_us;
    }
    schedule
}

impl Schedule {
    /// Bytes of so many states of each segment.
    pub(super) fn state_bytes(&self, problem: &Problem, num_states: usize) -> usize {
        let segments = if self.segments > 1 { self.segments as usize } else { 0 };
        num_states * problem.batch * problem.heads * segments * state_len(problem) * 4
    }

    /// The schedule of a forward pass that stores checkpoints besides.
    pub(super) fn with_checkpoints(self, problem: &Problem) -> Self {
        let rows = (problem.batch * problem.heads * problem.seq_len) as f64;
        let bytes = state_len(problem) * problem.dtype.size();
        let us = rows / f64::from(PAIR) * bytes as f64 / MEMORY_BYTES_PER_US;
        Schedule { predicted_us: self.predicted_us + us, uncut_us: self.uncut_us + us, ..self }
    }
}

/// Sharers and slabs that there are kernels for.
fn candidates(
    problem: &Problem,
    role: Role,
    arch: Arch,
    pinned: Pinned,
    chunks: u32,
) -> impl Iterator<Item = (u32, u32)> {
    let value_dim = role.dims(problem).1;
    let wide = arch == Arch::Sm90 && tile(value_dim) == 128 && !is_accurate(problem);
    let value_tiles = match pinned.value_tile {
        Some(128) if wide => [false, true],
        Some(_) => [true, false],
        None => [true, wide],
    };
    let sharers = match (arch, pinned.sharers) {
        (Arch::Sm80, _) => 1..=1,
        (Arch::Sm90, Some(pinned)) => pinned.max(1)..=pinned.max(1),
        // More than there are chunks would have nothing to output.
        (Arch::Sm90, None) => 1..=MOST_SHARERS.min(chunks),
    };
    let value_tiles = [64, 128].into_iter().zip(value_tiles).filter(|(_, there)| *there).map(|(tile, _)| tile);
    value_tiles.flat_map(move |value_tile| sharers.clone().map(move |sharers| (sharers, value_tile)))
}

fn chunks(problem: &Problem) -> u32 {
    (problem.seq_len as u32).div_ceil(CHUNK).max(1)
}

/// Elements of a row that L2 moves for the copy engine. Where rows begin within a sector of 32 bytes every panel touches lines that others
/// touch too.
fn touched(dim: usize) -> f64 {
    if dim.is_multiple_of(16) { dim as f64 } else { f64::from(tile(dim) + SLAB) }
}

struct Model<'a> {
    problem: &'a Problem,
    device: &'a Device,
    sequences: usize,
    segments: u32,
    chunks_per_segment: u32,
}

impl<'a> Model<'a> {
    fn new(problem: &'a Problem, device: &'a Device, segments: u32) -> Self {
        let chunks = chunks(problem);
        let chunks_per_segment = chunks.div_ceil(segments.clamp(1, chunks));
        let segments = chunks.div_ceil(chunks_per_segment);
        Model { problem, device, sequences: problem.batch * problem.heads, segments, chunks_per_segment }
    }

    /// A launch of `blocks` blocks, each of which takes so many bytes a row from device memory and from L2.
    fn launch_us(&self, variant: &Variant, blocks: usize, sharers: u32, memory_bytes: f64, l2_bytes: f64) -> f64 {
        let multiprocessors = self.device.multiprocessors as usize;
        self.waves_us(variant, blocks, memory_bytes, l2_bytes, |blocks| match chunk_time(variant) {
            ChunkTime::Shared { state_us, output_us } => state_us + output_us / f64::from(sharers),
            ChunkTime::Crowded { alone_us, neighbour_us } => {
                alone_us + neighbour_us * (blocks.div_ceil(multiprocessors) - 1) as f64
            }
        })
    }

    /// The same where a chunk takes the given time in a wave of so many blocks.
    fn waves_us(
        &self,
        variant: &Variant,
        blocks: usize,
        memory_bytes: f64,
        l2_bytes: f64,
        compute_us: impl Fn(usize) -> f64,
    ) -> f64 {
        let slots = (self.device.multiprocessors * self.device.resident_blocks(variant)) as usize;
        let wave_us = |blocks: usize| {
            let compute_us = compute_us(blocks);
            let rows = blocks as f64 * f64::from(CHUNK);
            let traffic_us = f64::max(rows * memory_bytes / MEMORY_BYTES_PER_US, rows * l2_bytes / L2_BYTES_PER_US);
            RAMP_US + f64::from(self.chunks_per_segment) * compute_us.max(traffic_us)
        };
        let rest = blocks % slots;
        let rest_us = if rest > 0 { wave_us(rest) } else { 0.0 };
        LAUNCH_US + (blocks / slots) as f64 * wave_us(slots) + rest_us
    }

    /// One launch of the output kernel, for roles of one key tile.
    fn outputs_us(&self, roles: &[Role], arch: Arch, sharers: u32, value_tile: u32) -> f64 {
        let (key_dim, value_dim) = roles[0].dims(self.problem);
        let variant = find(Op::ChunkOutput, arch, self.problem, tile(key_dim), value_tile);
        let slabs = value_dim.div_ceil(value_tile as usize);
        let blocks = roles.len() * self.sequences * slabs * (self.segments * sharers) as usize;
        let (slabs, shares) = (slabs as f64, f64::from(sharers));
        let memory_bytes = 2.0 * (2.0 * key_dim as f64 + 2.0 * value_dim as f64) / (slabs * shares);
        let [key_dim, value_dim] =
            [key_dim, value_dim].map(|dim| if arch == Arch::Sm90 { touched(dim) } else { dim as f64 });
        // X and O of its own chunks, Y and Z of all.
        let l2_bytes = 2.0 * (key_dim + value_dim / slabs) * (1.0 + 1.0 / shares);
        self.launch_us(variant, blocks, sharers, memory_bytes, l2_bytes)
    }

    /// The gradient kernels.
    fn sweep_us(&self, sharers: u32, sweep: Sweep) -> f64 {
        let variant = gradients(self.problem, sweep);
        let blocks = self.sequences * (self.segments * sharers) as usize;
        let shares = f64::from(sharers);
        // Elements of a row of the block's own chunks, and of the others', of which states take Q and dO, or K and V.
        let elements = |d: f64, e: f64| {
            let once = 2.0 * d + 2.0 * e + 2.0 * d + e;
            match sweep {
                Sweep::Lean => (once + d + 2.0 * e, 2.0 * (d + e)),
                Sweep::Paired => (once + state_len(self.problem) as f64 / f64::from(PAIR), d + e),
            }
        };
        let dims = [self.problem.head_dim, self.problem.value_dim];
        let [d, e] = dims.map(|dim| dim as f64);
        let memory_bytes = 2.0 * elements(d, e).0 / shares;
        let [d, e] = dims.map(touched);
        let (own, others) = elements(d, e);
        let l2_bytes = 2.0 * (own / shares + others * (1.0 - 1.0 / shares));
        let l2_bytes = l2_bytes * L2_BYTES_PER_US / SWEEP_L2_BYTES_PER_US;
        let states = if sweep == Sweep::Lean { 2.0 } else { 1.0 };
        let ChunkTime::Shared { state_us, output_us } = chunk_time(variant) else {
            unreachable!("sweeps share segments")
        };
        let chunk_us = states * state_us + output_us / shares;
        self.waves_us(variant, blocks, memory_bytes, l2_bytes, |_| chunk_us)
    }

    /// The state and scan kernels.
    fn states_us(&self, num_states: usize, workspace_bytes: usize) -> f64 {
        let &Problem { head_dim, value_dim, .. } = self.problem;
        let variant = find(Op::ChunkState, Arch::Sm80, self.problem, tile(head_dim), SLAB);
        let slabs = value_dim.div_ceil(SLAB as usize);
        let blocks = num_states * self.sequences * slabs * (self.segments as usize - 1);
        let memory_bytes = 2.0 * (head_dim + value_dim) as f64 / slabs as f64;
        let l2_bytes = 2.0 * (head_dim as f64 + value_dim as f64 / slabs as f64);
        let scan_us = LAUNCH_US + 2.0 * workspace_bytes as f64 / SCAN_BYTES_PER_US;
        self.launch_us(variant, blocks, 1, memory_bytes, l2_bytes) + scan_us
    }
}
