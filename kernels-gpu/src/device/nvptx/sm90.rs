//! What Hopper adds (`sm_90a`).
//!
//! Conditions are predicates inside the instruction, never a Rust `if`: the compiler may duplicate what follows a branch,
//! and the warpgroup-wide instructions must not be duplicated.

use core::arch::asm;

use crate::abi::TensorMap;

/// `setmaxnreg.dec` (9.7.19.5): this warpgroup gives registers back, down to `N` a thread.
#[inline(always)]
pub fn setmaxnreg_dec<const N: u32>() {
    // SAFETY: the kernels call it once for each warpgroup, before they use registers.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {0};", const N, options(nostack)) }
}

/// `setmaxnreg.inc` (9.7.19.5): this warpgroup takes registers, up to `N` a thread; waits until there are any.
#[inline(always)]
pub fn setmaxnreg_inc<const N: u32>() {
    // SAFETY: as above.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {0};", const N, options(nostack)) }
}

/// [`setmaxnreg_dec`] to `N` where `FIRST`, else to `M`.
#[inline(always)]
pub fn setmaxnreg_dec_either<const FIRST: bool, const N: u32, const M: u32>() {
    // SAFETY: as above.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {0};", const if FIRST { N } else { M }, options(nostack)) }
}

/// [`setmaxnreg_inc`] to `N` where `FIRST`, else to `M`.
#[inline(always)]
pub fn setmaxnreg_inc_either<const FIRST: bool, const N: u32, const M: u32>() {
    // SAFETY: as above.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {0};", const if FIRST { N } else { M }, options(nostack)) }
}

/// `stmatrix.sync.aligned.m8n8.x4.shared.b16` (9.7.13.4.16).
///
/// # Safety
/// All 32 lanes call it together; `addr` is a 16-byte aligned row address in this block's shared memory.
#[inline(always)]
pub unsafe fn stmatrix_x4(addr: u32, value: [u32; 4]) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{4}], {{{0}, {1}, {2}, {3}}};",
            in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], in(reg32) addr,
            options(nostack)
        );
    }
}

/// `mbarrier.init` (9.7.12.15.9): a barrier for `count` arrivals a phase.
///
/// # Safety
/// `addr` is an 8-byte aligned address in this block's shared memory that nothing else uses.
#[inline(always)]
pub unsafe fn mbarrier_init_if(addr: u32, count: u32, condition: bool) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {2}, 0; @p mbarrier.init.shared::cta.b64 [{0}], {1}; }}",
            in(reg32) addr, in(reg32) count, in(reg32) condition as u32,
            options(nostack)
        );
    }
}

/// `fence.mbarrier_init.release.cluster` (9.7.12.4): makes initialised barriers visible to the asynchronous proxy.
#[inline(always)]
pub fn fence_mbarrier_init() {
    // SAFETY: a fence.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) }
}

/// `mbarrier.arrive` (9.7.12.15.13): one arrival; releases this thread's writes.
///
/// # Safety
/// `addr` is an initialised barrier.
#[inline(always)]
pub unsafe fn mbarrier_arrive_if(addr: u32, condition: bool) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {1}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{0}]; }}",
            in(reg32) addr, in(reg32) condition as u32,
            options(nostack)
        );
    }
}

/// `mbarrier.arrive.expect_tx` (9.7.12.15.13): one arrival, and `bytes` more that asynchronous copies will bring.
///
/// # Safety
/// `addr` is an initialised barrier.
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect_tx_if(addr: u32, bytes: u32, condition: bool) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {2}, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{0}], {1}; }}",
            in(reg32) addr, in(reg32) bytes, in(reg32) condition as u32,
            options(nostack)
        );
    }
}

/// `mbarrier.try_wait.parity` (9.7.12.15.16), again until the phase of that parity is complete; acquires what its
/// arrivals released.
///
/// # Safety
/// `addr` is an initialised barrier, less than two phases behind.
#[inline(always)]
pub unsafe fn mbarrier_wait_parity(addr: u32, parity: u32) {
    loop {
        let done: u32;
        // SAFETY: the caller's contract.
        unsafe {
            asm!(
                "{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{1}], {2}; selp.u32 {0}, 1, 0, p; }}",
                out(reg32) done, in(reg32) addr, in(reg32) parity,
                options(nostack)
            );
        }
        if done != 0 {
            break;
        }
    }
}

