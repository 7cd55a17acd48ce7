//! Register layouts and rounding, against their definitions in the PTX ISA.

use std::cell::RefCell;

use half::{bf16, f16};
use lightning_attention_kernels::device::sim::{GlobalMemory, launch};
use lightning_attention_kernels::device::*;

use super::one_block;

#[test]
fn ldmatrix_gives_each_lane_two_elements_of_a_row() {
    let results = RefCell::new(vec![([0; 4], [0; 4]); 32]);
    launch(&one_block("ldmatrix", 32), &GlobalMemory::new(), &|| {
        let lane = thread_idx_x();
        // Element c of row r (of 32) is 8 r + c.
        let row: [u32; 4] = core::array::from_fn(|i| {
            let first = 8 * lane + 2 * i as u32;
            first | (first + 1) << 16
        });
        // SAFETY: the simulator checks.
        unsafe {
            let address = dynamic_smem() + 16 * lane;
            st_shared_b32x4(address, row);
            syncwarp();
            results.borrow_mut()[lane as usize] = (ldmatrix_x4(address), ldmatrix_x4_trans(address));
        }
    })
    .unwrap();
    let element = |matrix: usize, row: usize, column: usize| (64 * matrix + 8 * row + column) as u32;
    for (lane, (plain, transposed)) in results.into_inner().into_iter().enumerate() {
        let (g, t) = (lane / 4, lane % 4);
        for i in 0..4 {
            assert_eq!(plain[i], element(i, g, 2 * t) | element(i, g, 2 * t + 1) << 16, "lane {lane}");
            assert_eq!(transposed[i], element(i, 2 * t, g) | element(i, 2 * t + 1, g) << 16, "lane {lane}");
        }
    }
}

#[test]
fn mma_fragments_are_where_the_isa_says() {
    // One non-zero element of A and one of B at a time; D shows where they meet.
    for (row, k, column) in (0..16).flat_map(|row| (0..16).map(move |k| (row, k, (3 * row + 5 * k) % 8))) {
        let d = RefCell::new([[0f32; 8]; 16]);
        launch(&one_block("mma", 32), &GlobalMemory::new(), &|| {
            let (g, t) = (thread_idx_x() as usize / 4, thread_idx_x() as usize % 4);
            let a_at = |r, c| if (r, c) == (row, k) { 2.0 } else { 0.0 };
            let b_at = |r, c| if (r, c) == (k, column) { 3.0 } else { 0.0 };
            let a = [(g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)]
                .map(|(r, c)| cvt_rn_bf16x2_f32(a_at(r, c), a_at(r, c + 1)));
            let b = [2 * t, 2 * t + 8].map(|r| cvt_rn_bf16x2_f32(b_at(r, g), b_at(r + 1, g)));
            let mut fragment = [1.0; 4];
            mma_m16n8k16_bf16(&mut fragment, a, b);
            let mut d = d.borrow_mut();
            [d[g][2 * t], d[g][2 * t + 1], d[g + 8][2 * t], d[g + 8][2 * t + 1]] = fragment;
        })
        .unwrap();
        for (r, values) in d.into_inner().into_iter().enumerate() {
            for (c, value) in values.into_iter().enumerate() {
                assert_eq!(value, if (r, c) == (row, column) { 7.0 } else { 1.0 }, "A[{row}, {k}] B[{k}, {column}]");
            }
        }
    }
}

#[test]
fn conversions_round_to_nearest_even() {
    let bf16x2 = |x: f32| cvt_rn_bf16x2_f32(x, 0.0) as u16;
    assert_eq!(cvt_rn_bf16x2_f32(1.0, -2.0), 0xc000_3f80);
    assert_eq!(cvt_rn_f16x2_f32(1.0, -2.0), 0xc000_3c00);
    // Halfway between two bf16: to the even one; a little more: up.
    assert_eq!(bf16x2(f32::from_bits(0x3f80_8000)), 0x3f80);
    assert_eq!(bf16x2(f32::from_bits(0x3f81_8000)), 0x3f82);
    assert_eq!(bf16x2(f32::from_bits(0x3f80_8001)), 0x3f81);
    assert_eq!(bf16x2(f32::MAX), 0x7f80);
    assert_eq!(bf16x2(f32::from_bits(1)), 0);
    // A NaN whose upper half alone would be an infinity.
    assert_eq!(bf16x2(f32::from_bits(0x7f80_0001)), 0x7fff);
    assert_eq!(cvt_rn_f16x2_f32(f32::NAN, 65520.0), 0x7c00_7fff);
    for bits in 0..=u16::MAX {
        let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
        let decoded = cvt_f32_f16x2(u32::from(bits) << 16)[1];
        assert!(decoded == h.to_f32() || (decoded.is_nan() && h.is_nan()), "{bits:#x}");
        if !b.is_nan() {
            assert_eq!(bf16x2(b.to_f32()), bits);
        }
        if !h.is_nan() {
            assert_eq!(cvt_rn_f16x2_f32(h.to_f32(), 0.0) as u16, bits);
        }
    }
}

#[test]
fn ex2_flushes_subnormals() {
    assert_eq!(ex2_approx_ftz(3.0), 8.0);
    assert_eq!(ex2_approx_ftz(f32::from_bits(1)), 1.0);
    assert_eq!(ex2_approx_ftz(-126.0), f32::MIN_POSITIVE);
    assert_eq!(ex2_approx_ftz(-127.0), 0.0);
    assert_eq!(ex2_approx_ftz(f32::NEG_INFINITY), 0.0);
    assert_eq!(ex2_approx_ftz(128.0), f32::INFINITY);
    assert!(ex2_approx_ftz(f32::NAN).is_nan());
}
