//! One head walked chunk by chunk: F2 and F3.

use core::ops::Range;

use super::CHUNK;
use super::matmul::{Matrix, MatrixMut, matmul};
use super::rows::{OutputRows, row};
use crate::{Element, View};

/// `o = c · A(x, y, z)`, or `A←` when `reverse`: one use of the forward operator as B7 writes it.
/// `x, y: [B, H, N, key_dim]`, `z, o: [B, H, N, value_dim]`.
pub(super) struct Application<'a, T> {
    pub x: View<'a, T>,
    pub y: View<'a, T>,
    pub z: View<'a, T>,
    pub o: OutputRows<'a, T>,
    pub reverse: bool,
}

/// The powers `λ^0 … λ^CHUNK` of one head, each the f32 next to the exact value.
pub(super) struct Decay {
    slope: f64,
    /// `descending[j] = λ^{CHUNK-j}`, so that a row of `M` is a slice.
    descending: [f32; CHUNK + 1],
}

impl Decay {
    pub fn new(slope: f32) -> Self {
        let slope = f64::from(slope);
        let power = |n: usize| (-slope * n as f64).exp() as f32;
        Decay { slope, descending: core::array::from_fn(|j| power(CHUNK - j)) }
    }

    /// `λ^n`; the exponent `-slope · n` is never positive.
    pub fn pow(&self, n: usize) -> f32 {
        (-self.slope * n as f64).exp() as f32
    }

    /// `λ^n` for `n ≤ CHUNK`, from the table.
    fn pow_in_chunk(&self, n: usize) -> f32 {
        self.descending[CHUNK - n]
    }

    /// `λ^i … λ^0`: row `i` of `M` up to its diagonal.
    fn mask_row(&self, i: usize) -> &[f32] {
        &self.descending[CHUNK - i..]
    }
}

/// Buffers of one worker, f32, sized for either orientation of the state.
pub(super) struct Scratch {
    /// X, `[L, key_dim]`.
    x: Vec<f32>,
    /// Y, then K̄ Y, `[L, key_dim]`.
    y: Vec<f32>,
    /// `[P | Λ X]`, `[L, CHUNK + key_dim]`; P is right-aligned in the first `CHUNK` columns.
    left: Vec<f32>,
    /// Z above S, `[CHUNK + key_dim, value_dim]`; Z ends at row `CHUNK`, where S begins, so that
    /// `[P | Λ X] [Z; S]` is one product for any number of valid rows.
    right: Vec<f32>,
    /// O, `[L, value_dim]`.
    out: Vec<f32>,
}

impl Scratch {
    const fn lens(head_dim: usize, value_dim: usize) -> [usize; 5] {
        let (widest, state) = (if head_dim > value_dim { head_dim } else { value_dim }, head_dim * value_dim);
        let rows = CHUNK * widest;
        [rows, rows, CHUNK * CHUNK + rows, rows + state, rows]
    }

    /// Bytes that a worker holds, with the copies `gemm` packs of the two operands of its largest product.
    pub const fn bytes(head_dim: usize, value_dim: usize) -> usize {
        let [x, y, left, right, out] = Self::lens(head_dim, value_dim);
        (x + y + 2 * (left + right) + out) * size_of::<f32>()
    }

    pub fn new(head_dim: usize, value_dim: usize) -> Self {
        let [x, y, left, right, out] = Self::lens(head_dim, value_dim).map(|len| vec![0.0; len]);
        Scratch { x, y, left, right, out }
    }
}

/// A stretch of one head that one worker walks.
pub(super) struct Stretch<'a> {
    pub batch: usize,
    pub head: usize,
    pub decay: &'a Decay,
    /// Rows in walking order: with `reverse`, position 0 is the last token.
    pub positions: Range<usize>,
}

impl Stretch<'_> {
    fn chunks(&self) -> impl Iterator<Item = Range<usize>> {
        let end = self.positions.end;
        self.positions.clone().step_by(CHUNK).map(move |start| start..end.min(start + CHUNK))
    }
}

