//! Swizzled panels in shared memory and the addresses `ldmatrix` wants.
//!
//! A panel row is 128 bytes, eight 16-byte units; unit `u` of row `r` lies at unit `u ^ (r & 7)`, so that eight rows
//! of one logical unit fall into different banks.

/// Bytes of a panel row.
pub const ROW_BYTES: u32 = 128;
/// Bytes of a panel of 64 rows.
pub const PANEL_BYTES: u32 = 64 * ROW_BYTES;

/// Offset of a 16-byte unit in a panel.
#[inline(always)]
pub const fn unit_offset(row: u32, unit: u32) -> u32 {
    row * ROW_BYTES + ((unit ^ (row & 7)) << 4)
}

/// The unit one lane points `ldmatrix.x4` at: a 16×16 block at row 0, column 0 of a panel.
#[derive(Clone, Copy)]
pub struct BlockAddress(u32);

impl BlockAddress {
    /// Blocks in the order (rows 0–7, columns 0–7), (8–15, 0–7), (0–7, 8–15), (8–15, 8–15): an A operand as it
    /// lies, or a B operand stored `[k, n]`, transposed.
    #[inline(always)]
    pub fn rows_first(lane: u32) -> Self {
        BlockAddress(unit_offset(lane & 15, lane >> 4))
    }

    /// Blocks in the order (0–7, 0–7), (0–7, 8–15), (8–15, 0–7), (8–15, 8–15): a B operand stored `[n, k]`, or an A
    /// operand stored `[k, m]`, transposed.
    #[inline(always)]
    pub fn columns_first(lane: u32) -> Self {
        BlockAddress(unit_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1))
    }

    /// Address of the block at `row` (a multiple of 8) and column `16 · block`, counting panels of 4 blocks.
    #[inline(always)]
    pub fn at(self, operand: u32, row: u32, block: u32) -> u32 {
        self.at_of_tall(operand, row, block, PANEL_BYTES)
    }

    /// The same in an operand whose panels of `panel_bytes` have more or fewer than 64 rows.
    #[inline(always)]
    pub fn at_of_tall(self, operand: u32, row: u32, block: u32, panel_bytes: u32) -> u32 {
        // The block's two units are even and odd, so adding them is a XOR, which commutes with the swizzle.
        operand + (self.0 ^ ((block & 3) << 5)) + row * ROW_BYTES + (block >> 2) * panel_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_a_permutation_and_columns_hit_distinct_banks() {
        for row in 0..64 {
            let mut seen = [false; 8];
            for unit in 0..8 {
                seen[((unit_offset(row, unit) % ROW_BYTES) >> 4) as usize] = true;
            }
            assert_eq!(seen, [true; 8]);
        }
        for unit in 0..8 {
            for row in (0..64).step_by(8) {
                let mut seen = [false; 8];
                for r in 0..8 {
                    seen[((unit_offset(row + r, unit) % ROW_BYTES) >> 4) as usize] = true;
                }
                assert_eq!(seen, [true; 8]);
            }
        }
    }

    #[test]
    fn block_addresses_follow_the_swizzle() {
        for lane in 0..32 {
            for row in (0..64).step_by(8) {
                for block in 0..8 {
                    let panel = (block / 4) * PANEL_BYTES;
                    let unit = 2 * (block % 4);
                    if row + (lane & 15) < 64 {
                        let expected = panel + unit_offset(row + (lane & 15), unit + (lane >> 4));
                        assert_eq!(BlockAddress::rows_first(lane).at(0, row, block), expected);
                    }
                    let r = row + (lane & 7) + 8 * (lane >> 4);
                    if r < 64 {
                        let expected = panel + unit_offset(r, unit + ((lane >> 3) & 1));
                        assert_eq!(BlockAddress::columns_first(lane).at(0, row, block), expected);
                    }
                }
            }
        }
    }
}
