//! dq, dk and dv of a segment in one sweep from its end (B8), span by span. A span has as many chunks as lie between two
//! checkpoints, the states S that forward (or F4 and F5) left behind:
//!
//! ```text
//! forward over the span's chunks:    dQ = c ((dO Vᵀ ⊙ M) K + Λ dO Sᵀ)       S ← λ^64 S + (K̄ K)ᵀ V
//! backward over the same chunks:     dK = c ((V dOᵀ ⊙ Mᵀ) Q + Λ← V Gᵀ)      dV = c ((K Qᵀ ⊙ Mᵀ) dO + Λ← K G)
//!                                    G ← λ^64 G + (K̄← Q)ᵀ dO
//! ```
//!
//! with `Λ← = diag(λ^{64-j})`, `K̄← = diag(λ^j)`, and `G` here without its factor `c`. K, V and dO are read twice, but the second time
//! they are still in L2 where spans are short. Without checkpoints a segment is one span.

mod output;
pub mod paired;
pub mod sm90;
mod walk;
