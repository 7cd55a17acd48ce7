//! Matrix descriptors of `wgmma` (PTX ISA 9.7.15.5.1): a swizzled operand in shared memory in 64 bits.
//!
//! | bits | field | here |
//! |---|---|---|
//! | 0–13 | address / 16 | |
//! | 16–29 | leading offset / 16 | panel to panel, for a B of 128 columns stored `[k, n]` |
//! | 32–45 | stride offset / 16 | 8 rows to the next 8: 1024 bytes |
//! | 62–63 | swizzle | 1: 128 bytes |

use super::shared::{PANEL_BYTES, ROW_BYTES};

/// An operand, or one step of it.
#[derive(Clone, Copy)]
pub struct Descriptor(pub u64);

impl Descriptor {
    /// The operand whose first panel is at `operand`.
    #[inline(always)]
    pub const fn new(operand: u32) -> Self {
        Self::of_tall(operand, PANEL_BYTES)
    }

    /// The same where panels of `panel_bytes` have more or fewer than 64 rows.
    #[inline(always)]
    pub const fn of_tall(operand: u32, panel_bytes: u32) -> Self {
        let leading = (panel_bytes / 16) as u64;
        let stride = (8 * ROW_BYTES / 16) as u64;
        Descriptor(((operand & 0x3_ffff) >> 4) as u64 | leading << 16 | stride << 32 | 1 << 62)
    }

    /// Step `k` of 16 of an operand stored `[n, k]`: 32 bytes on in a row; four steps to a panel, of `panel_bytes`.
    #[inline(always)]
    pub const fn columns(self, step: u32, panel_bytes: u32) -> u64 {
        self.0 + ((step % 4) * 2 + (step / 4) * (panel_bytes / 16)) as u64
    }

    /// Step `k` of 16 of an operand stored `[k, n]`: 16 rows on.
    #[inline(always)]
    pub const fn rows(self, step: u32) -> u64 {
        self.0 + (step * 16 * ROW_BYTES / 16) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields() {
        let d = Descriptor::new(0x2_4c00);
        assert_eq!((d.0 & 0x3fff) << 4, 0x2_4c00);
        assert_eq!((d.0 >> 16 & 0x3fff) << 4, 8192);
        assert_eq!((d.0 >> 32 & 0x3fff) << 4, 1024);
        assert_eq!(d.0 >> 62, 1);
        assert_eq!((d.columns(5, 8192) - d.0) << 4, 8192 + 32);
        assert_eq!((d.rows(3) - d.0) << 4, 3 * 2048);
    }
}
