//! Real sizes: sampled heads against the oracle, every element against NaN.

use lightning_attention::{DType, Precision};

use crate::bench::gpu::Gpu;
use crate::bench::{Pass, Shape, oracle};
use crate::common::compare::Tolerance;
use crate::device::{device, exclusive, record};

fn check(gpu: &Gpu, shape: Shape, dtype: DType, scan: bool) {
    check_with(gpu, shape, dtype, Precision::Fast, scan);
}

/// Runs both passes, and the checkpointed ones where the plan has them, and compares the first and the last head.
fn check_with(gpu: &Gpu, shape: Shape, dtype: DType, precision: Precision, scan: bool) {
    let problem = shape.problem(dtype).precision(precision);
    let accurate = if precision == Precision::Fast { "" } else { " accurate" };
    let has_checkpoints = gpu.engine.plan(&problem).unwrap().checkpoints().is_some();
    let pairs = [(Pass::BOTH, ""), (Pass::CHECKPOINTED, " from checkpoints")];
    for (passes, name) in pairs.into_iter().take(if has_checkpoints { 2 } else { 1 }) {
        let heads = {
            let _exclusive = exclusive();
            let mut set = gpu.set(&problem, 0).unwrap();
            let mut attention = gpu.engine.prepare(&problem).unwrap();
            set.hold_checkpoints(attention.plan()).unwrap();
            for pass in passes {
                set.enqueue(&mut attention, &gpu.stream, pass).unwrap();
            }
            gpu.stream.synchronize().unwrap();
            if scan {
                set.refuse_nan().unwrap();
            }
            let mut sampled = vec![0, problem.batch * problem.heads - 1];
            sampled.dedup();
            sampled.into_iter().map(|head| (head, set.head(head).unwrap())).collect::<Vec<_>>()
        };
        let bound = Tolerance::of(dtype, precision).norm;
        for (output, error) in oracle::errors(&problem, &heads).unwrap().outputs() {
            let case = format!("{shape} {dtype}{accurate}{name}");
            println!("{case} {output}: {error:.2e}");
            record(gpu, &case, output, error, bound);
            assert!(error <= bound, "{case}: `{output}` is off by {error:.2e}, at most {bound:.1e}");
        }
    }
}

#[test]
fn seed() {
    let Some(gpu) = device() else { return };
    for shape in crate::bench::SEED {
        check(gpu, shape, DType::Bf16, true);
        check(gpu, shape, DType::F16, true);
    }
}

#[test]
fn accurate() {
    let Some(gpu) = device() else { return };
    let shapes = [Shape::new(1, 1, 65536, 128, 128), Shape::new(4, 32, 2048, 128, 128)];
    for shape in crate::bench::SEED.into_iter().chain(shapes) {
        check_with(gpu, shape, DType::Bf16, Precision::Accurate, true);
        check_with(gpu, shape, DType::F16, Precision::Accurate, true);
    }
}

#[test]
fn model() {
    let Some(gpu) = device() else { return };
    check(gpu, Shape::new(4, 32, 8192, 128, 128), DType::Bf16, true);
}

#[test]
fn few_heads_and_long_sequences() {
    let Some(gpu) = device() else { return };
    check(gpu, Shape::new(1, 8, 65536, 128, 128), DType::Bf16, true);
    check(gpu, Shape::new(1, 1, 65536, 128, 128), DType::Bf16, true);
}

/// The last head begins beyond 2^31 elements.
#[test]
fn offsets_beyond_31_bits() {
    let Some(gpu) = device() else { return };
    let shape = Shape::new(256, 64, 1040, 128, 8);
    assert!((shape.rows() - shape.seq_len) * shape.head_dim > 1 << 31);
    check(gpu, shape, DType::Bf16, false);
}

/// The last head ends beyond 2^32 elements.
#[test]
fn offsets_beyond_32_bits() {
    let Some(gpu) = device() else { return };
    let shape = Shape::new(1, 130, 262_208, 128, 8);
    assert!((shape.rows() - shape.seq_len) * shape.head_dim > 1 << 32);
    check(gpu, shape, DType::Bf16, false);
}
