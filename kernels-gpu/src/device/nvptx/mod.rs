//! The PTX twin. Every function is one instruction; section numbers are those of the PTX ISA manual, version 8.0.

use core::arch::{asm, global_asm, nvptx};

mod sm90;
pub use sm90::*;

global_asm!(".extern .shared .align 1024 .b8 dynamic_smem[];");

/// `%tid.x` (10.1).
#[inline(always)]
pub fn thread_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_thread_idx_x() as u32 }
}

/// `%ctaid.x` (10.6).
#[inline(always)]
pub fn block_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_idx_x() as u32 }
}

/// `%ctaid.y` (10.6).
#[inline(always)]
pub fn block_idx_y() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_idx_y() as u32 }
}

/// `%ctaid.z` (10.6).
#[inline(always)]
pub fn block_idx_z() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_idx_z() as u32 }
}

/// `bar.sync 0` (9.7.12.1).
#[inline(always)]
pub fn syncthreads() {
    // SAFETY: the kernels reach it from uniform control flow, which the simulator checks.
    unsafe { asm!("bar.sync 0;", options(nostack)) }
}

/// `bar.warp.sync` of all lanes (9.7.12.2).
#[inline(always)]
pub fn syncwarp() {
    // SAFETY: as `syncthreads`, per warp.
    unsafe { asm!("bar.warp.sync 0xffffffff;", options(nostack)) }
}

/// Shared-window address of the dynamic shared memory.
#[inline(always)]
pub fn dynamic_smem() -> u32 {
    let addr: u32;
    // SAFETY: takes the address of a symbol declared above.
    unsafe {
        asm!(
            "{{ .reg .u64 t; mov.u64 t, dynamic_smem; cvt.u32.u64 {0}, t; }}",
            out(reg32) addr,
            options(pure, nomem, nostack)
        );
    }
    addr
}

/// `ex2.approx.ftz.f32` (9.7.3.20): 2^x.
#[inline(always)]
pub fn ex2_approx_ftz(x: f32) -> f32 {
    let y: f32;
    // SAFETY: arithmetic only.
    unsafe {
        asm!("ex2.approx.ftz.f32 {0}, {1};", out(reg32) y, in(reg32) x, options(pure, nomem, nostack));
    }
    y
}

/// No instruction: the compiler takes the result for a new value. What is computed from it in a loop stays in the loop,
/// which costs a multiplication where hoisting would cost a register.
#[inline(always)]
pub fn opaque(mut x: f32) -> f32 {
    // SAFETY: emits a comment.
    unsafe { asm!("// {0}", inout(reg32) x, options(nomem, nostack)) }
    x
}

/// `cvt.rn.bf16x2.f32` (9.7.9.21).
#[inline(always)]
pub fn cvt_rn_bf16x2_f32(lo: f32, hi: f32) -> u32 {
    let d: u32;
    // SAFETY: arithmetic only.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {0}, {1}, {2};", out(reg32) d, in(reg32) hi, in(reg32) lo, options(pure, nomem, nostack));
    }
    d
}

/// `cvt.rn.f16x2.f32` (9.7.9.21).
#[inline(always)]
pub fn cvt_rn_f16x2_f32(lo: f32, hi: f32) -> u32 {
    let d: u32;
    // SAFETY: arithmetic only.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {0}, {1}, {2};", out(reg32) d, in(reg32) hi, in(reg32) lo, options(pure, nomem, nostack));
    }
    d
}

/// `cvt.f32.f16` of both halves (9.7.9.21).
#[inline(always)]
pub fn cvt_f32_f16x2(x: u32) -> [f32; 2] {
    let (lo, hi): (f32, f32);
    // SAFETY: arithmetic only.
    unsafe {
        asm!(
            "{{ .reg .b16 l, h; mov.b32 {{l, h}}, {2}; cvt.f32.f16 {0}, l; cvt.f32.f16 {1}, h; }}",
            out(reg32) lo, out(reg32) hi, in(reg32) x,
            options(pure, nomem, nostack)
        );
    }
    [lo, hi]
}

/// `ld.shared.v4.b32` (9.7.8.8).
///
/// # Safety
/// `addr` is a 16-byte aligned address of 16 initialised bytes of this block's shared memory.
#[inline(always)]
pub unsafe fn ld_shared_b32x4(addr: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "ld.shared.v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) addr,
            options(nostack)
        );
    }
    [a, b, c, d]
}

/// `ld.shared.f32` (9.7.8.8). Stays where it is: it is not hoisted out of a loop.
///
/// # Safety
/// `addr` is a 4-byte aligned address of initialised shared memory of this block.
#[inline(always)]
pub unsafe fn ld_shared_f32(addr: u32) -> f32 {
    let value: f32;
    // SAFETY: the caller's contract.
    unsafe { asm!("ld.shared.f32 {0}, [{1}];", out(reg32) value, in(reg32) addr, options(nostack, readonly)) }
    value
}

/// `st.shared.b32` (9.7.8.11).
///
/// # Safety
/// `addr` is a 4-byte aligned address in this block's shared memory.
#[inline(always)]
pub unsafe fn st_shared_b32(addr: u32, value: u32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("st.shared.b32 [{0}], {1};", in(reg32) addr, in(reg32) value, options(nostack)) }
}

