//! Reads machine instructions in what `nvdisasm` prints.

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

/// The instructions of a cubin of one kernel.
pub fn disassemble(nvdisasm: &Path, cubin: &Path) -> Result<String> {
    output(Command::new(nvdisasm).arg("-c").arg(cubin))
}

/// Number of each opcode of [`COUNTED`], and `total`.
pub fn count(sass: &str) -> BTreeMap<&'static str, u32> {
    let mut counts: BTreeMap<&'static str, u32> = COUNTED.iter().map(|name| (*name, 0)).collect();
    for opcode in sass.lines().filter_map(opcode).filter(|opcode| *opcode != "NOP") {
        if let Some(name) = COUNTED.iter().find(|name| **name == opcode) {
            *counts.entry(name).or_default() += 1;
        }
        *counts.entry("total").or_default() += 1;
    }
    counts
}

/// Writes to the A registers of an `HGMMA` before the wait for it: the instruction reads them until then, which neither
/// LLVM nor ptxas knows. Looks on in program order, which is where the wait is.
pub fn hazards(sass: &str) -> Vec<String> {
    let instructions: Vec<(&str, Vec<&str>)> = sass.lines().filter_map(instruction).collect();
    let mut found = Vec::new();
    for (at, (name, operands)) in instructions.iter().enumerate() {
        let Some(a) = operands.get(1).filter(|_| name.starts_with("HGMMA")).and_then(|operand| register(operand))
        else {
            continue;
        };
        for (later, operands) in &instructions[at + 1..] {
            if later.starts_with("WARPGROUP.DEPBAR") && operands.last() == Some(&"0x0") {
                break;
            }
            let writes = !["HGMMA", "ST", "SYNCS", "BRA", "RED", "UTMA"].iter().any(|prefix| later.starts_with(prefix));
            if let Some(first) = operands.first().filter(|_| writes).and_then(|operand| register(operand))
                && first < a + 4
                && a < first + width(later)
            {
                found.push(format!("{later} R{first} while {name} reads R{a} to R{}", a + 3));
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Registers that an instruction writes.
fn width(name: &str) -> u32 {
    match name {
        name if name.contains(".128") || name.contains("88.4") => 4,
        name if name.contains(".64") || name.contains(".WIDE") || name.starts_with("CS2R") => 2,
        _ => 1,
    }
}

/// `R12` → 12; `R12.reuse` too.
fn register(operand: &str) -> Option<u32> {
    operand.strip_prefix('R')?.split('.').next()?.parse().ok()
}

/// `/*0060*/  @!P0 LDG.E R4, desc[UR4][R4.64] ;` → (`LDG.E`, [`R4`, …]).
fn instruction(line: &str) -> Option<(&str, Vec<&str>)> {
    let (_, text) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let text = text.split(';').next()?.trim().trim_start_matches('{').trim();
    let text = if text.starts_with('@') { text.split_once(' ')?.1.trim() } else { text };
    let (name, operands) = text.split_once(' ').unwrap_or((text, ""));
    Some((name, operands.split(',').map(str::trim).filter(|operand| !operand.is_empty()).collect()))
}

/// `/*0060*/  @!P0 LDG.E R4, desc[UR4][R4.64] ;` → `LDG`.
fn opcode(line: &str) -> Option<&str> {
    instruction(line)?.0.split('.').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_counted() {
        let sass = "state_scan:\n.text.state_scan:\n        /*0000*/                   LDC R1, c[0x0][0x28] ;\n\
             /*0060*/              @!P0 LDG.E R4, desc[UR4][R4.64] ;\n.L_x_25:\n  /*0090*/  STG.E desc[UR4][R2.64], R7 ;\n\
             /*00a0*/                   EXIT ;\n /*00c0*/                   NOP;\n";
        let counts = count(sass);
        assert_eq!((counts["LDG"], counts["STG"], counts["HMMA"], counts["total"]), (1, 1, 0, 4));
    }

    #[test]
    fn a_write_to_operands_in_flight_is_a_hazard() {
        let sass = |between: &str| {
            format!(
                "/*0000*/ HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24 ;\n{between}\n\
                 /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n/*0030*/ MOV R8, R9 ;\n"
            )
        };
        assert!(hazards(&sass("/*0010*/ @P0 FADD R12, R8, R9 ;")).is_empty());
        assert!(hazards(&sass("/*0010*/ STS [R8], R9 ;")).is_empty());
        assert!(hazards(&sass("/*0010*/ LDSM.16.M88.4 R4, [R100] ;")).is_empty());
        assert_eq!(hazards(&sass("/*0010*/ @!P1 LDSM.16.M88.4 R8, [R100] ;")).len(), 1);
        assert_eq!(hazards(&sass("/*0010*/ IMAD.WIDE R10, R1, R2, R3 ;")).len(), 1);
        assert_eq!(hazards(&sass("/*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n/*0018*/ MOV R11, R9 ;")).len(), 1);
    }
}
