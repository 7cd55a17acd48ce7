//! How time grows with the length of the sequence: a table and a figure from a record of one shape at every doubling.

use crate::readme::{Row, source};
use anyhow::{Result, ensure};
use plotters::prelude::*;
use std::fmt::Write as _;

/// Twice the length takes at most so many times as long where time is linear.
const BOUND: f64 = 2.02;

/// Beside the essential bytes of these the figure shows a copy; the checkpointed passes have the same.
const PLAIN: [&str; 2] = ["forward", "backward"];

const COLORS: [RGBColor; 4] =
    [RGBColor(31, 119, 180), RGBColor(214, 39, 40), RGBColor(23, 165, 160), RGBColor(255, 127, 14)];

const FONT: (&str, u32) = ("sans-serif", 18);

/// A pass at every length.
struct Series {
    pass: String,
    ms: Vec<f64>,
    /// What a copy of the essential bytes takes.
    copy_ms: Vec<f64>,
}

impl Series {
    /// t(2N) / t(N), one fewer than there are lengths.
    fn ratios(&self) -> impl Iterator<Item = f64> {
        self.ms.windows(2).map(|ms| ms[1] / ms[0])
    }
}

/// A record of growth.
pub struct Growth {
    shape: String,
    source: String,
    /// Each twice the one before.
    lengths: Vec<u32>,
    series: Vec<Series>,
}

impl Growth {
    /// Refuses what was not measured in one run, or not for every pass at every length.
    pub fn of(rows: &[Row]) -> Result<Self> {
        ensure!(!rows.is_empty(), "the record of growth is empty");
        let run = |row: &Row| {
            let columns = ["commit", "gpu", "driver", "backend", "dtype", "b", "h", "d", "e", "copy_gbps"];
            columns.into_iter().map(|column| row.get(column).map(str::to_owned)).collect::<Result<Vec<_>>>()
        };
        let (mut lengths, mut series) = (Vec::new(), Vec::<Series>::new());
        for row in rows {
            ensure!(run(row)? == run(&rows[0])?, "the record of growth is of more than one run, or shape");
            let (pass, n, ms) = (row.get("op")?, row.get("n")?.parse()?, row.number("ms")?);
            ensure!(ms > 0.0, "{pass} at N = {n} takes {ms} ms");
            if lengths.last() != Some(&n) {
                ensure!(lengths.last().is_none_or(|last| 2 * last == n), "N = {n} is not twice the length before");
                lengths.push(n);
            }
            let index = series.iter().position(|known| known.pass == pass).unwrap_or_else(|| {
                series.push(Series { pass: pass.into(), ms: Vec::new(), copy_ms: Vec::new() });
                series.len() - 1
            });
            series[index].ms.push(ms);
            series[index].copy_ms.push(row.number("gbps")? * ms / row.number("copy_gbps")?);
            ensure!(series[index].ms.len() == lengths.len(), "{pass} is not measured once at every length");
        }
        for pass in PLAIN {
            ensure!(series.iter().any(|series| series.pass == pass), "no `{pass}` in the record of growth");
        }
        for Series { pass, ms, .. } in &series {
            ensure!(lengths.len() > 1 && ms.len() == lengths.len(), "{pass} is not measured once at every length");
        }
        let [b, h, d, e, dtype] = ["b", "h", "d", "e", "dtype"].map(|column| rows[0].get(column));
        let shape = format!("{}×{}×N×{}×{}, {}", b?, h?, d?, e?, dtype?);
        let source = format!("{}; a copy moves {:.0} GB/s", source(&rows[0])?, rows[0].number("copy_gbps")?);
        Ok(Self { shape, source, lengths, series })
    }

    /// The shortest length and the longest.
    fn ends(&self) -> (u32, u32) {
        (self.lengths[0], self.lengths[self.lengths.len() - 1])
    }

