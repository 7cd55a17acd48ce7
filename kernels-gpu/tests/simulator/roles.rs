//! A kernel of three roles: one lane loads, a warpgroup keeps a running state and publishes it to another one, which
//! applies it. `O_c = Q_c Sᶜ`, `Sᶜ = Σ K_jᵀ V_j` over the chunks `j < c`.

use half::f16;
use lightning_attention_kernels::abi::{TensorMap, TensorMapSource};
use lightning_attention_kernels::device::sim::{
    Action, Buffer, Fault, FaultKind, GlobalMemory, Launch, Schedule, encode_tensor_map, launch,
};
use lightning_attention_kernels::device::*;

use super::SCHEDULES;

const CHUNKS: usize = 5;
/// Rows of a chunk, and columns of everything.
const N: usize = 64;
const TILE_BYTES: u32 = 8192;
/// Where tiles lie: two stages of K and V, Q, two states, O.
const KV: u32 = 0;
const Q: u32 = 4;
const STATE: u32 = 5;
const O: u32 = 7;
/// Barriers: of each stage, that it is full, and that it is empty.
const KV_FULL: u32 = 0;
const KV_EMPTY: u32 = 2;
const Q_FULL: u32 = 4;
const Q_EMPTY: u32 = 5;
const STATE_FULL: u32 = 6;
const STATE_EMPTY: u32 = 8;
const SHARED_BYTES: u32 = 8 * TILE_BYTES + 10 * 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    NoProxyFence,
    PublishedBeforeStored,
    NoStateEmptyWait,
    StateReleasedEarly,
    NoStateFullWait,
}

fn tile(index: u32) -> u32 {
    dynamic_smem() + TILE_BYTES * index
}

fn barrier(index: u32) -> u32 {
    tile(8) + 8 * index
}

fn lane() -> u32 {
    thread_idx_x() % 32
}

fn warp() -> u32 {
    thread_idx_x() % 128 / 32
}

/// Address of 16-byte unit `unit` of row `row` of a tile.
fn unit(tile: u32, row: u32, unit: u32) -> u32 {
    tile + 128 * row + ((unit ^ (row & 7)) << 4)
}

fn wait(index: u32, parity: usize) {
    // SAFETY: the simulator checks.
    unsafe { mbarrier_wait_parity(barrier(index), parity as u32 % 2) };
}

/// One arrival a warp, of what all its lanes did.
fn arrive(index: u32) {
    syncwarp();
    // SAFETY: the simulator checks.
    unsafe { mbarrier_arrive_if(barrier(index), lane() == 0) };
}

fn load(map: &TensorMap, chunk: usize, to: u32, index: u32) {
    // SAFETY: the simulator checks.
    unsafe {
        let at = [0, (N * chunk) as i32, 0, 0];
        cp_async_bulk_tensor_load_if(tile(to), map, at, barrier(index), createpolicy_evict_normal(), true);
    }
}

/// D (+)= A B, B a tile `[n, k]` or, transposed, `[k, n]`.
fn multiply<const TRANS_B: u32>(d: &mut [f32; 32], a: &[[u32; 4]; 4], b: u32, accumulate: bool) {
    let descriptor = u64::from(b >> 4) | 64 << 32 | 1 << 62;
    wgmma_fence();
    for (step, &a) in a.iter().enumerate() {
        let offset = (step * if TRANS_B == 0 { 2 } else { 128 }) as u64;
        // SAFETY: the simulator checks.
        unsafe { wgmma_m64n64k16_f16::<TRANS_B>(d, a, descriptor + offset, accumulate || step > 0) };
    }
    wgmma_commit_group();
}

/// The 16 rows of this warp, to the same rows of a tile.
fn store(d: &[f32; 32], to: u32) {
    for (i, pair) in (0..).zip(d.chunks_exact(8)) {
        let value = core::array::from_fn(|j| cvt_rn_f16x2_f32(pair[2 * j], pair[2 * j + 1]));
        // SAFETY: the simulator checks.
        unsafe { stmatrix_x4(unit(to, 16 * warp() + lane() % 16, 2 * i + lane() / 16), value) };
    }
}

