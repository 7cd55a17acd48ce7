//! Measurements on the GPU: rotated tensor sets, CUDA graphs, events.

use core::ptr;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use half::{bf16, f16};
use lightning_attention::cuda::cust::event::{Event, EventFlags};
use lightning_attention::cuda::cust::memory::{CopyDestination, DeviceBuffer};
use lightning_attention::cuda::cust::stream::{Stream, StreamFlags};
use lightning_attention::cuda::cust::sys::{self, CUgraphExec, CUresult, CUstreamCaptureMode};
use lightning_attention::cuda::{Attention, Engine, RawTensor};
use lightning_attention::plan::Schedule;
use lightning_attention::{Backward, DType, Extent, Forward, Layout, Plan, Problem};

use rayon::prelude::*;

use super::oracle::{self, HeadRows};
use super::{Machine, Measurement, Pass, Shape, Timing, cpu, gbps, median};

/// Repetitions whose median is reported.
pub const REPETITIONS: usize = 40;

/// Calls in a graph, at least: enough that the graph's start and the events do not count.
pub const CALLS: usize = 8;

/// Idle time before a pass is timed. Under load the GPU's power limit lowers its clock, within a second: without a rest a figure would
/// depend on what was measured before.
const REST: Duration = Duration::from_millis(500);

/// After so long under load a pass is timed again.
const SUSTAINED: Duration = Duration::from_secs(1);

/// Bytes that the inputs of all sets together exceed: three times the L2 cache of an H200 and more.
const ROTATED_BYTES: usize = 200 << 20;

/// Random values on the device that tensors are filled from. The length is prime, so that no two heads see the same
/// values at the same place.
const NOISE_LEN: usize = 16_777_213;

/// A NaN, as bf16 and as f16.
const POISON: u16 = 0xffff;

/// A GPU with a stream and its copy rate.
pub struct Gpu {
    pub engine: Engine,
    pub stream: Stream,
    pub machine: Machine,
    noise: [DeviceBuffer<u16>; 2],
}

impl Gpu {
    pub fn new(device_index: usize) -> Result<Self> {
        let engine = Engine::new(device_index)?;
        let stream = Stream::new(StreamFlags::DEFAULT, None)?;
        let noise: Vec<f32> = cpu::values(1, NOISE_LEN);
        let bits = |to_bits: fn(f32) -> u16| -> Vec<u16> { noise.iter().map(|&x| to_bits(x)).collect() };
        let noise = [
            DeviceBuffer::from_slice(&bits(|x| bf16::from_f32(x).to_bits()))?,
            DeviceBuffer::from_slice(&bits(|x| f16::from_f32(x).to_bits()))?,
        ];
        let machine = machine(&engine, copy_gbps(&stream)?);
        Ok(Gpu { engine, stream, machine, noise })
    }

    /// Tensors of a problem, inputs random, outputs NaN.
    pub fn set(&self, problem: &Problem, seed: usize) -> Result<Set> {
        let noise = match problem.dtype {
            DType::Bf16 => &self.noise[0],
            DType::F16 => &self.noise[1],
            DType::F32 => bail!("the GPU takes bf16 and f16"),
        };
        let input = |shape: [usize; 4], tensor: usize| -> Result<DeviceBuffer<u16>> {
            let buffer = empty(shape.iter().product())?;
            let mut from = (seed * 8 + tensor) * 1_000_003 % NOISE_LEN;
            let mut done = 0;
            while done < buffer.len() {
                let len = (NOISE_LEN - from).min(buffer.len() - done);
                let at = |buffer: &DeviceBuffer<u16>, index: usize| buffer.as_device_ptr().as_raw() + 2 * index as u64;
                // SAFETY: both ranges lie in their buffers.
                check(unsafe { sys::cuMemcpyDtoD_v2(at(&buffer, done), at(noise, from), 2 * len) })?;
                (from, done) = (0, done + len);
            }
            Ok(buffer)
        };
        let output = |shape: [usize; 4]| -> Result<DeviceBuffer<u16>> {
            let mut buffer = empty(shape.iter().product())?;
            buffer.set_16(POISON)?;
            Ok(buffer)
        };
        let (key, value) = (problem.key_shape(), problem.value_shape());
        Ok(Set {
            problem: problem.clone(),
            q: input(key, 0)?,
            k: input(key, 1)?,
            v: input(value, 2)?,
            do_: input(value, 3)?,
            o: output(value)?,
            dq: output(key)?,
            dk: output(key)?,
            dv: output(value)?,
            checkpoints: None,
        })
    }

