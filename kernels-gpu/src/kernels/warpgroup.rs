//! What the roles of the Hopper schedules are made of: a warpgroup's 64 rows of accumulators, and the operands that `wgmma`
//! takes from registers.
//!
//! Of 64 rows a warp has 16; lane `l` holds columns `8 j + 2 (l % 4)` and `+1` of rows `l / 4` (values `4 j`, `4 j + 1`) and
//! `l / 4 + 8` (values `4 j + 2`, `4 j + 3`).

use crate::decay::Decay;
use crate::device::{
    ld_global_f32, ld_shared_f32, ldmatrix_x4, ldmatrix_x4_trans, st_global_f32, st_shared_b32, stmatrix_x4,
    wgmma_commit_group, wgmma_fence, wgmma_wait_group,
};
use crate::element::Element;
use crate::tile::descriptor::Descriptor;
use crate::tile::shared::{BlockAddress, PANEL_BYTES};
use crate::tile::unroll;
use crate::variants::{CHUNK, DECAY_TABLE_BYTES};

/// Warps of a warpgroup: what arrives on a barrier.
pub const WARPS: u32 = 4;

/// 64 rows by up to 128 columns in f32, spread over a warpgroup; fewer columns use the first half.
pub type Rows = [f32; 64];

/// A fragments of four steps of 16 columns.
pub type Fragments = [u32; 16];

/// A fragments of step `k`.
#[inline(always)]
pub fn step(a: &Fragments, k: usize) -> [u32; 4] {
    [a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]]
}

/// The registers of 64 columns.
#[inline(always)]
pub fn first_half(s: &mut Rows) -> &mut [f32; 32] {
    let (halves, _) = s.as_chunks_mut();
    &mut halves[0]
}

/// O (+)= A B over a step of 16, all `N` columns.
///
/// # Safety
/// As [`Element::wgmma_n64`].
#[inline(always)]
pub unsafe fn product<T: Element, const N: u32, const TRANS_B: u32>(
    o: &mut Rows,
    a: [u32; 4],
    b: u64,
    accumulate: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if N == 128 {
            T::wgmma_n128::<TRANS_B>(o, a, b, accumulate);
        } else {
            T::wgmma_n64::<TRANS_B>(first_half(o), a, b, accumulate);
        }
    }
}

/// Waits for all products; O, of `N` columns, is one of theirs.
#[inline(always)]
pub fn wait<const N: u32>(o: &mut Rows) {
    if N == 128 {
        wgmma_wait_group::<0, 64>(o);
    } else {
        wgmma_wait_group::<0, 32>(first_half(o));
    }
}

/// Rows `16 · warp …` of an operand `[64, K]`, as A fragments.
///
/// # Safety
/// All lanes together; the operand is visible to this warp.
#[inline(always)]
pub unsafe fn load_fragments<const K: u32>(operand: u32, warp: u32, lane: u32) -> [Fragments; 2] {
    let address = BlockAddress::rows_first(lane);
    let mut a = [[0; 16]; 2];
    unroll!(J in 8 {
        if (J as u32) < K / 16 {
            // SAFETY: the caller's contract.
            let block = unsafe { ldmatrix_x4(address.at(operand, 16 * warp, J as u32)) };
            unroll!(V in 4 {
                a[J / 4][4 * (J % 4) + V] = block[V];
            });
        }
    });
    a
}

/// K̄ of a lane's columns, at the rows 0, 1, 8 and 9 from `16 k + 2 (l % 4)` on, for steps `k` of 16 rows; the rows lie in
/// walking order or `backwards`.
#[inline(always)]
pub fn row_decay(decay: Decay, lane: u32, backwards: bool) -> [[f32; 4]; 4] {
    let mut factors = [[0.0; 4]; 4];
    unroll!(K in 4 {
        let first = 16 * K as u32 + 2 * (lane % 4);
        let at = |row: u32| decay.pow(if backwards { first + row } else { CHUNK - 1 - first - row });
        factors[K] = [at(0), at(1), at(8), at(9)];
    });
    factors
}

