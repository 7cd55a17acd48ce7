//! What must hold for any input: of the oracle, against an independent form of it and against finite differences; of
//! the CPU backend, bit for bit where the arithmetic is the same.

mod common;

use common::cases::{Case, Inputs, Placement, SLOPES, randn};
use common::poison::{Output, Poison};
use common::{Cpu, backward, forward, run_case};
use half::bf16;
use lightning_attention::reference::{Gradients, Head, rows_of};
use lightning_attention::{DType, Slopes};
use proptest::prelude::*;

fn slope() -> impl Strategy<Value = f32> {
    prop_oneof![proptest::sample::select(&SLOPES[..]), 0.0..3.0_f32]
}

fn dtype() -> impl Strategy<Value = DType> {
    proptest::sample::select(&[DType::F32, DType::F16, DType::Bf16][..])
}

fn layout() -> impl Strategy<Value = Placement> {
    proptest::sample::select(&[Placement::Bhnd, Placement::Bnhd, Placement::Packed, Placement::Padded][..])
}

/// Lengths of one or several chunks, and some that are cut into segments.
fn seq_len() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0..300_usize, 1 => 1000..2200_usize]
}

prop_compose! {
    fn case(dtype: DType, layout: Placement)(
        batch in 1..=3_usize,
        n in seq_len(),
        d in 1..=80_usize,
        e in 1..=80_usize,
        slopes in proptest::collection::vec(slope(), 1..=4),
        scale in 0.1..2.0_f32,
    ) -> Case {
        Case::new("random", dtype, [batch, slopes.len(), n, d, e])
            .slopes(Slopes::Custom(slopes))
            .layout(layout)
            .scale(scale)
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    (dtype(), layout()).prop_flat_map(|(dtype, layout)| case(dtype, layout))
}

/// Contents of an output as `[batch · heads]` contiguous heads.
fn heads<T: Poison>(output: &Output<T>) -> Vec<Vec<f64>> {
    let view = output.view();
    let [batch, heads, ..] = view.extent.shape;
    (0..batch * heads).map(|i| rows_of(&view, (i / heads, i % heads))).collect()
}

/// `o, dq, dk, dv` by head.
fn both_passes<T: Poison>(case: &Case, inputs: &Inputs<T>) -> [Vec<Vec<f64>>; 4] {
    let [dq, dk, dv] = backward(case, inputs, &Cpu);
    [forward(case, inputs, &Cpu), dq, dk, dv].each_ref().map(heads)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_shapes_meet_the_oracle(case in any_case()) {
        run_case(&case, &Cpu);
    }

    #[test]
    fn strides_equal_contiguous(case in case(DType::F32, Placement::Bhnd), layout in layout()) {
        let strided = case.clone().layout(layout);
        let (a, b) = (Inputs::<f32>::new(&case), Inputs::<f32>::new(&strided));
        prop_assert_eq!(both_passes(&case, &a), both_passes(&strided, &b));
    }

    #[test]
    fn bits_do_not_depend_on_threads(case in case(DType::Bf16, Placement::Bhnd), threads in 1..=5_usize) {
        let inputs = Inputs::<bf16>::new(&case);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        prop_assert_eq!(both_passes(&case, &inputs), pool.install(|| both_passes(&case, &inputs)));
    }

    #[test]
    fn batches_and_heads_permute(case in case(DType::F32, Placement::Bhnd), shift in 0..12_usize) {
        let (batch, count) = (case.batch, case.heads);
        // Rotate the batches and the heads.
        let source = |i: usize| ((i / count + shift) % batch) * count + (i % count + shift) % count;
        let problem = case.problem();
        let slopes = problem.validate().unwrap();
        let permuted = case.clone().slopes(Slopes::Custom((0..count).map(|h| slopes[(h + shift) % count]).collect()));

        let values = [problem.key_shape(), problem.key_shape(), problem.value_shape(), problem.value_shape()];
        let values = [1, 2, 3, 4].map(|seed| randn::<f32>(values[seed as usize - 1], seed));
        let moved = values.each_ref().map(|x| {
            let head_len = x.len() / (batch * count);
            (0..batch * count).flat_map(|i| &x[source(i) * head_len..][..head_len]).copied().collect::<Vec<_>>()
        });
        let inputs = |[q, k, v, do_]: &[Vec<f32>; 4]| Inputs::from_values(&case, q, k, v, do_);
        let expected = both_passes(&case, &inputs(&values));
        let got = both_passes(&permuted, &inputs(&moved));
        for (got, expected) in got.iter().zip(&expected) {
            for (i, got) in got.iter().enumerate() {
                prop_assert_eq!(got, &expected[source(i)]);
            }
        }
    }

    #[test]
    fn gradients_are_linear_in_do(case in case(DType::F32, Placement::Bhnd), factor in -3.0..3.0_f32) {
        let problem = case.problem();
        let (key, value) = (problem.key_shape(), problem.value_shape());
        let [q, k] = [1, 2].map(|seed| randn::<f32>(key, seed));
        let [v, a, b] = [3, 4, 5].map(|seed| randn::<f32>(value, seed));
        let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + factor * b).collect();
        let gradients = |do_: &[f32]| {
            let [_, gradients @ ..] = both_passes(&case, &Inputs::from_values(&case, &q, &k, &v, do_));
            gradients
        };
        let (of_a, of_b, of_sum) = (gradients(&a), gradients(&b), gradients(&sum));
        for ((a, b), sum) in of_a.iter().flatten().zip(of_b.iter().flatten()).zip(of_sum.iter().flatten()) {
            let expected: Vec<f64> = a.iter().zip(b).map(|(a, b)| a + f64::from(factor) * b).collect();
            // Relative to the summands: their sum may cancel.
            let size = norm(a) + f64::from(factor.abs()) * norm(b);
            prop_assert!(distance(sum, &expected) <= 2e-6 * size, "{} of {size}", distance(sum, &expected));
        }
    }

    #[test]
    fn later_rows_do_not_matter(case in case(DType::F32, Placement::Bhnd), cut in 0.0..1.0_f64) {
        let kept = (cut * case.seq_len as f64) as usize;
        let prefix = Case { seq_len: kept, ..case.clone() };
        let (whole, problem) = (Inputs::<f32>::new(&case), case.problem());
        let rows = |x: Vec<f32>, dim: usize| -> Vec<f32> {
            x.chunks(case.seq_len.max(1) * dim).flat_map(|head| &head[..kept * dim]).copied().collect()
        };
        let (d, e) = (case.head_dim, case.value_dim);
        let [q, k] = [1, 2].map(|seed| rows(randn(problem.key_shape(), seed), d));
        let [v, do_] = [3, 4].map(|seed| rows(randn(problem.value_shape(), seed), e));
        let short = Inputs::from_values(&prefix, &q, &k, &v, &do_);
        let (got, expected) = (heads(&forward(&prefix, &short, &Cpu)), heads(&forward(&case, &whole, &Cpu)));
        for (got, expected) in got.iter().zip(&expected) {
            let expected = &expected[..kept * e];
            prop_assert!(distance(got, expected) <= 2e-6 * norm(expected));
        }
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn distance(x: &[f64], y: &[f64]) -> f64 {
    assert_eq!(x.len(), y.len());
    x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt()
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// A head of the oracle with its inputs and with the gradients of a linear loss `<o, do> + <S_fin, dS_fin>`.
#[derive(Clone, Debug)]
struct Sequence {
    head: Head,
    seq_len: usize,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    do_: Vec<f64>,
    initial_state: Vec<f64>,
    final_state_grad: Vec<f64>,
}

prop_compose! {
    fn sequence()(
        seq_len in 0..40_usize,
        d in 1..9_usize,
        e in 1..9_usize,
        slope in slope(),
        scale in 0.1..2.0_f64,
        seed in 0..1_000_000_u64,
    ) -> Sequence {
        let head = Head { head_dim: d, value_dim: e, slope: slope.into(), scale };
        let random = |rows, dim, i| {
            // Of standard deviation 1.
            randn::<f32>([1, 1, rows, dim], 8 * seed + i).into_iter().map(|x| 10.0 * f64::from(x)).collect()
        };
        Sequence {
            head,
            seq_len,
            q: random(seq_len, d, 0),
            k: random(seq_len, d, 1),
            v: random(seq_len, e, 2),
            do_: random(seq_len, e, 3),
            initial_state: random(d, e, 4),
            final_state_grad: random(d, e, 5),
        }
    }
}

impl Sequence {
    fn loss(&self) -> f64 {
        let output = self.head.forward(&self.q, &self.k, &self.v, Some(&self.initial_state));
        dot(&output.o, &self.do_) + dot(&output.final_state, &self.final_state_grad)
    }

    fn gradients(&self) -> Gradients {
        let states = (Some(&self.initial_state[..]), Some(&self.final_state_grad[..]));
        self.head.backward(&self.q, &self.k, &self.v, &self.do_, states.0, states.1)
    }

    /// Rows `from..to`, entered by `initial_state`, left with `final_state_grad`.
    fn part(&self, from: usize, to: usize, initial_state: &[f64], final_state_grad: &[f64]) -> Sequence {
        let (d, e) = (self.head.head_dim, self.head.value_dim);
        Sequence {
            seq_len: to - from,
            q: self.q[from * d..to * d].to_vec(),
            k: self.k[from * d..to * d].to_vec(),
            v: self.v[from * e..to * e].to_vec(),
            do_: self.do_[from * e..to * e].to_vec(),
            initial_state: initial_state.to_vec(),
            final_state_grad: final_state_grad.to_vec(),
            ..*self
        }
    }

    /// The masked form without any state: `o_i = c (λ^{i+1} q_i S_init + Σ_{j ≤ i} λ^{i-j} (q_i·k_j) v_j)`, and by its
    /// product rule `o, S_fin, dq, dk, dv, dS_init`.
    fn masked(&self) -> [Vec<f64>; 6] {
        let Head { head_dim: d, value_dim: e, slope, scale } = self.head;
        let decay = |n: usize| (-slope * n as f64).exp();
        let (n, row) = (self.seq_len, |x: &[f64], i: usize, dim: usize| x[i * dim..][..dim].to_vec());
        let (mut o, mut final_state) = (vec![0.0; n * e], vec![0.0; d * e]);
        let (mut dq, mut dk, mut dv, mut initial_grad) =
            (vec![0.0; n * d], vec![0.0; n * d], vec![0.0; n * e], vec![0.0; d * e]);
        for i in 0..n {
            let (q, k, v, do_) = (row(&self.q, i, d), row(&self.k, i, d), row(&self.v, i, e), row(&self.do_, i, e));
            for j in 0..=i {
                let (k, v) = (row(&self.k, j, d), row(&self.v, j, e));
                let p = scale * decay(i - j) * dot(&q, &k);
                let dp = scale * decay(i - j) * dot(&do_, &v);
                for b in 0..e {
                    o[i * e + b] += p * v[b];
                    dv[j * e + b] += p * do_[b];
                }
                for a in 0..d {
                    dq[i * d + a] += dp * k[a];
                    dk[j * d + a] += dp * q[a];
                }
            }
            for a in 0..d {
                for b in 0..e {
                    let (entering, leaving) = (decay(i + 1), decay(n - 1 - i));
                    let (state, grad) = (self.initial_state[a * e + b], self.final_state_grad[a * e + b]);
                    o[i * e + b] += scale * entering * q[a] * state;
                    dq[i * d + a] += scale * entering * do_[b] * state;
                    initial_grad[a * e + b] += scale * entering * q[a] * do_[b];
                    final_state[a * e + b] += leaving * k[a] * v[b];
                    dk[i * d + a] += leaving * v[b] * grad;
                    dv[i * e + b] += leaving * k[a] * grad;
                }
            }
        }
        for at in 0..d * e {
            final_state[at] += decay(n) * self.initial_state[at];
            initial_grad[at] += decay(n) * self.final_state_grad[at];
        }
        [o, final_state, dq, dk, dv, initial_grad]
    }
}

fn assert_near(name: &str, got: &[f64], expected: &[f64], bound: f64) -> Result<(), TestCaseError> {
    let (error, size) = (distance(got, expected), 1.0 + norm(expected));
    prop_assert!(error <= bound * size, "{name} differs by {error:e}, its norm is {size:e}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn oracle_is_the_masked_form(sequence in sequence()) {
        let Sequence { head, q, k, v, initial_state, .. } = &sequence;
        let [o, final_state, dq, dk, dv, initial_state_grad] = sequence.masked();
        let output = head.forward(q, k, v, Some(initial_state));
        assert_near("o", &output.o, &o, 1e-12)?;
        assert_near("final_state", &output.final_state, &final_state, 1e-12)?;
        let gradients = sequence.gradients();
        assert_near("dq", &gradients.dq, &dq, 1e-12)?;
        assert_near("dk", &gradients.dk, &dk, 1e-12)?;
        assert_near("dv", &gradients.dv, &dv, 1e-12)?;
        assert_near("initial_state_grad", &gradients.initial_state_grad, &initial_state_grad, 1e-12)?;
    }

    #[test]
    fn oracle_meets_finite_differences(sequence in sequence(), direction in 0..1_000_000_u64) {
        let gradients = sequence.gradients();
        type Field = fn(&mut Sequence) -> &mut Vec<f64>;
        let fields: [(&str, Field, &[f64]); 4] = [
            ("dq", |s| &mut s.q, &gradients.dq),
            ("dk", |s| &mut s.k, &gradients.dk),
            ("dv", |s| &mut s.v, &gradients.dv),
            ("initial_state_grad", |s| &mut s.initial_state, &gradients.initial_state_grad),
        ];
        // The loss is linear in each input, so the central difference along a direction is exact up to rounding.
        for (name, field, gradient) in fields {
            let direction: Vec<f64> =
                randn::<f32>([1, 1, 1, gradient.len()], direction).into_iter().map(f64::from).collect();
            let at = |step: f64| {
                let mut moved = sequence.clone();
                field(&mut moved).iter_mut().zip(&direction).for_each(|(x, direction)| *x += step * direction);
                moved.loss()
            };
            let (got, expected) = ((at(1.0) - at(-1.0)) / 2.0, dot(gradient, &direction));
            let size = 1.0 + norm(gradient) + at(1.0).abs();
            prop_assert!((got - expected).abs() <= 1e-10 * size, "{name}: {got} by differences, {expected}");
        }
        // In the slope it is not: a fourth-order difference. Its step is one-sided in effect below 0, where the
        // formula still holds (the decay is then a growth).
        let at = |step: f64| {
            let mut moved = sequence.clone();
            moved.head.slope += step;
            moved.loss()
        };
        let step = 1e-4;
        let got = (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
        let size = 1.0 + gradients.slope_grad.abs() + at(0.0).abs();
        let expected = gradients.slope_grad;
        prop_assert!((got - expected).abs() <= 1e-7 * size, "slope_grad: {got} by differences, {expected}");
    }

    #[test]
    fn slope_gradient_checks_itself(sequence in sequence()) {
        let Sequence { head, q, k, v, initial_state, final_state_grad, .. } = &sequence;
        let final_state = head.forward(q, k, v, Some(initial_state)).final_state;
        let size = 1.0 + norm(&final_state) * norm(final_state_grad) + norm(&sequence.gradients().dk) * norm(k);
        let (got, expected) = (sequence.gradients().slope_check, dot(final_state_grad, &final_state));
        prop_assert!((got - expected).abs() <= 1e-12 * size, "a_N is {got}, <dS_fin, S_fin> is {expected}");
    }

    #[test]
    fn a_split_sequence_equals_one_pass(sequence in sequence(), cut in 0.0..1.0_f64) {
        let Sequence { head, seq_len, initial_state, final_state_grad, .. } = &sequence;
        let cut = (cut * (seq_len + 1) as f64) as usize;
        let forward = |s: &Sequence| head.forward(&s.q, &s.k, &s.v, Some(&s.initial_state));
        let zero = vec![0.0; initial_state.len()];

        let left = forward(&sequence.part(0, cut, initial_state, &zero));
        let right = sequence.part(cut, *seq_len, &left.final_state, final_state_grad);
        let whole = forward(&sequence);
        assert_near("o", &[left.o, forward(&right).o].concat(), &whole.o, 1e-12)?;
        assert_near("final_state", &forward(&right).final_state, &whole.final_state, 1e-12)?;

        let of_right = right.gradients();
        let of_left = sequence.part(0, cut, initial_state, &of_right.initial_state_grad).gradients();
        let whole = sequence.gradients();
        assert_near("dq", &[of_left.dq, of_right.dq].concat(), &whole.dq, 1e-12)?;
        assert_near("dk", &[of_left.dk, of_right.dk].concat(), &whole.dk, 1e-12)?;
        assert_near("dv", &[of_left.dv, of_right.dv].concat(), &whole.dv, 1e-12)?;
        assert_near("initial_state_grad", &of_left.initial_state_grad, &whole.initial_state_grad, 1e-12)?;
        let slope_grad = of_left.slope_grad + of_right.slope_grad;
        let size = 1.0 + whole.slope_grad.abs() + of_left.slope_grad.abs();
        prop_assert!((slope_grad - whole.slope_grad).abs() <= 1e-10 * size, "{slope_grad} {}", whole.slope_grad);
    }
}
