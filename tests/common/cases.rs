//! The case table: every problem that every backend must get right.

use core::fmt;

use lightning_attention::{
    Backward, DType, Element, Extent, Forward, Layout, Precision, Problem, Slopes, Strides, View,
};

use super::poison::{Poison, for_each_row};

/// Where a case's tensors lie. With dims that are multiples of 8, all rows begin at multiples of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Contiguous `[B, H, N, D]`.
    Bhnd,
    /// Contiguous `[B, N, H, D]`.
    Bnhd,
    /// Slices of one `[B, N, H, 2 D + E]` projection: each row is followed by the rows of the other tensors.
    Packed,
    /// Gaps after each row, head and batch; rows begin at multiples of 16 bytes for any dim.
    Padded,
}

/// One problem, with where its tensors lie.
#[derive(Clone, Debug)]
pub struct Case {
    /// What it is there for.
    pub name: String,
    /// `B`.
    pub batch: usize,
    /// `H`.
    pub heads: usize,
    /// `N`.
    pub seq_len: usize,
    /// `D`.
    pub head_dim: usize,
    /// `E`.
    pub value_dim: usize,
    /// Element type.
    pub dtype: DType,
    /// Memory order.
    pub layout: Placement,
    /// Slopes.
    pub slopes: Slopes,
    /// Scale.
    pub scale: f32,
    /// How exact the results are to be.
    pub precision: Precision,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { name, batch, heads, seq_len, head_dim, value_dim, dtype, layout, scale, precision, .. } = self;
        write!(
            f,
            "{name}: {batch}x{heads}x{seq_len}x{head_dim}x{value_dim} {dtype} {layout:?} scale {scale} {precision}"
        )
    }
}

impl Case {
    /// Bhnd, ALiBi, scale 1, fast.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        [batch, heads, seq_len, head_dim, value_dim]: [usize; 5],
    ) -> Self {
        let (name, layout, slopes, scale) = (name.into(), Placement::Bhnd, Slopes::Alibi, 1.0);
        let precision = Precision::Fast;
        Case { name, batch, heads, seq_len, head_dim, value_dim, dtype, layout, slopes, scale, precision }
    }

    /// Sets the slopes.
    pub fn slopes(mut self, slopes: Slopes) -> Self {
        self.slopes = slopes;
        self
    }

    /// Sets where the tensors lie.
    pub fn layout(mut self, layout: Placement) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the scale.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// Sets how exact the results are to be.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// What the library is asked for.
    pub fn problem(&self) -> Problem {
        Problem::new(self.batch, self.heads, self.seq_len, self.head_dim, self.value_dim)
            .dtype(self.dtype)
            .slopes(self.slopes.clone())
            .scale(self.scale)
            .precision(self.precision)
    }

    /// Where q, k, dq, dk lie in their buffers.
    pub fn key_extent(&self) -> Extent {
        self.extent(self.problem().key_shape())
    }

    /// Where v, o, do, dv lie in their buffers.
    pub fn value_extent(&self) -> Extent {
        self.extent(self.problem().value_shape())
    }

    fn extent(&self, shape: [usize; 4]) -> Extent {
        let [_, heads, rows, dim] = shape;
        let strides = match self.layout {
            Placement::Bhnd => Strides::contiguous(shape, Layout::Bhnd),
            Placement::Bnhd => Strides::contiguous(shape, Layout::Bnhd),
            Placement::Packed => {
                let head = 2 * self.head_dim + self.value_dim;
                Strides { batch: rows * heads * head, head, row: heads * head }
            }
            Placement::Padded => {
                let row = (dim + 1).next_multiple_of(8) + 8;
                let head = rows * row + 16;
                Strides { batch: heads * head + 64, head, row }
            }
        };
        Extent { shape, strides }
    }
}

/// The inputs of a case: normal values of standard deviation 0.1, rounded to `T`; gaps between rows are NaN. The values
/// depend on the shape only, not on where the tensors lie.
pub struct Inputs<T> {
    q: Tensor<T>,
    k: Tensor<T>,
    v: Tensor<T>,
    do_: Tensor<T>,
}

struct Tensor<T> {
    buffer: Vec<T>,
    extent: Extent,
}