/// (K̄ Z)ᵀ of a chunk as A fragments: this warp's 16 columns of the panel.
///
/// # Safety
/// All lanes together; the panel is visible to this warp.
#[inline(always)]
pub unsafe fn load_scaled_columns<T: Element>(
    panel: u32,
    warp: u32,
    lane: u32,
    row_decay: impl Fn(usize) -> [f32; 4],
) -> Fragments {
    // SAFETY: the caller's contract.
    unsafe { load_columns(panel, warp, lane, row_decay, T::scale) }
}

/// What [`load_scaled_columns`] rounded off, in the same way.
///
/// # Safety
/// As [`load_scaled_columns`].
#[inline(always)]
pub unsafe fn load_columns_remainder<T: Element>(
    panel: u32,
    warp: u32,
    lane: u32,
    row_decay: impl Fn(usize) -> [f32; 4],
) -> Fragments {
    // SAFETY: the caller's contract.
    unsafe { load_columns(panel, warp, lane, row_decay, T::scale_remainder) }
}

#[inline(always)]
unsafe fn load_columns(
    panel: u32,
    warp: u32,
    lane: u32,
    row_decay: impl Fn(usize) -> [f32; 4],
    scale: impl Fn(u32, [f32; 2]) -> u32,
) -> Fragments {
    let address = BlockAddress::columns_first(lane);
    let mut a = [0; 16];
    unroll!(K in 4 {
        let f = row_decay(K);
        // SAFETY: the caller's contract.
        let z = unsafe { ldmatrix_x4_trans(address.at(panel, 16 * K as u32, warp)) };
        a[4 * K] = scale(z[0], [f[0], f[1]]);
        a[4 * K + 1] = scale(z[1], [f[0], f[1]]);
        a[4 * K + 2] = scale(z[2], [f[2], f[3]]);
        a[4 * K + 3] = scale(z[3], [f[2], f[3]]);
    });
    a
}

/// Sᵀ ← λ^64 Sᵀ + (K̄ Z)ᵀ Y, `D` columns (F3): enqueues the products.
///
/// # Safety
/// Y is visible to `wgmma`; `a` is kept, and `s` left alone, until they are waited for.
#[inline(always)]
pub unsafe fn update_state<T: Element, const D: u32>(s: &mut Rows, chunk_decay: f32, a: &Fragments, y: u32) {
    unroll!(J in 8 {
        unroll!(V in 4 {
            s[4 * J + V] *= chunk_decay;
            if D == 128 {
                s[32 + 4 * J + V] *= chunk_decay;
            }
        });
    });
    let y = Descriptor::new(y);
    wgmma_fence();
    unroll!(K in 4 {
        // SAFETY: the caller's contract.
        unsafe { product::<T, D, 1>(s, step(a, K), y.rows(K as u32), true) };
    });
    wgmma_commit_group();
}

/// P = X Yᵀ, X and Y of `K` columns (F2): enqueues the products.
///
/// # Safety
/// Y is visible to `wgmma`; `x` is kept, and `p` left alone, until they are waited for.
#[inline(always)]
pub unsafe fn enqueue_scores<T: Element, const K: u32>(p: &mut [f32; 32], x: &[Fragments; 2], y: u32) {
    wgmma_fence();
    let y = Descriptor::new(y);
    unroll!(J in 8 {
        if (J as u32) < K / 16 {
            // SAFETY: the caller's contract.
            unsafe { T::wgmma_n64::<0>(p, step(&x[J / 4], J % 4), y.columns(J as u32, PANEL_BYTES), J != 0) };
        }
    });
    wgmma_commit_group();
}

/// O ← O + A Z, `N` columns (F2): enqueues the products.
///
/// # Safety
/// Z is visible to `wgmma`; `a` is kept, and `o` left alone, until they are waited for.
#[inline(always)]
pub unsafe fn enqueue_values<T: Element, const N: u32>(o: &mut Rows, a: &Fragments, z: Descriptor) {
    wgmma_fence();
    unroll!(J in 4 {
        // SAFETY: the caller's contract.
        unsafe { product::<T, N, 1>(o, step(a, J), z.rows(J as u32), true) };
    });
    wgmma_commit_group();
}

