//! The CPU backend's own memory: at most 64 MiB at any time, whatever the shape and however many threads.

use std::alloc::{GlobalAlloc, Layout as AllocLayout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use lightning_attention::{Backward, DType, Forward, Layout, Problem, View, ViewMut, cpu};

/// The system allocator, counting.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: AllocLayout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: AllocLayout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn at_most_64_mib() {
    let threads = 64;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.broadcast(|_| reserve_packing_buffer());
    for [b, h, n, d, e] in [[1, 1, 20_000, 256, 256], [1, 32, 300, 256, 256], [2, 1, 9000, 128, 64], [3, 700, 5, 8, 8]]
    {
        let problem = Problem::new(b, h, n, d, e).dtype(DType::F32);
        let (key, value) = (problem.key_shape(), problem.value_shape());
        let len = |shape: [usize; 4]| shape.iter().product::<usize>();
        let (q, v) = (vec![0.1_f32; len(key)], vec![0.1_f32; len(value)]);
        let (mut dq, mut dk, mut dv) = (q.clone(), q.clone(), v.clone());
        let view = |data, shape| View::contiguous(data, shape, Layout::Bhnd);

        let before = HELD.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        pool.install(|| {
            let o = ViewMut::contiguous(&mut dv, value, Layout::Bhnd);
            cpu::forward(&problem, Forward { q: view(&q, key), k: view(&q, key), v: view(&v, value), o }).unwrap();
            let tensors = Backward {
                q: view(&q, key),
                k: view(&q, key),
                v: view(&v, value),
                do_: view(&v, value),
                dq: ViewMut::contiguous(&mut dq, key, Layout::Bhnd),
                dk: ViewMut::contiguous(&mut dk, key, Layout::Bhnd),
                dv: ViewMut::contiguous(&mut dv, value, Layout::Bhnd),
            };
            cpu::backward(&problem, tensors).unwrap();
        });
        let held = PEAK.load(Ordering::Relaxed) - before;
        println!("{b}x{h}x{n}x{d}x{e}: {:.1} MiB on {threads} threads", held as f64 / f64::from(1 << 20));
        assert!(held <= 64 << 20, "{b}x{h}x{n}x{d}x{e}: {held} bytes");
    }
}

/// `gemm` reserves a buffer for each thread on its first product and keeps it for good; a call cannot hold it.
fn reserve_packing_buffer() {
    const N: usize = 64;
    let (a, mut c) = (vec![0.0_f32; N * N], vec![0.0_f32; N * N]);
    let (stride, none) = (N as isize, gemm::Parallelism::None);
    let (dst, a) = (c.as_mut_ptr(), a.as_ptr());
    // SAFETY: row-major [N, N] buffers, `dst` apart from the operands.
    unsafe {
        gemm::gemm(N, N, N, dst, 1, stride, false, a, 1, stride, a, 1, stride, 0.0, 1.0, false, false, false, none);
    }
}
