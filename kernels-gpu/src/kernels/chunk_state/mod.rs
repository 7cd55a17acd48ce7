//! Each segment's own contribution to the state (F4): F3 over its chunks, started at zero.
//!
//! ```text
//! U ← 0;  for each chunk:  U ← λ^64 U + (K̄ Y)ᵀ Z
//! ```
//!
//! The last segment of a sequence is left out: nothing follows it.

pub mod sm80;
