//! The device functions that Hopper adds.

use core::panic::Location;

use super::bulk::POLICIES;
use super::fault::{Meeting, Product};
use super::machine::{access, meet, wait_for_phase, with};
use super::matrix::LANES;
use crate::abi::TensorMap;

/// `setmaxnreg.dec`.
#[track_caller]
pub fn setmaxnreg_dec<const N: u32>() {
    const { assert!(N >= 24 && N <= 256 && N.is_multiple_of(8), "setmaxnreg takes multiples of 8 from 24 to 256") };
    meet(Meeting::Setmaxnreg(N), Location::caller(), |_, _| {});
}

/// `setmaxnreg.inc`.
#[track_caller]
pub fn setmaxnreg_inc<const N: u32>() {
    const { assert!(N >= 24 && N <= 256 && N.is_multiple_of(8), "setmaxnreg takes multiples of 8 from 24 to 256") };
    meet(Meeting::Setmaxnreg(N), Location::caller(), |_, _| {});
}

/// [`setmaxnreg_dec`] to `N` where `FIRST`, else to `M`.
#[track_caller]
pub fn setmaxnreg_dec_either<const FIRST: bool, const N: u32, const M: u32>() {
    if FIRST { setmaxnreg_dec::<N>() } else { setmaxnreg_dec::<M>() }
}

/// [`setmaxnreg_inc`] to `N` where `FIRST`, else to `M`.
#[track_caller]
pub fn setmaxnreg_inc_either<const FIRST: bool, const N: u32, const M: u32>() {
    if FIRST { setmaxnreg_inc::<N>() } else { setmaxnreg_inc::<M>() }
}

/// `stmatrix.sync.aligned.m8n8.x4.shared.b16`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn stmatrix_x4(addr: u32, value: [u32; 4]) {
    meet(Meeting::Stmatrix, Location::caller(), |exchange, lane| {
        exchange.addr[lane] = addr;
        exchange.loaded[lane] = value;
    });
}

/// `mbarrier.init`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn mbarrier_init_if(addr: u32, count: u32, condition: bool) {
    if !condition {
        return;
    }
    access(Location::caller(), |m| m.init_barrier(addr, count));
}

/// `fence.mbarrier_init.release.cluster`.
pub fn fence_mbarrier_init() {
    with(|m| {
        let time = m.clocks.fence(m.current);
        m.barriers.fences.push(m.current, time);
    });
}

/// `mbarrier.arrive`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn mbarrier_arrive_if(addr: u32, condition: bool) {
    if !condition {
        return;
    }
    access(Location::caller(), |m| m.arrive(addr, 0));
}

/// `mbarrier.arrive.expect_tx`.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn mbarrier_arrive_expect_tx_if(addr: u32, bytes: u32, condition: bool) {
    if !condition {
        return;
    }
    access(Location::caller(), |m| m.arrive(addr, bytes));
}

/// `mbarrier.try_wait.parity`, until the phase of that parity is complete.
///
/// # Safety
/// That of the PTX twin; the simulator checks it, but for a barrier that is two phases ahead.
#[track_caller]
pub unsafe fn mbarrier_wait_parity(addr: u32, parity: u32) {
    wait_for_phase(addr, parity, Location::caller());
}

/// `fence.proxy.async.shared::cta`.
pub fn fence_proxy_async() {
    with(|m| {
        let time = m.clocks.fence(m.current);
        m.shared.fences.push(m.current, time);
    });
}

/// `cp.async.bulk.tensor.4d` to shared memory. The bytes arrive when nobody can run without them.
///
/// # Safety
/// `map` may be read; the rest of the PTX twin's contract is checked.
#[track_caller]
pub unsafe fn cp_async_bulk_tensor_load_if(
    dst: u32,
    map: *const TensorMap,
    at: [i32; 4],
    mbarrier: u32,
    policy: u64,
    condition: bool,
) {
    if !condition {
        return;
    }
    let line = Location::caller();
    // SAFETY: the caller's contract.
    access(line, |m| unsafe { m.issue_load(dst, (map, at, policy), mbarrier, line) });
}

/// `cp.async.bulk.tensor.4d` from shared memory.
///
/// # Safety
/// `map` may be read; the rest of the PTX twin's contract is checked.
#[track_caller]
pub unsafe fn cp_async_bulk_tensor_store_if(
    map: *const TensorMap,
    at: [i32; 4],
    src: u32,
    policy: u64,
    condition: bool,
) {
    if !condition {
        return;
    }
    let line = Location::caller();
    // SAFETY: the caller's contract.
    access(line, |m| unsafe { m.issue_store((map, at, policy), src, line) });
}

