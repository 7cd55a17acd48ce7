//! One output of a chunk, dQ, dK or dV, as a warpgroup of either schedule makes it.

use super::super::warpgroup::{
    Fragments, Rows, TableMasks, enqueue_scores, enqueue_values, load_fragments, product, step, wait,
};
use crate::abi::MAPS_PER_APPLICATION;
use crate::device::{keep_alive, opaque, wgmma_commit_group, wgmma_fence, wgmma_wait_group};
use crate::element::Element;
use crate::tile::descriptor::Descriptor;
use crate::tile::shared::ROW_BYTES;
use crate::tile::unroll;

/// Tensor maps among those of dq, dk and dv as applications (B7): x, y, z, o of each.
pub mod map {
    use super::MAPS_PER_APPLICATION;
    pub const DO: usize = 0;
    pub const V: usize = 1;
    pub const K: usize = 2;
    pub const DQ: usize = 3;
    pub const Q: usize = MAPS_PER_APPLICATION + 2;
    pub const DK: usize = MAPS_PER_APPLICATION + 3;
    pub const DV: usize = 2 * MAPS_PER_APPLICATION + 3;
    pub const CHECKPOINTS: usize = 3 * MAPS_PER_APPLICATION;
}

/// The same value, of which the compiler knows nothing: what is computed from it stays where it is.
#[inline(always)]
pub fn here(value: u32) -> u32 {
    opaque(f32::from_bits(value)).to_bits()
}

/// Where the operands of one output of a chunk are.
pub struct Operands {
    pub x: u32,
    pub y: u32,
    pub z: u32,
    pub s: u32,
    /// Whether what was rounded off P counts.
    pub counts_remainder: bool,
    /// Y and Z of the chunk before, where S is the state that entered that one.
    pub before: Option<[u32; 2]>,
}

/// A warp that makes outputs.
#[derive(Clone, Copy)]
pub struct OutputWarp {
    pub scratch: u32,
    pub warp: u32,
    pub lane: u32,
}

impl OutputWarp {
    /// O = c ((X Yᵀ ⊙ M) Z + Λ X S) of a chunk, X and Y of `K` columns, Z and O of `N`; the copy of S is stored
    /// `[k, n]` (`TRANS_S` = 1: dQ and dK) or `[n, k]` (dV).
    ///
    /// # Safety
    /// All threads of the warpgroup together; the operands are visible to it.
    #[inline(always)]
    pub unsafe fn apply<T: Element, const K: u32, const N: u32, const TRANS_S: u32>(
        &self,
        operands: &Operands,
        masks: &TableMasks,
    ) -> Rows {
        let (warp, lane) = (self.warp, self.lane);
        let s_panel_bytes = if TRANS_S == 1 { K } else { N } * ROW_BYTES;
        // What two products share is not worth registers across the branch between them; and ptxas, given the choice, makes
        // another one each time.
        let (x_address, y, z, s) = (here(operands.x), here(operands.y), here(operands.z), here(operands.s));
        let (mut p, mut o) = ([0.0f32; 32], [0.0f32; 64]);
        // SAFETY: the operands are full.
        let x = unsafe { load_fragments::<K>(x_address, warp, lane) };
        // Early, as shared memory is busy later.
        let mask = masks.load();
        // P = X Yᵀ
        // SAFETY: the operands are full, and kept until the waits below.
        unsafe { enqueue_scores::<T, K>(&mut p, &x, y) };
        // O = X S
        wgmma_fence();
        let s = Descriptor::of_tall(s, s_panel_bytes);
        unroll!(J in 8 {
            if (J as u32) < K / 16 {
                let b = if TRANS_S == 1 { s.rows(J as u32) } else { s.columns(J as u32, s_panel_bytes) };
                // SAFETY: as above.
                unsafe { product::<T, N, TRANS_S>(&mut o, step(&x[J / 4], J % 4), b, J != 0) };
            }
        });
        wgmma_commit_group();

        wgmma_wait_group::<1, 32>(&mut p);
        let a = mask.apply::<T>(&p);
        wait::<N>(&mut o);
        // SAFETY: scratch is for this.
        unsafe {
            keep_alive(&x[0], self.scratch);
            if K == 128 {
                keep_alive(&x[1], self.scratch);
            }
        }
        // O ← c Λ O + (c P ⊙ M) Z
        mask.scale_rows::<N>(&mut o);
        let z = Descriptor::new(z);
        // SAFETY: as above.
        unsafe { enqueue_values::<T, N>(&mut o, &a, z) };
        if operands.counts_remainder {
            let rest = mask.remainder::<T>(&p, &a);
            // SAFETY: as above; scratch is for this.
            unsafe {
                enqueue_values::<T, N>(&mut o, &rest, z);
                wait::<N>(&mut o);
                keep_alive(&rest, self.scratch);
            }
        }
        let mut last = a;
        if let Some([y, z]) = operands.before {
            let before = [here(operands.x), here(y), here(z)];
            // SAFETY: as above.
            last = unsafe { self.add_before::<T, K, N>(&mut o, &a, before, masks, operands.counts_remainder) };
        }
        wait::<N>(&mut o);
        // SAFETY: scratch is for this.
        unsafe { keep_alive(&last, self.scratch) };
        o
    }

    /// O ← O + (c X Yᵀ ⊙ M) Z, Y and Z of the chunk before: enqueues the last products, and returns their A operand.
    ///
    /// # Safety
    /// As [`OutputWarp::apply`]; products of `a` on O may be on their way.
    #[inline(always)]
    unsafe fn add_before<T: Element, const K: u32, const N: u32>(
        &self,
        o: &mut Rows,
        a: &Fragments,
        [x, y, z]: [u32; 3],
        masks: &TableMasks,
        counts_remainder: bool,
    ) -> Fragments {
        let mut p = [0.0f32; 32];
        // SAFETY: the operands are full, and kept until the waits.
        let x = unsafe { load_fragments::<K>(x, self.warp, self.lane) };
        // SAFETY: as above.
        unsafe { enqueue_scores::<T, K>(&mut p, &x, y) };
        wgmma_wait_group::<0, 32>(&mut p);
        wait::<N>(o);
        // SAFETY: scratch is for this.
        unsafe {
            keep_alive(a, self.scratch);
            keep_alive(&x[0], self.scratch);
            if K == 128 {
                keep_alive(&x[1], self.scratch);
            }
        }
        let mask = masks.of_chunk_before().load();
        let next_a = mask.apply::<T>(&p);
        let z = Descriptor::new(z);
        // SAFETY: as above.
        unsafe {
            enqueue_values::<T, N>(o, &next_a, z);
            if counts_remainder {
                let rest = mask.remainder::<T>(&p, &next_a);
                enqueue_values::<T, N>(o, &rest, z);
                wait::<N>(o);
                keep_alive(&rest, self.scratch);
            }
        }
        next_a
    }
}
