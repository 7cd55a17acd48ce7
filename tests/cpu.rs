//! The CPU backend on the whole case table.

mod common;

use common::cases::{self, Case, randn};
use common::{Cpu, run_cases};
use half::bf16;
use lightning_attention::{DType, Extent, Forward, Precision, Problem, Slopes, Strides, View, cpu, reference};

fn all_dtypes(table: fn(DType) -> Vec<Case>) {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        run_cases(&table(dtype), &Cpu);
    }
}

#[test]
fn boundaries() {
    all_dtypes(cases::boundaries);
}

#[test]
fn slopes() {
    all_dtypes(cases::slopes);
}

#[test]
fn dims() {
    all_dtypes(cases::dims);
}

#[test]
fn layouts() {
    all_dtypes(cases::layouts);
}

#[test]
fn replays() {
    all_dtypes(cases::replays);
}

#[test]
fn simulator_cases() {
    run_cases(&cases::sim(), &Cpu);
}

/// The backend rounds nothing but the result, so that its 16-bit results are the most exact there are.
#[test]
fn accurate() {
    for table in [cases::boundaries, cases::slopes, cases::dims, cases::layouts, cases::replays] {
        for dtype in [DType::F16, DType::Bf16] {
            run_cases(&cases::accurate(table(dtype)), &Cpu);
        }
    }
    run_cases(&cases::accurate(cases::sim()), &Cpu);
}

#[test]
fn segments() {
    // Few heads: the sequence is cut, with segments of unequal length and a partial last chunk.
    let cases = |dtype| {
        let sizes = [[1, 1, 1024, 64, 64], [1, 1, 1089, 24, 40], [2, 2, 2345, 64, 32], [1, 16, 1025, 16, 16]];
        let alibi = sizes.map(|size| Case::new("segments", dtype, size));
        let steep = Case::new("segments", dtype, [1, 6, 1600, 32, 64]).slopes(Slopes::Custom(cases::SLOPES.to_vec()));
        alibi.into_iter().chain([steep]).collect()
    };
    all_dtypes(cases);
}

#[test]
fn odd_and_extreme_dims() {
    let sizes = [[1, 2, 70, 1, 1], [1, 2, 70, 1, 64], [1, 2, 70, 64, 1], [1, 2, 70, 3, 7], [1, 2, 130, 256, 256]];
    let more = [[1, 2, 90, 255, 129], [3, 1, 1, 5, 2], [1, 40, 2, 7, 9]];
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let cases: Vec<Case> = sizes.iter().chain(&more).map(|&size| Case::new("dims", dtype, size)).collect();
        run_cases(&cases, &Cpu);
    }
}

#[test]
fn scales() {
    let scales = [0.0, -1.0, 0.088_388_35, 1e3];
    let case = |scale| Case::new("scale", DType::F32, [1, 2, 100, 32, 32]).scale(scale);
    run_cases(&scales.map(case), &Cpu);
}

#[test]
fn slices_of_one_projection() {
    let (batch, heads, seq_len, head_dim, value_dim) = (2, 3, 130, 64, 32);
    let problem = Problem::new(batch, heads, seq_len, head_dim, value_dim);
    let head = 2 * head_dim + value_dim;
    let strides = Strides { batch: seq_len * heads * head, head, row: heads * head };
    // [B, N, H, q k v]
    let qkv = randn::<bf16>([batch, seq_len, heads, head], 5);
    let (key, value) =
        (Extent { shape: problem.key_shape(), strides }, Extent { shape: problem.value_shape(), strides });
    let q = View { data: &qkv[..], extent: key };
    let k = View { data: &qkv[head_dim..], extent: key };
    let v = View { data: &qkv[2 * head_dim..], extent: value };
    let mut o = common::poison::Output::poisoned(value);
    cpu::forward(&problem, Forward { q, k, v, o: o.view_mut() }).unwrap();
    o.assert_gaps_untouched("o");

    let expected = reference::forward(&problem, &Forward { q, k, v, o: () }).unwrap();
    let expected: Vec<&[f64]> = expected.iter().map(|head| &head.o[..]).collect();
    common::compare::compare(&o.view(), &expected, common::compare::Tolerance::of(DType::Bf16, Precision::Fast))
        .unwrap();
}
