//! Bad input is refused with an error that names the argument, what was given and what is expected; the outputs keep
//! their bytes.

mod common;

use common::poison::Output;
use half::bf16;
use lightning_attention::plan::Device;
use lightning_attention::problem::Region;
use lightning_attention::{
    Backward, DType, Element, Error, Extent, Forward, Layout, Plan, Problem, Result, Slopes, Strides, View, ViewMut,
    cpu,
};

const KEY: [usize; 4] = [2, 3, 10, 16];
const VALUE: [usize; 4] = [2, 3, 10, 8];

fn problem() -> Problem {
    Problem::new(2, 3, 10, 16, 8)
}

fn contiguous(shape: [usize; 4]) -> Extent {
    Extent::contiguous(shape, Layout::Bhnd)
}

fn is_err_with<T: std::fmt::Debug>(got: Result<T>, expected: &Error, message: &str) {
    let got = got.expect_err(message);
    assert_eq!(&got, expected);
    assert_eq!(got.to_string(), message);
}

/// Both passes of the CPU backend on tensors that fit [`problem`] but for what `change` does to their extents, in the
/// order `q k v o`.
fn refused(problem: &Problem, change: impl Fn(&mut [Extent; 4]), expected: &Error, message: &str) {
    let mut extents = [KEY, KEY, VALUE, VALUE].map(contiguous);
    change(&mut extents);
    let input = vec![bf16::ONE; 2 * 3 * 10 * 16];
    let view = |i: usize| View { data: &input[..], extent: extents[i] };

    let mut o = Output::<bf16>::poisoned(contiguous(VALUE));
    let target = ViewMut { extent: extents[3], ..o.view_mut() };
    let got = cpu::forward(problem, Forward { q: view(0), k: view(1), v: view(2), o: target });
    is_err_with(got, expected, message);
    assert!(o.is_untouched(), "{message}");

    // Backward has no `o`.
    if extents[3] != contiguous(VALUE) {
        return;
    }
    let [mut dq, mut dk, mut dv] = [KEY, KEY, VALUE].map(|shape| Output::<bf16>::poisoned(contiguous(shape)));
    let do_ = View { data: &input[..], extent: contiguous(VALUE) };
    let outputs = (dq.view_mut(), dk.view_mut(), dv.view_mut());
    let tensors = Backward { q: view(0), k: view(1), v: view(2), do_, dq: outputs.0, dk: outputs.1, dv: outputs.2 };
    is_err_with(cpu::backward(problem, tensors), expected, message);
    assert!(dq.is_untouched() && dk.is_untouched() && dv.is_untouched(), "{message}");
}

#[test]
fn what_the_helper_starts_from_is_accepted() {
    let input = vec![bf16::ONE; 2 * 3 * 10 * 16];
    let view = |shape| View { data: &input[..], extent: contiguous(shape) };
    let mut o = Output::<bf16>::poisoned(contiguous(VALUE));
    cpu::forward(&problem(), Forward { q: view(KEY), k: view(KEY), v: view(VALUE), o: o.view_mut() }).unwrap();
    assert!(!o.is_untouched());
}

#[test]
fn dimensions_out_of_range() {
    for (argument, sizes, got, expected) in [
        ("batch", [0, 3, 10, 16, 8], 0, "1 to 65535"),
        ("batch", [65_536, 3, 10, 16, 8], 65_536, "1 to 65535"),
        ("heads", [2, 0, 10, 16, 8], 0, "1 to 65535"),
        ("seq_len", [2, 3, (1 << 30) + 1, 16, 8], (1 << 30) + 1, "0 to 2^30"),
        ("head_dim", [2, 3, 10, 0, 8], 0, "1 to 256"),
        ("head_dim", [2, 3, 10, 257, 8], 257, "1 to 256"),
        ("value_dim", [2, 3, 10, 16, 0], 0, "1 to 256"),
        ("value_dim", [2, 3, 10, 16, 257], 257, "1 to 256"),
    ] {
        let [b, h, n, d, e] = sizes;
        let error = Error::Dimension { argument, got, expected };
        refused(&Problem::new(b, h, n, d, e), |_| (), &error, &format!("`{argument}` is {got}, expected {expected}"));
    }
}

