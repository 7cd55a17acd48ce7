//! Finds a `ptxas` that compiles these kernels right, and runs it. Shared by the build script and `xtask`.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Names a `ptxas` and nothing else is looked at.
pub const VARIABLE: &str = "LIGHTNING_ATTENTION_PTXAS";

/// Oldest version that is trusted: 12.8.93 and 13.0.88 are reported to miscompile a linear-attention kernel that this
/// one compiles right.
pub const MINIMUM: Version = Version([13, 1, 80]);

/// As in `release 13.5, V13.5.37`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub [u32; 3]);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

impl Version {
    /// The version in the output of `ptxas --version`.
    pub fn parse(output: &str) -> Option<Self> {
        output.split_whitespace().find_map(|word| {
            let mut parts = word.strip_prefix('V')?.split('.').map(|part| part.parse().ok());
            let version = [parts.next()??, parts.next()??, parts.next()??];
            parts.next().is_none().then_some(Self(version))
        })
    }
}

/// Why there is no assembler to use.
#[derive(Debug)]
pub enum Unavailable {
    /// None found.
    Missing,
    /// Some found, none to be trusted; says which and why.
    Refused(String),
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(
                f,
                "no ptxas found; set {VARIABLE}, put one on PATH, or `pip install nvidia-cuda-nvcc` (version {MINIMUM} or newer)"
            ),
            Self::Refused(reason) => write!(f, "{reason}"),
        }
    }
}

/// A trusted assembler.
#[derive(Clone, Debug)]
pub struct Ptxas {
    /// The executable.
    pub path: PathBuf,
    /// What it says it is.
    pub version: Version,
}

impl Ptxas {
    /// `$LIGHTNING_ATTENTION_PTXAS`, or the first trusted one of `PATH` and of the active `python3`'s packages.
    pub fn find() -> Result<Self, Unavailable> {
        let candidates = match env::var_os(VARIABLE) {
            Some(path) => vec![PathBuf::from(path)],
            None => tool_candidates("ptxas"),
        };
        let mut refused = Vec::new();
        for path in candidates {
            let output = Command::new(&path).arg("--version").output();
            let version = output.ok().and_then(|o| Version::parse(&String::from_utf8_lossy(&o.stdout)));
            match version {
                Some(version) if version >= MINIMUM => return Ok(Self { path, version }),
                Some(version) => refused.push(format!(
                    "{} is version {version}: versions before {MINIMUM} are known to miscompile such kernels",
                    path.display()
                )),
                None => refused.push(format!("{} does not tell its version", path.display())),
            }
        }
        match refused.is_empty() {
            true => Err(Unavailable::Missing),
            false => Err(Unavailable::Refused(refused.join("; "))),
        }
    }

    /// Assembles a file, with extra arguments; returns what `ptxas` printed.
    pub fn assemble(&self, arch: &str, extra: &[&str], ptx: &Path, cubin: &Path) -> Result<String, String> {
        let output = Command::new(&self.path)
            .args(extra)
            .arg(format!("-arch={arch}"))
            .arg(ptx)
            .arg("-o")
            .arg(cubin)
            .output()
            .map_err(|e| format!("{}: {e}", self.path.display()))?;
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        if output.status.success() { Ok(text) } else { Err(format!("{} for {arch}: {text}", ptx.display())) }
    }
}

/// Existing files a CUDA tool may be at, most preferred first.
pub fn tool_candidates(name: &str) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        env::var_os("PATH").iter().flat_map(|path| env::split_paths(path).collect::<Vec<_>>()).collect();
    let python =
        Command::new("python3").args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).output();
    if let Ok(output) = python {
        let nvidia = Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("nvidia");
        let mut toolkits: Vec<_> =
            fs::read_dir(nvidia).into_iter().flatten().flatten().map(|e| e.path().join("bin")).collect();
        toolkits.sort();
        folders.extend(toolkits.into_iter().rev());
    }
    folders.into_iter().map(|folder| folder.join(name)).filter(|path| path.is_file()).collect()
}

/// `f` of every item, on all cores, results in order.
pub fn parallel<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(items.iter().map(|_| None).collect::<Vec<_>>());
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    thread::scope(|scope| {
        for _ in 0..threads.min(items.len()) {
            scope.spawn(|| {
                while let Some((i, item)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, items.get(i)?)))
                {
                    let result = f(item);
                    results.lock().expect("a worker panicked")[i] = Some(result);
                }
            });
        }
    });
    results.into_inner().expect("a worker panicked").into_iter().map(|r| r.expect("every item was taken")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_versions_are_told_from_good_ones() {
        let version = |text| Version::parse(&format!("Cuda compilation tools, {text}\nBuild cuda_0\n"));
        assert_eq!(version("release 13.5, V13.5.37"), Some(Version([13, 5, 37])));
        assert!(version("release 12.8, V12.8.93") < Some(MINIMUM) && version("release 13.0, V13.0.88") < Some(MINIMUM));
        assert_eq!(version("release 13.5"), None);
    }

    #[test]
    fn parallel_keeps_the_order() {
        let items: Vec<u32> = (0..100).collect();
        assert_eq!(parallel(&items, |i| i * 2), items.iter().map(|i| i * 2).collect::<Vec<_>>());
        assert!(parallel(&[], |i: &u32| *i).is_empty());
    }
}
