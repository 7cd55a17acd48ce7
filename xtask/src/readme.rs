//! `cargo xtask readme`: README.md quotes figures from committed records, and code from the examples, only.

use crate::{growth::Growth, repo::Repo};
use anyhow::{Context, Result, bail, ensure};
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

const RECORDS: &str = "benches/records/h200";
const VALIDATION: &str = "validation.csv";
const PEERS: &str = "peers.csv";
const GROWTH: &str = "growth.csv";
const FIGURE: &str = "docs/growth.svg";
const NO_RECORD: &str = "No record yet.\n";

pub fn run(repo: &Repo, check: bool) -> Result<()> {
    let path = repo.root.join("README.md");
    let records = repo.root.join(RECORDS);
    let read = |name: &str| match records.join(name) {
        path if path.exists() => Row::read(&path),
        _ => Ok(Vec::new()),
    };
    let newest = |op: &str| newest(&records, op);
    let example = |name: &str| Ok(code(&fs::read_to_string(repo.root.join(format!("examples/{name}.rs")))?));
    let old = fs::read_to_string(&path).context("README.md")?;
    let mut figure = None;
    let new = fill(&old, |block| match block {
        "speed" => speed(&newest("forward")?, &read(PEERS)?),
        "checkpointed" => checkpointed(&newest("checkpointed backward")?),
        "cold" => cold(&newest("cold_forward")?, &read(PEERS)?),
        "accurate" => accurate(&newest("accurate backward")?),
        "accuracy" => accuracy(&read(VALIDATION)?),
        "growth" => {
            let growth = Growth::of(&Row::read(&records.join(GROWTH))?)?;
            figure = Some(growth.figure()?);
            growth.block(FIGURE)
        }
        "quickstart" | "quickstart_cuda" => example(block),
        _ => bail!("README.md has a generated block `{block}`, which nothing fills"),
    })?;
    for (path, new) in [(path, new)].into_iter().chain(figure.map(|figure| (repo.root.join(FIGURE), figure))) {
        if fs::read_to_string(&path).ok().as_ref() != Some(&new) {
            let name = path.display();
            ensure!(!check, "{name} differs from records and examples; `cargo xtask readme` makes it anew");
            fs::write(path, new)?;
        }
    }
    Ok(())
}

/// Replaces what stands between `<!-- generated: NAME -->` and `<!-- end -->`.
fn fill(text: &str, mut content: impl FnMut(&str) -> Result<String>) -> Result<String> {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("<!-- generated: ") {
        let (name, body) = after.split_once(" -->").context("a generated block has no name")?;
        let (_, tail) = body.split_once("<!-- end -->").with_context(|| format!("block `{name}` has no end"))?;
        write!(filled, "{before}<!-- generated: {name} -->\n{}<!-- end -->", content(name)?)?;
        rest = tail;
    }
    Ok(filled + rest)
}

/// A line of a record: column → value.
#[derive(Clone)]
pub struct Row(BTreeMap<String, String>);

impl Row {
    fn read(path: &Path) -> Result<Vec<Self>> {
        let text = fs::read_to_string(path).map_err(anyhow::Error::from);
        text.and_then(|text| Self::parse(&text)).with_context(|| path.display().to_string())
    }

    pub fn parse(text: &str) -> Result<Vec<Self>> {
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let header = reader.headers()?.clone();
        let row =
            |record: csv::StringRecord| Self(header.iter().zip(&record).map(|(k, v)| (k.into(), v.into())).collect());
        reader.records().map(|record| Ok(row(record?))).collect()
    }

    pub fn get(&self, column: &str) -> Result<&str> {
        self.0.get(column).map(String::as_str).with_context(|| format!("no column `{column}`"))
    }

    pub fn number(&self, column: &str) -> Result<f64> {
        let value = self.get(column)?;
        value.parse().with_context(|| format!("`{column}` is `{value}`"))
    }
}

