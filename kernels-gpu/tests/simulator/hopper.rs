//! A kernel as kernels for Hopper are: one lane fills a ring of two stages by tensor copies, a warpgroup multiplies out of
//! it and stores through shared memory. Against the naive product; with a flaw, a fault.

use half::{bf16, f16};
use lightning_attention_kernels::abi::{TensorMap, TensorMapSource};
use lightning_attention_kernels::device::sim::{
    Buffer, Element, Fault, GlobalMemory, Launch, Schedule, encode_tensor_map, launch,
};
use lightning_attention_kernels::device::*;

use super::SCHEDULES;

/// C = A B: `[ROWS, DEPTH] [DEPTH, columns]`, in tiles of 64 rows and chunks of 64 of the depth.
const ROWS: usize = 90;
const DEPTH: usize = 200;
/// Row, depth and column of the first box: in depth before the tensors, where nothing is stored. The last ones end behind.
const FIRST: [i32; 3] = [0, -16, 0];
const TILES: i32 = 2;
const CHUNKS: i32 = 4;
const STAGES: u32 = 2;

/// What is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    None,
    NoInitFence,
    NoBlockBarrier,
    MisalignedLoad,
    TooFewBytes,
    TooManyBytes,
    TooManyArrivals,
    NoEmptyWait,
    NoFullWait,
    WrongFullParity,
    WrongEmptyParity,
    OneWarpDoesNotWait,
    ReleaseBeforeRead,
    ReleaseWithoutWarpBarrier,
    ReleaseBeforeProducts,
    NoProductFence,
    DescriptorOutOfBounds,
    DescriptorUninitialised,
    DescriptorWithoutSwizzle,
    DescriptorsDiffer,
    NoProxyFence,
    ProxyFenceByOneLane,
    ProxyFenceBeforeStore,
    NoWarpBarrier,
    NoReadWait,
    NoWarpBarrierAfterReadWait,
    NoFinalWait,
    NoPolicy,
    NoMap,
    WriteToBarrier,
    WarpLeaves,
}

pub(super) trait Operand: Element + PartialEq + core::fmt::Debug {
    fn new(x: f32) -> Self;
    fn pack(lo: f32, hi: f32) -> u32;
    /// # Safety
    /// That of the device function.
    unsafe fn multiply<const R: usize, const TRANS_B: u32>(d: &mut [f32; R], a: [u32; 4], b: u64, accumulate: bool);
}

macro_rules! operand {
    ($ty:ident $pack:ident $n64:ident $n128:ident) => {
        impl Operand for $ty {
            fn new(x: f32) -> Self {
                Self::from_f32(x)
            }
            fn pack(lo: f32, hi: f32) -> u32 {
                $pack(lo, hi)
            }
            #[track_caller]
            unsafe fn multiply<const R: usize, const TRANS_B: u32>(
                d: &mut [f32; R],
                a: [u32; 4],
                b: u64,
                accumulate: bool,
            ) {
                if R == 32 {
                    // SAFETY: the caller's contract.
                    unsafe { $n64::<TRANS_B>(d.as_mut_slice().try_into().unwrap(), a, b, accumulate) }
                } else {
                    // SAFETY: the caller's contract.
                    unsafe { $n128::<TRANS_B>(d.as_mut_slice().try_into().unwrap(), a, b, accumulate) }
                }
            }
        }
    };
}
operand!(bf16 cvt_rn_bf16x2_f32 wgmma_m64n64k16_bf16 wgmma_m64n128k16_bf16);
operand!(f16 cvt_rn_f16x2_f32 wgmma_m64n64k16_f16 wgmma_m64n128k16_f16);

/// Tensor maps of A, B, C.
type Maps = [TensorMap; 3];

/// Where things lie in shared memory.
struct Layout {
    stages: u32,
    stage_bytes: u32,
    result: u32,
    full: u32,
    empty: u32,
    end: u32,
}

