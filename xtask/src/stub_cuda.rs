//! `cargo xtask stub-cuda`: a `libcuda` to link against. It has every symbol that `cust_raw` declares; each function
//! answers `CUDA_ERROR_STUB_LIBRARY`, so a program that gets it instead of a driver says so and ends.

use crate::repo::{Repo, json, output};
use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

/// What the build of `cust_raw` reads.
pub const VARIABLE: &str = "CUDA_LIBRARY_PATH";

pub fn run(repo: &Repo) -> Result<()> {
    println!("{VARIABLE}={} cargo build --features cuda", make(repo)?.display());
    Ok(())
}

/// Makes the library and returns the value for [`VARIABLE`].
pub fn make(repo: &Repo) -> Result<PathBuf> {
    let metadata = json(&mut repo.cargo(&["metadata", "--format-version=1", "--all-features"]))?;
    let packages = metadata["packages"].as_array().context("cargo metadata: no packages")?;
    let cust_raw =
        packages.iter().find(|package| package["name"] == "cust_raw").context("cust_raw is not a dependency")?;
    let manifest = cust_raw["manifest_path"].as_str().context("cargo metadata: no manifest_path")?;
    let bindings = fs::read_to_string(Path::new(manifest).with_file_name("src").join("cuda.rs"))?;
    let source = source(&bindings);
    ensure!(source.contains("cuInit"), "found no functions in the bindings of cust_raw");

    let root = repo.target.join("stub-cuda");
    let folder = root.join("lib64");
    let (file, library, link) = (root.join("stub.c"), folder.join("libcuda.so"), folder.join("libcuda.so.1"));
    if library.is_file() && link.exists() && fs::read_to_string(&file).is_ok_and(|old| old == source) {
        return Ok(root);
    }
    fs::create_dir_all(&folder)?;
    fs::write(&file, source)?;
    let mut cc = repo.command("cc", &["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]);
    output(cc.arg(&library).arg(&file))?;
    if !link.exists() {
        symlink("libcuda.so", link)?;
    }
    Ok(root)
}

fn source(bindings: &str) -> String {
    let names: BTreeSet<&str> = bindings
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("pub fn ")?.split('(').next())
        .filter(|name| name.starts_with("cu"))
        .collect();
    let mut source = String::new();
    for name in names {
        let _ = match name {
            // Users print these and take failure for granted nowhere.
            "cuGetErrorString" | "cuGetErrorName" => writeln!(
                source,
                "int {name}(int error, const char **text) {{ *text = \"CUDA error from the stub libcuda: no driver is loaded\"; return 0; }}"
            ),
            _ => writeln!(source, "int {name}(void) {{ return 34; /* CUDA_ERROR_STUB_LIBRARY */ }}"),
        };
    }
    source
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_function_is_defined() {
        let source = super::source(
            "extern \"C\" {\n    pub fn cuInit(Flags: c_uint) -> CUresult;\n    pub fn cuMemAlloc_v2(\n        a: u64,\n",
        );
        assert!(source.contains("int cuInit(void)") && source.contains("int cuMemAlloc_v2(void)"), "{source}");
    }
}
