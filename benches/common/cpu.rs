//! Measurements on the CPU backend.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Result;
use lightning_attention::{Backward, DType, Element, Forward, Layout, Problem, View, ViewMut, cpu};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

use super::oracle::{self, HeadRows};
use super::{Machine, Measurement, Pass, Shape, Timing, gbps, median};

/// How long a pass is repeated.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    pub least: usize,
    pub most: usize,
    pub budget: Duration,
}

impl Effort {
    /// Some seconds for each pass.
    pub const SHORT: Effort = Effort { least: 3, most: 30, budget: Duration::from_secs(4) };
}

/// Standard normal values over ten; the same for the same seed.
pub fn values<T: Element>(seed: u64, len: usize) -> Vec<T> {
    const BLOCK: usize = 1 << 16;
    let mut values = vec![T::from_f32(0.0); len];
    values.par_chunks_mut(BLOCK).enumerate().for_each(|(block, chunk)| {
        let mut rng = SmallRng::seed_from_u64(seed << 32 | block as u64);
        for x in chunk {
            let normal: f32 = StandardNormal.sample(&mut rng);
            *x = T::from_f32(normal / 10.0);
        }
    });
    values
}

/// All tensors of a problem in host memory, contiguous `[B, H, N, dim]`, outputs set to NaN.
pub struct Tensors<T> {
    pub problem: Problem,
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub do_: Vec<T>,
    pub o: Vec<T>,
    pub dq: Vec<T>,
    pub dk: Vec<T>,
    pub dv: Vec<T>,
}

impl<T: Element> Tensors<T> {
    pub fn new(shape: &Shape) -> Self {
        let problem = shape.problem(T::DTYPE);
        let (key, value) = (shape.rows() * shape.head_dim, shape.rows() * shape.value_dim);
        let nan = T::from_f32(f32::NAN);
        Tensors {
            problem,
            q: values(1, key),
            k: values(2, key),
            v: values(3, value),
            do_: values(4, value),
            o: vec![nan; value],
            dq: vec![nan; key],
            dk: vec![nan; key],
            dv: vec![nan; value],
        }
    }

    /// Runs one pass.
    pub fn run(&mut self, pass: Pass) -> lightning_attention::Result<()> {
        let (key, value, layout) = (self.problem.key_shape(), self.problem.value_shape(), Layout::Bhnd);
        let (q, k) = (View::contiguous(&self.q, key, layout), View::contiguous(&self.k, key, layout));
        let v = View::contiguous(&self.v, value, layout);
        match pass {
            Pass::Forward | Pass::CheckpointedForward => {
                let o = ViewMut::contiguous(&mut self.o, value, layout);
                cpu::forward(&self.problem, Forward { q, k, v, o })
            }
            Pass::Backward | Pass::CheckpointedBackward => {
                let do_ = View::contiguous(&self.do_, value, layout);
                let dq = ViewMut::contiguous(&mut self.dq, key, layout);
                let dk = ViewMut::contiguous(&mut self.dk, key, layout);
                let dv = ViewMut::contiguous(&mut self.dv, value, layout);
                cpu::backward(&self.problem, Backward { q, k, v, do_, dq, dk, dv })
            }
        }
    }

    fn head(&self, index: usize) -> HeadRows {
        let rows = |values: &[T], dim: usize| {
            let len = self.problem.seq_len * dim;
            values[index * len..][..len].iter().map(|x| f64::from(x.to_f32())).collect()
        };
        let (d, e) = (self.problem.head_dim, self.problem.value_dim);
        HeadRows {
            q: rows(&self.q, d),
            k: rows(&self.k, d),
            v: rows(&self.v, e),
            do_: rows(&self.do_, e),
            o: rows(&self.o, e),
            dq: rows(&self.dq, d),
            dk: rows(&self.dk, d),
            dv: rows(&self.dv, e),
        }
    }
}

/// Measures both passes of a shape.
pub fn measure(shape: &Shape, dtype: DType, effort: Effort, compare: bool) -> Result<Measurement> {
    match dtype {
        DType::Bf16 => measure_typed::<half::bf16>(shape, effort, compare),
        DType::F16 => measure_typed::<half::f16>(shape, effort, compare),
        DType::F32 => measure_typed::<f32>(shape, effort, compare),
    }
}

fn measure_typed<T: Element>(shape: &Shape, effort: Effort, compare: bool) -> Result<Measurement> {
    let mut tensors = Tensors::<T>::new(shape);
    let mut time = |pass| -> Result<Timing> {
        let first_ms = time_ms(|| tensors.run(pass))?;
        let start = Instant::now();
        let mut times = Vec::new();
        while times.len() < effort.least || (times.len() < effort.most && start.elapsed() < effort.budget) {
            times.push(time_ms(|| tensors.run(pass))?);
        }
        let repetitions = times.len();
        let note = format!("{} threads", rayon::current_num_threads());
        Ok(Timing { pass, first_ms, warm_ms: median(times), repetitions, note })
    };
    let timings = vec![time(Pass::Forward)?, time(Pass::Backward)?];
    let errors = if compare {
        let heads = oracle::heads_to_compare(&tensors.problem);
        let heads: Vec<(usize, HeadRows)> = heads.into_iter().map(|head| (head, tensors.head(head))).collect();
        Some(oracle::errors(&tensors.problem, &heads)?)
    } else {
        None
    };
    Ok(Measurement { shape: *shape, dtype: T::DTYPE, timings, errors: [errors, None] })
}

fn time_ms(body: impl FnOnce() -> lightning_attention::Result<()>) -> Result<f64> {
    let start = Instant::now();
    body()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// This machine, with the rate of a copy by all threads.
pub fn machine() -> Machine {
    const BYTES: usize = 256 << 20;
    let threads = rayon::current_num_threads();
    let (from, mut to) = (vec![1_u8; BYTES], vec![0_u8; BYTES]);
    let mut copy = || {
        let start = Instant::now();
        let part = BYTES.div_ceil(threads);
        to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(|(to, from)| to.copy_from_slice(from));
        start.elapsed().as_secs_f64() * 1e3
    };
    copy();
    let copy_gbps = gbps(2 * BYTES, median((0..9).map(|_| copy()).collect()));
    let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu_info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    let device = format!("{} ({threads} threads)", model.unwrap_or(std::env::consts::ARCH));
    Machine { backend: "cpu", device, driver: String::new(), copy_gbps }
}
