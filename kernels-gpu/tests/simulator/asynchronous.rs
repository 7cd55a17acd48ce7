//! `cp.async`: groups, waits, and what must not be touched in between.

use lightning_attention_kernels::device::sim::{Action, FaultKind, GlobalMemory, launch};
use lightning_attention_kernels::device::*;

use super::{Form, fault_of_twin, one_block};

fn row(thread: u32) -> u32 {
    dynamic_smem() + 16 * thread
}

/// Copies source row `from` to shared row `to`.
fn copy(source: u64, from: u32, to: u32) {
    // SAFETY: the simulator checks.
    unsafe { cp_async_cg_16(row(to), (source + 16 * u64::from(from)) as *const u8, 16) };
}

fn load(at: u32) -> [u32; 4] {
    // SAFETY: the simulator checks.
    unsafe { ld_shared_b32x4(row(at)) }
}

/// 64 rows of 16 bytes; every word of a row is its number.
fn rows() -> Vec<u32> {
    (0..256).map(|i| i / 4).collect()
}

#[test]
fn a_copy_is_there_after_its_wait() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = fault_of_twin(&one_block("own_copy", 32), &memory, |form| {
        let t = thread_idx_x();
        copy(source, t + 3, t);
        cp_async_commit_group();
        if form == Form::Correct {
            cp_async_wait_group::<0>();
        }
        assert_eq!(load(t), [t + 3; 4]);
    });
    assert_eq!(fault.thread, 0);
    assert!(matches!(fault.kind, FaultKind::UseBeforeWait { copier: 0, waited: false, .. }), "{fault}");
}

#[test]
fn a_wait_without_a_barrier_is_for_oneself() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = fault_of_twin(&one_block("wait_then_barrier", 64), &memory, |form| {
        let t = thread_idx_x();
        copy(source, t, t);
        cp_async_commit_group();
        if form == Form::Correct {
            cp_async_wait_group::<0>();
            syncthreads();
        } else {
            syncthreads();
            cp_async_wait_group::<0>();
        }
        assert_eq!(load(63 - t), [63 - t; 4]);
    });
    assert_eq!(fault.thread, 0);
    assert!(matches!(fault.kind, FaultKind::UseBeforeWait { copier: 63, waited: false, .. }), "{fault}");
}

#[test]
fn a_waited_copy_still_needs_the_barrier() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = fault_of_twin(&one_block("ldmatrix_of_copies", 32), &memory, |form| {
        let t = thread_idx_x();
        copy(source, t, t);
        cp_async_commit_group();
        cp_async_wait_group::<0>();
        if form == Form::Correct {
            syncwarp();
        }
        // SAFETY: the simulator checks.
        unsafe { ldmatrix_x4(row(t)) };
    });
    assert!(
        matches!(fault.kind, FaultKind::UseBeforeWait { access, copier: 0, waited: true } if access.action == Action::MatrixLoad),
        "{fault}"
    );
    assert!(fault.to_string().contains("no barrier after that wait"), "{fault}");
}

#[test]
fn a_wait_counts_groups_from_the_most_recent() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = fault_of_twin(&one_block("groups", 32), &memory, |form| {
        let t = thread_idx_x();
        if t != 5 {
            return;
        }
        copy(source, 10, 0);
        copy(source, 11, 1);
        cp_async_commit_group();
        copy(source, 12, 2);
        cp_async_commit_group();
        cp_async_commit_group();
        cp_async_wait_group::<2>();
        assert_eq!((load(0), load(1)), ([10; 4], [11; 4]));
        if form == Form::Correct {
            cp_async_wait_group::<1>();
        }
        assert_eq!(load(2), [12; 4]);
    });
    assert_eq!(fault.thread, 5);
    assert!(matches!(fault.kind, FaultKind::UseBeforeWait { copier: 5, waited: false, .. }), "{fault}");
}

#[test]
fn a_copy_outside_any_group_is_not_waited_for() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = fault_of_twin(&one_block("uncommitted", 32), &memory, |form| {
        let t = thread_idx_x();
        copy(source, t, t);
        if form == Form::Correct {
            cp_async_commit_group();
        }
        cp_async_wait_group::<0>();
        load(t);
    });
    assert!(matches!(fault.kind, FaultKind::UseBeforeWait { copier: 0, waited: false, .. }), "{fault}");
}

#[test]
fn the_destination_of_a_copy_is_not_written_meanwhile() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = fault_of_twin(&one_block("overwrite", 32), &memory, |form| {
        let t = thread_idx_x();
        copy(source, t, t);
        cp_async_commit_group();
        if form == Form::Correct {
            cp_async_wait_group::<0>();
        }
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32(row(t) + 8, 1) };
    });
    assert!(
        matches!(fault.kind, FaultKind::UseBeforeWait { access, copier: 0, waited: false } if access.action == Action::Store),
        "{fault}"
    );
}

#[test]
fn a_stage_is_refilled_only_after_everybody_has_read_it() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = fault_of_twin(&one_block("refill", 64), &memory, |form| {
        let t = thread_idx_x();
        for _ in 0..2 {
            copy(source, t, t);
            cp_async_commit_group();
            cp_async_wait_group::<0>();
            syncthreads();
            assert_eq!(load(t ^ 32), [t ^ 32; 4]);
            if form == Form::Correct {
                syncthreads();
            }
        }
    });
    assert!(
        matches!(fault.kind, FaultKind::Race { access, other: 32, other_wrote: false } if access.action == Action::AsyncCopy)
            || matches!(fault.kind, FaultKind::UseBeforeWait { .. }),
        "{fault}"
    );
}

#[test]
fn zero_fill_never_looks_at_its_source() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = fault_of_twin(&one_block("zero_fill", 32), &memory, |form| {
        let t = thread_idx_x();
        // The source has 64 rows.
        let (from, bytes) = (64 + t, if form == Form::Correct { 0 } else { 16 });
        // SAFETY: the simulator checks.
        unsafe { cp_async_cg_16(row(t), (source + 16 * u64::from(from)) as *const u8, bytes) };
        cp_async_commit_group();
        cp_async_wait_group::<0>();
        assert_eq!(load(t), [0; 4]);
    });
    assert_eq!(fault.thread, 0);
    match fault.kind {
        FaultKind::OutOfBounds { access, nearest } => {
            assert_eq!((access.action, access.addr), (Action::AsyncCopy, source + 1024));
            assert_eq!(nearest, "it reaches 16 bytes past the end of `source` (1024 bytes)");
        }
        kind => panic!("{kind}"),
    }
}

#[test]
fn a_partial_copy_is_refused() {
    let data = rows();
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let fault = launch(&one_block("partial", 32), &memory, &|| {
        // SAFETY: the simulator checks.
        unsafe { cp_async_cg_16(dynamic_smem(), source as *const u8, 8) }
    });
    assert!(matches!(fault.unwrap_err().kind, FaultKind::Panic { .. }));
}
