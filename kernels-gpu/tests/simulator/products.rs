//! `wgmma` by itself: one warpgroup, B written by ordinary stores.

use lightning_attention_kernels::device::sim::{Action, FaultKind, GlobalMemory, Launch, launch};
use lightning_attention_kernels::device::*;

use super::{Form, SCHEDULES, fault_of_twin, one_block};

fn block(name: &'static str) -> Launch {
    Launch { shared_bytes: 8192, ..one_block(name, 128) }
}

/// `B[k, n]`, 16 × 64, and its descriptor.
fn b_value(k: u32, n: u32) -> f32 {
    ((5 * k + 3 * n + k * n) % 13) as f32 - 6.0
}

fn a_value(m: u32, k: u32) -> f32 {
    ((3 * m + 7 * k + m * k) % 11) as f32 - 5.0
}

fn pair(lo: f32, hi: f32) -> u32 {
    cvt_rn_f16x2_f32(lo, hi)
}

/// Every thread writes 16 bytes of `scale` B; `[k, n]`.
fn write_b(scale: f32) -> u64 {
    let (k, unit) = (thread_idx_x() / 8, thread_idx_x() % 8);
    let value = core::array::from_fn(|i| {
        let n = 8 * unit + 2 * i as u32;
        pair(scale * b_value(k, n), scale * b_value(k, n + 1))
    });
    // SAFETY: the simulator checks.
    unsafe { st_shared_b32x4(dynamic_smem() + 128 * k + ((unit ^ (k & 7)) << 4), value) };
    u64::from(dynamic_smem() >> 4) | 64 << 32 | 1 << 62
}

/// This thread's part of A.
fn fragment() -> [u32; 4] {
    let (row, k) = (thread_idx_x() / 32 * 16 + thread_idx_x() % 32 / 4, thread_idx_x() % 4 * 2);
    let at = |row: u32, k: u32| pair(a_value(row, k), a_value(row, k + 1));
    [at(row, k), at(row + 8, k), at(row, k + 8), at(row + 8, k + 8)]
}

/// Element `i` of this thread's part of `A B`.
fn expected(i: u32) -> f32 {
    let row = thread_idx_x() / 32 * 16 + thread_idx_x() % 32 / 4 + i / 2 % 2 * 8;
    let column = i / 4 * 8 + thread_idx_x() % 4 * 2 + i % 2;
    (0..16).map(|k| a_value(row, k) * b_value(k, column)).sum()
}

#[track_caller]
fn assert_product(d: &[f32; 32], scale: f32, offset: f32) {
    for (i, &value) in (0..).zip(d) {
        assert_eq!(value, scale * expected(i) + offset, "thread {}, element {i}", thread_idx_x());
    }
}

#[track_caller]
fn multiply(d: &mut [f32; 32], descriptor: u64, accumulate: bool) {
    // SAFETY: the simulator checks.
    unsafe { wgmma_m64n64k16_f16::<1>(d, fragment(), descriptor, accumulate) };
}

#[test]
fn ordinary_stores_need_a_proxy_fence_by_their_thread() {
    let fault = fault_of_twin(&block("fence"), &GlobalMemory::new(), |form| {
        let b = write_b(1.0);
        if form == Form::Correct || thread_idx_x() != 100 {
            fence_proxy_async();
        }
        syncthreads();
        if form == Form::Broken {
            fence_proxy_async(); // by who reads: too late for thread 100
        }
        let mut d = [2.0; 32];
        wgmma_fence();
        multiply(&mut d, b, true);
        wgmma_commit_group();
        wgmma_wait_group::<0, 32>(&mut d);
        assert_product(&d, 1.0, 2.0);
    });
    assert!(
        matches!(fault.kind, FaultKind::MissingProxyFence { access, writer: 100 } if access.action == Action::Product),
        "{fault}"
    );
}

#[test]
fn a_product_needs_all_of_b_ordered_before_every_warp() {
    let fault = fault_of_twin(&block("order"), &GlobalMemory::new(), |form| {
        let b = write_b(1.0);
        fence_proxy_async();
        if form == Form::Correct {
            syncthreads();
        } else {
            syncwarp();
        }
        let mut d = [0.0; 32];
        wgmma_fence();
        multiply(&mut d, b, false);
        wgmma_commit_group();
        wgmma_wait_group::<0, 32>(&mut d);
    });
    assert!(
        matches!(fault.kind, FaultKind::Race { access, other_wrote: true, .. } if access.action == Action::Product),
        "{fault}"
    );
}

#[test]
fn b_is_overwritten_after_the_wait_only() {
    let fault = fault_of_twin(&block("overwrite_b"), &GlobalMemory::new(), |form| {
        let b = write_b(1.0);
        fence_proxy_async();
        syncthreads();
        let mut d = [0.0; 32];
        wgmma_fence();
        multiply(&mut d, b, false);
        wgmma_commit_group();
        if form == Form::Correct {
            wgmma_wait_group::<0, 32>(&mut d);
        }
        syncthreads();
        write_b(2.0);
    });
    assert!(
        matches!(fault.kind, FaultKind::Race { access, other_wrote: false, .. } if access.action == Action::Store),
        "{fault}"
    );
}

