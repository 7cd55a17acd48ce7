//! The outputs of a causal application, walking a segment's chunks from the state that enters it:
//!
//! ```text
//! F2:  P = (X Yᵀ) ⊙ M          O = c (P Z + Λ X S)
//! F3:  S ← λ^64 S + (K̄ Y)ᵀ Z
//! ```
//!
//! Forward is one application, backward three (B7).

pub mod sm80;
pub mod sm90;
