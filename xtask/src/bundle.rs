//! `cargo xtask bundle`: tests, benches and examples with the CUDA backend, to be run on a machine that has a driver
//! and nothing else.

use crate::{
    repo::{Repo, output},
    stub_cuda,
};
use anyhow::{Context, Result};
use serde_json::Value;
use std::{fs, path::Path, process::Command};

pub fn run(repo: &Repo, out: &Path) -> Result<()> {
    let mut cargo = repo.cargo(&["build", "--release", "--features=cuda", "--tests", "--benches", "--examples"]);
    cargo
        .args(["--package=lightning-attention-suite", "--message-format=json-render-diagnostics"])
        .env(stub_cuda::VARIABLE, stub_cuda::make(repo)?);
    let messages = output(&mut cargo)?;
    let out = repo.root.join(out);
    if out.exists() {
        fs::remove_dir_all(&out)?;
    }
    fs::create_dir_all(&out)?;
    let mut bytes = 0;
    for message in messages.lines() {
        let Some((name, executable)) = artifact(&serde_json::from_str(message)?) else { continue };
        let copy = out.join(&name);
        fs::copy(&executable, &copy).with_context(|| executable.clone())?;
        output(Command::new("strip").arg("--strip-debug").arg(&copy))?;
        let len = fs::metadata(&copy)?.len();
        println!("{name:32} {:6} KiB", len / 1024);
        bytes += len;
    }
    let commit = output(&mut repo.command("git", &["rev-parse", "HEAD"]))?;
    let dirty = !output(&mut repo.command("git", &["status", "--porcelain"]))?.is_empty();
    fs::write(out.join("commit.txt"), format!("{}{}\n", commit.trim(), if dirty { " dirty" } else { "" }))?;
    println!("{}: {} MiB", out.display(), bytes >> 20);
    Ok(())
}

/// Name in the bundle and path of an executable that cargo reports.
fn artifact(message: &Value) -> Option<(String, String)> {
    let executable = message["executable"].as_str()?;
    let target = &message["target"];
    let kind = target["kind"][0].as_str()?;
    matches!(kind, "test" | "bench" | "example")
        .then(|| (format!("{kind}-{}", target["name"].as_str().unwrap_or_default()), executable.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_get_stable_names() {
        let message =
            |kind| serde_json::json!({"executable": "/t/gpu-12ab", "target": {"kind": [kind], "name": "gpu"}});
        assert_eq!(artifact(&message("test")), Some(("test-gpu".into(), "/t/gpu-12ab".into())));
        assert_eq!(artifact(&message("custom-build")), None);
        assert_eq!(artifact(&serde_json::json!({"reason": "build-finished"})), None);
    }
}
