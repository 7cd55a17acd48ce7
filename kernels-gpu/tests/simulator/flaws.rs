//! Each flaw of the warp-specialised kernel is found, on every schedule and for both ways B can lie.

use half::bf16;
use lightning_attention_kernels::device::sim::{Access, Action, BarrierProblem, Fault, FaultKind, Meeting, Standing};

use super::SCHEDULES;
use super::hopper::{Flaw, run};

/// What [`FaultKind`] is expected of a flaw.
macro_rules! is {
    ($pattern:pat $(if $condition:expr)?) => {
        |fault: &Fault| matches!(fault.kind, $pattern $(if $condition)?)
    };
}

#[track_caller]
fn check(flaw: Flaw, is_expected: impl Fn(&Fault) -> bool) {
    for schedule in SCHEDULES {
        for run in [run::<bf16, 32, 0>, run::<bf16, 64, 1>] {
            let fault = run(schedule, flaw).expect_err("the broken kernel must not pass");
            assert!(is_expected(&fault), "{flaw:?}, {schedule:?}: {fault}");
            assert_eq!(run(schedule, flaw), Err(fault), "{schedule:?} is not deterministic");
        }
    }
}

/// A fault in the use of a barrier.
fn is_trouble(expected: BarrierProblem) -> impl Fn(&Fault) -> bool {
    move |fault| matches!(fault.kind, FaultKind::Barrier { problem, .. } if problem == expected)
}

/// A tensor load into a stage that somebody may still read.
fn is_early_reuse(fault: &Fault) -> bool {
    matches!(
        fault.kind,
        FaultKind::Race { access: Access { action: Action::TensorLoad, .. }, other: 128.., other_wrote: false }
    )
}

/// A read of a stage that is not there.
fn is_early_read(fault: &Fault) -> bool {
    match fault.kind {
        FaultKind::UseBeforeLanding { access, .. } | FaultKind::Uninitialised { access, .. } => {
            access.action == Action::MatrixLoad
        }
        _ => false,
    }
}

fn is_invalid(words: &str) -> impl Fn(&Fault) -> bool {
    move |fault| matches!(&fault.kind, FaultKind::Invalid { what } if what.contains(words))
}

#[test]
fn barriers_are_initialised_before_use() {
    check(Flaw::NoInitFence, is_trouble(BarrierProblem::NotFenced));
    check(Flaw::NoBlockBarrier, |fault| match fault.kind {
        FaultKind::Race { access, .. } => access.action == Action::Barrier,
        _ => is_trouble(BarrierProblem::Uninitialised)(fault),
    });
    check(Flaw::WriteToBarrier, is!(FaultKind::TouchesBarrier { access } if access.action == Action::Store));
}

#[test]
fn a_phase_gets_the_bytes_it_expects() {
    check(Flaw::TooFewBytes, is_trouble(BarrierProblem::UnexpectedBytes));
    check(Flaw::TooManyBytes, is!(FaultKind::Deadlock { phase: 0, pending: 0, missing_bytes: 16, .. }));
    check(
        Flaw::MisalignedLoad,
        is!(FaultKind::Misaligned { access, alignment: 1024 } if access.action == Action::TensorLoad),
    );
    check(Flaw::NoMap, is_invalid("no tensor map"));
    check(Flaw::NoPolicy, is_invalid("no cache policy"));
}

#[test]
fn a_stage_is_read_after_it_landed() {
    check(Flaw::NoFullWait, is_early_read);
    check(Flaw::WrongFullParity, is_early_read);
    check(Flaw::OneWarpDoesNotWait, is_early_read);
}

#[test]
fn a_stage_is_filled_after_it_was_read() {
    check(Flaw::NoEmptyWait, is_trouble(BarrierProblem::TooManyArrivals));
    check(Flaw::WrongEmptyParity, is!(FaultKind::Deadlock { phase: 0, pending: 4, missing_bytes: 0, .. }));
    check(Flaw::TooManyArrivals, is_early_reuse);
    check(Flaw::ReleaseBeforeRead, is_early_reuse);
    check(Flaw::ReleaseWithoutWarpBarrier, is_early_reuse);
    check(Flaw::ReleaseBeforeProducts, is_early_reuse);
}

#[test]
fn products_get_what_they_take() {
    check(Flaw::NoProductFence, is_invalid("no wgmma_fence"));
    check(Flaw::DescriptorOutOfBounds, is!(FaultKind::OutOfBounds { access, .. } if access.action == Action::Product));
    let is_unwritten = is!(FaultKind::Uninitialised { access, .. } if access.action == Action::Product);
    check(Flaw::DescriptorUninitialised, is_unwritten);
    check(Flaw::DescriptorWithoutSwizzle, is_invalid("128-byte swizzle"));
    check(Flaw::DescriptorsDiffer, is_invalid("do not agree"));
    let never_comes =
        is!(FaultKind::Divergence { waits_at: Meeting::Wgmma(_), other: 224, other_is: Standing::Exited });
    check(Flaw::WarpLeaves, never_comes);
}

#[test]
fn stores_read_what_was_written() {
    let is_unfenced = is!(FaultKind::MissingProxyFence { access, .. } if access.action == Action::TensorStore);
    check(Flaw::NoProxyFence, is_unfenced);
    check(Flaw::ProxyFenceByOneLane, is_unfenced);
    check(Flaw::ProxyFenceBeforeStore, is_unfenced);
    check(
        Flaw::NoWarpBarrier,
        is!(FaultKind::Race { access, other_wrote: true, .. } if access.action == Action::TensorStore),
    );
}

#[test]
fn stores_are_waited_for() {
    let is_overwrite = is!(FaultKind::Race { access, other_wrote: false, .. } if access.action == Action::MatrixStore);
    check(Flaw::NoReadWait, is_overwrite);
    check(Flaw::NoWarpBarrierAfterReadWait, is_overwrite);
    check(Flaw::NoFinalWait, is_invalid("the kernel ends with no wait"));
}