/// `fence.proxy.async.shared::cta` (9.7.12.4): this thread's writes to shared memory, before what the tensor cores and the
/// copy engine read there after a barrier.
#[inline(always)]
pub fn fence_proxy_async() {
    // SAFETY: a fence.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
}

/// `cp.async.bulk.tensor.4d` to shared memory (9.7.8.24.9): the box of `map` at `[column, row, head, batch]`; what lies
/// outside the tensor is zero. Completes on `mbarrier` with the bytes of the whole box.
///
/// # Safety
/// `map` is a tensor map in parameter or global memory; `dst` is a 1024-byte aligned address of shared memory that holds the
/// box and that nobody uses until the barrier's phase completes.
#[inline(always)]
pub unsafe fn cp_async_bulk_tensor_load_if(
    dst: u32,
    map: *const TensorMap,
    at: [i32; 4],
    mbarrier: u32,
    policy: u64,
    condition: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {8}, 0; \
             @p cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint \
             [{0}], [{1}, {{{2}, {3}, {4}, {5}}}], [{6}], {7}; }}",
            in(reg32) dst, in(reg64) map, in(reg32) at[0], in(reg32) at[1], in(reg32) at[2], in(reg32) at[3],
            in(reg32) mbarrier, in(reg64) policy, in(reg32) condition as u32,
            options(nostack)
        );
    }
}

/// [`cp_async_bulk_tensor_store_if`] by one thread of the warp (`elect.sync`, 9.7.13.15): as the compiler knows that it is one, it takes
/// the operands as they are, where it would go through all lanes otherwise.
///
/// # Safety
/// As there; all lanes of the warp call it together, with the same values.
#[inline(always)]
pub unsafe fn cp_async_bulk_tensor_store_elect(map: *const TensorMap, at: [i32; 4], src: u32, policy: u64) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "{{ .reg .pred p; elect.sync _|p, 0xffffffff; \
             @p cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint \
             [{0}, {{{1}, {2}, {3}, {4}}}], [{5}], {6}; }}",
            in(reg64) map, in(reg32) at[0], in(reg32) at[1], in(reg32) at[2], in(reg32) at[3],
            in(reg32) src, in(reg64) policy,
            options(nostack)
        );
    }
}

/// `cp.async.bulk.tensor.4d` from shared memory (9.7.8.24.9); what lies past the tensor's end is not written.
///
/// # Safety
/// `map` as above; no coordinate is negative, which a load takes and a store does not (an illegal instruction on an H200); `src` holds the box, written before a [`fence_proxy_async`] and a barrier, and is not written again before
/// [`cp_async_bulk_wait_group_read`]. Nothing else writes that part of the tensor.
#[inline(always)]
pub unsafe fn cp_async_bulk_tensor_store_if(
    map: *const TensorMap,
    at: [i32; 4],
    src: u32,
    policy: u64,
    condition: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {7}, 0; \
             @p cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint \
             [{0}, {{{1}, {2}, {3}, {4}}}], [{5}], {6}; }}",
            in(reg64) map, in(reg32) at[0], in(reg32) at[1], in(reg32) at[2], in(reg32) at[3],
            in(reg32) src, in(reg64) policy, in(reg32) condition as u32,
            options(nostack)
        );
    }
}

/// `cp.async.bulk.commit_group` (9.7.8.24.12).
#[inline(always)]
pub fn cp_async_bulk_commit_group() {
    // SAFETY: groups this thread's own stores.
    unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) }
}

/// `cp.async.bulk.wait_group` (9.7.8.24.13): waits until all but the `N` most recent groups have been written.
#[inline(always)]
pub fn cp_async_bulk_wait_group<const N: u32>() {
    // SAFETY: waits for this thread's own stores.
    unsafe { asm!("cp.async.bulk.wait_group {0};", const N, options(nostack)) }
}

/// `cp.async.bulk.wait_group.read` (9.7.8.24.13): waits until all but the `N` most recent groups have been read from
/// shared memory.
#[inline(always)]
pub fn cp_async_bulk_wait_group_read<const N: u32>() {
    // SAFETY: waits for this thread's own stores.
    unsafe { asm!("cp.async.bulk.wait_group.read {0};", const N, options(nostack)) }
}

