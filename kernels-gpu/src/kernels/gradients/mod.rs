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

use crate::device::{setmaxnreg_dec, setmaxnreg_inc};
use crate::tile::shared::{PANEL_BYTES, ROW_BYTES};

/// How the four warpgroups of a block divide a tile, in both schedules.
struct Roles<const D: u32, const E: u32>;

impl<const D: u32, const E: u32> Roles<D, E> {
    /// State warpgroups, 64 rows of Sᵀ or Gᵀ each.
    const STATES: u32 = {
        assert!(E == 64 || E == 128, "a state warpgroup has 64 rows");
        E / 64
    };
    /// Output warpgroups.
    const OUTPUTS: u32 = 3 - Self::STATES;
    /// Panels of Q and K; of dO and V.
    const PANELS: [u32; 2] = [D / 64, E / 64];
    /// Where dO or V lies in a slot, after Q or K.
    const NARROW: u32 = Self::PANELS[0] * PANEL_BYTES;
    /// Bytes of a slot.
    const SLOT_BYTES: u32 = (Self::PANELS[0] + Self::PANELS[1]) * PANEL_BYTES;
    /// Bytes of the 16-bit Sᵀ or Gᵀ `[E, D]`.
    const STATE_BYTES: u32 = 2 * D * E;
    /// Bytes of a panel of it, `[E, 64]`.
    const STATE_PANEL_BYTES: u32 = E * ROW_BYTES;
    /// Bytes of the widest output of a chunk.
    const OUTPUT_BYTES: u32 = if D > E { D } else { E } / 64 * PANEL_BYTES;

    #[inline(always)]
    fn become_copies() {
        if E == 128 {
            setmaxnreg_dec::<40>();
        } else if D == 64 {
            setmaxnreg_dec::<32>();
        } else {
            setmaxnreg_dec::<24>();
        }
    }

    #[inline(always)]
    fn become_state() {
        if E == 128 {
            setmaxnreg_inc::<136>();
        } else if D == 64 {
            setmaxnreg_dec::<112>();
        } else {
            setmaxnreg_dec::<120>();
        }
    }

    #[inline(always)]
    fn become_output() {
        if E == 128 {
            setmaxnreg_inc::<200>();
        } else {
            setmaxnreg_inc::<184>();
        }
    }
}
