//! THE table: every kernel that exists is one row here. Entry names, shared-memory sizes, the PTX entries, the host's
//! dispatch and the simulator's function pointers all come from it.

/// What a kernel computes; the pipeline is state → scan → output (`docs/algorithm.md`, F2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Each segment's own contribution to the state.
    ChunkState,
    /// Contributions → the state that enters each segment.
    StateScan,
    /// The outputs, walking each segment's chunks from its entering state.
    ChunkOutput,
    /// dq, dk and dv in one sweep, without checkpoints (`docs/algorithm.md`, B8).
    Gradients,
    /// The same from checkpoints every [`PAIR`] rows, where two chunks of all inputs fit a block (B9).
    PairedGradients,
}

/// The oldest architecture a kernel's instructions run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// `mma.sync`, `ldmatrix`, `cp.async`: Ampere and everything after it.
    Sm80,
    /// `wgmma`, TMA, `mbarrier`: Hopper alone.
    Sm90,
}

/// Element type of the tensors; accumulation and states are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision (the states).
    F32,
}

/// Rows of a chunk: the tile height.
pub const CHUNK: u32 = 64;
/// Rows of two chunks.
pub const PAIR: u32 = 2 * CHUNK;
/// Value-dim columns of one block of most kernels.
pub const SLAB: u32 = 64;
/// State elements of one scan block: four for each thread.
pub const SCAN_ELEMENTS: u32 = 4 * 128;

/// One kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Entry name in the PTX; its file is `<entry>.ptx`.
    pub entry: &'static str,
    /// What it computes.
    pub op: Op,
    /// Where it runs.
    pub arch: Arch,
    /// Element type.
    pub element: ElementType,
    /// Whether what is rounded on the way to a product is multiplied too (`docs/kernels.md`, Numerics).
    pub accurate: bool,
    /// Key-dim tile: 64 or 128 (0 where it does not apply).
    pub key_tile: u32,
    /// Value-dim columns of one block, a slab: 64 or 128 (0 where it does not apply).
    pub value_tile: u32,
    /// Threads per block.
    pub threads: u32,
    /// Blocks per multiprocessor that the register budget is set for (`.minnctapersm`).
    pub min_blocks: u32,
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
}

