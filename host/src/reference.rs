//! The oracle: the token recurrence of F1 and its gradients B1 … B6 in f64, one row at a time, head by head.
//!
//! Slow and boring on purpose. Every backend is tested against it; nothing else in the crate uses it.

use rayon::prelude::*;

use crate::{Backward, Element, Forward, Problem, Result, View};

/// One head: its sizes, its slope and the scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// Columns of q and k, `D`.
    pub head_dim: usize,
    /// Columns of v and o, `E`.
    pub value_dim: usize,
    /// Slope; the decay is `λ = exp(-slope)`.
    pub slope: f64,
    /// Scale `c` of the output.
    pub scale: f64,
}

/// What the forward pass of one head yields.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// `[N, E]`.
    pub o: Vec<f64>,
    /// State after the last row, `[D, E]`.
    pub final_state: Vec<f64>,
}

/// What the backward pass of one head yields.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// `[N, D]`.
    pub dq: Vec<f64>,
    /// `[N, D]`.
    pub dk: Vec<f64>,
    /// `[N, E]`.
    pub dv: Vec<f64>,
    /// Gradient of the initial state, `[D, E]`.
    pub initial_state_grad: Vec<f64>,
    /// Gradient of the slope.
    pub slope_grad: f64,
    /// `a_N` of B6, which equals `<dS_fin, S_fin>` up to rounding.
    pub slope_check: f64,
}

impl Head {
    /// F1. `q, k: [N, D]`, `v: [N, E]`, `initial_state: [D, E]` (`None` is 0).
    ///
    /// # Panics
    /// When the slices' lengths do not fit each other.
    pub fn forward(&self, q: &[f64], k: &[f64], v: &[f64], initial_state: Option<&[f64]>) -> Output {
        let (d, e) = (self.head_dim, self.value_dim);
        check_lengths(d, e, &[q, k], &[v]);
        let decay = (-self.slope).exp();
        let mut state = self.state_or_zero(initial_state);
        let mut o = vec![0.0; v.len()];
        for (((q, k), v), o) in rows(q, d).zip(rows(k, d)).zip(rows(v, e)).zip(o.chunks_exact_mut(e)) {
            decay_and_add_outer(&mut state, decay, k, v);
            // o_i = c · q_i S_i
            for (&q, state) in q.iter().zip(rows(&state, e)) {
                add_scaled(o, self.scale * q, state);
            }
        }
        Output { o, final_state: state }
    }

    /// B1 … B6. `q, k: [N, D]`, `v, do_: [N, E]`, the states `[D, E]` (`None` is 0).
    ///
    /// # Panics
    /// When the slices' lengths do not fit each other.
    pub fn backward(
        &self,
        q: &[f64],
        k: &[f64],
        v: &[f64],
        do_: &[f64],
        initial_state: Option<&[f64]>,
        final_state_grad: Option<&[f64]>,
    ) -> Gradients {
        let (d, e) = (self.head_dim, self.value_dim);
        check_lengths(d, e, &[q, k], &[v, do_]);
        let seq_len = q.len() / d;
        let decay = (-self.slope).exp();
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);

        // B2, with F1's state: dq_i = c · do_i S_iᵀ
        let mut state = self.state_or_zero(initial_state);
        for (((k, v), do_), dq) in rows(k, d).zip(rows(v, e)).zip(rows(do_, e)).zip(dq.chunks_exact_mut(d)) {
            decay_and_add_outer(&mut state, decay, k, v);
            for (dq, state) in dq.iter_mut().zip(rows(&state, e)) {
                *dq = self.scale * dot(do_, state);
            }
        }

        // `state_grad` holds λ G_{i+1} (dS_fin after the last row) when row i begins, so that B5 is its last value.
        let mut state_grad = self.state_or_zero(final_state_grad);
        for i in (0..seq_len).rev() {
            let (q, k, v, do_) = (&q[i * d..][..d], &k[i * d..][..d], &v[i * e..][..e], &do_[i * e..][..e]);
            let (dk, dv) = (&mut dk[i * d..][..d], &mut dv[i * e..][..e]);
            for (j, grad) in state_grad.chunks_exact_mut(e).enumerate() {
                // B1: G_i = c · q_iᵀ do_i + λ G_{i+1}
                add_scaled(grad, self.scale * q[j], do_);
                // B3: dk_i = v_i G_iᵀ
                dk[j] = dot(v, grad);
                // B4: dv_i = k_i G_i
                add_scaled(dv, k[j], grad);
                grad.iter_mut().for_each(|x| *x *= decay);
            }
        }

