//! The seed's benchmark: forward and backward on its four shapes, bf16, ALiBi slopes, inputs `randn/10`.
//!
//! Reports, for each shape and pass, the first call in this process, the warm median, the rate on essential bytes, that
//! rate against a copy measured in the same run, and the errors against the f64 recurrence. Runs on the GPU where the
//! feature `cuda` is on and a device is there, else on the CPU.

#[path = "../benches/common/mod.rs"]
mod common;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use common::{Machine, Measurement, SEED, Shape, cpu, record, report};
use indicatif::{ProgressBar, ProgressStyle};
use lightning_attention::DType;

#[derive(Parser)]
#[command(about = "Lightning Attention-2, forward and backward, on the seed benchmark's shapes")]
struct Options {
    /// A shape instead of the four of the seed; may be given several times.
    #[arg(long = "shape", value_name = "B,H,N,D,E")]
    shapes: Vec<Shape>,
    /// Where to run.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    backend: Backend,
    /// Element type of the tensors.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// Appends the figures to this file.
    #[arg(long, value_name = "PATH")]
    csv: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// The GPU when there is one.
    Auto,
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    Bf16,
    F16,
    F32,
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => DType::Bf16,
            Dtype::F16 => DType::F16,
            Dtype::F32 => DType::F32,
        }
    }
}

/// The backend that measures.
enum Runner {
    Cpu(Machine),
    #[cfg(feature = "cuda")]
    Cuda(Box<common::gpu::Gpu>),
}

impl Runner {
    fn new(backend: Backend) -> Result<Self> {
        if backend != Backend::Cpu {
            match Self::cuda() {
                Ok(runner) => return Ok(runner),
                Err(error) if backend == Backend::Cuda => return Err(error),
                Err(error) => eprintln!("running on the CPU: {error}"),
            }
        }
        Ok(Runner::Cpu(cpu::machine()))
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> Result<Self> {
        Ok(Runner::Cuda(Box::new(common::gpu::Gpu::new(0)?)))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda() -> Result<Self> {
        anyhow::bail!("built without the feature `cuda`")
    }

    fn machine(&self) -> &Machine {
        match self {
            Runner::Cpu(machine) => machine,
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => &gpu.machine,
        }
    }

    fn measure(&self, shape: &Shape, dtype: DType) -> Result<Measurement> {
        match self {
            Runner::Cpu(_) => cpu::measure(shape, dtype, cpu::Effort::SHORT, true),
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => gpu.measure(shape, &shape.problem(dtype), true),
        }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let shapes = if options.shapes.is_empty() { SEED.to_vec() } else { options.shapes };
    let dtype = options.dtype.into();

    // indicatif draws nothing when standard error is not a terminal.
    let progress = ProgressBar::new(shapes.len() as u64);
    progress.set_style(ProgressStyle::with_template("{spinner} {pos}/{len} {msg} [{elapsed}]")?);
    progress.enable_steady_tick(std::time::Duration::from_millis(100));
    progress.set_message("copy rate");

    let runner = progress.suspend(|| Runner::new(options.backend))?;
    let machine = runner.machine().clone();
    let mut measurements = Vec::new();
    for shape in &shapes {
        progress.set_message(shape.to_string());
        measurements.push(runner.measure(shape, dtype)?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    println!("{}", report::heading(&machine));
    for measurement in &measurements {
        println!("{}", report::lines(&machine, measurement));
    }
    if let Some(path) = options.csv {
        let records: Vec<record::Record> = measurements.iter().flat_map(record::of).collect();
        record::append(&path, &machine, &records)?;
    }
    Ok(())
}
