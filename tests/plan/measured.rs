//! The choices against what was measured.

use std::collections::BTreeMap;

use lightning_attention::plan::{Device, Schedule};
use lightning_attention::{Plan, Problem};

/// On the grid that was measured on an H200, no pinned schedule beats the planner's by more than a tenth.
#[test]
fn choices_are_near_the_best_measured() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/records/h200/plan.csv");
    let mut reader = csv::Reader::from_path(path).unwrap();
    let headers = reader.headers().unwrap().clone();
    let column = |name: &str| headers.iter().position(|header| header == name).unwrap();
    let (pass, span, ms) = (column("pass"), column("span"), column("ms"));
    let shape = ["b", "h", "n", "d", "e"].map(column);
    let schedule = ["family", "segments", "sharers", "value_tiles", "span"].map(column);
    // (pass, shape) → (span, schedule) → least milliseconds; the planner's schedule of the day was measured twice.
    type Measured = BTreeMap<(String, [usize; 5]), BTreeMap<(String, String), f64>>;
    let mut measured = Measured::new();
    for record in reader.records() {
        let record = record.unwrap();
        let shape = shape.map(|column| record[column].parse().unwrap());
        let schedule = (record[span].to_string(), schedule.map(|column| &record[column]).join(" "));
        let ms: f64 = record[ms].parse().unwrap();
        let of_shape = measured.entry((record[pass].to_string(), shape)).or_default();
        of_shape.entry(schedule).and_modify(|least| *least = least.min(ms)).or_insert(ms);
    }
    assert!(measured.len() >= 80, "forward and backward of at least 40 shapes");

    let list = |values: &[u32]| values.iter().map(u32::to_string).collect::<Vec<_>>().join("+");
    let mut unmeasured = Vec::new();
    for ((pass, [b, h, n, d, e]), schedules) in &measured {
        let plan = Plan::new(&Problem::new(*b, *h, *n, *d, *e), Device::H200).unwrap();
        let (chosen, roles) = match (pass.as_str(), plan.checkpoints()) {
            ("forward", _) => (plan.forward(), 1),
            ("backward", _) => (plan.backward(), 3),
            ("checkpointed forward", Some(checkpoints)) => (&checkpoints.forward, 1),
            ("checkpointed backward", Some(checkpoints)) => (&checkpoints.backward, 3),
            ("checkpointed forward" | "checkpointed backward", None) => continue,
            _ => panic!("`{pass}` is no pass"),
        };
        let Schedule { arch, segments, sharers, value_tiles, sweep, .. } = chosen;
        let span_len = plan.checkpoints().filter(|_| pass.starts_with("checkpointed")).map(|c| c.span_len).or(*sweep);
        let span = span_len.map_or_else(String::new, |span_len| span_len.to_string());
        let (sharers, value_tiles) = (list(&sharers[..roles]), list(&value_tiles[..roles]));
        let chosen = (span.clone(), format!("{arch:?} {segments} {sharers} {value_tiles} {span}"));
        // Other spans are other checkpoints: more memory or less, from another forward pass.
        let is_comparable = |other: &str| !pass.starts_with("checkpointed") || other == span;
        let alternatives = schedules.iter().filter(|((other, _), _)| is_comparable(other));
        let best = alternatives.map(|(_, &ms)| ms).fold(f64::INFINITY, f64::min);
        match schedules.get(&chosen) {
            Some(ms) => {
                let chosen = chosen.1;
                assert!(ms / best <= 1.10, "{pass} {b}×{h}×{n}×{d}×{e}: {chosen} takes {ms} ms, the best {best}")
            }
            None => unmeasured.push(format!("{pass} {b}×{h}×{n}×{d}×{e}: {}", chosen.1)),
        }
    }
    // Mixed numbers of sharers were measured only where the planner of the day chose them.
    assert!(unmeasured.len() <= 4, "{} choices were not measured:\n{}", unmeasured.len(), unmeasured.join("\n"));
}