/// `cp.async.bulk.tensor.4d` from shared memory, by the warp's first lane.
///
/// # Safety
/// `map` may be read; the rest of the PTX twin's contract is checked, but for other values in other lanes.
#[track_caller]
pub unsafe fn cp_async_bulk_tensor_store_elect(map: *const TensorMap, at: [i32; 4], src: u32, policy: u64) {
    let line = Location::caller();
    meet(Meeting::Elect, line, |_, _| {});
    access(line, |m| {
        if m.current.is_multiple_of(LANES) {
            // SAFETY: the caller's contract.
            unsafe { m.issue_store((map, at, policy), src, line) }
        } else {
            Ok(())
        }
    });
}

/// `cp.async.bulk.commit_group`.
pub fn cp_async_bulk_commit_group() {
    with(|m| m.commit_stores());
}

/// `cp.async.bulk.wait_group N`: only now does what it waits for get written.
#[track_caller]
pub fn cp_async_bulk_wait_group<const N: u32>() {
    access(Location::caller(), |m| m.write_stores(m.current, N));
}

/// `cp.async.bulk.wait_group.read N`: only now does what it waits for get read.
pub fn cp_async_bulk_wait_group_read<const N: u32>() {
    with(|m| m.read_stores(m.current, N));
}

/// `createpolicy.fractional.L2::evict_first`.
pub fn createpolicy_evict_first() -> u64 {
    POLICIES[0]
}

/// `createpolicy.fractional.L2::evict_normal`.
pub fn createpolicy_evict_normal() -> u64 {
    POLICIES[1]
}

/// `wgmma.fence`.
#[track_caller]
pub fn wgmma_fence() {
    meet(Meeting::WgmmaFence, Location::caller(), |_, _| {});
}

/// `wgmma.commit_group`.
#[track_caller]
pub fn wgmma_commit_group() {
    meet(Meeting::WgmmaCommitGroup, Location::caller(), |_, _| {});
}

/// `wgmma.wait_group N`: `d` gets its value if its last product is among what is waited for.
#[track_caller]
pub fn wgmma_wait_group<const N: u32, const R: usize>(d: &mut [f32; R]) {
    const { assert!(R == 32 || R == 64, "an accumulator of one warpgroup is 64 by 64 or 64 by 128") };
    let at = Location::caller();
    meet(Meeting::WgmmaWaitGroup(N), at, |_, _| {});
    access(at, |m| m.collect(d));
}

macro_rules! products {
    ($($name:ident $columns:literal $registers:literal $bf16:literal;)*) => { $(
        /// `wgmma.mma_async` of 64 rows, A in registers: D (+)= A B. `d` is NaN until [`wgmma_wait_group`].
        ///
        /// # Safety
        /// That of the PTX twin; the simulator checks it, but for registers of `a` that are overwritten.
        #[track_caller]
        pub unsafe fn $name<const TRANS_B: u32>(
            d: &mut [f32; $registers],
            a: [u32; 4],
            descriptor: u64,
            accumulate: bool,
        ) {
            const { assert!(TRANS_B < 2, "B is transposed (1) or not (0)") };
            let product = Product { columns: $columns, transposed: TRANS_B == 1, bf16: $bf16 };
            multiply(product, Location::caller(), d, a, descriptor, accumulate);
        }
    )* };
}
products! {
    wgmma_m64n64k16_bf16 64 32 true;
    wgmma_m64n64k16_f16 64 32 false;
    wgmma_m64n128k16_bf16 128 64 true;
    wgmma_m64n128k16_f16 128 64 false;
}

fn multiply(
    product: Product,
    at: &'static Location<'static>,
    d: &mut [f32],
    a: [u32; 4],
    descriptor: u64,
    accumulate: bool,
) {
    access(at, |m| m.hand_in(d, a, descriptor, accumulate));
    meet(Meeting::Wgmma(product), at, |_, _| {});
    d.fill(with(|m| m.poison()));
}

/// Nothing: registers keep their values here.
///
/// # Safety
/// That of the PTX twin; the simulator checks it.
#[track_caller]
pub unsafe fn keep_alive(_a: &[u32; 16], scratch: u32) {
    access(Location::caller(), |m| m.shared.check_address(scratch));
}
