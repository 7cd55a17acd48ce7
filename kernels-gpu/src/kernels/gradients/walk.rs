//! The order in which a block goes through the chunks of a segment: span by span from the last, each forward and then backward, or
//! only backward where it is not this block's turn to output.

use super::super::div_rem;

/// A chunk on its way through a span.
#[derive(Clone, Copy)]
pub struct Visit {
    /// Chunks of the span that follow on this way.
    left: u32,
    /// First chunk of the span.
    pub first: u32,
    /// Spans, or chunks, until it is this block's turn to output; 0 when it is.
    turns: u32,
    /// Whether for dQ; otherwise for dK and dV.
    pub forward: bool,
    /// Whether there are no more visits and this is none.
    pub is_over: bool,
}

impl Visit {
    /// Whether this block outputs the chunk.
    #[inline(always)]
    pub fn is_owned(&self) -> bool {
        self.turns == 0
    }
}

/// One block's way through its segment.
#[derive(Clone, Copy)]
pub struct Walk {
    /// Chunks of the segment.
    num_chunks: u32,
    /// Chunks of a span.
    pub span_chunks: u32,
    /// Whether sharers take turns at chunks; otherwise at spans.
    pub in_turn_by_chunks: bool,
    /// Blocks that share the segment.
    pub sharers: u32,
    /// Which of them this is.
    share: u32,
}

impl Walk {
    /// Through so many chunks, at least one, in spans of so many.
    #[inline(always)]
    pub fn new(num_chunks: u32, span_chunks: u32, sharers: u32, share: u32) -> Self {
        Walk { num_chunks, span_chunks, in_turn_by_chunks: span_chunks >= num_chunks, sharers, share }
    }

    /// The first of all visits.
    #[inline(always)]
    pub fn first_visit(&self) -> Visit {
        self.enter(self.last_span(), self.share)
    }

    /// First chunk of the last span.
    #[inline(always)]
    pub fn last_span(&self) -> u32 {
        div_rem(self.num_chunks - 1, self.span_chunks).0 * self.span_chunks
    }

    /// Chunks of the span that begins at `first`.
    #[inline(always)]
    pub fn chunks_of_span(&self, first: u32) -> u32 {
        (self.num_chunks - first).min(self.span_chunks)
    }

    /// The first visit to a span.
    #[inline(always)]
    fn enter(&self, first: u32, turns: u32) -> Visit {
        let forward = self.in_turn_by_chunks || turns == 0;
        Visit { left: self.chunks_of_span(first) - 1, first, turns, forward, is_over: false }
    }

    /// The turns that are left when one has passed.
    #[inline(always)]
    pub fn next_turn(&self, turns: u32) -> u32 {
        if turns == 0 { self.sharers - 1 } else { turns - 1 }
    }

    /// The visit after `visit`.
    #[inline(always)]
    pub fn next(&self, visit: Visit) -> Visit {
        let Visit { left, first, turns, forward, .. } = visit;
        if left > 0 {
            let turns = if self.in_turn_by_chunks { self.next_turn(turns) } else { turns };
            Visit { left: left - 1, turns, ..visit }
        } else if forward {
            let turns = if self.in_turn_by_chunks { self.share } else { turns };
            Visit { left: self.chunks_of_span(first) - 1, turns, forward: false, ..visit }
        } else if first > 0 {
            self.enter(first - self.span_chunks, self.next_turn(turns))
        } else {
            Visit { is_over: true, ..visit }
        }
    }

    /// The chunk of a visit.
    #[inline(always)]
    pub fn chunk(&self, visit: Visit) -> u32 {
        if visit.forward {
            visit.first + self.chunks_of_span(visit.first) - 1 - visit.left
        } else {
            visit.first + visit.left
        }
    }
}
