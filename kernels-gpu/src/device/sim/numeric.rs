//! Conversions and functions of numbers, as the GPU rounds them.

use half::{bf16, f16};

/// Smallest magnitude that is not subnormal.
const MIN_NORMAL: f32 = f32::MIN_POSITIVE;

/// What the conversions turn every NaN into.
const CANONICAL_NAN: u16 = 0x7fff;

fn pack(lo: u16, hi: u16) -> u32 {
    u32::from(lo) | u32::from(hi) << 16
}

/// Two f32 to bf16, to nearest even.
pub(super) fn bf16x2(lo: f32, hi: f32) -> u32 {
    let round = |x: f32| if x.is_nan() { CANONICAL_NAN } else { bf16::from_f32(x).to_bits() };
    pack(round(lo), round(hi))
}

/// Two f32 to f16, to nearest even.
pub(super) fn f16x2(lo: f32, hi: f32) -> u32 {
    let round = |x: f32| if x.is_nan() { CANONICAL_NAN } else { f16::from_f32(x).to_bits() };
    pack(round(lo), round(hi))
}

/// Two f16 to f32, exactly.
pub(super) fn f32_of_f16x2(x: u32) -> [f32; 2] {
    [x as u16, (x >> 16) as u16].map(|bits| f16::from_bits(bits).to_f32())
}

/// 2^x; subnormal inputs and results count as zero.
pub(super) fn exp2_ftz(x: f32) -> f32 {
    let flush = |x: f32| if x.abs() < MIN_NORMAL { 0.0f32.copysign(x) } else { x };
    flush(flush(x).exp2())
}
