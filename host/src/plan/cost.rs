//! The cost model: what a schedule takes, in microseconds on an H200.
//!
//! A launch runs in waves of as many blocks as the device holds. A wave takes a ramp, then for each chunk of a segment
//! the longest of what a block computes, what device memory gives and what L2 gives. The constants were fitted to a grid of
//! shapes and pinned schedules, `benches/records/h200/plan.csv`; `tests/plan` holds the choices against it.

use lightning_attention_kernels::variants::{Arch, CHUNK, Op, PAIR, SLAB, Variant};

use super::{Device, Role, Schedule, Sweep, chunk_state, find, gradients, is_accurate, state_len, tile};
use crate::Problem;

/// Launching a kernel after another.
const LAUNCH_US: f64 = 1.9;
/// First loads and last stores of a wave.
const RAMP_US: f64 = 2.5;
/// Device memory, as the kernels use it.
const MEMORY_BYTES_PER_US: f64 = 3.9e6;
/// L2 to the multiprocessors: what blocks that share read again.
const L2_BYTES_PER_US: f64 = 7.0e6;
/// The same for sweeps.
const SWEEP_L2_BYTES_PER_US: f64 = 6.5e6;
/// Share of all rows that the state kernel reads, with the slopes of the models that there are: of heads that decay fast the last ones.
const REMEMBERED: f64 = 0.5;
/// The states, read and written by the scan.
const SCAN_BYTES_PER_US: f64 = 1.9e6;
/// Blocks of the state kernel for each multiprocessor, up to which segments are divided into parts for it.
const MOST_STATE_BLOCKS: u32 = 2;
/// Sharing a segment beyond this costs more L2 traffic than it brings.
const MOST_SHARERS: u32 = 4;

/// Time of a block per chunk of the segment, where neither device memory nor L2 limits it.
#[derive(Clone, Copy)]
enum ChunkTime {
    /// Where 1, 2, 3 or 4 blocks share a segment.
    Shared([f64; MOST_SHARERS as usize]),
    /// Alone on a multiprocessor, and what each neighbour there adds.
    Crowded { alone_us: f64, neighbour_us: f64 },
}

impl ChunkTime {
    fn times(self, factor: f64) -> Self {
        match self {
            ChunkTime::Shared(us) => ChunkTime::Shared(us.map(|us| factor * us)),
            ChunkTime::Crowded { alone_us, neighbour_us } => {
                ChunkTime::Crowded { alone_us: factor * alone_us, neighbour_us: factor * neighbour_us }
            }
        }
    }
}

/// Fitted to what was measured on an H200, but for numbers of sharers that nothing was measured with, which follow those beside them;
/// Hopper's `ChunkState`, an estimate; accurate `ChunkState`, where 2 is the ratio of the products; and the accurate portable kernels, which
/// take the factors of Hopper's.
fn chunk_time(variant: &Variant) -> ChunkTime {
    use ChunkTime::{Crowded, Shared};
    let factor = match (variant.accurate, variant.op, variant.key_tile) {
        (false, _, _) => 1.0,
        (true, Op::ChunkState, _) => 2.0,
        (true, _, 64) => 1.41,
        (true, _, _) => 1.35,
    };
    let time = match (variant.op, variant.arch, variant.key_tile, variant.value_tile) {
        (Op::Gradients, _, 64, 64) => Shared([1.83, 1.19, 1.06, 1.00]),
        (Op::Gradients, _, _, 64) => Shared([2.48, 1.70, 1.45, 1.25]),
        (Op::Gradients, _, 64, _) => Shared([2.98, 1.87, 1.50, 1.40]),
        (Op::Gradients, _, _, _) => Shared([4.90, 3.60, 2.50, 2.16]),
        (Op::PairedGradients, _, 64, 64) => Shared([1.90, 1.05, 0.82, 0.75]),
        (Op::PairedGradients, _, _, 64) => Shared([2.46, 1.35, 1.06, 0.99]),
        (Op::PairedGradients, _, _, _) => Shared([3.00, 1.70, 1.27, 1.08]),
        (Op::ChunkOutput, Arch::Sm90, 64, 64) => Shared([0.68, 0.48, 0.42, 0.40]),
        (Op::ChunkOutput, Arch::Sm90, _, 64) => Shared([0.83, 0.59, 0.52, 0.47]),
        (Op::ChunkOutput, Arch::Sm90, 64, _) => Shared([1.16, 0.84, 0.73, 0.68]),
        (Op::ChunkOutput, Arch::Sm90, _, _) => Shared([1.72, 1.25, 1.06, 0.97]),
        (Op::ChunkState, Arch::Sm90, 64, 64) => Shared([0.25; 4]),
        (Op::ChunkState, Arch::Sm90, _, _) => Shared([0.40; 4]),
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
        parts: 1,
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
        model.add_states(&mut schedule, if roles.len() == 1 { 1 } else { 2 });
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
        parts: 1,
        sharers: [sharers; 3],
        value_tiles: [tile(problem.head_dim), tile(problem.head_dim), tile(problem.value_dim)],
        sweep: Some(sweep),
        workspace_bytes: 0,
        predicted_us,
        uncut_us: predicted_us,
    };
    if model.segments > 1 {
        // S comes from checkpoints.
        model.add_states(&mut schedule, if sweep == Sweep::Paired { 1 } else { 2 });
        schedule.uncut_us = sweep_cost(problem, device, 1, None, sweep).predicted_us;
    }
    schedule
}