impl<T: Poison> Tensor<T> {
    fn randn(extent: Extent, seed: u64) -> Self {
        Tensor::new(extent, &randn(extent.shape, seed))
    }

    fn new(extent: Extent, values: &[T]) -> Self {
        let dim = extent.shape[3];
        let mut buffer = vec![T::POISON; extent.span().expect("the tensor fits in memory")];
        for_each_row(&extent, |row, offset| buffer[offset..][..dim].copy_from_slice(&values[row * dim..][..dim]));
        Tensor { buffer, extent }
    }

    fn view(&self) -> View<'_, T> {
        View { data: &self.buffer, extent: self.extent }
    }
}

impl<T: Poison> Inputs<T> {
    /// The inputs of a case.
    pub fn new(case: &Case) -> Self {
        let (key, value) = (case.key_extent(), case.value_extent());
        Inputs {
            q: Tensor::randn(key, 1),
            k: Tensor::randn(key, 2),
            v: Tensor::randn(value, 3),
            do_: Tensor::randn(value, 4),
        }
    }

    /// Given values instead, each contiguous `[B, H, N, D or E]`.
    pub fn from_values(case: &Case, q: &[T], k: &[T], v: &[T], do_: &[T]) -> Self {
        let (key, value) = (case.key_extent(), case.value_extent());
        Inputs {
            q: Tensor::new(key, q),
            k: Tensor::new(key, k),
            v: Tensor::new(value, v),
            do_: Tensor::new(value, do_),
        }
    }

    /// The forward pass on these inputs into `o`.
    pub fn forward<O>(&self, o: O) -> Forward<View<'_, T>, O> {
        Forward { q: self.q.view(), k: self.k.view(), v: self.v.view(), o }
    }

    /// The backward pass on these inputs into `dq, dk, dv`.
    pub fn backward<O>(&self, [dq, dk, dv]: [O; 3]) -> Backward<View<'_, T>, O> {
        Backward { q: self.q.view(), k: self.k.view(), v: self.v.view(), do_: self.do_.view(), dq, dk, dv }
    }
}

/// Contiguous values: standard normal / 10 (Box-Muller over SplitMix64), one stream per seed.
pub fn randn<T: Element>(shape: [usize; 4], seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0xd1b5_4a32_d192_ed03);
    let mut uniform = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    };
    let len: usize = shape.iter().product();
    let mut values = Vec::with_capacity(len + 1);
    while values.len() < len {
        let (radius, angle) = ((-2.0 * (1.0 - uniform()).ln()).sqrt() / 10.0, core::f64::consts::TAU * uniform());
        values.extend([radius * angle.cos(), radius * angle.sin()].map(|x| T::from_f32(x as f32)));
    }
    values.truncate(len);
    values
}

/// From no decay at all to one that forgets every row at once.
pub const SLOPES: [f32; 6] = [0.0, 4e-8, 0.0039, 0.92, 7.75, 50.0];

fn six_slopes() -> Slopes {
    Slopes::Custom(SLOPES.to_vec())
}

/// Lengths around every tile edge.
pub fn boundaries(dtype: DType) -> Vec<Case> {
    [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257, 1000, 2048]
        .map(|n| Case::new("boundary", dtype, [1, 2, n, 128, 64]).slopes(Slopes::Custom(vec![0.0039, 0.92])))
        .into()
}

/// Each slope, each schedule.
pub fn slopes(dtype: DType) -> Vec<Case> {
    let constant = SLOPES.map(|slope| {
        Case::new(format!("slope {slope}"), dtype, [1, 2, 300, 64, 64]).slopes(Slopes::Custom(vec![slope; 2]))
    });
    let alibi = [1, 7, 8, 10, 12].map(|heads| Case::new("alibi", dtype, [1, heads, 200, 64, 32]));
    let minimax = [0, 40, 79].map(|layer| {
        Case::new(format!("minimax layer {layer}"), dtype, [1, 8, 200, 64, 32])
            .slopes(Slopes::MiniMax { layer, num_layers: 80 })
    });
    let none = Case::new("no decay", dtype, [2, 3, 200, 64, 32]).slopes(Slopes::None);
    constant.into_iter().chain(alibi).chain(minimax).chain([none]).collect()
}

