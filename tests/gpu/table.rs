//! The shared case table on the device.

use lightning_attention::{DType, Precision};
use lightning_attention_kernels::variants::Arch;

use crate::common::cases::{self, Case};
use crate::common::compare::Tolerance;
use crate::common::run_cases;
use crate::device::{Cuda, Pinned, device, record};

/// Runs the cases that there are kernels for; the rest must be refused for their dims.
fn run(name: &str, all: Vec<Case>, pinned: Pinned) {
    let Some(gpu) = device() else { return };
    let all = all.into_iter().map(|case| case.precision(pinned.precision));
    let (cases, refused): (Vec<Case>, Vec<Case>) = all.partition(|case| gpu.engine.plan(&case.problem()).is_ok());
    for case in refused {
        let supported = |dim: usize| dim.is_multiple_of(8) && dim <= 128;
        assert!(!supported(case.head_dim) || !supported(case.value_dim), "{case} is refused");
    }
    for dtype in [DType::Bf16, DType::F16] {
        let cases: Vec<Case> = cases.iter().filter(|case| case.dtype == dtype).cloned().collect();
        let errors = run_cases(&cases, &Cuda { gpu, pinned });
        for (output, error) in errors.iter() {
            let bound = Tolerance::of(dtype, pinned.precision).norm;
            record(gpu, &format!("{name} {dtype}{pinned}"), output, error, bound);
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

/// Every case in each way to run it; a test for each table, so that slow tools can take one at a time.
macro_rules! pinned {
    ($($name:ident: $pinned:expr;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn boundaries() {
                run("boundaries", both(cases::boundaries), $pinned);
            }

            #[test]
            fn slopes() {
                run("slopes", both(cases::slopes), $pinned);
            }

            #[test]
            fn layouts() {
                run("layouts", both(cases::layouts), $pinned);
            }

            #[test]
            fn dims() {
                run("dims", both(cases::dims), $pinned);
            }
        }
    )*};
}

const PLANNED: Pinned =
    Pinned { precision: Precision::Fast, family: None, segments: None, sharers: None, sweep: None, checkpoints: false };
const PORTABLE: Pinned = Pinned { family: Some(Arch::Sm80), ..PLANNED };
const EACH: Pinned = Pinned { family: Some(Arch::Sm90), sweep: Some(false), ..PLANNED };
const SWEEP: Pinned = Pinned { family: Some(Arch::Sm90), sweep: Some(true), ..PLANNED };
const ACCURATE: Pinned = Pinned { precision: Precision::Accurate, ..PLANNED };
const PAIRS: Pinned = Pinned { family: Some(Arch::Sm90), checkpoints: true, ..PLANNED };

pinned! {
    portable: PORTABLE;
    portable_3_segments: Pinned { segments: Some(3), ..PORTABLE };
    each_1_segment: Pinned { segments: Some(1), ..EACH };
    each_2_segments: Pinned { segments: Some(2), ..EACH };
    each_3_segments: Pinned { segments: Some(3), ..EACH };
    each_7_segments: Pinned { segments: Some(7), ..EACH };
    each_1_sharer: Pinned { segments: Some(2), sharers: Some((1, 64)), ..EACH };
    each_2_sharers: Pinned { segments: Some(2), sharers: Some((2, 64)), ..EACH };
    each_3_sharers: Pinned { segments: Some(2), sharers: Some((3, 64)), ..EACH };
    each_wide: Pinned { segments: Some(2), sharers: Some((1, 128)), ..EACH };
    each_wide_2_sharers: Pinned { segments: Some(2), sharers: Some((2, 128)), ..EACH };
    sweep: SWEEP;
    sweep_3_sharers: Pinned { sharers: Some((3, 64)), ..SWEEP };
    sweep_2_segments: Pinned { segments: Some(2), sharers: Some((2, 64)), ..SWEEP };
    pairs: Pinned { sharers: Some((1, 64)), ..PAIRS };
    pairs_2_sharers: Pinned { sharers: Some((2, 64)), ..PAIRS };
    pairs_3_sharers: Pinned { sharers: Some((3, 64)), ..PAIRS };
    pairs_2_segments: Pinned { segments: Some(2), sharers: Some((2, 64)), ..PAIRS };
    accurate: ACCURATE;
    accurate_portable: Pinned { family: Some(Arch::Sm80), ..ACCURATE };
    accurate_portable_3_segments: Pinned { family: Some(Arch::Sm80), segments: Some(3), ..ACCURATE };
    accurate_1_segment: Pinned { segments: Some(1), ..ACCURATE };
    accurate_2_sharers: Pinned { segments: Some(2), sharers: Some((2, 64)), ..ACCURATE };
    accurate_3_sharers: Pinned { segments: Some(3), sharers: Some((3, 64)), ..ACCURATE };
}

#[test]
fn portable_replays() {
    run("replays", both(cases::replays), PORTABLE);
}

#[test]
fn portable_simulator_cases() {
    run("simulator cases", cases::sim(), PORTABLE);
}

#[test]
fn accurate_replays() {
    run("replays", both(cases::replays), ACCURATE);
}

#[test]
fn accurate_simulator_cases() {
    run("simulator cases", cases::sim(), ACCURATE);
}
