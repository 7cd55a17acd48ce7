//! Several blocks, several launches.

use std::cell::RefCell;

use lightning_attention_kernels::device::sim::{FaultKind, GlobalMemory, Launch, launch};
use lightning_attention_kernels::device::*;

use super::{Form, SCHEDULES, fault_of_twin, one_block};

fn store(base: u64, index: u32, value: f32) {
    // SAFETY: the simulator checks.
    unsafe { st_global_f32((base + 4 * u64::from(index)) as *mut f32, value) };
}

fn load(base: u64, index: u32) -> f32 {
    // SAFETY: the simulator checks.
    unsafe { ld_global_f32((base + 4 * u64::from(index)) as *const f32) }
}

#[test]
fn two_blocks_do_not_write_the_same_bytes() {
    let mut data = [0f32; 256];
    let mut memory = GlobalMemory::new();
    let output = memory.output("o", &mut data);
    let base = Launch { grid: [2, 2, 1], ..one_block("tiles", 32) };
    let fault = fault_of_twin(&base, &memory, |form| {
        let tile = if form == Form::Correct { block_idx_y() * 2 + block_idx_x() } else { block_idx_y() };
        store(output, tile * 32 + thread_idx_x(), 1.0);
    });
    assert_eq!((fault.block, fault.thread), ([1, 0, 0], 0));
    assert!(
        matches!(fault.kind, FaultKind::BlockRace { buffer: "o", other: [0, 0, 0], other_wrote: true, .. }),
        "{fault}"
    );
    assert!(fault.to_string().contains("block (0, 0, 0) of the same launch wrote there"), "{fault}");
}

#[test]
fn a_block_does_not_read_what_another_writes() {
    let mut data = [0f32; 64];
    let mut memory = GlobalMemory::new();
    let state = memory.in_out("state", &mut data);
    let base = Launch { grid: [1, 1, 2], ..one_block("look_back", 32) };
    let fault = fault_of_twin(&base, &memory, |form| {
        let (t, block) = (thread_idx_x(), block_idx_z());
        if form == Form::Broken && block == 0 {
            load(state, 32 + t);
        }
        let value = load(state, block * 32 + t);
        store(state, block * 32 + t, value + 1.0);
    });
    assert_eq!(fault.block, [0, 0, 1]);
    assert!(matches!(fault.kind, FaultKind::BlockRace { other: [0, 0, 0], other_wrote: false, .. }), "{fault}");
}

#[test]
fn any_number_of_blocks_may_read() {
    let (mut data, mut sums) = ([2f32; 32], [0f32; 96]);
    let mut memory = GlobalMemory::new();
    let (state, sums) = (memory.in_out("state", &mut data), memory.output("sums", &mut sums));
    let base = Launch { grid: [3, 1, 1], ..one_block("readers", 32) };
    let fault = fault_of_twin(&base, &memory, |form| {
        let t = thread_idx_x();
        store(sums, block_idx_x() * 32 + t, load(state, t));
        if form == Form::Broken && block_idx_x() == 1 && t == 9 {
            store(state, t, 0.0);
        }
    });
    assert_eq!((fault.block, fault.thread), ([1, 0, 0], 9));
    assert!(matches!(fault.kind, FaultKind::BlockRace { other: [0, 0, 0], other_wrote: false, .. }), "{fault}");
}

#[test]
fn launches_are_ordered() {
    let mut data = [f32::NAN; 64];
    let mut memory = GlobalMemory::new();
    let workspace = memory.output("workspace", &mut data);
    for schedule in SCHEDULES {
        let base = Launch { grid: [2, 1, 1], schedule, ..one_block("pipeline", 32) };
        launch(&base, &memory, &|| {
            let index = block_idx_x() * 32 + thread_idx_x();
            store(workspace, index, index as f32);
        })
        .unwrap();
        launch(&base, &memory, &|| {
            let index = (1 - block_idx_x()) * 32 + thread_idx_x();
            assert_eq!(load(workspace, index), index as f32);
        })
        .unwrap();
    }
    assert_eq!(memory.unwritten_words(workspace), 0);
}

#[test]
fn an_empty_grid_does_nothing() {
    let base = Launch { grid: [4, 0, 1], ..one_block("empty", 32) };
    assert_eq!(launch(&base, &GlobalMemory::new(), &|| panic!("no block")), Ok(()));
}

#[test]
fn schedules_are_different_orders() {
    let order_of = |schedule| {
        let order = RefCell::new(Vec::new());
        let base = Launch { grid: [2, 1, 1], schedule, ..one_block("order", 1024) };
        launch(&base, &GlobalMemory::new(), &|| {
            syncthreads();
            order.borrow_mut().push((block_idx_x(), thread_idx_x()));
        })
        .unwrap();
        order.into_inner()
    };
    let in_order: Vec<_> = (0..2).flat_map(|block| (0..1024).map(move |thread| (block, thread))).collect();
    let orders = SCHEDULES.map(order_of);
    assert_eq!(orders[0], in_order);
    for (i, order) in orders.iter().enumerate() {
        assert!(!orders[..i].contains(order), "{:?} is nothing new", SCHEDULES[i]);
        assert_eq!(*order, order_of(SCHEDULES[i]));
        let mut sorted = order.clone();
        sorted.sort();
        assert_eq!(sorted, in_order);
    }
}
