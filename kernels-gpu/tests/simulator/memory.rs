//! Bounds, alignment, permissions and initialisation of shared and global memory.

use lightning_attention_kernels::device::sim::{Action, Buffer, FaultKind, GlobalMemory, Space};
use lightning_attention_kernels::device::*;

use super::{Form, fault_of_twin, faults_of_twin, one_block};

#[test]
fn shared_memory_ends_where_the_launch_says() {
    let fault = fault_of_twin(&one_block("shared_bounds", 256), &GlobalMemory::new(), |form| {
        let shift = if form == Form::Correct { 0 } else { 16 };
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32x4(dynamic_smem() + 16 * thread_idx_x() + shift, [0; 4]) };
    });
    assert_eq!((fault.block, fault.thread), ([0; 3], 255));
    assert!(
        matches!(fault.kind, FaultKind::OutOfBounds { access, .. } if access.space == Space::Shared && access.bytes == 16)
    );
    assert!(fault.to_string().contains("offset 4096 is out of bounds: the block has 4096 bytes"), "{fault}");
}

#[test]
fn shared_memory_does_not_begin_at_zero() {
    let fault = fault_of_twin(&one_block("shared_base", 32), &GlobalMemory::new(), |form| {
        let base = if form == Form::Correct { dynamic_smem() } else { 0 };
        assert!(dynamic_smem().is_multiple_of(1024));
        // SAFETY: the simulator checks.
        unsafe { st_shared_b32(base + 4 * thread_idx_x(), 0) };
    });
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { .. }), "{fault}");
}

#[test]
fn vectors_are_aligned() {
    let data = [0f32; 64];
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data).next_multiple_of(16);
    let base = one_block("alignment", 32);
    let shift = |form| if form == Form::Correct { 16 } else { 8 };
    let shared = fault_of_twin(&base, &memory, |form| {
        if thread_idx_x() == 3 {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32x4(dynamic_smem() + shift(form), [0; 4]) };
        }
    });
    assert_eq!(shared.thread, 3);
    assert!(
        matches!(shared.kind, FaultKind::Misaligned { access, alignment: 16 } if access.space == Space::Shared),
        "{shared}"
    );
    let global = fault_of_twin(&base, &memory, |form| {
        // SAFETY: the simulator checks.
        unsafe { ld_global_f32x4((source + u64::from(shift(form))) as *const f32) };
    });
    assert!(
        matches!(global.kind, FaultKind::Misaligned { access, alignment: 16 } if access.space == Space::Global),
        "{global}"
    );
}

#[test]
fn shared_memory_is_read_only_where_it_was_written() {
    let fault = fault_of_twin(&one_block("shared_uninitialised", 32), &GlobalMemory::new(), |form| {
        let at = dynamic_smem() + 16 * thread_idx_x();
        for word in 0..if form == Form::Correct { 4 } else { 3 } {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32(at + 4 * word, word) };
        }
        // SAFETY: the simulator checks.
        assert_eq!(unsafe { ld_shared_b32x4(at) }, [0, 1, 2, 3]);
    });
    assert_eq!(fault.thread, 0);
    assert!(matches!(fault.kind, FaultKind::Uninitialised { access, first } if first == access.addr + 12), "{fault}");
}

#[test]
fn a_block_finds_nothing_in_shared_memory() {
    let base = sim::Launch { grid: [2, 1, 1], ..one_block("fresh_blocks", 32) };
    let fault = fault_of_twin(&base, &GlobalMemory::new(), |form| {
        let at = dynamic_smem() + 16 * thread_idx_x();
        if form == Form::Correct || block_idx_x() == 0 {
            // SAFETY: the simulator checks.
            unsafe { st_shared_b32x4(at, [1; 4]) };
        }
        // SAFETY: the simulator checks.
        unsafe { ld_shared_b32x4(at) };
    });
    assert_eq!(fault.block, [1, 0, 0]);
    assert!(matches!(fault.kind, FaultKind::Uninitialised { .. }), "{fault}");
}

