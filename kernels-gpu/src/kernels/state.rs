//! The state `S: [D, 64]` of a block: each warp keeps `D / 4` of its rows in f32.

use super::{WorkItem, state_index};
use crate::abi::{Application, Params};
use crate::decay::Decay;
use crate::device::{ld_global_f32, ldmatrix_x4_trans, opaque, st_global_f32};
use crate::element::Element;
use crate::tile::register::{Accumulator, RowFragments, ZERO, mm_ab, store_panel, store_panel_remainder};
use crate::tile::shared::BlockAddress;
use crate::tile::unroll;
use crate::variants::{CHUNK, SLAB};

/// This warp's rows of the state, and what one chunk does to them (F3).
pub struct State<const D: u32> {
    /// Rows `16 (D / 64 · warp + i) …`; only the first is used for `D` = 64.
    rows: [Accumulator; 2],
    /// K̄ of this lane's columns in the last 16 rows of a chunk; 16 rows earlier it is λ^16 of that.
    row_decay: [f32; 4],
    /// λ^16, λ^32, λ^48, λ^64.
    step_decay: [f32; 4],
    y_address: BlockAddress,
    first_block: u32,
}

impl<const D: u32> State<D> {
    const BLOCKS: u32 = D / 64;

    /// The zero state.
    #[inline(always)]
    pub fn zero(decay: Decay, warp: u32, lane: u32) -> Self {
        const { assert!(D == 64 || D == 128, "four warps share the rows in blocks of 16") };
        // Chunks whose state is used are full, so the exponent L-1-j has L = 64.
        let last = 15 - 2 * (lane % 4);
        State {
            rows: [ZERO; 2],
            row_decay: [decay.pow(last), decay.pow(last - 1), decay.pow(last - 8), decay.pow(last - 9)],
            step_decay: [decay.pow(16), decay.pow(32), decay.pow(48), decay.pow(CHUNK)],
            y_address: BlockAddress::columns_first(lane),
            first_block: Self::BLOCKS * warp,
        }
    }

    /// S ← λ^64 S.
    #[inline(always)]
    pub fn decay(&mut self) {
        unroll!(I in 2 {
            if (I as u32) < Self::BLOCKS {
                unroll!(J in 8 {
                    self.rows[I][J] = self.rows[I][J].map(|x| x * self.step_decay[3]);
                });
            }
        });
    }

    /// S += (K̄ Y)ᵀ Z over rows `16 STEP …` of the chunk, with what rounding K̄ Y left where `ACCURATE`.
    ///
    /// # Safety
    /// As [`load_rows`](crate::tile::register::load_rows) for `y`.
    #[inline(always)]
    pub unsafe fn update<T: Element, const STEP: usize, const ACCURATE: bool>(&mut self, y: u32, z: &RowFragments) {
        // Two factors of at most 1: the product may vanish, never overflow.
        let f = if STEP == 3 { self.row_decay } else { self.row_decay.map(|x| x * opaque(self.step_decay[2 - STEP])) };
        unroll!(I in 2 {
            if (I as u32) < Self::BLOCKS {
                // SAFETY: the caller's contract.
                let y = unsafe { ldmatrix_x4_trans(self.y_address.at(y, 16 * STEP as u32, self.first_block + I as u32)) };
                let (low, high) = ([f[0], f[1]], [f[2], f[3]]);
                let a = [T::scale(y[0], low), T::scale(y[1], low), T::scale(y[2], high), T::scale(y[3], high)];
                mm_ab::<T>(&mut self.rows[I], a, z);
                if ACCURATE {
                    let rest = T::scale_remainder;
                    let a = [rest(y[0], low), rest(y[1], low), rest(y[2], high), rest(y[3], high)];
                    mm_ab::<T>(&mut self.rows[I], a, z);
                }
            }
        });
    }

    /// Stores the state, rounded, as the panel `[D, 64]` that the output product reads.
    ///
    /// # Safety
    /// As [`store_panel`].
    #[inline(always)]
    pub unsafe fn publish<T: Element>(&self, panel: u32, lane: u32) {
        unroll!(I in 2 {
            if (I as u32) < Self::BLOCKS {
                // SAFETY: the caller's contract.
                unsafe { store_panel::<T>(panel, 16 * (self.first_block + I as u32), lane, &self.rows[I]) };
            }
        });
    }

    /// Stores what [`State::publish`] rounded off, in the same way.
    ///
    /// # Safety
    /// As [`store_panel`].
    #[inline(always)]
    pub unsafe fn publish_remainder<T: Element>(&self, panel: u32, lane: u32) {
        unroll!(I in 2 {
            if (I as u32) < Self::BLOCKS {
                // SAFETY: the caller's contract.
                unsafe { store_panel_remainder::<T>(panel, 16 * (self.first_block + I as u32), lane, &self.rows[I]) };
            }
        });
    }

    /// Reads the state of a segment from the workspace.
    ///
    /// # Safety
    /// `application.states` holds one state of `state_len` values for each sequence and segment.
    #[inline(always)]
    pub unsafe fn load(&mut self, params: &Params, application: &Application, item: &WorkItem, lane: u32) {
        let at = Place::new(params, application, item, 16 * self.first_block + lane / 4, 2 * (lane % 4));
        unroll!(I in 2 {
            if (I as u32) < Self::BLOCKS {
                unroll!(J in 8 {
                    unroll!(V in 4 {
                        // SAFETY: the caller's contract.
                        self.rows[I][J][V] = unsafe { ld_global_f32(at.value(I, J, V)) };
                    });
                });
            }
        });
    }

    /// Writes the state of a segment to the workspace.
    ///
    /// # Safety
    /// As [`State::load`], and no other block touches this state.
    #[inline(always)]
    pub unsafe fn store(&self, params: &Params, application: &Application, item: &WorkItem, lane: u32) {
        let at = Place::new(params, application, item, 16 * self.first_block + lane / 4, 2 * (lane % 4));
        unroll!(I in 2 {
            if (I as u32) < Self::BLOCKS {
                unroll!(J in 8 {
                    unroll!(V in 4 {
                        // SAFETY: the caller's contract.
                        unsafe { st_global_f32(at.value(I, J, V).cast_mut(), self.rows[I][J][V]) };
                    });
                });
            }
        });
    }
}

/// Where a lane's values of a state lie in the workspace `[batch·heads, parts · (segments - 1) + 1, …]`.
struct Place {
    base: *const f32,
    row_stride: usize,
    col_stride: usize,
}

impl Place {
    #[inline(always)]
    fn new(params: &Params, application: &Application, item: &WorkItem, row: u32, col: u32) -> Self {
        let index = state_index(params, item.sequence, item.segment);
        let (row_stride, col_stride) = (application.state_row_stride as usize, application.state_col_stride as usize);
        let offset = index * params.state_len as usize
            + row as usize * row_stride
            + (item.slab * SLAB + col) as usize * col_stride;
        Place { base: (application.states as *const f32).wrapping_add(offset), row_stride, col_stride }
    }

    /// Value `v` of fragment `j` of block `i`.
    #[inline(always)]
    fn value(&self, i: usize, j: usize, v: usize) -> *const f32 {
        self.base.wrapping_add((16 * i + 8 * (v / 2)) * self.row_stride + (8 * j + v % 2) * self.col_stride)
    }
}