/// `D` and `E` independently.
pub fn dims(dtype: DType) -> Vec<Case> {
    let dims = [8, 16, 24, 64, 72, 96, 104, 128];
    let pairs = dims.into_iter().flat_map(|d| dims.map(|e| (d, e)));
    pairs.map(|(d, e)| Case::new("dims", dtype, [1, 2, 145, d, e]).scale(0.125)).collect()
}

/// Every placement, with several batches and heads.
pub fn layouts(dtype: DType) -> Vec<Case> {
    use Placement::*;
    let sizes = [[2, 3, 130, 64, 64], [2, 3, 130, 72, 40], [3, 1, 65, 128, 64]];
    let placed = |size| [Bhnd, Bnhd, Packed, Padded].map(|layout| Case::new("layout", dtype, size).layout(layout));
    sizes.into_iter().flat_map(placed).collect()
}

/// Small enough for the kernel simulator: the six slopes are the six heads.
pub fn sim() -> Vec<Case> {
    let dims = [(64, 64), (128, 64), (64, 128), (128, 128), (72, 40), (8, 128)];
    let mut cases = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        for (d, e) in dims {
            for n in [1, 15, 17, 63, 64, 65, 129] {
                cases.push(Case::new("sim", dtype, [1, 6, n, d, e]).slopes(six_slopes()));
            }
        }
    }
    cases
}

/// The same, accurately.
pub fn accurate(cases: Vec<Case>) -> Vec<Case> {
    cases.into_iter().map(|case| case.precision(Precision::Accurate)).collect()
}

/// Inputs on which public implementations of this operator failed, named by the fault.
pub fn replays(dtype: DType) -> Vec<Case> {
    let constant = |slope: f32, heads: usize| Slopes::Custom(vec![slope; heads]);
    let mut cases = Vec::new();
    for n in [300, 513, 1213, 128] {
        cases.push(Case::new("rows of the tail never written", dtype, [1, 4, n, 64, 64]));
    }
    cases.extend([
        Case::new("shared memory of a smaller card exceeded", dtype, [1, 10, 3000, 64, 64]),
        Case::new("backward at D = 128 exceeds shared memory", dtype, [1, 4, 200, 128, 128]),
        Case::new("valid dim refused by a wrong check", dtype, [1, 4, 100, 16, 16]),
        Case::new("dim that is no multiple of 8 accepted, then wrong", dtype, [1, 4, 100, 33, 33])
            .layout(Placement::Padded),
        Case::new("dim that is no power of two does not compile", dtype, [1, 16, 64, 192, 192]),
        Case::new("wrong dk at one tile size", dtype, [1, 4, 256, 64, 64]),
        Case::new("wrong dk at one tile size", dtype, [1, 4, 256, 100, 100]).layout(Placement::Padded),
        Case::new("padding to a power of two", dtype, [1, 4, 256, 96, 96]),
        Case::new("backward without decay", dtype, [2, 4, 257, 64, 64]).slopes(Slopes::None),
        Case::new("few heads, long sequence", dtype, [1, 1, 4096, 128, 128]),
        Case::new("no rows", dtype, [2, 4, 0, 64, 64]),
        Case::new("16-bit slopes near 1 and near a power of two", dtype, [1, 4, 300, 64, 64])
            .slopes(Slopes::Custom(vec![0.003_913_8, 0.996_2, 1.001_1, 0.084_08])),
    ]);
    for n in [65, 1000] {
        cases.push(Case::new("0 · inf in the tail", dtype, [1, 2, n, 64, 64]).slopes(constant(7.75, 2)));
    }
    for n in [63, 500, 1000] {
        cases.push(Case::new("decay by tile height, not by valid rows", dtype, [1, 4, n, 64, 64]));
    }
    for n in [65, 127, 191] {
        cases.push(
            Case::new("state scaled by the rows that are missing", dtype, [1, 2, n, 64, 64]).slopes(constant(0.84, 2)),
        );
    }
    for n in [64, 128, 200] {
        cases.push(Case::new("inverse decay overflows", dtype, [1, 2, n, 64, 64]).slopes(constant(2.0, 2)));
    }
    for slope in [88.0, 104.0, 1e4] {
        cases.push(Case::new("exp(a + b) split", dtype, [1, 2, 130, 64, 64]).slopes(constant(slope, 2)));
    }
    cases
}
