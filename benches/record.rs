//! Measures every recorded shape in one run and appends the figures to a CSV file:
//! `cargo bench --features cuda --bench record -- --csv benches/records/h200/2026-12-01.csv`.
//!
//! Takes less than two minutes on an H200. Without a GPU it measures small shapes on the CPU.
//!
//! `--growth` measures how time grows with the length instead, all lengths side by side. It needs 83 GB on the GPU: two
//! sets of tensors for each length, filled on the device by repeating the same block of random values, and their
//! checkpoints. Its record is `benches/records/h200/growth.csv`, a new file each time.

mod common;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Parser;
use common::{Machine, Measurement, SMALL, Shape, cpu, record, report};
use lightning_attention::{DType, Precision};

#[derive(Parser)]
struct Options {
    /// Appends the figures to this file.
    #[arg(long, value_name = "PATH")]
    csv: Option<PathBuf>,
    /// Shapes to measure instead of the recorded ones.
    #[arg(long = "shape", value_name = "B,H,N,D,E")]
    shapes: Vec<Shape>,
    /// `fast`, or `accurate`, whose figures are recorded as `accurate forward` and `accurate backward`.
    #[arg(long, default_value = "fast", value_parser = precision)]
    precision: Precision,
    /// Measures one shape at every doubling of the length from 8192 to 262144 instead; needs a GPU.
    #[arg(long, conflicts_with = "shapes")]
    growth: bool,
    /// Also compares the results with the f64 recurrence.
    #[arg(long)]
    compare: bool,
    /// What cargo passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

fn precision(text: &str) -> Result<Precision, String> {
    let known = [Precision::Fast, Precision::Accurate];
    known.into_iter().find(|known| known.to_string() == text).ok_or_else(|| format!("`{text}` is no precision"))
}

fn main() -> Result<()> {
    let options = Options::parse();
    #[cfg(feature = "cuda")]
    let problem = |shape: &Shape| shape.problem(DType::Bf16).precision(options.precision);
    #[cfg(feature = "cuda")]
    match common::gpu::Gpu::new(0) {
        Ok(gpu) if options.growth => {
            // A call takes milliseconds at the largest length.
            let problems = common::GROWTH.map(|shape| (shape, problem(&shape)));
            let measurements = gpu.measure_together(&problems, 2, options.compare)?;
            println!("{}", report::heading(&gpu.machine));
            return measurements.iter().try_for_each(|measurement| keep(&options, &gpu.machine, measurement));
        }
        Ok(gpu) => {
            let measure = |shape: &Shape| gpu.measure(shape, &problem(shape), options.compare);
            return measure_all(&options, &common::SUITE, &gpu.machine, measure);
        }
        Err(error) => eprintln!("running on the CPU: {error}"),
    }
    ensure!(!options.growth, "`--growth` needs a GPU and the feature `cuda`");
    let measure = |shape: &Shape| cpu::measure(shape, DType::Bf16, cpu::Effort::SHORT, options.compare);
    measure_all(&options, &SMALL, &cpu::machine(), measure)
}

fn measure_all(
    options: &Options,
    shapes: &[Shape],
    machine: &Machine,
    measure: impl Fn(&Shape) -> Result<Measurement>,
) -> Result<()> {
    println!("{}", report::heading(machine));
    for shape in if options.shapes.is_empty() { shapes } else { &options.shapes } {
        keep(options, machine, &measure(shape)?)?;
    }
    Ok(())
}

/// Prints a measurement and appends it to the record.
fn keep(options: &Options, machine: &Machine, measurement: &Measurement) -> Result<()> {
    println!("{}", report::lines(machine, measurement));
    if let Some(path) = &options.csv {
        let mut records = record::of(measurement);
        for record in records.iter_mut().filter(|_| options.precision == Precision::Accurate) {
            record.op = if record.op == "forward" { "accurate forward" } else { "accurate backward" };
        }
        record::append(path, machine, &records)?;
    }
    Ok(())
}