/// Stores this warp's 16 rows of `N` columns, rounded, as rows `row …` of panels of `panel_bytes`.
///
/// # Safety
/// As [`stmatrix_x4`]; the rows are this warp's alone.
#[inline(always)]
pub unsafe fn store_rounded<T: Element, const N: u32>(panels: u32, panel_bytes: u32, row: u32, lane: u32, s: &Rows) {
    // SAFETY: the caller's contract.
    unsafe { store_pairs::<N>(panels, panel_bytes, row, lane, s, |[lo, hi]| T::pack(lo, hi)) }
}

/// Stores what [`store_rounded`] rounded off, in the same way.
///
/// # Safety
/// As [`store_rounded`].
#[inline(always)]
pub unsafe fn store_remainder<T: Element, const N: u32>(panels: u32, panel_bytes: u32, row: u32, lane: u32, s: &Rows) {
    let remainder = |pair: [f32; 2]| T::remainder(pair, T::pack(pair[0], pair[1]));
    // SAFETY: the caller's contract.
    unsafe { store_pairs::<N>(panels, panel_bytes, row, lane, s, remainder) }
}

#[inline(always)]
unsafe fn store_pairs<const N: u32>(
    panels: u32,
    panel_bytes: u32,
    row: u32,
    lane: u32,
    s: &Rows,
    pack: impl Fn([f32; 2]) -> u32,
) {
    let address = BlockAddress::rows_first(lane);
    unroll!(J in 8 {
        // Blocks of 16 columns: 4 to a panel.
        if (J as u32) < N / 16 {
            let d = |i: usize| pack([s[8 * J + i], s[8 * J + i + 1]]);
            let to = address.at_of_tall(panels, row, J as u32, panel_bytes);
            // SAFETY: the caller's contract.
            unsafe { stmatrix_x4(to, [d(0), d(2), d(4), d(6)]) };
        }
    });
}

/// Where a lane's values of 64 rows of Sᵀ `[E, D]` lie in global memory.
#[derive(Clone, Copy)]
pub struct StatePlace {
    base: *const f32,
    row_stride: usize,
    col_stride: usize,
}

impl StatePlace {
    /// The 64 rows of Sᵀ at `row` of the state at `state`, whose rows and columns are so far apart: row `d`, column `e` of S is column
    /// `d`, row `e` of Sᵀ.
    #[inline(always)]
    pub fn new(state: *const f32, strides: [usize; 2], row: u32, warp: u32, lane: u32) -> Self {
        let [row_stride, col_stride] = strides;
        let (row, col) = (row + 16 * warp + lane / 4, 2 * (lane % 4));
        let base = state.wrapping_add(col as usize * row_stride + row as usize * col_stride);
        StatePlace { base, row_stride, col_stride }
    }

    /// Writes `D` columns.
    ///
    /// # Safety
    /// The state can be written, and nobody else writes these rows.
    #[inline(always)]
    pub unsafe fn store<const D: u32>(&self, s: &Rows) {
        unroll!(P in 2 {
            if (P as u32) < D / 64 {
                unroll!(J in 8 {
                    unroll!(V in 4 {
                        // SAFETY: the caller's contract.
                        unsafe { st_global_f32(self.value(P, J, V).cast_mut(), s[32 * P + 4 * J + V]) };
                    });
                });
            }
        });
    }

    #[inline(always)]
    fn value(&self, panel: usize, j: usize, v: usize) -> *const f32 {
        let (d, e) = (64 * panel + 8 * j + v % 2, 8 * (v / 2));
        self.base.wrapping_add(d * self.row_stride + e * self.col_stride)
    }

    /// Reads `D` columns.
    ///
    /// # Safety
    /// The state can be read.
    #[inline(always)]
    pub unsafe fn load<const D: u32>(&self, s: &mut Rows) {
        unroll!(P in 2 {
            if (P as u32) < D / 64 {
                unroll!(J in 8 {
                    unroll!(V in 4 {
                        // SAFETY: the caller's contract.
                        s[32 * P + 4 * J + V] = unsafe { ld_global_f32(self.value(P, J, V)) };
                    });
                });
            }
        });
    }
}

