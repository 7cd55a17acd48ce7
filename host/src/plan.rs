//! Problem + device → which kernels run, on what grid, over how many segments. Pure functions of plain data.

use core::fmt;

use lightning_attention_kernels::abi::{Application, Params, Rows};
use lightning_attention_kernels::variants::{self, CHUNK, ElementType, Op, SLAB, VARIANTS, Variant};

use crate::problem::Region;
use crate::view::{Backward, DType, Forward};
use crate::{Error, Problem, Result};

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
    /// Segments a sequence is cut into.
    pub segments: u32,
    /// Rows of every segment but the last.
    pub segment_len: u32,
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

/// One kernel launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub variant: &'static Variant,
    /// Grid dimensions.
    pub grid: [u32; 3],
    /// Its argument.
    pub params: Params,
}

/// The launches of one pass, in order.
#[derive(Clone, Copy, Debug)]
pub struct Launches {
    list: [Option<Launch>; 4],
    len: usize,
}

impl Launches {
    const fn new() -> Self {
        Launches { list: [None; 4], len: 0 }
    }

    fn push(&mut self, launch: Launch) {
        self.list[self.len] = Some(launch);
        self.len += 1;
    }

    /// The launches, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Launch> {
        self.list.iter().flatten()
    }
}

/// Device addresses a pass needs beside the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Auxiliary {
    /// f32 slopes `[heads]`.
    pub slopes: u64,
    /// At least [`Schedule::workspace_bytes`] bytes, 16-byte aligned; contents are overwritten.
    pub workspace: u64,
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
        let forward = schedule(problem, &device, &[Role::O]);
        let backward = schedule(problem, &device, &[Role::Dq, Role::Dk, Role::Dv]);
        Ok(Plan { problem: problem.clone(), device, forward, backward })
    }

    /// The plan with the number of segments pinned, forward and backward, for tests and tuning. Clamped to what the
    /// sequence length allows.
    pub fn with_segments(mut self, forward: u32, backward: u32) -> Self {
        self.forward = cost(&self.problem, &self.device, &[Role::O], forward);
        self.backward = cost(&self.problem, &self.device, &[Role::Dq, Role::Dk, Role::Dv], backward);
        self
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
        let [key_tile, value_tile] = [self.problem.head_dim, self.problem.value_dim].map(tile);
        let mut used = vec![(Op::ChunkOutput, key_tile), (Op::ChunkOutput, value_tile)];
        if self.forward.segments.max(self.backward.segments) > 1 {
            used.extend([(Op::ChunkState, key_tile), (Op::StateScan, 0)]);
        }
        let mut variants: Vec<&'static Variant> =
            used.into_iter().map(|(op, key_tile)| find(op, self.problem.dtype, key_tile)).collect();
        variants.dedup();
        variants
    }

    /// The launches of a forward pass. The tensors must have passed [`Problem::check_forward`].
    pub fn forward_launches(&self, tensors: &Forward<Region, Region>, aux: Auxiliary) -> Launches {
        let mut launches = Launches::new();
        if self.problem.seq_len == 0 {
            return launches;
        }
        let pass = Pass { plan: self, schedule: &self.forward, aux };
        let state = pass.state(0, false);
        let app = pass.application(tensors.q, tensors.k, tensors.v, tensors.o, state, false);
        pass.push_states(&mut launches, &[app]);
        pass.push_outputs(&mut launches, &[app]);
        launches
    }

    /// The launches of a backward pass (B7). The tensors must have passed [`Problem::check_backward`].
    pub fn backward_launches(&self, tensors: &Backward<Region, Region>, aux: Auxiliary) -> Launches {
        let mut launches = Launches::new();
        if self.problem.seq_len == 0 {
            return launches;
        }
        let pass = Pass { plan: self, schedule: &self.backward, aux };
        let Backward { q, k, v, do_, dq, dk, dv } = *tensors;
        let app_dq = pass.application(do_, v, k, dq, pass.state(0, true), false);
        let app_dk = pass.application(v, do_, q, dk, pass.state(1, true), true);
        let app_dv = pass.application(k, q, do_, dv, pass.state(1, false), true);
        // S needs k, v as the forward pass does; its output operands are not read.
        let app_state = pass.application(q, k, v, dv, pass.state(0, false), false);
        pass.push_states(&mut launches, &[app_state, app_dv]);
        if tile(self.problem.head_dim) == tile(self.problem.value_dim) {
            pass.push_outputs(&mut launches, &[app_dq, app_dk, app_dv]);
        } else {
            pass.push_outputs(&mut launches, &[app_dq, app_dk]);
            pass.push_outputs(&mut launches, &[app_dv]);
        }
        launches
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
        for (name, s) in [("forward", &self.forward), ("backward", &self.backward)] {
            writeln!(
                f,
                "{name}: {} segment(s) of {} rows, predicted {:.0} µs against {:.0} µs uncut, workspace {} bytes",
                s.segments, s.segment_len, s.predicted_us, s.uncut_us, s.workspace_bytes
            )?;
        }
        Ok(())
    }
}