    /// As many sets as the caches cannot hold.
    pub fn rotated_sets(&self, problem: &Problem, shape: &Shape) -> Result<Vec<Set>> {
        let set_bytes = Pass::Forward.essential_bytes(shape, problem.dtype).max(1);
        let num_sets = (ROTATED_BYTES.div_ceil(set_bytes) + 1).min(32);
        let sets = (0..num_sets).map(|seed| self.set(problem, seed)).collect();
        // The sets are filled by copies on the null stream.
        // SAFETY: the null stream always exists.
        check(unsafe { sys::cuStreamSynchronize(ptr::null_mut()) })?;
        sets
    }

    /// One graph of `calls` calls or some more, as many over each of the rotated `sets`, and their number.
    pub fn pass_graph(
        &self,
        attention: &mut Attention,
        sets: &[Set],
        pass: Pass,
        calls: usize,
    ) -> Result<(Graph, usize)> {
        let calls = calls.next_multiple_of(sets.len());
        let graph = Graph::capture(&self.stream, |stream| {
            (0..calls).try_for_each(|call| sets[call % sets.len()].enqueue(attention, stream, pass))
        })?;
        Ok((graph, calls))
    }

    /// Milliseconds of `replays` of a graph, by events.
    pub fn replay_ms(&self, graph: &Graph, replays: usize) -> Result<f64> {
        let (start, end) = (Event::new(EventFlags::DEFAULT)?, Event::new(EventFlags::DEFAULT)?);
        start.record(&self.stream)?;
        (0..replays).try_for_each(|_| graph.launch(&self.stream))?;
        end.record(&self.stream)?;
        end.synchronize()?;
        Ok(end.elapsed_time_f32(&start)?.into())
    }

    /// Median milliseconds of a pass over the rotated `sets`, of `repetitions` replays.
    pub fn pass_ms_of(&self, attention: &mut Attention, sets: &[Set], pass: Pass, repetitions: usize) -> Result<f64> {
        let graph = self.pass_graph(attention, sets, pass, CALLS)?;
        Ok(self.times(&[&graph], repetitions, Duration::ZERO)?[0])
    }

    /// Median host microseconds of enqueueing a pass.
    pub fn enqueue_us(&self, attention: &mut Attention, set: &Set, pass: Pass) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..REPETITIONS {
            let start = Instant::now();
            set.enqueue(attention, &self.stream, pass)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        self.stream.synchronize()?;
        Ok(median(times))
    }

    /// Measures the passes of a shape.
    pub fn measure(&self, shape: &Shape, problem: &Problem, compare: bool) -> Result<Measurement> {
        Ok(self.measure_together(&[(*shape, problem.clone())], CALLS, compare)?.remove(0))
    }

    /// Measures shapes side by side, for ratios of their times: all tensors are on the device at once, and each
    /// repetition of a pass goes through all shapes, so that a clock that drifts does so for all of them. The largest
    /// shape has `calls` calls in a graph and the others as many as make the same number of rows: graphs of about the
    /// same duration, in which a graph's start has the same share.
    pub fn measure_together(
        &self,
        problems: &[(Shape, Problem)],
        calls: usize,
        compare: bool,
    ) -> Result<Vec<Measurement>> {
        let ready = problems.iter().map(|(shape, problem)| self.ready(shape, problem, compare));
        let mut ready = ready.collect::<Result<Vec<_>>>()?;
        let rows = |shape: &Shape| shape.rows().max(1);
        let most_rows = problems.iter().map(|(shape, _)| rows(shape)).max().unwrap_or(1);
        let mut timings = vec![Vec::new(); problems.len()];
        for (index, pass) in Pass::BOTH.into_iter().chain(Pass::CHECKPOINTED).enumerate() {
            let mut timed = Vec::new();
            for (Ready { shape, sets, attention, first_ms, .. }, timings) in ready.iter_mut().zip(&mut timings) {
                let Some(&first_ms) = first_ms.get(index) else { continue };
                let enqueue_us = self.enqueue_us(attention, &sets[0], pass)?;
                let graph = self.pass_graph(attention, sets, pass, calls * most_rows / rows(shape))?;
                timed.push(Timed { timings, first_ms, note: note(attention.plan(), pass, enqueue_us), graph });
            }
            let graphs: Vec<_> = timed.iter().map(|timed| &timed.graph).collect();
            std::thread::sleep(REST);
            let warm_ms = self.times(&graphs, REPETITIONS, Duration::ZERO)?;
            let sustained_ms = self.times(&graphs, REPETITIONS, SUSTAINED)?;
            for ((timed, warm_ms), sustained_ms) in timed.into_iter().zip(warm_ms).zip(sustained_ms) {
                let Timed { timings, first_ms, note, .. } = timed;
                let note = format!("{note}; sustained {sustained_ms:.4} ms");
                timings.push(Timing { pass, first_ms, warm_ms, repetitions: REPETITIONS, note });
            }
        }
        let measurement = |(Ready { shape, dtype, errors, .. }, timings)| Measurement { shape, dtype, timings, errors };
        Ok(ready.into_iter().zip(timings).map(measurement).collect())
    }

