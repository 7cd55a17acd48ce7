//! What must hold for any plan.

use lightning_attention::plan::{Checkpoints, Device, Launch, Schedule, Sweep};
use lightning_attention::{DType, Plan, Precision, Problem, Slopes};
use lightning_attention_kernels::variants::{Arch, CHUNK, Op, PAIR, VARIANTS, Variant};
use proptest::prelude::*;

use crate::{AUXILIARY, launches};

fn device() -> impl Strategy<Value = Device> {
    let capabilities = prop_oneof![Just((9, 0)), proptest::sample::select(&[(8, 0), (8, 6), (8, 9), (12, 0)][..])];
    (capabilities, 1..=200_u32, 100..=228_u32).prop_map(|(compute_capability, multiprocessors, kib)| Device {
        compute_capability,
        multiprocessors,
        shared_bytes_per_multiprocessor: kib * 1024,
    })
}

/// Few heads and many, sequences of one row and of millions, some that can be cut into equal segments.
fn problem() -> impl Strategy<Value = Problem> {
    let whole = (1..=64_usize).prop_map(|n| 1024 * n);
    let seq_len = prop_oneof![4 => 0..5000_usize, 2 => 5000..200_000_usize, 4 => whole, 1 => 1 << 29..=1_usize << 30];
    let heads = prop_oneof![4 => 1..=64_usize, 1 => 65..=8192_usize];
    let batch = prop_oneof![Just(1), 1..=128_usize];
    let dtype = proptest::sample::select(&[DType::Bf16, DType::F16][..]);
    let precision = proptest::sample::select(&[Precision::Fast, Precision::Accurate][..]);
    (batch, heads, seq_len, 1..=16_usize, 1..=16_usize, dtype, precision).prop_map(
        |(b, h, n, d, e, dtype, precision)| Problem::new(b, h, n, 8 * d, 8 * e).dtype(dtype).precision(precision),
    )
}

/// Whether there are kernels that sweep and that store checkpoints.
fn sweeps(problem: &Problem, device: Device) -> bool {
    let is_hopper = device.compute_capability == (9, 0);
    is_hopper && problem.seq_len >= CHUNK as usize && problem.precision == Precision::Fast
}

fn segments_cover(problem: &Problem, schedule: &Schedule) {
    let Schedule { segments, segment_len, .. } = *schedule;
    let (segments, segment_len) = (segments as usize, segment_len as usize);
    assert!(segments >= 1 && segment_len > 0 && segment_len.is_multiple_of(CHUNK as usize), "{schedule:?}");
    assert!(segments * segment_len >= problem.seq_len, "rows are left out: {schedule:?}");
    assert!((segments - 1) * segment_len < problem.seq_len.max(1), "the last segment is empty: {schedule:?}");
}

/// Dims as the workspace pads them.
fn padded(dim: usize) -> usize {
    dim.next_multiple_of(64)
}

/// Elements of a state.
fn state_len(problem: &Problem) -> usize {
    padded(problem.head_dim) * padded(problem.value_dim)
}

/// Bytes of a state in f32.
fn state_bytes(problem: &Problem) -> usize {
    state_len(problem) * size_of::<f32>()
}

/// What the passes of a plan are: (schedule, whether it is forward, the checkpoints that it writes or reads).
fn passes(plan: &Plan) -> Vec<(&Schedule, bool, Option<&Checkpoints>)> {
    let checkpointed = plan.checkpoints().into_iter();
    let checkpointed = checkpointed.flat_map(|c| [(&c.forward, true, Some(c)), (&c.backward, false, Some(c))]);
    [(plan.forward(), true, None), (plan.backward(), false, None)].into_iter().chain(checkpointed).collect()
}

