//! Small problems on the GPU and on the CPU backend.

use core::fmt;

use cust::stream::{Stream, StreamFlags};
use half::{bf16, f16};

use super::Engine;
use super::driver::from_cust;
use super::view::{DeviceElement, DeviceView, DeviceViewMut, download, upload};
use crate::{Backward, DType, Error, Forward, Layout, Problem, Result, View, ViewMut, cpu};

/// One output of one problem.
#[derive(Clone, Debug, PartialEq)]
pub struct SelfTestResult {
    /// The problem.
    pub problem: Problem,
    /// Segments the sequence was cut into.
    pub segments: u32,
    /// Name of the output.
    pub output: &'static str,
    /// Relative difference from the CPU backend, ‖x − ref‖ / ‖ref‖.
    pub error: f64,
    /// Its bound.
    pub bound: f64,
}

/// What [`Engine::self_test`] compared, all of it within its bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct SelfTestReport {
    /// Each output of each problem.
    pub results: Vec<SelfTestResult>,
}

impl fmt::Display for SelfTestReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for SelfTestResult { problem: p, segments, output, error, bound } in &self.results {
            writeln!(
                f,
                "{}×{}×{}×{}×{} {} in {segments} segment(s), {output}: {error:.1e} of {bound:.1e}",
                p.batch, p.heads, p.seq_len, p.head_dim, p.value_dim, p.dtype
            )?;
        }
        Ok(())
    }
}

pub(super) fn run(engine: &Engine) -> Result<SelfTestReport> {
    engine.shared.context.with(|| {
        let stream = Stream::new(StreamFlags::DEFAULT, None).map_err(from_cust("cuStreamCreate"))?;
        let mut report = SelfTestReport { results: Vec::new() };
        // 200 rows end in a tail chunk of 8; two segments go through the state and scan kernels.
        for (head_dim, value_dim) in [(64, 64), (128, 64)] {
            for segments in [1, 2] {
                let problem = Problem::new(1, 3, 200, head_dim, value_dim);
                case::<bf16>(engine, &stream, &problem.clone().dtype(DType::Bf16), segments, 4e-3, &mut report)?;
                case::<f16>(engine, &stream, &problem.dtype(DType::F16), segments, 7e-4, &mut report)?;
            }
        }
        Ok(report)
    })
}

/// The bound allows for the rounding of both sides' outputs.
fn case<T: DeviceElement>(
    engine: &Engine,
    stream: &Stream,
    problem: &Problem,
    segments: u32,
    bound: f64,
    report: &mut SelfTestReport,
) -> Result<()> {
    let plan = engine.plan(problem)?.with_segments(segments, segments);
    let mut attention = engine.prepare_plan(plan)?;
    let (key, value) = (problem.key_shape(), problem.value_shape());
    let [q, k] = [1, 2].map(|seed| values::<T>(seed, key));
    let [v, do_] = [3, 4].map(|seed| values::<T>(seed, value));
    let poison = T::from_f32(f32::NAN);
    let (mut dq, mut dk) = (vec![poison; q.len()], vec![poison; q.len()]);
    let (mut o, mut dv) = (vec![poison; v.len()], vec![poison; v.len()]);

    let (q_gpu, k_gpu, v_gpu, do_gpu) = (upload(&q)?, upload(&k)?, upload(&v)?, upload(&do_)?);
    let (mut o_gpu, mut dq_gpu, mut dk_gpu, mut dv_gpu) = (upload(&o)?, upload(&dq)?, upload(&dk)?, upload(&dv)?);
    let layout = Layout::Bhnd;
    attention.forward_blocking::<T>(
        stream,
        Forward {
            q: DeviceView::contiguous(&q_gpu, key, layout),
            k: DeviceView::contiguous(&k_gpu, key, layout),
            v: DeviceView::contiguous(&v_gpu, value, layout),
            o: DeviceViewMut::contiguous(&mut o_gpu, value, layout),
        },
    )?;
    attention.backward_blocking::<T>(
        stream,
        Backward {
            q: DeviceView::contiguous(&q_gpu, key, layout),
            k: DeviceView::contiguous(&k_gpu, key, layout),
            v: DeviceView::contiguous(&v_gpu, value, layout),
            do_: DeviceView::contiguous(&do_gpu, value, layout),
            dq: DeviceViewMut::contiguous(&mut dq_gpu, key, layout),
            dk: DeviceViewMut::contiguous(&mut dk_gpu, key, layout),
            dv: DeviceViewMut::contiguous(&mut dv_gpu, value, layout),
        },
    )?;

    let (q, k) = (View::contiguous(&q, key, layout), View::contiguous(&k, key, layout));
    let (v, do_) = (View::contiguous(&v, value, layout), View::contiguous(&do_, value, layout));
    cpu::forward(problem, Forward { q, k, v, o: ViewMut::contiguous(&mut o, value, layout) })?;
    cpu::backward(
        problem,
        Backward {
            q,
            k,
            v,
            do_,
            dq: ViewMut::contiguous(&mut dq, key, layout),
            dk: ViewMut::contiguous(&mut dk, key, layout),
            dv: ViewMut::contiguous(&mut dv, value, layout),
        },
    )?;

    for (output, got, expected) in [("o", o_gpu, o), ("dq", dq_gpu, dq), ("dk", dk_gpu, dk), ("dv", dv_gpu, dv)] {
        let error = relative_error(&download::<T>(&got)?, &expected);
        // A NaN is no less than the bound.
        if error.is_nan() || error > bound {
            return Err(Error::SelfTest { output, error, bound });
        }
        let segments = attention.plan().forward().segments;
        report.results.push(SelfTestResult { problem: problem.clone(), segments, output, error, bound });
    }
    Ok(())
}

fn relative_error<T: DeviceElement>(got: &[T], expected: &[T]) -> f64 {
    let (difference, norm) = got.iter().zip(expected).fold((0.0, 0.0), |(difference, norm), (x, y)| {
        let (x, y) = (f64::from(x.to_f32()), f64::from(y.to_f32()));
        (difference + (x - y) * (x - y), norm + y * y)
    });
    (difference / norm).sqrt()
}

/// Values in −1 … 1 from a linear congruential generator.
fn values<T: DeviceElement>(seed: u64, shape: [usize; 4]) -> Vec<T> {
    let mut state = seed;
    (0..shape.iter().product())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            T::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
        })
        .collect()
}
