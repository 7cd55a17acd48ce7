//! A kernel as kernels are: a two-stage ring of `cp.async`, `ldmatrix`, `mma`, against the naive product.

use half::{bf16, f16};
use lightning_attention_kernels::device::sim::{Element, GlobalMemory, Launch, launch};
use lightning_attention_kernels::device::*;

use super::SCHEDULES;

/// C = A B: `[M, K] [K, N]`, one block of four warps, 16 rows of C each.
const M: usize = 64;
const N: usize = 32;
const K: usize = 192;
/// Depth of a stage.
const DEPTH: usize = 64;
const STAGE_BYTES: u32 = ((M + N) * DEPTH * 2) as u32;

/// How an operand lies in memory: rows along the result, or rows along the summed dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lies {
    AlongResult,
    AlongSum,
}

trait Operand: Element {
    fn new(x: f32) -> Self;
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);
}

impl Operand for bf16 {
    fn new(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        mma_m16n8k16_bf16(d, a, b);
    }
}

impl Operand for f16 {
    fn new(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        mma_m16n8k16_f16(d, a, b);
    }
}

/// Copies columns (or rows) `k .. k + DEPTH` of an operand with `len` rows (or columns) to shared memory.
fn fetch(operand: u64, lies: Lies, len: usize, k: usize, to: u32) {
    let (rows, row_len, first, pitch) = match lies {
        Lies::AlongResult => (len, DEPTH, k, K),
        Lies::AlongSum => (DEPTH, len, k * len, len),
    };
    let per_row = row_len / 8;
    for piece in (thread_idx_x() as usize..rows * per_row).step_by(128) {
        let (row, column) = (piece / per_row, piece % per_row * 8);
        let from = operand + 2 * (first + row * pitch + column) as u64;
        // SAFETY: the simulator checks.
        unsafe { cp_async_cg_16(to + (2 * (row * row_len + column)) as u32, from as *const u8, 16) };
    }
}

/// Four 8 × 8 tiles at `(i, k)` of an operand of `len`: `(0, 0), (8, 0), (0, 8), (8, 8)` after `(i, k)`, or the middle two
/// exchanged.
fn tiles(at: u32, lies: Lies, len: usize, i: usize, k: usize, k_first: bool) -> [u32; 4] {
    let lane = thread_idx_x() as usize % 32;
    let (low, high) = (lane / 8 % 2 * 8, lane / 16 * 8);
    let (i, k) = if k_first { (i + high, k + low) } else { (i + low, k + high) };
    let r = lane % 8;
    // SAFETY: the simulator checks.
    unsafe {
        match lies {
            Lies::AlongResult => ldmatrix_x4(at + (2 * ((i + r) * DEPTH + k)) as u32),
            Lies::AlongSum => ldmatrix_x4_trans(at + (2 * ((k + r) * len + i)) as u32),
        }
    }
}

fn kernel<T: Operand>(a: u64, a_lies: Lies, b: u64, b_lies: Lies, c: u64) {
    let (warp, lane) = (thread_idx_x() as usize / 32, thread_idx_x() as usize % 32);
    let stage = |k: usize| dynamic_smem() + (k / DEPTH % 2) as u32 * STAGE_BYTES;
    let b_part = (M * DEPTH * 2) as u32;
    let load = |k: usize| {
        if k < K {
            fetch(a, a_lies, M, k, stage(k));
            fetch(b, b_lies, N, k, stage(k) + b_part);
        }
        cp_async_commit_group();
    };
    let mut sum = [[0f32; 4]; N / 8];
    load(0);
    load(DEPTH);
    for k in (0..K).step_by(DEPTH) {
        cp_async_wait_group::<1>();
        syncthreads();
        for step in (0..DEPTH).step_by(16) {
            let a = tiles(stage(k), a_lies, M, 16 * warp, step, false);
            for n in (0..N).step_by(16) {
                let b = tiles(stage(k) + b_part, b_lies, N, n, step, true);
                T::mma(&mut sum[n / 8], a, [b[0], b[1]]);
                T::mma(&mut sum[n / 8 + 1], a, [b[2], b[3]]);
            }
        }
        syncthreads();
        load(k + 2 * DEPTH);
    }
    for (n, [c0, c1, c2, c3]) in sum.into_iter().enumerate() {
        let (row, column) = (16 * warp + lane / 4, 8 * n + lane % 4 * 2);
        for (row, column, value) in
            [(row, column, c0), (row, column + 1, c1), (row + 8, column, c2), (row + 8, column + 1, c3)]
        {
            // SAFETY: the simulator checks.
            unsafe { st_global_f32((c + 4 * (row * N + column) as u64) as *mut f32, value) };
        }
    }
}

fn check<T: Operand>() {
    // Small integers: every sum is exact, so the result is, too.
    let a = |m: usize, k: usize| ((7 * m + 3 * k + m * k) % 17) as f32 - 8.0;
    let b = |k: usize, n: usize| ((5 * k + 11 * n + k * n) % 13) as f32 - 6.0;
    let expected: Vec<f32> = (0..M * N).map(|i| (0..K).map(|k| a(i / N, k) * b(k, i % N)).sum()).collect();
    let of = |lies: Lies, len: usize, value: &dyn Fn(usize, usize) -> f32| -> Vec<T> {
        let at = |i: usize| match lies {
            Lies::AlongResult => value(i / K, i % K),
            Lies::AlongSum => value(i % len, i / len),
        };
        (0..len * K).map(|i| T::new(at(i))).collect()
    };
    for a_lies in [Lies::AlongResult, Lies::AlongSum] {
        for b_lies in [Lies::AlongResult, Lies::AlongSum] {
            let (a, b) = (of(a_lies, M, &a), of(b_lies, N, &|n, k| b(k, n)));
            for schedule in SCHEDULES {
                let mut c = vec![f32::NAN; M * N];
                let mut memory = GlobalMemory::new();
                let (a, b) = (memory.input("a", &a), memory.input("b", &b));
                let c_address = memory.output("c", &mut c);
                let base =
                    Launch { name: "matmul", grid: [1; 3], threads: 128, shared_bytes: 2 * STAGE_BYTES, schedule };
                launch(&base, &memory, &|| kernel::<T>(a, a_lies, b, b_lies, c_address))
                    .unwrap_or_else(|fault| panic!("{a_lies:?} {b_lies:?} {schedule:?}: {fault}"));
                assert_eq!(memory.unwritten_words(c_address), 0);
                assert_eq!(c, expected, "{a_lies:?} {b_lies:?} {schedule:?}");
            }
        }
    }
}

#[test]
fn bf16_product() {
    check::<bf16>();
}

#[test]
fn f16_product() {
    check::<f16>();
}
