//! Clusters: copies that reach both blocks, and what they must wait for.

use lightning_attention_kernels::abi::{TensorMap, TensorMapSource};
use lightning_attention_kernels::device::sim::{
    BarrierProblem, Buffer, Fault, FaultKind, GlobalMemory, Launch, Schedule, encode_tensor_map, launch,
};
use lightning_attention_kernels::device::*;

use super::SCHEDULES;

/// Rows of a tile, of 128 bytes each; a block loads half of them, for both.
const ROWS: u32 = 16;
const TILES: u32 = 3;
const TILE_BYTES: u32 = ROWS * 128;

/// What is wrong with a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// The blocks do not wait for each other's mbarriers.
    NoSyncBefore,
    /// The blocks do not wait for each other at the end.
    NoSyncAfter,
    /// A block does not tell the other that it has read a tile.
    FreedHereOnly,
    /// And the other does not wait for it.
    FreedHereOnlyAndTakenSo,
    /// The producer's wait acquires what its own block released only.
    BlockScope,
    /// A block expects its own half of a tile only.
    HalfExpected,
    /// Copies go to three blocks.
    TooManyBlocks,
}

/// Two warps, one that loads tiles and one that reads them.
fn kernel(map: &TensorMap, flaw: Flaw) {
    let (full, empty) = (dynamic_smem() + TILE_BYTES, dynamic_smem() + TILE_BYTES + 8);
    let (thread, rank) = (thread_idx_x(), cluster_rank());
    assert_eq!((cluster_size(), block_idx_x()), (2, rank));
    let freeing = if matches!(flaw, Flaw::FreedHereOnlyAndTakenSo) { 1 } else { 2 };
    // SAFETY: the simulator checks.
    unsafe {
        mbarrier_init_if(full, 1, thread == 0);
        mbarrier_init_if(empty, freeing, thread == 0);
    }
    fence_mbarrier_init();
    if flaw == Flaw::NoSyncBefore {
        syncthreads();
    } else {
        cluster_sync();
    }
    if thread == 0 {
        for tile in 0..TILES {
            // SAFETY: the simulator checks.
            unsafe {
                if flaw == Flaw::BlockScope {
                    mbarrier_wait_parity(empty, tile & 1 ^ 1);
                } else {
                    mbarrier_wait_parity_cluster(empty, tile & 1 ^ 1);
                }
                mbarrier_arrive_expect_tx_if(full, TILE_BYTES >> u32::from(flaw == Flaw::HalfExpected), true);
                let (dst, row) = (dynamic_smem() + rank * TILE_BYTES / 2, (tile * ROWS + rank * ROWS / 2) as i32);
                let to = (if flaw == Flaw::TooManyBlocks { 0b111 } else { 0b11 }, createpolicy_evict_first());
                cp_async_bulk_tensor_load_multicast_if(dst, map, [0, row, 0, 0], full, to, true);
            }
        }
    } else if thread >= 32 {
        for tile in 0..TILES {
            let lane = thread - 32;
            // SAFETY: the simulator checks.
            unsafe {
                mbarrier_wait_parity(full, tile & 1);
                for row in 0..ROWS {
                    // The swizzle leaves the words of a row in their row.
                    let word = ld_shared_f32(dynamic_smem() + 128 * row + 4 * lane).to_bits();
                    assert_eq!(word, tile * ROWS + row);
                }
                syncwarp();
                mbarrier_arrive_if(empty, lane == 0);
                let tells = !matches!(flaw, Flaw::FreedHereOnly | Flaw::FreedHereOnlyAndTakenSo);
                mbarrier_arrive_remote_if(empty, rank ^ 1, lane == 1 && tells);
            }
        }
    }
    if flaw != Flaw::NoSyncAfter {
        cluster_sync();
    }
}

fn run(schedule: Schedule, flaw: Flaw) -> Result<(), Fault> {
    let data = Buffer::new((0..TILES * ROWS * 32).map(|i| i / 32).collect::<Vec<u32>>());
    let mut memory = GlobalMemory::new();
    let (dims, strides) = ([64, TILES * ROWS, 1, 1], [128; 3]);
    let source = TensorMapSource { address: memory.input("tiles", &data), dims, strides, box_rows: ROWS / 2 };
    let map = encode_tensor_map(&source);
    let base =
        Launch { name: "pair", grid: [2, 1, 1], cluster: 2, threads: 64, shared_bytes: TILE_BYTES + 1024, schedule };
    launch(&base, &memory, &|| kernel(&map, flaw))
}

#[test]
fn a_copy_reaches_both_blocks() {
    for schedule in SCHEDULES {
        run(schedule, Flaw::None).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
    }
}

#[test]
fn blocks_wait_for_each_other() {
    for schedule in SCHEDULES {
        let fault = |flaw| run(schedule, flaw).expect_err("the broken kernel must not pass").kind;
        let is_race = |kind: &FaultKind| matches!(kind, FaultKind::Race { other_wrote: false, .. });
        for flaw in [Flaw::BlockScope, Flaw::FreedHereOnlyAndTakenSo] {
            let kind = fault(flaw);
            let is_early = |kind: &FaultKind| {
                matches!(
                    kind,
                    FaultKind::UseBeforeLanding { .. }
                        | FaultKind::Barrier { problem: BarrierProblem::UnexpectedBytes, .. }
                )
            };
            assert!(is_race(&kind) || is_early(&kind), "{flaw:?}: {kind}");
        }
        let kind = fault(Flaw::NoSyncBefore);
        let is_unknown = |kind: &FaultKind| {
            matches!(
                kind,
                FaultKind::Race { other_wrote: true, .. }
                    | FaultKind::Barrier { problem: BarrierProblem::Uninitialised, .. }
            )
        };
        assert!(is_unknown(&kind), "{kind}");
        let kind = fault(Flaw::FreedHereOnly);
        assert!(matches!(kind, FaultKind::Deadlock { pending: 1, .. }), "{kind}");
        let kind = fault(Flaw::HalfExpected);
        assert!(
            matches!(
                kind,
                FaultKind::Barrier { problem: BarrierProblem::UnexpectedBytes, .. }
                    | FaultKind::UseBeforeLanding { .. }
            ),
            "{kind}"
        );
        let kind = fault(Flaw::TooManyBlocks);
        assert!(matches!(kind, FaultKind::Invalid { .. }), "{kind}");
    }
    // Where both blocks end together nobody is missed.
    let exits = SCHEDULES.map(|schedule| run(schedule, Flaw::NoSyncAfter));
    assert!(exits.iter().any(|exit| matches!(exit, Err(Fault { kind: FaultKind::Invalid { .. }, .. }))), "{exits:?}");
}
