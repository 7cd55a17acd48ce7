//! What every backend's tests share: one case table, one runner, one error measure.
//!
//! A backend is an adapter of a few lines ([`Backend`]) that [`run_case`] puts through a [`cases::Case`].

#![allow(dead_code)] // Each test binary uses a part.

pub mod cases;
pub mod compare;
pub mod poison;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use half::{bf16, f16};
use lightning_attention::{Backward, DType, Element, Forward, Problem, Result, View, ViewMut, cpu, reference};

use cases::{Case, Inputs};
use compare::Tolerance;
use poison::{Output, Poison};

/// Something that computes the two passes on tensors in host memory.
pub trait Backend {
    /// `o`.
    fn forward<T: Element>(&self, problem: &Problem, tensors: Forward<View<'_, T>, ViewMut<'_, T>>) -> Result<()>;
    /// `dq, dk, dv`.
    fn backward<T: Element>(&self, problem: &Problem, tensors: Backward<View<'_, T>, ViewMut<'_, T>>) -> Result<()>;
}

/// The CPU backend.
pub struct Cpu;

impl Backend for Cpu {
    fn forward<T: Element>(&self, problem: &Problem, tensors: Forward<View<'_, T>, ViewMut<'_, T>>) -> Result<()> {
        cpu::forward(problem, tensors)
    }
    fn backward<T: Element>(&self, problem: &Problem, tensors: Backward<View<'_, T>, ViewMut<'_, T>>) -> Result<()> {
        cpu::backward(problem, tensors)
    }
}

/// Runs both passes of a case, twice each, and checks them: against the oracle, bits of the two runs against each
/// other, and that nothing outside the outputs' rows was written.
///
/// # Panics
/// On any mismatch; the message names the case and the output.
pub fn run_case(case: &Case, backend: &impl Backend) -> compare::Errors {
    match case.dtype {
        DType::F32 => check_case::<f32>(case, backend),
        DType::F16 => check_case::<f16>(case, backend),
        DType::Bf16 => check_case::<bf16>(case, backend),
    }
}

/// Runs every case, and only then fails with all that went wrong. Returns the worst errors.
///
/// # Panics
/// When a case fails, or when there is none.
pub fn run_cases(cases: &[Case], backend: &impl Backend) -> compare::Errors {
    assert!(!cases.is_empty());
    let mut worst = compare::Errors::default();
    let mut failures = Vec::new();
    for case in cases {
        match catch_unwind(AssertUnwindSafe(|| run_case(case, backend))) {
            Ok(errors) => worst.merge(&errors),
            Err(panic) => match panic.downcast::<String>() {
                Ok(message) => failures.push(*message),
                Err(panic) => resume_unwind(panic),
            },
        }
    }
    assert!(failures.is_empty(), "{} of {} cases fail:\n{}", failures.len(), cases.len(), failures.join("\n"));
    println!("{} cases, worst {worst}", cases.len());
    worst
}

fn check_case<T: Poison>(case: &Case, backend: &impl Backend) -> compare::Errors {
    let tolerance = Tolerance::of(case.dtype, case.precision);
    let inputs = Inputs::<T>::new(case);
    let expected_o = reference::forward(&case.problem(), &inputs.forward(())).expect("the case is valid");
    let expected = reference::backward(&case.problem(), &inputs.backward([(), (), ()])).expect("the case is valid");

    let o = forward(case, &inputs, backend);
    let [dq, dk, dv] = backward(case, &inputs, backend);
    assert_eq!(o.first_difference(&forward(case, &inputs, backend)), None, "{case}: `o` of a second run differs");
    let again = backward(case, &inputs, backend);
    for (name, got, again) in [("dq", &dq, &again[0]), ("dk", &dk, &again[1]), ("dv", &dv, &again[2])] {
        assert_eq!(got.first_difference(again), None, "{case}: `{name}` of a second run differs");
    }

    let mut errors = compare::Errors::default();
    let mut check = |name, got: &Output<T>, expected: Vec<&[f64]>| {
        got.assert_gaps_untouched(&format!("{case}: `{name}`"));
        match compare::compare(&got.view(), &expected, tolerance) {
            Ok(error) => errors.record(name, error),
            Err(mismatch) => panic!("{case}: `{name}` {mismatch}"),
        }
    };
    check("o", &o, expected_o.iter().map(|head| &head.o[..]).collect());
    check("dq", &dq, expected.iter().map(|head| &head.dq[..]).collect());
    check("dk", &dk, expected.iter().map(|head| &head.dk[..]).collect());
    check("dv", &dv, expected.iter().map(|head| &head.dv[..]).collect());
    errors
}

/// `o` of a case, from a poisoned buffer.
pub fn forward<T: Poison>(case: &Case, inputs: &Inputs<T>, backend: &impl Backend) -> Output<T> {
    let mut o = Output::poisoned(case.value_extent());
    backend.forward(&case.problem(), inputs.forward(o.view_mut())).unwrap_or_else(|error| panic!("{case}: {error}"));
    o
}

/// `dq, dk, dv` of a case, from poisoned buffers.
pub fn backward<T: Poison>(case: &Case, inputs: &Inputs<T>, backend: &impl Backend) -> [Output<T>; 3] {
    let mut outputs = [case.key_extent(), case.key_extent(), case.value_extent()].map(Output::poisoned);
    let tensors = inputs.backward(outputs.each_mut().map(Output::view_mut));
    backend.backward(&case.problem(), tensors).unwrap_or_else(|error| panic!("{case}: {error}"));
    outputs
}
