//! `cargo xtask ptx`: the kernels, compiled. `host/ptx` holds one PTX file per row of `VARIANTS`, its sm_90a cubin, and
//! `toolchain.toml`, which says what made them.

use crate::{
    ptx_text::{Bounds, Module},
    ptxas::{Ptxas, parallel},
    repo::{Repo, output},
};
use anyhow::{Context, Result, bail, ensure};
use lightning_attention_kernels::variants::{Arch, VARIANTS};
use sha2::{Digest, Sha256};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

/// Cubins for this one are committed.
const CUBIN_ARCH: &str = "sm_90a";
const TOOLCHAIN: &str = "toolchain.toml";

/// What `check` does about cubins when the assembler at hand did not make them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Assembler {
    /// Trusts the recorded hashes.
    IfRecorded,
    /// Fails.
    Required,
}

/// Path in `host/ptx` → contents.
type Files = BTreeMap<PathBuf, Vec<u8>>;

pub fn write(repo: &Repo) -> Result<()> {
    let ptxas = Ptxas::find().map_err(|e| anyhow::anyhow!("{e}"))?;
    let mut files = compile(repo)?;
    let toolchain = toolchain(repo, &ptxas, &files)?;
    files.extend(assemble(repo, &ptxas, &files)?);
    files.insert(TOOLCHAIN.into(), toolchain.into_bytes());

    let folder = repo.ptx();
    let (mut written, mut bytes) = (0, 0);
    for (path, contents) in &files {
        bytes += contents.len();
        let path = folder.join(path);
        if fs::read(&path).is_ok_and(|old| old == *contents) {
            continue;
        }
        fs::create_dir_all(path.parent().context("a file is in a folder")?)?;
        fs::write(&path, contents)?;
        written += 1;
    }
    for path in committed(repo)?.difference(&files.into_keys().collect()) {
        fs::remove_file(folder.join(path))?;
    }
    println!("{} kernels, {} KiB; {written} files written", VARIANTS.len(), bytes.div_ceil(1024));
    Ok(())
}

pub fn check(repo: &Repo, assembler: Assembler) -> Result<()> {
    let files = compile(repo)?;
    let recorded = fs::read_to_string(repo.ptx().join(TOOLCHAIN)).with_context(|| format!("host/ptx/{TOOLCHAIN}"))?;
    let table: toml::Table = recorded.parse()?;
    let made_by = |tool: &str| table.get(tool).and_then(|version| version.as_str()).unwrap_or("of unknown version");
    let recorded_ptxas = made_by("ptxas");
    let mut wrong = BTreeSet::new();
    let rustc = rustc(repo)?;
    if made_by("rustc") != rustc {
        wrong.insert(format!("{TOOLCHAIN}: made by rustc {}, this is {rustc}", made_by("rustc")));
    }
    let mut expected: BTreeSet<PathBuf> = files.keys().cloned().collect();
    for (path, ptx) in &files {
        let cubin = cubin_path(path);
        let entry = path.with_extension("");
        let hash = table.get(CUBIN_ARCH).and_then(|hashes| hashes.get(entry.to_string_lossy().as_ref()));
        if hash.and_then(|h| h.as_str()) != Some(&hash_of(ptx)) {
            wrong.insert(format!("{}: made from another {}", cubin.display(), path.display()));
        }
        expected.insert(cubin);
    }
    expected.insert(TOOLCHAIN.into());
    wrong.extend(differing(repo, &files));
    for path in committed(repo)?.symmetric_difference(&expected) {
        wrong.insert(format!(
            "{}: {}",
            path.display(),
            if expected.contains(path) { "missing" } else { "not of any variant" }
        ));
    }

    let ptxas = Ptxas::find().map_err(|e| anyhow::anyhow!("{e}"));
    match ptxas {
        Ok(ptxas) if ptxas.version.to_string() == recorded_ptxas => {
            wrong.extend(differing(repo, &assemble(repo, &ptxas, &files)?));
        }
        _ if assembler == Assembler::IfRecorded => {
            println!("cubins not reassembled: no ptxas {recorded_ptxas} at hand")
        }
        Ok(ptxas) => bail!("ptxas {recorded_ptxas} is needed, this is {}", ptxas.version),
        Err(reason) => return Err(reason),
    }
    if !wrong.is_empty() {
        let list: Vec<_> = wrong.into_iter().collect();
        bail!("host/ptx is not what `cargo xtask ptx` makes:\n  {}", list.join("\n  "));
    }
    Ok(())
}

/// The PTX of every variant.
fn compile(repo: &Repo) -> Result<Files> {
    let mut files = Files::new();
    let mut orphans = BTreeSet::new();
    let mut archs: Vec<Arch> = Vec::new();
    for variant in VARIANTS {
        if !archs.contains(&variant.arch) {
            archs.push(variant.arch);
        }
    }
    for arch in archs {
        let module = module(repo, arch)?;
        orphans.extend(module.entries().map(str::to_owned));
        for variant in VARIANTS.iter().filter(|variant| variant.arch == arch) {
            ensure!(orphans.contains(variant.entry), "kernels-gpu has no entry for the row {}", variant.entry);
            let bounds = Bounds {
                threads: variant.threads,
                min_blocks: variant.min_blocks,
                tensor_maps: variant.arch == Arch::Sm90,
            };
            files.insert(format!("{}.ptx", variant.entry).into(), module.extract(variant.entry, &bounds)?.into_bytes());
        }
    }
    for variant in VARIANTS {
        orphans.remove(variant.entry);
    }
    ensure!(orphans.is_empty(), "VARIANTS has no row for the entries {orphans:?}");
    Ok(files)
}

