//! Two threads at the same bytes of shared memory.

use lightning_attention_kernels::device::sim::{Access, Action, FaultKind, GlobalMemory, Space};
use lightning_attention_kernels::device::*;

use super::{Form, fault_of_twin, one_block};

/// Address of row `thread` of 16 bytes.
fn row(thread: u32) -> u32 {
    dynamic_smem() + 16 * thread
}

fn access(action: Action, thread: u32) -> Access {
    // The base is the same for every launch; it shows in any fault.
    Access { space: Space::Shared, action, addr: 3072 + 16 * u64::from(thread), bytes: 16 }
}

#[test]
fn reading_what_another_warp_writes_needs_a_barrier() {
    let fault = fault_of_twin(&one_block("write_read", 64), &GlobalMemory::new(), |form| {
        let t = thread_idx_x();
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(row(t), [t; 4]) };
        syncthreads();
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(row(t), [t + 1; 4]) };
        if form == Form::Correct {
            syncthreads();
        }
        // SAFETY: the simulator checks.
        let other = unsafe { ld_shared_b32x4(row(63 - t)) };
        if form == Form::Correct {
            assert_eq!(other, [64 - t; 4]);
        }
    });
    // The first warp reads the second's rows before they are written anew: the fault shows when it writes.
    assert_eq!((fault.block, fault.thread), ([0; 3], 32));
    assert_eq!(fault.kind, FaultKind::Race { access: access(Action::Store, 32), other: 31, other_wrote: false });
    assert!(fault.at.expect("a source line").file().ends_with("races.rs"));
    let text = fault.to_string();
    assert!(text.contains("kernel `write_read`, block (0, 0, 0), thread 32 (warp 1, lane 0), at "), "{text}");
    assert!(
        text.contains("16-byte shared store at offset 512 races: thread 31 (warp 0, lane 31) read there"),
        "{text}"
    );
}

#[test]
fn a_write_is_visible_to_another_lane_after_syncwarp_only() {
    let fault = fault_of_twin(&one_block("lanes", 32), &GlobalMemory::new(), |form| {
        let t = thread_idx_x();
        if t == 7 {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32x4(row(0), [9; 4]) };
        }
        syncwarp();
        if t == 7 {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32x4(row(0), [10; 4]) };
        }
        if form == Form::Correct {
            syncwarp();
        }
        if t == 20 {
            // SAFETY: the simulator checks.
            let read = unsafe { ld_shared_b32x4(row(0)) };
            assert!(form == Form::Broken || read == [10; 4]);
        }
    });
    assert_eq!(fault.thread, 20);
    assert_eq!(fault.kind, FaultKind::Race { access: access(Action::Load, 0), other: 7, other_wrote: true });
}

#[test]
fn overwriting_what_another_thread_reads_needs_a_barrier() {
    let fault = fault_of_twin(&one_block("read_write", 64), &GlobalMemory::new(), |form| {
        let t = thread_idx_x();
        if t == 0 {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32x4(row(0), [1; 4]) };
        }
        syncthreads();
        // SAFETY: the simulator checks.
        unsafe { ld_shared_b32x4(row(0)) };
        if form == Form::Correct {
            syncthreads();
        }
        if t == 40 {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32(row(0) + 4, 2) };
        }
    });
    assert!(matches!(fault.kind, FaultKind::Race { .. }), "{fault}");
}

#[test]
fn two_writers_need_a_barrier() {
    let fault = fault_of_twin(&one_block("write_write", 32), &GlobalMemory::new(), |form| {
        let t = thread_idx_x();
        let target = if form == Form::Correct { t } else { t / 2 };
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(row(target), [5; 4]) };
    });
    assert_eq!(fault.thread, 1);
    assert_eq!(fault.kind, FaultKind::Race { access: access(Action::Store, 0), other: 0, other_wrote: true });
}

#[test]
fn syncwarp_does_not_reach_other_warps() {
    let fault = fault_of_twin(&one_block("two_warps", 64), &GlobalMemory::new(), |form| {
        let t = thread_idx_x();
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(row(t), [t; 4]) };
        syncthreads();
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(row(t), [t; 4]) };
        syncwarp();
        let mask = if form == Form::Correct { 1 } else { 33 };
        // SAFETY: the simulator checks.
        assert_eq!(unsafe { ld_shared_b32x4(row(t ^ mask)) }, [t ^ mask; 4]);
    });
    assert!(matches!(fault.kind, FaultKind::Race { .. }), "{fault}");
}

#[test]
fn ldmatrix_does_not_order_the_writes_before_it() {
    let fault = fault_of_twin(&one_block("store_ldmatrix", 32), &GlobalMemory::new(), |form| {
        let t = thread_idx_x();
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(row(t), [t; 4]) };
        if form == Form::Correct {
            syncwarp();
        }
        // SAFETY: the simulator checks.
        unsafe { ldmatrix_x4(row(t)) };
    });
    // Lane 0 wrote row 0 itself, but all lanes get a part of it.
    assert_eq!(fault.thread, 0);
    assert_eq!(fault.kind, FaultKind::Race { access: access(Action::MatrixLoad, 0), other: 0, other_wrote: true });
}

#[test]
fn ldmatrix_does_not_order_the_writes_after_it() {
    let fault = fault_of_twin(&one_block("ldmatrix_store", 32), &GlobalMemory::new(), |form| {
        let t = thread_idx_x();
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(row(t), [t; 4]) };
        syncwarp();
        // SAFETY: the simulator checks.
        unsafe { ldmatrix_x4_trans(row(31 - t)) };
        if form == Form::Correct {
            syncwarp();
        }
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(row(t), [t; 4]) };
    });
    assert_eq!(fault.thread, 0);
    assert_eq!(fault.kind, FaultKind::Race { access: access(Action::Store, 0), other: 31, other_wrote: false });
}
