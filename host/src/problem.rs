//! What is to be computed: one typed description, validated once, that every backend and the planner work from.

use core::fmt;

use crate::view::{Backward, DType, Extent, Forward};
use crate::{Error, Result, Slopes};

/// Largest `head_dim` and `value_dim`.
pub const MAX_DIM: usize = 256;

/// How exact results in 16 bits are, and at what cost.
///
/// Errors are `‖x − ref‖ / ‖ref‖` of o, dq, dk and dv. Rounding the exact result alone costs 1.66e-3 in bf16 and 2.1e-4 in f16.
///
/// It matters on a GPU only. The CPU backend works in f32 and rounds nothing but the result, so it is as exact as
/// [`Precision::Accurate`] whichever is asked for. With f32 tensors there is nothing to choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// At most 2.8e-3 in bf16 and 5e-4 in f16 (a single head's slope may cost a little more): what enters a matrix product is
    /// rounded to the element type.
    #[default]
    Fast,
    /// At most 1.9e-3 in bf16 and 2.4e-4 in f16: what that rounds off is multiplied too. All products but one are done twice, and
    /// backward is three passes like forward; there is neither a sweep nor checkpoints.
    Accurate,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::Fast => "fast",
            Precision::Accurate => "accurate",
        })
    }
}

/// A Lightning Attention-2 problem: `q, k: [B,H,N,D]`, `v, o: [B,H,N,E]`,
/// `S_i = λ_h S_{i-1} + k_iᵀ v_i`, `o_i = scale · q_i S_i`.
///
/// ```
/// use lightning_attention::{DType, Problem, Slopes};
/// let problem = Problem::new(6, 8, 8192, 128, 64).dtype(DType::Bf16).slopes(Slopes::Alibi);
/// # assert!(problem.validate().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Batch size `B` ≥ 1.
    pub batch: usize,
    /// Heads `H` ≥ 1.
    pub heads: usize,
    /// Sequence length `N` ≥ 0.
    pub seq_len: usize,
    /// Columns of q and k, `D`, 1 … 256.
    pub head_dim: usize,
    /// Columns of v and o, `E`, 1 … 256.
    pub value_dim: usize,
    /// Element type of all tensors.
    pub dtype: DType,
    /// Scale `c` of the output.
    pub scale: f32,
    /// Decay slopes.
    pub slopes: Slopes,
    /// How exact results in 16 bits are.
    pub precision: Precision,
}

impl Problem {
    /// bf16, scale 1, ALiBi slopes, fast.
    pub fn new(batch: usize, heads: usize, seq_len: usize, head_dim: usize, value_dim: usize) -> Self {
        let (dtype, scale, slopes, precision) = (DType::Bf16, 1.0, Slopes::Alibi, Precision::Fast);
        Problem { batch, heads, seq_len, head_dim, value_dim, dtype, scale, slopes, precision }
    }

    /// Sets the element type.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets the output scale.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// Sets the slopes.
    pub fn slopes(mut self, slopes: Slopes) -> Self {
        self.slopes = slopes;
        self
    }