/// The record of the latest date that measures `op`; its name is its date. No rows where there is none.
fn newest(records: &Path, op: &str) -> Result<Vec<Row>> {
    for path in dated(records).into_iter().rev() {
        let rows = Row::read(&path)?;
        if rows.iter().any(|row| row.0.get("op").is_some_and(|known| known == op)) {
            return Ok(rows);
        }
    }
    Ok(Vec::new())
}

/// The records whose name is their date, in order.
fn dated(records: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(records).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_dated = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes()[0].is_ascii_digit());
    let mut paths: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|e| e == "csv") && is_dated(path)).collect();
    paths.sort();
    paths
}

/// An example as a block of code, without its own documentation.
fn code(source: &str) -> String {
    let lines: Vec<&str> = source.lines().skip_while(|line| line.is_empty() || line.starts_with("//!")).collect();
    format!("```rust\n{}\n```\n", lines.join("\n"))
}

/// What a row measures.
fn shape(row: &Row) -> Result<String> {
    let [b, h, n, d, e] = ["b", "h", "n", "d", "e"].map(|column| row.get(column));
    Ok(format!("{}×{}×{}×{}×{}", b?, h?, n?, d?, e?))
}

/// Where a row comes from.
pub fn source(row: &Row) -> Result<String> {
    let [date, gpu, driver, commit] = ["date", "gpu", "driver", "commit"].map(|column| row.get(column));
    Ok(format!("{}, {}, driver {}, commit {:.12}", date?, gpu?, driver?, commit?))
}

/// The last of the rows that measure `op` on a shape.
fn last<'a>(rows: &'a [Row], op: &str, of: &Row) -> Result<Option<&'a Row>> {
    let mut found = None;
    for row in rows {
        if row.get("op")? == op && shape(row)? == shape(of)? && row.get("dtype")? == of.get("dtype")? {
            found = Some(row);
        }
    }
    Ok(found)
}

/// The fastest public implementation of the operator for what `row` measures, and by what factor it is slower: both in
/// multiples of what a copy of the same bytes took in their runs.
fn best_peer(row: &Row, peers: &[Row]) -> Result<String> {
    let mut best: Option<&Row> = None;
    for peer in peers {
        let same = ["op", "dtype", "gpu"].into_iter().all(|column| peer.get(column).ok() == row.get(column).ok());
        if same && peer.get("operator")? == "lightning" && shape(peer)? == shape(row)? {
            let faster = |best: &Row| Ok::<_, anyhow::Error>(peer.number("ms")? < best.number("ms")?);
            best = if best.map_or(Ok(true), faster)? { Some(peer) } else { best };
        }
    }
    let Some(peer) = best else { return Ok(String::new()) };
    let copies = |row: &Row| Ok::<_, anyhow::Error>(row.number("ms")? * row.number("copy_gbps")?);
    Ok(format!("{} {} ({:.2}×)", peer.get("ms")?, peer.get("peer")?, copies(peer)? / copies(row)?))
}

/// One line per shape, in the order of the record, in a table per backend and dtype; a later measurement of the same
/// thing replaces an earlier one.
fn speed(rows: &[Row], peers: &[Row]) -> Result<String> {
    type Lines = Vec<(String, [String; 2])>;
    let mut tables: Vec<(String, Lines)> = Vec::new();
    let mut measured = None;
    for row in rows {
        let direction = match row.get("op")? {
            "forward" => 0,
            "backward" => 1,
            _ => continue,
        };
        let table = format!("{} on {}", row.get("dtype")?, row.get("backend")?);
        let lines = entry(&mut tables, table, Vec::new());
        let cells = entry(lines, shape(row)?, [" | | ".into(), " | | ".into()]);
        let share = row.number("pct_copy")?;
        cells[direction] =
            format!("{:.3} | {share:.0} % ({:.2}×) | {}", row.number("ms")?, 100.0 / share, best_peer(row, peers)?);
        measured = Some(row);
    }
    let Some(measured) = measured else { return Ok(NO_RECORD.into()) };
    let mut text = String::new();
    for (table, lines) in tables {
        writeln!(
            text,
            "| {table}, B×H×N×D×E | forward ms | of copy | best peer | backward ms | of copy | best peer |\n\
             |---|---:|---:|---:|---:|---:|---:|"
        )?;
        for (shape, [forward, backward]) in lines {
            writeln!(text, "| {shape} | {forward} | {backward} |")?;
        }
        writeln!(text)?;
    }
    write!(text, "{}; a copy moves {:.0} GB/s.", source(measured)?, measured.number("copy_gbps")?)?;
    if let Some(peer) = peers.first() {
        write!(text, " Peers: {}, {}.", peer.get("date")?, peer.get("gpu")?)?;
    }
    Ok(text + "\n")
}

