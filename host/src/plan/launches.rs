//! Plan + tensors → launches.

use lightning_attention_kernels::abi::{Application, MAPS_PER_APPLICATION, MAX_MAPS, Params, Rows, TensorMapSource};
use lightning_attention_kernels::variants::{Arch, CHUNK, Op, SCAN_ELEMENTS, Variant};

use super::{Plan, Schedule, Sweep, chunk_state, find, gradients, pairs, tile};
use crate::problem::Region;
use crate::view::{Backward, Forward};

/// One kernel launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub variant: &'static Variant,
    /// Grid dimensions.
    pub grid: [u32; 3],
    /// Its argument.
    pub params: Params,
    tensor_maps: [TensorMapSource; MAX_MAPS],
    num_maps: usize,
}

impl Launch {
    /// The tensors that kernels of [`Arch::Sm90`] take as tensor maps, those of each application in turn, then the checkpoints if there
    /// are any.
    pub fn tensor_maps(&self) -> &[TensorMapSource] {
        &self.tensor_maps[..if self.variant.arch == Arch::Sm90 { self.num_maps } else { 0 }]
    }
}

/// The launches of one pass, in order.
#[derive(Clone, Copy, Debug)]
pub struct Launches {
    list: [Option<Launch>; 5],
    len: usize,
}

impl Launches {
    const fn new() -> Self {
        Launches { list: [None; 5], len: 0 }
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
    /// [`Checkpoints::bytes`] bytes, 16-byte aligned, for the passes that write and read checkpoints; else not used.
    ///
    /// [`Checkpoints::bytes`]: super::Checkpoints::bytes
    pub checkpoints: u64,
}

impl Plan {
    /// The launches of a forward pass. The tensors must have passed [`Problem::check_forward`](crate::Problem).
    pub fn forward_launches(&self, tensors: &Forward<Region, Region>, aux: Auxiliary) -> Launches {
        self.forward_launches_of(&self.forward, false, tensors, aux)
    }

    /// The launches of a forward pass that stores checkpoints, where there are any ([`Plan::checkpoints`]).
    pub fn checkpointed_forward_launches(&self, tensors: &Forward<Region, Region>, aux: Auxiliary) -> Launches {
        match &self.checkpoints {
            Some(checkpoints) => self.forward_launches_of(&checkpoints.forward, true, tensors, aux),
            None => self.forward_launches(tensors, aux),
        }
    }

    fn forward_launches_of(
        &self,
        schedule: &Schedule,
        stores_checkpoints: bool,
        tensors: &Forward<Region, Region>,
        aux: Auxiliary,
    ) -> Launches {
        let mut launches = Launches::new();
        if self.problem.seq_len == 0 {
            return launches;
        }
        let pass = Pass { plan: self, schedule, stores_checkpoints, aux };
        let Forward { q, k, v, o } = *tensors;
        let o = pass.operation([q, k, v, o], pass.state(0, false), false);
        pass.push_states(&mut launches, &[o]);
        pass.push_outputs(&mut launches, &[o]);
        launches
    }

    /// The launches of a backward pass (B7). The tensors must have passed [`Problem::check_backward`](crate::Problem).
    pub fn backward_launches(&self, tensors: &Backward<Region, Region>, aux: Auxiliary) -> Launches {
        self.backward_launches_of(&self.backward, tensors, aux)
    }

    /// The launches of a backward pass that reads what [`Plan::checkpointed_forward_launches`] stored for the same q, k, v.
    pub fn checkpointed_backward_launches(&self, tensors: &Backward<Region, Region>, aux: Auxiliary) -> Launches {
        match &self.checkpoints {
            Some(checkpoints) => self.backward_launches_of(&checkpoints.backward, tensors, aux),
            None => self.backward_launches(tensors, aux),
        }
    }