/// `createpolicy.fractional.L2::evict_first` (9.7.8.14): for what is touched once.
#[inline(always)]
pub fn createpolicy_evict_first() -> u64 {
    let policy: u64;
    // SAFETY: makes a number.
    unsafe {
        asm!("createpolicy.fractional.L2::evict_first.b64 {0}, 1.0;", out(reg64) policy, options(pure, nomem, nostack));
    }
    policy
}

/// `createpolicy.fractional.L2::evict_normal` (9.7.8.14).
#[inline(always)]
pub fn createpolicy_evict_normal() -> u64 {
    let policy: u64;
    // SAFETY: makes a number.
    unsafe {
        asm!("createpolicy.fractional.L2::evict_normal.b64 {0}, 1.0;", out(reg64) policy, options(pure, nomem, nostack));
    }
    policy
}

/// `wgmma.fence` (9.7.15.7.1): registers written before, before the products that read them.
#[inline(always)]
pub fn wgmma_fence() {
    // SAFETY: a fence; all threads of the warpgroup reach it.
    unsafe { asm!("wgmma.fence.sync.aligned;", options(nostack)) }
}

/// `wgmma.commit_group` (9.7.15.7.2).
#[inline(always)]
pub fn wgmma_commit_group() {
    // SAFETY: groups this warpgroup's products.
    unsafe { asm!("wgmma.commit_group.sync.aligned;", options(nostack)) }
}

macro_rules! wgmma_n64 {
    ($name:ident, $ty:literal) => {
        /// `wgmma.mma_async.sync.aligned.m64n64k16.f32` (9.7.15.5.2): D (+)= A B, A in registers.
        ///
        /// # Safety
        /// All 128 threads of the warpgroup call it together. `descriptor` describes initialised shared memory that is visible to
        /// the asynchronous proxy. `a` keeps its value and `d` is not touched until the group was waited for.
        #[inline(always)]
        pub unsafe fn $name<const TRANS_B: u32>(
            d: &mut [f32; 32],
            a: [u32; 4],
            descriptor: u64,
            accumulate: bool,
        ) {
            // SAFETY: the caller's contract.
            unsafe {
                asm!(
                    concat!(
                        "{{ .reg .pred p; setp.ne.u32 p, {37}, 0; \
                     wgmma.mma_async.sync.aligned.m64n64k16.f32.", $ty, ".", $ty, " \
                        {{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, \
                     {16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}}}, \
                     {{{32}, {33}, {34}, {35}}}, {36}, p, 1, 1, {38}; }}"
                    ),
                    inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                    inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
                    inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
                    inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
                    inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
                    inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
                    inout(reg32) d[24], inout(reg32) d[25], inout(reg32) d[26], inout(reg32) d[27],
                    inout(reg32) d[28], inout(reg32) d[29], inout(reg32) d[30], inout(reg32) d[31],
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                    in(reg64) descriptor, in(reg32) accumulate as u32, const TRANS_B,
                    options(nostack)
                );
            }
        }
    };
}
wgmma_n64!(wgmma_m64n64k16_bf16, "bf16");
wgmma_n64!(wgmma_m64n64k16_f16, "f16");