fn check_plan(plan: &Plan) {
    let problem = plan.problem();
    let launches = launches(plan);
    let variants = plan.variants();
    for (launches, (schedule, is_forward, checkpoints)) in launches.iter().zip(passes(plan)) {
        check_pass(problem, launches, schedule, is_forward, checkpoints);
        for Launch { variant, .. } in launches {
            assert!(VARIANTS.contains(variant), "{} is no row of the table", variant.entry);
            assert!(variants.contains(variant), "{} is launched, yet not listed", variant.entry);
            let is_accurate = problem.precision == Precision::Accurate && variant.op != Op::StateScan;
            assert_eq!(variant.accurate, is_accurate, "{} in a {} plan", variant.entry, problem.precision);
        }
    }
    let launched: Vec<&'static Variant> = launches.iter().flatten().map(|launch| launch.variant).collect();
    for variant in variants {
        assert!(problem.seq_len == 0 || launched.contains(&variant), "{} is listed, yet not launched", variant.entry);
    }
    let most = passes(plan).iter().map(|(schedule, ..)| schedule.workspace_bytes).max();
    assert_eq!(Some(plan.workspace_bytes()), most);

    let Some(&Checkpoints { bytes, .. }) = plan.checkpoints() else {
        assert_eq!(plan.checkpoint_bytes(), 0);
        assert!(launches[2..] == launches[..2], "without checkpoints the passes are the plain ones");
        return;
    };
    let pairs = problem.seq_len.div_ceil(PAIR as usize);
    assert_eq!(bytes, problem.batch * problem.heads * pairs * state_len(problem) * problem.dtype.size());
    assert_eq!(plan.checkpoint_bytes(), bytes);
}

fn check_pass(
    problem: &Problem,
    launches: &[Launch],
    schedule: &Schedule,
    is_forward: bool,
    checkpoints: Option<&Checkpoints>,
) {
    segments_cover(problem, schedule);
    let Schedule { segments, segment_len, parts, sharers, sweep, .. } = *schedule;
    assert!([1, 2, 4].contains(&parts) && segment_len.is_multiple_of(parts * CHUNK), "{schedule:?}");
    assert!(segments > 1 || parts == 1, "{schedule:?}");
    let states = parts * (segments - 1) + 1;
    let sequences = problem.batch * problem.heads;
    let is_paired = sweep == Some(Sweep::Paired);
    // S forward; S and G backward, G alone where S was stored.
    let num_states = if is_forward || is_paired { 1 } else { 2 };
    let array_bytes = if segments > 1 { sequences * states as usize * state_bytes(problem) } else { 0 };
    assert_eq!(schedule.workspace_bytes, num_states * array_bytes, "{schedule:?}");
    match (is_forward, checkpoints) {
        (true, _) => assert_eq!(sweep, None),
        (false, None) => assert_ne!(sweep, Some(Sweep::Paired)),
        (false, Some(_)) => assert_eq!(sweep, Some(Sweep::Paired)),
    }
    if checkpoints.is_some() || sweep.is_some() {
        assert_eq!((schedule.arch, problem.precision), (Arch::Sm90, Precision::Fast));
    }
    if problem.precision == Precision::Accurate {
        assert_eq!(schedule.value_tiles, [64; 3]);
    }

    let ops: Vec<Op> = launches.iter().map(|launch| launch.variant.op).collect();
    assert_eq!(ops.is_empty(), problem.seq_len == 0);
    if problem.seq_len > 0 {
        let (states, outputs) = ops.split_at(if segments > 1 { 2 } else { 0 });
        assert!(states.is_empty() || states == [Op::ChunkState, Op::StateScan], "{ops:?}");
        match sweep {
            Some(Sweep::Lean) => assert_eq!(outputs, [Op::Gradients]),
            Some(Sweep::Paired) => assert_eq!(outputs, [Op::PairedGradients]),
            None => assert!(!outputs.is_empty() && outputs.iter().all(|&op| op == Op::ChunkOutput), "{ops:?}"),
        }
    }
    for Launch { variant, grid, params, .. } in launches {
        let [x, y, z] = *grid;
        assert!((1..1 << 31).contains(&x) && (1..1 << 16).contains(&y) && z == 1, "{grid:?}");
        let of_launch = (params.segments, params.segment_len, params.parts);
        match variant.op {
            Op::ChunkState => assert_eq!(of_launch, (states, segment_len / parts, 1)),
            Op::StateScan => assert_eq!(of_launch, (states, segment_len / parts, parts)),
            _ => assert_eq!(of_launch, (segments, segment_len, parts)),
        }
        let states_end = AUXILIARY.workspace + (num_states * array_bytes) as u64;
        for application in params.applications.iter().filter(|application| application.states != 0) {
            let states = application.states..application.states + array_bytes as u64;
            assert!(AUXILIARY.workspace <= states.start && states.end <= states_end, "{schedule:?}");
        }
        let stores = is_forward && checkpoints.is_some() && variant.op == Op::ChunkOutput;
        assert_eq!(params.stores_checkpoints, u32::from(stores));
        if sweep.is_some() && matches!(variant.op, Op::Gradients | Op::PairedGradients) {
            let blocks = sequences * (segments * sharers[0]) as usize;
            assert_eq!((x as usize, y, params.sharers, params.slabs), (blocks, 1, sharers[0], 1));
            if segments > 1 {
                assert!(params.seq_len.is_multiple_of(segment_len), "segments of {segment_len} differ");
                assert!(!is_paired || segment_len.is_multiple_of(PAIR), "segments of {segment_len} cut a pair");
            }
        }
    }
}