/// One line per shape whose plan has checkpoints: the passes that write and read them, beside the plain ones.
fn checkpointed(rows: &[Row]) -> Result<String> {
    let mut text = String::new();
    for row in rows.iter().filter(|row| row.0.get("op").is_some_and(|op| op == "checkpointed backward")) {
        let of = |op| last(rows, op, row)?.with_context(|| format!("no `{op}` beside a checkpointed pass"));
        let (plain, forward, backward) = (of("forward")?, of("checkpointed forward")?, of("backward")?);
        if text.is_empty() {
            writeln!(
                text,
                "| {} on {}, B×H×N×D×E | forward ms | × plain | backward ms | × plain | of copy |\n\
                 |---|---:|---:|---:|---:|---:|",
                row.get("dtype")?,
                row.get("backend")?
            )?;
        }
        let share = row.number("pct_copy")?;
        writeln!(
            text,
            "| {} | {:.3} | {:.2} | {:.3} | {:.2} | {share:.0} % ({:.2}×) |",
            shape(row)?,
            forward.number("ms")?,
            forward.number("ms")? / plain.number("ms")?,
            row.number("ms")?,
            row.number("ms")? / backward.number("ms")?,
            100.0 / share
        )?;
    }
    Ok(if text.is_empty() { NO_RECORD.into() } else { text })
}

/// One line per shape that was measured with accurate kernels, beside the fast ones.
fn accurate(rows: &[Row]) -> Result<String> {
    let mut text = String::new();
    for row in rows.iter().filter(|row| row.0.get("op").is_some_and(|op| op == "accurate backward")) {
        let ms = |op: &str| -> Result<f64> {
            let found = last(rows, op, row)?.with_context(|| format!("no `{op}` beside an accurate pass"))?;
            found.number("ms")
        };
        if text.is_empty() {
            let (dtype, backend) = (row.get("dtype")?, row.get("backend")?);
            writeln!(
                text,
                "| {dtype} on {backend}, B×H×N×D×E | forward ms | × fast | backward ms | × fast |\n|---|---:|---:|---:|---:|"
            )?;
        }
        write!(text, "| {} |", shape(row)?)?;
        for pass in ["forward", "backward"] {
            let (accurate, fast) = (ms(&format!("accurate {pass}"))?, ms(pass)?);
            write!(text, " {accurate:.3} | {:.2} |", accurate / fast)?;
        }
        writeln!(text)?;
    }
    Ok(if text.is_empty() { NO_RECORD.into() } else { text })
}

/// The value of a key, in the order in which keys came.
fn entry<K: PartialEq, V>(entries: &mut Vec<(K, V)>, key: K, new: V) -> &mut V {
    let index = entries.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
        entries.push((key, new));
        entries.len() - 1
    });
    &mut entries[index].1
}

