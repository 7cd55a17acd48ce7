//! The CPU backend: the chunk form (F2, F3) with f32 accumulation and f32 states, on all threads of the current rayon
//! pool.
//!
//! Both passes are one body. Forward is `A(q, k, v)`; backward applies the same operator three times (B7), twice from
//! the end of the sequence. The bits of a result depend neither on the number of threads nor on timing: how a
//! sequence is cut depends on the shape only, and each piece is computed by one thread in a fixed order.
//!
//! Nothing but the result is rounded to the element type, whatever the problem's [`Precision`](crate::Precision).
//!
//! Beside inputs and outputs a call holds at most 64 MiB, whatever the shape. (`gemm` also reserves address space the
//! size of the L2 cache per thread, which these products do not touch.)

mod chunk;
mod matmul;
mod rows;
mod schedule;

use chunk::Application;
use rows::{OutputRows, region};

use crate::{Backward, Element, Forward, Problem, Result, View, ViewMut};

/// Rows of a chunk. By CPU time on Zen 5 (D = 128, E = 64; D = E = 128; D = E = 64), 48 is up to 10 % faster than 64,
/// 96 takes 3 to 13 % and 128 takes 7 to 18 % longer: more rows feed the products better, but P grows with them.
pub const CHUNK: usize = 64;

/// `o = scale · A(q, k, v)`, the operator of F1 from a zero state.
///
/// ```
/// use lightning_attention::{DType, Forward, Layout, Problem, View, ViewMut, cpu};
/// let problem = Problem::new(1, 2, 100, 16, 8).dtype(DType::F32);
/// let (key, value) = (problem.key_shape(), problem.value_shape());
/// let (q, k, v) = (vec![0.1_f32; 2 * 100 * 16], vec![0.1; 2 * 100 * 16], vec![1.0; 2 * 100 * 8]);
/// let mut o = vec![0.0; v.len()];
/// let tensors = Forward {
///     q: View::contiguous(&q, key, Layout::Bhnd),
///     k: View::contiguous(&k, key, Layout::Bhnd),
///     v: View::contiguous(&v, value, Layout::Bhnd),
///     o: ViewMut::contiguous(&mut o, value, Layout::Bhnd),
/// };
/// cpu::forward(&problem, tensors)?;
/// assert!((o[0] - 0.16).abs() < 1e-6); // 16 columns of 0.1 · 0.1
/// # Ok::<(), lightning_attention::Error>(())
/// ```
///
/// # Errors
/// Those of [`Problem::validate`] and [`Problem::check_forward`]; `o` then keeps its bytes.
pub fn forward<T: Element>(problem: &Problem, tensors: Forward<View<'_, T>, ViewMut<'_, T>>) -> Result<()> {
    let slopes = problem.validate()?;
    let Forward { q, k, v, o } = tensors;
    problem.check_forward(
        &Forward {
            q: region(q.data, q.extent),
            k: region(k.data, k.extent),
            v: region(v.data, v.extent),
            o: region(o.data, o.extent),
        },
        size_of::<T>(),
    )?;
    // SAFETY: checked above.
    let o = unsafe { OutputRows::new(o) };
    schedule::run(problem, &slopes, &[Application { x: q, y: k, z: v, o, reverse: false }]);
    Ok(())
}

/// `dq, dk, dv` of [`forward`] (B1 … B4).
///
/// # Errors
/// Those of [`Problem::validate`] and [`Problem::check_backward`]; the outputs then keep their bytes.
pub fn backward<T: Element>(problem: &Problem, tensors: Backward<View<'_, T>, ViewMut<'_, T>>) -> Result<()> {
    let slopes = problem.validate()?;
    let Backward { q, k, v, do_, dq, dk, dv } = tensors;
    problem.check_backward(
        &Backward {
            q: region(q.data, q.extent),
            k: region(k.data, k.extent),
            v: region(v.data, v.extent),
            do_: region(do_.data, do_.extent),
            dq: region(dq.data, dq.extent),
            dk: region(dk.data, dk.extent),
            dv: region(dv.data, dv.extent),
        },
        size_of::<T>(),
    )?;
    // SAFETY: checked above.
    let (dq, dk, dv) = unsafe { (OutputRows::new(dq), OutputRows::new(dk), OutputRows::new(dv)) };
    // B7
    let applications = [
        Application { x: do_, y: v, z: k, o: dq, reverse: false },
        Application { x: v, y: do_, z: q, o: dk, reverse: true },
        Application { x: k, y: q, z: do_, o: dv, reverse: true },
    ];
    schedule::run(problem, &slopes, &applications);
    Ok(())
}
