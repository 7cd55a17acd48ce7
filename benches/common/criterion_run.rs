//! Criterion over the shapes: event time on the GPU, wall time of small shapes on the CPU.

use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use lightning_attention::DType;

use super::cpu::Tensors;
use super::{Pass, SMALL};

/// Benches one pass.
pub fn run(criterion: &mut Criterion, pass: Pass) {
    #[cfg(feature = "cuda")]
    match super::gpu::Gpu::new(0) {
        Ok(gpu) => return on_gpu(criterion, pass, &gpu),
        Err(error) => eprintln!("running on the CPU: {error}"),
    }
    on_cpu(criterion, pass);
}

#[cfg(feature = "cuda")]
fn on_gpu(criterion: &mut Criterion, pass: Pass, gpu: &super::gpu::Gpu) {
    let mut group = criterion.benchmark_group(format!("cuda_{}", pass.name()));
    for shape in &super::SUITE {
        let problem = shape.problem(DType::Bf16);
        let sets = gpu.rotated_sets(&problem, shape).expect("tensors fit the device");
        let mut attention = gpu.engine.prepare(&problem).expect("the suite is supported");
        sets[0].enqueue(&mut attention, &gpu.stream, pass).expect("the suite is supported");
        gpu.stream.synchronize().expect("a pass runs");
        let (graph, calls) =
            gpu.pass_graph(&mut attention, &sets, pass, super::gpu::CALLS).expect("a pass can be captured");
        group.throughput(Throughput::Bytes(pass.essential_bytes(shape, DType::Bf16) as u64));
        group.bench_function(BenchmarkId::from_parameter(shape), |bencher| {
            bencher.iter_custom(|iterations| {
                let replays = (iterations as usize).div_ceil(calls);
                let ms = gpu.replay_ms(&graph, replays).expect("a captured pass runs");
                std::time::Duration::from_secs_f64(ms / 1e3 * iterations as f64 / (replays * calls) as f64)
            });
        });
    }
    group.finish();
}

fn on_cpu(criterion: &mut Criterion, pass: Pass) {
    let mut group = criterion.benchmark_group(format!("cpu_{}", pass.name()));
    for shape in &SMALL {
        let mut tensors = Tensors::<bf16>::new(shape);
        group.throughput(Throughput::Bytes(pass.essential_bytes(shape, DType::Bf16) as u64));
        group.bench_function(BenchmarkId::from_parameter(shape), |bencher| {
            bencher.iter_custom(|iterations| {
                let start = Instant::now();
                (0..iterations).for_each(|_| tensors.run(pass).expect("the shapes are supported"));
                start.elapsed()
            });
        });
    }
    group.finish();
}