    /// Median milliseconds of a call of each graph, by its last `repetitions` replays. The graphs take turns, at least that often and three
    /// times before, and for at least that `duration`.
    fn times(&self, graphs: &[&(Graph, usize)], repetitions: usize, duration: Duration) -> Result<Vec<f64>> {
        let mut times = vec![Vec::new(); graphs.len()];
        let (start, mut turns) = (Instant::now(), 0);
        while turns < repetitions + 3 || start.elapsed() < duration {
            for ((graph, calls), times) in graphs.iter().zip(&mut times) {
                times.push(self.replay_ms(graph, 1)? / *calls as f64);
            }
            turns += 1;
        }
        Ok(times.into_iter().map(|times| median(times[turns - repetitions..].to_vec())).collect())
    }

    /// Makes the tensors of a shape and the first calls of its passes.
    fn ready(&self, shape: &Shape, problem: &Problem, compare: bool) -> Result<Ready> {
        let mut sets = self.rotated_sets(problem, shape)?;

        let start = Instant::now();
        let mut attention = self.engine.prepare(problem)?;
        let mut first = |start: Instant, pass| -> Result<f64> {
            sets[0].enqueue(&mut attention, &self.stream, pass)?;
            self.stream.synchronize()?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        };
        let mut first_ms = vec![first(start, Pass::Forward)?, first(Instant::now(), Pass::Backward)?];

        let errors_of = |set: &Set| -> Result<Option<oracle::Errors>> {
            if !compare {
                return Ok(None);
            }
            set.refuse_nan()?;
            let heads = oracle::heads_to_compare(problem);
            let heads = heads.into_iter().map(|head| Ok((head, set.head(head)?))).collect::<Result<Vec<_>>>()?;
            Ok(Some(oracle::errors(problem, &heads)?))
        };
        let mut errors = [errors_of(&sets[0])?, None];

        if attention.plan().checkpoints().is_some() {
            for set in &mut sets {
                set.hold_checkpoints(attention.plan())?;
            }
            sets[0].poison()?;
            for pass in Pass::CHECKPOINTED {
                let start = Instant::now();
                sets[0].enqueue(&mut attention, &self.stream, pass)?;
                self.stream.synchronize()?;
                first_ms.push(start.elapsed().as_secs_f64() * 1e3);
            }
            errors[1] = errors_of(&sets[0])?;
        }

        Ok(Ready { shape: *shape, dtype: problem.dtype, sets, attention, first_ms, errors })
    }
}

/// A pass of a shape, captured.
struct Timed<'a> {
    timings: &'a mut Vec<Timing>,
    first_ms: f64,
    note: String,
    /// With the number of its calls.
    graph: (Graph, usize),
}

/// A shape that only timing is left to do for.
struct Ready {
    shape: Shape,
    dtype: DType,
    sets: Vec<Set>,
    attention: Attention,
    /// Forward and backward, then the checkpointed passes where the plan has checkpoints.
    first_ms: Vec<f64>,
    errors: [Option<oracle::Errors>; 2],
}

/// How a plan runs a pass, in words.
fn note(plan: &Plan, pass: Pass, enqueue_us: f64) -> String {
    let schedule = schedule(plan, pass);
    let sweep = if schedule.sweep.is_some() { "; one sweep" } else { "" };
    format!("{} segments{sweep}; enqueue {enqueue_us:.1} us", schedule.segments)
}

/// How a plan runs a pass.
pub fn schedule(plan: &Plan, pass: Pass) -> &Schedule {
    match (pass, plan.checkpoints()) {
        (Pass::CheckpointedForward, Some(checkpoints)) => &checkpoints.forward,
        (Pass::CheckpointedBackward, Some(checkpoints)) => &checkpoints.backward,
        (Pass::Forward | Pass::CheckpointedForward, _) => plan.forward(),
        (Pass::Backward | Pass::CheckpointedBackward, _) => plan.backward(),
    }
}

