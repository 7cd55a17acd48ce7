//! The outputs of a causal application, walking a segment's chunks from the state that enters it:
//!
//! ```text
//! F2:  P = (X Yᵀ) ⊙ M          O = c (P Z + Λ X S)
//! F3:  S ← λ^64 S + (K̄ Y)ᵀ Z
//! ```
//!
//! Forward is one application, backward three (B7).

//!
//! P is rounded to the element type on its way to the second product. Over many rows such errors average out; over few they
//! do not (over one row it may be off by 2^-8), so in short sequences and short chunks what was rounded off is multiplied
//! too. Always doing so costs 3 to 4 % of the time of a long sequence. Accurate kernels always do, and multiply what was
//! rounded off S and off what enters it as well.

pub mod sm80;
pub mod sm90;

/// Sequences up to this long count the remainder of P in every chunk.
pub(super) const FEW_ROWS: u32 = 512;
