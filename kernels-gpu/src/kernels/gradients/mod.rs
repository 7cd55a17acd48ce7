//! dq, dk and dv of a segment in one sweep.
//!
//! Without checkpoints ([`sm90`], B8) a segment is walked twice, K, V and dO read again:
//!
//! ```text
//! forward:     dQ = c ((dO Vᵀ ⊙ M) K + Λ dO Sᵀ)       S ← λ^64 S + (K̄ K)ᵀ V
//! backward:    dK = c ((V dOᵀ ⊙ Mᵀ) Q + Λ← V Gᵀ)      dV = c ((K Qᵀ ⊙ Mᵀ) dO + Λ← K G)
//!              G ← λ^64 G + (K̄← Q)ᵀ dO
//! ```
//!
//! with `Λ← = diag(λ^{64-j})`, `K̄← = diag(λ^j)`, and `G` here without its factor `c`. From checkpoints every two chunks ([`paired`], B9) it is
//! walked once, backward.

mod output;
pub mod paired;
pub mod sm90;
