//! mbarriers and tensor copies by themselves.

use lightning_attention_kernels::abi::{TensorMap, TensorMapSource};
use lightning_attention_kernels::device::sim::{
    Action, BarrierProblem, Buffer, FaultKind, GlobalMemory, Launch, Meeting, encode_tensor_map, launch,
};
use lightning_attention_kernels::device::*;

use super::{Form, SCHEDULES, fault_of_twin, faults_of_twin, one_block};

/// A tensor `[2, 3, 20, 72]` of its own element numbers, and boxes of 8 rows.
const DIMS: [u32; 4] = [72, 20, 3, 2];
const BOX_BYTES: u32 = 8 * 128;

fn map(address: u64) -> TensorMap {
    let row = 2 * u64::from(DIMS[0]);
    let head = row * u64::from(DIMS[1]);
    encode_tensor_map(&TensorMapSource { address, dims: DIMS, strides: [row, head, 3 * head], box_rows: 8 })
}

/// Element `[batch, head, row, column]`, or 0 outside.
fn element(at: [i32; 4]) -> u16 {
    let [column, row, head, batch] = at;
    let is_inside = at.iter().zip(DIMS).all(|(&index, dim)| (0..dim as i32).contains(&index));
    if is_inside { (((batch * 3 + head) * 20 + row) * 72 + column) as u16 } else { 0 }
}

fn numbers() -> Buffer<u16> {
    Buffer::new((0..DIMS.iter().product::<u32>()).map(|i| i as u16).collect::<Vec<_>>())
}

fn block(name: &'static str, threads: u32) -> Launch {
    Launch { shared_bytes: 4096, ..one_block(name, threads) }
}

/// The barrier behind everything.
fn barrier(index: u32) -> u32 {
    dynamic_smem() + 3072 + 8 * index
}

/// Thread 0 makes barriers of so many arrivals.
fn init(counts: &[u32]) {
    for (index, &count) in (0..).zip(counts) {
        // SAFETY: the simulator checks.
        unsafe { mbarrier_init_if(barrier(index), count, thread_idx_x() == 0) };
    }
    fence_mbarrier_init();
    syncthreads();
}

/// If `condition`, loads the box at `at` to offset 1024 `slot`, for barrier `index`.
fn load(map: &TensorMap, at: [i32; 4], slot: u32, index: u32, condition: bool) {
    let (to, policy) = (dynamic_smem() + 1024 * slot, createpolicy_evict_normal());
    // SAFETY: the simulator checks.
    unsafe {
        mbarrier_arrive_expect_tx_if(barrier(index), BOX_BYTES, condition);
        cp_async_bulk_tensor_load_if(to, map, at, barrier(index), policy, condition);
    }
}

fn wait(index: u32, parity: u32) {
    // SAFETY: the simulator checks.
    unsafe { mbarrier_wait_parity(barrier(index), parity) };
}

fn arrive(index: u32, condition: bool) {
    // SAFETY: the simulator checks.
    unsafe { mbarrier_arrive_if(barrier(index), condition) };
}

/// Unit `unit` of row `row` of a box.
fn read(slot: u32, row: u32, unit: u32) -> [u32; 4] {
    // SAFETY: the simulator checks.
    unsafe { ld_shared_b32x4(dynamic_smem() + 1024 * slot + 128 * row + ((unit ^ row) << 4)) }
}

#[test]
fn boxes_are_swizzled_and_zero_outside() {
    let data = numbers();
    let mut memory = GlobalMemory::new();
    let map = map(memory.input("numbers", &data));
    for at in [[0, 0, 0, 0], [8, 3, 2, 1], [-7, -3, 1, 0], [30, 17, 1, 1], [72, 0, 0, 0], [0, 0, -1, 0], [0, 0, 0, 2]] {
        for schedule in SCHEDULES {
            launch(&Launch { schedule, ..block("box", 64) }, &memory, &|| {
                let thread = thread_idx_x();
                init(&[1]);
                load(&map, at, 1, 0, thread == 0);
                wait(0, 0);
                let (row, unit) = (thread / 8, thread % 8);
                for (i, word) in read(1, row, unit).into_iter().enumerate() {
                    let column = at[0] + (8 * unit) as i32 + 2 * i as i32;
                    let element = |column| u32::from(element([column, at[1] + row as i32, at[2], at[3]]));
                    assert_eq!(word, element(column) | element(column + 1) << 16, "{at:?}, row {row}, unit {unit}");
                }
            })
            .unwrap_or_else(|fault| panic!("{at:?}, {schedule:?}: {fault}"));
        }
    }
}