/// The output an application computes; with it, which dim is the key dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    O,
    Dq,
    Dk,
    Dv,
}

impl Role {
    /// `(key_dim, value_dim)` of the application.
    fn dims(self, problem: &Problem) -> (usize, usize) {
        match self {
            Role::O | Role::Dv => (problem.head_dim, problem.value_dim),
            Role::Dq | Role::Dk => (problem.value_dim, problem.head_dim),
        }
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
    (dim as u32).next_multiple_of(64)
}

fn find(op: Op, dtype: DType, key_tile: u32) -> &'static Variant {
    let wanted = |v: &&Variant| {
        v.op == op && (op == Op::StateScan || (Some(v.element) == element(dtype) && v.key_tile == key_tile))
    };
    VARIANTS.iter().find(wanted).expect("Plan::new admits only what the table covers")
}

/// Picks the number of segments by the cost model.
fn schedule(problem: &Problem, device: &Device, roles: &[Role]) -> Schedule {
    let chunks = (problem.seq_len as u32).div_ceil(CHUNK).max(1);
    let uncut = cost(problem, device, roles, 1);
    // More segments than multiprocessor slots never help; each is at least one chunk.
    let most = chunks.min(device.multiprocessors * 8);
    (2..=most)
        .map(|segments| cost(problem, device, roles, segments))
        .fold(uncut, |best, next| if next.predicted_us < best.predicted_us { next } else { best })
}

/// The cost model: blocks run in waves of as many as the device holds; a wave takes the chunks of one segment times a
/// block's time per chunk (measured on an H200 with full multiprocessors).
fn cost(problem: &Problem, device: &Device, roles: &[Role], segments: u32) -> Schedule {
    const LAUNCH_US: f64 = 2.5;
    const SCAN_BYTES_PER_US: f64 = 2.0e6;
    let chunks = (problem.seq_len as u32).div_ceil(CHUNK).max(1);
    let chunks_per_segment = chunks.div_ceil(segments.clamp(1, chunks));
    let segments = chunks.div_ceil(chunks_per_segment);
    let sequences = problem.batch * problem.heads;
    let waves_us = |variant: &Variant, blocks: usize, chunk_us: f64| {
        let slots = (device.multiprocessors * device.resident_blocks(variant)) as usize;
        blocks.div_ceil(slots) as f64 * chunks_per_segment as f64 * chunk_us + LAUNCH_US
    };
    let mut predicted_us = 0.0;
    for role in roles {
        let (key_dim, value_dim) = role.dims(problem);
        let slabs = value_dim.div_ceil(SLAB as usize);
        let variant = find(Op::ChunkOutput, problem.dtype, tile(key_dim));
        let chunk_us = if variant.key_tile == 64 { 2.0 } else { 3.0 };
        predicted_us += waves_us(variant, sequences * slabs * segments as usize, chunk_us);
    }
    let state_len = (tile(problem.head_dim) * tile(problem.value_dim)) as usize;
    let num_states = if roles.len() == 1 { 1 } else { 2 };
    let mut workspace_bytes = 0;
    if segments > 1 {
        workspace_bytes = num_states * sequences * segments as usize * state_len * 4;
        let variant = find(Op::ChunkState, problem.dtype, tile(problem.head_dim));
        let slabs = problem.value_dim.div_ceil(SLAB as usize);
        let chunk_us = if variant.key_tile == 64 { 0.8 } else { 1.2 };
        predicted_us += waves_us(variant, num_states * sequences * slabs * (segments as usize - 1), chunk_us);
        predicted_us += LAUNCH_US + 2.0 * workspace_bytes as f64 / SCAN_BYTES_PER_US;
    }
    let mut schedule = Schedule {
        segments,
        segment_len: chunks_per_segment * CHUNK,
        workspace_bytes,
        predicted_us,
        uncut_us: predicted_us,
    };
    if segments > 1 {
        schedule.uncut_us = cost(problem, device, roles, 1).predicted_us;
    }
    schedule
}