#[test]
fn slopes_that_are_none() {
    for (bad, shown) in [(-1.0, "-1"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let problem = problem().slopes(Slopes::Custom(vec![0.0, 0.5, bad]));
        let message = format!("`slopes[2]` is {shown}, expected a finite value >= 0");
        refused(&problem, |_| (), &Error::Slope { head: 2, got: bad }, &message);
    }
    // NaN differs from itself, so the variant is matched by hand.
    let got = problem().slopes(Slopes::Custom(vec![f32::NAN, 0.5, 0.5])).validate();
    assert!(matches!(got, Err(Error::Slope { head: 0, got }) if got.is_nan()));
}

#[test]
fn slope_count() {
    for count in [0, 2, 4] {
        let problem = problem().slopes(Slopes::Custom(vec![0.1; count]));
        let message = format!("`slopes` has {count} values, expected one per head: 3");
        refused(&problem, |_| (), &Error::SlopeCount { got: count, expected: 3 }, &message);
    }
}

#[test]
fn layer_index() {
    for (layer, num_layers) in [(80, 80), (0, 0)] {
        let problem = problem().slopes(Slopes::MiniMax { layer, num_layers });
        let message = format!("`layer` is {layer}, expected less than num_layers = {num_layers}");
        refused(&problem, |_| (), &Error::Layer { got: layer, num_layers }, &message);
    }
}

#[test]
fn scale_that_is_none() {
    for (bad, shown) in [(f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let message = format!("`scale` is {shown}, expected a finite value");
        refused(&problem().scale(bad), |_| (), &Error::Scale { got: bad }, &message);
    }
    assert!(matches!(problem().scale(f32::NAN).validate(), Err(Error::Scale { got }) if got.is_nan()));
}

#[test]
fn shapes() {
    for (i, argument) in ["q", "k", "v", "o"].into_iter().enumerate() {
        for axis in 0..4 {
            let expected = if i < 2 { KEY } else { VALUE };
            let mut got = expected;
            got[axis] -= 1;
            let message =
                format!("`{argument}` has shape {got:?}, expected {expected:?} ([batch, heads, seq_len, dim])");
            let error = Error::Shape { argument, got, expected };
            refused(&problem(), |extents| extents[i].shape = got, &error, &message);
        }
    }
}

#[test]
fn tokens_before_heads_is_named() {
    // [B, N, H, D] passed as if it were [B, H, N, D].
    let got = [2, 10, 3, 16];
    let error = Error::Shape { argument: "q", got, expected: KEY };
    let message = "`q` has shape [2, 10, 3, 16], expected [2, 3, 10, 16] ([batch, heads, seq_len, dim])";
    refused(&problem(), |extents| *extents = [got, got, [2, 10, 3, 8], VALUE].map(contiguous), &error, message);
}

#[test]
fn buffers_that_end_early() {
    // A row stride that reaches one element past the 960 of q's buffer.
    let strides = Strides { batch: 480, head: 160, row: 16 };
    let long = Strides { batch: 481, ..strides };
    let error = Error::BufferTooShort { argument: "k", got: 960, expected: 961 };
    let message = "`k` holds 960 elements, its shape and strides reach 961";
    refused(&problem(), |extents| extents[1].strides = long, &error, message);

    let error = Error::BufferTooShort { argument: "o", got: 480, expected: 481 };
    let message = "`o` holds 480 elements, its shape and strides reach 481";
    let long = Strides { batch: 241, head: 80, row: 8 };
    refused(&problem(), |extents| extents[3].strides = long, &error, message);
}

#[test]
fn strides_beyond_any_memory() {
    for batch in [usize::MAX, usize::MAX / 2, isize::MAX as usize / 2] {
        let error = Error::Stride { argument: "v", axis: "batch", got: batch, expected: "a tensor below 2^63 bytes" };
        let message = format!("`v` has batch stride {batch}, expected a tensor below 2^63 bytes");
        refused(&problem(), |extents| extents[2].strides.batch = batch, &error, &message);
    }
}

#[test]
fn an_output_whose_rows_overlap() {
    let error = Error::Overlap { output: "o", other: "o" };
    let message = "output `o` overlaps `o`, expected disjoint memory";
    for strides in [
        Strides { batch: 240, head: 80, row: 7 },
        Strides { batch: 240, head: 80, row: 0 },
        Strides { batch: 240, head: 79, row: 8 },
        Strides { batch: 239, head: 80, row: 8 },
        Strides { batch: 0, head: 80, row: 8 },
    ] {
        refused(&problem(), |extents| extents[3].strides = strides, &error, message);
    }
    // An input may: the keys of all heads can be one.
    let shared = Extent { shape: KEY, strides: Strides { batch: 160, head: 0, row: 16 } };
    let (input, mut o) = (vec![bf16::ONE; 960], Output::<bf16>::poisoned(contiguous(VALUE)));
    let [q, k] = [contiguous(KEY), shared].map(|extent| View { data: &input[..], extent });
    let v = View { data: &input[..], extent: contiguous(VALUE) };
    cpu::forward(&problem(), Forward { q, k, v, o: o.view_mut() }).unwrap();
}

/// A place in memory that is only looked at.
fn region(address: u64, shape: [usize; 4]) -> Region {
    Region { address, len: None, dtype: DType::Bf16, extent: contiguous(shape) }
}

fn forward_regions() -> Forward<Region, Region> {
    Forward { q: region(0x10000, KEY), k: region(0x20000, KEY), v: region(0x30000, VALUE), o: region(0x40000, VALUE) }
}

fn backward_regions() -> Backward<Region, Region> {
    let Forward { q, k, v, .. } = forward_regions();
    let (dq, dk, dv) = (region(0x50000, KEY), region(0x60000, KEY), region(0x70000, VALUE));
    Backward { q, k, v, do_: region(0x40000, VALUE), dq, dk, dv }
}

#[test]
fn tensors_that_overlap() {
    let bytes = 2 * 960;
    for address in [0x10000, 0x10000 + bytes - 16, 0x10000 - 2 * 480 + 16] {
        let mut tensors = forward_regions();
        tensors.o.address = address;
        let error = Error::Overlap { output: "o", other: "q" };
        is_err_with(problem().check_forward(&tensors, 16), &error, "output `o` overlaps `q`, expected disjoint memory");
    }
    let mut tensors = forward_regions();
    tensors.o.address = 0x10000 + bytes;
    problem().check_forward(&tensors, 16).unwrap();

    let mut tensors = backward_regions();
    tensors.dq.address = tensors.dk.address + 32;
    let error = Error::Overlap { output: "dq", other: "dk" };
    let message = "output `dq` overlaps `dk`, expected disjoint memory";
    is_err_with(problem().check_backward(&tensors, 16), &error, message);
    let mut tensors = backward_regions();
    tensors.dv.address = tensors.do_.address;
    let error = Error::Overlap { output: "dv", other: "do_" };
    let message = "output `dv` overlaps `do_`, expected disjoint memory";
    is_err_with(problem().check_backward(&tensors, 16), &error, message);
}

#[test]
fn slices_of_one_buffer_do_not_overlap() {
    // [B, N, H, dq dk dv] with rows of 16 + 16 + 8 elements.
    let strides = Strides { batch: 1200, head: 40, row: 120 };
    let packed =
        |offset: u64, shape| Region { extent: Extent { shape, strides }, ..region(0x50000 + 2 * offset, shape) };
    let tensors = Backward { dq: packed(0, KEY), dk: packed(16, KEY), dv: packed(32, VALUE), ..backward_regions() };
    problem().check_backward(&tensors, 16).unwrap();
    let tensors = Backward { dk: packed(8, KEY), ..tensors };
    let error = Error::Overlap { output: "dq", other: "dk" };
    is_err_with(problem().check_backward(&tensors, 16), &error, "output `dq` overlaps `dk`, expected disjoint memory");
}

#[test]
fn alignment() {
    for (address, shown) in [(0x10008, "0x10008"), (0, "0x0")] {
        let mut tensors = forward_regions();
        tensors.q.address = address;
        let error = Error::Alignment { argument: "q", got: address, expected: 16 };
        let message = format!("`q` is at address {shown}, expected a non-null multiple of 16");
        is_err_with(problem().check_forward(&tensors, 16), &error, &message);
    }
    for (axis, strides) in [
        ("row", Strides { batch: 480, head: 160, row: 17 }),
        ("head", Strides { batch: 480, head: 163, row: 16 }),
        ("batch", Strides { batch: 484, head: 160, row: 16 }),
    ] {
        let mut tensors = forward_regions();
        tensors.k.extent.strides = strides;
        let got = [strides.row, strides.head, strides.batch].into_iter().find(|x| x % 8 != 0).unwrap();
        let error = Error::Stride { argument: "k", axis, got, expected: "a multiple of 16 bytes" };
        let message = format!("`k` has {axis} stride {got}, expected a multiple of 16 bytes");
        is_err_with(problem().check_forward(&tensors, 16), &error, &message);
        // The CPU backend asks for no more than an element's own alignment.
        problem().check_forward(&tensors, 2).unwrap();
    }
}

#[test]
fn element_types() {
    let mut tensors = backward_regions();
    tensors.do_.dtype = DType::F16;
    let error = Error::ElementType { argument: "do_", got: DType::F16, expected: DType::Bf16 };
    is_err_with(problem().check_backward(&tensors, 16), &error, "`do_` holds f16, expected bf16");

    let error = Error::ElementType { argument: "q", got: DType::Bf16, expected: DType::F32 };
    refused(&problem().dtype(DType::F32), |_| (), &error, "`q` holds bf16, expected f32");
}

/// A plan with checkpoints, and memory for them that is right.
fn checkpointed() -> (Plan, Region) {
    let plan = Plan::new(&Problem::new(1, 2, 200, 64, 64), Device::H200).unwrap().with_checkpoints(true);
    let len = plan.checkpoint_bytes() / 2;
    assert_eq!(len, 2 * 2 * 64 * 64);
    let extent = contiguous([1, 1, 1, len]);
    (plan, Region { address: 0x10_0000, len: Some(len), dtype: DType::Bf16, extent })
}

#[test]
fn memory_that_holds_no_checkpoints() {
    let (plan, region) = checkpointed();
    let argument = "checkpoints";
    let short = Error::BufferTooShort { argument, got: 16_383, expected: 16_384 };
    let alignment = |got| Error::Alignment { argument, got, expected: 16 };
    let element = Error::ElementType { argument, got: DType::F32, expected: DType::Bf16 };
    let shape = [1, 1, 1, 16_383];
    let bad_shape = Error::Shape { argument, got: shape, expected: [1, 1, 1, 16_384] };
    for (bad, error, message) in [
        (
            Region { len: Some(16_383), ..region },
            short,
            "`checkpoints` holds 16383 elements, its shape and strides reach 16384",
        ),
        (
            Region { address: 0x10_0008, ..region },
            alignment(0x10_0008),
            "`checkpoints` is at address 0x100008, expected a non-null multiple of 16",
        ),
        (
            Region { address: 0, ..region },
            alignment(0),
            "`checkpoints` is at address 0x0, expected a non-null multiple of 16",
        ),
        (Region { dtype: DType::F32, ..region }, element, "`checkpoints` holds f32, expected bf16"),
        (
            Region { extent: contiguous(shape), ..region },
            bad_shape,
            "`checkpoints` has shape [1, 1, 1, 16383], expected [1, 1, 1, 16384] ([batch, heads, seq_len, dim])",
        ),
    ] {
        for is_written in [true, false] {
            is_err_with(plan.check_checkpoints(&bad, &[], is_written), &error, message);
        }
        // Where there are no checkpoints, nothing is looked at.
        plan.clone().with_checkpoints(false).check_checkpoints(&bad, &[("o", bad)], true).unwrap();
    }
    // Where only the caller knows the length, and where the buffer is longer.
    for len in [None, Some(40_000)] {
        plan.check_checkpoints(&Region { len, ..region }, &[], true).unwrap();
    }
}

#[test]
fn checkpoints_that_overlap() {
    let (plan, checkpoints) = checkpointed();
    let shape = plan.problem().key_shape();
    let bytes = 2 * 2 * 200 * 64;
    // The last row before, the first and the last rows within, and the neighbours.
    let end = checkpoints.address + plan.checkpoint_bytes() as u64;
    let meeting = [checkpoints.address - bytes + 16, checkpoints.address, end - 16];
    for tensor in ["q", "k", "v", "o"] {
        let error = Error::Overlap { output: "checkpoints", other: tensor };
        let message = format!("output `checkpoints` overlaps `{tensor}`, expected disjoint memory");
        for address in meeting {
            let tensors = [("far", region(end + 0x10_0000, shape)), (tensor, region(address, shape))];
            is_err_with(plan.check_checkpoints(&checkpoints, &tensors, true), &error, &message);
        }
    }
    for output in ["dq", "dk", "dv"] {
        let error = Error::Overlap { output, other: "checkpoints" };
        let message = format!("output `{output}` overlaps `checkpoints`, expected disjoint memory");
        for address in meeting {
            let tensors = [(output, region(address, shape))];
            is_err_with(plan.check_checkpoints(&checkpoints, &tensors, false), &error, &message);
        }
    }
    for is_written in [true, false] {
        let neighbours = [checkpoints.address - bytes, end].map(|address| ("o", region(address, shape)));
        plan.check_checkpoints(&checkpoints, &neighbours, is_written).unwrap();
    }
}

#[test]
fn backward_names_its_own_arguments() {
    let input = vec![bf16::ONE; 960];
    let view = |shape| View { data: &input[..], extent: contiguous(shape) };
    for (i, argument) in ["do_", "dq", "dk", "dv"].into_iter().enumerate() {
        let mut shapes = [VALUE, KEY, KEY, VALUE];
        let expected = shapes[i];
        shapes[i][2] = 9;
        let [mut dq, mut dk, mut dv] = [KEY, KEY, VALUE].map(|shape| Output::<bf16>::poisoned(contiguous(shape)));
        let tensors = Backward {
            q: view(KEY),
            k: view(KEY),
            v: view(VALUE),
            do_: view(shapes[0]),
            dq: ViewMut { extent: contiguous(shapes[1]), ..dq.view_mut() },
            dk: ViewMut { extent: contiguous(shapes[2]), ..dk.view_mut() },
            dv: ViewMut { extent: contiguous(shapes[3]), ..dv.view_mut() },
        };
        let error = Error::Shape { argument, got: shapes[i], expected };
        assert_eq!(cpu::backward(&problem(), tensors), Err(error));
        assert!(dq.is_untouched() && dk.is_untouched() && dv.is_untouched(), "{argument}");
    }
}

#[test]
fn no_rows_is_no_error() {
    let problem = Problem::new(2, 3, 0, 16, 8).dtype(f32::DTYPE);
    let (key, value) = (problem.key_shape(), problem.value_shape());
    let empty = |shape| View::<f32>::contiguous(&[], shape, Layout::Bnhd);
    let o = ViewMut::contiguous(&mut [], value, Layout::Bnhd);
    cpu::forward(&problem, Forward { q: empty(key), k: empty(key), v: empty(value), o }).unwrap();
}
