//! What the planner decides: goldens of real shapes on two GPUs, and what must hold for any plan.
//!
//! After a change of the planner or of the variant table, `UPDATE_EXPECT=1 cargo test --test plan` rewrites the goldens.

mod measured;
mod properties;

use std::fmt::Write as _;

use expect_test::{Expect, expect};
use lightning_attention::plan::{Auxiliary, Device, Launch, ROW_ALIGNMENT};
use lightning_attention::problem::Region;
use lightning_attention::{Backward, DType, Error, Extent, Forward, Layout, Plan, Precision, Problem, Slopes};
use lightning_attention_kernels::variants::{Arch, Op};

/// A consumer card: compute capability 8.6, 84 multiprocessors with 100 KiB of shared memory.
const CONSUMER: Device =
    Device { compute_capability: (8, 6), multiprocessors: 84, shared_bytes_per_multiprocessor: 100 * 1024 };

const AUXILIARY: Auxiliary = Auxiliary { slopes: 0x1000, workspace: 0x10_0000, checkpoints: 0x20_0000 };

/// A place in memory that is only looked at: tensors of different numbers do not overlap.
fn region(number: u64, problem: &Problem, shape: [usize; 4]) -> Region {
    let extent = Extent::contiguous(shape, Layout::Bhnd);
    Region { address: number << 60, len: None, dtype: problem.dtype, extent }
}

/// The launches of all passes: forward, backward, checkpointed forward, checkpointed backward.
fn launches(plan: &Plan) -> [Vec<Launch>; 4] {
    let problem = plan.problem();
    let (key, value) = (problem.key_shape(), problem.value_shape());
    let [q, k, dq, dk] = [1, 2, 5, 6].map(|number| region(number, problem, key));
    let [v, o, do_, dv] = [3, 4, 7, 8].map(|number| region(number, problem, value));
    let (forward, backward) = (Forward { q, k, v, o }, Backward { q, k, v, do_, dq, dk, dv });
    problem.check_forward(&forward, ROW_ALIGNMENT).unwrap();
    problem.check_backward(&backward, ROW_ALIGNMENT).unwrap();
    [
        plan.forward_launches(&forward, AUXILIARY),
        plan.backward_launches(&backward, AUXILIARY),
        plan.checkpointed_forward_launches(&forward, AUXILIARY),
        plan.checkpointed_backward_launches(&backward, AUXILIARY),
    ]
    .map(|launches| launches.iter().copied().collect())
}

/// The plan as it prints itself, with the launches below each pass.
fn describe(plan: &Plan) -> String {
    let text = plan.to_string();
    let mut lines = text.lines();
    let mut described = format!("{}\n", lines.next().unwrap());
    for (line, launches) in lines.by_ref().take(4).zip(launches(plan)) {
        writeln!(described, "{line}").unwrap();
        for Launch { variant, grid: [x, y, z], .. } in launches {
            writeln!(described, "    {} {x}×{y}×{z}", variant.entry).unwrap();
        }
    }
    lines.for_each(|checkpoints| writeln!(described, "{checkpoints}").unwrap());
    described
}

fn check(shapes: &[[usize; 5]], device: Device, expected: Expect) {
    check_with(Precision::Fast, shapes, device, expected);
}

fn check_with(precision: Precision, shapes: &[[usize; 5]], device: Device, expected: Expect) {
    let problem = |&[b, h, n, d, e]: &[usize; 5]| Problem::new(b, h, n, d, e).precision(precision);
    let plans = shapes.iter().map(|shape| Plan::new(&problem(shape), device).unwrap());
    let described: Vec<String> = plans.map(|plan| describe(&plan)).collect();
    expected.assert_eq(&described.join("\n"));
}

