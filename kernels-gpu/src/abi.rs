//! What host and device agree on: one `#[repr(C)]` parameter struct for every kernel.
//!
//! Every tensor of the operator, forward or backward, is reached through one shape of computation, a *causal
//! application* (`docs/algorithm.md`, F1):
//!
//! ```text
//! O = c · ((X Yᵀ ⊙ M) Z + Λ X S)        S ← λ^L S + (K̄ Y)ᵀ Z
//! ```
//!
//! with `(X, Y, Z, O)` = `(q, k, v, o)` forward, `(do, v, k, dq)` for dq, and, walking the sequence backwards,
//! `(v, do, q, dk)` and `(k, q, do, dv)`. Walking backwards is a negative row stride and nothing else.

/// Rows of a tensor `[batch, head, row, column]`, columns contiguous. Strides count elements and may be negative.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// Address of batch 0, head 0, first row *in walking order*.
    pub ptr: u64,
    /// Elements from one batch to the next.
    pub batch_stride: i64,
    /// Elements from one head to the next.
    pub head_stride: i64,
    /// Elements from one row to the next in walking order; negative walks the sequence backwards.
    pub row_stride: i64,
}

/// One causal application: see the [module](self).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Application {
    /// Left operand, `[N, key_dim]`.
    pub x: Rows,
    /// Right operand of the scores, `[N, key_dim]`.
    pub y: Rows,
    /// Summed operand, `[N, value_dim]`.
    pub z: Rows,
    /// Result, `[N, value_dim]`.
    pub o: Rows,
    /// f32 states `[batch·heads, parts · (segments - 1) + 1, padded dim, padded dim]`, or 0 where there is one segment.
    ///
    /// The state kernel writes the own contribution of each part of a segment; the scan kernel turns that of its first part into the
    /// state that enters each segment; the output kernel reads that.
    pub states: u64,
    /// f32 elements between state rows (index of `key_dim`).
    pub state_row_stride: u32,
    /// f32 elements between state columns (index of `value_dim`).
    pub state_col_stride: u32,
    /// Columns of `x` and `y`.
    pub key_dim: u32,
    /// Columns of `z` and `o`.
    pub value_dim: u32,
}

/// Applications one launch can carry.
pub const MAX_APPLICATIONS: usize = 3;

/// The argument of every kernel, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Params {
    /// Work of `blockIdx.y` = 0, 1, 2.
    pub applications: [Application; MAX_APPLICATIONS],
    /// f32 slopes `[heads]`, each ≥ 0; λ = exp(-slope).
    pub slopes: u64,
    /// f32 elements of one state, both dims padded to the tile.
    pub state_len: u32,
    /// Scale `c` of the output.
    pub scale: f32,
    /// Batch size.
    pub batch: u32,
    /// Heads.
    pub heads: u32,
    /// Rows of every sequence.
    pub seq_len: u32,
    /// Segments a sequence is cut into; for the state and scan kernels, parts of all but the last, and one more.
    pub segments: u32,
    /// Rows of every segment but the last, or of every part; a multiple of the chunk.
    pub segment_len: u32,
    /// Parts of a segment, a power of two; 1 for the state kernel, to which parts are segments.
    pub parts: u32,
    /// Value-dim slabs, one per block, of the kernel's value tile.
    pub slabs: u32,
    /// Blocks that share a slab of a segment: each carries the state along, and outputs every so manieth chunk.
    pub sharers: u32,
    /// Whether the output kernel stores checkpoints: Sᵀ, rounded, as it enters every second chunk.
    pub stores_checkpoints: u32,
}

/// Tensor maps of an application: x, y, z in boxes of a chunk's rows, o in boxes of a warp's 16 rows and of one.
pub const MAPS_PER_APPLICATION: usize = 5;

/// Most tensor maps of a launch: those of its applications and that of the checkpoints.
pub const MAX_MAPS: usize = MAPS_PER_APPLICATION * MAX_APPLICATIONS + 1;

/// Tensor maps of a launch, those of each application in turn, then, where there are any, that of the checkpoints
/// `[batch·heads, ⌈N / 128⌉, D / 64, E, 64]` (padded dims, 16-bit elements): columns, rows of all panels, pairs of chunks, sequences.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorMaps(pub [TensorMap; MAX_MAPS]);

/// What the host makes of a [`TensorMapSource`] for the copy engine; opaque.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorMap(pub [u64; 16]);

/// A tensor as the copy engine is to see it: `[batch, head, row, column]`, boxes of `box_rows` rows by 64 16-bit columns,
/// 128-byte swizzle, zero outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorMapSource {
    /// Address of element `[0, 0, 0, 0]`, a multiple of 16.
    pub address: u64,
    /// Columns, rows, heads, batches.
    pub dims: [u32; 4],
    /// Bytes from row to row, head to head, batch to batch; multiples of 16.
    pub strides: [u64; 3],
    /// Rows of a box.
    pub box_rows: u32,
}

/// Columns of a box: one swizzled panel.
pub const BOX_COLS: u32 = 64;

const _: () = assert!(size_of::<Rows>() == 32);
const _: () = assert!(size_of::<Application>() == 152);
const _: () = assert!(size_of::<Params>() == 3 * 152 + 56);
const _: () = assert!(core::mem::offset_of!(Params, slopes) == 456);