#[test]
fn stores_leave_alone_what_is_outside() {
    for at in [[0, 0, 0, 0], [31, 17, 2, 1], [72, 0, 0, 0], [0, 0, 3, 0]] {
        let mut data = Buffer::new(vec![u16::MAX; numbers().len()]);
        let mut memory = GlobalMemory::new();
        let map = map(memory.in_out("data", &mut data));
        launch(&block("store", 64), &memory, &|| {
            let (row, unit) = (thread_idx_x() / 8, thread_idx_x() % 8);
            let value = core::array::from_fn(|i| {
                let column = at[0] + (8 * unit) as i32 + 2 * i as i32;
                let element = |column| u32::from(element([column, at[1] + row as i32, at[2], at[3]]));
                element(column) | element(column + 1) << 16
            });
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32x4(dynamic_smem() + 128 * row + ((unit ^ row) << 4), value) };
            fence_proxy_async();
            syncthreads();
            // SAFETY: the simulator checks.
            unsafe {
                let policy = createpolicy_evict_first();
                cp_async_bulk_tensor_store_if(&map, at, dynamic_smem(), policy, thread_idx_x() == 63);
            }
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group_read::<0>();
        })
        .unwrap_or_else(|fault| panic!("{at:?}: {fault}"));
        for (i, &value) in (0..).zip(data.iter()) {
            let index: [i32; 4] = [i % 72, i / 72 % 20, i / 72 / 20 % 3, i / 72 / 20 / 3];
            let extent = [64, 8, 1, 1];
            let is_inside = (0..4).all(|d| (at[d]..at[d] + extent[d]).contains(&index[d]));
            assert_eq!(value, if is_inside { element(index) } else { u16::MAX }, "{at:?}, {index:?}");
        }
    }
}

#[test]
fn stores_do_not_begin_before_the_tensor() {
    for at in [[-8, 0, 0, 0], [0, -1, 0, 0]] {
        let mut data = Buffer::new(vec![0_u16; numbers().len()]);
        let mut memory = GlobalMemory::new();
        let map = map(memory.in_out("data", &mut data));
        let fault = launch(&block("store", 32), &memory, &|| {
            let policy = createpolicy_evict_first();
            // SAFETY: the simulator checks.
            unsafe { cp_async_bulk_tensor_store_if(&map, at, dynamic_smem(), policy, thread_idx_x() == 0) };
        })
        .unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Invalid { .. }), "{fault}");
    }
}

#[test]
fn an_elected_store_is_one_of_the_whole_warp() {
    let mut data = Buffer::new(vec![0_u16; numbers().len()]);
    let mut memory = GlobalMemory::new();
    let map = map(memory.in_out("data", &mut data));
    let fault = fault_of_twin(&block("elect", 32), &memory, |form| {
        let thread = thread_idx_x();
        for unit in [thread, thread + 32] {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32x4(dynamic_smem() + 16 * unit, [0x70007; 4]) };
        }
        fence_proxy_async();
        syncwarp();
        if form == Form::Correct || thread != 9 {
            // SAFETY: the simulator checks.
            unsafe { cp_async_bulk_tensor_store_elect(&map, [8, 0, 0, 0], dynamic_smem(), createpolicy_evict_first()) };
        }
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read::<0>();
    });
    assert!(matches!(fault.kind, FaultKind::Divergence { waits_at: Meeting::Elect, .. }), "{fault}");
    drop(memory);
    assert_eq!((data[7], data[8], data[71], data[8 * 72 + 8]), (0, 7, 7, 0));
}

#[test]
fn a_landing_is_passed_on_by_those_who_waited_for_it() {
    let data = numbers();
    let mut memory = GlobalMemory::new();
    let map = map(memory.input("numbers", &data));
    let fault = fault_of_twin(&block("transitive", 96), &memory, |form| {
        let thread = thread_idx_x();
        init(&[1, 1, 1]);
        load(&map, [0; 4], 0, 0, thread == 0);
        load(&map, [0; 4], 1, 1, thread == 0);
        match thread / 32 {
            1 => {
                // Both have landed, but one does not tell of the other.
                wait(0, 0);
                if form == Form::Correct {
                    wait(1, 0);
                }
                arrive(2, thread == 32);
            }
            2 => {
                wait(2, 0);
                read(0, 0, 0);
                read(1, 0, 0);
            }
            _ => {}
        }
        syncthreads();
        wait(1, 0);
    });
    assert!(matches!(fault.kind, FaultKind::UseBeforeLanding { barrier: 3080, .. }), "{fault}");
    assert_eq!(fault.thread / 32, 2);
}