    fn backward_launches_of(
        &self,
        schedule: &Schedule,
        tensors: &Backward<Region, Region>,
        aux: Auxiliary,
    ) -> Launches {
        let mut launches = Launches::new();
        if self.problem.seq_len == 0 {
            return launches;
        }
        let pass = Pass { plan: self, schedule, stores_checkpoints: false, aux };
        let Backward { q, k, v, do_, dq, dk, dv } = *tensors;
        // Where forward left S, only G is to be made.
        let is_paired = schedule.sweep == Some(Sweep::Paired);
        let (s, g) = if is_paired { (0, 0) } else { (0, 1) };
        let dq = pass.operation([do_, v, k, dq], pass.state(s, true), false);
        let dk = pass.operation([v, do_, q, dk], pass.state(g, true), true);
        let dv = pass.operation([k, q, do_, dv], pass.state(g, false), true);
        if is_paired {
            pass.push_states(&mut launches, &[dv]);
        } else {
            // S needs k, v as the forward pass does; its x and o are not used.
            let state = pass.operation([q, k, v, do_], pass.state(s, false), false);
            pass.push_states(&mut launches, &[state, dv]);
        }
        match schedule.sweep {
            Some(sweep) => pass.push_sweep(&mut launches, &[dq, dk, dv], sweep),
            None => pass.push_outputs(&mut launches, &[dq, dk, dv]),
        }
        launches
    }
}

/// An application, and its tensors as the copy engine sees them.
#[derive(Clone, Copy)]
struct Operation {
    application: Application,
    maps: [TensorMapSource; MAPS_PER_APPLICATION],
}

/// Builds the launches of one pass.
struct Pass<'a> {
    plan: &'a Plan,
    schedule: &'a Schedule,
    /// Whether the output kernel stores checkpoints.
    stores_checkpoints: bool,
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

    /// The `index`-th state array `[batch·heads, parts · (segments - 1) + 1, D, E]` (padded dims), or its transpose.
    fn state(&self, index: u64, transposed: bool) -> State {
        let problem = &self.plan.problem;
        let row = tile(problem.value_dim);
        let (row_stride, col_stride) = if transposed { (1, row) } else { (row, 1) };
        if self.schedule.segments == 1 {
            return State { address: 0, row_stride, col_stride };
        }
        let address = self.aux.workspace + index * self.schedule.state_bytes(problem, 1) as u64;
        State { address, row_stride, col_stride }
    }

    /// The application on x, y, z, o.
    fn operation(&self, [x, y, z, o]: [Region; 4], state: State, backwards: bool) -> Operation {
        let rows = |region| rows(region, backwards);
        let application = Application {
            x: rows(x),
            y: rows(y),
            z: rows(z),
            o: rows(o),
            states: state.address,
            state_row_stride: state.row_stride,
            state_col_stride: state.col_stride,
            key_dim: y.extent.shape[3] as u32,
            value_dim: z.extent.shape[3] as u32,
        };
        let box_rows = [(x, CHUNK), (y, CHUNK), (z, CHUNK), (o, 16), (o, 1)];
        let maps = box_rows.map(|(region, box_rows)| tensor_map(region, box_rows));
        Operation { application, maps }
    }