#[test]
fn global_memory_is_the_registered_buffers() {
    let (data, mut result) = (Buffer::new([1f32; 32]), Buffer::new([0f32; 32]));
    let mut memory = GlobalMemory::new();
    let source = memory.input("source", &data);
    let target = memory.output("target", &mut result);
    assert!(source.is_multiple_of(256) && target.is_multiple_of(256));
    let fault = fault_of_twin(&one_block("global_bounds", 32), &memory, |form| {
        let t = u64::from(thread_idx_x());
        let index = if form == Form::Broken && t == 30 { 40 } else { t };
        // SAFETY: the simulator checks.
        unsafe { st_global_f32((target + 4 * t) as *mut f32, ld_global_f32((source + 4 * index) as *const f32)) };
    });
    assert_eq!(fault.thread, 30);
    match fault.kind {
        FaultKind::OutOfBounds { access, nearest } => {
            assert_eq!((access.space, access.action, access.bytes), (Space::Global, Action::Load, 4));
            assert_eq!(nearest, "it reaches 36 bytes past the end of `source` (128 bytes)");
        }
        kind => panic!("{kind}"),
    }
    assert_eq!(memory.unwritten_words(target), 0);
    drop(memory);
    assert_eq!(*result, *data);
}

#[test]
fn inputs_are_not_written() {
    let (data, mut result) = ([1f32; 32], [0f32; 32]);
    let mut memory = GlobalMemory::new();
    let source = memory.input("weights", &data);
    let target = memory.output("target", &mut result);
    let fault = fault_of_twin(&one_block("read_only", 32), &memory, |form| {
        let base = if form == Form::Correct { target } else { source };
        // SAFETY: the simulator checks.
        unsafe { st_global_f32((base + 4 * u64::from(thread_idx_x())) as *mut f32, 2.0) };
    });
    assert!(matches!(fault.kind, FaultKind::ReadOnly { buffer: "weights", .. }), "{fault}");
    drop(memory);
    assert_eq!(data, [1.0; 32]);
}

#[test]
fn outputs_are_read_only_where_they_were_written() {
    let (mut correct, mut broken) = ([0f32; 64], [0f32; 64]);
    let mut memory = GlobalMemory::new();
    let (correct, broken) = (memory.output("workspace", &mut correct), memory.output("workspace", &mut broken));
    let faults = faults_of_twin(&one_block("workspace", 32), &memory, |form| {
        let t = u64::from(thread_idx_x());
        let base = if form == Form::Correct { correct } else { broken };
        let reads = if form == Form::Correct { base + 4 * t } else { base + 4 * (t + 32) };
        // SAFETY: the simulator checks.
        unsafe {
            st_global_f32((base + 4 * t) as *mut f32, t as f32);
            assert_eq!(ld_global_f32(reads as *const f32), t as f32);
        }
    });
    for fault in faults {
        assert!(
            matches!(fault.kind, FaultKind::Uninitialised { access, .. } if access.space == Space::Global),
            "{fault}"
        );
    }
    assert_eq!(memory.unwritten_words(correct), 32);
}

#[test]
fn threads_race_in_global_memory_too() {
    let mut state = [0f32; 64];
    let mut memory = GlobalMemory::new();
    let state = memory.in_out("state", &mut state);
    let fault = fault_of_twin(&one_block("global_race", 64), &memory, |form| {
        let t = u64::from(thread_idx_x());
        // SAFETY: the simulator checks.
        unsafe { st_global_f32((state + 4 * t) as *mut f32, t as f32) };
        if form == Form::Correct {
            syncthreads();
        }
        // SAFETY: the simulator checks.
        unsafe { ld_global_f32((state + 4 * (t ^ 32)) as *const f32) };
    });
    assert!(matches!(fault.kind, FaultKind::Race { access, .. } if access.space == Space::Global), "{fault}");
}
