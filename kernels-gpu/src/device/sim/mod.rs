//! The CPU twin: a machine that runs kernels and believes nothing they do.
//!
//! [`launch()`] runs every thread of a block as a coroutine, deterministically, and checks each access. It
//! stops with a [`Fault`] that names kernel, block, thread and source line on
//!
//! - an access outside the registered buffers or the shared memory, a misaligned one, a store to an input;
//! - a read of shared memory, or of an output buffer, that nobody wrote;
//! - a read or overwrite of bytes a `cp.async` is on its way to, or whose wait no barrier orders before the access;
//! - two threads of a block at the same bytes (shared or global), one writing, with no barrier in between;
//! - two blocks of a launch at the same bytes of global memory, one writing;
//! - a barrier or a warp-wide instruction that not all its threads reach, or reach at different places;
//! - nobody being able to run, with who waits for what;
//!
//! and of what Hopper adds, on
//!
//! - a use of a tensor copy's destination with no wait for the phase of its mbarrier before, by this thread or by one that
//!   told it so; a tensor copy into what somebody may still read;
//! - a read by `wgmma` or the copy engine of what an ordinary store wrote, without `fence_proxy_async` by the thread
//!   that wrote, in between;
//! - a write to what `wgmma` or the copy engine may still be reading: they are until `wgmma_wait_group`, or
//!   `cp_async_bulk_wait_group_read`, and what tells of it;
//! - an mbarrier that was not initialised, not with `fence_mbarrier_init`, or not before; that gets more arrivals or
//!   bytes than it counts; a store to one;
//! - an accumulator that is computed with before its wait (without one it is NaN), a product without `wgmma_fence` since
//!   the last commit or wait, a descriptor that leads astray or is not of 128-byte swizzle;
//! - a block that exits with copies or products in flight.
//!
//! Order between threads comes from `syncthreads`, `syncwarp` and mbarriers alone. `ldmatrix`, `stmatrix`, `mma` and `wgmma`
//! make threads meet but order no memory, as in PTX; every row that `ldmatrix` reads must be ordered before all lanes,
//! and the read counts as one by the lane that gave its address. So where one lane arrives at an mbarrier for its warp,
//! `syncwarp` comes before.
//!
//! Being found out does not take an unlucky interleaving: order is computed from vector clocks, so that a race shows on
//! every [`Schedule`]. What is asynchronous happens as late as it may: a tensor copy lands when nobody can run without
//! it.
//!
//! What it does not see: how long anything takes, bank conflicts, and the GPU's own order of summation within a product
//! (here every product is added in f32, in the order of `k`); registers of A that are overwritten while a `wgmma` may read
//! them; a wait for an mbarrier that is two phases ahead, but for what it lets pass.
//!
//! It is stricter than PTX in that `arrive_expect_tx` comes before the loads it is for, that the fence between proxies
//! is the writer's, and that every group of products has its `wgmma_fence`.

mod buffer;
mod bulk;
mod clocks;
mod fault;
mod global;
mod hopper;
mod launch;
mod machine;
mod matrix;
mod mbarrier;
mod numeric;
mod shadow;
mod shared;
mod stuck;
mod wgmma;

use core::panic::Location;

pub use buffer::{Buffer, Element};
pub use bulk::encode_tensor_map;
pub use fault::{Access, Action, BarrierProblem, Fault, FaultKind, Meeting, Product, Space, Standing};
pub use global::GlobalMemory;
pub use hopper::*;
pub use launch::{Launch, Schedule, launch};
use machine::{access, bytes, meet, take, with, words};

/// `%tid.x`.
#[inline(always)]
pub fn thread_idx_x() -> u32 {
    with(|m| m.current as u32)
}

/// `%ctaid.x`.
#[inline(always)]
pub fn block_idx_x() -> u32 {
    with(|m| m.block[0])
}

/// `%ctaid.y`.
#[inline(always)]
pub fn block_idx_y() -> u32 {
    with(|m| m.block[1])
}

/// `%ctaid.z`.
#[inline(always)]
pub fn block_idx_z() -> u32 {
    with(|m| m.block[2])
}

/// `bar.sync 0`.
#[track_caller]
pub fn syncthreads() {
    meet(Meeting::Syncthreads, Location::caller(), |_, _| {});
}

/// `bar.warp.sync` of all lanes.
#[track_caller]
pub fn syncwarp() {
    meet(Meeting::Syncwarp, Location::caller(), |_, _| {});
}

/// Shared-window address of the dynamic shared memory.
#[inline(always)]
pub fn dynamic_smem() -> u32 {
    launch::SHARED_BASE
}

/// `ex2.approx.ftz.f32`: 2^x, subnormal inputs and results flushed to zero. The GPU's is within 2 ulp of it.
#[inline(always)]
pub fn ex2_approx_ftz(x: f32) -> f32 {
    numeric::exp2_ftz(x)
}

/// The same value; the PTX twin keeps the compiler from hoisting what follows.
#[inline(always)]
pub fn opaque(x: f32) -> f32 {
    x
}

/// `cvt.rn.bf16x2.f32`.
#[inline(always)]
pub fn cvt_rn_bf16x2_f32(lo: f32, hi: f32) -> u32 {
    numeric::bf16x2(lo, hi)
}

