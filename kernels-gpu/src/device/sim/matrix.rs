//! What the warp-wide matrix instructions do with the registers of 32 lanes.
//!
//! Lane `l` is row (or column) `g = l / 4` and pair `t = l % 4` of the fragments in PTX ISA 9.7.13.4.8; the lower half
//! of a register is the element of lower index.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

/// Lanes of a warp.
pub(super) const LANES: usize = 32;

/// What the lanes of a warp hand in to an instruction, and get back.
pub(super) struct Exchange {
    pub a: [[u32; 4]; LANES],
    pub b: [[u32; 2]; LANES],
    pub d: [[f32; 4]; LANES],
    /// Row addresses of `ldmatrix` and `stmatrix`.
    pub addr: [u32; LANES],
    /// Result of `ldmatrix`, operand of `stmatrix`.
    pub loaded: [[u32; 4]; LANES],
}

impl Exchange {
    pub(super) const fn new() -> Self {
        Self { a: [[0; 4]; LANES], b: [[0; 2]; LANES], d: [[0.0; 4]; LANES], addr: [0; LANES], loaded: [[0; 4]; LANES] }
    }

    /// `ldmatrix.x4`: row `r` of matrix `i` is `rows[8 i + r]`, eight 16-bit elements in four words.
    pub(super) fn distribute(&mut self, rows: &[[u32; 4]; LANES]) {
        for (lane, loaded) in self.loaded.iter_mut().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            *loaded = core::array::from_fn(|i| rows[8 * i + g][t]);
        }
    }

    /// `ldmatrix.x4.trans`: as [`Exchange::distribute`], of the transposed matrices.
    pub(super) fn distribute_transposed(&mut self, rows: &[[u32; 4]; LANES]) {
        for (lane, loaded) in self.loaded.iter_mut().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            let element = |row: usize| rows[row][g / 2] >> (16 * (g % 2)) & 0xffff;
            *loaded = core::array::from_fn(|i| element(8 * i + 2 * t) | element(8 * i + 2 * t + 1) << 16);
        }
    }

    /// `stmatrix.x4`: what [`Exchange::distribute`] would distribute as it is.
    pub(super) fn collect(&self) -> [[u32; 4]; LANES] {
        core::array::from_fn(|row| core::array::from_fn(|t| self.loaded[row % 8 * 4 + t][row / 8]))
    }

    /// `mma.m16n8k16`: D += A B, every product exact, summed in f32 in the order of `k`.
    pub(super) fn multiply(&mut self, decode: Decode) {
        let (mut a, mut b) = ([[0u16; 16]; 16], [[0u16; 8]; 16]);
        let mut d = [[0f32; 8]; 16];
        for lane in 0..LANES {
            let (g, t) = (lane / 4, lane % 4);
            for (i, register) in self.a[lane].into_iter().enumerate() {
                let (row, k) = (g + i % 2 * 8, 2 * t + i / 2 * 8);
                (a[row][k], a[row][k + 1]) = (register as u16, (register >> 16) as u16);
            }
            for (i, register) in self.b[lane].into_iter().enumerate() {
                let k = 2 * t + i * 8;
                (b[k][g], b[k + 1][g]) = (register as u16, (register >> 16) as u16);
            }
            let [d0, d1, d2, d3] = self.d[lane];
            (d[g][2 * t], d[g][2 * t + 1], d[g + 8][2 * t], d[g + 8][2 * t + 1]) = (d0, d1, d2, d3);
        }

        let (mut a_values, mut b_values) = ([[0f32; 16]; 16], [[0f32; 8]; 16]);
        decode(a.as_flattened(), a_values.as_flattened_mut());
        decode(b.as_flattened(), b_values.as_flattened_mut());
        for (d, a) in d.iter_mut().zip(&a_values) {
            for (a, b) in a.iter().zip(&b_values) {
                for (d, b) in d.iter_mut().zip(b) {
                    *d += a * b;
                }
            }
        }

        for (lane, fragment) in self.d.iter_mut().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            *fragment = [d[g][2 * t], d[g][2 * t + 1], d[g + 8][2 * t], d[g + 8][2 * t + 1]];
        }
    }
}

/// 16-bit elements to f32, exactly.
pub(super) type Decode = fn(&[u16], &mut [f32]);

pub(super) fn decode_bf16(bits: &[u16], values: &mut [f32]) {
    values.iter_mut().zip(bits).for_each(|(value, &bits)| *value = f32::from_bits(u32::from(bits) << 16));
}

pub(super) fn decode_f16(bits: &[u16], values: &mut [f32]) {
    bits.reinterpret_cast::<f16>().convert_to_f32_slice(values);
}
