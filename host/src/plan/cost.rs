//! The cost model: what a schedule takes, in microseconds on an H200.
//!
//! Blocks run in waves of as many as the device holds; a wave takes the chunks of one segment times a block's time per
//! chunk, measured with full multiprocessors. Nothing is faster than memory.

use lightning_attention_kernels::variants::{Arch, CHUNK, Op, SLAB, Variant};

use super::{Device, Role, Schedule, find, tile};
use crate::Problem;

/// Launching a kernel after another.
const LAUNCH_US: f64 = 2.5;
/// States through L2, bytes.
const SCAN_BYTES_PER_US: f64 = 2.0e6;
/// Device memory, bytes.
const MEMORY_BYTES_PER_US: f64 = 4.0e6;
/// Sharing a segment beyond this costs more L2 traffic than it brings.
const MOST_SHARERS: u32 = 4;

/// What of a schedule is not left to the model.
#[derive(Clone, Copy, Default)]
pub(super) struct Pinned {
    pub sharers: Option<u32>,
    pub value_tile: Option<u32>,
}

/// Picks the number of segments.
pub(super) fn schedule(problem: &Problem, device: &Device, arch: Arch, roles: &[Role]) -> Schedule {
    let chunks = chunks(problem);
    let uncut = cost(problem, device, arch, roles, 1, Pinned::default());
    // More segments than multiprocessor slots never help; each is at least one chunk.
    let most = chunks.min(device.multiprocessors * 8);
    (2..=most)
        // Numbers that round to the same segments are the same schedule.
        .filter(|&segments| segments == chunks.div_ceil(chunks.div_ceil(segments)))
        .map(|segments| cost(problem, device, arch, roles, segments, Pinned::default()))
        .fold(uncut, |best, next| if next.predicted_us < best.predicted_us { next } else { best })
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
        workspace_bytes: 0,
        predicted_us: 0.0,
        uncut_us: 0.0,
    };
    for (index, role) in roles.iter().enumerate() {
        let (us, sharers, value_tile) = candidates(problem, *role, arch, pinned)
            .map(|(sharers, value_tile)| (model.output_us(*role, arch, sharers, value_tile), sharers, value_tile))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .expect("there is a candidate");
        schedule.predicted_us += us;
        (schedule.sharers[index], schedule.value_tiles[index]) = (sharers, value_tile);
    }
    if model.segments > 1 {
        let num_states = if roles.len() == 1 { 1 } else { 2 };
        let state_len = (tile(problem.head_dim) * tile(problem.value_dim)) as usize;
        schedule.workspace_bytes = num_states * model.sequences * model.segments as usize * state_len * 4;
        schedule.predicted_us += model.states_us(num_states, schedule.workspace_bytes);
        schedule.uncut_us = cost(problem, device, arch, roles, 1, pinned).predicted_us;
    } else {
        schedule.uncut_us = schedule.predicted_us;
    }
    schedule
}

/// Sharers and slabs that there are kernels for.
fn candidates(problem: &Problem, role: Role, arch: Arch, pinned: Pinned) -> impl Iterator<Item = (u32, u32)> {
    let value_dim = role.dims(problem).1;
    let wide = arch == Arch::Sm90 && tile(value_dim) == 128;
    let value_tiles = match pinned.value_tile {
        Some(128) if wide => [false, true],
        Some(_) => [true, false],
        None => [true, wide],
    };
    let sharers = match (arch, pinned.sharers) {
        (Arch::Sm80, _) => 1..=1,
        (Arch::Sm90, Some(pinned)) => pinned.max(1)..=pinned.max(1),
        (Arch::Sm90, None) => 1..=MOST_SHARERS,
    };
    let value_tiles = [64, 128].into_iter().zip(value_tiles).filter(|(_, there)| *there).map(|(tile, _)| tile);
    value_tiles.flat_map(move |value_tile| sharers.clone().map(move |sharers| (sharers, value_tile)))
}

fn chunks(problem: &Problem) -> u32 {
    (problem.seq_len as u32).div_ceil(CHUNK).max(1)
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

    fn waves(&self, variant: &Variant, blocks: usize) -> f64 {
        let slots = (self.device.multiprocessors * self.device.resident_blocks(variant)) as usize;
        blocks.div_ceil(slots) as f64
    }

    /// One launch of the output kernel.
    fn output_us(&self, role: Role, arch: Arch, sharers: u32, value_tile: u32) -> f64 {
        let (key_dim, value_dim) = role.dims(self.problem);
        let slabs = value_dim.div_ceil(value_tile as usize);
        let variant = find(Op::ChunkOutput, arch, self.problem.dtype, tile(key_dim), value_tile);
        let chunk_us = match (arch, variant.key_tile) {
            (Arch::Sm80, 64) => 2.0,
            (Arch::Sm80, _) => 3.0,
            (Arch::Sm90, 128) if value_tile == 128 => 0.37 + 1.16 / sharers as f64,
            (Arch::Sm90, 64) if value_tile == 128 => 0.35 + 0.70 / sharers as f64,
            // The state warpgroup sees every chunk, an output warpgroup every second one of its own.
            (Arch::Sm90, 64) => f64::max(0.40, 0.75 / sharers as f64),
            (Arch::Sm90, _) => f64::max(0.50, 0.90 / sharers as f64),
        };
        let blocks = self.sequences * slabs * (self.segments * sharers) as usize;
        let compute_us = self.waves(variant, blocks) * self.chunks_per_segment as f64 * chunk_us;
        let row_bytes = 2 * (2 * key_dim + 2 * value_dim);
        let memory_us = (self.sequences * self.problem.seq_len * row_bytes) as f64 / MEMORY_BYTES_PER_US;
        compute_us.max(memory_us) + LAUNCH_US
    }

    /// The state and scan kernels.
    fn states_us(&self, num_states: usize, workspace_bytes: usize) -> f64 {
        let variant = find(Op::ChunkState, Arch::Sm80, self.problem.dtype, tile(self.problem.head_dim), SLAB);
        let slabs = self.problem.value_dim.div_ceil(SLAB as usize);
        let chunk_us = if variant.key_tile == 64 { 0.8 } else { 1.2 };
        let blocks = num_states * self.sequences * slabs * (self.segments as usize - 1);
        let compute_us = self.waves(variant, blocks) * self.chunks_per_segment as f64 * chunk_us;
        let row_bytes = num_states * 2 * (self.problem.head_dim + self.problem.value_dim);
        let memory_us = (self.sequences * self.problem.seq_len * row_bytes) as f64 / MEMORY_BYTES_PER_US;
        compute_us.max(memory_us) + 2.0 * LAUNCH_US + 2.0 * workspace_bytes as f64 / SCAN_BYTES_PER_US
    }
}