#[test]
fn an_arrival_releases_and_a_wait_acquires() {
    let faults = faults_of_twin(&block("message", 64), &GlobalMemory::new(), |form| {
        let thread = thread_idx_x();
        init(&[1]);
        if thread == 40 {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32x4(dynamic_smem(), [1, 2, 3, 4]) };
            arrive(0, true);
        } else if thread < 32 {
            if form == Form::Correct || thread != 9 {
                wait(0, 0);
            }
            assert_eq!(read(0, 0, 0), [1, 2, 3, 4]);
        }
    });
    for fault in faults {
        assert_eq!(fault.thread, 9);
        match fault.kind {
            FaultKind::Race { other: 40, other_wrote: true, .. } | FaultKind::Uninitialised { .. } => {}
            kind => panic!("{kind}"),
        }
    }
}

#[test]
fn a_phase_that_nobody_completes_is_a_deadlock() {
    let fault = fault_of_twin(&block("deadlock", 64), &GlobalMemory::new(), |form| {
        let thread = thread_idx_x();
        init(&[3]);
        arrive(0, thread > (if form == Form::Correct { 60 } else { 61 }));
        if thread >= 32 {
            wait(0, 0);
        }
        syncwarp();
    });
    match fault.kind {
        FaultKind::Deadlock { barrier, phase, pending, missing_bytes, everybody } => {
            assert_eq!((barrier, phase, pending, missing_bytes), (3072, 0, 1, 0));
            assert!(
                everybody.contains("each of threads 0 to 31 exited; each of threads 32 to 63 waits"),
                "{everybody}"
            );
        }
        kind => panic!("{kind}"),
    }
}

#[test]
fn barriers_are_made_once_and_of_somebody() {
    let fault = fault_of_twin(&block("again", 32), &GlobalMemory::new(), |form| {
        init(&[1]);
        if form == Form::Broken {
            init(&[1]);
        }
    });
    assert!(matches!(fault.kind, FaultKind::TouchesBarrier { access } if access.action == Action::Barrier), "{fault}");
    let fault = fault_of_twin(&block("of_nobody", 32), &GlobalMemory::new(), |form| {
        init(&[u32::from(form == Form::Correct)]);
    });
    assert!(matches!(&fault.kind, FaultKind::Invalid { what } if what.contains("arrivals")), "{fault}");
    let fault = fault_of_twin(&block("none", 32), &GlobalMemory::new(), |form| {
        init(&[1]);
        arrive(if form == Form::Correct { 0 } else { 1 }, thread_idx_x() == 0);
    });
    let none = FaultKind::Barrier { barrier: 3080, problem: BarrierProblem::Uninitialised };
    assert_eq!(fault.kind, none);
}

#[test]
fn the_block_outlives_its_loads() {
    let data = numbers();
    let mut memory = GlobalMemory::new();
    let map = map(memory.input("numbers", &data));
    let fault = fault_of_twin(&block("leaves", 32), &memory, |form| {
        init(&[1]);
        load(&map, [0; 4], 0, 0, thread_idx_x() == 3);
        if form == Form::Correct {
            wait(0, 0);
        }
    });
    assert_eq!(fault.thread, 3);
    assert!(matches!(&fault.kind, FaultKind::Invalid { what } if what.contains("before this load")), "{fault}");
}

#[test]
fn a_load_does_not_overwrite_what_was_stored_and_not_ordered() {
    let data = numbers();
    let mut memory = GlobalMemory::new();
    let map = map(memory.input("numbers", &data));
    let faults = faults_of_twin(&block("over_store", 32), &memory, |form| {
        init(&[1]);
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32(dynamic_smem() + 4 * thread_idx_x(), 1) };
        if form == Form::Correct {
            syncwarp();
        }
        load(&map, [0; 4], 0, 0, thread_idx_x() == 31);
        wait(0, 0);
    });
    for fault in faults {
        match fault.kind {
            // The load comes later, or the store.
            FaultKind::Race { access, other_wrote: true, .. } => assert_eq!(access.action, Action::TensorLoad),
            FaultKind::UseBeforeLanding { access, .. } => assert_eq!(access.action, Action::Store),
            kind => panic!("{kind}"),
        }
    }
}

#[test]
fn stmatrix_is_the_inverse_of_ldmatrix() {
    for schedule in SCHEDULES {
        launch(&Launch { schedule, ..block("stmatrix", 32) }, &GlobalMemory::new(), &|| {
            let lane = thread_idx_x();
            let row = |lane: u32| dynamic_smem() + 16 * (lane ^ 5);
            let value = core::array::from_fn(|i| 100 * lane + i as u32);
            // SAFETY: the simulator checks.
            unsafe {
                stmatrix_x4(row(lane), value);
                syncwarp();
                assert_eq!(ldmatrix_x4(row(lane)), value);
                // Row `lane % 8` of matrix `lane / 8`: its words come from lanes `4 (lane % 8) ..`.
                let words = core::array::from_fn(|t| 100 * (4 * (lane % 8) + t as u32) + lane / 8);
                assert_eq!(ld_shared_b32x4(row(lane)), words);
            }
        })
        .unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
    }
}
