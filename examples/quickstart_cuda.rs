//! Forward on the first GPU.

use half::bf16;
use lightning_attention::cuda::cust::stream::{Stream, StreamFlags};
use lightning_attention::cuda::{self, DeviceView, DeviceViewMut, Engine};
use lightning_attention::{Forward, Layout, Problem};

fn main() -> anyhow::Result<()> {
    let engine = Engine::new(0)?;
    let stream = Stream::new(StreamFlags::DEFAULT, None)?;
    let problem = Problem::new(1, 8, 1000, 128, 64);
    let mut attention = engine.prepare(&problem)?;

    let (key, value) = (problem.key_shape(), problem.value_shape());
    let q = cuda::upload(&vec![bf16::from_f32(0.1); key.iter().product()])?;
    let k = cuda::upload(&vec![bf16::from_f32(0.1); key.iter().product()])?;
    let v = cuda::upload(&vec![bf16::ONE; value.iter().product()])?;
    let mut o = cuda::upload(&vec![bf16::ZERO; value.iter().product()])?;
    attention.forward_blocking::<bf16>(
        &stream,
        Forward {
            q: DeviceView::contiguous(&q, key, Layout::Bhnd),
            k: DeviceView::contiguous(&k, key, Layout::Bhnd),
            v: DeviceView::contiguous(&v, value, Layout::Bhnd),
            o: DeviceViewMut::contiguous(&mut o, value, Layout::Bhnd),
        },
    )?;
    println!("{engine}{attention}o[0] = {} (128 columns of 0.1 · 0.1)", cuda::download::<bf16>(&o)?[0]);
    Ok(())
}
