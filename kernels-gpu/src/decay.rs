//! λ^n.

use crate::device::ex2_approx_ftz;

/// The decay λ = exp(-slope) of one head.
#[derive(Clone, Copy)]
pub struct Decay {
    log2: f32,
}

impl Decay {
    /// λ of a finite slope ≥ 0. A step below 2^-1e9 is 0 all the same, and bounded it can be multiplied by any `n`.
    #[inline(always)]
    pub fn of_slope(slope: f32) -> Self {
        Decay { log2: (-slope * core::f32::consts::LOG2_E).max(-1e9) }
    }

    /// λ^n; `n` ≥ 0, so the exponent is never positive.
    #[inline(always)]
    pub fn pow(self, n: u32) -> f32 {
        ex2_approx_ftz(self.log2 * n as f32)
    }

    /// λ^n for `n` ≥ 0, else 0: an entry of the causal mask M.
    #[inline(always)]
    pub fn pow_causal(self, n: i32) -> f32 {
        let power = self.pow(n.max(0) as u32);
        if n >= 0 { power } else { 0.0 }
    }
}