macro_rules! wgmma_n128 {
    ($name:ident, $ty:literal) => {
        /// `wgmma.mma_async.sync.aligned.m64n128k16.f32` (9.7.15.5.2): D (+)= A B, A in registers.
        ///
        /// # Safety
        /// All 128 threads of the warpgroup call it together. `descriptor` describes initialised shared memory that is visible to
        /// the asynchronous proxy. `a` keeps its value and `d` is not touched until the group was waited for.
        #[inline(always)]
        pub unsafe fn $name<const TRANS_B: u32>(
            d: &mut [f32; 64],
            a: [u32; 4],
            descriptor: u64,
            accumulate: bool,
        ) {
            // SAFETY: the caller's contract.
            unsafe {
                asm!(
                    concat!(
                        "{{ .reg .pred p; setp.ne.u32 p, {69}, 0; \
                     wgmma.mma_async.sync.aligned.m64n128k16.f32.", $ty, ".", $ty, " \
                        {{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, \
                     {16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}, \
                     {32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, {40}, {41}, {42}, {43}, {44}, {45}, {46}, {47}, \
                     {48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, {56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}}}, \
                     {{{64}, {65}, {66}, {67}}}, {68}, p, 1, 1, {70}; }}"
                    ),
                    inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                    inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
                    inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
                    inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
                    inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
                    inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
                    inout(reg32) d[24], inout(reg32) d[25], inout(reg32) d[26], inout(reg32) d[27],
                    inout(reg32) d[28], inout(reg32) d[29], inout(reg32) d[30], inout(reg32) d[31],
                    inout(reg32) d[32], inout(reg32) d[33], inout(reg32) d[34], inout(reg32) d[35],
                    inout(reg32) d[36], inout(reg32) d[37], inout(reg32) d[38], inout(reg32) d[39],
                    inout(reg32) d[40], inout(reg32) d[41], inout(reg32) d[42], inout(reg32) d[43],
                    inout(reg32) d[44], inout(reg32) d[45], inout(reg32) d[46], inout(reg32) d[47],
                    inout(reg32) d[48], inout(reg32) d[49], inout(reg32) d[50], inout(reg32) d[51],
                    inout(reg32) d[52], inout(reg32) d[53], inout(reg32) d[54], inout(reg32) d[55],
                    inout(reg32) d[56], inout(reg32) d[57], inout(reg32) d[58], inout(reg32) d[59],
                    inout(reg32) d[60], inout(reg32) d[61], inout(reg32) d[62], inout(reg32) d[63],
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                    in(reg64) descriptor, in(reg32) accumulate as u32, const TRANS_B,
                    options(nostack)
                );
            }
        }
    };
}
wgmma_n128!(wgmma_m64n128k16_bf16, "bf16");
wgmma_n128!(wgmma_m64n128k16_f16, "f16");

/// `wgmma.wait_group` (9.7.15.7.3): waits until all but the `N` most recent groups are done.
///
/// `d`, an accumulator of what is waited for, is an operand so that nothing reads it before.
#[inline(always)]
pub fn wgmma_wait_group<const N: u32, const R: usize>(d: &mut [f32; R]) {
    const { assert!(R == 32 || R == 64, "an accumulator of one warpgroup is 64 by 64 or 64 by 128") };
    // SAFETY: waits for this warpgroup's own products.
    unsafe { asm!("wgmma.wait_group.sync.aligned {0};", const N, options(nostack)) };
    let (quads, _) = d.as_chunks_mut::<32>();
    readable(&mut quads[0]);
    if R == 64 {
        readable(&mut quads[1]);
    }
}

/// No instruction: the registers get new values as far as the compiler knows.
#[inline(always)]
fn readable(d: &mut [f32; 32]) {
    // SAFETY: emits a comment.
    unsafe {
        asm!(
            "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15} {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
            inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
            inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
            inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
            inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
            inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
            inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
            inout(reg32) d[24], inout(reg32) d[25], inout(reg32) d[26], inout(reg32) d[27],
            inout(reg32) d[28], inout(reg32) d[29], inout(reg32) d[30], inout(reg32) d[31],
            options(nostack)
        );
    }
}

/// Uses registers that products read, after the wait: until then neither the compiler nor ptxas may give them to another
/// value, and neither knows. Stores to `scratch` in a case that does not occur.
///
/// # Safety
/// `scratch` is a 4-byte aligned address in this block's shared memory that nothing else uses.
#[inline(always)]
pub unsafe fn keep_alive(a: &[u32; 16], scratch: u32) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "{{ .reg .pred p; .reg .b32 t; xor.b32 t, {0}, {1}; xor.b32 t, t, {2}; xor.b32 t, t, {3}; xor.b32 t, t, {4}; xor.b32 t, t, {5}; xor.b32 t, t, {6}; xor.b32 t, t, {7}; xor.b32 t, t, {8}; xor.b32 t, t, {9}; xor.b32 t, t, {10}; xor.b32 t, t, {11}; xor.b32 t, t, {12}; xor.b32 t, t, {13}; xor.b32 t, t, {14}; xor.b32 t, t, {15}; \
             setp.eq.u32 p, t, 0x7fc1abcd; @p st.shared.u32 [{16}], t; }}",
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
            in(reg32) a[4], in(reg32) a[5], in(reg32) a[6], in(reg32) a[7],
            in(reg32) a[8], in(reg32) a[9], in(reg32) a[10], in(reg32) a[11],
            in(reg32) a[12], in(reg32) a[13], in(reg32) a[14], in(reg32) a[15],
            in(reg32) scratch,
            options(nostack)
        );
    }
}
