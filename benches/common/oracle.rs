//! Errors against the f64 recurrence, on all heads or a few.

use lightning_attention::Problem;
use lightning_attention::reference::Head;
use rayon::prelude::*;

/// The rows of one head in f64, `[N, dim]`: inputs and results.
#[derive(Clone, Debug, Default)]
pub struct HeadRows {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub do_: Vec<f64>,
    pub o: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// Relative errors ‖x − ref‖ / ‖ref‖ over the heads compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Errors {
    pub o: f64,
    pub dq: f64,
    pub dk: f64,
    pub dv: f64,
    /// Heads compared.
    pub heads: usize,
}

impl Errors {
    /// The outputs by name.
    pub fn outputs(&self) -> [(&'static str, f64); 4] {
        [("o", self.o), ("dq", self.dq), ("dk", self.dk), ("dv", self.dv)]
    }
}

/// Heads to compare: all where the oracle takes seconds, else first, last and two between.
pub fn heads_to_compare(problem: &Problem) -> Vec<usize> {
    let heads = problem.batch * problem.heads;
    let products = heads * problem.seq_len * problem.head_dim * problem.value_dim;
    if products <= 1 << 30 {
        return (0..heads).collect();
    }
    let mut sampled = vec![0, heads / 3, 2 * heads / 3, heads - 1];
    sampled.dedup();
    sampled
}

/// Compares the given heads `(index, rows)`.
pub fn errors(problem: &Problem, heads: &[(usize, HeadRows)]) -> lightning_attention::Result<Errors> {
    let slopes = problem.validate()?;
    let sums = heads
        .par_iter()
        .map(|(index, rows)| {
            let head = Head {
                head_dim: problem.head_dim,
                value_dim: problem.value_dim,
                slope: slopes[index % problem.heads].into(),
                scale: problem.scale.into(),
            };
            let o = head.forward(&rows.q, &rows.k, &rows.v, None).o;
            let grads = head.backward(&rows.q, &rows.k, &rows.v, &rows.do_, None, None);
            [
                squares(&rows.o, &o),
                squares(&rows.dq, &grads.dq),
                squares(&rows.dk, &grads.dk),
                squares(&rows.dv, &grads.dv),
            ]
        })
        .collect::<Vec<_>>();
    let error = |output: usize| {
        let (difference, norm) = sums.iter().fold((0.0, 0.0), |sum, s| (sum.0 + s[output].0, sum.1 + s[output].1));
        if norm == 0.0 { difference.sqrt() } else { (difference / norm).sqrt() }
    };
    Ok(Errors { o: error(0), dq: error(1), dk: error(2), dv: error(3), heads: heads.len() })
}

fn squares(got: &[f64], expected: &[f64]) -> (f64, f64) {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).fold((0.0, 0.0), |sum, (x, y)| (sum.0 + (x - y) * (x - y), sum.1 + y * y))
}
