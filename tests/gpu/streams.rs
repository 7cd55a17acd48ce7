//! Asynchrony: reruns, graphs, streams, threads.

use lightning_attention::cuda::Attention;
use lightning_attention::cuda::cust::stream::{Stream, StreamFlags};
use lightning_attention::{DType, Problem};

use crate::bench::gpu::{Gpu, Graph, Set};
use crate::bench::{Pass, SEED};
use crate::device::{device, exclusive};

fn problem() -> Problem {
    Problem::new(1, 3, 4000, 128, 64)
}

/// Whether backward is one sweep, and the passes: between them all kernels run.
const RUNS: [(bool, [Pass; 2]); 3] = [(false, Pass::BOTH), (true, Pass::BOTH), (true, Pass::CHECKPOINTED)];

/// Cut in segments.
fn prepare(gpu: &Gpu, problem: &Problem, sweep: bool) -> Attention {
    let plan = gpu.engine.plan(problem).unwrap().with_sweep(sweep).with_checkpoints(true).with_segments(5, 5);
    gpu.engine.prepare_plan(plan).unwrap()
}

#[test]
fn reruns_have_the_same_bits() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    for problem in [SEED[0].problem(DType::Bf16), problem()] {
        let mut set = gpu.set(&problem, 0).unwrap();
        for (sweep, passes) in RUNS {
            let mut attention = prepare(gpu, &problem, sweep);
            set.hold_checkpoints(attention.plan()).unwrap();
            let mut run = || {
                set.poison().unwrap();
                for pass in passes {
                    set.enqueue(&mut attention, &gpu.stream, pass).unwrap();
                }
                gpu.stream.synchronize().unwrap();
                set.bits().unwrap()
            };
            let first = run();
            for _ in 0..3 {
                assert!(run() == first, "{problem:?}, {passes:?}: another run gives other bits");
            }
        }
    }
}

#[test]
fn a_captured_graph_gives_the_same_bits() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let problem = problem();
    let mut set = gpu.set(&problem, 0).unwrap();
    for (sweep, passes) in RUNS {
        let mut attention = prepare(gpu, &problem, sweep);
        set.hold_checkpoints(attention.plan()).unwrap();
        let enqueue = |attention: &mut _, set: &Set| {
            passes.into_iter().try_for_each(|pass| set.enqueue(attention, &gpu.stream, pass))
        };
        set.poison().unwrap();
        enqueue(&mut attention, &set).unwrap();
        gpu.stream.synchronize().unwrap();
        let expected = set.bits().unwrap();

        let graph = Graph::capture(&gpu.stream, |_| enqueue(&mut attention, &set)).unwrap();
        for _ in 0..2 {
            set.poison().unwrap();
            graph.launch(&gpu.stream).unwrap();
            gpu.stream.synchronize().unwrap();
            assert!(set.bits().unwrap() == expected, "{passes:?}: a replay gives other bits");
        }
    }
}

/// Two streams at the same time, with an attention each, give the bits that each gives alone.
fn two_streams(sweep: bool, passes: [Pass; 2]) {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let problem = problem();
    let prepare = || prepare(gpu, &problem, sweep);
    let set = |seed, attention: &Attention| {
        let mut set = gpu.set(&problem, seed).unwrap();
        set.hold_checkpoints(attention.plan()).unwrap();
        set
    };
    let expected = [0, 1].map(|seed| {
        let mut attention = prepare();
        let set = set(seed, &attention);
        for pass in passes {
            set.enqueue(&mut attention, &gpu.stream, pass).unwrap();
        }
        gpu.stream.synchronize().unwrap();
        set.bits().unwrap()
    });
    let streams = [0, 1].map(|_| Stream::new(StreamFlags::DEFAULT, None).unwrap());
    let mut attentions = [0, 1].map(|_| prepare());
    let sets = [0, 1].map(|seed| set(seed, &attentions[0]));
    for _ in 0..10 {
        for pass in passes {
            for i in [0, 1] {
                sets[i].enqueue(&mut attentions[i], &streams[i], pass).unwrap();
            }
        }
    }
    for i in [0, 1] {
        streams[i].synchronize().unwrap();
        assert!(sets[i].bits().unwrap() == expected[i], "stream {i} gives other bits");
    }
}

#[test]
fn two_streams_with_a_kernel_each() {
    two_streams(false, Pass::BOTH);
}

#[test]
fn two_streams_with_one_sweep() {
    two_streams(true, Pass::BOTH);
}

#[test]
fn two_streams_with_checkpoints() {
    two_streams(true, Pass::CHECKPOINTED);
}

/// The engine's calls bring their own context: a thread that has none may plan, prepare, run and drop.
#[test]
fn a_thread_without_a_context() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let problem = problem();
    let set = gpu.set(&problem, 0).unwrap();
    std::thread::scope(|scope| {
        let run = || {
            let mut attention = prepare(gpu, &problem, false);
            set.enqueue(&mut attention, &gpu.stream, Pass::Forward).unwrap();
            set.enqueue(&mut attention, &gpu.stream, Pass::Backward).unwrap();
            attention
        };
        let attention = scope.spawn(run).join().unwrap();
        gpu.stream.synchronize().unwrap();
        scope.spawn(|| drop(attention)).join().unwrap();
    });
    set.refuse_nan().unwrap();
}