fn producer(maps: &[TensorMap; 4]) {
    for chunk in 0..CHUNKS {
        let (stage, round) = (chunk as u32 % 2, chunk / 2);
        wait(KV_EMPTY + stage, round + 1);
        // SAFETY: the simulator checks.
        unsafe { mbarrier_arrive_expect_tx_if(barrier(KV_FULL + stage), 2 * TILE_BYTES, true) };
        load(&maps[1], chunk, KV + 2 * stage, KV_FULL + stage);
        load(&maps[2], chunk, KV + 2 * stage + 1, KV_FULL + stage);
        wait(Q_EMPTY, chunk + 1);
        // SAFETY: the simulator checks.
        unsafe { mbarrier_arrive_expect_tx_if(barrier(Q_FULL), TILE_BYTES, true) };
        load(&maps[0], chunk, Q, Q_FULL);
    }
}

/// Vᵀ K is Sᵀ: `[e, d]`.
fn state(flaw: Flaw) {
    // Vᵀ out of V `[token, e]`.
    let fragments = |v: u32| {
        let (row, column) = (lane() % 8 + lane() / 16 * 8, 2 * warp() + lane() / 8 % 2);
        // SAFETY: the simulator checks.
        core::array::from_fn(|step| unsafe { ldmatrix_x4_trans(unit(v, 16 * step as u32 + row, column)) })
    };
    let mut s = [0.0; 32];
    for chunk in 0..CHUNKS {
        let (stage, round) = (chunk as u32 % 2, chunk / 2);
        if flaw != Flaw::NoStateEmptyWait {
            wait(STATE_EMPTY + stage, round + 1);
        }
        if flaw == Flaw::PublishedBeforeStored {
            arrive(STATE_FULL + stage);
        }
        store(&s, tile(STATE + stage));
        if flaw != Flaw::NoProxyFence {
            fence_proxy_async();
        }
        if flaw != Flaw::PublishedBeforeStored {
            arrive(STATE_FULL + stage);
        }
        wait(KV_FULL + stage, round);
        let v: [[u32; 4]; 4] = fragments(tile(KV + 2 * stage + 1));
        multiply::<1>(&mut s, &v, tile(KV + 2 * stage), true);
        wgmma_wait_group::<0, 32>(&mut s);
        arrive(KV_EMPTY + stage);
    }
}

fn output(map: &TensorMap, flaw: Flaw) {
    for chunk in 0..CHUNKS {
        let (stage, round) = (chunk as u32 % 2, chunk / 2);
        wait(Q_FULL, chunk);
        let (row, half) = (16 * warp() + lane() % 16, lane() / 16);
        // SAFETY: the simulator checks.
        let q = core::array::from_fn(|step| unsafe { ldmatrix_x4(unit(tile(Q), row, 2 * step as u32 + half)) });
        arrive(Q_EMPTY);
        if flaw != Flaw::NoStateFullWait {
            wait(STATE_FULL + stage, round);
        }
        let mut o = [0.0; 32];
        multiply::<0>(&mut o, &q, tile(STATE + stage), false);
        if flaw == Flaw::StateReleasedEarly {
            arrive(STATE_EMPTY + stage);
        }
        wgmma_wait_group::<0, 32>(&mut o);
        if flaw != Flaw::StateReleasedEarly {
            arrive(STATE_EMPTY + stage);
        }
        cp_async_bulk_wait_group_read::<0>();
        syncwarp();
        store(&o, tile(O));
        fence_proxy_async();
        syncwarp();
        // SAFETY: the simulator checks.
        unsafe {
            let at = [0, (N * chunk) as i32 + 16 * warp() as i32, 0, 0];
            let from = tile(O) + 2048 * warp();
            cp_async_bulk_tensor_store_if(map, at, from, createpolicy_evict_first(), lane() == 0);
        }
        cp_async_bulk_commit_group();
    }
    cp_async_bulk_wait_group_read::<0>();
}