impl Layout {
    fn new(columns: u32) -> Self {
        let stages = dynamic_smem();
        let stage_bytes = 8192 + 128 * columns;
        let result = stages + STAGES * stage_bytes;
        let full = result + 128 * columns;
        Self { stages, stage_bytes, result, full, empty: full + 8 * STAGES, end: full + 16 * STAGES + 1024 }
    }
}

fn producer<const TRANS_B: u32>(maps: &Maps, columns: u32, flaw: Flaw) {
    let Layout { stages, stage_bytes, full, empty, .. } = Layout::new(columns);
    let (mut stage, mut parity) = (0, 1);
    let policy = if flaw == Flaw::NoPolicy { 0 } else { createpolicy_evict_first() };
    let map_a: *const TensorMap = if flaw == Flaw::NoMap { &TensorMap::default() } else { &maps[0] };
    let expected = match flaw {
        Flaw::TooFewBytes => stage_bytes - 8192,
        Flaw::TooManyBytes => stage_bytes + 16,
        _ => stage_bytes,
    };
    for tile in 0..TILES {
        for chunk in 0..CHUNKS {
            let at = stages + stage * stage_bytes + if flaw == Flaw::MisalignedLoad { 512 } else { 0 };
            let (row, k, column) = (FIRST[0] + 64 * tile, FIRST[1] + 64 * chunk, FIRST[2]);
            let (full, empty) = (full + 8 * stage, empty + 8 * stage);
            // SAFETY: the simulator checks.
            unsafe {
                if flaw != Flaw::NoEmptyWait {
                    mbarrier_wait_parity(empty, parity ^ u32::from(flaw == Flaw::WrongEmptyParity));
                }
                mbarrier_arrive_expect_tx_if(full, expected, true);
                cp_async_bulk_tensor_load_if(at, map_a, [k, row, 0, 0], full, policy, true);
                if TRANS_B == 0 {
                    cp_async_bulk_tensor_load_if(at + 8192, &maps[1], [k, column, 0, 0], full, policy, true);
                } else {
                    for panel in 0..columns / 64 {
                        let at_b = [column + 64 * panel as i32, k, 0, 0];
                        let to = at + 8192 + 8192 * panel;
                        cp_async_bulk_tensor_load_if(to, &maps[1], at_b, full, policy, true);
                    }
                }
            }
            stage = (stage + 1) % STAGES;
            parity ^= u32::from(stage == 0);
        }
    }
}

/// Row and 16-byte unit that a lane has the address of, for `ldmatrix` and `stmatrix` of 16 × 16.
fn unit(base: u32, row: u32, unit: u32) -> u32 {
    base + 128 * row + ((unit ^ (row & 7)) << 4)
}

fn descriptor(at: u32) -> u64 {
    u64::from(at >> 4) | 512 << 16 | 64 << 32 | 1 << 62
}

