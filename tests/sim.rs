//! The kernels themselves, on the simulator, against the oracle: planned, launched and addressed as on a GPU.

mod common;

use common::cases::{self, Case, Placement, SLOPES};
use common::compare::Tolerance;
use common::{Backend, run_case, run_cases};
use lightning_attention::plan::{Auxiliary, Device, Launch, ROW_ALIGNMENT};
use lightning_attention::problem::Region;
use lightning_attention::{Backward, DType, Element, Forward, Plan, Precision, Problem, Result, Slopes, View, ViewMut};
use lightning_attention_kernels::device::sim::{self, Buffer, GlobalMemory, Schedule};
use lightning_attention_kernels::kernels;
use lightning_attention_kernels::variants::VARIANTS;

/// GPUs with few multiprocessors, so that small problems are planned as large ones are on large GPUs.
const AMPERE: Device =
    Device { compute_capability: (8, 0), multiprocessors: 4, shared_bytes_per_multiprocessor: 100 * 1024 };
const HOPPER: Device =
    Device { compute_capability: (9, 0), multiprocessors: 4, shared_bytes_per_multiprocessor: 228 * 1024 };

/// Runs plans on the simulator.
#[derive(Clone, Copy)]
struct Simulator {
    device: Device,
    /// Pins the number of segments.
    segments: Option<u32>,
    /// Pins the number of blocks that share a segment.
    sharers: Option<u32>,
    /// Value columns of a slab, where sharers are pinned.
    value_tile: u32,
    /// Whether dq, dk and dv come from one sweep.
    sweep: bool,
    /// Takes the checkpointed passes.
    checkpoints: bool,
    schedule: Schedule,
}

impl Simulator {
    fn of(device: Device) -> Self {
        Simulator {
            device,
            segments: None,
            sharers: None,
            value_tile: 64,
            sweep: false,
            checkpoints: false,
            schedule: Schedule::default(),
        }
    }
}

impl Backend for Simulator {
    fn forward<T: Element>(&self, problem: &Problem, t: Forward<View<'_, T>, ViewMut<'_, T>>) -> Result<()> {
        let (plan, mut scratch) = self.prepare(problem)?;
        self.forward_into(&plan, &mut scratch, t)
    }

    fn backward<T: Element>(&self, problem: &Problem, t: Backward<View<'_, T>, ViewMut<'_, T>>) -> Result<()> {
        let (plan, mut scratch) = self.prepare(problem)?;
        if self.checkpoints {
            let mut o = vec![T::from_f32(f32::NAN); t.do_.data.len()];
            let o = ViewMut { data: &mut o, extent: t.do_.extent };
            self.forward_into(&plan, &mut scratch, Forward { q: t.q, k: t.k, v: t.v, o })?;
        }
        self.backward_into(&plan, &mut scratch, t)
    }
}

impl Simulator {
    fn forward_into<T: Element>(
        &self,
        plan: &Plan,
        scratch: &mut Scratch,
        t: Forward<View<'_, T>, ViewMut<'_, T>>,
    ) -> Result<()> {
        let mut memory = GlobalMemory::new();
        let aux = scratch.register(&mut memory, true);
        let tensors = Forward {
            q: input(&mut memory, "q", t.q),
            k: input(&mut memory, "k", t.k),
            v: input(&mut memory, "v", t.v),
            o: output(&mut memory, "o", t.o),
        };
        plan.problem().check_forward(&tensors, ROW_ALIGNMENT)?;
        let launches = if self.checkpoints {
            plan.checkpointed_forward_launches(&tensors, aux)
        } else {
            plan.forward_launches(&tensors, aux)
        };
        self.run(launches.iter(), &memory);
        Ok(())
    }

