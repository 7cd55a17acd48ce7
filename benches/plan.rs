//! The planner's choices against every other: measures pinned plans over a grid of shapes on the GPU, and says how far
//! the planned one is from the best: `cargo bench --features cuda --bench plan -- --csv benches/records/h200/plan.csv`.

mod common;

use anyhow::Result;

#[cfg(feature = "cuda")]
fn main() -> Result<()> {
    grid::main()
}

#[cfg(not(feature = "cuda"))]
fn main() -> Result<()> {
    println!("the planner plans for GPUs; build with `--features cuda`");
    Ok(())
}

#[cfg(feature = "cuda")]
mod grid {
    use std::path::PathBuf;

    use anyhow::Result;
    use clap::Parser;
    use lightning_attention::plan::Schedule;
    use lightning_attention::{DType, Plan};
    use lightning_attention_kernels::variants::Arch;

    use super::common::gpu::{Gpu, schedule};
    use super::common::{Pass, SUITE, Shape};

    #[derive(Parser)]
    struct Options {
        /// Writes the figures to this file.
        #[arg(long, value_name = "PATH")]
        csv: Option<PathBuf>,
        /// Shapes to measure instead of the grid.
        #[arg(long = "shape", value_name = "B,H,N,D,E")]
        shapes: Vec<Shape>,
        /// Measures only passes with one sweep and checkpointed ones, beside the planner's own.
        #[arg(long)]
        only_sweeps: bool,
        /// What cargo passes to every bench.
        #[arg(long, hide = true)]
        bench: bool,
    }

    /// What is expected to take so many times as long as the planner's choice is not measured.
    const MOST_PREDICTED: f64 = 1.8;
    /// Replays of a graph of at least eight calls.
    const REPETITIONS: usize = 9;

    /// The recorded shapes, and around them in heads, length and dims.
    fn grid() -> Vec<Shape> {
        let mut shapes = SUITE.to_vec();
        for (heads, lengths) in [(1, [4096, 65_536]), (4, [2048, 32_768]), (16, [1024, 16_384]), (33, [1000, 8192])] {
            shapes.extend(lengths.map(|n| Shape::new(1, heads, n, 128, 64)));
        }
        for heads in [40, 66, 100, 132, 200, 264] {
            shapes.push(Shape::new(1, heads, 4096, 128, 128));
            shapes.push(Shape::new(1, heads, 2048, 64, 64));
        }
        for (d, e) in [(64, 128), (96, 96), (72, 40), (128, 64)] {
            shapes.push(Shape::new(2, 16, 3000, d, e));
            shapes.push(Shape::new(8, 32, 700, d, e));
        }
        shapes
    }

    /// Plans with one thing or another pinned; the planner's own first.
    fn plans(planned: &Plan, only_sweeps: bool) -> Vec<Plan> {
        let mut plans = vec![planned.clone()];
        let segments = [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 64, 128];
        let families = [(Arch::Sm90, 64), (Arch::Sm90, 128), (Arch::Sm80, 64)];
        for &(family, value_tile) in if only_sweeps { &families[..0] } else { &families } {
            for sharers in 1..=if family == Arch::Sm90 { 4 } else { 1 } {
                for segments in segments {
                    let plan = planned.clone().with_family(family).with_sweep(false).with_segments(segments, segments);
                    let plan = plan.with_sharers(sharers, value_tile);
                    let blocks = planned.problem().batch * planned.problem().heads * (segments * sharers) as usize;
                    if !plans.contains(&plan) && (segments * sharers == 1 || blocks <= 1056) {
                        plans.push(plan);
                    }
                }
            }
        }
        for sharers in 1..=4 {
            for segments in [1, 2, 4, 8, 16, 32, 64] {
                let pinned =
                    |plan: &Plan, tile| plan.clone().with_segments(segments, segments).with_sharers(sharers, tile);
                let blocks = planned.problem().batch * planned.problem().heads * (segments * sharers) as usize;
                // Far from a wave of blocks nothing is to be had.
                if segments * sharers > 1 && !(48..=264).contains(&blocks) {
                    continue;
                }
                let lean = pinned(&planned.clone().with_family(Arch::Sm90).with_sweep(true), 64);
                let paired = pinned(&planned.clone().with_family(Arch::Sm90).with_checkpoints(true), 64);
                for plan in [lean, paired] {
                    if !plans.contains(&plan) {
                        plans.push(plan);
                    }
                }
            }
        }
        plans
    }

