//! The 16-bit element types of the tensors.

use crate::device::{
    cvt_f32_f16x2, cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32, mma_m16n8k16_bf16, mma_m16n8k16_f16, wgmma_m64n64k16_bf16,
    wgmma_m64n64k16_f16, wgmma_m64n128k16_bf16, wgmma_m64n128k16_f16,
};

/// A 16-bit type: how pairs of it are converted and multiplied.
pub trait Element {
    /// Rounds two values to nearest even; `lo` goes to the lower half.
    fn pack(lo: f32, hi: f32) -> u32;
    /// The two values, lower half first.
    fn unpack(pair: u32) -> [f32; 2];
    /// D += A B on 16×16 by 16×8 fragments, f32 accumulation. All lanes of the warp together.
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);

    /// D (+)= A B over one step of 16, asynchronously, B `[64, 16]` in shared memory; see
    /// [`wgmma_m64n64k16_bf16`].
    ///
    /// # Safety
    /// As that.
    unsafe fn wgmma_n64<const TRANS_B: u32>(d: &mut [f32; 32], a: [u32; 4], b: u64, accumulate: bool);
    /// The same for 128 columns.
    ///
    /// # Safety
    /// As [`wgmma_m64n64k16_bf16`].
    unsafe fn wgmma_n128<const TRANS_B: u32>(d: &mut [f32; 64], a: [u32; 4], b: u64, accumulate: bool);

    /// Multiplies a pair by two f32 factors, rounding once.
    #[inline(always)]
    fn scale(pair: u32, factors: [f32; 2]) -> u32 {
        let [lo, hi] = Self::unpack(pair);
        Self::pack(lo * factors[0], hi * factors[1])
    }

    /// What packing two values as `rounded` rounded off, packed too.
    #[inline(always)]
    fn remainder(values: [f32; 2], rounded: u32) -> u32 {
        let [lo, hi] = Self::unpack(rounded);
        Self::pack(values[0] - lo, values[1] - hi)
    }

    /// What [`Element::scale`] rounded off.
    #[inline(always)]
    fn scale_remainder(pair: u32, factors: [f32; 2]) -> u32 {
        let [lo, hi] = Self::unpack(pair);
        Self::remainder([lo * factors[0], hi * factors[1]], Self::scale(pair, factors))
    }
}

/// bfloat16.
pub struct Bf16;
/// IEEE half precision.
pub struct F16;

impl Element for Bf16 {
    #[inline(always)]
    fn pack(lo: f32, hi: f32) -> u32 {
        cvt_rn_bf16x2_f32(lo, hi)
    }
    #[inline(always)]
    fn unpack(pair: u32) -> [f32; 2] {
        [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
    }
    #[inline(always)]
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        mma_m16n8k16_bf16(d, a, b);
    }
    #[inline(always)]
    unsafe fn wgmma_n64<const TRANS_B: u32>(d: &mut [f32; 32], a: [u32; 4], b: u64, accumulate: bool) {
        // SAFETY: the caller's contract.
        unsafe { wgmma_m64n64k16_bf16::<TRANS_B>(d, a, b, accumulate) }
    }
    #[inline(always)]
    unsafe fn wgmma_n128<const TRANS_B: u32>(d: &mut [f32; 64], a: [u32; 4], b: u64, accumulate: bool) {
        // SAFETY: the caller's contract.
        unsafe { wgmma_m64n128k16_bf16::<TRANS_B>(d, a, b, accumulate) }
    }
}

impl Element for F16 {
    #[inline(always)]
    fn pack(lo: f32, hi: f32) -> u32 {
        cvt_rn_f16x2_f32(lo, hi)
    }
    #[inline(always)]
    fn unpack(pair: u32) -> [f32; 2] {
        cvt_f32_f16x2(pair)
    }
    #[inline(always)]
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        mma_m16n8k16_f16(d, a, b);
    }
    #[inline(always)]
    unsafe fn wgmma_n64<const TRANS_B: u32>(d: &mut [f32; 32], a: [u32; 4], b: u64, accumulate: bool) {
        // SAFETY: the caller's contract.
        unsafe { wgmma_m64n64k16_f16::<TRANS_B>(d, a, b, accumulate) }
    }
    #[inline(always)]
    unsafe fn wgmma_n128<const TRANS_B: u32>(d: &mut [f32; 64], a: [u32; 4], b: u64, accumulate: bool) {
        // SAFETY: the caller's contract.
        unsafe { wgmma_m64n128k16_f16::<TRANS_B>(d, a, b, accumulate) }
    }
}