fn consumer<T: Operand, const R: usize, const TRANS_B: u32>(maps: &Maps, flaw: Flaw) {
    let columns = 2 * R as u32;
    let Layout { stages, stage_bytes, result, full, empty, end } = Layout::new(columns);
    let (thread, lane, warp) = (thread_idx_x() % 128, thread_idx_x() % 32, thread_idx_x() % 128 / 32);
    let (row, half) = (16 * warp + lane % 16, lane / 16);
    let (mut stage, mut parity) = (0, u32::from(flaw == Flaw::WrongFullParity));
    for tile in 0..TILES {
        let mut d = [f32::NAN; R];
        for chunk in 0..CHUNKS {
            let at = stages + stage * stage_bytes;
            let (full, empty) = (full + 8 * stage, empty + 8 * stage);
            let arrives = if flaw == Flaw::TooManyArrivals { lane < 2 } else { lane == 0 };
            // SAFETY: the simulator checks.
            unsafe {
                if flaw != Flaw::NoFullWait && (flaw != Flaw::OneWarpDoesNotWait || warp != 2) {
                    mbarrier_wait_parity(full, parity);
                }
                if flaw == Flaw::ReleaseBeforeRead {
                    mbarrier_arrive_if(empty, arrives);
                }
                let a: [[u32; 4]; 4] = core::array::from_fn(|step| ldmatrix_x4(unit(at, row, 2 * step as u32 + half)));
                if flaw != Flaw::NoProductFence {
                    wgmma_fence();
                }
                let mut b = descriptor(at + 8192);
                match flaw {
                    Flaw::DescriptorOutOfBounds => b = descriptor(end.next_multiple_of(1024)),
                    Flaw::DescriptorUninitialised => b = descriptor(result),
                    Flaw::DescriptorWithoutSwizzle => b &= !(1 << 62),
                    Flaw::DescriptorsDiffer => b += u64::from(thread == 70),
                    _ => {}
                }
                for (step, &a) in a.iter().enumerate() {
                    let step_bytes = if TRANS_B == 0 { 32 } else { 2048 };
                    T::multiply::<R, TRANS_B>(&mut d, a, b + (step * step_bytes / 16) as u64, chunk + step as i32 > 0);
                }
                wgmma_commit_group();
                if flaw == Flaw::ReleaseBeforeProducts {
                    syncwarp();
                    mbarrier_arrive_if(empty, arrives);
                }
                wgmma_wait_group::<0, R>(&mut d);
                keep_alive(a.as_flattened().try_into().unwrap(), end - 4);
                if !matches!(flaw, Flaw::ReleaseBeforeRead | Flaw::ReleaseBeforeProducts) {
                    if flaw != Flaw::ReleaseWithoutWarpBarrier {
                        syncwarp();
                    }
                    mbarrier_arrive_if(empty, arrives);
                }
            }
            if flaw == Flaw::WarpLeaves && warp == 3 && chunk == 2 {
                return;
            }
            stage = (stage + 1) % STAGES;
            parity ^= u32::from(stage == 0);
        }
        store::<T, R>(&maps[2], &d, result + 2048 * warp, FIRST[0] + 64 * tile + 16 * warp as i32, flaw);
    }
    if flaw != Flaw::NoFinalWait {
        cp_async_bulk_wait_group::<0>();
    }
}

/// Stores the 16 rows of a warp.
fn store<T: Operand, const R: usize>(map: &TensorMap, d: &[f32; R], to: u32, row: i32, flaw: Flaw) {
    let lane = thread_idx_x() % 32;
    let elected = lane == 0;
    if flaw != Flaw::NoReadWait {
        cp_async_bulk_wait_group_read::<0>();
    }
    if flaw != Flaw::NoWarpBarrierAfterReadWait {
        syncwarp();
    }
    if flaw == Flaw::ProxyFenceBeforeStore {
        fence_proxy_async();
    }
    for (i, pair) in d.chunks_exact(8).enumerate() {
        let (panel, i) = (i as u32 / 4, i as u32 % 4);
        let value = core::array::from_fn(|j| T::pack(pair[2 * j], pair[2 * j + 1]));
        // SAFETY: the simulator checks.
        unsafe { stmatrix_x4(unit(to + 8192 * panel, lane % 16, 2 * i + lane / 16), value) };
    }
    match flaw {
        Flaw::NoProxyFence | Flaw::ProxyFenceBeforeStore => {}
        Flaw::ProxyFenceByOneLane if !elected => {}
        _ => fence_proxy_async(),
    }
    if flaw != Flaw::NoWarpBarrier {
        syncwarp();
    }
    for panel in 0..R as u32 / 32 {
        let at = [FIRST[2] + 64 * panel as i32, row, 0, 0];
        // SAFETY: the simulator checks.
        unsafe {
            cp_async_bulk_tensor_store_if(map, at, to + 8192 * panel, createpolicy_evict_first(), elected);
        }
    }
    cp_async_bulk_commit_group();
}

