//! Tiles are nouns, products are verbs. A tile is 64 rows of 64 16-bit columns in shared memory, swizzled; a wider
//! operand is several such panels side by side. Accumulators live in registers, 16 rows by 64 columns a warp.

pub mod descriptor;
pub mod global;
pub mod pipeline;
pub mod register;
pub mod shared;

/// Repeats a block with a constant index, so that register arrays are only ever indexed by constants: a run-time
/// index would move them to local memory.
macro_rules! unroll {
    ($i:ident in 2 $body:block) => { $crate::tile::unroll!(@ $i $body 0 1) };
    ($i:ident in 4 $body:block) => { $crate::tile::unroll!(@ $i $body 0 1 2 3) };
    ($i:ident in 8 $body:block) => { $crate::tile::unroll!(@ $i $body 0 1 2 3 4 5 6 7) };
    (@ $i:ident $body:block $($n:literal)*) => { $({ const $i: usize = $n; $body })* };
}
pub(crate) use unroll;