/// Calls `$callback!` with every row of the table:
/// `entry: op, arch, element, key tile, value tile, stages, threads, min blocks;`, with `, accurate` at the end where it is.
macro_rules! for_each_variant {
    ($callback:ident) => {
        $callback! {
            chunk_state_sm80_bf16_d64:   ChunkState,  Sm80, Bf16, 64, 64,  3, 128, 4;
            chunk_state_sm80_bf16_d128:  ChunkState,  Sm80, Bf16, 128, 64, 3, 128, 3;
            chunk_state_sm80_f16_d64:    ChunkState,  Sm80, F16,  64, 64,  3, 128, 4;
            chunk_state_sm80_f16_d128:   ChunkState,  Sm80, F16,  128, 64, 3, 128, 3;
            chunk_state_sm90_bf16_d64_e64: ChunkState, Sm90, Bf16, 64, 64, 8, 256, 1;
            chunk_state_sm90_bf16_d128_e64: ChunkState, Sm90, Bf16, 128, 64, 8, 256, 1;
            chunk_state_sm90_bf16_d64_e128: ChunkState, Sm90, Bf16, 64, 128, 8, 384, 1;
            chunk_state_sm90_bf16_d128_e128: ChunkState, Sm90, Bf16, 128, 128, 6, 384, 1;
            chunk_state_sm90_f16_d64_e64: ChunkState, Sm90, F16, 64, 64, 8, 256, 1;
            chunk_state_sm90_f16_d128_e64: ChunkState, Sm90, F16, 128, 64, 8, 256, 1;
            chunk_state_sm90_f16_d64_e128: ChunkState, Sm90, F16, 64, 128, 8, 384, 1;
            chunk_state_sm90_f16_d128_e128: ChunkState, Sm90, F16, 128, 128, 6, 384, 1;
            chunk_output_sm80_bf16_d64:  ChunkOutput, Sm80, Bf16, 64, 64,  2, 128, 3;
            chunk_output_sm80_bf16_d128: ChunkOutput, Sm80, Bf16, 128, 64, 2, 128, 2;
            chunk_output_sm80_f16_d64:   ChunkOutput, Sm80, F16,  64, 64,  2, 128, 3;
            chunk_output_sm80_f16_d128:  ChunkOutput, Sm80, F16,  128, 64, 2, 128, 2;
            chunk_output_sm90_bf16_d64:  ChunkOutput, Sm90, Bf16, 64, 64,  6, 512, 1;
            chunk_output_sm90_bf16_d128: ChunkOutput, Sm90, Bf16, 128, 64, 6, 512, 1;
            chunk_output_sm90_f16_d64:   ChunkOutput, Sm90, F16,  64, 64,  6, 512, 1;
            chunk_output_sm90_f16_d128:  ChunkOutput, Sm90, F16,  128, 64, 6, 512, 1;
            chunk_output_sm90_bf16_d64_e128: ChunkOutput, Sm90, Bf16, 64, 128, 6, 512, 1;
            chunk_output_sm90_f16_d64_e128: ChunkOutput, Sm90, F16, 64, 128, 6, 512, 1;
            chunk_output_sm90_bf16_d128_e128: ChunkOutput, Sm90, Bf16, 128, 128, 3, 512, 1;
            chunk_output_sm90_f16_d128_e128: ChunkOutput, Sm90, F16, 128, 128, 3, 512, 1;
            gradients_sm90_bf16_d64_e64: Gradients, Sm90, Bf16, 64, 64, 10, 512, 1;
            gradients_sm90_bf16_d128_e64: Gradients, Sm90, Bf16, 128, 64, 6, 512, 1;
            gradients_sm90_bf16_d64_e128: Gradients, Sm90, Bf16, 64, 128, 7, 512, 1;
            gradients_sm90_bf16_d128_e128: Gradients, Sm90, Bf16, 128, 128, 4, 512, 1;
            gradients_sm90_f16_d64_e64: Gradients, Sm90, F16, 64, 64, 10, 512, 1;
            gradients_sm90_f16_d128_e64: Gradients, Sm90, F16, 128, 64, 6, 512, 1;
            gradients_sm90_f16_d64_e128: Gradients, Sm90, F16, 64, 128, 7, 512, 1;
            gradients_sm90_f16_d128_e128: Gradients, Sm90, F16, 128, 128, 4, 512, 1;
            paired_gradients_sm90_bf16_d64_e64: PairedGradients, Sm90, Bf16, 64, 64, 6, 512, 1;
            paired_gradients_sm90_bf16_d128_e64: PairedGradients, Sm90, Bf16, 128, 64, 4, 512, 1;
            paired_gradients_sm90_bf16_d64_e128: PairedGradients, Sm90, Bf16, 64, 128, 4, 512, 1;
            paired_gradients_sm90_f16_d64_e64: PairedGradients, Sm90, F16, 64, 64, 6, 512, 1;
            paired_gradients_sm90_f16_d128_e64: PairedGradients, Sm90, F16, 128, 64, 4, 512, 1;
            paired_gradients_sm90_f16_d64_e128: PairedGradients, Sm90, F16, 64, 128, 4, 512, 1;
            chunk_state_sm80_bf16_d64_accurate: ChunkState, Sm80, Bf16, 64, 64, 3, 128, 4, accurate;
            chunk_state_sm80_bf16_d128_accurate: ChunkState, Sm80, Bf16, 128, 64, 3, 128, 3, accurate;
            chunk_state_sm80_f16_d64_accurate: ChunkState, Sm80, F16, 64, 64, 3, 128, 4, accurate;
            chunk_state_sm80_f16_d128_accurate: ChunkState, Sm80, F16, 128, 64, 3, 128, 3, accurate;
            chunk_output_sm80_bf16_d64_accurate: ChunkOutput, Sm80, Bf16, 64, 64, 2, 128, 2, accurate;
            chunk_output_sm80_bf16_d128_accurate: ChunkOutput, Sm80, Bf16, 128, 64, 2, 128, 2, accurate;
            chunk_output_sm80_f16_d64_accurate: ChunkOutput, Sm80, F16, 64, 64, 2, 128, 2, accurate;
            chunk_output_sm80_f16_d128_accurate: ChunkOutput, Sm80, F16, 128, 64, 2, 128, 2, accurate;
            chunk_output_sm90_bf16_d64_accurate: ChunkOutput, Sm90, Bf16, 64, 64, 6, 512, 1, accurate;
            chunk_output_sm90_bf16_d128_accurate: ChunkOutput, Sm90, Bf16, 128, 64, 4, 512, 1, accurate;
            chunk_output_sm90_f16_d64_accurate: ChunkOutput, Sm90, F16, 64, 64, 6, 512, 1, accurate;
            chunk_output_sm90_f16_d128_accurate: ChunkOutput, Sm90, F16, 128, 64, 4, 512, 1, accurate;
            state_scan_sm80_f32_d0:      StateScan,   Sm80, F32,  0, 0,   0, 128, 8;
        }
    };
}

