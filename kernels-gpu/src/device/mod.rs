//! The instructions the kernels use: one function each, named after the PTX instruction.
//!
//! Two implementations stand behind the same names: `nvptx` emits the instruction, [`sim`] does its work on the
//! CPU and checks it. The list below is explicit, so a function that lacks its twin does not compile.
//!
//! Shared memory is addressed by `u32` byte addresses in the shared window, as in PTX; global memory by pointers.
//! Functions marked *warp* must be reached by all 32 lanes of a warp together.

#[cfg(target_arch = "nvptx64")]
mod nvptx;
#[cfg(target_arch = "nvptx64")]
use nvptx as imp;

#[cfg(not(target_arch = "nvptx64"))]
pub mod sim;
#[cfg(not(target_arch = "nvptx64"))]
use sim as imp;

#[rustfmt::skip] // would sort the list and leave its comments behind
pub use imp::{
    // thread: fn() -> u32
    block_idx_x, block_idx_y, block_idx_z, thread_idx_x,
    // barrier: fn(); `syncthreads` = bar.sync 0 over the block, `syncwarp` = bar.warp.sync (warp)
    syncthreads, syncwarp,
    // fn() -> u32: address of the dynamic shared memory, 1024-byte aligned
    dynamic_smem,
    // arithmetic: fn(f32) -> f32 = ex2.approx.ftz.f32
    ex2_approx_ftz,
    // fn(f32) -> f32: the same value, of which the compiler knows nothing; keeps what follows inside a loop
    opaque,
    // conversion: fn(lo: f32, hi: f32) -> u32, round to nearest even; fn(u32) -> [f32; 2] (lo, hi)
    cvt_f32_f16x2, cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32,
    // shared memory: unsafe fn(addr: u32) -> …, unsafe fn(addr: u32, value)
    ld_shared_b32x4, ld_shared_f32, st_shared_b32, st_shared_b32x4,
    // global memory: unsafe fn(*const f32) -> …, unsafe fn(*mut …, value); x4 forms are 16-byte aligned
    ld_global_f32, ld_global_f32x4, st_global_b32x4, st_global_f32, st_global_f32x4,
    // asynchronous copy: unsafe fn(dst: u32, src: *const u8, src_bytes: u32): 16 bytes to shared memory, of which the
    // first `src_bytes` (0 or 16) come from `src` and the rest are zero; fn(); fn::<N>(): wait until at most N groups pend
    cp_async_cg_16, cp_async_commit_group, cp_async_wait_group,
    // matrix (warp): unsafe fn(addr: u32) -> [u32; 4]; fn(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]): D += A B
    ldmatrix_x4, ldmatrix_x4_trans, mma_m16n8k16_bf16, mma_m16n8k16_f16,
    // sm_90 from here on. Functions that end in `_if` do nothing where their last argument is false.
    // registers (warpgroup): fn::<N>(); fn::<FIRST, N, M>(): as with `N` or `M`, in one basic block
    setmaxnreg_dec, setmaxnreg_inc, setmaxnreg_dec_either, setmaxnreg_inc_either,
    // matrix (warp): unsafe fn(addr: u32, [u32; 4]), one row address a lane as in `ldmatrix`
    stmatrix_x4,
    // mbarrier: unsafe fn(addr, count, if); fn(); unsafe fn(addr, if); unsafe fn(addr, bytes, if); unsafe fn(addr, parity)
    mbarrier_init_if, fence_mbarrier_init, mbarrier_arrive_if, mbarrier_arrive_expect_tx_if, mbarrier_wait_parity,
    // generic writes to shared memory → asynchronous reads of it: fn()
    fence_proxy_async,
    // tensor memory access: unsafe fn(dst, map, [col, row, head, batch], mbarrier, policy, if); unsafe fn(map, coords, src,
    // policy, if); fn(); fn::<N>(); fn::<N>(); fn() -> u64
    cp_async_bulk_tensor_load_if, cp_async_bulk_tensor_store_if, cp_async_bulk_commit_group,
    // unsafe fn(map, coords, src, policy) (warp): by one lane
    cp_async_bulk_tensor_store_elect,
    cp_async_bulk_wait_group, cp_async_bulk_wait_group_read, createpolicy_evict_first, createpolicy_evict_normal,
    // asynchronous products (warpgroup), B in shared memory behind a descriptor, A in registers: unsafe
    // fn::<TRANS_B>(d, a, descriptor, accumulate); `TRANS_B` = 1 for B stored [k, n]
    wgmma_m64n64k16_bf16, wgmma_m64n64k16_f16, wgmma_m64n128k16_bf16, wgmma_m64n128k16_f16,
    // fn(); fn(); fn::<N, R>(&mut [f32; R]): `R` = 32 or 64 accumulator registers that the wait makes readable
    wgmma_fence, wgmma_commit_group, wgmma_wait_group,
    // after the wait: unsafe fn(&[u32; 16], scratch: u32), a use of registers that products read
    keep_alive,
};