    /// The table, and what it shows, with the figure at `path`.
    pub fn block(&self, path: &str) -> Result<String> {
        let (mut text, mut rule) = (format!("| N of {} |", self.shape), "|---:|".to_owned());
        for series in &self.series {
            write!(text, " {} ms | t(2N)/t(N) |", series.pass)?;
            rule += "---:|---:|";
        }
        writeln!(text, "\n{rule}")?;
        for (index, n) in self.lengths.iter().enumerate() {
            write!(text, "| {n} |")?;
            for series in &self.series {
                let ratio = series.ratios().nth(index).map_or_else(String::new, |ratio| format!("{ratio:.3}"));
                write!(text, " {:.3} | {ratio} |", series.ms[index])?;
            }
            writeln!(text)?;
        }
        let (first, last) = self.ends();
        let largest = |series: &Series| series.ratios().fold(0.0, f64::max);
        let (linear, other): (Vec<_>, Vec<_>) = self.series.iter().partition(|series| largest(series) <= BOUND);
        let names = |series: &[&Series]| {
            let names: Vec<_> = series.iter().map(|series| format!("{} {:.3}", series.pass, largest(series))).collect();
            names.join(", ")
        };
        writeln!(text)?;
        if !linear.is_empty() {
            let names = names(&linear);
            writeln!(
                text,
                "From {first} to {last}, twice the length takes at most {BOUND} times as long. Largest ratios: {names}."
            )?;
        }
        if !other.is_empty() {
            writeln!(text, "Not so: {}.", names(&other))?;
        }
        writeln!(text, "\n![Time by length]({path})\n\n{}.", self.source)?;
        Ok(text)
    }

    /// An SVG of the same, both axes logarithmic.
    pub fn figure(&self) -> Result<String> {
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, (800, 500)).into_drawing_area();
        area.fill(&WHITE)?;
        let times = || self.series.iter().flat_map(|series| series.ms.iter().chain(&series.copy_ms));
        let bottom = times().fold(f64::INFINITY, |low, &ms| low.min(ms));
        let top = times().fold(0.0, |high: f64, &ms| high.max(ms));
        let (first, last) = self.ends();
        let mut chart =
            ChartBuilder::on(&area).margin(15).x_label_area_size(50).y_label_area_size(55).build_cartesian_2d(
                (first * 9 / 10..last / 9 * 10).log_scale().with_key_points(self.lengths.clone()),
                (bottom / 1.3..top * 1.3).log_scale(),
            )?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc(format!("N of {}", self.shape)).y_desc("ms").y_label_formatter(&f64::to_string);
        mesh.label_style(FONT).axis_desc_style(FONT).draw()?;

