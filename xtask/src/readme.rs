//! `cargo xtask readme`: README.md quotes figures from committed records only.

use crate::repo::Repo;
use anyhow::{Context, Result, bail, ensure};
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

const RECORDS: &str = "benches/records/h200";
const VALIDATION: &str = "validation.csv";
const NO_RECORD: &str = "No record yet.\n";

pub fn run(repo: &Repo, check: bool) -> Result<()> {
    let path = repo.root.join("README.md");
    if !path.exists() {
        println!("README.md does not exist");
        return Ok(());
    }
    let records = repo.root.join(RECORDS);
    let old = fs::read_to_string(&path)?;
    let new = fill(&old, |block| match block {
        "speed" => newest(&records).map_or(Ok(NO_RECORD.into()), |path| speed(&Row::read(&path)?)),
        "accuracy" if records.join(VALIDATION).exists() => accuracy(&Row::read(&records.join(VALIDATION))?),
        "accuracy" => Ok(NO_RECORD.into()),
        _ => bail!("README.md has a generated block `{block}`; speed and accuracy exist"),
    })?;
    if new != old {
        ensure!(!check, "README.md differs from the records; `cargo xtask readme` fills it");
        fs::write(path, new)?;
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
struct Row(BTreeMap<String, String>);

impl Row {
    fn read(path: &Path) -> Result<Vec<Self>> {
        Self::parse(&fs::read_to_string(path)?).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Vec<Self>> {
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let header = reader.headers()?.clone();
        let row =
            |record: csv::StringRecord| Self(header.iter().zip(&record).map(|(k, v)| (k.into(), v.into())).collect());
        reader.records().map(|record| Ok(row(record?))).collect()
    }

    fn get(&self, column: &str) -> Result<&str> {
        self.0.get(column).map(String::as_str).with_context(|| format!("no column `{column}`"))
    }

    fn number(&self, column: &str) -> Result<f64> {
        let value = self.get(column)?;
        value.parse().with_context(|| format!("`{column}` is `{value}`"))
    }
}

/// The record of the latest date; its name is its date.
fn newest(records: &Path) -> Option<PathBuf> {
    let paths = fs::read_dir(records).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "csv") && !path.ends_with(VALIDATION)).max()
}

/// One line per shape, in the order of the record; a later measurement of the same thing replaces an earlier one.
fn speed(rows: &[Row]) -> Result<String> {
    let mut shapes: Vec<(String, [String; 2])> = Vec::new();
    let mut source = String::from(NO_RECORD);
    for row in rows {
        let direction = match row.get("op")? {
            "forward" => 0,
            "backward" => 1,
            _ => continue,
        };
        let [b, h, n, d, e] = ["b", "h", "n", "d", "e"].map(|column| row.get(column));
        let shape = format!("{}×{}×{}×{}×{} | {} | {}", b?, h?, n?, d?, e?, row.get("dtype")?, row.get("backend")?);
        let cells = format!("{:.3} | {:.0} | {:.0} %", row.number("ms")?, row.number("gbps")?, row.number("pct_copy")?);
        let known = shapes.iter().position(|(name, _)| *name == shape);
        let index = known.unwrap_or_else(|| {
            shapes.push((shape, [" | | ".into(), " | | ".into()]));
            shapes.len() - 1
        });
        shapes[index].1[direction] = cells;
        let [date, gpu, driver, commit] = ["date", "gpu", "driver", "commit"].map(|column| row.get(column));
        source = format!(
            "{}, {}, driver {}, commit {}; a copy moves {:.0} GB/s.\n",
            date?,
            gpu?,
            driver?,
            commit?,
            row.number("copy_gbps")?
        );
    }
    if shapes.is_empty() {
        return Ok(source);
    }
    let mut table = String::from(
        "| B×H×N×D×E | dtype | backend | forward ms | GB/s | of copy | backward ms | GB/s | of copy |\n\
         |---|---|---|---:|---:|---:|---:|---:|---:|\n",
    );
    for (shape, [forward, backward]) in shapes {
        writeln!(table, "| {shape} | {forward} | {backward} |")?;
    }
    Ok(format!("{table}\n{source}"))
}

/// The worst error of every output per dtype, which is a word of the name of the case.
fn accuracy(rows: &[Row]) -> Result<String> {
    let mut worst: BTreeMap<(String, String), (f64, f64)> = BTreeMap::new();
    for row in rows {
        let case = row.get("case")?;
        let mut words = case.split(|c: char| !c.is_ascii_alphanumeric());
        let dtype = words
            .find(|word| ["bf16", "f16", "f32"].contains(word))
            .with_context(|| format!("no dtype in `{case}`"))?;
        let (error, bound) = (row.number("error")?, row.number("bound")?);
        let entry = worst.entry((dtype.into(), row.get("output")?.into())).or_insert((error, bound));
        // Nothing is greater than a NaN: it stays.
        if error.is_nan() || error > entry.0 {
            *entry = (error, bound);
        }
    }
    let Some(last) = rows.last() else { return Ok(NO_RECORD.into()) };
    let mut table = String::from("| dtype | output | worst error | bound |\n|---|---|---:|---:|\n");
    for ((dtype, output), (error, bound)) in worst {
        writeln!(table, "| {dtype} | {output} | {error:.2e} | {bound:.1e} |")?;
    }
    let [date, gpu, driver, commit] = ["date", "gpu", "driver", "commit"].map(|column| last.get(column));
    writeln!(table, "\n{}, {}, driver {}, commit {}; {} checks.", date?, gpu?, driver?, commit?, rows.len())?;
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
            2026-01-02,abc,H200,580,cuda,forward,bf16,6,8,2048,128,64,0.0311,2430,57.1,4277,\n\
            2026-01-02,abc,H200,580,cuda,backward,bf16,6,8,2048,128,64,0.065,2100,49.5,4277,\"a, b\"\n\
            2026-01-02,abc,H200,580,cuda,decode,bf16,6,8,1,128,64,0.01,1,1,4277,\n";
        let table = speed(&Row::parse(record).unwrap()).unwrap();
        let line = "| 6×8×2048×128×64 | bf16 | cuda | 0.031 | 2430 | 57 % | 0.065 | 2100 | 50 % |\n";
        assert!(table.contains(line) && table.lines().count() == 5, "{table}");
        assert_eq!(speed(&[]).unwrap(), NO_RECORD);
    }

    #[test]
    fn accuracy_keeps_the_worst_and_nan() {
        let record = "date,commit,gpu,driver,case,output,error,bound\n\
            d,c,g,1,bf16 n=64,o,1e-3,2.8e-3\nd,c,g,1,bf16 n=65,o,2e-3,2.8e-3\nd,c,g,1,f16 n=1,dq,NaN,5e-4\nd,c,g,1,f16 n=2,dq,1e-4,5e-4\n";
        let table = accuracy(&Row::parse(record).unwrap()).unwrap();
        assert!(table.contains("| bf16 | o | 2.00e-3 | 2.8e-3 |\n| f16 | dq | NaN | 5.0e-4 |\n"), "{table}");
    }
}
