//! Matrix descriptors of `wgmma` (PTX ISA 9.7.15.5.1): a swizzled operand in shared memory in 64 bits.
//!
//! | bits | field | here |
//! |---|---|---|
//! | 0–13 | address / 16 | |
//! | 16–29 | leading offset / 16 | panel to panel, for a B of 128 columns stored `[k, n]` |
//! | 32–45 | stride offset / 16 | 8 rows to the next 8: 1024 bytes |
//! | 62–63 | swizzle | 1: 128 bytes |

use super::shared::{PANEL_BYTES, ROW_BYTES};

/// The upper half of every descriptor: stride and swizzle.
const UPPER: u32 = (1 << 30) | (8 * ROW_BYTES / 16);

/// An operand: the lower half of its descriptors. Steps only add to the address, and never carry out of its field.
#[derive(Clone, Copy)]
pub struct Descriptor(u32);

impl Descriptor {
    /// The operand whose first panel is at `operand`.
    #[inline(always)]
    pub const fn new(operand: u32) -> Self {
        Self::of_tall(operand, PANEL_BYTES)
    }

    /// The same where panels of `panel_bytes` have more or fewer than 64 rows.
    #[inline(always)]
    pub const fn of_tall(operand: u32, panel_bytes: u32) -> Self {
        Descriptor((operand & 0x3_ffff) >> 4 | (panel_bytes / 16) << 16)
    }

    #[inline(always)]
    const fn at(self, offset: u32) -> u64 {
        (UPPER as u64) << 32 | (self.0 + offset / 16) as u64
    }

    /// Step `k` of 16 of an operand stored `[n, k]`: 32 bytes on in a row; four steps to a panel, of `panel_bytes`.
    #[inline(always)]
    pub const fn columns(self, step: u32, panel_bytes: u32) -> u64 {
        self.at((step % 4) * 32 + (step / 4) * panel_bytes)
    }

    /// Step `k` of 16 of an operand stored `[k, n]`: 16 rows on.
    #[inline(always)]
    pub const fn rows(self, step: u32) -> u64 {
        self.at(step * 16 * ROW_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields() {
        let operand = Descriptor::new(0x2_4c00);
        let d = operand.rows(0);
        assert_eq!((d & 0x3fff) << 4, 0x2_4c00);
        assert_eq!((d >> 16 & 0x3fff) << 4, 8192);
        assert_eq!((d >> 32 & 0x3fff) << 4, 1024);
        assert_eq!(d >> 62, 1);
        assert_eq!((operand.columns(5, 8192) - d) << 4, 8192 + 32);
        assert_eq!((operand.rows(3) - d) << 4, 3 * 2048);
    }
}