        let mut draw = |label: String, ms: &[f64], style: ShapeStyle, point_size| -> Result<()> {
            let line = LineSeries::new(self.lengths.iter().copied().zip(ms.iter().copied()), style);
            let key = move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style);
            chart.draw_series(line.point_size(point_size))?.label(label).legend(key);
            Ok(())
        };
        for (Series { pass, ms, copy_ms }, color) in self.series.iter().zip(COLORS.into_iter().cycle()) {
            draw(pass.clone(), ms, color.filled().stroke_width(2), 3)?;
            if PLAIN.contains(&&**pass) {
                draw(format!("copy of the bytes of {pass}"), copy_ms, color.mix(0.6).into(), 0)?;
            }
        }
        let mut keys = chart.configure_series_labels();
        keys.position(SeriesLabelPosition::UpperLeft).label_font(FONT);
        keys.background_style(WHITE).border_style(BLACK.mix(0.2)).draw()?;
        area.present()?;
        drop(chart);
        drop(area);
        Ok(svg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSES: [&str; 4] = ["forward", "backward", "checkpointed forward", "checkpointed backward"];

    /// A record in which the last forward takes `last_ms`.
    fn record(last_ms: f64) -> String {
        let mut text =
            String::from("date,commit,gpu,driver,backend,op,dtype,b,h,n,d,e,ms,gbps,pct_copy,copy_gbps,note\n");
        for (n, ms) in [(8192, 1.0), (16384, 2.0), (32768, 4.0)] {
            for (pass, factor) in PASSES.into_iter().zip([1.0, 3.0, 1.125, 2.5]) {
                let ms = if (pass, n) == ("forward", 32768) { last_ms } else { ms * factor };
                writeln!(text, "d,c,g,1,cuda,{pass},bf16,6,8,{n},128,64,{ms},2000,50,4000,").unwrap();
            }
        }
        text
    }

    fn growth(record: &str) -> Result<Growth> {
        Growth::of(&Row::parse(record)?)
    }

    #[test]
    fn ratios_are_of_a_length_and_its_double() {
        let growth = growth(&record(4.5)).unwrap();
        assert_eq!(growth.lengths, [8192, 16384, 32768]);
        assert_eq!(growth.series.iter().map(|series| &*series.pass).collect::<Vec<_>>(), PASSES);
        assert_eq!(growth.series[0].ratios().collect::<Vec<_>>(), [2.0, 2.25]);
        assert_eq!(growth.series[1].copy_ms, [1.5, 3.0, 6.0]);
    }

    #[test]
    fn the_bound_is_claimed_of_passes_whose_ratios_hold_it() {
        let block = |last_ms| growth(&record(last_ms)).unwrap().block("path.svg").unwrap();
        let linear = block(4.04);
        assert!(linear.starts_with("| N of 6×8×N×128×64, bf16 | forward ms | t(2N)/t(N) | backward ms |"), "{linear}");
        assert!(linear.contains("| 16384 | 2.000 | 2.020 | 6.000 | 2.000 |"), "{linear}");
        assert!(linear.contains("| 32768 | 4.040 |  | 12.000 |  |"), "{linear}");
        let all = "at most 2.02 times as long. Largest ratios: forward 2.020, backward 2.000, checkpointed forward 2.000, \
                   checkpointed backward 2.000.\n";
        assert!(linear.contains(all) && !linear.contains("Not so"), "{linear}");
        assert!(linear.contains("![Time by length](path.svg)"), "{linear}");
        let steeper = block(4.042);
        assert!(steeper.contains("Largest ratios: backward 2.000, "), "{steeper}");
        assert!(steeper.contains("Not so: forward 2.021.\n"), "{steeper}");
    }

    #[test]
    fn a_record_with_gaps_is_refused() {
        let record = record(4.0);
        growth(&record).unwrap();
        let without = |what: &str| record.lines().filter(|line| !line.contains(what)).collect::<Vec<_>>().join("\n");
        for what in
            [",cuda,", ",16384,", ",backward,", ",forward,bf16,6,8,8192,", ",checkpointed backward,bf16,6,8,32768,"]
        {
            assert!(growth(&without(what)).is_err(), "{what}");
        }
        assert!(growth(&record.replace("32768,128,64,4,2000,50,4000", "32768,128,64,4,2000,50,4001")).is_err());
        let twice = record.lines().chain(record.lines().skip(1)).collect::<Vec<_>>().join("\n");
        assert!(growth(&twice).is_err());
    }

    #[test]
    fn the_figure_has_every_series_and_is_the_same_each_time() {
        let growth = growth(&record(4.0)).unwrap();
        let figure = growth.figure().unwrap();
        assert!(figure.starts_with("<svg") && figure.ends_with("</svg>\n"), "{figure}");
        for text in
            PASSES.into_iter().chain(["copy of the bytes of forward", "copy of the bytes of backward", "8192", "32768"])
        {
            assert!(figure.lines().any(|line| line == text), "no `{text}` in {figure}");
        }
        for color in ["#1F77B4", "#D62728", "#17A5A0", "#FF7F0E"] {
            let points = figure.lines().filter(|line| line.starts_with("<circle") && line.contains(color));
            assert_eq!(points.count(), 3, "{color} in {figure}");
        }
        assert_eq!(growth.figure().unwrap(), figure);
    }
}
