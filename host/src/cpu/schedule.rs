//! Which worker computes what: heads, and segments of the sequence when heads are few (F4, F5).

use core::ops::Range;
use std::sync::Mutex;

use super::CHUNK;
use super::chunk::{Application, Decay, Scratch, Stretch};
use crate::{Element, Problem};

/// Below this many heads a sequence is cut into segments, so that there is work for about as many threads. Not the
/// number of threads: the cut must depend on the shape only, for the bits' sake.
const MIN_STRETCHES: usize = 32;

/// A shorter segment is not worth its share of F4.
const MIN_SEGMENT_ROWS: usize = 512;

/// What the workers of a call may hold together; the states between segments take at most another 24 MiB
/// (three applications, 32 stretches of 256 × 256).
const SCRATCH_BYTES: usize = 40 << 20;

/// How a sequence is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segments {
    /// Their number; 1 when there are heads enough.
    count: usize,
    /// Rows of each but the last, `T`; a multiple of the chunk.
    len: usize,
}

impl Segments {
    fn new(heads: usize, seq_len: usize) -> Self {
        let wanted = (MIN_STRETCHES / heads).clamp(1, (seq_len / MIN_SEGMENT_ROWS).max(1));
        let len = seq_len.div_ceil(wanted).next_multiple_of(CHUNK).max(CHUNK);
        Segments { count: seq_len.div_ceil(len).max(1), len }
    }

    fn positions(&self, segment: usize, seq_len: usize) -> Range<usize> {
        segment * self.len..seq_len.min((segment + 1) * self.len)
    }
}

/// Runs the applications of one problem; they write different tensors.
pub(super) fn run<T: Element>(problem: &Problem, slopes: &[f32], applications: &[Application<'_, T>]) {
    let heads = problem.batch * problem.heads;
    let segments = Segments::new(heads, problem.seq_len);
    let decays: Vec<Decay> = slopes.iter().map(|&slope| Decay::new(slope)).collect();

    // Applications vary faster than heads: those of one head share its inputs in the cache.
    let item = |index: usize| {
        let (segment, index) = (index % segments.count, index / segments.count);
        let (application, index) = (&applications[index % applications.len()], index / applications.len());
        let (batch, head) = (index / problem.heads, index % problem.heads);
        let positions = segments.positions(segment, problem.seq_len);
        (application, Stretch { batch, head, decay: &decays[head], positions })
    };
    let num_items = heads * applications.len() * segments.count;
    let workers = Workers::new(problem, num_items);

    // `[heads, applications, segments, D · E]`: first what each segment adds to the state, then what enters it.
    let state_len = problem.head_dim * problem.value_dim;
    let mut states = Vec::new();
    if segments.count > 1 {
        states = vec![0.0_f32; num_items * state_len];
        // F4. What the last segment adds enters no other.
        let all_but_last = |(index, _): &(usize, &mut [f32])| (index + 1) % segments.count != 0;
        workers.drain(
            states.chunks_exact_mut(state_len).enumerate().filter(all_but_last),
            |scratch, (index, state)| {
                let (application, stretch) = item(index);
                application.local_state(&stretch, scratch, state);
            },
        );
        // F5: S_0 = 0, S_{g+1} = λ^T S_g + U_g, in the order of the segments.
        let sequences = states.chunks_exact_mut(segments.count * state_len);
        workers.drain(sequences.enumerate(), |_, (sequence, states)| {
            let decay = item(sequence * segments.count).1.decay.pow(segments.len);
            scan(states, state_len, decay);
        });
    }

    workers.drain(0..num_items, |scratch, index| {
        let (application, stretch) = item(index);
        let entering = states.get(index * state_len..(index + 1) * state_len);
        // SAFETY: each index is drawn once, and no two share an application, a head and a segment.
        unsafe { application.output(&stretch, scratch, problem.scale, entering) };
    });
}

/// Turns `[segments, state_len]` contributions into entering states.
fn scan(states: &mut [f32], state_len: usize, decay: f32) {
    let mut carry = vec![0.0; state_len];
    for state in states.chunks_exact_mut(state_len) {
        for (carry, state) in carry.iter_mut().zip(state) {
            let contribution = core::mem::replace(state, *carry);
            *carry = decay * *carry + contribution;
        }
    }
}

/// As many workers as there are threads, items and memory for.
struct Workers {
    count: usize,
    dims: (usize, usize),
}

impl Workers {
    fn new(problem: &Problem, num_items: usize) -> Self {
        let dims = (problem.head_dim, problem.value_dim);
        let affordable = (SCRATCH_BYTES / Scratch::bytes(dims.0, dims.1)).max(1);
        Workers { count: rayon::current_num_threads().min(num_items).min(affordable), dims }
    }

    /// Each worker draws the next item until none is left.
    fn drain<I>(&self, items: I, work: impl Fn(&mut Scratch, I::Item) + Sync)
    where
        I: Iterator + Send,
        I::Item: Send,
    {
        let queue = Mutex::new(items);
        let worker = || {
            let mut scratch = Scratch::new(self.dims.0, self.dims.1);
            let next = || queue.lock().expect("drawing an item does not panic").next();
            while let Some(item) = next() {
                work(&mut scratch, item);
            }
        };
        rayon::scope(|scope| (0..self.count).for_each(|_| scope.spawn(|_| worker())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_the_sequence() {
        for heads in [1, 2, 5, 16, 17, 48, 4096] {
            for seq_len in [0, 1, 511, 512, 1024, 1025, 8191, 65_536, 1_000_000] {
                let segments = Segments::new(heads, seq_len);
                assert!(segments.count * heads <= MIN_STRETCHES || segments.count == 1, "{segments:?}");
                let covered: usize = (0..segments.count).map(|g| segments.positions(g, seq_len).len()).sum();
                assert_eq!(covered, seq_len, "{segments:?}");
            }
        }
        assert_eq!(Segments::new(1, 65_536), Segments { count: 32, len: 2048 });
        assert_eq!(Segments::new(48, 8192).count, 1);
    }

    #[test]
    fn scratch_and_states_fit_64_mib() {
        let states = 3 * MIN_STRETCHES * 256 * 256 * size_of::<f32>();
        assert!(SCRATCH_BYTES + states <= 64 << 20);
        assert!(Scratch::bytes(256, 256) < SCRATCH_BYTES);
    }
}
