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

    /// Rows over which a state remembers anything: from the next on λ^n is below 2^-32. `u32::MAX` without decay.
    #[inline(always)]
    pub fn reach(self) -> u32 {
        (32.0 / self.log2.abs()) as u32
    }

    /// λ^n for `n` ≥ 0, else 0: an entry of the causal mask M.
    #[inline(always)]
    pub fn pow_causal(self, n: i32) -> f32 {
        let power = self.pow(n.max(0) as u32);
        if n >= 0 { power } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reach_ends_where_little_is_left() {
        for slope in [1e-6_f32, 0.0039, 0.5, 0.92, 7.75, 50.0, 1e30] {
            let reach = Decay::of_slope(slope).reach();
            let exponent = |rows: u32| f64::from(slope) * f64::from(rows) / core::f64::consts::LN_2;
            // To the precision of f32.
            assert!(exponent(reach) < 32.001 && exponent(reach + 1) > 31.999, "slope {slope}: {reach} rows");
        }
        for slope in [0.0, -0.0] {
            assert_eq!(Decay::of_slope(slope).reach(), u32::MAX);
        }
    }
}