        // B6: a_0 = <dS_init, S_init>, a_{i+1} = a_i + k_i·dk_i − q_i·dq_i
        let mut a = initial_state.map_or(0.0, |state| dot(state, &state_grad));
        let mut slope_grad = 0.0;
        for (((q, dq), k), dk) in rows(q, d).zip(rows(&dq, d)).zip(rows(k, d)).zip(rows(&dk, d)) {
            slope_grad -= a;
            a += dot(k, dk) - dot(q, dq);
        }
        Gradients { dq, dk, dv, initial_state_grad: state_grad, slope_grad, slope_check: a }
    }

    fn state_or_zero(&self, state: Option<&[f64]>) -> Vec<f64> {
        let len = self.head_dim * self.value_dim;
        let state = state.map_or_else(|| vec![0.0; len], <[f64]>::to_vec);
        assert_eq!(state.len(), len, "a state is [head_dim, value_dim]");
        state
    }
}

/// The forward pass of every head, `[batch · heads]` in batch-major order; the output slot of `tensors` is not looked at.
///
/// # Errors
/// Those of [`Problem::validate`].
pub fn forward<T: Element, O: Sync>(problem: &Problem, tensors: &Forward<View<'_, T>, O>) -> Result<Vec<Output>> {
    let slopes = problem.validate()?;
    let Forward { q, k, v, .. } = tensors;
    Ok(map_heads(problem, &slopes, |head, at| head.forward(&rows_of(q, at), &rows_of(k, at), &rows_of(v, at), None)))
}

/// The backward pass of every head, as [`forward`].
///
/// # Errors
/// Those of [`Problem::validate`].
pub fn backward<T: Element, O: Sync>(problem: &Problem, tensors: &Backward<View<'_, T>, O>) -> Result<Vec<Gradients>> {
    let slopes = problem.validate()?;
    let Backward { q, k, v, do_, .. } = tensors;
    Ok(map_heads(problem, &slopes, |head, at| {
        head.backward(&rows_of(q, at), &rows_of(k, at), &rows_of(v, at), &rows_of(do_, at), None, None)
    }))
}

fn map_heads<R: Send>(
    problem: &Problem,
    slopes: &[f32],
    f: impl Fn(&Head, (usize, usize)) -> R + Send + Sync,
) -> Vec<R> {
    let heads = (0..problem.batch * problem.heads).into_par_iter();
    heads
        .map(|i| {
            let at = (i / problem.heads, i % problem.heads);
            let Problem { head_dim, value_dim, .. } = *problem;
            f(&Head { head_dim, value_dim, slope: slopes[at.1].into(), scale: problem.scale.into() }, at)
        })
        .collect()
}

/// The rows of one `(batch, head)` as a contiguous `[N, dim]`.
pub fn rows_of<T: Element>(view: &View<'_, T>, (batch, head): (usize, usize)) -> Vec<f64> {
    let [_, _, seq_len, dim] = view.extent.shape;
    let strides = view.extent.strides;
    (0..seq_len)
        .flat_map(|n| &view.data[batch * strides.batch + head * strides.head + n * strides.row..][..dim])
        .map(|x| x.to_f32().into())
        .collect()
}

fn check_lengths(d: usize, e: usize, keys: &[&[f64]], values: &[&[f64]]) {
    let seq_len = keys[0].len() / d;
    assert!(keys.iter().all(|x| x.len() == seq_len * d), "q and k are [N, head_dim]");
    assert!(values.iter().all(|x| x.len() == seq_len * e), "v and do_ are [N, value_dim]");
}

fn rows(x: &[f64], dim: usize) -> impl Iterator<Item = &[f64]> {
    x.chunks_exact(dim)
}

/// `S = λ S + kᵀ v`
fn decay_and_add_outer(state: &mut [f64], decay: f64, k: &[f64], v: &[f64]) {
    for (&k, state) in k.iter().zip(state.chunks_exact_mut(v.len())) {
        for (s, &v) in state.iter_mut().zip(v) {
            *s = decay * *s + k * v;
        }
    }
}

fn add_scaled(y: &mut [f64], factor: f64, x: &[f64]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// Eight partial sums, so that the loop is not bound by the latency of one addition.
fn dot(x: &[f64], y: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (x, y) in x.chunks(8).zip(y.chunks(8)) {
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    sums.iter().sum()
}