impl Schedule {
    /// States of a sequence in the workspace, if it is cut: one for each part of all segments but the last, and that which enters the last.
    pub(super) fn states_per_sequence(&self) -> u32 {
        self.parts * (self.segments - 1) + 1
    }

    /// Bytes of so many arrays of states.
    pub(super) fn state_bytes(&self, problem: &Problem, num_states: usize) -> usize {
        let states = if self.segments > 1 { self.states_per_sequence() as usize } else { 0 };
        num_states * problem.batch * problem.heads * states * state_len(problem) * 4
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

/// Elements of a row that L2 moves for the copy engine. Where rows begin within a line of 128 bytes panels touch lines that others touch
/// too, and more where they begin within a sector of 32.
fn touched(dim: usize) -> f64 {
    f64::from(if dim.is_multiple_of(16) { tile(dim) } else { tile(dim) + SLAB })
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
        let slots = (self.device.multiprocessors * self.device.resident_blocks(variant)) as usize;
        let wave_us = |blocks: usize| {
            let compute_us = match chunk_time(variant) {
                ChunkTime::Shared(us) => us[(sharers.min(MOST_SHARERS) - 1) as usize],
                ChunkTime::Crowded { alone_us, neighbour_us } => {
                    alone_us + neighbour_us * (blocks.div_ceil(multiprocessors) - 1) as f64
                }
            };
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
        self.launch_us(variant, blocks, sharers, memory_bytes, l2_bytes)
    }

    /// Adds the state and scan kernels, in parts that fill the device. Of some heads the state kernel reads few rows, and takes as long
    /// as it reads of any; parts divide that.
    fn add_states(&self, schedule: &mut Schedule, num_states: usize) {
        let slabs = self.problem.value_dim.div_ceil(chunk_state(self.problem, schedule.arch).value_tile as usize);
        let blocks = num_states * self.sequences * slabs * (self.segments as usize - 1);
        let fits = |parts: &u32| {
            self.chunks_per_segment.is_multiple_of(*parts)
                && blocks * *parts as usize <= (MOST_STATE_BLOCKS * self.device.multiprocessors) as usize
        };
        schedule.parts = [4, 2].into_iter().find(fits).unwrap_or(1);
        schedule.workspace_bytes = schedule.state_bytes(self.problem, num_states);
        schedule.predicted_us += self.states_us(schedule, num_states);
    }

    /// The state and scan kernels.
    fn states_us(&self, schedule: &Schedule, num_states: usize) -> f64 {
        let &Problem { head_dim, value_dim, .. } = self.problem;
        let variant = chunk_state(self.problem, schedule.arch);
        let slabs = value_dim.div_ceil(variant.value_tile as usize);
        let blocks = num_states * self.sequences * slabs * (schedule.states_per_sequence() as usize - 1);
        let memory_bytes = 2.0 * (head_dim + value_dim) as f64 / slabs as f64;
        let l2_bytes = 2.0 * (head_dim as f64 + value_dim as f64 / slabs as f64);
        // Each is read, and those that enter a segment are written.
        let state_bytes = (num_states * self.sequences * state_len(self.problem) * 4) as f64;
        let scanned_bytes = state_bytes * f64::from(schedule.states_per_sequence() + self.segments);
        let part = Model { chunks_per_segment: self.chunks_per_segment / schedule.parts, ..*self };
        let [memory_bytes, l2_bytes] = [memory_bytes, l2_bytes].map(|bytes| REMEMBERED * bytes);
        part.launch_us(variant, blocks, 1, memory_bytes, l2_bytes) + LAUNCH_US + scanned_bytes / SCAN_BYTES_PER_US
    }
}