/// P ⊙ M at this lane's two columns of 8 columns `i`, in both rows. The second row is 8 further down, which is as far from a
/// column as the first from the one 8 before.
#[inline(always)]
fn masked(p: &[f32; 32], i: usize, first: [f32; 2], second: [f32; 2]) -> [[f32; 2]; 2] {
    [[p[4 * i] * first[0], p[4 * i + 1] * first[1]], [p[4 * i + 2] * second[0], p[4 * i + 3] * second[1]]]
}

/// c M and c Λ of a lane's two rows.
pub struct Masks {
    /// c M at row `l / 4` (of the warp's 16) and the columns `8 (j - 1) + 2 (l % 4)` and `+1`.
    pairs: [[f32; 2]; 9],
    lambda: [f32; 2],
}

impl Masks {
    /// Where the rows lie in walking order or `backwards`.
    #[inline(always)]
    pub fn new(decay: Decay, scale: f32, warp: u32, lane: u32, backwards: bool) -> Self {
        let first = 16 * warp + lane / 4;
        let distance = first as i32 - (2 * (lane % 4)) as i32;
        let walked = |d: i32| if backwards { -d } else { d };
        // At a distance of `rows - columns` in memory, and at one column further.
        let pair = |d: i32| [decay.pow_causal(walked(d)) * scale, decay.pow_causal(walked(d - 1)) * scale];
        let mut pairs = [[0.0; 2]; 9];
        unroll!(J in 8 {
            pairs[J] = pair(distance + 8 - 8 * J as i32);
        });
        pairs[8] = pair(distance - 56);
        let walked = |row: u32| if backwards { CHUNK - row } else { row + 1 };
        Masks { pairs, lambda: [decay.pow(walked(first)) * scale, decay.pow(walked(first + 8)) * scale] }
    }

    /// c P ⊙ M as the next A operand.
    #[inline(always)]
    pub fn apply<T: Element>(&self, p: &[f32; 32]) -> Fragments {
        let mut a = [0; 16];
        let mut above = self.pairs[0];
        unroll!(I in 8 {
            let below = self.pairs[I + 1];
            let [x, y] = masked(p, I, below, above);
            a[2 * I] = T::pack(x[0], x[1]);
            a[2 * I + 1] = T::pack(y[0], y[1]);
            above = below;
        });
        let _last = above;
        a
    }

    /// What [`Masks::apply`] rounded off, as an A operand.
    #[inline(always)]
    pub fn remainder<T: Element>(&self, p: &[f32; 32], rounded: &Fragments) -> Fragments {
        let mut a = [0; 16];
        let mut above = self.pairs[0];
        unroll!(I in 8 {
            let below = self.pairs[I + 1];
            let [x, y] = masked(p, I, below, above);
            a[2 * I] = T::remainder(x, rounded[2 * I]);
            a[2 * I + 1] = T::remainder(y, rounded[2 * I + 1]);
            above = below;
        });
        let _last = above;
        a
    }

    /// O ← c Λ O, `N` columns.
    #[inline(always)]
    pub fn scale_rows<const N: u32>(&self, o: &mut Rows) {
        let lambda = self.lambda;
        unroll!(P in 2 {
            unroll!(J in 8 {
                if (P as u32) < N / 64 {
                    o[32 * P + 4 * J] *= lambda[0];
                    o[32 * P + 4 * J + 1] *= lambda[0];
                    o[32 * P + 4 * J + 2] *= lambda[1];
                    o[32 * P + 4 * J + 3] *= lambda[1];
                }
            });
        });
    }
}

/// Powers of a head's decay in shared memory, where they cost no registers: c λ^d for distances d from -64 to 128, 0 where d < 0,
/// then for -d from -64 to 64 the same, λ^{63-r} of the rows r of a chunk, and λ^r.
#[derive(Clone, Copy)]
pub struct DecayTable(pub u32);

