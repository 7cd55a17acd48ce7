//! Why threads do not go on.

use std::boxed::Box;
use std::format;
use std::string::String;
use std::vec::Vec;

use super::fault::{Fault, FaultKind, Meeting, Standing};
use super::machine::Machine;
use super::wgmma::GROUP;

impl Machine {
    /// Threads `a` and `b` should have met and do not; at most one of them exited.
    #[cold]
    pub(super) fn divergence(&self, a: usize, b: usize) -> Box<Fault> {
        let (waiting, other, at, waits_at) = match (self.threads[a].standing, self.threads[b].standing) {
            (Standing::Waits(meeting, at), _) => (a, b, at, meeting),
            (_, Standing::Waits(meeting, at)) => (b, a, at, meeting),
            _ => unreachable!("one of two that do not meet waits"),
        };
        let other_is = self.threads[other].standing;
        self.fault(waiting, FaultKind::Divergence { waits_at, other: other as u32, other_is }, Some(at))
    }

    /// Why nobody can run.
    #[cold]
    pub(super) fn stuck(&self) -> Box<Fault> {
        let standing = |thread: usize| self.threads[thread].standing;
        let all = 0..self.threads.len();
        for thread in all.clone() {
            if let Standing::Waits(meeting, _) = standing(thread)
                && meeting.is_of_warpgroup()
            {
                let mut mates = thread / GROUP * GROUP..(thread / GROUP + 1) * GROUP;
                let is_elsewhere = |&mate: &usize| {
                    standing(mate) != standing(thread) && !matches!(standing(mate), Standing::Blocked { .. })
                };
                if let Some(mate) = mates.find(is_elsewhere) {
                    return self.divergence(thread, mate);
                }
            }
        }
        let blocked = |thread: usize| match standing(thread) {
            Standing::Blocked { barrier, at } => {
                let barrier = self.barriers.all.iter().find(|other| other.offset() == barrier);
                Some((thread, barrier.expect("it was found before"), at))
            }
            _ => None,
        };
        // Bytes that nobody brings are a cause, arrivals that do not come may be an effect.
        let lacks_bytes = |thread: usize| blocked(thread).filter(|(_, barrier, _)| barrier.pending == 0);
        if let Some((thread, barrier, at)) = all.clone().find_map(lacks_bytes).or_else(|| all.clone().find_map(blocked))
        {
            let kind = FaultKind::Deadlock {
                barrier: barrier.offset(),
                phase: barrier.phase,
                pending: barrier.pending,
                missing_bytes: barrier.missing_bytes,
                everybody: self.everybody(),
            };
            return self.fault(thread, kind, Some(at));
        }
        let is_at_barrier = |&thread: &usize| matches!(standing(thread), Standing::Waits(Meeting::Syncthreads, _));
        let waiting = all.clone().find(is_at_barrier).expect("who neither waits nor exited can run");
        let missing = all.clone().find(|thread| !is_at_barrier(thread)).expect("the barrier is not complete");
        self.divergence(waiting, missing)
    }

    /// What the threads are doing, those alike together.
    #[cold]
    fn everybody(&self) -> String {
        let mut parts = Vec::new();
        let mut first = 0;
        for run in self.threads.chunk_by(|a, b| a.standing == b.standing) {
            let last = first + run.len() - 1;
            parts.push(match run {
                [only] => format!("thread {first} {}", only.standing),
                _ => format!("each of threads {first} to {last} {}", run[0].standing),
            });
            first = last + 1;
        }
        parts.join("; ")
    }
}
