//! Rings of shared-memory slots between warpgroups, each slot with a *full* and an *empty* barrier.

use crate::device::{mbarrier_init_if, mbarrier_wait_parity};

/// Bytes of a barrier.
const BARRIER: u32 = 8;

/// A ring of `SLOTS` slots of `bytes` each.
#[derive(Clone, Copy)]
pub struct Ring<const SLOTS: u32> {
    slots: u32,
    bytes: u32,
    barriers: u32,
}

impl<const SLOTS: u32> Ring<SLOTS> {
    /// Bytes of its barriers.
    pub const BARRIER_BYTES: u32 = 2 * SLOTS * BARRIER;

    /// The ring at `slots`, with its barriers at `barriers`.
    #[inline(always)]
    pub fn new(slots: u32, bytes: u32, barriers: u32) -> Self {
        Ring { slots, bytes, barriers }
    }

    /// Makes the barriers: `full` arrivals fill a slot, `empty` arrivals free it.
    ///
    /// # Safety
    /// Called by all threads, one of which passes `one_thread`, before any other use and a barrier.
    #[inline(always)]
    pub unsafe fn init(&self, full: u32, empty: u32, one_thread: bool) {
        let mut slot = 0;
        while slot < SLOTS {
            // SAFETY: the caller's contract.
            unsafe {
                mbarrier_init_if(self.barriers + slot * BARRIER, full, one_thread);
                mbarrier_init_if(self.barriers + (SLOTS + slot) * BARRIER, empty, one_thread);
            }
            slot += 1;
        }
    }

    /// The use of the ring that fills it for the `use_idx`-th time.
    #[inline(always)]
    pub fn at(&self, use_idx: u32) -> Slot {
        let slot = use_idx % SLOTS;
        Slot {
            address: self.slots + slot * self.bytes,
            full: self.barriers + slot * BARRIER,
            empty: self.barriers + (SLOTS + slot) * BARRIER,
            parity: (use_idx / SLOTS) & 1,
        }
    }
}

/// One filling of a slot.
#[derive(Clone, Copy)]
pub struct Slot {
    /// Where the slot is.
    pub address: u32,
    /// Its full barrier.
    pub full: u32,
    /// Its empty barrier.
    pub empty: u32,
    parity: u32,
}

impl Slot {
    /// Waits until the slot is filled.
    ///
    /// # Safety
    /// This thread is less than two fillings behind.
    #[inline(always)]
    pub unsafe fn wait_full(&self) {
        // SAFETY: the caller's contract.
        unsafe { mbarrier_wait_parity(self.full, self.parity) }
    }

    /// Waits until the filling before is freed; the first filling of a slot need not wait.
    ///
    /// # Safety
    /// This thread is less than two fillings behind.
    #[inline(always)]
    pub unsafe fn wait_empty(&self) {
        // SAFETY: the caller's contract.
        unsafe { mbarrier_wait_parity(self.empty, self.parity ^ 1) }
    }
}
