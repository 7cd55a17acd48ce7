//! The shared case table on the device.

use lightning_attention::DType;
use lightning_attention_kernels::variants::Arch;

use crate::common::cases::{self, Case};
use crate::common::compare::Tolerance;
use crate::common::run_cases;
use crate::device::{Cuda, Pinned, device, record};

/// Runs the cases that there are kernels for; the rest must be refused for their dims.
fn run(name: &str, all: Vec<Case>, pinned: Pinned) {
    let Some(gpu) = device() else { return };
    let (cases, refused): (Vec<Case>, Vec<Case>) =
        all.into_iter().partition(|case| gpu.engine.plan(&case.problem()).is_ok());
    for case in refused {
        let supported = |dim: usize| dim.is_multiple_of(8) && dim <= 128;
        assert!(!supported(case.head_dim) || !supported(case.value_dim), "{case} is refused");
    }
    for dtype in [DType::Bf16, DType::F16] {
        let cases: Vec<Case> = cases.iter().filter(|case| case.dtype == dtype).cloned().collect();
        let errors = run_cases(&cases, &Cuda { gpu, pinned });
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
    run("boundaries", both(cases::boundaries), Pinned::default());
}

#[test]
fn slopes() {
    run("slopes", both(cases::slopes), Pinned::default());
}

#[test]
fn dims() {
    run("dims", both(cases::dims), Pinned::default());
}

#[test]
fn layouts() {
    run("layouts", both(cases::layouts), Pinned::default());
}

#[test]
fn replays() {
    run("replays", both(cases::replays), Pinned::default());
}

#[test]
fn simulator_cases() {
    run("simulator cases", cases::sim(), Pinned::default());
}

#[test]
fn pinned_segments() {
    for segments in [1, 2, 3, 7] {
        tables(Pinned { segments: Some(segments), ..Pinned::default() });
    }
}

#[test]
fn pinned_sharers() {
    for sharers in [(1, 64), (2, 64), (3, 64), (1, 128), (2, 128)] {
        let pinned = Pinned { segments: Some(2), sharers: Some(sharers), ..Pinned::default() };
        tables(pinned);
        run("dims", both(cases::dims), pinned);
    }
}

#[test]
fn portable_kernels() {
    let portable = Pinned { family: Some(Arch::Sm80), ..Pinned::default() };
    tables(portable);
    run("dims", both(cases::dims), portable);
    run("replays", both(cases::replays), portable);
    run("simulator cases", cases::sim(), portable);
    tables(Pinned { segments: Some(3), ..portable });
}

fn tables(pinned: Pinned) {
    run("boundaries", both(cases::boundaries), pinned);
    run("slopes", both(cases::slopes), pinned);
    run("layouts", both(cases::layouts), pinned);
}