/// `kernels-gpu` for one architecture, all kernels in one.
fn module(repo: &Repo, arch: Arch) -> Result<Module> {
    // `cp.async` with an L2 prefetch size is PTX 7.4.
    let (cpu, isa) = match arch {
        Arch::Sm80 => ("sm_80", "ptx74"),
        Arch::Sm90 => ("sm_90a", "ptx80"),
    };
    let target = repo.target.join("ptx");
    let mut cargo = repo.cargo(&["rustc", "--package=lightning-attention-kernels", "--lib", "--release"]);
    cargo
        .args([
            "--message-format=json-render-diagnostics",
            "--target=nvptx64-nvidia-cuda",
            "-Zbuild-std=core",
            "--target-dir",
        ])
        .arg(&target);
    // Clippy does not see this target, so warnings are errors here.
    cargo.args(["--", "--emit=asm", "-Dwarnings", &format!("-Ctarget-cpu={cpu}"), &format!("-Ctarget-feature=+{isa}")]);
    cargo.env("RUSTC_BOOTSTRAP", "1").env("CARGO_ENCODED_RUSTFLAGS", "");
    let profile =
        [("DEBUG", "false"), ("PANIC", "abort"), ("CODEGEN_UNITS", "1"), ("LTO", "off"), ("INCREMENTAL", "false")];
    cargo.envs(profile.map(|(key, value)| (format!("CARGO_PROFILE_RELEASE_{key}"), value)));
    let asm = asm(&output(&mut cargo)?)?;
    Module::parse(&fs::read_to_string(&asm).with_context(|| format!("{}: remove {}", asm.display(), target.display()))?)
}

/// Path of the assembly text, beside the metadata that cargo reports.
fn asm(messages: &str) -> Result<PathBuf> {
    for line in messages.lines() {
        let message: serde_json::Value = serde_json::from_str(line)?;
        for file in message["filenames"].as_array().into_iter().flatten().filter_map(|file| file.as_str()) {
            if let Some((folder, stem)) = file.strip_suffix(".rmeta").and_then(|file| file.rsplit_once("/lib"))
                && stem.starts_with("lightning_attention_kernels")
            {
                return Ok(Path::new(folder).join(stem).with_extension("s"));
            }
        }
    }
    bail!("cargo reports no artifact of kernels-gpu")
}

/// The cubin of every PTX file.
fn assemble(repo: &Repo, ptxas: &Ptxas, files: &Files) -> Result<Files> {
    let work = repo.target.join("ptx/cubin");
    fs::create_dir_all(&work)?;
    let files: Vec<_> = files.iter().collect();
    let cubins = parallel(&files, |(path, ptx)| {
        let (input, cubin) = (work.join(path), work.join(path.with_extension("cubin")));
        fs::write(&input, ptx)?;
        ptxas.assemble(CUBIN_ARCH, &[], &input, &cubin).map_err(anyhow::Error::msg)?;
        Ok((cubin_path(path), fs::read(cubin)?))
    });
    cubins.into_iter().collect()
}

fn cubin_path(ptx: &Path) -> PathBuf {
    Path::new(CUBIN_ARCH).join(ptx.with_extension("cubin"))
}

/// Those whose committed contents are others.
fn differing(repo: &Repo, files: &Files) -> Vec<String> {
    let folder = repo.ptx();
    let differs =
        |(path, contents): &(&PathBuf, &Vec<u8>)| fs::read(folder.join(path)).is_ok_and(|old| old != **contents);
    files.iter().filter(differs).map(|(path, _)| format!("{}: differs", path.display())).collect()
}

/// What is in `host/ptx`, as paths in it, less `budget.toml`.
fn committed(repo: &Repo) -> Result<BTreeSet<PathBuf>> {
    let mut paths = BTreeSet::new();
    for folder in ["", CUBIN_ARCH] {
        for entry in fs::read_dir(repo.ptx().join(folder)).into_iter().flatten() {
            let entry = entry?;
            if entry.file_type()?.is_file() && entry.file_name() != "budget.toml" {
                paths.insert(Path::new(folder).join(entry.file_name()));
            }
        }
    }
    Ok(paths)
}

fn toolchain(repo: &Repo, ptxas: &Ptxas, files: &Files) -> Result<String> {
    let mut text = format!("rustc = {:?}\nptxas = \"{}\"\n", rustc(repo)?, ptxas.version);
    write!(text, "\n# SHA-256 of the PTX that each cubin was made from.\n[{CUBIN_ARCH}]\n")?;
    for (path, ptx) in files {
        writeln!(text, "{} = \"{}\"", path.with_extension("").display(), hash_of(ptx))?;
    }
    Ok(text)
}

/// As in `1.95.0 (59807616e 2026-04-14)`.
fn rustc(repo: &Repo) -> Result<String> {
    let version = output(&mut repo.command("rustc", &["--version"]))?;
    Ok(version.trim().trim_start_matches("rustc ").to_owned())
}

fn hash_of(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
