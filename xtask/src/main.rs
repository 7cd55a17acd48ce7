//! The repository's chores. `cargo xtask --help` lists them; `cargo xtask ci` is what CI runs.

mod budget;
mod bundle;
mod ci;
mod growth;
mod package;
mod ptx;
mod ptx_text;
#[path = "../../host/build/ptxas.rs"]
mod ptxas;
mod readme;
mod repo;
mod sass;
mod stub_cuda;

use clap::Parser;
use repo::Repo;
use std::{path::PathBuf, process::ExitCode};

#[derive(Parser)]
#[command(about = "The repository's chores")]
enum Command {
    /// Compile the kernels to host/ptx: PTX, one file per kernel, and sm_90a cubins
    Ptx {
        /// Write nothing; fail where a committed file differs
        #[arg(long)]
        check: bool,
    },
    /// Compare registers, spills, shared memory and instruction counts of every kernel with host/ptx/budget.toml
    Budget {
        /// Accept what differs
        #[arg(long)]
        bless: bool,
    },
    /// Make a libcuda to link against where there is no CUDA toolkit
    StubCuda,
    /// Build tests, benches and examples for a machine with a GPU and collect them in a folder
    Bundle {
        /// Where to
        #[arg(long, default_value = "bundle")]
        out: PathBuf,
    },
    /// Fill the generated blocks of README.md, and draw its figure, from benches/records and examples
    Readme {
        /// Write nothing; fail where one differs
        #[arg(long)]
        check: bool,
    },
    /// Everything that must hold beyond `cargo test --release`
    Ci,
}

fn main() -> ExitCode {
    match run(Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    let repo = Repo::find()?;
    match command {
        Command::Ptx { check: false } => ptx::write(&repo),
        Command::Ptx { check: true } => ptx::check(&repo, ptx::Assembler::IfRecorded),
        Command::Budget { bless } => budget::run(&repo, bless),
        Command::StubCuda => stub_cuda::run(&repo),
        Command::Bundle { out } => bundle::run(&repo, &out),
        Command::Readme { check } => readme::run(&repo, check),
        Command::Ci => ci::run(&repo),
    }
}
