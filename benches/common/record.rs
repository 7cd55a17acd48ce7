//! CSV records: one line for each figure, appended.

use std::fs::{self, OpenOptions};
use std::path::Path;

use anyhow::{Context, Result};
use lightning_attention::DType;

use super::{Machine, Measurement, Shape, gbps};

const COLUMNS: [&str; 17] = [
    "date",
    "commit",
    "gpu",
    "driver",
    "backend",
    "op",
    "dtype",
    "b",
    "h",
    "n",
    "d",
    "e",
    "ms",
    "gbps",
    "pct_copy",
    "copy_gbps",
    "note",
];

/// One figure.
#[derive(Clone, Debug)]
pub struct Record {
    pub op: &'static str,
    pub shape: Shape,
    pub dtype: DType,
    pub ms: f64,
    /// Essential bytes, where a rate makes sense.
    pub bytes: Option<usize>,
    pub note: String,
}

/// The records of a measurement.
pub fn of(measurement: &Measurement) -> Vec<Record> {
    let Measurement { shape, dtype, timings, .. } = measurement;
    timings
        .iter()
        .map(|timing| {
            let mut note = timing.note.clone();
            for (output, error) in measurement.errors_of(timing.pass).into_iter().flat_map(|(outputs, _)| outputs) {
                note += &format!("; {output} error {error:.2e}");
            }
            Record {
                op: timing.pass.name(),
                shape: *shape,
                dtype: *dtype,
                ms: timing.warm_ms,
                bytes: Some(timing.pass.essential_bytes(shape, *dtype)),
                note,
            }
        })
        .collect()
}

/// Appends to the file at `path`, with a header when it is new.
pub fn append(path: &Path, machine: &Machine, records: &[Record]) -> Result<()> {
    let is_new = fs::metadata(path).map_or(true, |meta| meta.len() == 0);
    let file = OpenOptions::new().create(true).append(true).open(path);
    let mut writer = csv::Writer::from_writer(file.with_context(|| format!("cannot write {}", path.display()))?);
    if is_new {
        writer.write_record(COLUMNS)?;
    }
    let (date, commit) = (date(), commit());
    for Record { op, shape, dtype, ms, bytes, note } in records {
        let rate = bytes.map(|bytes| gbps(bytes, *ms));
        let optional = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.1}"));
        writer.write_record([
            date.clone(),
            commit.clone(),
            machine.device.clone(),
            machine.driver.clone(),
            machine.backend.to_string(),
            op.to_string(),
            dtype.to_string(),
            shape.batch.to_string(),
            shape.heads.to_string(),
            shape.seq_len.to_string(),
            shape.head_dim.to_string(),
            shape.value_dim.to_string(),
            format!("{ms:.4}"),
            optional(rate),
            optional(rate.map(|rate| 100.0 * rate / machine.copy_gbps)),
            optional(rate.map(|_| machine.copy_gbps)),
            note.clone(),
        ])?;
    }
    writer.flush()?;
    Ok(())
}

/// Today, UTC, as `2026-12-01`.
pub fn date() -> String {
    time::OffsetDateTime::now_utc().date().to_string()
}

/// The commit measured: `LIGHTNING_ATTENTION_COMMIT`, else `commit.txt` beside the executable.
pub fn commit() -> String {
    let beside = || {
        let path = std::env::current_exe().ok()?.with_file_name("commit.txt");
        Some(fs::read_to_string(path).ok()?.trim().to_string())
    };
    std::env::var("LIGHTNING_ATTENTION_COMMIT").ok().or_else(beside).unwrap_or_else(|| "unknown".to_string())
}
