//! `cargo xtask ci`: what must hold beyond `cargo test --release`. Nothing here is skipped for want of a tool.

use crate::{
    budget, package, ptx,
    ptxas::Ptxas,
    readme,
    repo::{Repo, output},
    sass, stub_cuda,
};
use anyhow::{Context, Result};
use std::time::Instant;

pub fn run(repo: &Repo) -> Result<()> {
    let start = Instant::now();
    let ptxas = Ptxas::find().map_err(|e| anyhow::anyhow!("{e}"))?;
    sass::find_nvdisasm(&ptxas.path)?;
    let stub = stub_cuda::make(repo)?;
    let cargo = |args: &str, env: &[(&str, &str)]| {
        let args: Vec<&str> = args.split(' ').collect();
        let mut cargo = repo.cargo(&args);
        cargo.env(stub_cuda::VARIABLE, &stub).env("LD_LIBRARY_PATH", stub.join("lib64"));
        // The kernels for other architectures are assembled by the package step.
        cargo.env("LIGHTNING_ATTENTION_CUDA_ARCHS", "").env("CARGO_TERM_QUIET", "true").envs(env.iter().copied());
        output(&mut cargo).map(drop)
    };
    let cargo_step = |args: &str, env: &[(&str, &str)]| step(&format!("cargo {args}"), || cargo(args, env));
    let deny = [("RUSTDOCFLAGS", "-Dwarnings")];

    cargo_step("fmt --all --check", &[])?;
    cargo_step("clippy --workspace --all-targets -- -Dwarnings", &[])?;
    cargo_step("clippy --package lightning-attention-kernels --no-default-features -- -Dwarnings", &[])?;
    cargo_step("clippy --package lightning-attention-kernels --features sim --all-targets -- -Dwarnings", &[])?;
    cargo_step("clippy --workspace --all-targets --features cuda -- -Dwarnings", &[])?;
    cargo_step("doc --workspace --exclude xtask --no-deps", &deny)?;
    cargo_step("doc --package lightning-attention --no-deps --features cuda", &deny)?;
    cargo_step("test --release --package lightning-attention --lib --features cuda", &[])?;
    cargo_step("test --release --package lightning-attention --doc --features cuda", &[])?;
    step("ptx --check", || ptx::check(repo, ptx::Assembler::Required))?;
    step("budget", || budget::run(repo, false))?;
    step("readme --check", || readme::run(repo, true))?;
    step("package", || package::check(repo))?;
    println!("all of it in {:.0} s", start.elapsed().as_secs_f32());
    Ok(())
}

fn step(name: &str, body: impl FnOnce() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    body().with_context(|| format!("failed: {name}"))?;
    println!("ok  {:6.1} s  {name}", start.elapsed().as_secs_f32());
    Ok(())
}