    fn backward_into<T: Element>(
        &self,
        plan: &Plan,
        scratch: &mut Scratch,
        t: Backward<View<'_, T>, ViewMut<'_, T>>,
    ) -> Result<()> {
        let mut memory = GlobalMemory::new();
        let aux = scratch.register(&mut memory, false);
        let tensors = Backward {
            q: input(&mut memory, "q", t.q),
            k: input(&mut memory, "k", t.k),
            v: input(&mut memory, "v", t.v),
            do_: input(&mut memory, "do_", t.do_),
            dq: output(&mut memory, "dq", t.dq),
            dk: output(&mut memory, "dk", t.dk),
            dv: output(&mut memory, "dv", t.dv),
        };
        plan.problem().check_backward(&tensors, ROW_ALIGNMENT)?;
        let launches = if self.checkpoints {
            plan.checkpointed_backward_launches(&tensors, aux)
        } else {
            plan.backward_launches(&tensors, aux)
        };
        self.run(launches.iter(), &memory);
        Ok(())
    }

    fn prepare(&self, problem: &Problem) -> Result<(Plan, Scratch)> {
        let mut plan = Plan::new(problem, self.device)?.with_sweep(self.sweep);
        if self.checkpoints {
            plan = plan.with_checkpoints(true);
            assert!(plan.checkpoints().is_some(), "no kernels take checkpoints of {problem:?}");
        }
        if let Some(segments) = self.segments {
            plan = plan.with_segments(segments, segments);
        }
        if let Some(sharers) = self.sharers {
            plan = plan.with_sharers(sharers, self.value_tile);
        }
        let slopes = Buffer::new(problem.validate()?);
        let workspace = Buffer::new(vec![f32::NAN; plan.workspace_bytes() / 4]);
        let checkpoints = Buffer::new(vec![half::bf16::NAN; plan.checkpoint_bytes() / 2]);
        Ok((plan, Scratch { slopes, workspace, checkpoints }))
    }

    fn run<'a>(&self, launches: impl Iterator<Item = &'a Launch>, memory: &GlobalMemory<'_>) {
        for launch in launches {
            let variant = launch.variant;
            let body = kernels::body_of(variant.entry).expect("every row of the table has a body");
            let config = sim::Launch {
                name: variant.entry,
                grid: launch.grid,
                threads: variant.threads,
                shared_bytes: variant.shared_bytes,
                schedule: self.schedule,
            };
            let maps: Vec<_> = launch.tensor_maps().iter().map(sim::encode_tensor_map).collect();
            // SAFETY: the simulator checks every access of the kernel.
            let kernel = || unsafe { body(&launch.params, maps.as_ptr()) };
            sim::launch(&config, memory, &kernel).unwrap_or_else(|fault| panic!("{fault}"));
        }
    }
}

/// What the kernels use beside the tensors. The workspace is NaN, and reading it before it is written a fault; so are the
/// checkpoints until forward has stored them.
struct Scratch {
    slopes: Buffer<f32>,
    workspace: Buffer<f32>,
    checkpoints: Buffer<half::bf16>,
}

impl Scratch {
    fn register<'a>(&'a mut self, memory: &mut GlobalMemory<'a>, stores_checkpoints: bool) -> Auxiliary {
        Auxiliary {
            checkpoints: if stores_checkpoints {
                memory.output("checkpoints", &mut self.checkpoints)
            } else {
                memory.input("checkpoints", &self.checkpoints)
            },
            slopes: memory.input("slopes", &self.slopes),
            workspace: memory.output("workspace", &mut self.workspace),
        }
    }
}

fn input<'a, T: Element>(memory: &mut GlobalMemory<'a>, name: &'static str, view: View<'a, T>) -> Region {
    // SAFETY: an `Element` is a plain number.
    let bytes = unsafe { core::slice::from_raw_parts(view.data.as_ptr().cast::<u8>(), size_of_val(view.data)) };
    Region { address: memory.input(name, bytes), len: Some(view.data.len()), dtype: T::DTYPE, extent: view.extent }
}

fn output<'a, T: Element>(memory: &mut GlobalMemory<'a>, name: &'static str, view: ViewMut<'a, T>) -> Region {
    let (len, size) = (Some(view.data.len()), size_of_val(view.data));
    // SAFETY: as above.
    let bytes = unsafe { core::slice::from_raw_parts_mut(view.data.as_mut_ptr().cast::<u8>(), size) };
    Region { address: memory.output(name, bytes), len, dtype: T::DTYPE, extent: view.extent }
}

#[test]
fn every_portable_variant() {
    run_cases(&cases::sim(), &Simulator::of(AMPERE));
}

