//! `cargo xtask budget`: what every kernel costs on every architecture, and a veto on what none may cost.

use crate::{
    ptxas::{Ptxas, parallel},
    repo::Repo,
    sass,
};
use anyhow::{Context, Result, bail};
use lightning_attention_kernels::variants::{Arch, MAX_SHARED_BYTES, MAX_SHARED_BYTES_SM90, VARIANTS, Variant};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
};

/// Instructions are counted for this one.
const COUNTED_ARCH: &str = "sm_90a";

fn archs(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::Sm80 => &["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"],
        Arch::Sm90 => &["sm_90a"],
    }
}

/// Costs of one kernel on one architecture.
#[derive(Debug, Default, PartialEq, Eq)]
struct Cost {
    registers: u32,
    spill_bytes: u32,
    stack_bytes: u32,
    shared_bytes: u32,
    /// Advisories of the assembler about serialised matrix instructions.
    warnings: BTreeSet<String>,
    instructions: BTreeMap<&'static str, u32>,
    /// Registers overwritten while a matrix instruction reads them.
    hazards: Vec<String>,
}

pub fn run(repo: &Repo, bless: bool) -> Result<()> {
    let ptxas = Ptxas::find().map_err(|e| anyhow::anyhow!("{e}"))?;
    let nvdisasm = sass::find_nvdisasm(&ptxas.path)?;
    let jobs: Vec<_> =
        VARIANTS.iter().flat_map(|variant| archs(variant.arch).iter().map(move |arch| (variant, *arch))).collect();
    let costs = parallel(&jobs, |(variant, arch)| measure(repo, &ptxas, &nvdisasm, variant, arch));
    let costs = costs.into_iter().collect::<Result<Vec<_>>>()?;

    let mut faults = Vec::new();
    let mut text = format!(
        "# Made by `cargo xtask budget --bless`. Bytes are per thread (spill, stack) and per block (shared).\nptxas = \"{}\"\n",
        ptxas.version
    );
    let mut sorted: Vec<_> = jobs.iter().zip(&costs).collect();
    sorted.sort_by_key(|((variant, _), _)| variant.entry);
    let mut table = "";
    for ((variant, arch), cost) in sorted {
        if table != variant.entry {
            table = variant.entry;
            write!(text, "\n[{table}]\n")?;
        }
        writeln!(text, "{arch} = {}", cost.to_toml())?;
        faults
            .extend(cost.faults(variant.arch).into_iter().map(|fault| format!("{} on {arch}: {fault}", variant.entry)));
    }
    if !faults.is_empty() {
        bail!("over budget:\n  {}", faults.join("\n  "));
    }

    let path = repo.ptx().join("budget.toml");
    if bless {
        fs::write(&path, &text)?;
    }
    let changes = changes(&fs::read_to_string(&path).context("host/ptx/budget.toml; `--bless` makes it")?, &text)?;
    if !changes.is_empty() {
        bail!("the costs changed; `cargo xtask budget --bless` accepts them\n  {}", changes.join("\n  "));
    }
    println!("{} kernels within budget, {} with their architectures", VARIANTS.len(), jobs.len());
    Ok(())
}

fn measure(repo: &Repo, ptxas: &Ptxas, nvdisasm: &Path, variant: &Variant, arch: &str) -> Result<Cost> {
    let ptx = repo.ptx().join(format!("{}.ptx", variant.entry));
    let work = repo.target.join("budget");
    fs::create_dir_all(&work)?;
    let cubin = work.join(format!("{}.{arch}.cubin", variant.entry));
    let report = ptxas.assemble(arch, &["-v"], &ptx, &cubin).map_err(anyhow::Error::msg)?;
    let mut cost =
        Cost::parse(&report).with_context(|| format!("ptxas -v of {} for {arch}: {report}", variant.entry))?;
    cost.shared_bytes += variant.shared_bytes;
    if arch == COUNTED_ARCH {
        let sass = sass::disassemble(nvdisasm, &cubin)?;
        cost.instructions = sass::count(&sass);
        cost.hazards = sass::hazards(&sass);
    }
    Ok(cost)
}

impl Cost {
    /// Reads what `ptxas -v` prints for a module with one kernel; functions that it calls count too.
    fn parse(report: &str) -> Option<Self> {
        let mut cost = Self::default();
        let mut used = None;
        for line in report.lines() {
            let number_before = |unit: &str| {
                line.split_once(unit).and_then(|(before, _)| before.split_whitespace().last()?.parse::<u32>().ok())
            };
            if let Some(stack) = number_before(" bytes stack frame") {
                cost.stack_bytes = cost.stack_bytes.max(stack);
                cost.spill_bytes += number_before(" bytes spill stores")? + number_before(" bytes spill loads")?;
            }
            if let Some(registers) = number_before(" registers") {
                used = used.max(Some(registers));
                cost.shared_bytes += number_before(" bytes smem").unwrap_or(0);
            }
            cost.warnings.extend(line.split(['(', ')', ' ', ':']).filter(|word| is_advisory(word)).map(str::to_owned));
        }
        cost.registers = used?;
        Some(cost)
    }