/// First calls of a process beside warm ones.
fn cold(rows: &[Row], peers: &[Row]) -> Result<String> {
    let mut text = String::new();
    let mut line = |name: &str, rows: &[Row]| -> Result<()> {
        let first = |row: &&Row| row.get("op").is_ok_and(|op| op == "cold_forward");
        let Some(of) = rows.iter().rfind(first) else { return Ok(()) };
        let mut cells = String::new();
        for op in ["cold_forward", "cold_backward", "forward", "backward"] {
            let row = last(rows, op, of)?.with_context(|| format!("no `{op}` of {name}"))?;
            let ms = row.number("ms")?;
            write!(cells, " {} |", if ms < 100.0 { format!("{ms:.3}") } else { format!("{ms:.0}") })?;
        }
        if text.is_empty() {
            writeln!(
                text,
                "| {}, {}, ms | first forward | first backward | warm forward | warm backward |\n|---|---:|---:|---:|---:|",
                shape(of)?,
                of.get("dtype")?
            )?;
        }
        Ok(writeln!(text, "| {name} |{cells}")?)
    };
    let official: Vec<Row> =
        peers.iter().filter(|row| row.0.get("peer").is_some_and(|p| p == OFFICIAL)).cloned().collect();
    line(OFFICIAL, &official)?;
    line("this crate", rows)?;
    if let Some(row) = rows.first() {
        writeln!(text, "\nThis crate: {}.", source(row)?)?;
    }
    Ok(if text.is_empty() { NO_RECORD.into() } else { text })
}

const OFFICIAL: &str = "official Triton";

