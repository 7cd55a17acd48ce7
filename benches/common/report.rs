//! The table on standard output.

use super::{Machine, Measurement};

/// Machine and column names.
pub fn heading(machine: &Machine) -> String {
    format!(
        "{}, copy {:.1} GB/s\n{:<20} {:<21} {:>10} {:>10} {:>5} {:>8} {:>7}  remarks and relative errors against f64",
        machine.device, machine.copy_gbps, "B×H×N×D×E", "pass", "first ms", "warm ms", "reps", "GB/s", "% copy"
    )
}

/// One line for each pass.
pub fn lines(machine: &Machine, measurement: &Measurement) -> String {
    let Measurement { shape, dtype, timings, .. } = measurement;
    let lines = timings.iter().map(|timing| {
        let rate = timing.gbps(shape, *dtype);
        let errors = measurement.errors_of(timing.pass).map_or_else(String::new, |(outputs, heads)| {
            let listed: Vec<String> = outputs.iter().map(|(name, error)| format!("{name} {error:.2e}")).collect();
            format!("; {} ({heads} of {} heads)", listed.join(", "), shape.batch * shape.heads)
        });
        format!(
            "{:<20} {:<21} {:>10.3} {:>10.4} {:>5} {:>8.1} {:>7.1}  {}{errors}",
            shape,
            timing.pass.name(),
            timing.first_ms,
            timing.warm_ms,
            timing.repetitions,
            rate,
            100.0 * rate / machine.copy_gbps,
            timing.note
        )
    });
    lines.collect::<Vec<String>>().join("\n")
}
