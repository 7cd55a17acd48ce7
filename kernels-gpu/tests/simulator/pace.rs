//! How long the simulator takes: `cargo test --release pace -- --ignored --nocapture`.

use std::time::Instant;

use lightning_attention_kernels::device::sim::{Buffer, GlobalMemory, Launch, Schedule, launch};
use lightning_attention_kernels::device::*;

const CHUNKS: u32 = 16;
const ROW_BYTES: u32 = 256;
const STAGE_BYTES: u32 = 64 * ROW_BYTES;

/// Per chunk of 64 rows and warp: 250 products and 100 fragments; per thread 20 copies and two barriers.
fn kernel(source: u64, output: u64) {
    let t = thread_idx_x();
    let lane = t % 32;
    let mut sums = [[0f32; 4]; 10];
    for chunk in 0..CHUNKS {
        for i in 0..20 {
            let piece = u64::from((chunk * 20 + i) * 128 + t);
            // SAFETY: the simulator checks.
            unsafe { cp_async_cg_16(dynamic_smem() + 16 * (i * 128 + t), (source + 16 * piece) as *const u8, 16) };
        }
        cp_async_commit_group();
        cp_async_wait_group::<0>();
        syncthreads();
        for i in 0..100 {
            let at = dynamic_smem() + i % 2 * STAGE_BYTES + lane * ROW_BYTES + i % 16 * 16;
            // SAFETY: the simulator checks.
            let x = unsafe { if i % 2 == 0 { ldmatrix_x4(at) } else { ldmatrix_x4_trans(at) } };
            for j in 0..if i % 2 == 0 { 3 } else { 2 } {
                mma_m16n8k16_bf16(&mut sums[((i + j) % 10) as usize], x, [x[1], x[2]]);
            }
        }
        syncthreads();
    }
    let sum = sums.as_flattened().iter().sum();
    // SAFETY: the simulator checks.
    unsafe { st_global_f32((output + 4 * u64::from(t)) as *mut f32, sum) };
}

#[test]
#[ignore = "a measurement"]
fn pace() {
    let source = Buffer::new(vec![0u8; (CHUNKS * 20 * 128 * 16) as usize]);
    for schedule in [Schedule::InOrder, Schedule::InOrder, Schedule::Seeded(1)] {
        let mut output = [0f32; 128];
        let mut memory = GlobalMemory::new();
        let (source, output) = (memory.input("source", &source), memory.output("output", &mut output));
        let base = Launch { name: "pace", grid: [1; 3], threads: 128, shared_bytes: 20 * 128 * 16, schedule };
        let start = Instant::now();
        launch(&base, &memory, &|| kernel(source, output)).unwrap();
        println!("{schedule:?}: {:.2} ms per chunk", start.elapsed().as_secs_f64() * 1e3 / f64::from(CHUNKS));
    }
}