    fn to_toml(&self) -> String {
        let Self { registers, spill_bytes, stack_bytes, shared_bytes, warnings, instructions, .. } = self;
        let warnings: Vec<_> = warnings.iter().collect();
        let mut text = format!(
            "{{ registers = {registers}, spill_bytes = {spill_bytes}, stack_bytes = {stack_bytes}, \
             shared_bytes = {shared_bytes}, warnings = {warnings:?}"
        );
        if !instructions.is_empty() {
            let counts: Vec<_> = instructions.iter().map(|(name, count)| format!("{name} = {count}")).collect();
            text += &format!(", instructions = {{ {} }}", counts.join(", "));
        }
        text + " }"
    }

    /// What no kernel may do, whatever the record says.
    fn faults(&self, arch: Arch) -> Vec<String> {
        let most_shared = match arch {
            Arch::Sm80 => MAX_SHARED_BYTES,
            Arch::Sm90 => MAX_SHARED_BYTES_SM90,
        };
        let local: u32 = ["LDL", "STL"].iter().filter_map(|name| self.instructions.get(name)).sum();
        let limits = [
            ("bytes spilled", self.spill_bytes, 0),
            ("bytes of stack", self.stack_bytes, 0),
            ("local-memory instructions", local, 0),
            ("bytes of shared memory", self.shared_bytes, most_shared),
            ("advisories on matrix instructions", self.warnings.len() as u32, 0),
        ];
        let over = limits.iter().filter(|(_, value, limit)| value > limit);
        let over = over.map(|(what, value, limit)| format!("{value} {what}, at most {limit}"));
        over.chain(self.hazards.iter().cloned()).collect()
    }
}

/// `C7510` and its neighbours.
fn is_advisory(word: &str) -> bool {
    word.len() == 5 && word.starts_with("C75") && word[3..].bytes().all(|b| b.is_ascii_digit())
}

/// One line per value that differs.
fn changes(old: &str, new: &str) -> Result<Vec<String>> {
    let (old, new) = (flatten(old)?, flatten(new)?);
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let differing = keys.into_iter().filter(|key| old.get(*key) != new.get(*key));
    let show = |value: Option<&String>| value.cloned().unwrap_or_else(|| "nothing".into());
    Ok(differing.map(|key| format!("{key}: {} → {}", show(old.get(key)), show(new.get(key)))).collect())
}

fn flatten(text: &str) -> Result<BTreeMap<String, String>> {
    fn visit(prefix: &str, table: &toml::Table, leaves: &mut BTreeMap<String, String>) {
        for (key, value) in table {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            match value {
                toml::Value::Table(table) => visit(&path, table, leaves),
                toml::Value::Integer(number) => drop(leaves.insert(path, number.to_string())),
                other => drop(leaves.insert(path, format!("{other:?}"))),
            }
        }
    }
    let mut leaves = BTreeMap::new();
    visit("", &text.parse()?, &mut leaves);
    Ok(leaves)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'x' for 'sm_90a'\n\
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n\
        ptxas info    : Function properties for x\n    32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n\
        ptxas info    : Used 18 registers, used 1 barriers, 32 bytes cumulative stack size, 256 bytes smem\n";

    #[test]
    fn a_report_is_read() {
        let cost = Cost::parse(REPORT).unwrap();
        assert_eq!((cost.registers, cost.spill_bytes, cost.stack_bytes, cost.shared_bytes), (18, 12, 32, 256));
        assert_eq!(cost.warnings, BTreeSet::from(["C7510".to_owned()]));
        let faults = [
            "12 bytes spilled, at most 0",
            "32 bytes of stack, at most 0",
            "1 advisories on matrix instructions, at most 0",
        ];
        assert_eq!(cost.faults(Arch::Sm80), faults);
    }

    #[test]
    fn changes_show_old_and_new() {
        let line = |cost: &Cost| format!("[x]\nsm_80 = {}\n", cost.to_toml());
        let old = Cost::parse(REPORT).unwrap();
        let new = Cost { registers: 20, warnings: BTreeSet::new(), ..Cost::parse(REPORT).unwrap() };
        assert_eq!(changes(&line(&old), &line(&old)).unwrap(), [""; 0]);
        assert_eq!(changes(&line(&old), &line(&new)).unwrap()[0], "x.sm_80.registers: 18 → 20");
        assert_eq!(changes("", &line(&new)).unwrap()[0], "x.sm_80.registers: nothing → 20");
    }
}