/// `st.shared.v4.b32` (9.7.8.11).
///
/// # Safety
/// `addr` is a 16-byte aligned address of 16 bytes of this block's shared memory.
#[inline(always)]
pub unsafe fn st_shared_b32x4(addr: u32, value: [u32; 4]) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "st.shared.v4.b32 [{4}], {{{0}, {1}, {2}, {3}}};",
            in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], in(reg32) addr,
            options(nostack)
        );
    }
}

/// `ld.global.f32` (9.7.8.8).
///
/// # Safety
/// `ptr` is valid for reads.
#[inline(always)]
pub unsafe fn ld_global_f32(ptr: *const f32) -> f32 {
    let x: f32;
    // SAFETY: the caller's contract.
    unsafe { asm!("ld.global.f32 {0}, [{1}];", out(reg32) x, in(reg64) ptr, options(nostack, readonly)) }
    x
}

/// `ld.global.v4.f32` (9.7.8.8).
///
/// # Safety
/// `ptr` is 16-byte aligned and valid for reads of 16 bytes.
#[inline(always)]
pub unsafe fn ld_global_f32x4(ptr: *const f32) -> [f32; 4] {
    let (a, b, c, d): (f32, f32, f32, f32);
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "ld.global.v4.f32 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) ptr,
            options(nostack, readonly)
        );
    }
    [a, b, c, d]
}

/// `st.global.f32` (9.7.8.11).
///
/// # Safety
/// `ptr` is valid for writes.
#[inline(always)]
pub unsafe fn st_global_f32(ptr: *mut f32, value: f32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("st.global.f32 [{0}], {1};", in(reg64) ptr, in(reg32) value, options(nostack)) }
}

/// `st.global.v4.f32` (9.7.8.11).
///
/// # Safety
/// `ptr` is 16-byte aligned and valid for writes of 16 bytes.
#[inline(always)]
pub unsafe fn st_global_f32x4(ptr: *mut f32, value: [f32; 4]) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "st.global.v4.f32 [{4}], {{{0}, {1}, {2}, {3}}};",
            in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], in(reg64) ptr,
            options(nostack)
        );
    }
}

/// `st.global.v4.b32` (9.7.8.11).
///
/// # Safety
/// `ptr` is 16-byte aligned and valid for writes of 16 bytes.
#[inline(always)]
pub unsafe fn st_global_b32x4(ptr: *mut u8, value: [u32; 4]) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "st.global.v4.b32 [{4}], {{{0}, {1}, {2}, {3}}};",
            in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], in(reg64) ptr,
            options(nostack)
        );
    }
}

/// `cp.async.cg.shared.global.L2::128B`, 16 bytes with zero fill (9.7.8.22.3).
///
/// # Safety
/// `dst` is a 16-byte aligned address of 16 bytes of this block's shared memory; `src` is 16-byte aligned and valid for
/// reads of `src_bytes` (0 or 16) bytes. The bytes at `dst` are read only after the copy's group was waited for.
#[inline(always)]
pub unsafe fn cp_async_cg_16(dst: u32, src: *const u8, src_bytes: u32) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "cp.async.cg.shared.global.L2::128B [{0}], [{1}], 16, {2};",
            in(reg32) dst, in(reg64) src, in(reg32) src_bytes,
            options(nostack)
        );
    }
}

/// `cp.async.commit_group` (9.7.8.22.4).
#[inline(always)]
pub fn cp_async_commit_group() {
    // SAFETY: groups this thread's own copies.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) }
}

/// `cp.async.wait_group N` (9.7.8.22.5): waits until at most the `N` most recent groups pend.
#[inline(always)]
pub fn cp_async_wait_group<const N: usize>() {
    // SAFETY: waits for this thread's own copies.
    unsafe { asm!("cp.async.wait_group {0};", const N, options(nostack)) }
}

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16` (9.7.13.4.15).
///
/// # Safety
/// All 32 lanes call it together; `addr` is a 16-byte aligned row address in this block's shared memory.
#[inline(always)]
pub unsafe fn ldmatrix_x4(addr: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) addr,
            options(nostack)
        );
    }
    [a, b, c, d]
}

/// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16` (9.7.13.4.15).
///
/// # Safety
/// As [`ldmatrix_x4`].
#[inline(always)]
pub unsafe fn ldmatrix_x4_trans(addr: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) addr,
            options(nostack)
        );
    }
    [a, b, c, d]
}

macro_rules! mma {
    ($name:ident, $ty:literal) => {
        /// `mma.sync.aligned.m16n8k16.row.col.f32` of two 16-bit operands (9.7.13.4.14): D += A B. All 32 lanes call it together.
        #[inline(always)]
        pub fn $name(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
            // SAFETY: arithmetic on registers; the simulator checks that the warp is whole.
            unsafe {
                asm!(
                    concat!(
                        "mma.sync.aligned.m16n8k16.row.col.f32.", $ty, ".", $ty, ".f32 ",
                        "{{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"
                    ),
                    inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                    in(reg32) b[0], in(reg32) b[1],
                    options(pure, nomem, nostack)
                );
            }
        }
    };
}
mma!(mma_m16n8k16_bf16, "bf16");
mma!(mma_m16n8k16_f16, "f16");