fn kernel<T: Operand, const R: usize, const TRANS_B: u32>(maps: &Maps, flaw: Flaw) {
    let thread = thread_idx_x();
    let Layout { full, empty, .. } = Layout::new(2 * R as u32);
    for stage in 0..STAGES {
        // SAFETY: the simulator checks.
        unsafe {
            mbarrier_init_if(full + 8 * stage, 1, thread == 0);
            mbarrier_init_if(empty + 8 * stage, 4, thread == 0);
        }
    }
    if flaw != Flaw::NoInitFence {
        fence_mbarrier_init();
    }
    if flaw != Flaw::NoBlockBarrier {
        syncthreads();
    }
    if flaw == Flaw::WriteToBarrier && thread == 7 {
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32(full + 4, 0) };
    }
    if thread < 128 {
        setmaxnreg_dec::<40>();
        if thread == 0 {
            producer::<TRANS_B>(maps, 2 * R as u32, flaw);
        }
    } else {
        setmaxnreg_inc::<232>();
        consumer::<T, R, TRANS_B>(maps, flaw);
    }
}

/// Small integers: every sum is exact, so the result is, too, but for its rounding.
fn a_value(m: usize, k: usize) -> f32 {
    ((7 * m + 3 * k + m * k) % 17) as f32 - 8.0
}

fn b_value(k: usize, n: usize) -> f32 {
    ((5 * k + 11 * n + k * n) % 13) as f32 - 6.0
}

/// Runs the kernel and checks its result.
pub(super) fn run<T: Operand, const R: usize, const TRANS_B: u32>(schedule: Schedule, flaw: Flaw) -> Result<(), Fault> {
    let columns = 2 * R - 8;
    let tensor = |rows: usize, columns: usize, value: &dyn Fn(usize, usize) -> f32| {
        Buffer::new((0..rows * columns).map(|i| T::new(value(i / columns, i % columns))).collect::<Vec<T>>())
    };
    let a = tensor(ROWS, DEPTH, &a_value);
    let b = match TRANS_B {
        0 => tensor(columns, DEPTH, &|n, k| b_value(k, n)),
        _ => tensor(DEPTH, columns, &b_value),
    };
    let mut c = Buffer::new(vec![T::new(f32::NAN); ROWS * columns]);
    let mut memory = GlobalMemory::new();
    let map = |address: u64, rows: usize, columns: usize, box_rows: u32| {
        let pitch = 2 * columns as u64;
        let strides = [pitch, pitch * rows as u64, pitch * rows as u64];
        encode_tensor_map(&TensorMapSource { address, dims: [columns as u32, rows as u32, 1, 1], strides, box_rows })
    };
    let map_b = match TRANS_B {
        0 => map(memory.input("b", &b), columns, DEPTH, 2 * R as u32),
        _ => map(memory.input("b", &b), DEPTH, columns, 64),
    };
    let c_address = memory.output("c", &mut c);
    let maps = [map(memory.input("a", &a), ROWS, DEPTH, 64), map_b, map(c_address, ROWS, columns, 16)];
    let shared_bytes = 16 * 1024 + 3 * 256 * R as u32 + 16 * STAGES + 1024;
    let base = Launch { name: "warp_specialised", grid: [1; 3], threads: 256, shared_bytes, schedule };
    launch(&base, &memory, &|| kernel::<T, R, TRANS_B>(&maps, flaw))?;
    assert_eq!(memory.unwritten_words(c_address), 0);
    for (i, &value) in c.iter().enumerate() {
        let (m, n) = (i / columns, i % columns);
        let expected: f32 = (0..DEPTH).map(|k| a_value(m, k) * b_value(k, n)).sum();
        assert_eq!(value, T::new(expected), "C[{m}, {n}], {schedule:?}");
    }
    Ok(())
}

fn check<T: Operand>() {
    for schedule in SCHEDULES {
        run::<T, 32, 0>(schedule, Flaw::None).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
        run::<T, 32, 1>(schedule, Flaw::None).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
        run::<T, 64, 0>(schedule, Flaw::None).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
        run::<T, 64, 1>(schedule, Flaw::None).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
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