impl<T: Element> Application<'_, T> {
    fn dims(&self) -> (usize, usize) {
        (self.x.extent.shape[3], self.z.extent.shape[3])
    }

    fn token(&self, position: usize) -> usize {
        if self.reverse { self.x.extent.shape[2] - 1 - position } else { position }
    }

    /// F4: what the stretch itself adds to the state, `[key_dim, value_dim]`.
    pub fn local_state(&self, stretch: &Stretch<'_>, scratch: &mut Scratch, state: &mut [f32]) {
        let (key_dim, value_dim) = self.dims();
        let (z, running) = scratch.right.split_at_mut(CHUNK * value_dim);
        let running = &mut running[..key_dim * value_dim];
        running.fill(0.0);
        for chunk in stretch.chunks() {
            self.load(&self.y, stretch, &chunk, &mut scratch.y);
            let z = &mut z[(CHUNK - chunk.len()) * value_dim..];
            self.load(&self.z, stretch, &chunk, z);
            update_state(stretch.decay, chunk.len(), &mut scratch.y, z, running, (key_dim, value_dim));
        }
        state.copy_from_slice(running);
    }

    /// F2, F3 over the stretch, from the state that enters it (`None` is 0).
    ///
    /// # Safety
    /// No other thread writes the stretch's rows of `o`.
    pub unsafe fn output(&self, stretch: &Stretch<'_>, scratch: &mut Scratch, scale: f32, state: Option<&[f32]>) {
        let (key_dim, value_dim) = self.dims();
        let Scratch { x, y, left, right, out } = scratch;
        let stride = CHUNK + key_dim;
        let entering = &mut right[CHUNK * value_dim..][..key_dim * value_dim];
        match state {
            Some(state) => entering.copy_from_slice(state),
            None => entering.fill(0.0),
        }
        for chunk in stretch.chunks() {
            let valid_rows = chunk.len();
            let first = CHUNK - valid_rows;
            self.load(&self.x, stretch, &chunk, x);
            self.load(&self.y, stretch, &chunk, y);
            self.load(&self.z, stretch, &chunk, &mut right[first * value_dim..]);

            // P = (X Yᵀ) ⊙ M
            let (x_chunk, y_chunk) =
                (Matrix::new(x, valid_rows, key_dim, key_dim), Matrix::new(y, valid_rows, key_dim, key_dim));
            matmul(MatrixMut::new(&mut left[first..], valid_rows, valid_rows, stride), 0.0, 1.0, x_chunk, y_chunk.t());
            for (i, (left, x)) in
                left.chunks_exact_mut(stride).zip(x.chunks_exact(key_dim)).take(valid_rows).enumerate()
            {
                let (p, scaled) = left.split_at_mut(CHUNK);
                let (past, future) = p[first..].split_at_mut(i + 1);
                past.iter_mut().zip(stretch.decay.mask_row(i)).for_each(|(p, m)| *p *= m);
                // Assigned, not multiplied: what lies above the diagonal may be infinite.
                future.fill(0.0);
                let decay = stretch.decay.pow_in_chunk(i + 1);
                scaled.iter_mut().zip(x).for_each(|(scaled, x)| *scaled = decay * x);
            }

            // O = c (P Z + Λ X S)
            let depth = valid_rows + key_dim;
            matmul(
                MatrixMut::new(out, valid_rows, value_dim, value_dim),
                0.0,
                scale,
                Matrix::new(&left[first..], valid_rows, depth, stride),
                Matrix::new(&right[first * value_dim..], depth, value_dim, value_dim),
            );
            for (position, out) in chunk.clone().zip(out.chunks_exact(value_dim)) {
                // SAFETY: positions of a stretch are distinct rows, and the caller keeps other threads off them.
                let row = unsafe { self.o.row(stretch.batch, stretch.head, self.token(position)) };
                T::narrow(out, row);
            }

            if chunk.end < stretch.positions.end {
                let (z, state) = right.split_at_mut(CHUNK * value_dim);
                let (z, state) = (&z[first * value_dim..], &mut state[..key_dim * value_dim]);
                update_state(stretch.decay, valid_rows, y, z, state, (key_dim, value_dim));
            }
        }
    }

    /// Rows of a chunk, in walking order, as a contiguous f32 `[L, dim]`.
    fn load(&self, view: &View<'_, T>, stretch: &Stretch<'_>, chunk: &Range<usize>, to: &mut [f32]) {
        for (position, to) in chunk.clone().zip(to.chunks_exact_mut(view.extent.shape[3])) {
            T::widen(row(view, stretch.batch, stretch.head, self.token(position)), to);
        }
    }
}

/// F3: `S' = λ^L S + (K̄ Y)ᵀ Z`; leaves `K̄ Y` in `y`.
fn update_state(
    decay: &Decay,
    valid_rows: usize,
    y: &mut [f32],
    z: &[f32],
    state: &mut [f32],
    (key_dim, value_dim): (usize, usize),
) {
    for (j, y) in y.chunks_exact_mut(key_dim).take(valid_rows).enumerate() {
        let decay = decay.pow_in_chunk(valid_rows - 1 - j);
        y.iter_mut().for_each(|y| *y *= decay);
    }
    matmul(
        MatrixMut::new(state, key_dim, value_dim, value_dim),
        decay.pow_in_chunk(valid_rows),
        1.0,
        Matrix::new(y, valid_rows, key_dim, key_dim).t(),
        Matrix::new(z, valid_rows, value_dim, value_dim),
    );
}