proptest! {
    #[test]
    fn any_plan(problem in problem(), device in device()) {
        let plan = Plan::new(&problem, device).unwrap();
        check_plan(&plan);
        for (schedule, ..) in passes(&plan) {
            prop_assert!(schedule.predicted_us <= schedule.uncut_us, "{schedule:?}");
        }
        prop_assert_eq!(&plan, &Plan::new(&problem, device).unwrap());
        // At most a fifth of q, k, v and o.
        let row_bytes = 2 * (problem.head_dim + problem.value_dim) * problem.dtype.size();
        let rows = problem.batch * problem.heads * problem.seq_len;
        prop_assert!(5 * plan.checkpoint_bytes() <= rows * row_bytes, "{:?}", plan.checkpoints());
    }

    #[test]
    fn pinned_segments(
        problem in problem(),
        device in device(),
        sweep in any::<bool>(),
        checkpoints in any::<bool>(),
        forward in 0..512_u32,
        backward in 0..512_u32,
    ) {
        let plan = Plan::new(&problem, device).unwrap().with_sweep(sweep).with_checkpoints(checkpoints);
        let plan = plan.with_segments(forward, backward);
        check_plan(&plan);
        for (schedule, is_forward, _) in passes(&plan) {
            prop_assert!(schedule.segments <= if is_forward { forward } else { backward }.max(1), "{schedule:?}");
        }
    }

    #[test]
    fn pinned_sharers(
        problem in problem(),
        device in device(),
        sweep in any::<bool>(),
        checkpoints in any::<bool>(),
        sharers in 1..=4_u32,
        wide in any::<bool>(),
    ) {
        let plan = Plan::new(&problem, device).unwrap().with_sweep(sweep).with_checkpoints(checkpoints).with_sharers(sharers, if wide { 128 } else { 64 });
        check_plan(&plan);
        for (schedule, ..) in passes(&plan) {
            let expected = if schedule.arch == Arch::Sm90 { sharers } else { 1 };
            prop_assert_eq!(schedule.sharers[0], expected);
        }
    }

    #[test]
    fn pinned_checkpoints(problem in problem(), device in device()) {
        let planned = Plan::new(&problem, device).unwrap();
        let runs = sweeps(&problem, device)
            && problem.seq_len >= PAIR as usize
            && problem.head_dim.min(problem.value_dim) <= 64;
        for wanted in [false, true] {
            let plan = planned.clone().with_checkpoints(wanted);
            check_plan(&plan);
            prop_assert_eq!(plan.checkpoints().is_some(), wanted && runs);
            // The plain passes stay as they are.
            prop_assert_eq!((plan.forward(), plan.backward()), (planned.forward(), planned.backward()));
        }
        prop_assert_eq!(&planned.clone().with_checkpoints(planned.checkpoints().is_some()), &planned);
    }

    #[test]
    fn pinned_sweeps(problem in problem(), device in device()) {
        let planned = Plan::new(&problem, device).unwrap();
        for sweep in [false, true] {
            let plan = planned.clone().with_sweep(sweep);
            check_plan(&plan);
            prop_assert_eq!(plan.backward().sweep.is_some(), sweep && sweeps(&problem, device));
            prop_assert_eq!((plan.forward(), plan.checkpoints()), (planned.forward(), planned.checkpoints()));
        }
        prop_assert_eq!(&planned.clone().with_sweep(planned.backward().sweep.is_some()), &planned);
    }

    #[test]
    fn slopes_and_scale_do_not_change_the_schedule(problem in problem(), device in device(), scale in -2.0..2.0_f32) {
        let plan = Plan::new(&problem, device).unwrap();
        let other = Plan::new(&problem.slopes(Slopes::None).scale(scale), device).unwrap();
        prop_assert_eq!((plan.forward(), plan.backward()), (other.forward(), other.backward()));
        prop_assert_eq!(plan.checkpoints(), other.checkpoints());
    }
}
