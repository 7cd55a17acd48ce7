//! Embeds the kernels of `ptx/` for the CUDA backend: PTX, the committed cubins, and, where a trusted `ptxas` is found,
//! cubins for other architectures, which spare their users the driver's compilation at first use.
//!
//! `LIGHTNING_ATTENTION_CUDA_ARCHS` lists the architectures to assemble for (empty: none, and the build does not
//! depend on what is installed); `LIGHTNING_ATTENTION_PTXAS` names the assembler. With either set, what would
//! otherwise be a warning is an error.

#[path = "build/ptxas.rs"]
mod ptxas;

use ptxas::{Ptxas, Unavailable};
use std::{
    collections::BTreeMap,
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

const ARCHS_VARIABLE: &str = "LIGHTNING_ATTENTION_CUDA_ARCHS";
const DEFAULT_ARCHS: &str = "sm_80,sm_86,sm_89,sm_100a,sm_120";

fn main() {
    for path in ["build.rs", "build/ptxas.rs", "ptx"] {
        println!("cargo::rerun-if-changed={path}");
    }
    for variable in [ARCHS_VARIABLE, ptxas::VARIABLE] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let kernels = files(&root.join("ptx"), "ptx");

    // [(arch, cubin)] per entry, committed ones first.
    let mut cubins: BTreeMap<String, Vec<(String, PathBuf)>> = BTreeMap::new();
    let committed = "sm_90a";
    for (entry, path) in files(&root.join("ptx").join(committed), "cubin") {
        cubins.entry(entry).or_default().push((committed.into(), path));
    }
    for (entry, arch, path) in assemble(&kernels, &out) {
        cubins.entry(entry).or_default().push((arch, path));
    }
    let table = table(&kernels, &cubins);
    fs::write(out.join("embedded.rs"), table).expect("OUT_DIR is writable");
}

/// Cubins for the architectures asked for, in parallel; what a former run left in `out` and still fits is taken.
fn assemble(kernels: &BTreeMap<String, PathBuf>, out: &Path) -> Vec<(String, String, PathBuf)> {
    let asked = env::var(ARCHS_VARIABLE).ok();
    let strict = asked.as_ref().is_some_and(|archs| !archs.is_empty()) || env::var_os(ptxas::VARIABLE).is_some();
    let complain = |message: String| match strict {
        true => panic!("{message}"),
        false => println!("cargo::warning={message}; the driver will compile these kernels at first use"),
    };
    let archs = asked.as_deref().unwrap_or(DEFAULT_ARCHS);
    let archs: Vec<&str> = archs.split(',').map(str::trim).filter(|arch| !arch.is_empty()).collect();
    if archs.is_empty() {
        return Vec::new();
    }
    let assembler = match Ptxas::find() {
        Ok(assembler) => assembler,
        Err(Unavailable::Missing) if !strict => return Vec::new(),
        Err(reason) => {
            complain(reason.to_string());
            return Vec::new();
        }
    };
    // Kernels of one architecture alone are committed as cubins.
    let portable = |ptx: &Path| !target(&fs::read_to_string(ptx).expect("a listed file is readable")).ends_with('a');
    let kernels: Vec<_> = kernels.iter().filter(|(_, ptx)| portable(ptx)).collect();
    let jobs: Vec<_> =
        archs.iter().flat_map(|arch| kernels.iter().map(move |(entry, ptx)| (*arch, *entry, *ptx))).collect();
    let results = ptxas::parallel(&jobs, |(arch, entry, ptx)| {
        let cubin = out.join(format!("{entry}.{arch}.cubin"));
        let stamp = out.join(format!("{entry}.{arch}.stamp"));
        let source = fs::read_to_string(ptx).map_err(|e| format!("{}: {e}", ptx.display()))?;
        let key = format!("{}\n{source}", assembler.version);
        if fs::read_to_string(&stamp).is_ok_and(|old| old == key) && cubin.is_file() {
            return Ok(cubin);
        }
        assembler.assemble(arch, &[], ptx, &cubin)?;
        fs::write(stamp, key).map_err(|e| e.to_string())?;
        Ok(cubin)
    });
    let mut made = Vec::new();
    for ((arch, entry, _), result) in jobs.iter().zip(results) {
        match result {
            Ok(path) => made.push((entry.to_string(), arch.to_string(), path)),
            Err::<_, String>(message) => complain(message.replace('\n', " ")),
        }
    }
    made
}

fn target(ptx: &str) -> &str {
    ptx.lines().find_map(|line| line.strip_prefix(".target ")).expect("PTX names its target")
}

/// Stem → path of the files with an extension.
fn files(folder: &Path, extension: &str) -> BTreeMap<String, PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .filter_map(|path| Some((path.file_stem()?.to_str()?.to_owned(), path)))
        .collect()
}

/// The source of `KERNELS`; see `src/cuda/embedded.rs` for the types.
fn table(kernels: &BTreeMap<String, PathBuf>, cubins: &BTreeMap<String, Vec<(String, PathBuf)>>) -> String {
    let mut table = String::from("const KERNELS: &[Kernel] = &[\n");
    for (entry, ptx) in kernels {
        let source = fs::read_to_string(ptx).expect("a listed file is readable");
        let target = target(&source);
        let _ = write!(
            table,
            "Kernel {{ entry: {entry:?}, target: Target::parse({target:?}), ptx: concat!(include_str!({ptx:?}), \"\\0\"), cubins: &["
        );
        for (arch, path) in cubins.get(entry).into_iter().flatten() {
            let _ = write!(table, "(Target::parse({arch:?}), &Aligned(*include_bytes!({path:?})).0), ");
        }
        table.push_str("] },\n");
    }
    table.push_str("];\n");
    table
}
