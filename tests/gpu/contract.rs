//! What is refused, and that a refusal leaves the outputs alone; and the entries beside the raw one.

use half::bf16;
use lightning_attention::cuda::cust::context::legacy::{Context, ContextFlags, ContextStack};
use lightning_attention::cuda::cust::device::Device;
use lightning_attention::cuda::cust::memory::DeviceBuffer;
use lightning_attention::cuda::cust::stream::{Stream, StreamFlags};
use lightning_attention::cuda::{Attention, DeviceView, DeviceViewMut, Engine, RawTensor};
use lightning_attention::{Backward, DType, Error, Extent, Forward, Layout, Problem, Result};
use lightning_attention_kernels::variants::Arch;

use crate::bench::gpu::{Gpu, Set};
use crate::bench::{Pass, oracle};
use crate::common::compare::Tolerance;
use crate::device::{device, exclusive};

fn problem() -> Problem {
    Problem::new(1, 2, 130, 64, 64)
}

/// [`problem`] with checkpoints, where the device has kernels for them.
fn prepare_checkpointed(gpu: &Gpu) -> Attention {
    let plan = gpu.engine.plan(&problem()).unwrap().with_family(Arch::Sm90).with_checkpoints(true);
    gpu.engine.prepare_plan(plan).unwrap()
}

/// The typed checkpointed passes on a set.
fn run_checkpointed(
    gpu: &Gpu,
    attention: &mut Attention,
    set: &mut Set,
    checkpoints: &mut DeviceBuffer<u16>,
) -> [Result<()>; 2] {
    let (shape, layout) = (set.problem.key_shape(), Layout::Bhnd);
    let Set { q, k, v, do_, o, dq, dk, dv, .. } = set;
    let [q, k, v, do_] = [q, k, v, do_].map(|buffer| DeviceView::<bf16>::contiguous(buffer, shape, layout));
    let [o, dq, dk, dv] = [o, dq, dk, dv].map(|buffer| DeviceViewMut::contiguous(buffer, shape, layout));
    let forward = attention.forward_checkpointed_blocking(&gpu.stream, Forward { q, k, v, o }, checkpoints);
    let tensors = Backward { q, k, v, do_, dq, dk, dv };
    [forward, attention.backward_checkpointed_blocking(&gpu.stream, tensors, checkpoints)]
}

/// The forward tensors of a set.
fn raw(set: &Set) -> Forward<RawTensor, RawTensor> {
    let tensor = |buffer: &DeviceBuffer<u16>| RawTensor {
        ptr: buffer.as_device_ptr().as_raw(),
        dtype: DType::Bf16,
        extent: Extent::contiguous(set.problem.key_shape(), Layout::Bhnd),
    };
    Forward { q: tensor(&set.q), k: tensor(&set.k), v: tensor(&set.v), o: tensor(&set.o) }
}

/// The error of a forward pass on changed tensors; the outputs must be untouched.
fn refused(gpu: &Gpu, change: impl FnOnce(&mut Forward<RawTensor, RawTensor>)) -> Error {
    let set = gpu.set(&problem(), 0).unwrap();
    let mut attention = gpu.engine.prepare(&problem()).unwrap();
    let mut tensors = raw(&set);
    change(&mut tensors);
    // SAFETY: the call is refused; were it not, the test fails.
    let error = unsafe { attention.forward_raw(gpu.stream.as_inner(), tensors) }.unwrap_err();
    gpu.stream.synchronize().unwrap();
    assert!(set.is_untouched().unwrap(), "{error}, yet an output was written");
    error
}

#[test]
fn host_pointer() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let host = vec![0_u128; 1 << 12];
    let address = host.as_ptr() as u64;
    let error = refused(gpu, |tensors| tensors.k.ptr = address);
    assert_eq!(error, Error::NotDeviceMemory { argument: "k", address });
}

#[test]
fn misaligned_pointer() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let error = refused(gpu, |tensors| tensors.v.ptr += 2);
    assert!(matches!(error, Error::Alignment { argument: "v", expected: 16, .. }), "{error}");
    let error = refused(gpu, |tensors| tensors.q.ptr = 0);
    assert_eq!(error, Error::Alignment { argument: "q", got: 0, expected: 16 });
}

#[test]
fn overlapping_output() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let error = refused(gpu, |tensors| tensors.v.ptr = tensors.o.ptr + 64 * 2);
    assert_eq!(error, Error::Overlap { output: "o", other: "v" });
}

#[test]
fn wrong_shape_and_type() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let error = refused(gpu, |tensors| tensors.k.extent.shape[2] += 1);
    assert!(matches!(error, Error::Shape { argument: "k", .. }), "{error}");
    let error = refused(gpu, |tensors| tensors.k.dtype = DType::F16);
    assert!(matches!(error, Error::ElementType { argument: "k", .. }), "{error}");
}