impl DecayTable {
    /// Forward, within a chunk and to the one before.
    const DISTANCES: u32 = 3 * CHUNK + 1;
    const ROWS: u32 = Self::DISTANCES + 2 * CHUNK + 1;

    /// Fills the table.
    ///
    /// # Safety
    /// All threads of the block, more than there are entries; a barrier follows.
    #[inline(always)]
    pub unsafe fn fill(self, decay: Decay, scale: f32, thread: u32) {
        const { assert!(4 * (Self::ROWS + 2 * CHUNK) <= DECAY_TABLE_BYTES) };
        let distance = |entry: u32| entry as i32 - CHUNK as i32;
        let (exponent, factor) = if thread < Self::DISTANCES {
            (distance(thread), scale)
        } else if thread < Self::ROWS {
            (-distance(thread - Self::DISTANCES), scale)
        } else {
            let row = thread.wrapping_sub(Self::ROWS) as i32;
            (if row < CHUNK as i32 { CHUNK as i32 - 1 - row } else { row - CHUNK as i32 }, 1.0)
        };
        if thread < Self::ROWS + 2 * CHUNK {
            // SAFETY: the caller's contract.
            unsafe { st_shared_b32(self.0 + 4 * thread, (decay.pow_causal(exponent) * factor).to_bits()) };
        }
    }

    /// Step `k` of [`row_decay`].
    #[inline(always)]
    pub fn row_decay(self, lane: u32, backwards: bool, k: usize) -> [f32; 4] {
        let rows = self.0 + 4 * (Self::ROWS + if backwards { CHUNK } else { 0 } + 2 * (lane % 4));
        let at = rows + 64 * k as u32;
        // SAFETY: the table is filled, and holds all rows of a chunk.
        unsafe { [ld_shared_f32(at), ld_shared_f32(at + 4), ld_shared_f32(at + 32), ld_shared_f32(at + 36)] }
    }

    /// This lane's part of M and Λ.
    #[inline(always)]
    pub fn masks(self, warp: u32, lane: u32, backwards: bool) -> TableMasks {
        let first = 16 * warp + lane / 4;
        let zero = self.0 + 4 * (CHUNK + if backwards { Self::DISTANCES } else { 0 });
        let lambda = zero + 4 * first;
        TableMasks {
            distance: zero + 4 * first - 8 * (lane % 4),
            // λ^{row+1}, or λ^{64-row}.
            lambda: if backwards { lambda - 4 * CHUNK } else { lambda + 4 },
        }
    }
}

/// Where a lane's [`Masks`] lie in a [`DecayTable`].
#[derive(Clone, Copy)]
pub struct TableMasks {
    /// Of distance 0 of this lane's first row and first column.
    distance: u32,
    /// Of this lane's first row.
    lambda: u32,
}

impl TableMasks {
    /// Forward, with the M of columns a chunk before the rows.
    #[inline(always)]
    pub fn of_chunk_before(&self) -> Self {
        TableMasks { distance: self.distance + 4 * CHUNK, ..*self }
    }

    /// Forward, with the Λ of a state that entered the chunk before.
    #[inline(always)]
    pub fn of_state_before(&self) -> Self {
        TableMasks { lambda: self.lambda + 4 * CHUNK, ..*self }
    }

    /// Loads them.
    #[inline(always)]
    pub fn load(&self) -> Masks {
        let mut pairs = [[0.0; 2]; 9];
        unroll!(J in 8 {
            pairs[J] = self.pair(J);
        });
        pairs[8] = self.pair(8);
        Masks { pairs, lambda: self.lambda() }
    }

    #[inline(always)]
    fn pair(&self, j: usize) -> [f32; 2] {
        let at = self.distance.wrapping_add(32).wrapping_sub(32 * j as u32);
        // SAFETY: the table is filled, and holds all distances within a chunk.
        unsafe { [ld_shared_f32(at), ld_shared_f32(at.wrapping_sub(4))] }
    }

    #[inline(always)]
    fn lambda(&self) -> [f32; 2] {
        // SAFETY: as above.
        unsafe { [ld_shared_f32(self.lambda), ld_shared_f32(self.lambda + 32)] }
    }
}
