//! Counts machine instructions in what `nvdisasm` prints.

use crate::repo::output;
use anyhow::{Context, Result};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

/// Opcodes that are counted by name: tensor cores, `ldmatrix` and `cp.async`, global memory, local memory, barriers.
pub const COUNTED: [&str; 9] = ["HMMA", "HGMMA", "LDSM", "LDGSTS", "LDG", "STG", "LDL", "STL", "BAR"];

/// Path of `nvdisasm`: beside the assembler, or where tools are looked for.
pub fn find_nvdisasm(ptxas: &Path) -> Result<PathBuf> {
    let beside = ptxas.with_file_name("nvdisasm");
    let mut candidates =
        beside.is_file().then_some(beside).into_iter().chain(crate::ptxas::tool_candidates("nvdisasm"));
    candidates.next().context("no nvdisasm found; put one on PATH or `pip install nvidia-cuda-nvdisasm`")
}

/// Number of each opcode of [`COUNTED`], and `total`, in a cubin of one kernel.
pub fn count(nvdisasm: &Path, cubin: &Path) -> Result<BTreeMap<&'static str, u32>> {
    Ok(count_text(&output(Command::new(nvdisasm).arg("-c").arg(cubin))?))
}

fn count_text(sass: &str) -> BTreeMap<&'static str, u32> {
    let mut counts: BTreeMap<&'static str, u32> = COUNTED.iter().map(|name| (*name, 0)).collect();
    for opcode in sass.lines().filter_map(opcode).filter(|opcode| *opcode != "NOP") {
        if let Some(name) = COUNTED.iter().find(|name| **name == opcode) {
            *counts.entry(name).or_default() += 1;
        }
        *counts.entry("total").or_default() += 1;
    }
    counts
}

/// `/*0060*/  @!P0 LDG.E R4, desc[UR4][R4.64] ;` → `LDG`.
fn opcode(line: &str) -> Option<&str> {
    let (_, instruction) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let mut words = instruction.split_whitespace().filter(|word| !word.starts_with('@') && *word != "{");
    words.next()?.split(['.', ';']).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_counted() {
        let sass = "state_scan:\n.text.state_scan:\n        /*0000*/                   LDC R1, c[0x0][0x28] ;\n\
             /*0060*/              @!P0 LDG.E R4, desc[UR4][R4.64] ;\n.L_x_25:\n  /*0090*/  STG.E desc[UR4][R2.64], R7 ;\n\
             /*00a0*/                   EXIT ;\n /*00c0*/                   NOP;\n";
        let counts = count_text(sass);
        assert_eq!((counts["LDG"], counts["STG"], counts["HMMA"], counts["total"]), (1, 1, 0, 4));
    }
}