#[test]
fn another_context() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let flags = ContextFlags::SCHED_AUTO;
    let foreign = Context::create_and_push(flags, Device::get_device(0).unwrap()).unwrap();
    let buffer = DeviceBuffer::from_slice(&vec![0_u16; 2 * 130 * 64]).unwrap();
    let stream = Stream::new(StreamFlags::DEFAULT, None).unwrap();
    ContextStack::pop().unwrap();

    let error = refused(gpu, |tensors| tensors.k.ptr = buffer.as_device_ptr().as_raw());
    assert_eq!(error, Error::WrongContext { argument: "k" });

    let set = gpu.set(&problem(), 0).unwrap();
    let mut attention = gpu.engine.prepare(&problem()).unwrap();
    // SAFETY: the buffers are large enough; the call is refused.
    let error = unsafe { attention.forward_raw(stream.as_inner(), raw(&set)) }.unwrap_err();
    assert_eq!(error, Error::WrongContext { argument: "stream" });
    assert!(set.is_untouched().unwrap());

    ContextStack::push(&foreign).unwrap();
    {
        // SAFETY: the engine is dropped in this block, the context after it.
        let engine = unsafe { Engine::from_current_context() }.unwrap();
        assert_eq!(engine.device(), gpu.engine.device());
        let mut attention = engine.prepare(&problem()).unwrap();
        // SAFETY: as above.
        let error = unsafe { attention.forward_raw(stream.as_inner(), raw(&set)) }.unwrap_err();
        assert_eq!(error, Error::WrongContext { argument: "q" });
        engine.self_test().unwrap();
    }
    drop((buffer, stream));
    ContextStack::pop().unwrap();
}

#[test]
fn workspace_of_the_caller() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let plan = gpu.engine.plan(&problem()).unwrap().with_segments(2, 2);
    let needed = plan.workspace_bytes();
    assert!(needed > 0);
    // SAFETY: never used: refused for what is wrong with it.
    let prepare = |address, bytes| unsafe {
        gpu.engine.prepare_with_workspace(plan.clone(), address, bytes).map(drop).unwrap_err()
    };
    let buffer = DeviceBuffer::from_slice(&vec![0_u8; needed]).unwrap();
    let address = buffer.as_device_ptr().as_raw();
    let argument = "workspace";
    assert_eq!(prepare(address, needed - 1), Error::BufferTooShort { argument, got: needed - 1, expected: needed });
    assert_eq!(prepare(address + 4, needed), Error::Alignment { argument, got: address + 4, expected: 16 });
    let host = vec![0_u128; needed / 16];
    let address = host.as_ptr() as u64;
    assert_eq!(prepare(address, needed), Error::NotDeviceMemory { argument, address });
}

#[test]
fn no_rows() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let problem = Problem::new(2, 3, 0, 64, 64);
    let mut attention = gpu.engine.prepare(&problem).unwrap();
    let empty = DeviceBuffer::from_slice(&[0_u16; 8]).unwrap();
    let [mut o, mut dq, mut dk, mut dv] = [0; 4].map(|_| DeviceBuffer::from_slice(&[7_u16; 8]).unwrap());
    let (shape, layout) = (problem.key_shape(), Layout::Bhnd);
    let [q, k, v, do_] = [0; 4].map(|_| DeviceView::<bf16>::contiguous(&empty, shape, layout));
    attention
        .forward_blocking(&gpu.stream, Forward { q, k, v, o: DeviceViewMut::contiguous(&mut o, shape, layout) })
        .unwrap();
    let tensors = Backward {
        q,
        k,
        v,
        do_,
        dq: DeviceViewMut::contiguous(&mut dq, shape, layout),
        dk: DeviceViewMut::contiguous(&mut dk, shape, layout),
        dv: DeviceViewMut::contiguous(&mut dv, shape, layout),
    };
    attention.backward_blocking(&gpu.stream, tensors).unwrap();
    for output in [o, dq, dk, dv] {
        assert_eq!(output.as_host_vec().unwrap(), [7; 8]);
    }
}

/// The typed views give the bits of the raw entry, and a buffer that is too short is refused.
#[test]
fn typed_views() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let problem = problem();
    let mut set = gpu.set(&problem, 0).unwrap();
    let mut attention = gpu.engine.prepare(&problem).unwrap();
    for pass in Pass::BOTH {
        set.enqueue(&mut attention, &gpu.stream, pass).unwrap();
    }
    gpu.stream.synchronize().unwrap();
    let expected = set.bits().unwrap();
    set.poison().unwrap();

    let (shape, layout) = (problem.key_shape(), Layout::Bhnd);
    let Set { q, k, v, do_, o, dq, dk, dv, .. } = &mut set;
    let [q, k, v, do_] = [q, k, v, do_].map(|buffer| DeviceView::<bf16>::contiguous(buffer, shape, layout));
    let tensors = Forward { q, k, v, o: DeviceViewMut::contiguous(o, shape, layout) };
    attention.forward_blocking(&gpu.stream, tensors).unwrap();
    let tensors = Backward {
        q,
        k,
        v,
        do_,
        dq: DeviceViewMut::contiguous(dq, shape, layout),
        dk: DeviceViewMut::contiguous(dk, shape, layout),
        dv: DeviceViewMut::contiguous(dv, shape, layout),
    };
    attention.backward_blocking(&gpu.stream, tensors).unwrap();
    assert!(set.bits().unwrap() == expected);

    let (extent, len) = (Extent::contiguous(shape, layout), shape.iter().product::<usize>());
    let mut o = DeviceBuffer::from_slice(&vec![0_u16; len + 8]).unwrap();
    let o = DeviceViewMut::<bf16>::new(&mut o, 16, extent);
    let [q, k, v] = [&set.q, &set.k, &set.v].map(|buffer| DeviceView::contiguous(buffer, shape, layout));
    let error = attention.forward_blocking(&gpu.stream, Forward { q, k, v, o }).unwrap_err();
    assert_eq!(error, Error::BufferTooShort { argument: "o", got: len - 8, expected: len });
}

