//! Threads that should meet and do not, and kernels that end before their time.

use std::cell::Cell;

use lightning_attention_kernels::device::sim::{FaultKind, GlobalMemory, Meeting, Standing, launch};
use lightning_attention_kernels::device::*;

use super::{Form, fault_of_twin, one_block};

#[test]
fn a_warp_that_exits_does_not_come_to_the_barrier() {
    let fault = fault_of_twin(&one_block("early_exit", 96), &GlobalMemory::new(), |form| {
        if form == Form::Broken && thread_idx_x() / 32 == 1 {
            return;
        }
        syncthreads();
    });
    assert_eq!((fault.block, fault.thread), ([0; 3], 0));
    assert_eq!(
        fault.kind,
        FaultKind::Divergence { waits_at: Meeting::Syncthreads, other: 32, other_is: Standing::Exited }
    );
    assert!(
        fault.to_string().contains("waits at syncthreads, where thread 32 (warp 1, lane 0) never comes: it exited")
    );
}

#[test]
fn a_lane_that_exits_does_not_come_either() {
    let fault = fault_of_twin(&one_block("early_lane", 32), &GlobalMemory::new(), |form| {
        if form == Form::Broken && thread_idx_x() == 0 {
            return;
        }
        syncthreads();
    });
    assert_eq!(
        (fault.thread, fault.kind),
        (1, FaultKind::Divergence { waits_at: Meeting::Syncthreads, other: 0, other_is: Standing::Exited })
    );
}

#[test]
fn a_warp_is_whole_at_an_mma() {
    let fault = fault_of_twin(&one_block("half_warp", 64), &GlobalMemory::new(), |form| {
        if form == Form::Correct || thread_idx_x() != 50 {
            mma_m16n8k16_bf16(&mut [0.0; 4], [0; 4], [0; 2]);
        }
        syncthreads();
    });
    assert_eq!(fault.thread, 32);
    assert!(
        matches!(
            fault.kind,
            FaultKind::Divergence {
                waits_at: Meeting::MmaBf16,
                other: 50,
                other_is: Standing::Waits(Meeting::Syncthreads, _)
            }
        ),
        "{fault}"
    );
}

#[test]
#[expect(clippy::if_same_then_else, reason = "the two places are the point")]
fn the_lanes_of_a_warp_meet_at_one_place() {
    let fault = fault_of_twin(&one_block("two_places", 32), &GlobalMemory::new(), |form| {
        let first = match form {
            Form::Correct => true,
            Form::Broken => thread_idx_x() < 16,
        };
        if first {
            syncwarp();
        } else {
            syncwarp();
        }
    });
    assert!(
        matches!(
            fault.kind,
            FaultKind::Divergence {
                waits_at: Meeting::Syncwarp,
                other: 16,
                other_is: Standing::Waits(Meeting::Syncwarp, _)
            }
        ),
        "{fault}"
    );
}

#[test]
fn warps_may_meet_at_different_places() {
    launch(&one_block("roles", 64), &GlobalMemory::new(), &|| {
        if thread_idx_x() < 32 {
            mma_m16n8k16_f16(&mut [0.0; 4], [0; 4], [0; 2]);
            syncthreads();
        } else {
            syncthreads();
        }
    })
    .unwrap();
}

#[test]
fn a_panic_is_a_fault_and_the_next_launch_works() {
    let fault = fault_of_twin(&one_block("panics", 32), &GlobalMemory::new(), |form| {
        assert!(form == Form::Correct || thread_idx_x() != 4, "thread 4 panics");
        syncwarp();
    });
    assert_eq!((fault.thread, fault.kind), (4, FaultKind::Panic { message: "thread 4 panics".into() }));
}

#[test]
fn a_fault_unwinds_every_thread() {
    struct Alive<'a>(&'a Cell<i32>);
    impl Drop for Alive<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }
    let (alive, started) = (Cell::new(0), Cell::new(0));
    fault_of_twin(&one_block("unwinds", 128), &GlobalMemory::new(), |form| {
        alive.set(alive.get() + 1);
        started.set(started.get() + 1);
        let _guard = Alive(&alive);
        syncthreads();
        if form == Form::Broken && thread_idx_x() == 77 {
            // SAFETY: the simulator checks.
            unsafe { ld_shared_b32x4(dynamic_smem()) };
        }
        syncthreads();
    });
    assert_eq!((alive.get(), started.get()), (0, 15 * 128));
}

#[test]
#[should_panic(expected = "device functions run only inside")]
fn device_functions_need_a_launch() {
    thread_idx_x();
}