    pub(super) fn main() -> Result<()> {
        let options = Options::parse();
        let gpu = Gpu::new(0)?;
        let file: Box<dyn std::io::Write> = match &options.csv {
            Some(path) => Box::new(std::fs::File::create(path)?),
            None => Box::new(std::io::sink()),
        };
        let mut csv = csv::Writer::from_writer(file);
        csv.write_record([
            "pass",
            "b",
            "h",
            "n",
            "d",
            "e",
            "family",
            "segments",
            "sharers",
            "value_tiles",
            "sweep",
            "ms",
            "predicted_ms",
        ])?;
        let shapes = if options.shapes.is_empty() { grid() } else { options.shapes };
        let mut worst: f64 = 1.0;
        for shape in shapes {
            let problem = shape.problem(DType::Bf16);
            let mut sets = gpu.rotated_sets(&problem, &shape)?;
            let plans = plans(&gpu.engine.plan(&problem)?, options.only_sweeps);
            let most = plans.iter().max_by_key(|plan| plan.checkpoint_bytes()).expect("the planner's is there");
            for set in &mut sets {
                set.hold_checkpoints(most)?;
            }
            for pass in Pass::BOTH
                .into_iter()
                .chain(Pass::CHECKPOINTED)
                .filter(|&pass| !(options.only_sweeps && pass == Pass::Forward))
            {
                let mut timed: Vec<(f64, Schedule)> = Vec::new();
                for plan in &plans {
                    let schedule = *schedule(plan, pass);
                    let is_checkpointed = Pass::CHECKPOINTED.contains(&pass);
                    let is_new = timed.iter().all(|(_, other)| *other != schedule);
                    let is_near =
                        schedule.predicted_us <= MOST_PREDICTED * self::schedule(&plans[0], pass).predicted_us;
                    if !is_new || !is_near || (is_checkpointed && plan.checkpoints().is_none()) {
                        continue;
                    }
                    let mut attention = gpu.engine.prepare_plan(plan.clone())?;
                    let ms = gpu.pass_ms_of(&mut attention, &sets, pass, REPETITIONS)?;
                    timed.push((ms, schedule));
                    let Shape { batch, heads, seq_len, head_dim, value_dim } = shape;
                    let list = |values: [u32; 3]| {
                        let values = &values[..if pass.is_forward() { 1 } else { 3 }];
                        values.iter().map(u32::to_string).collect::<Vec<_>>().join("+")
                    };
                    csv.serialize((
                        pass.name(),
                        (batch, heads, seq_len, head_dim, value_dim),
                        format!("{:?}", schedule.arch),
                        schedule.segments,
                        list(schedule.sharers),
                        list(schedule.value_tiles),
                        schedule.sweep.map(|sweep| sweep.to_string()),
                        format!("{ms:.4}"),
                        format!("{:.4}", schedule.predicted_us / 1e3),
                    ))?;
                }
                let Some(&planned) = timed.first() else { continue };
                timed.sort_by(|a, b| a.0.total_cmp(&b.0));
                let ratio = planned.0 / timed[0].0;
                worst = worst.max(ratio);
                let show = |(ms, s): (f64, Schedule)| {
                    format!(
                        "{ms:.4} ms {:?} {} segments {:?} sharers {:?} {:?}",
                        s.arch, s.segments, s.sharers, s.value_tiles, s.sweep
                    )
                };
                println!(
                    "{shape:<21} {:<8} {ratio:.3}  planned {} ({:.4} predicted)  best {}",
                    pass.name(),
                    show(planned),
                    planned.1.predicted_us / 1e3,
                    show(timed[0])
                );
            }
            csv.flush()?;
        }
        println!("worst: {worst:.3}");
        Ok(())
    }
}