#[test]
fn every_hopper_variant() {
    // Shorter sequences run on the portable kernels there too.
    let cases: Vec<Case> = cases::sim().into_iter().filter(|case| case.seq_len >= 64).collect();
    run_cases(&cases, &Simulator::of(HOPPER));
}

#[test]
fn the_cases_reach_every_variant() {
    let mut reached = Vec::new();
    for device in [AMPERE, HOPPER] {
        let plan = |case: &Case| Plan::new(&case.problem(), device).unwrap().with_sweep(false);
        for of_precision in [|cases| cases, cases::accurate] {
            reached.extend(of_precision(cases::sim()).iter().flat_map(|case| plan(case).variants()));
            let long_cases = of_precision(long_cases());
            reached.extend(long_cases.iter().flat_map(|case| plan(case).with_segments(2, 2).variants()));
        }
        let swept =
            |case: Case| [DType::Bf16, DType::F16].map(|dtype| plan(&Case { dtype, ..case.clone() }).with_sweep(true));
        reached.extend(sweep_cases(65).into_iter().flat_map(swept).flat_map(|plan| plan.variants()));
        let checkpointed = |case: Case| {
            [DType::Bf16, DType::F16].map(|dtype| plan(&Case { dtype, ..case.clone() }).with_checkpoints(true))
        };
        reached.extend(paired(sweep_cases(130)).into_iter().flat_map(checkpointed).flat_map(|plan| plan.variants()));
        reached.extend(wide_cases(129).iter().flat_map(|case| plan(case).with_sharers(1, 128).variants()));
        reached.extend(wide_cases(273).iter().flat_map(|case| plan(case).with_segments(2, 2).variants()));
    }
    for variant in VARIANTS {
        assert!(reached.contains(&variant), "no case runs {}", variant.entry);
    }
}

/// Sequences of four chunks and a bit, the six slopes as heads.
fn long_cases() -> Vec<Case> {
    [(DType::Bf16, 128, 64), (DType::Bf16, 64, 64), (DType::F16, 64, 56), (DType::F16, 64, 128), (DType::F16, 128, 64)]
        .map(|(dtype, d, e)| Case::new("segments", dtype, [1, 6, 273, d, e]).slopes(Slopes::Custom(SLOPES.to_vec())))
        .into()
}

#[test]
fn any_number_of_segments() {
    for segments in [1, 2, 3, 5] {
        for device in [AMPERE, HOPPER] {
            run_cases(&long_cases(), &Simulator { segments: Some(segments), ..Simulator::of(device) });
        }
    }
}

/// Segments whose states are made by parts, with slopes of which a part reads all, some or the last of its chunks.
#[test]
fn states_by_parts() {
    let slopes = vec![0.0, 0.0039, 0.3, 7.75];
    let of = |dtype, n, d, e| Case::new("parts", dtype, [1, 4, n, d, e]).slopes(Slopes::Custom(slopes.clone()));
    for (n, segments, parts) in [(256, 2, 2), (500, 2, 4), (700, 3, 4), (512, 2, 4)] {
        for device in [AMPERE, HOPPER].map(|device| Device { multiprocessors: 16, ..device }) {
            let mut cases = vec![of(DType::Bf16, n, 128, 64), of(DType::F16, n, 64, 56)];
            if device.compute_capability == (9, 0) {
                cases.push(of(DType::Bf16, n, 64, 128));
            }
            let simulator = Simulator { segments: Some(segments), ..Simulator::of(device) };
            for case in &cases {
                let forward = *simulator.prepare(&case.problem()).unwrap().0.forward();
                assert_eq!((forward.segments, forward.parts), (segments, parts), "{case}");
            }
            run_cases(&cases, &simulator);
            if device.compute_capability == (9, 0) && n % 128 == 0 {
                run_cases(&cases, &Simulator { sweep: true, ..simulator });
                run_cases(&cases, &Simulator { checkpoints: true, ..simulator });
            }
        }
    }
}

#[test]
fn any_number_of_sharers() {
    for sharers in [1, 2, 3] {
        let simulator = Simulator { segments: Some(2), sharers: Some(sharers), ..Simulator::of(HOPPER) };
        run_cases(&long_cases(), &simulator);
    }
}