    /// Sets how exact results in 16 bits are.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Shape of q, k, dq, dk: `[B, H, N, D]`.
    pub fn key_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_len, self.head_dim]
    }

    /// Shape of v, o, do, dv: `[B, H, N, E]`.
    pub fn value_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_len, self.value_dim]
    }

    /// Checks everything that does not depend on the tensors, and returns the slopes.
    ///
    /// # Errors
    /// [`Error::Dimension`], [`Error::Scale`] and those of [`Slopes::values`].
    pub fn validate(&self) -> Result<Vec<f32>> {
        // Row and block counts are 32-bit on the device; offsets are not.
        let dims = [
            ("batch", self.batch, 1..=65_535, "1 to 65535"),
            ("heads", self.heads, 1..=65_535, "1 to 65535"),
            ("seq_len", self.seq_len, 0..=(1 << 30), "0 to 2^30"),
            ("head_dim", self.head_dim, 1..=MAX_DIM, "1 to 256"),
            ("value_dim", self.value_dim, 1..=MAX_DIM, "1 to 256"),
        ];
        for (argument, got, range, expected) in dims {
            if !range.contains(&got) {
                return Err(Error::Dimension { argument, got, expected });
            }
        }
        if !self.scale.is_finite() {
            return Err(Error::Scale { got: self.scale });
        }
        self.slopes.values(self.heads)
    }

    /// Checks the tensors of a forward pass: types, shapes, strides, alignment, overlap.
    ///
    /// # Errors
    /// [`Error::ElementType`], [`Error::Shape`], [`Error::Stride`], [`Error::BufferTooShort`], [`Error::Alignment`],
    /// [`Error::Overlap`].
    pub fn check_forward(&self, tensors: &Forward<Region, Region>, row_alignment: usize) -> Result<()> {
        let (key, value) = (self.key_shape(), self.value_shape());
        self.check(
            &[("q", tensors.q, key), ("k", tensors.k, key), ("v", tensors.v, value)],
            &[("o", tensors.o, value)],
            row_alignment,
        )
    }

    /// Checks the tensors of a backward pass, as [`Problem::check_forward`].
    ///
    /// # Errors
    /// As [`Problem::check_forward`].
    pub fn check_backward(&self, tensors: &Backward<Region, Region>, row_alignment: usize) -> Result<()> {
        let (key, value) = (self.key_shape(), self.value_shape());
        self.check(
            &[("q", tensors.q, key), ("k", tensors.k, key), ("v", tensors.v, value), ("do_", tensors.do_, value)],
            &[("dq", tensors.dq, key), ("dk", tensors.dk, key), ("dv", tensors.dv, value)],
            row_alignment,
        )
    }

    fn check(
        &self,
        inputs: &[(&'static str, Region, [usize; 4])],
        outputs: &[(&'static str, Region, [usize; 4])],
        row_alignment: usize,
    ) -> Result<()> {
        for &(argument, ref region, expected) in inputs.iter().chain(outputs) {
            region.check(argument, expected, self.dtype, row_alignment)?;
        }
        for (i, &(output, ref region, _)) in outputs.iter().enumerate() {
            region.check_rows_disjoint(output)?;
            for &(other, ref region_b, _) in inputs.iter().chain(&outputs[i + 1..]) {
                if region.overlaps(region_b) {
                    return Err(Error::Overlap { output, other });
                }
            }
        }
        Ok(())
    }
}

/// A tensor's place in memory: what validation looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Address of element `[0, 0, 0, 0]`.
    pub address: u64,
    /// Elements in the buffer from there on; `None` where only the caller knows (raw pointers).
    pub len: Option<usize>,
    /// Element type.
    pub dtype: DType,
    /// Shape and strides.
    pub extent: Extent,
}

impl Region {
    pub(crate) fn check(
        &self,
        argument: &'static str,
        expected: [usize; 4],
        dtype: DType,
        row_alignment: usize,
    ) -> Result<()> {
        let Extent { shape, strides } = self.extent;
        if self.dtype != dtype {
            return Err(Error::ElementType { argument, got: self.dtype, expected: dtype });
        }
        if shape != expected {
            return Err(Error::Shape { argument, got: shape, expected });
        }
        if shape.contains(&0) {
            return Ok(());
        }
        let step = (row_alignment / dtype.size()).max(1);
        for (axis, len, stride) in
            [("batch", shape[0], strides.batch), ("head", shape[1], strides.head), ("row", shape[2], strides.row)]
        {
            if len > 1 && stride % step != 0 {
                return Err(Error::Stride { argument, axis, got: stride, expected: "a multiple of 16 bytes" });
            }
        }
        // Beyond i64 bytes no address can be computed.
        let span = self.extent.span().filter(|&n| n <= isize::MAX as usize / dtype.size());
        let Some(span) = span else {
            return Err(Error::Stride {
                argument,
                axis: "batch",
                got: strides.batch,
                expected: "a tensor below 2^63 bytes",
            });
        };
        if let Some(got) = self.len.filter(|&len| len < span) {
            return Err(Error::BufferTooShort { argument, got, expected: span });
        }
        let alignment = row_alignment.max(dtype.size());
        if self.address == 0 || !self.address.is_multiple_of(alignment as u64) {
            return Err(Error::Alignment { argument, got: self.address, expected: alignment });
        }
        Ok(())
    }

    /// An output whose rows share elements would be written twice: sorted by stride, each axis must step over the
    /// whole extent of the ones below it.
    fn check_rows_disjoint(&self, output: &'static str) -> Result<()> {
        let Extent { shape, strides } = self.extent;
        if shape.contains(&0) {
            return Ok(());
        }
        let mut axes = [(strides.batch, shape[0]), (strides.head, shape[1]), (strides.row, shape[2])];
        axes.sort_unstable();
        let mut extent = shape[3];
        for (stride, len) in axes.into_iter().filter(|axis| axis.1 > 1) {
            if stride < extent {
                return Err(Error::Overlap { output, other: output });
            }
            extent += (len - 1) * stride;
        }
        Ok(())
    }

    /// Whether the two address ranges meet. Interleaved tensors (slices of one buffer along `dim`) do not overlap
    /// when both step by the same strides and their row windows are disjoint.
    pub(crate) fn overlaps(&self, other: &Region) -> bool {
        let bytes = |r: &Region| {
            let span = r.extent.span().unwrap_or(usize::MAX) as u64 * r.dtype.size() as u64;
            (r.address, r.address.saturating_add(span))
        };
        let ((a0, a1), (b0, b1)) = (bytes(self), bytes(other));
        if a0 >= b1 || b0 >= a1 || a0 == a1 || b0 == b1 {
            return false;
        }
        let (low, high) = if a0 <= b0 { (self, other) } else { (other, self) };
        let size = low.dtype.size() as u64;
        let strides = low.extent.strides;
        if strides != high.extent.strides {
            return true;
        }
        // The rows of `high` start at a fixed distance after those of `low`, modulo the smallest stride.
        let smallest = [strides.batch, strides.head, strides.row]
            .into_iter()
            .zip(&low.extent.shape)
            .filter(|&(_, &len)| len > 1)
            .map(|(stride, _)| stride as u64 * size)
            .min()
            .unwrap_or(u64::MAX);
        let regular = [strides.batch, strides.head, strides.row]
            .into_iter()
            .zip(&low.extent.shape)
            .all(|(stride, &len)| len <= 1 || (stride as u64 * size).is_multiple_of(smallest));
        let shift = (high.address - low.address) % smallest;
        !(regular
            && shift >= low.extent.shape[3] as u64 * size
            && shift + high.extent.shape[3] as u64 * size <= smallest)
    }
}
