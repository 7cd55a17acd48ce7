//! The CPU backend against the f32 matmul rate of the same machine, same crate and same threads.
//!
//! The rate of a shape counts the products that are executed, dense: per chunk of `L` rows, one application of the
//! operator multiplies `L·D·L` (P), `L·L·E` (P V), `L·D·E` (Λ Q S) and `D·L·E` (the state), so over `N` rows
//!
//! ```text
//! forward  = 2 B H N (L (D + E) + 2 D E)         backward = 3 · forward (B7)
//! ```
//!
//! with `L` = [`cpu::CHUNK`]; the half of P that the mask clears is counted, for it is computed. The first product of a
//! head (no state yet) is counted too, what segments cost (F4, when heads are few) is not. The matmul rate is that of
//! `[1024, 1024] · [1024, 1024]` in f32, measured right before and right after each shape, in samples of about the same
//! length: on a shared machine both then see the same neighbours.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use half::{bf16, f16};
use lightning_attention::{Backward, Element, Forward, Layout, Problem, View, ViewMut, cpu};

/// `B, H, N, D, E`: the reference shape, one long head, one with equal dims, one of odd dims.
const SHAPES: [[usize; 5]; 4] =
    [[6, 8, 8192, 128, 64], [1, 1, 65_536, 128, 128], [1, 16, 2048, 128, 128], [2, 8, 2000, 96, 40]];

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    let mut rows = Vec::new();
    for shape in SHAPES {
        bench::<f32>(&mut criterion, shape, &mut rows);
        bench::<bf16>(&mut criterion, shape, &mut rows);
    }
    bench::<f16>(&mut criterion, SHAPES[0], &mut rows);
    criterion.final_summary();

    let threads = rayon::current_num_threads();
    println!("\n{threads} threads, chunk of {} rows, rates in GFLOP/s", cpu::CHUNK);
    println!("{:<36} {:>9} {:>9} {:>9} {:>9}", "B x H x N x D x E", "ms", "rate", "matmul", "% matmul");
    for Row { name, flops, seconds, matmul } in rows {
        let rate = flops / seconds;
        let (ms, percent) = (seconds * 1e3, 100.0 * rate / matmul);
        println!("{name:<36} {ms:>9.2} {:>9.1} {:>9.1} {percent:>9.1}", rate / 1e9, matmul / 1e9);
    }
}

struct Row {
    name: String,
    flops: f64,
    seconds: f64,
    /// FLOP/s.
    matmul: f64,
}

fn bench<T: Element>(criterion: &mut Criterion, [b, h, n, d, e]: [usize; 5], rows: &mut Vec<Row>) {
    let problem = Problem::new(b, h, n, d, e).dtype(T::DTYPE);
    let (key, value) = (problem.key_shape(), problem.value_shape());
    let (q, k) = (randn::<T>(key, 1), randn::<T>(key, 2));
    let (v, do_) = (randn::<T>(value, 3), randn::<T>(value, 4));
    let zeros = |like: &[T]| vec![T::from_f32(0.0); like.len()];
    let (mut dq, mut dk, mut dv) = (zeros(&q), zeros(&k), zeros(&v));
    let view = |data, shape| View::contiguous(data, shape, Layout::Bhnd);

    let chunk = cpu::CHUNK;
    let forward_flops = 2.0 * (b * h * n * (chunk * (d + e) + 2 * d * e)) as f64;
    let mut measure = |op: &str, flops: f64, run: &mut dyn FnMut()| {
        let name = format!("{op} {b}x{h}x{n}x{d}x{e} {}", T::DTYPE);
        let mut samples = Vec::new();
        let before = matmul_rate();
        let mut group = criterion.benchmark_group("cpu");
        group.throughput(Throughput::Elements((b * h * n) as u64));
        group.bench_function(BenchmarkId::from_parameter(&name), |bencher| {
            bencher.iter_custom(|iterations| {
                let start = Instant::now();
                (0..iterations).for_each(|_| run());
                let elapsed = start.elapsed();
                samples.push(elapsed.as_secs_f64() / iterations as f64);
                elapsed
            });
        });
        group.finish();
        // Empty when the name was filtered out.
        if !samples.is_empty() {
            let matmul = (before + matmul_rate()) / 2.0;
            rows.push(Row { name, flops, seconds: median(&mut samples), matmul });
        }
    };
    measure("forward", forward_flops, &mut || {
        let o = ViewMut::contiguous(&mut dv, value, Layout::Bhnd);
        let tensors = Forward { q: view(&q, key), k: view(&k, key), v: view(&v, value), o };
        cpu::forward(black_box(&problem), tensors).expect("the shapes fit");
    });
    measure("backward", 3.0 * forward_flops, &mut || {
        let tensors = Backward {
            q: view(&q, key),
            k: view(&k, key),
            v: view(&v, value),
            do_: view(&do_, value),
            dq: ViewMut::contiguous(&mut dq, key, Layout::Bhnd),
            dk: ViewMut::contiguous(&mut dk, key, Layout::Bhnd),
            dv: ViewMut::contiguous(&mut dv, value, Layout::Bhnd),
        };
        cpu::backward(black_box(&problem), tensors).expect("the shapes fit");
    });
}

/// FLOP/s of f32 products of 1024³ on all threads, the median of samples of ten.
fn matmul_rate() -> f64 {
    const N: usize = 1024;
    let (a, b, mut c) = (vec![0.5_f32; N * N], vec![0.25_f32; N * N], vec![0.0_f32; N * N]);
    let mut product = || {
        // SAFETY: three distinct row-major [N, N] buffers.
        unsafe {
            gemm::gemm(
                N,
                N,
                N,
                c.as_mut_ptr(),
                1,
                N as isize,
                false,
                a.as_ptr(),
                1,
                N as isize,
                b.as_ptr(),
                1,
                N as isize,
                0.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::Rayon(0),
            );
        }
        black_box(&c);
    };
    let mut sample = || {
        let start = Instant::now();
        (0..10).for_each(|_| product());
        start.elapsed().as_secs_f64() / 10.0
    };
    let mut samples: Vec<f64> = (0..5).map(|_| sample()).collect();
    2.0 * (N * N * N) as f64 / median(&mut samples)
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Roughly normal values of standard deviation 0.1.
fn randn<T: Element>(shape: [usize; 4], seed: u64) -> Vec<T> {
    let mut state = seed;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let len = shape.iter().product();
    (0..len).map(|_| T::from_f32(((0..4).map(|_| uniform()).sum::<f32>() - 2.0) * 0.173)).collect()
}