/// Each element type by itself, so that its errors are printed.
fn accurate_sim(device: Device, least_len: usize) {
    for dtype in [DType::Bf16, DType::F16] {
        let cases = cases::sim().into_iter().filter(|case| case.dtype == dtype && case.seq_len >= least_len).collect();
        run_cases(&cases::accurate(cases), &Simulator::of(device));
    }
}

#[test]
fn every_accurate_portable_variant() {
    accurate_sim(AMPERE, 1);
}

#[test]
fn every_accurate_hopper_variant() {
    accurate_sim(HOPPER, 64);
}

#[test]
fn accurate_in_segments_and_shared() {
    let cases = cases::accurate(long_cases());
    for (segments, sharers) in [(1, 2), (2, 3), (3, 1), (5, 2)] {
        let simulator = Simulator { segments: Some(segments), sharers: Some(sharers), ..Simulator::of(HOPPER) };
        run_cases(&cases, &simulator);
        run_cases(&cases, &Simulator { device: AMPERE, ..simulator });
    }
}

/// Long enough for the fast kernels not to multiply the remainder of P, at slopes with and without much of O from the state.
fn remembering(dtype: DType, [d, e]: [usize; 2]) -> Case {
    Case::new("remembering", dtype, [1, 2, 600, d, e]).slopes(Slopes::Custom(vec![3e-3, 0.1]))
}

#[test]
fn only_accurate_ones_are_accurate() {
    for (dtype, device) in [(DType::Bf16, AMPERE), (DType::F16, HOPPER), (DType::Bf16, HOPPER), (DType::F16, AMPERE)] {
        let bound = Tolerance::of(dtype, Precision::Accurate).norm;
        let fast = run_case(&remembering(dtype, [64, 64]), &Simulator::of(device));
        for (output, error) in fast.iter() {
            assert!(error > bound, "`{output}` in {dtype} is off by {error:.2e} only: the bound means nothing");
        }
        let accurate = cases::accurate([[64, 64], [128, 64]].map(|dims| remembering(dtype, dims)).into());
        for segments in [1, 3] {
            run_cases(&accurate, &Simulator { segments: Some(segments), ..Simulator::of(device) });
        }
    }
}

/// Value dims above 64, which fill slabs of 128 columns.
fn wide_cases(n: usize) -> Vec<Case> {
    let dims = [(DType::Bf16, 128, 128), (DType::F16, 96, 104), (DType::Bf16, 64, 128), (DType::F16, 40, 72)];
    dims.map(|(dtype, d, e)| Case::new("wide slabs", dtype, [1, 6, n, d, e]).slopes(Slopes::Custom(SLOPES.to_vec())))
        .into()
}

#[test]
fn wide_slabs() {
    for sharers in [1, 2] {
        let wide = Simulator { sharers: Some(sharers), value_tile: 128, ..Simulator::of(HOPPER) };
        run_cases(&wide_cases(129), &wide);
        run_cases(&wide_cases(273), &Simulator { segments: Some(2), ..wide });
    }
}

/// Every tile of the lean sweep, a head for each slope.
fn sweep_cases_of(n: usize, slopes: &[f32]) -> Vec<Case> {
    [(128, 64, DType::Bf16), (128, 128, DType::F16), (40, 72, DType::Bf16), (64, 56, DType::F16)]
        .map(|(d, e, dtype)| {
            Case::new("sweep", dtype, [1, slopes.len(), n, d, e]).slopes(Slopes::Custom(slopes.to_vec()))
        })
        .into()
}

fn sweep_cases(n: usize) -> Vec<Case> {
    sweep_cases_of(n, &[0.0039, 0.92])
}

/// Those that checkpoints are for.
fn paired(cases: Vec<Case>) -> Vec<Case> {
    cases.into_iter().filter(|case| case.head_dim.min(case.value_dim) <= 64).collect()
}