/// Whether the row of a kernel ends in `accurate`.
macro_rules! is_accurate {
    () => {
        false
    };
    (accurate) => {
        true
    };
}

#[cfg_attr(not(any(target_arch = "nvptx64", feature = "sim")), expect(unused_imports))]
pub(crate) use {for_each_variant, is_accurate};

macro_rules! rows {
    ($($entry:ident: $op:ident, $arch:ident, $element:ident, $key_tile:literal, $value_tile:literal, $stages:literal, $threads:literal, $min_blocks:literal $(, $accurate:ident)?;)*) => {
        /// Every kernel there is.
        pub const VARIANTS: &[Variant] = &[$(Variant {
            entry: stringify!($entry),
            op: Op::$op,
            arch: Arch::$arch,
            element: ElementType::$element,
            accurate: is_accurate!($($accurate)?),
            key_tile: $key_tile,
            value_tile: $value_tile,
            threads: $threads,
            min_blocks: $min_blocks,
            shared_bytes: shared_bytes(Op::$op, Arch::$arch, $key_tile, $value_tile, $stages, is_accurate!($($accurate)?)),
        }),*];
    };
}
for_each_variant!(rows);

/// Dynamic shared memory of a kernel: its ring of stages, and the 16-bit copy of the state. On Hopper also a ring of X,
/// a second copy of the state, remainders of both copies where the kernel is accurate, panels for two warpgroups' outputs,
/// and the barriers; the gradient kernels have all inputs in their rings, the paired one a checkpoint besides.
const fn shared_bytes(op: Op, arch: Arch, key_tile: u32, value_tile: u32, stages: u32, accurate: bool) -> u32 {
    let (x, z, s) = (CHUNK * key_tile * 2, CHUNK * value_tile * 2, key_tile * value_tile * 2);
    match (op, arch) {
        (Op::ChunkState, Arch::Sm80) => stages * (x + z),
        (Op::ChunkState, Arch::Sm90) => stages * (x + z) + BARRIER_BYTES,
        (Op::StateScan, _) => 0,
        (Op::Gradients | Op::PairedGradients, _) => {
            let (widest, outputs) = (if x > z { x } else { z }, 3 - value_tile / 64);
            let (slots, states) = match op {
                Op::PairedGradients => (stages + kv_stages(key_tile, value_tile), 3),
                _ => (stages, 2),
            };
            slots * (x + z) + states * s + outputs * widest + BARRIER_BYTES + DECAY_TABLE_BYTES
        }
        (Op::ChunkOutput, Arch::Sm80) => stages * (2 * x + z) + s,
        (Op::ChunkOutput, Arch::Sm90) => {
            let copies = if accurate { 4 } else { 2 };
            stages * (x + z) + 2 * x + copies * s + 2 * CHUNK * SLAB * 2 + BARRIER_BYTES
        }
    }
}

/// Chunks of K and V that the paired gradient kernel holds; its stages are those of Q and dO.
pub const fn kv_stages(key_tile: u32, value_tile: u32) -> u32 {
    if key_tile + value_tile == 128 { 5 } else { 2 }
}

/// Shared memory for the barriers of a kernel, and 16 bytes of scratch.
pub const BARRIER_BYTES: u32 = 288;

/// Shared memory for powers of a head's decay.
pub const DECAY_TABLE_BYTES: u32 = 1808;

/// Shared memory that every supported GPU gives one block.
pub const MAX_SHARED_BYTES: u32 = 99 * 1024;
/// Shared memory that a Hopper GPU gives one block.
pub const MAX_SHARED_BYTES_SM90: u32 = 227 * 1024;

const _: () = {
    let mut i = 0;
    while i < VARIANTS.len() {
        let most = match VARIANTS[i].arch {
            Arch::Sm80 => MAX_SHARED_BYTES,
            Arch::Sm90 => MAX_SHARED_BYTES_SM90,
        };
        assert!(VARIANTS[i].shared_bytes <= most, "a variant needs more shared memory than its GPUs have");
        i += 1;
    }
};
