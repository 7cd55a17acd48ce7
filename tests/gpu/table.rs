//! The shared case table on the device.

use lightning_attention::DType;

use crate::common::cases::{self, Case};
use crate::common::compare::Tolerance;
use crate::common::run_cases;
use crate::device::{Cuda, device, record};

/// Runs the cases that there are kernels for; the rest must be refused for their dims.
fn run(name: &str, all: Vec<Case>, segments: Option<u32>) {
    let Some(gpu) = device() else { return };
    let (cases, refused): (Vec<Case>, Vec<Case>) =
        all.into_iter().partition(|case| gpu.engine.plan(&case.problem()).is_ok());
    for case in refused {
        let supported = |dim: usize| dim.is_multiple_of(8) && dim <= 128;
        assert!(!supported(case.head_dim) || !supported(case.value_dim), "{case} is refused");
    }
    for dtype in [DType::Bf16, DType::F16] {
        let cases: Vec<Case> = cases.iter().filter(|case| case.dtype == dtype).cloned().collect();
        let errors = run_cases(&cases, &Cuda { gpu, segments });
        let pinned = segments.map_or_else(String::new, |segments| format!(" in {segments} segments"));
        for (output, error) in errors.iter() {
            record(gpu, &format!("{name} {dtype}{pinned}"), output, error, Tolerance::of(dtype).norm);
        }
    }
}

fn both(table: fn(DType) -> Vec<Case>) -> Vec<Case> {
    [DType::Bf16, DType::F16].into_iter().flat_map(table).collect()
}

#[test]
fn boundaries() {
    run("boundaries", both(cases::boundaries), None);
}

#[test]
fn slopes() {
    run("slopes", both(cases::slopes), None);
}

#[test]
fn dims() {
    run("dims", both(cases::dims), None);
}

#[test]
fn layouts() {
    run("layouts", both(cases::layouts), None);
}

#[test]
fn replays() {
    run("replays", both(cases::replays), None);
}

#[test]
fn simulator_cases() {
    run("simulator cases", cases::sim(), None);
}

#[test]
fn pinned_segments() {
    for segments in [1, 2, 3, 7] {
        run("boundaries", both(cases::boundaries), Some(segments));
        run("slopes", both(cases::slopes), Some(segments));
        run("layouts", both(cases::layouts), Some(segments));
    }
}