fn kernel(maps: &[TensorMap; 4], flaw: Flaw) {
    let counts = [1, 1, 4, 4, 1, 4, 4, 4, 4, 4];
    for (index, count) in (0..).zip(counts) {
        // SAFETY: the simulator checks.
        unsafe { mbarrier_init_if(barrier(index), count, thread_idx_x() == 0) };
    }
    fence_mbarrier_init();
    syncthreads();
    match thread_idx_x() / 128 {
        0 => state(flaw),
        1 => output(&maps[3], flaw),
        _ if thread_idx_x() == 256 => producer(maps),
        _ => {}
    }
}

/// -1, 0 or 1: every sum and every state is exact.
fn value(tensor: usize, row: usize, column: usize) -> f32 {
    ((row * row + 3 * column + row * column + 5 * tensor) % 3) as f32 - 1.0
}

fn expected() -> Vec<f16> {
    let mut o = Vec::new();
    let mut state = vec![[0f32; N]; N];
    for chunk in 0..CHUNKS {
        let rows = N * chunk..N * (chunk + 1);
        for row in rows.clone() {
            o.extend((0..N).map(|e| f16::from_f32((0..N).map(|d| value(0, row, d) * state[d][e]).sum())));
        }
        for row in rows {
            for (d, state) in state.iter_mut().enumerate() {
                (0..N).for_each(|e| state[e] += value(1, row, d) * value(2, row, e));
            }
        }
    }
    o
}

fn run(schedule: Schedule, flaw: Flaw) -> Result<Vec<f16>, Fault> {
    let len = CHUNKS * N * N;
    let input = |tensor| Buffer::new((0..len).map(|i| f16::from_f32(value(tensor, i / N, i % N))).collect::<Vec<_>>());
    let inputs = [input(0), input(1), input(2)];
    let mut o = Buffer::new(vec![f16::NAN; len]);
    let mut memory = GlobalMemory::new();
    let map = |address, box_rows| {
        let (dims, strides) = ([N as u32, (CHUNKS * N) as u32, 1, 1], [2 * N as u64, 2 * len as u64, 2 * len as u64]);
        encode_tensor_map(&TensorMapSource { address, dims, strides, box_rows })
    };
    let [q, k, v] = inputs.each_ref().map(|data| map(memory.input("input", data), 64));
    let maps = [q, k, v, map(memory.output("o", &mut o), 16)];
    let base = Launch { name: "roles", grid: [1; 3], threads: 384, shared_bytes: SHARED_BYTES, schedule };
    launch(&base, &memory, &|| kernel(&maps, flaw))?;
    Ok(o.to_vec())
}

#[test]
fn roles_pass_on_what_they_have() {
    let expected = expected();
    for schedule in SCHEDULES {
        let o = run(schedule, Flaw::None).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
        assert!(o == expected, "{schedule:?}");
    }
}

#[test]
fn roles_wait_for_each_other() {
    for schedule in SCHEDULES {
        let fault = |flaw| run(schedule, flaw).expect_err("the broken kernel must not pass").kind;
        let kind = fault(Flaw::NoProxyFence);
        assert!(
            matches!(kind, FaultKind::MissingProxyFence { access, writer: ..128 } if access.action == Action::Product),
            "{kind}"
        );
        let kind = fault(Flaw::PublishedBeforeStored);
        assert!(
            matches!(kind, FaultKind::Race { access, .. } | FaultKind::Uninitialised { access, .. } if matches!(access.action, Action::Product | Action::MatrixStore)),
            "{kind}"
        );
        for flaw in [Flaw::NoStateEmptyWait, Flaw::StateReleasedEarly] {
            let kind = fault(flaw);
            assert!(
                matches!(kind, FaultKind::Race { access, other: 128..256, other_wrote: false } if access.action == Action::MatrixStore)
                    || matches!(kind, FaultKind::Race { access, other: ..128, other_wrote: true } if access.action == Action::Product),
                "{flaw:?}: {kind}"
            );
        }
        let kind = fault(Flaw::NoStateFullWait);
        assert!(
            matches!(kind, FaultKind::Race { access, .. } | FaultKind::Uninitialised { access, .. } if matches!(access.action, Action::Product | Action::MatrixStore)),
            "{kind}"
        );
    }
}
