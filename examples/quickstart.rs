//! Ten lines on the CPU.

use lightning_attention::{DType, Forward, Layout, Problem, View, ViewMut, cpu};

fn main() -> lightning_attention::Result<()> {
    let problem = Problem::new(1, 8, 1000, 128, 64).dtype(DType::F32);
    let (key, value) = (problem.key_shape(), problem.value_shape());
    let (q, k) = (vec![0.1_f32; key.iter().product()], vec![0.1_f32; key.iter().product()]);
    let v = vec![1.0_f32; value.iter().product()];
    let mut o = vec![0.0_f32; v.len()];
    let (q, k) = (View::contiguous(&q, key, Layout::Bhnd), View::contiguous(&k, key, Layout::Bhnd));
    let v = View::contiguous(&v, value, Layout::Bhnd);
    cpu::forward(&problem, Forward { q, k, v, o: ViewMut::contiguous(&mut o, value, Layout::Bhnd) })?;
    println!("o[0] = {} (128 columns of 0.1 · 0.1)", o[0]);
    Ok(())
}
