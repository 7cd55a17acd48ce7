//! Each segment's own contribution to the state (F4): F3 over its chunks, started at zero.
//!
//! ```text
//! U ← 0;  for each chunk:  U ← λ^64 U + (K̄ Y)ᵀ Z
//! ```
//!
//! The last segment of a sequence is left out: nothing follows it. Chunks at the front whose rows have factors below 2^-32 by the end of the
//! segment are left out too: with a steep slope few are read.

pub mod sm80;
pub mod sm90;

use crate::decay::Decay;
use crate::variants::CHUNK;

/// Rows at the end of a segment of `num_rows`, whole chunks, that count there.
#[inline(always)]
fn remembered_rows(decay: Decay, num_rows: u32) -> u32 {
    decay.reach().saturating_add(1).min(num_rows).next_multiple_of(CHUNK)
}