#[test]
fn the_block_outlives_its_products() {
    let fault = fault_of_twin(&block("ends"), &GlobalMemory::new(), |form| {
        let b = write_b(1.0);
        fence_proxy_async();
        syncthreads();
        let mut d = [0.0; 32];
        wgmma_fence();
        multiply(&mut d, b, false);
        if form == Form::Correct {
            wgmma_commit_group();
        }
        wgmma_wait_group::<0, 32>(&mut d);
    });
    assert!(matches!(&fault.kind, FaultKind::Invalid { what } if what.contains("product")), "{fault}");
}

#[test]
fn a_result_is_nan_until_it_is_waited_for() {
    for schedule in SCHEDULES {
        launch(&Launch { schedule, ..block("nan") }, &GlobalMemory::new(), &|| {
            let b = write_b(1.0);
            fence_proxy_async();
            syncthreads();
            let (mut first, mut second, mut third) = ([0.0; 32], [0.0; 32], [7.0; 32]);
            wgmma_fence();
            multiply(&mut first, b, false);
            wgmma_commit_group();
            wgmma_fence();
            multiply(&mut second, b, false);
            multiply(&mut second, b, true);
            wgmma_commit_group();
            assert!(first.iter().chain(&second).all(|x| x.is_nan()));
            // Not covered, and not a product.
            wgmma_wait_group::<1, 32>(&mut second);
            wgmma_wait_group::<0, 32>(&mut third);
            assert_eq!(third, [7.0; 32]);
            assert!(first.iter().chain(&second).all(|x| x.is_nan()));
            let mut moved = first;
            wgmma_wait_group::<0, 32>(&mut moved);
            wgmma_wait_group::<0, 32>(&mut second);
            assert_product(&moved, 1.0, 0.0);
            assert_product(&second, 2.0, 0.0);
        })
        .unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
    }
}

#[test]
fn a_chain_goes_on_through_groups() {
    for schedule in SCHEDULES {
        launch(&Launch { schedule, ..block("chain") }, &GlobalMemory::new(), &|| {
            let b = write_b(1.0);
            fence_proxy_async();
            syncthreads();
            let mut d = [1.0; 32];
            for _ in 0..3 {
                wgmma_fence();
                multiply(&mut d, b, true);
                wgmma_commit_group();
            }
            // The last product is not done.
            wgmma_wait_group::<1, 32>(&mut d);
            assert!(d[0].is_nan());
            wgmma_wait_group::<0, 32>(&mut d);
            assert_product(&d, 3.0, 1.0);
            d.iter_mut().for_each(|x| *x *= 0.5);
            wgmma_fence();
            multiply(&mut d, b, true);
            wgmma_commit_group();
            wgmma_wait_group::<0, 32>(&mut d);
            assert_product(&d, 2.5, 0.5);
        })
        .unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
    }
}

#[test]
fn an_accumulator_in_flight_is_not_computed_with() {
    let fault = fault_of_twin(&block("touched"), &GlobalMemory::new(), |form| {
        let b = write_b(1.0);
        fence_proxy_async();
        syncthreads();
        let mut d = [0.0; 32];
        wgmma_fence();
        multiply(&mut d, b, false);
        wgmma_commit_group();
        if form == Form::Broken {
            d.iter_mut().for_each(|x| *x *= opaque(2.0));
        }
        wgmma_wait_group::<0, 32>(&mut d);
        // What was collected may be computed with.
        d.iter_mut().for_each(|x| *x *= 2.0);
        assert_product(&d, 2.0, 0.0);
    });
    assert_eq!(fault.kind, FaultKind::TouchedAccumulator);
}

#[test]
fn registers_are_not_more_than_there_are() {
    let base = Launch { threads: 256, ..one_block("registers", 256) };
    let fault = fault_of_twin(&base, &GlobalMemory::new(), |form| match (form, thread_idx_x() < 128) {
        (_, true) => setmaxnreg_inc::<256>(),
        (Form::Correct, false) => setmaxnreg_inc::<256>(),
        (Form::Broken, false) if thread_idx_x() < 160 => {}
        (Form::Broken, false) => setmaxnreg_dec::<24>(),
    });
    assert!(matches!(fault.kind, FaultKind::Divergence { .. }), "{fault}");
    let base = Launch { threads: 384, ..base };
    let fault = fault_of_twin(&base, &GlobalMemory::new(), |form| match (form, thread_idx_x() < 256) {
        (Form::Correct, true) => setmaxnreg_inc::<240>(),
        (Form::Broken, true) => setmaxnreg_inc::<248>(),
        _ => setmaxnreg_dec::<24>(),
    });
    assert!(matches!(&fault.kind, FaultKind::Invalid { what } if what.contains("registers")), "{fault}");
}