/// With checkpoints o has the bits of the plain pass, the gradients are as near to the oracle as any, and the typed
/// calls give the bits of the raw ones.
#[test]
fn checkpointed_views() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let problem = problem();
    let mut set = gpu.set(&problem, 0).unwrap();
    let mut attention = prepare_checkpointed(gpu);
    set.enqueue(&mut attention, &gpu.stream, Pass::Forward).unwrap();
    gpu.stream.synchronize().unwrap();
    let plain = set.bits().unwrap();
    set.poison().unwrap();

    let len = attention.plan().checkpoint_bytes() / size_of::<u16>();
    let mut checkpoints = DeviceBuffer::from_slice(&vec![u16::MAX; len.max(1)]).unwrap();
    for result in run_checkpointed(gpu, &mut attention, &mut set, &mut checkpoints) {
        result.unwrap();
    }
    let typed = set.bits().unwrap();
    assert!(typed[0] == plain[0], "`o` has other bits than that of the plain pass");
    let heads = [0, 1].map(|head| (head, set.head(head).unwrap()));
    let bound = Tolerance::of(problem.dtype, problem.precision).norm;
    for (output, error) in oracle::errors(&problem, &heads).unwrap().outputs() {
        assert!(error <= bound, "`{output}` is off by {error:.2e}, at most {bound:.1e}");
    }

    set.hold_checkpoints(attention.plan()).unwrap();
    set.poison().unwrap();
    for pass in Pass::CHECKPOINTED {
        set.enqueue(&mut attention, &gpu.stream, pass).unwrap();
    }
    gpu.stream.synchronize().unwrap();
    assert!(set.bits().unwrap() == typed, "the raw calls give other bits");
}

#[test]
fn memory_that_holds_no_checkpoints() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let mut set = gpu.set(&problem(), 0).unwrap();
    let mut attention = prepare_checkpointed(gpu);
    if attention.plan().checkpoints().is_none() {
        return;
    }
    let argument = "checkpoints";
    let expected = attention.plan().checkpoint_bytes() / size_of::<u16>();
    let mut short = DeviceBuffer::from_slice(&vec![0_u16; expected - 1]).unwrap();
    for result in run_checkpointed(gpu, &mut attention, &mut set, &mut short) {
        assert_eq!(result, Err(Error::BufferTooShort { argument, got: expected - 1, expected }));
    }
    let host = vec![0_u128; attention.plan().checkpoint_bytes() / 16];
    let address = host.as_ptr() as u64;
    let tensors = raw(&set);
    // SAFETY: the calls are refused; were they not, the test fails.
    let results = unsafe {
        let [dq, dk, dv] =
            [&set.dq, &set.dk, &set.dv].map(|buffer| RawTensor { ptr: buffer.as_device_ptr().as_raw(), ..tensors.o });
        let do_ = RawTensor { ptr: set.do_.as_device_ptr().as_raw(), ..tensors.o };
        let backward = Backward { q: tensors.q, k: tensors.k, v: tensors.v, do_, dq, dk, dv };
        let stream = gpu.stream.as_inner();
        [
            attention.forward_checkpointed_raw(stream, tensors, address),
            attention.backward_checkpointed_raw(stream, backward, address),
        ]
    };
    for result in results {
        assert_eq!(result, Err(Error::NotDeviceMemory { argument, address }));
    }
    gpu.stream.synchronize().unwrap();
    assert!(set.is_untouched().unwrap(), "refused, yet an output was written");
}

#[test]
fn self_test() {
    let Some(gpu) = device() else { return };
    let _exclusive = exclusive();
    let report = gpu.engine.self_test().unwrap();
    assert_eq!(report.results.len(), 2 * 2 * 2 * 4);
    println!("{report}");
}

#[test]
fn a_device_that_is_not_there() {
    let Some(_) = device() else { return };
    let _exclusive = exclusive();
    let error = Engine::new(1000).unwrap_err();
    assert!(matches!(error, Error::NoDevice { got: 1000, .. }), "{error}");
}
