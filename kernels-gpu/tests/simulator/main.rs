//! The simulator finds what it is there to find: beside each kernel that works stands one that is broken in one place.

mod asynchronous;
mod barriers;
mod blocks;
mod copies;
mod flaws;
mod hopper;
mod instructions;
mod matmul;
mod memory;
mod products;
mod races;
mod roles;

use lightning_attention_kernels::device::sim::{Fault, FaultKind, GlobalMemory, Launch, Schedule, launch};

/// Schedules that must not make a difference.
const SCHEDULES: [Schedule; 5] =
    [Schedule::InOrder, Schedule::Reversed, Schedule::Seeded(0), Schedule::Seeded(1), Schedule::Seeded(2)];

/// One block of `threads` threads and 4 KiB of shared memory.
fn one_block(name: &'static str, threads: u32) -> Launch {
    Launch { name, grid: [1, 1, 1], threads, shared_bytes: 4096, schedule: Schedule::InOrder }
}

/// Runs a kernel that has a correct and a broken form on every schedule: the correct one passes, the broken one does
/// not. Returns the faults, that of [`Schedule::InOrder`] first.
fn faults_of_twin(base: &Launch, memory: &GlobalMemory<'_>, kernel: impl Fn(Form)) -> Vec<Fault> {
    let faults = SCHEDULES.map(|schedule| {
        let run = |form| launch(&Launch { schedule, ..base.clone() }, memory, &|| kernel(form));
        run(Form::Correct).unwrap_or_else(|fault| panic!("{schedule:?}: a fault in the correct kernel: {fault}"));
        let fault = run(Form::Broken).expect_err("the broken kernel must not pass");
        assert_eq!(run(Form::Broken), Err(fault.clone()), "{schedule:?} is not deterministic");
        assert!(fault.to_string().contains(base.name), "{fault}");
        fault
    });
    faults.into()
}

/// As [`faults_of_twin`], for what every schedule reports alike but for the threads involved.
fn fault_of_twin(base: &Launch, memory: &GlobalMemory<'_>, kernel: impl Fn(Form)) -> Fault {
    let mut faults = faults_of_twin(base, memory, kernel);
    let kind = |fault: &Fault| core::mem::discriminant::<FaultKind>(&fault.kind);
    for fault in &faults {
        assert_eq!(kind(fault), kind(&faults[0]), "one schedule sees something else: {fault}");
    }
    faults.swap_remove(0)
}

/// Which of two twins runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Correct,
    Broken,
}
