//! What benches and the seed example share: shapes, measurements, records and the comparison with the oracle.
//!
//! The figures follow one method. Bytes are the essential ones: each input read once, each output written once. The
//! ceiling is a plain copy, measured in the same run. Times are medians.

// Each target uses its part of this module.
#![allow(dead_code)]

pub mod cpu;
pub mod criterion_run;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod oracle;
pub mod record;
pub mod report;

use core::fmt;
use core::str::FromStr;

use lightning_attention::{DType, Problem};

/// A problem's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub batch: usize,
    pub heads: usize,
    pub seq_len: usize,
    pub head_dim: usize,
    pub value_dim: usize,
}

impl Shape {
    pub const fn new(batch: usize, heads: usize, seq_len: usize, head_dim: usize, value_dim: usize) -> Self {
        Shape { batch, heads, seq_len, head_dim, value_dim }
    }

    /// The problem of this size with ALiBi slopes.
    pub fn problem(&self, dtype: DType) -> Problem {
        Problem::new(self.batch, self.heads, self.seq_len, self.head_dim, self.value_dim).dtype(dtype)
    }

    /// `B·H·N`.
    pub fn rows(&self) -> usize {
        self.batch * self.heads * self.seq_len
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { batch, heads, seq_len, head_dim, value_dim } = self;
        f.pad(&format!("{batch}×{heads}×{seq_len}×{head_dim}×{value_dim}"))
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<usize>, _> = text.split(',').map(|part| part.trim().parse()).collect();
        match numbers.as_deref() {
            Ok(&[batch, heads, seq_len, head_dim, value_dim]) => {
                Ok(Shape { batch, heads, seq_len, head_dim, value_dim })
            }
            _ => Err(format!("`{text}` is not of the form B,H,N,D,E")),
        }
    }
}

/// The seed benchmark's shapes.
pub const SEED: [Shape; 4] = [
    Shape::new(6, 8, 2048, 128, 64),
    Shape::new(6, 8, 4096, 128, 64),
    Shape::new(6, 8, 8192, 128, 64),
    Shape::new(6, 16, 2048, 64, 64),
];

/// All shapes that records hold: the seed's, the official README's, small batch, serving.
pub const SUITE: [Shape; 15] = [
    SEED[0],
    SEED[1],
    SEED[2],
    SEED[3],
    Shape::new(4, 32, 512, 128, 128),
    Shape::new(4, 32, 1024, 128, 128),
    Shape::new(4, 32, 2048, 128, 128),
    Shape::new(4, 32, 4096, 128, 128),
    Shape::new(4, 32, 8192, 128, 128),
    Shape::new(4, 32, 16384, 128, 128),
    Shape::new(4, 32, 32768, 128, 128),
    Shape::new(1, 8, 65536, 128, 128),
    Shape::new(1, 16, 8192, 128, 128),
    Shape::new(1, 16, 65536, 128, 128),
    Shape::new(1, 64, 16384, 128, 128),
];

/// One shape at every doubling of the length. An H200 holds two sets of tensors of each, side by side.
pub const GROWTH: [Shape; 6] = [
    Shape::new(6, 8, 8192, 128, 64),
    Shape::new(6, 8, 16384, 128, 64),
    Shape::new(6, 8, 32768, 128, 64),
    Shape::new(6, 8, 65536, 128, 64),
    Shape::new(6, 8, 131_072, 128, 64),
    Shape::new(6, 8, 262_144, 128, 64),
];

/// Small shapes, for the CPU.
pub const SMALL: [Shape; 2] = [Shape::new(1, 4, 1024, 128, 64), Shape::new(1, 4, 1024, 64, 64)];

/// Forward or backward, plain or with checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    Backward,
    CheckpointedForward,
    CheckpointedBackward,
}

impl Pass {
    pub const BOTH: [Pass; 2] = [Pass::Forward, Pass::Backward];
    pub const CHECKPOINTED: [Pass; 2] = [Pass::CheckpointedForward, Pass::CheckpointedBackward];

    pub fn is_forward(self) -> bool {
        matches!(self, Pass::Forward | Pass::CheckpointedForward)
    }

    pub fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::CheckpointedForward => "checkpointed forward",
            Pass::CheckpointedBackward => "checkpointed backward",
        }
    }

    /// Bytes that must move: q, k, v read and o written; q, k, v, do read and dq, dk, dv written.
    pub fn essential_bytes(self, shape: &Shape, dtype: DType) -> usize {
        let elements = match self {
            Pass::Forward | Pass::CheckpointedForward => 2 * shape.head_dim + 2 * shape.value_dim,
            Pass::Backward | Pass::CheckpointedBackward => 4 * shape.head_dim + 3 * shape.value_dim,
        };
        shape.rows() * elements * dtype.size()
    }
}

/// Where and how fast.
#[derive(Clone, Debug)]
pub struct Machine {
    pub backend: &'static str,
    /// Name of the GPU, or of the CPU.
    pub device: String,
    pub driver: String,
    /// Bytes read and written per nanosecond by a plain copy.
    pub copy_gbps: f64,
}

/// One pass of one shape.
#[derive(Clone, Debug)]
pub struct Timing {
    pub pass: Pass,
    /// The first call in this process for this shape, kernels loaded and buffers prepared within it, milliseconds.
    pub first_ms: f64,
    /// Median of the warm repetitions, milliseconds.
    pub warm_ms: f64,
    /// Number of repetitions.
    pub repetitions: usize,
    /// Remarks: segments, host time of a call.
    pub note: String,
}

impl Timing {
    pub fn gbps(&self, shape: &Shape, dtype: DType) -> f64 {
        gbps(self.pass.essential_bytes(shape, dtype), self.warm_ms)
    }
}

/// Both passes of one shape, with errors against the oracle where they were asked for.
#[derive(Clone, Debug)]
pub struct Measurement {
    pub shape: Shape,
    pub dtype: DType,
    /// Forward and backward, then the checkpointed passes where the plan has checkpoints.
    pub timings: Vec<Timing>,
    /// Of the plain passes and of the checkpointed ones.
    pub errors: [Option<oracle::Errors>; 2],
}

impl Measurement {
    /// The errors of the pass's outputs: name and value, and how many heads were compared.
    pub fn errors_of(&self, pass: Pass) -> Option<(Vec<(&'static str, f64)>, usize)> {
        let errors = self.errors[usize::from(Pass::CHECKPOINTED.contains(&pass))]?;
        let outputs = errors.outputs();
        let outputs = if pass.is_forward() { &outputs[..1] } else { &outputs[1..] };
        Some((outputs.to_vec(), errors.heads))
    }
}

/// Bytes and milliseconds → GB/s.
pub fn gbps(bytes: usize, ms: f64) -> f64 {
    bytes as f64 / ms / 1e6
}

/// The middle value; of an even number, the upper of the two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
