//! The published crates, as a user meets them: packed, unpacked, and built by a stable compiler with nothing else.

use crate::{
    ptxas::{self, Ptxas},
    repo::{Repo, output},
    stub_cuda,
};
use anyhow::{Context, Result, ensure};
use lightning_attention_kernels::variants::VARIANTS;
use std::{fs, path::Path};

/// Published crates, in order.
const CRATES: [&str; 2] = ["lightning-attention-kernels", "lightning-attention"];

pub fn check(repo: &Repo) -> Result<()> {
    let list = output(&mut repo.cargo(&["package", "--list", "--allow-dirty", "--package", CRATES[1]]))?;
    for variant in VARIANTS {
        for path in [format!("ptx/{}.ptx", variant.entry), format!("ptx/sm_90a/{}.cubin", variant.entry)] {
            ensure!(list.lines().any(|line| line == path), "{} would be published without {path}", CRATES[1]);
        }
    }
    // Packed in one call the crates resolve each other, and neither need be on a registry.
    let mut cargo = repo.cargo(&["package", "--allow-dirty", "--no-verify"]);
    output(cargo.args(CRATES.map(|name| format!("--package={name}"))))?;

    let consumer = repo.target.join("consumer");
    let crates = consumer.join("crates");
    if crates.exists() {
        fs::remove_dir_all(&crates)?;
    }
    for name in CRATES {
        unpack(repo, name, &crates.join(name))?;
    }
    fs::create_dir_all(consumer.join("src"))?;
    fs::write(consumer.join("Cargo.toml"), manifest())?;
    fs::write(consumer.join("src/main.rs"), "use lightning_attention as _;\n\nfn main() {}\n")?;
    fs::copy(repo.root.join("Cargo.lock"), consumer.join("Cargo.lock"))?;
    // Named, an assembler that fails fails the build.
    let ptxas = Ptxas::find().map_err(|e| anyhow::anyhow!("{e}"))?;
    let stub = stub_cuda::make(repo)?;
    for features in ["", "cuda"] {
        let mut cargo = repo.cargo(&["build", "--features", features]);
        cargo.current_dir(&consumer).env("CARGO_TARGET_DIR", consumer.join("target"));
        cargo.env(stub_cuda::VARIABLE, &stub).env(ptxas::VARIABLE, &ptxas.path).env_remove("RUSTC_BOOTSTRAP");
        output(&mut cargo)?;
    }
    Ok(())
}

fn unpack(repo: &Repo, name: &str, folder: &Path) -> Result<()> {
    let root: toml::Table = fs::read_to_string(repo.root.join("Cargo.toml"))?.parse()?;
    let version = root["workspace"]["package"]["version"].as_str().context("the workspace has no version")?;
    let archive = repo.target.join(format!("package/{name}-{version}.crate"));
    fs::create_dir_all(folder)?;
    output(repo.command("tar", &["-x", "--strip-components=1", "-f"]).arg(archive).arg("-C").arg(folder))?;
    Ok(())
}

fn manifest() -> String {
    let [kernels, host] = CRATES;
    format!(
        "[package]\nname = \"consumer\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [features]\ncuda = [\"{host}/cuda\"]\n\n\
         [dependencies]\n{host} = {{ path = \"crates/{host}\" }}\n\n\
         [patch.crates-io]\n{kernels} = {{ path = \"crates/{kernels}\" }}\n"
    )
}
