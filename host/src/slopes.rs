//! Named slope schedules. A slope is `s_h ≥ 0`, the decay is `λ = exp(-s_h)`; always f32.

use crate::{Error, Result};

/// Where the per-head slopes come from.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Slopes {
    /// ALiBi slopes `2^(-8 (h+1) / H)` for a power of two `H`; for other `H`, those of the power of two below, then
    /// every second one of the power of two above (Press et al. 2022, the helper of the official Lightning Attention code).
    Alibi,
    /// MiniMax-Text-01: ALiBi times `1 - layer / (num_layers - 1) + 1e-5` (one layer: times `1 + 1e-5`).
    MiniMax {
        /// Index of the layer.
        layer: usize,
        /// Number of layers of the model.
        num_layers: usize,
    },
    /// No decay: all slopes 0.
    None,
    /// One slope per head.
    Custom(Vec<f32>),
}

impl Slopes {
    /// The slopes of `heads` heads.
    ///
    /// # Errors
    /// [`Error::SlopeCount`], [`Error::Slope`], [`Error::Layer`].
    pub fn values(&self, heads: usize) -> Result<Vec<f32>> {
        let values: Vec<f32> = match self {
            Slopes::Alibi => alibi(heads).into_iter().map(|s| s as f32).collect(),
            Slopes::MiniMax { layer, num_layers } => {
                if layer >= num_layers {
                    return Err(Error::Layer { got: *layer, num_layers: *num_layers });
                }
                let depth = (*num_layers - 1).max(1) as f64;
                let factor = 1.0 - *layer as f64 / depth + 1e-5;
                alibi(heads).into_iter().map(|s| (s * factor) as f32).collect()
            }
            Slopes::None => vec![0.0; heads],
            Slopes::Custom(values) => values.clone(),
        };
        if values.len() != heads {
            return Err(Error::SlopeCount { got: values.len(), expected: heads });
        }
        match values.iter().position(|s| !(s.is_finite() && *s >= 0.0)) {
            Some(head) => Err(Error::Slope { head, got: values[head] }),
            None => Ok(values),
        }
    }
}

fn alibi(heads: usize) -> Vec<f64> {
    let geometric = |n: usize| (1..=n).map(move |i| (-8.0 * i as f64 / n as f64).exp2());
    if heads.is_power_of_two() {
        return geometric(heads).collect();
    }
    let below = heads.next_power_of_two() / 2;
    geometric(below).chain(geometric(2 * below).step_by(2)).take(heads).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alibi_power_of_two() {
        let values = Slopes::Alibi.values(8).unwrap();
        assert_eq!(values, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]);
    }

    #[test]
    fn alibi_interpolates() {
        let values = Slopes::Alibi.values(12).unwrap();
        let above = Slopes::Alibi.values(16).unwrap();
        assert_eq!(values[..8], Slopes::Alibi.values(8).unwrap());
        assert_eq!(values[8..], [above[0], above[2], above[4], above[6]]);
    }

    #[test]
    fn minimax_scales_by_layer() {
        let layer = |layer| Slopes::MiniMax { layer, num_layers: 80 }.values(64).unwrap();
        let alibi = Slopes::Alibi.values(64).unwrap();
        assert!((layer(0)[0] / alibi[0] - 1.00001).abs() < 1e-6);
        assert!((layer(79)[0] / alibi[0] - 1e-5).abs() < 1e-9);
        assert_eq!(
            Slopes::MiniMax { layer: 80, num_layers: 80 }.values(64),
            Err(Error::Layer { got: 80, num_layers: 80 })
        );
    }

    #[test]
    fn refuses_bad_slopes() {
        for bad in [-1e-9, f32::NAN, f32::INFINITY] {
            let got = Slopes::Custom(vec![0.0, bad]).values(2).unwrap_err();
            assert!(matches!(got, Error::Slope { head: 1, .. }), "{got}");
        }
        assert_eq!(Slopes::Custom(vec![0.0]).values(2), Err(Error::SlopeCount { got: 1, expected: 2 }));
        assert_eq!(Slopes::Alibi.values(0), Ok(vec![]));
    }
}