#[test]
fn seed_shapes_on_an_h200() {
    let shapes = [[6, 8, 2048, 128, 64], [6, 8, 4096, 128, 64], [6, 8, 8192, 128, 64], [6, 16, 2048, 64, 64]];
    check(
        &shapes,
        Device::H200,
        expect![[r#"
            6×8×2048×128×64 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 2048 rows, [2] sharing slabs of [64], predicted 24 µs against 24 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 96×1×1
            backward: Sm90, 1 segment(s) of 2048 rows, 2 sharing one sweep, predicted 59 µs against 59 µs uncut, workspace 0 bytes
                gradients_sm90_bf16_d128_e64 96×1×1
            checkpointed forward: Sm90, 1 segment(s) of 2048 rows, [2] sharing slabs of [64], predicted 27 µs against 27 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 96×1×1
            checkpointed backward: Sm90, 1 segment(s) of 2048 rows, 2 sharing one sweep by pairs of chunks, predicted 48 µs against 48 µs uncut, workspace 0 bytes
                paired_gradients_sm90_bf16_d128_e64 96×1×1
            checkpoints: every 128 rows, 12582912 bytes

            6×8×4096×128×64 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 4096 rows, [2] sharing slabs of [64], predicted 43 µs against 43 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 96×1×1
            backward: Sm90, 1 segment(s) of 4096 rows, 2 sharing one sweep, predicted 113 µs against 113 µs uncut, workspace 0 bytes
                gradients_sm90_bf16_d128_e64 96×1×1
            checkpointed forward: Sm90, 1 segment(s) of 4096 rows, [2] sharing slabs of [64], predicted 50 µs against 50 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 96×1×1
            checkpointed backward: Sm90, 1 segment(s) of 4096 rows, 2 sharing one sweep by pairs of chunks, predicted 91 µs against 91 µs uncut, workspace 0 bytes
                paired_gradients_sm90_bf16_d128_e64 96×1×1
            checkpoints: every 128 rows, 25165824 bytes

            6×8×8192×128×64 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 8192 rows, [2] sharing slabs of [64], predicted 82 µs against 82 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 96×1×1
            backward: Sm90, 1 segment(s) of 8192 rows, 2 sharing one sweep, predicted 222 µs against 222 µs uncut, workspace 0 bytes
                gradients_sm90_bf16_d128_e64 96×1×1
            checkpointed forward: Sm90, 1 segment(s) of 8192 rows, [2] sharing slabs of [64], predicted 95 µs against 95 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 96×1×1
            checkpointed backward: Sm90, 1 segment(s) of 8192 rows, 2 sharing one sweep by pairs of chunks, predicted 177 µs against 177 µs uncut, workspace 0 bytes
                paired_gradients_sm90_bf16_d128_e64 96×1×1
            checkpoints: every 128 rows, 50331648 bytes

            6×16×2048×64×64 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 2048 rows, [1] sharing slabs of [64], predicted 30 µs against 30 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d64 96×1×1
            backward: Sm90, 1 segment(s) of 2048 rows, 1 sharing one sweep, predicted 69 µs against 69 µs uncut, workspace 0 bytes
                gradients_sm90_bf16_d64_e64 96×1×1
            checkpointed forward: Sm90, 1 segment(s) of 2048 rows, [1] sharing slabs of [64], predicted 33 µs against 33 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d64 96×1×1
            checkpointed backward: Sm90, 1 segment(s) of 2048 rows, 1 sharing one sweep by pairs of chunks, predicted 65 µs against 65 µs uncut, workspace 0 bytes
                paired_gradients_sm90_bf16_d64_e64 96×1×1
            checkpoints: every 128 rows, 12582912 bytes
        "#]],
    );
}

#[test]
fn many_heads_on_an_h200() {
    let shapes = [[4, 32, 512, 128, 128], [4, 32, 8192, 128, 128], [1, 64, 16384, 128, 128]];
    check(
        &shapes,
        Device::H200,
        expect![[r#"
            4×32×512×128×128 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 512 rows, [1] sharing slabs of [128], predicted 22 µs against 22 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128_e128 128×1×1
            backward: Sm90, 1 segment(s) of 512 rows, 1 sharing one sweep, predicted 47 µs against 47 µs uncut, workspace 0 bytes
                gradients_sm90_bf16_d128_e128 128×1×1

            4×32×8192×128×128 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 8192 rows, [1] sharing slabs of [128], predicted 280 µs against 280 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128_e128 128×1×1
            backward: Sm90, 1 segment(s) of 8192 rows, 1 sharing one sweep, predicted 693 µs against 693 µs uncut, workspace 0 bytes
                gradients_sm90_bf16_d128_e128 128×1×1

            1×64×16384×128×128 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 16384 rows, [1] sharing slabs of [64], predicted 280 µs against 280 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 128×1×1
            backward: Sm90, 2 segment(s) of 8192 rows, states by 2 parts, 1 sharing one sweep, predicted 792 µs against 926 µs uncut, workspace 25165824 bytes
                chunk_state_sm90_bf16_d128_e128 128×2×1
                state_scan_sm80_f32_d0 2048×2×1
                gradients_sm90_bf16_d128_e128 128×1×1
        "#]],
    );
}

#[test]
fn few_heads_on_an_h200() {
    let shapes = [[1, 1, 65536, 128, 128], [1, 8, 65536, 128, 128], [1, 16, 8192, 128, 128]];
    check(
        &shapes,
        Device::H200,
        expect![[r#"
            1×1×65536×128×128 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 47 segment(s) of 1408 rows, states by 2 parts, [1] sharing slabs of [64], predicted 38 µs against 486 µs uncut, workspace 6094848 bytes
                chunk_state_sm90_bf16_d128_e128 92×1×1
                state_scan_sm80_f32_d0 32×1×1
                chunk_output_sm90_bf16_d128 94×1×1
            backward: Sm90, 128 segment(s) of 512 rows, 1 sharing one sweep, predicted 82 µs against 2216 µs uncut, workspace 16777216 bytes
                chunk_state_sm90_bf16_d128_e128 127×2×1
                state_scan_sm80_f32_d0 32×2×1
                gradients_sm90_bf16_d128_e128 128×1×1

            1×8×65536×128×128 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 8 segment(s) of 8192 rows, states by 4 parts, [1] sharing slabs of [64], predicted 192 µs against 486 µs uncut, workspace 15204352 bytes
                chunk_state_sm90_bf16_d128_e128 224×1×1
                state_scan_sm80_f32_d0 256×1×1
                chunk_output_sm90_bf16_d128 128×1×1
            backward: Sm90, 16 segment(s) of 4096 rows, 1 sharing one sweep, predicted 440 µs against 2216 µs uncut, workspace 16777216 bytes
                chunk_state_sm90_bf16_d128_e128 120×2×1
                state_scan_sm80_f32_d0 256×2×1
                gradients_sm90_bf16_d128_e128 128×1×1

            1×16×8192×128×128 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 2 segment(s) of 4096 rows, states by 4 parts, [2] sharing slabs of [64], predicted 64 µs against 71 µs uncut, workspace 5242880 bytes
                chunk_state_sm90_bf16_d128_e128 64×1×1
                state_scan_sm80_f32_d0 512×1×1
                chunk_output_sm90_bf16_d128 128×1×1
            backward: Sm90, 8 segment(s) of 1024 rows, 1 sharing one sweep, predicted 132 µs against 281 µs uncut, workspace 16777216 bytes
                chunk_state_sm90_bf16_d128_e128 112×2×1
                state_scan_sm80_f32_d0 512×2×1
                gradients_sm90_bf16_d128_e128 128×1×1
        "#]],
    );
}

#[test]
fn small_and_odd_shapes_on_an_h200() {
    let shapes = [[2, 3, 0, 64, 64], [1, 1, 1, 8, 8], [1, 1, 65, 72, 40], [1, 2, 1000, 128, 8]];
    check(
        &shapes,
        Device::H200,
        expect![[r#"
            2×3×0×64×64 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm80, 1 segment(s) of 64 rows, [1] sharing slabs of [64], predicted 6 µs against 6 µs uncut, workspace 0 bytes
            backward: Sm80, 1 segment(s) of 64 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 6 µs against 6 µs uncut, workspace 0 bytes

            1×1×1×8×8 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm80, 1 segment(s) of 64 rows, [1] sharing slabs of [64], predicted 6 µs against 6 µs uncut, workspace 0 bytes
                chunk_output_sm80_bf16_d64 1×1×1
            backward: Sm80, 1 segment(s) of 64 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 6 µs against 6 µs uncut, workspace 0 bytes
                chunk_output_sm80_bf16_d64 1×3×1

            1×1×65×72×40 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 128 rows, [2] sharing slabs of [64], predicted 6 µs against 6 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 2×1×1
            backward: Sm90, 1 segment(s) of 128 rows, 2 sharing one sweep, predicted 8 µs against 8 µs uncut, workspace 0 bytes
                gradients_sm90_bf16_d128_e64 2×1×1

            1×2×1000×128×8 bf16 on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 1024 rows, [4] sharing slabs of [64], predicted 12 µs against 12 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128 8×1×1
            backward: Sm80, 16 segment(s) of 64 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 22 µs against 75 µs uncut, workspace 2097152 bytes
                chunk_state_sm80_bf16_d128 30×2×1
                state_scan_sm80_f32_d0 32×2×1
                chunk_output_sm80_bf16_d64 64×2×1
                chunk_output_sm80_bf16_d128 32×1×1
        "#]],
    );
}

#[test]
fn a_consumer_card() {
    let shapes = [[6, 8, 2048, 128, 64], [6, 8, 8192, 128, 64], [6, 16, 2048, 64, 64], [1, 8, 65536, 128, 128]];
    check(
        &shapes,
        CONSUMER,
        expect![[r#"
            6×8×2048×128×64 bf16 on 84 multiprocessors of compute capability 8.6
            forward: Sm80, 1 segment(s) of 2048 rows, [1] sharing slabs of [64], predicted 75 µs against 75 µs uncut, workspace 0 bytes
                chunk_output_sm80_bf16_d128 48×1×1
            backward: Sm80, 3 segment(s) of 704 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 264 µs against 271 µs uncut, workspace 9437184 bytes
                chunk_state_sm80_bf16_d128 96×2×1
                state_scan_sm80_f32_d0 768×2×1
                chunk_output_sm80_bf16_d64 288×2×1
                chunk_output_sm80_bf16_d128 144×1×1

            6×8×8192×128×64 bf16 on 84 multiprocessors of compute capability 8.6
            forward: Sm80, 8 segment(s) of 1024 rows, [1] sharing slabs of [64], predicted 253 µs against 286 µs uncut, workspace 12582912 bytes
                chunk_state_sm80_bf16_d128 336×1×1
                state_scan_sm80_f32_d0 768×1×1
                chunk_output_sm80_bf16_d128 384×1×1
            backward: Sm80, 3 segment(s) of 2752 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 895 µs against 1044 µs uncut, workspace 9437184 bytes
                chunk_state_sm80_bf16_d128 96×2×1
                state_scan_sm80_f32_d0 768×2×1
                chunk_output_sm80_bf16_d64 288×2×1
                chunk_output_sm80_bf16_d128 144×1×1

            6×16×2048×64×64 bf16 on 84 multiprocessors of compute capability 8.6
            forward: Sm80, 4 segment(s) of 512 rows, [1] sharing slabs of [64], predicted 114 µs against 132 µs uncut, workspace 6291456 bytes
                chunk_state_sm80_bf16_d64 288×1×1
                state_scan_sm80_f32_d0 768×1×1
                chunk_output_sm80_bf16_d64 384×1×1
            backward: Sm80, 1 segment(s) of 2048 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 262 µs against 262 µs uncut, workspace 0 bytes
                chunk_output_sm80_bf16_d64 96×3×1

            1×8×65536×128×128 bf16 on 84 multiprocessors of compute capability 8.6
            forward: Sm80, 47 segment(s) of 1408 rows, [1] sharing slabs of [64], predicted 621 µs against 2257 µs uncut, workspace 24641536 bytes
                chunk_state_sm80_bf16_d128 736×1×1
                state_scan_sm80_f32_d0 256×1×1
                chunk_output_sm80_bf16_d128 752×1×1
            backward: Sm80, 8 segment(s) of 8192 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 1654 µs against 2257 µs uncut, workspace 8388608 bytes
                chunk_state_sm80_bf16_d128 112×2×1
                state_scan_sm80_f32_d0 256×2×1
                chunk_output_sm80_bf16_d128 128×3×1
        "#]],
    );
}

#[test]
fn accurate_on_an_h200() {
    let shapes = [[6, 8, 2048, 128, 64], [6, 8, 8192, 128, 64], [4, 32, 8192, 128, 128], [1, 8, 65536, 128, 128]];
    check_with(
        Precision::Accurate,
        &shapes,
        Device::H200,
        expect![[r#"
            6×8×2048×128×64 bf16, accurate, on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 2048 rows, [2] sharing slabs of [64], predicted 30 µs against 30 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128_accurate 96×1×1
            backward: Sm90, 1 segment(s) of 2048 rows, [1, 1, 2] sharing slabs of [64, 64, 64], predicted 100 µs against 100 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d64_accurate 96×1×1
                chunk_output_sm90_bf16_d64_accurate 96×1×1
                chunk_output_sm90_bf16_d128_accurate 96×1×1

            6×8×8192×128×64 bf16, accurate, on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 8192 rows, [2] sharing slabs of [64], predicted 106 µs against 106 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128_accurate 96×1×1
            backward: Sm90, 1 segment(s) of 8192 rows, [1, 1, 2] sharing slabs of [64, 64, 64], predicted 361 µs against 361 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d64_accurate 96×1×1
                chunk_output_sm90_bf16_d64_accurate 96×1×1
                chunk_output_sm90_bf16_d128_accurate 96×1×1

            4×32×8192×128×128 bf16, accurate, on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 1 segment(s) of 8192 rows, [1] sharing slabs of [64], predicted 294 µs against 294 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128_accurate 256×1×1
            backward: Sm90, 1 segment(s) of 8192 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 881 µs against 881 µs uncut, workspace 0 bytes
                chunk_output_sm90_bf16_d128_accurate 256×1×1
                chunk_output_sm90_bf16_d128_accurate 256×1×1
                chunk_output_sm90_bf16_d128_accurate 256×1×1

            1×8×65536×128×128 bf16, accurate, on 132 multiprocessors of compute capability 9.0
            forward: Sm90, 8 segment(s) of 8192 rows, states by 2 parts, [1] sharing slabs of [64], predicted 291 µs against 654 µs uncut, workspace 7864320 bytes
                chunk_state_sm80_bf16_d128_accurate 224×1×1
                state_scan_sm80_f32_d0 256×1×1
                chunk_output_sm90_bf16_d128_accurate 128×1×1
            backward: Sm90, 8 segment(s) of 8192 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 720 µs against 1962 µs uncut, workspace 8388608 bytes
                chunk_state_sm80_bf16_d128_accurate 112×2×1
                state_scan_sm80_f32_d0 256×2×1
                chunk_output_sm90_bf16_d128_accurate 128×1×1
                chunk_output_sm90_bf16_d128_accurate 128×1×1
                chunk_output_sm90_bf16_d128_accurate 128×1×1
        "#]],
    );
}

#[test]
fn accurate_on_a_consumer_card() {
    check_with(
        Precision::Accurate,
        &[[6, 8, 2048, 128, 64], [1, 8, 65536, 128, 128]],
        CONSUMER,
        expect![[r#"
            6×8×2048×128×64 bf16, accurate, on 84 multiprocessors of compute capability 8.6
            forward: Sm80, 1 segment(s) of 2048 rows, [1] sharing slabs of [64], predicted 99 µs against 99 µs uncut, workspace 0 bytes
                chunk_output_sm80_bf16_d128_accurate 48×1×1
            backward: Sm80, 3 segment(s) of 704 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 361 µs against 373 µs uncut, workspace 9437184 bytes
                chunk_state_sm80_bf16_d128_accurate 96×2×1
                state_scan_sm80_f32_d0 768×2×1
                chunk_output_sm80_bf16_d64_accurate 288×2×1
                chunk_output_sm80_bf16_d128_accurate 144×1×1

            1×8×65536×128×128 bf16, accurate, on 84 multiprocessors of compute capability 8.6
            forward: Sm80, 47 segment(s) of 1408 rows, [1] sharing slabs of [64], predicted 882 µs against 3046 µs uncut, workspace 24641536 bytes
                chunk_state_sm80_bf16_d128_accurate 736×1×1
                state_scan_sm80_f32_d0 256×1×1
                chunk_output_sm80_bf16_d128_accurate 752×1×1
            backward: Sm80, 32 segment(s) of 2048 rows, [1, 1, 1] sharing slabs of [64, 64, 64], predicted 2347 µs against 3046 µs uncut, workspace 33554432 bytes
                chunk_state_sm80_bf16_d128_accurate 496×2×1
                state_scan_sm80_f32_d0 256×2×1
                chunk_output_sm80_bf16_d128_accurate 512×3×1
        "#]],
    );
}

/// The kernels of each pass in each precision, however the plan is told to run: an accurate one neither sweeps nor has checkpoints.
#[test]
fn precisions_and_passes() {
    let problem = Problem::new(1, 2, 1024, 64, 64);
    for (precision, sweeps) in [(Precision::Fast, true), (Precision::Accurate, false)] {
        let plan = Plan::new(&problem.clone().precision(precision), Device::H200).unwrap();
        let plan = plan.with_family(Arch::Sm90).with_sweep(true).with_checkpoints(true).with_segments(2, 2);
        assert_eq!((plan.backward().sweep.is_some(), plan.checkpoints().is_some()), (sweeps, sweeps));
        assert_eq!(plan.checkpoint_bytes() > 0, sweeps);
        let output = [Op::ChunkOutput];
        let [backward, paired]: [&[Op]; 2] =
            if sweeps { [&[Op::Gradients], &[Op::PairedGradients]] } else { [&[Op::ChunkOutput; 3]; 2] };
        for (launches, outputs) in launches(&plan).iter().zip([&output, backward, &output, paired]) {
            let ops: Vec<Op> = launches.iter().map(|launch| launch.variant.op).collect();
            assert_eq!(ops, [&[Op::ChunkState, Op::StateScan], outputs].concat());
            let is_accurate = |launch: &Launch| launch.variant.accurate == (launch.variant.op != Op::StateScan);
            assert!(sweeps || launches.iter().all(is_accurate), "{launches:?}");
        }
    }
}

#[test]
fn what_no_kernel_covers_is_refused() {
    let problem = Problem::new(1, 2, 100, 64, 64);
    let old = Device { compute_capability: (7, 5), ..CONSUMER };
    assert_eq!(Plan::new(&problem, old), Err(Error::DeviceTooOld { got: (7, 5), expected: (8, 0) }));
    let f32s = problem.clone().dtype(DType::F32);
    let error = Error::UnsupportedElementType { got: DType::F32, expected: "bf16 or f16" };
    assert_eq!(Plan::new(&f32s, CONSUMER), Err(error));
    for (argument, [d, e], got) in [
        ("head_dim", [63, 64], 63),
        ("head_dim", [136, 64], 136),
        ("value_dim", [64, 4], 4),
        ("value_dim", [8, 256], 256),
    ] {
        let expected = "a multiple of 8 up to 128 on CUDA";
        let problem = Problem::new(1, 2, 100, d, e);
        assert_eq!(Plan::new(&problem, CONSUMER), Err(Error::Dimension { argument, got, expected }));
    }
    let error = Error::Dimension { argument: "batch", got: 65_535, expected: "batch · heads up to 2^20" };
    assert_eq!(Plan::new(&Problem::new(65_535, 17, 1, 8, 8), CONSUMER), Err(error));
    // What the problem itself refuses comes first.
    let bad = problem.slopes(Slopes::Custom(vec![0.1]));
    assert_eq!(Plan::new(&bad, old), Err(Error::SlopeCount { got: 1, expected: 2 }));
}