/// `cvt.rn.f16x2.f32`.
#[inline(always)]
pub fn cvt_rn_f16x2_f32(lo: f32, hi: f32) -> u32 {
    numeric::f16x2(lo, hi)
}

/// `cvt.f32.f16` of both halves.
#[inline(always)]
pub fn cvt_f32_f16x2(x: u32) -> [f32; 2] {
    numeric::f32_of_f16x2(x)
}

/// `ld.shared.v4.b32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn ld_shared_b32x4(addr: u32) -> [u32; 4] {
    words(access(Location::caller(), |m| m.shared.load(Action::Load, addr, &m.clocks.view(m.current))))
}

/// `ld.shared.f32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn ld_shared_f32(addr: u32) -> f32 {
    f32::from_le_bytes(access(Location::caller(), |m| m.shared.load(Action::Load, addr, &m.clocks.view(m.current))))
}

/// `st.shared.b32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn st_shared_b32(addr: u32, value: u32) {
    access(Location::caller(), |m| m.shared.store(addr, value.to_le_bytes(), &m.clocks.view(m.current)));
}

/// `st.shared.v4.b32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn st_shared_b32x4(addr: u32, value: [u32; 4]) {
    access(Location::caller(), |m| m.shared.store(addr, bytes(value), &m.clocks.view(m.current)));
}

/// `ld.global.f32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn ld_global_f32(ptr: *const f32) -> f32 {
    f32::from_le_bytes(load_global(ptr as u64, Action::Load, Location::caller()))
}

/// `ld.global.v4.f32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn ld_global_f32x4(ptr: *const f32) -> [f32; 4] {
    words(load_global(ptr as u64, Action::Load, Location::caller())).map(f32::from_bits)
}

/// `st.global.f32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn st_global_f32(ptr: *mut f32, value: f32) {
    store_global(ptr as u64, value.to_le_bytes(), Location::caller());
}

/// `st.global.v4.f32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn st_global_f32x4(ptr: *mut f32, value: [f32; 4]) {
    store_global(ptr as u64, bytes(value.map(f32::to_bits)), Location::caller());
}

/// `st.global.v4.b32`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn st_global_b32x4(ptr: *mut u8, value: [u32; 4]) {
    store_global(ptr as u64, bytes(value), Location::caller());
}

fn load_global<const N: usize>(addr: u64, action: Action, at: &'static Location<'static>) -> [u8; N] {
    access(at, |m| m.global.borrow_mut().load(action, addr, &m.clocks.view(m.current)))
}

fn store_global<const N: usize>(addr: u64, data: [u8; N], at: &'static Location<'static>) {
    access(at, |m| m.global.borrow_mut().store(addr, data, &m.clocks.view(m.current)));
}

/// `cp.async.cg.shared.global`, 16 bytes with zero fill. The bytes arrive when their group is waited for, and not before.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn cp_async_cg_16(dst: u32, src: *const u8, src_bytes: u32) {
    assert!(src_bytes == 0 || src_bytes == 16, "cp_async_cg_16 copies 0 or 16 bytes, not {src_bytes}");
    access(Location::caller(), |m| {
        let view = m.clocks.view(m.current);
        m.shared.check_copy(dst)?;
        let data = match src_bytes {
            0 => [0; 16],
            _ => m.global.borrow_mut().load(Action::AsyncCopy, src as u64, &view)?,
        };
        m.shared.copy(dst, data, &view)
    });
}

/// `cp.async.commit_group`.
#[inline(always)]
pub fn cp_async_commit_group() {
    with(|m| m.shared.commit_group(m.current));
}

/// `cp.async.wait_group N`: waits until at most the `N` most recent groups pend.
#[inline(always)]
pub fn cp_async_wait_group<const N: usize>() {
    with(|m| m.shared.wait_group(N, &m.clocks.view(m.current)));
}

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn ldmatrix_x4(addr: u32) -> [u32; 4] {
    meet(Meeting::Ldmatrix, Location::caller(), |exchange, lane| exchange.addr[lane] = addr);
    take(|exchange, lane| exchange.loaded[lane])
}

/// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16`.
///
/// # Safety
/// As [`ldmatrix_x4`].
#[track_caller]
pub unsafe fn ldmatrix_x4_trans(addr: u32) -> [u32; 4] {
    meet(Meeting::LdmatrixTrans, Location::caller(), |exchange, lane| exchange.addr[lane] = addr);
    take(|exchange, lane| exchange.loaded[lane])
}

/// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`: D += A B.
#[track_caller]
pub fn mma_m16n8k16_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma(Meeting::MmaBf16, Location::caller(), d, a, b);
}

/// `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32`: D += A B.
#[track_caller]
pub fn mma_m16n8k16_f16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma(Meeting::MmaF16, Location::caller(), d, a, b);
}

#[inline(always)]
fn mma(meeting: Meeting, at: &'static Location<'static>, d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    meet(meeting, at, |exchange, lane| {
        exchange.a[lane] = a;
        exchange.b[lane] = b;
        exchange.d[lane] = *d;
    });
    *d = take(|exchange, lane| exchange.d[lane]);
}