/// The worst error of every output per dtype, which is a word of the name of the case.
fn accuracy(rows: &[Row]) -> Result<String> {
    const OUTPUTS: [&str; 4] = ["o", "dq", "dk", "dv"];
    let mut worst: BTreeMap<String, ([Option<f64>; 4], f64, usize)> = BTreeMap::new();
    for row in rows {
        let case = row.get("case")?;
        let mut words = case.split(|c: char| !c.is_ascii_alphanumeric());
        let dtype = words
            .find(|word| ["bf16", "f16", "f32"].contains(word))
            .with_context(|| format!("no dtype in `{case}`"))?;
        let dtype = if words.any(|word| word == "accurate") { format!("{dtype} accurate") } else { dtype.into() };
        let (output, error, bound) = (row.get("output")?, row.number("error")?, row.number("bound")?);
        let index = OUTPUTS.iter().position(|name| *name == output).with_context(|| format!("no output `{output}`"))?;
        let entry = worst.entry(dtype.clone()).or_insert(([None; 4], bound, 0));
        // A NaN stays.
        entry.0[index] =
            Some(entry.0[index].map_or(error, |old| if old > error || old.is_nan() { old } else { error }));
        ensure!(entry.1 == bound, "two bounds for {dtype}");
        entry.2 += 1;
    }
    let Some(last) = rows.last() else { return Ok(NO_RECORD.into()) };
    let mut table =
        String::from("| dtype | o | dq | dk | dv | bound | checks |\n|---|---:|---:|---:|---:|---:|---:|\n");
    for (dtype, (errors, bound, checks)) in worst {
        let errors = errors.map(|error| error.map_or_else(String::new, |error| format!("{error:.2e}"))).join(" | ");
        writeln!(table, "| {dtype} | {errors} | {bound:.1e} | {checks} |")?;
    }
    writeln!(table, "\n{}.", source(last)?)?;
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_filled_and_the_rest_stays() {
        let text = "a\n<!-- generated: speed -->\nold\n<!-- end -->\nb\n";
        let filled = fill(text, |name| Ok(format!("new {name}\n"))).unwrap();
        assert_eq!(filled, "a\n<!-- generated: speed -->\nnew speed\n<!-- end -->\nb\n");
        assert_eq!(fill(&filled, |name| Ok(format!("new {name}\n"))).unwrap(), filled);
        assert!(fill("<!-- generated: speed -->", |_| Ok(String::new())).is_err());
    }

    #[test]
    fn speed_has_a_line_per_shape() {
        let record = "date,commit,gpu,driver,backend,op,dtype,b,h,n,d,e,ms,gbps,pct_copy,copy_gbps,note\n\
            2026-01-02,abc,H200,580,cuda,forward,bf16,6,8,2048,128,64,0.0311,2430,57.1,4000,\n\
            2026-01-02,abc,H200,580,cuda,backward,bf16,6,8,2048,128,64,0.065,2100,50.0,4000,\"a, b\"\n\
            2026-01-02,abc,H200,580,cuda,decode,bf16,6,8,1,128,64,0.01,1,1,4000,\n";
        let peers = "date,gpu,peer,source,operator,op,dtype,b,h,n,d,e,ms,copy_gbps,note\n\
            2026-01-01,H200,slow,s,lightning,backward,bf16,6,8,2048,128,64,1,4200,\n\
            2026-01-01,H200,fast,s,lightning,backward,bf16,6,8,2048,128,64,0.13,4200,\n\
            2026-01-01,H200,other,s,softmax,backward,bf16,6,8,2048,128,64,0.01,4200,\n\
            2026-01-01,H100,fast,s,lightning,forward,bf16,6,8,2048,128,64,0.01,4200,\n";
        let table = speed(&Row::parse(record).unwrap(), &Row::parse(peers).unwrap()).unwrap();
        let line = "| 6×8×2048×128×64 | 0.031 | 57 % (1.75×) |  | 0.065 | 50 % (2.00×) | 0.13 fast (2.10×) |\n";
        assert!(table.contains(line) && table.lines().count() == 5, "{table}");
        assert_eq!(speed(&[], &[]).unwrap(), NO_RECORD);
    }

    #[test]
    fn checkpointed_passes_stand_beside_plain_ones() {
        let row = |op: &str, ms: &str| format!("cuda,{op},bf16,6,8,2048,128,64,{ms},50.0\n");
        let passes = [("forward", "0.1"), ("backward", "0.4"), ("checkpointed forward", "0.12")];
        let rows: String = passes.iter().map(|(op, ms)| row(op, ms)).collect();
        let last = row("checkpointed backward", "0.2");
        let parse = |rows: &str| Row::parse(&format!("backend,op,dtype,b,h,n,d,e,ms,pct_copy\n{rows}")).unwrap();
        let table = checkpointed(&parse(&(rows.clone() + &last))).unwrap();
        assert!(table.ends_with("| 6×8×2048×128×64 | 0.120 | 1.20 | 0.200 | 0.50 | 50 % (2.00×) |\n"), "{table}");
        assert!(checkpointed(&parse(&last)).is_err());
        assert_eq!(checkpointed(&parse(&rows)).unwrap(), NO_RECORD);
    }

    #[test]
    fn accurate_passes_stand_beside_fast_ones() {
        let row = |op: &str, ms: &str| format!("cuda,{op},bf16,6,8,2048,128,64,{ms}\n");
        let passes = [("forward", "0.1"), ("backward", "0.2"), ("accurate forward", "0.15")];
        let rows: String = passes.iter().map(|(op, ms)| row(op, ms)).collect();
        let last = row("accurate backward", "0.6");
        let parse = |rows: &str| Row::parse(&format!("backend,op,dtype,b,h,n,d,e,ms\n{rows}")).unwrap();
        let table = accurate(&parse(&(rows.clone() + &last))).unwrap();
        assert!(table.ends_with("| 6×8×2048×128×64 | 0.150 | 1.50 | 0.600 | 3.00 |\n"), "{table}");
        assert!(accurate(&parse(&last)).is_err());
        assert_eq!(accurate(&parse(&rows)).unwrap(), NO_RECORD);
    }

    #[test]
    fn cold_calls_stand_beside_warm_ones() {
        let row = |op, ms| format!("d,g,1,c,{op},bf16,1,1,64,64,64,{ms}\n");
        let [cold_forward, cold_backward] = [row("cold_forward", "2360"), row("cold_backward", "0.1363")];
        let [forward, backward] = [row("forward", "0.0523"), row("backward", "0.1225")];
        let rows =
            format!("date,gpu,driver,commit,op,dtype,b,h,n,d,e,ms\n{forward}{backward}{cold_forward}{cold_backward}");
        let table = cold(&Row::parse(&rows).unwrap(), &[]).unwrap();
        let end = "| this crate | 2360 | 0.136 | 0.052 | 0.122 |\n\nThis crate: d, g, driver 1, commit c.\n";
        assert!(table.ends_with(end), "{table}");
        assert_eq!(cold(&[], &[]).unwrap(), NO_RECORD);
    }

    #[test]
    fn accuracy_keeps_the_worst_and_nan() {
        let record = "date,commit,gpu,driver,case,output,error,bound\n\
            d,c,g,1,bf16 n=64,o,1e-3,2.8e-3\nd,c,g,1,bf16 n=65,o,2e-3,2.8e-3\nd,c,g,1,f16 n=1,dq,NaN,5e-4\nd,c,g,1,f16 n=2,dq,1e-4,5e-4\n\
            d,c,g,1,n=64 bf16 accurate,o,1.7e-3,1.9e-3\n";
        let table = accuracy(&Row::parse(record).unwrap()).unwrap();
        let lines = "| bf16 | 2.00e-3 |  |  |  | 2.8e-3 | 2 |\n| bf16 accurate | 1.70e-3 |  |  |  | 1.9e-3 | 1 |\n| f16 |  | NaN |  |  | 5.0e-4 | 2 |\n";
        assert!(table.contains(lines), "{table}");
    }

    #[test]
    fn an_example_is_shown_without_its_documentation() {
        assert_eq!(code("//! What it is.\n\nfn main() {}\n"), "```rust\nfn main() {}\n```\n");
    }

    #[test]
    fn the_readme_is_current() {
        run(&Repo::find().unwrap(), true).unwrap();
    }

    /// Columns of every committed record, and numbers where numbers belong.
    #[test]
    fn the_records_are_well_formed() {
        let records = Repo::find().unwrap().root.join(RECORDS);
        for file in fs::read_dir(&records).unwrap() {
            let path = file.unwrap().path();
            let header = fs::read_to_string(&path).unwrap().lines().next().unwrap().to_owned();
            let (expected, numbers): (&str, &[&str]) = match path.file_name().unwrap().to_str().unwrap() {
                VALIDATION => ("date,commit,gpu,driver,case,output,error,bound", &["error", "bound"]),
                "plan.csv" => (
                    "pass,b,h,n,d,e,family,segments,sharers,value_tiles,sweep,ms,predicted_ms",
                    &["b", "h", "n", "d", "e", "segments", "ms", "predicted_ms"],
                ),
                "sanitizer.csv" => ("date,commit,gpu,driver,tool,tests,passed,reports", &["passed", "reports"]),
                PEERS => (
                    "date,gpu,peer,source,operator,op,dtype,b,h,n,d,e,ms,copy_gbps,note",
                    &["b", "h", "n", "d", "e", "ms"],
                ),
                _ => (
                    "date,commit,gpu,driver,backend,op,dtype,b,h,n,d,e,ms,gbps,pct_copy,copy_gbps,note",
                    &["b", "h", "n", "d", "e", "ms"],
                ),
            };
            assert_eq!(header, expected, "{}", path.display());
            let rows = Row::read(&path).unwrap();
            assert!(!rows.is_empty(), "{}", path.display());
            for row in rows {
                for column in numbers {
                    assert!(row.number(column).unwrap() >= 0.0, "{}: `{column}`", path.display());
                }
                // First calls have no rate.
                for column in ["gbps", "pct_copy", "copy_gbps"].into_iter().filter(|column| row.0.contains_key(*column))
                {
                    let is_cold = row.get("op").unwrap().starts_with("cold");
                    assert_eq!(row.number(column).is_ok(), !is_cold, "{}: `{column}`", path.display());
                }
            }
        }
        assert!(!dated(&records).is_empty(), "no record of speed in {}", records.display());
    }
}