#[test]
fn one_sweep_without_checkpoints() {
    let with_sharers = |sharers| Simulator { sweep: true, sharers: Some(sharers), ..Simulator::of(HOPPER) };
    run_cases(&sweep_cases_of(65, &SLOPES), &with_sharers(1));
    run_cases(&sweep_cases_of(129, &SLOPES), &with_sharers(1));
    run_cases(&sweep_cases(273), &with_sharers(2));
    // Segments divide the sequence.
    run_cases(&sweep_cases(384), &Simulator { segments: Some(2), ..with_sharers(3) });
}

#[test]
fn one_sweep_from_checkpoints() {
    let with_sharers = |sharers| Simulator { checkpoints: true, sharers: Some(sharers), ..Simulator::of(HOPPER) };
    run_cases(&paired(sweep_cases_of(128, &SLOPES)), &with_sharers(1));
    run_cases(&paired(sweep_cases_of(129, &SLOPES)), &with_sharers(1));
    run_cases(&paired(sweep_cases(273)), &with_sharers(2));
    run_cases(&paired(sweep_cases(520)), &with_sharers(1));
    // An even number of whole pairs, a lone last chunk, one that is short.
    run_cases(&paired(sweep_cases(512)), &Simulator { segments: Some(2), ..with_sharers(2) });
    run_cases(&paired(sweep_cases(448)), &with_sharers(3));
    run_cases(&paired(sweep_cases(400)), &with_sharers(2));
}

/// Threads, blocks and the arrival of copies in other orders give the same bits.
fn any_order(case: &Case, simulator: Simulator) {
    let bits = |schedule| {
        let backend = Simulator { schedule, ..simulator };
        let inputs = cases::Inputs::<half::bf16>::new(case);
        let [dq, dk, dv] = common::backward(case, &inputs, &backend);
        [common::forward(case, &inputs, &backend), dq, dk, dv]
    };
    let expected = bits(Schedule::InOrder);
    for schedule in [Schedule::Reversed, Schedule::Seeded(1), Schedule::Seeded(2)] {
        for (name, (got, expected)) in ["o", "dq", "dk", "dv"].iter().zip(bits(schedule).iter().zip(&expected)) {
            let difference = got.first_difference(expected);
            assert_eq!(difference, None, "{case}: `{name}` depends on the order of threads ({schedule:?})");
        }
    }
}

#[test]
fn any_order_of_threads_and_blocks() {
    let case = Case::new("schedule", DType::Bf16, [1, 2, 300, 128, 64]);
    for precision in [Precision::Fast, Precision::Accurate] {
        let case = case.clone().precision(precision);
        for device in [AMPERE, HOPPER] {
            any_order(&case, Simulator { segments: Some(3), sharers: Some(2), ..Simulator::of(device) });
        }
    }
}

/// Sharers leave slots to others: a wait for a filling that is two ahead would pass at once.
#[test]
fn any_order_in_a_sweep() {
    let case = |d, e| Case::new("schedule", DType::Bf16, [1, 1, 64 * 14, d, e]).slopes(Slopes::Custom(vec![0.01]));
    for (d, e, sharers) in [(128, 64, 1), (128, 64, 3), (128, 128, 2), (64, 64, 4), (64, 128, 3)] {
        let simulator = Simulator { sharers: Some(sharers), ..Simulator::of(HOPPER) };
        any_order(&case(d, e), Simulator { sweep: true, ..simulator });
        if d.min(e) <= 64 {
            any_order(&case(d, e), Simulator { checkpoints: true, ..simulator });
        }
    }
}

#[test]
fn any_layout() {
    use Placement::*;
    for layout in [Bnhd, Packed, Padded] {
        let place = |dims: [usize; 2]| {
            let [d, e] = dims;
            Case::new("layout", DType::Bf16, [2, 3, 130, d, e]).layout(layout).scale(0.125)
        };
        for device in [AMPERE, HOPPER] {
            let cases = [[64, 64], [72, 40], [128, 64]].map(place);
            run_cases(&cases, &Simulator::of(device));
            run_cases(&cases::accurate(cases.into()), &Simulator::of(device));
        }
    }
}

#[test]
fn no_rows() {
    run_cases(&[Case::new("no rows", DType::Bf16, [2, 3, 0, 64, 64])], &Simulator::of(HOPPER));
}