/// What records say of the GPU.
pub fn machine(engine: &Engine, copy_gbps: f64) -> Machine {
    Machine { backend: "cuda", device: engine.name().to_string(), driver: driver(engine), copy_gbps }
}

/// All tensors of a problem on the device, contiguous `[B, H, N, dim]`.
pub struct Set {
    pub problem: Problem,
    pub q: DeviceBuffer<u16>,
    pub k: DeviceBuffer<u16>,
    pub v: DeviceBuffer<u16>,
    pub do_: DeviceBuffer<u16>,
    pub o: DeviceBuffer<u16>,
    pub dq: DeviceBuffer<u16>,
    pub dk: DeviceBuffer<u16>,
    pub dv: DeviceBuffer<u16>,
    /// As large as a plan asks for, once [`Set::hold_checkpoints`] was called.
    checkpoints: Option<DeviceBuffer<u16>>,
}

impl Set {
    /// All zeros: for cold starts, where making data would be most of the work.
    pub fn zeroed(problem: &Problem) -> Result<Self> {
        let zeroed = |shape: [usize; 4]| DeviceBuffer::zeroed(shape.iter().product());
        let (key, value) = (problem.key_shape(), problem.value_shape());
        Ok(Set {
            problem: problem.clone(),
            q: zeroed(key)?,
            k: zeroed(key)?,
            v: zeroed(value)?,
            do_: zeroed(value)?,
            o: zeroed(value)?,
            dq: zeroed(key)?,
            dk: zeroed(key)?,
            dv: zeroed(value)?,
            checkpoints: None,
        })
    }

    /// Makes room for the checkpoints of a plan.
    pub fn hold_checkpoints(&mut self, plan: &Plan) -> Result<()> {
        self.checkpoints = Some(empty((plan.checkpoint_bytes() / 2).max(1))?);
        Ok(())
    }

    /// Enqueues a pass. The set must live until the stream has passed it; nothing else here writes the tensors.
    pub fn enqueue(&self, attention: &mut Attention, stream: &Stream, pass: Pass) -> Result<()> {
        let tensor = |buffer: &DeviceBuffer<u16>, shape| RawTensor {
            ptr: buffer.as_device_ptr().as_raw(),
            dtype: self.problem.dtype,
            extent: Extent::contiguous(shape, Layout::Bhnd),
        };
        let (key, value) = (self.problem.key_shape(), self.problem.value_shape());
        let (q, k, v) = (tensor(&self.q, key), tensor(&self.k, key), tensor(&self.v, value));
        let do_ = tensor(&self.do_, value);
        let (dq, dk, dv) = (tensor(&self.dq, key), tensor(&self.dk, key), tensor(&self.dv, value));
        let forward = Forward { q, k, v, o: tensor(&self.o, value) };
        let backward = Backward { q, k, v, do_, dq, dk, dv };
        let stream = stream.as_inner();
        let checkpoints = self.checkpoints.as_ref().map_or(0, |buffer| buffer.as_device_ptr().as_raw());
        // SAFETY: the buffers have the size of their shapes and of the plan; callers synchronise before they drop a set.
        unsafe {
            match pass {
                Pass::Forward => attention.forward_raw(stream, forward)?,
                Pass::Backward => attention.backward_raw(stream, backward)?,
                Pass::CheckpointedForward => attention.forward_checkpointed_raw(stream, forward, checkpoints)?,
                Pass::CheckpointedBackward => attention.backward_checkpointed_raw(stream, backward, checkpoints)?,
            }
        }
        Ok(())
    }

    /// Rows of one head of every tensor.
    pub fn head(&self, index: usize) -> Result<HeadRows> {
        let rows = |buffer: &DeviceBuffer<u16>, dim: usize| -> Result<Vec<f64>> {
            let len = self.problem.seq_len * dim;
            let bits = read(buffer, index * len, len)?;
            Ok(match self.problem.dtype {
                DType::F16 => bits.into_iter().map(|x| f16::from_bits(x).to_f64()).collect(),
                _ => bits.into_iter().map(|x| bf16::from_bits(x).to_f64()).collect(),
            })
        };
        let (d, e) = (self.problem.head_dim, self.problem.value_dim);
        Ok(HeadRows {
            q: rows(&self.q, d)?,
            k: rows(&self.k, d)?,
            v: rows(&self.v, e)?,
            do_: rows(&self.do_, e)?,
            o: rows(&self.o, e)?,
            dq: rows(&self.dq, d)?,
            dk: rows(&self.dk, d)?,
            dv: rows(&self.dv, e)?,
        })
    }

