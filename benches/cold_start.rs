//! Cold start on the GPU: the first forward and the first backward call of a fresh process with the driver's cache off,
//! kernels loaded within them. The context's creation, which any CUDA program pays, is reported apart.
//!
//! `cargo bench --features cuda --bench cold_start -- --csv PATH`

#[cfg(feature = "cuda")]
mod common;

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("built without the feature `cuda`: nothing to measure");
}

#[cfg(feature = "cuda")]
fn main() -> anyhow::Result<()> {
    cold::main()
}

#[cfg(feature = "cuda")]
mod cold {
    use std::path::PathBuf;
    use std::process::Command;
    use std::time::Instant;

    use anyhow::{Context, Result, ensure};
    use clap::Parser;
    use lightning_attention::cuda::Engine;
    use lightning_attention::cuda::cust::stream::{Stream, StreamFlags};
    use lightning_attention::{DType, Error};

    use crate::common::gpu::{Set, machine};
    use crate::common::record::{self, Record};
    use crate::common::{Pass, SEED, median};

    /// Fresh processes whose median is reported.
    const REPETITIONS: usize = 7;

    #[derive(Parser)]
    struct Options {
        /// Appends the figures to this file.
        #[arg(long, value_name = "PATH")]
        csv: Option<PathBuf>,
        /// Measures in this process and prints the milliseconds of context, forward and backward.
        #[arg(long, hide = true)]
        child: bool,
        /// What cargo passes to every bench.
        #[arg(long, hide = true)]
        bench: bool,
    }

    pub fn main() -> Result<()> {
        let options = Options::parse();
        if options.child {
            return child();
        }
        let engine = match Engine::new(0) {
            Err(error @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
                println!("{error}: nothing to measure");
                return Ok(());
            }
            engine => engine?,
        };
        let times = (0..REPETITIONS).map(|_| spawn()).collect::<Result<Vec<[f64; 3]>>>()?;
        let [context, forward, backward] = [0, 1, 2].map(|i| median(times.iter().map(|t| t[i]).collect()));
        println!("{} on {}", SEED[0], engine.name());
        println!("context {context:.1} ms, first forward {forward:.3} ms, first backward {backward:.3} ms");
        if let Some(path) = options.csv {
            let record = |op, ms| Record {
                op,
                shape: SEED[0],
                dtype: DType::Bf16,
                ms,
                bytes: None,
                note: format!("context {context:.1} ms apart"),
            };
            let records = [record("cold_forward", forward), record("cold_backward", backward)];
            record::append(&path, &machine(&engine, 0.0), &records)?;
        }
        Ok(())
    }

    fn spawn() -> Result<[f64; 3]> {
        let output = Command::new(std::env::current_exe()?).arg("--child").env("CUDA_CACHE_DISABLE", "1").output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout)?;
        let times = text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
        times.try_into().ok().context("a child prints three times")
    }

    fn child() -> Result<()> {
        let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
        let start = Instant::now();
        let engine = Engine::new(0)?;
        let context = ms(start);
        let problem = SEED[0].problem(DType::Bf16);
        let set = Set::zeroed(&problem)?;
        let stream = Stream::new(StreamFlags::DEFAULT, None)?;

        let start = Instant::now();
        let mut attention = engine.prepare(&problem)?;
        set.enqueue(&mut attention, &stream, Pass::Forward)?;
        stream.synchronize()?;
        let forward = ms(start);
        let start = Instant::now();
        set.enqueue(&mut attention, &stream, Pass::Backward)?;
        stream.synchronize()?;
        println!("{context} {forward} {}", ms(start));
        Ok(())
    }
}
