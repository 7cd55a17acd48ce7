//! The error measure and its bounds.

use core::fmt;

use approx::AbsDiffEq;
use lightning_attention::{DType, Element, Precision, View, reference};

/// How far a result may be from the oracle's.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Of `‖x − ref‖ / ‖ref‖` over a whole output.
    pub norm: f64,
    /// Of the same over one head, so that a wrong head with small values does not hide behind one with large values.
    pub head_norm: f64,
    /// Of `|x − ref|` of one element, relative to the root mean square of its head's reference …
    pub absolute: f64,
    /// … plus this share of the element's own reference.
    pub relative: f64,
}

impl Tolerance {
    /// The bounds of an element type. Rounding the exact result to bf16 alone costs 1.7e-3.
    pub const fn of(dtype: DType, precision: Precision) -> Self {
        let (norm, half_ulp) = match (dtype, precision) {
            (DType::F32, _) => (1e-5, 6e-8),
            (DType::F16, Precision::Fast) => (5e-4, 4.9e-4),
            (DType::F16, Precision::Accurate) => (2.4e-4, 4.9e-4),
            (DType::Bf16, Precision::Fast) => (2.8e-3, 3.9e-3),
            (DType::Bf16, Precision::Accurate) => (1.9e-3, 3.9e-3),
        };
        Tolerance { norm, head_norm: 1.5 * norm, absolute: 10.0 * norm, relative: half_ulp }
    }
}

/// Compares a tensor with the reference of each `(batch, head)`; the error over the whole output when it is within
/// bounds, else what to print.
pub fn compare<T: Element>(got: &View<'_, T>, expected: &[&[f64]], tolerance: Tolerance) -> Result<f64, String> {
    let [batch, heads, _, dim] = got.extent.shape;
    assert_eq!(expected.len(), batch * heads);
    let (mut difference, mut norm) = (0.0, 0.0);
    let mut mismatches = Mismatches::default();
    for (index, &expected) in expected.iter().enumerate() {
        let at = (index / heads, index % heads);
        let got = reference::rows_of(got, at);
        assert_eq!(got.len(), expected.len());
        let head_norm = square_sum(expected.iter().copied());
        let head_difference = square_sum(got.iter().zip(expected).map(|(x, y)| x - y));
        let rms = (head_norm / expected.len().max(1) as f64).sqrt();
        for (i, (x, y)) in got.iter().zip(expected).enumerate() {
            let epsilon = tolerance.absolute * rms + tolerance.relative * y.abs();
            // Not `abs_diff_ne`: a NaN is a mismatch.
            if !x.abs_diff_eq(y, epsilon) {
                mismatches.add([at.0, at.1, i / dim, i % dim], *x, *y);
            }
        }
        let error = relative(head_difference, head_norm);
        if mismatches.count == 0 && error > tolerance.head_norm {
            return Err(format!(
                "of batch {}, head {} is off by {error:.2e}, at most {:.1e}",
                at.0, at.1, tolerance.head_norm
            ));
        }
        difference += head_difference;
        norm += head_norm;
    }
    if mismatches.count > 0 {
        return Err(mismatches.to_string());
    }
    let error = relative(difference, norm);
    if error <= tolerance.norm {
        Ok(error)
    } else {
        Err(format!("is off by {error:.2e}, at most {:.1e}", tolerance.norm))
    }
}

fn square_sum(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum()
}

fn relative(difference: f64, norm: f64) -> f64 {
    // A reference of zeros (no rows, scale 0) must be met exactly.
    if norm > 0.0 { (difference / norm).sqrt() } else { difference.sqrt() }
}

#[derive(Default)]
struct Mismatches {
    count: usize,
    first: Option<([usize; 4], f64, f64)>,
}

impl Mismatches {
    fn add(&mut self, at: [usize; 4], got: f64, expected: f64) {
        self.count += 1;
        self.first.get_or_insert((at, got, expected));
    }
}

impl fmt::Display for Mismatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((at, got, expected)) = self.first else { return Ok(()) };
        write!(f, "differs in {} elements, first at {at:?}: got {got:e}, expected {expected:e}", self.count)
    }
}

/// The largest error of each output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Errors(Vec<(&'static str, f64)>);

impl Errors {
    /// Keeps the larger of what is there and `error`.
    pub fn record(&mut self, output: &'static str, error: f64) {
        match self.0.iter_mut().find(|(name, _)| *name == output) {
            Some((_, worst)) => *worst = worst.max(error),
            None => self.0.push((output, error)),
        }
    }

    /// [`Errors::record`] of all of `other`.
    pub fn merge(&mut self, other: &Errors) {
        other.0.iter().for_each(|&(output, error)| self.record(output, error));
    }

    /// Each output with its error.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.0.iter().copied()
    }

    /// The largest of all.
    pub fn max(&self) -> f64 {
        self.0.iter().fold(0.0, |worst, &(_, error)| worst.max(error))
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (output, error)) in self.0.iter().enumerate() {
            write!(f, "{}{output} {error:.2e}", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