/// Builds the launches of one pass.
struct Pass<'a> {
    plan: &'a Plan,
    schedule: &'a Schedule,
    aux: Auxiliary,
}

/// Where a state lies in the workspace and how it is read.
#[derive(Clone, Copy)]
struct State {
    address: u64,
    row_stride: u32,
    col_stride: u32,
}

impl Pass<'_> {
    fn state_len(&self) -> u32 {
        tile(self.plan.problem.head_dim) * tile(self.plan.problem.value_dim)
    }

    /// The `index`-th state array `[batch·heads, segments, D, E]` (padded dims), or its transpose.
    fn state(&self, index: u64, transposed: bool) -> State {
        let problem = &self.plan.problem;
        if self.schedule.segments == 1 {
            return State { address: 0, row_stride: 0, col_stride: 0 };
        }
        let states = (problem.batch * problem.heads) as u64 * self.schedule.segments as u64;
        let address = self.aux.workspace + index * states * self.state_len() as u64 * 4;
        let row = tile(problem.value_dim);
        let (row_stride, col_stride) = if transposed { (1, row) } else { (row, 1) };
        State { address, row_stride, col_stride }
    }

    fn application(&self, x: Region, y: Region, z: Region, o: Region, state: State, backwards: bool) -> Application {
        let rows = |region: Region| {
            let strides = region.extent.strides;
            let last = (self.plan.problem.seq_len - 1) as u64 * strides.row as u64 * region.dtype.size() as u64;
            Rows {
                ptr: if backwards { region.address + last } else { region.address },
                batch_stride: strides.batch as i64,
                head_stride: strides.head as i64,
                row_stride: if backwards { -(strides.row as i64) } else { strides.row as i64 },
            }
        };
        Application {
            x: rows(x),
            y: rows(y),
            z: rows(z),
            o: rows(o),
            states: state.address,
            state_row_stride: state.row_stride,
            state_col_stride: state.col_stride,
            key_dim: y.extent.shape[3] as u32,
            value_dim: z.extent.shape[3] as u32,
        }
    }

    fn params(&self, applications: &[Application]) -> Params {
        let problem = &self.plan.problem;
        let mut params = Params {
            slopes: self.aux.slopes,
            state_len: self.state_len(),
            scale: problem.scale,
            batch: problem.batch as u32,
            heads: problem.heads as u32,
            seq_len: problem.seq_len as u32,
            segments: self.schedule.segments,
            segment_len: self.schedule.segment_len,
            slabs: applications[0].value_dim.div_ceil(SLAB),
            ..Params::default()
        };
        params.applications[..applications.len()].copy_from_slice(applications);
        params
    }

    /// F4 and F5: the states that enter each segment.
    fn push_states(&self, launches: &mut Launches, applications: &[Application]) {
        let Schedule { segments, .. } = *self.schedule;
        if segments == 1 {
            return;
        }
        let problem = &self.plan.problem;
        let params = self.params(applications);
        let sequences = params.batch * params.heads;
        let count = applications.len() as u32;
        let variant = find(Op::ChunkState, problem.dtype, tile(problem.head_dim));
        // Nothing enters after the last segment, so its contribution is not needed.
        let grid = [sequences * params.slabs * (segments - 1), count, 1];
        launches.push(Launch { variant, grid, params });
        let variant = find(Op::StateScan, problem.dtype, 0);
        let grid = [sequences * (params.state_len / variants::SCAN_ELEMENTS), count, 1];
        launches.push(Launch { variant, grid, params });
    }

    /// F2 and F3: the outputs.
    fn push_outputs(&self, launches: &mut Launches, applications: &[Application]) {
        let params = self.params(applications);
        let variant = find(Op::ChunkOutput, self.plan.problem.dtype, tile(applications[0].key_dim as usize));
        let grid = [params.batch * params.heads * params.slabs * params.segments, applications.len() as u32, 1];
        launches.push(Launch { variant, grid, params });
    }
}
