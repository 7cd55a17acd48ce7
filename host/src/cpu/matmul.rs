//! Matrix products on slices: bounds are checked here, once, in front of the pointers that `gemm` takes.

/// `[rows, cols]` with any strides.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `cols` elements, `stride` apart.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        Matrix { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Matrix { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// A product's destination: rows of `cols` elements, `stride` apart.
pub(super) struct MatrixMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> MatrixMut<'a> {
    /// As [`Matrix::new`].
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        assert!(rows <= 1 || stride >= cols, "rows of a destination do not overlap");
        MatrixMut { data, rows, cols, stride }
    }
}

fn assert_fits(len: usize, rows: usize, cols: usize, stride: usize) {
    assert!(rows == 0 || (rows - 1) * stride + cols <= len, "[{rows}, {cols}] by {stride} in {len} elements");
}

/// `dst = keep · dst + factor · a b`; with `keep == 0`, `dst` is not read.
pub(super) fn matmul(dst: MatrixMut<'_>, keep: f32, factor: f32, a: Matrix<'_>, b: Matrix<'_>) {
    assert!(dst.rows == a.rows && a.cols == b.rows && b.cols == dst.cols, "shapes of a product");
    // SAFETY: the constructors checked that every element of the three matrices lies in its slice; `dst` is borrowed
    // mutably, so it overlaps neither `a` nor `b`, and its elements are distinct.
    unsafe {
        gemm::gemm(
            dst.rows,
            dst.cols,
            a.cols,
            dst.data.as_mut_ptr(),
            1,
            dst.stride as isize,
            keep != 0.0,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            keep,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_and_transposed() {
        // a: [2, 3] by 4, b: [2, 3] by 3; dst = 2 dst - a bᵀ, [2, 2] by 3.
        let a = [1.0, 2.0, 3.0, f32::NAN, 4.0, 5.0, 6.0];
        let b = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0];
        let mut dst = [1.0, 2.0, 9.0, 3.0, 4.0];
        matmul(MatrixMut::new(&mut dst, 2, 2, 3), 2.0, -1.0, Matrix::new(&a, 2, 3, 4), Matrix::new(&b, 2, 3, 3).t());
        assert_eq!(dst, [-2.0, 2.0, 9.0, -4.0, 3.0]);
    }

    #[test]
    #[should_panic(expected = "[2, 3] by 4 in 6 elements")]
    fn refuses_what_does_not_fit() {
        Matrix::new(&[0.0; 6], 2, 3, 4);
    }
}