    /// The outputs by name.
    pub fn outputs(&self) -> [(&'static str, &DeviceBuffer<u16>); 4] {
        [("o", &self.o), ("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)]
    }

    /// Sets the outputs to NaN.
    pub fn poison(&mut self) -> Result<()> {
        for output in [&mut self.o, &mut self.dq, &mut self.dk, &mut self.dv] {
            output.set_16(POISON)?;
        }
        Ok(())
    }

    /// Whether the outputs still are as [`Set::poison`] left them.
    pub fn is_untouched(&self) -> Result<bool> {
        Ok(self.bits()?.iter().flatten().all(|&bits| bits == POISON))
    }

    /// The bits of all outputs.
    pub fn bits(&self) -> Result<Vec<Vec<u16>>> {
        self.outputs().into_iter().map(|(_, buffer)| read(buffer, 0, buffer.len())).collect()
    }

    /// Fails when an output holds a NaN anywhere: a row that nobody wrote.
    pub fn refuse_nan(&self) -> Result<()> {
        // f16 and bf16 differ in where the exponent ends.
        let infinity = if self.problem.dtype == DType::F16 { 0x7c00 } else { 0x7f80 };
        for (name, buffer) in self.outputs() {
            const PART: usize = 1 << 26;
            for from in (0..buffer.len()).step_by(PART) {
                let part = read(buffer, from, PART.min(buffer.len() - from))?;
                if let Some(at) = part.par_iter().position_any(|bits| bits & 0x7fff > infinity) {
                    bail!("{name}[{}] of {:?} is NaN", from + at, self.problem);
                }
            }
        }
        Ok(())
    }
}

/// `len` elements from index `from` on.
pub fn read(buffer: &DeviceBuffer<u16>, from: usize, len: usize) -> Result<Vec<u16>> {
    let mut host = vec![0; len];
    if len > 0 {
        buffer.index(from..from + len).copy_to(&mut host)?;
    }
    Ok(host)
}

/// An instantiated CUDA graph.
pub struct Graph {
    exec: CUgraphExec,
}

impl Graph {
    /// What `body` enqueues on `stream`, which must not be the default stream.
    pub fn capture(stream: &Stream, body: impl FnOnce(&Stream) -> Result<()>) -> Result<Self> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        check(unsafe { sys::cuStreamBeginCapture_v2(stream.as_inner(), mode) })?;
        let enqueued = body(stream);
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: ends the capture begun above, also after an error.
        let ended = check(unsafe { sys::cuStreamEndCapture(stream.as_inner(), &mut graph) });
        enqueued?;
        ended?;
        // SAFETY: the graph was just made; it may be destroyed once it is instantiated.
        unsafe {
            let instantiated = check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            sys::cuGraphDestroy(graph);
            instantiated?;
        }
        Ok(Graph { exec })
    }

    pub fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive; the graph's buffers are its maker's contract.
        check(unsafe { sys::cuGraphLaunch(self.exec, stream.as_inner()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `capture`, destroyed once.
        unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

/// The rate of a device-to-device copy of 1 GiB, bytes read and written.
pub fn copy_gbps(stream: &Stream) -> Result<f64> {
    const BYTES: usize = 1 << 30;
    let (from, to) = (empty(BYTES / 2)?, empty(BYTES / 2)?);
    let (start, end) = (Event::new(EventFlags::DEFAULT)?, Event::new(EventFlags::DEFAULT)?);
    let mut times = Vec::new();
    for _ in 0..REPETITIONS {
        start.record(stream)?;
        let (to, from) = (to.as_device_ptr().as_raw(), from.as_device_ptr().as_raw());
        // SAFETY: both buffers hold `BYTES` bytes and outlive the wait below.
        check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, BYTES, stream.as_inner()) })?;
        end.record(stream)?;
        end.synchronize()?;
        times.push(f64::from(end.elapsed_time_f32(&start)?));
    }
    Ok(gbps(2 * BYTES, median(times)))
}

fn empty(len: usize) -> Result<DeviceBuffer<u16>> {
    // SAFETY: any bits are a `u16`; callers fill it or only copy it.
    Ok(unsafe { DeviceBuffer::uninitialized(len) }?)
}

/// The kernel driver's version, else the CUDA version that it supports.
fn driver(engine: &Engine) -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let version =
        text.split_whitespace().find(|word| word.split('.').count() == 3 && word.starts_with(char::is_numeric));
    let (major, minor) = engine.driver_version();
    version.map_or_else(|| format!("CUDA {major}.{minor}"), str::to_string)
}

fn check(code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(anyhow!("{code:?}")) }
}
