//! Where things are, and how commands are run.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The workspace.
pub struct Repo {
    pub root: PathBuf,
    pub target: PathBuf,
}

impl Repo {
    pub fn find() -> Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
        let mut cargo = Command::new(cargo());
        cargo.args(["metadata", "--format-version=1", "--no-deps", "--manifest-path"]).arg(manifest);
        let metadata = json(&mut cargo)?;
        let path =
            |key: &str| metadata[key].as_str().map(PathBuf::from).with_context(|| format!("cargo metadata: no {key}"));
        Ok(Self { root: path("workspace_root")?, target: path("target_directory")? })
    }

    /// The folder of the generated kernels.
    pub fn ptx(&self) -> PathBuf {
        self.root.join("host/ptx")
    }

    /// `program args…` in the root of the workspace.
    pub fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root).args(args);
        command
    }

    /// `cargo args…` in the root of the workspace.
    pub fn cargo(&self, args: &[&str]) -> Command {
        self.command(&cargo(), args)
    }
}

fn cargo() -> String {
    env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

/// Runs a command silently; an error holds all it printed.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {command:?}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        bail!("{program} {}\n{stdout}{}", args.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(stdout)
}

/// Runs a command silently and reads the JSON that it prints.
pub fn json(command: &mut Command) -> Result<Value> {
    Ok(serde_json::from_str(&output(command)?)?)
}