    fn launch(&self, variant: &'static Variant, operations: &[Operation], sharers: u32) -> Launch {
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
            parts: self.schedule.parts,
            slabs: operations[0].application.value_dim.div_ceil(variant.value_tile.max(1)),
            sharers,
            stores_checkpoints: (self.stores_checkpoints && variant.op == Op::ChunkOutput).into(),
            ..Params::default()
        };
        if matches!(variant.op, Op::ChunkState | Op::StateScan) {
            params.segments = self.schedule.states_per_sequence();
            params.segment_len /= params.parts;
        }
        if variant.op == Op::ChunkState {
            params.parts = 1;
        }
        let mut tensor_maps = [TensorMapSource::default(); MAX_MAPS];
        let mut num_maps = MAPS_PER_APPLICATION * operations.len();
        if params.stores_checkpoints != 0 || variant.op == Op::PairedGradients {
            tensor_maps[num_maps] = self.checkpoint_map();
            num_maps += 1;
        }
        for (index, operation) in operations.iter().enumerate() {
            params.applications[index] = operation.application;
            tensor_maps[MAPS_PER_APPLICATION * index..][..MAPS_PER_APPLICATION].copy_from_slice(&operation.maps);
        }
        let sequences = params.batch * params.heads;
        let blocks = match variant.op {
            // Nothing enters after the last one, so its contribution is not needed.
            Op::ChunkState => sequences * params.slabs * (params.segments - 1),
            Op::StateScan => sequences * (params.state_len / SCAN_ELEMENTS),
            Op::ChunkOutput => sequences * params.slabs * params.segments * sharers,
            Op::Gradients | Op::PairedGradients => sequences * params.segments * sharers,
        };
        let layers = match variant.op {
            Op::Gradients | Op::PairedGradients => 1,
            _ => operations.len() as u32,
        };
        Launch { variant, grid: [blocks, layers, 1], params, tensor_maps, num_maps }
    }

    /// The checkpoints as the copy engine sees them: panels of 64 columns for each pair of chunks of each sequence.
    fn checkpoint_map(&self) -> TensorMapSource {
        let problem = &self.plan.problem;
        let row = 64 * problem.dtype.size() as u64;
        let rows = self.state_len() / 64;
        let (state, pairs) = (row * u64::from(rows), pairs(problem));
        TensorMapSource {
            address: self.aux.checkpoints,
            dims: [64, rows, pairs as u32, (problem.batch * problem.heads) as u32],
            strides: [row, state, state * pairs as u64],
            box_rows: 64,
        }
    }

    /// F4 and F5: the states that enter each segment.
    fn push_states(&self, launches: &mut Launches, operations: &[Operation]) {
        if self.schedule.segments == 1 {
            return;
        }
        let problem = &self.plan.problem;
        for variant in [chunk_state(problem, self.schedule.arch), find(Op::StateScan, Arch::Sm80, problem, 0, 0)] {
            launches.push(self.launch(variant, operations, 1));
        }
    }

    /// B8 or B9: dq, dk and dv in one sweep.
    fn push_sweep(&self, launches: &mut Launches, operations: &[Operation], sweep: Sweep) {
        let variant = gradients(&self.plan.problem, sweep);
        let mut launch = self.launch(variant, operations, self.schedule.sharers[0]);
        launch.params.slabs = 1;
        launches.push(launch);
    }

    /// F2 and F3: the outputs. Portable kernels of one tile go in one launch; a Hopper block fills a multiprocessor, and
    /// a launch of its own keeps each output's blocks to one wave.
    fn push_outputs(&self, launches: &mut Launches, operations: &[Operation]) {
        let arch = self.schedule.arch;
        let key_tile = |operation: &Operation| tile(operation.application.key_dim as usize);
        let together = |a: &Operation, b: &Operation| arch == Arch::Sm80 && key_tile(a) == key_tile(b);
        let mut index = 0;
        for group in operations.chunk_by(together) {
            let value_tile = self.schedule.value_tiles[index];
            let variant = find(Op::ChunkOutput, arch, &self.plan.problem, key_tile(&group[0]), value_tile);
            launches.push(self.launch(variant, group, self.schedule.sharers[index]));
            index += group.len();
        }
    }
}

/// A tensor's rows in walking order.
fn rows(region: Region, backwards: bool) -> Rows {
    let strides = region.extent.strides;
    let to_last = (region.extent.shape[2] - 1) as u64 * strides.row as u64 * region.dtype.size() as u64;
    Rows {
        ptr: if backwards { region.address + to_last } else { region.address },
        batch_stride: strides.batch as i64,
        head_stride: strides.head as i64,
        row_stride: if backwards { -(strides.row as i64) } else { strides.row as i64 },
    }
}

fn tensor_map(region: Region, box_rows: u32) -> TensorMapSource {
    let [batch, heads, rows, cols] = region.extent.shape.map(|len| len as u32);
    let strides = region.extent.strides;
    // The stride of an axis of length 1 is never used, but the driver wants a valid one.
    let bytes = |stride: usize, len: u32| if len > 1 { (stride * region.dtype.size()) as u64 } else { 16 };
    TensorMapSource {
        address: region.address,
        dims: [cols, rows, heads, batch],
        strides: [bytes(strides.row, rows), bytes(strides.head, heads), bytes(strides.batch, batch)],
        box_rows,
    }
}
