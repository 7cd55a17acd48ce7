//! Asynchronous products of a warpgroup.
//!
//! A product is computed when it is issued, but its accumulator holds signalling NaNs that number it until
//! `wgmma_wait_group` gets to see it: so it may move, but not be computed with.

use std::boxed::Box;
use std::format;
use std::vec;
use std::vec::Vec;

use super::bulk::swizzle_128b;
use super::clocks::{Epoch, View};
use super::fault::{Action, FaultKind, Product};
use super::machine::Machine;
use super::matrix::{LANES, decode_bf16, decode_f16};

/// Threads of a warpgroup.
pub(super) const GROUP: usize = 128;

/// Rows and depth of a product.
const ROWS: usize = 64;
const DEPTH: usize = 16;

/// A signalling NaN, with the number of the accumulator in its low bits: whatever computes with it makes it quiet.
const POISON: u32 = 0xff80_0000;
const NUMBER: u32 = (1 << 22) - 1;

/// What the threads of a warpgroup hand in to a product, and get back.
pub(super) struct GroupExchange {
    operands: Vec<Operands>,
    in_flight: Vec<Accumulator>,
    /// The accumulator of the last product.
    number: u32,
}

#[derive(Clone, Copy)]
struct Operands {
    a: [u32; 4],
    /// What it adds to, if it does not add to what is in flight.
    d: [f32; 64],
    /// Number of the accumulator it adds to, if that is in flight; 0 if not.
    number: u32,
    descriptor: u64,
    accumulate: bool,
}

/// An accumulator that not every thread has collected.
struct Accumulator {
    number: u32,
    columns: usize,
    /// `[64, columns]`
    value: Vec<f32>,
    /// Per warp, the group of its last product.
    groups: [u32; 4],
    collected: usize,
}

/// The groups of a warp.
#[derive(Clone, Copy, Default)]
pub(super) struct Groups {
    /// Its reads of shared memory: group `g` ends at moment `g + 1`.
    track: Option<usize>,
    committed: u32,
    /// Of the committed ones, those waited for.
    done: u32,
    /// The last group that has a product, counted from 1.
    last: u32,
    /// Whether `wgmma_fence` came since the last commit or wait.
    fenced: bool,
}

impl Groups {
    /// Whether a product has not been waited for.
    pub(super) fn are_in_flight(&self) -> bool {
        self.last > self.done
    }
}

impl GroupExchange {
    pub(super) fn new() -> Self {
        let none = Operands { a: [0; 4], d: [0.0; 64], number: 0, descriptor: 0, accumulate: false };
        Self { operands: vec![none; GROUP], in_flight: Vec::new(), number: 0 }
    }
}

impl GroupExchange {
    /// The number of the accumulator that `d` is, if it is in flight, or 0; an error if it was in flight.
    fn number_of(&self, d: &[f32]) -> Result<u32, Box<FaultKind>> {
        let first = d[0].to_bits();
        if first & !NUMBER == POISON && d.iter().all(|x| x.to_bits() == first) {
            return Ok(first & NUMBER);
        }
        let is_trace = |x: &f32| x.is_nan() && self.in_flight.iter().any(|d| d.number == x.to_bits() & NUMBER);
        match d.iter().any(is_trace) {
            true => Err(Box::new(FaultKind::TouchedAccumulator)),
            false => Ok(0),
        }
    }
}

/// Where the descriptor says that B begins, and how it goes on.
struct Descriptor {
    start: u32,
    leading: u32,
    stride: u32,
}

impl Descriptor {
    fn new(bits: u64) -> Result<Self, Box<FaultKind>> {
        let field = |shift: u32| (bits >> shift & 0x3fff) as u32 * 16;
        let known = 0x3fff | 0x3fff << 16 | 0x3fff << 32 | 3 << 62;
        if bits >> 62 != 1 || bits & !known != 0 {
            let what =
                format!("the matrix descriptor {bits:#018x} is not one of 128-byte swizzle without a base offset");
            return Err(Box::new(FaultKind::Invalid { what }));
        }
        Ok(Self { start: field(0), leading: field(16), stride: field(32) })
    }

    /// Address of 8 elements of B that lie side by side: `[n, k..k + 8]`, or `[k, n..n + 8]` of a transposed B.
    fn unit(&self, transposed: bool, n: u32, k: u32) -> u32 {
        let offset = match transposed {
            false => n / 8 * self.stride + n % 8 * 128 + k * 2,
            true => n / 64 * self.leading + k / 8 * self.stride + k % 8 * 128 + n % 64 * 2,
        };
        swizzle_128b(self.start + offset)
    }
}

impl Machine {
    /// The current thread hands in the operands of a product.
    pub(super) fn hand_in(
        &mut self,
        d: &[f32],
        a: [u32; 4],
        descriptor: u64,
        accumulate: bool,
    ) -> Result<(), Box<FaultKind>> {
        let exchange = self.group_exchanges[self.current / GROUP].get_or_insert_with(GroupExchange::new);
        // What the product does not add to may be anything.
        let number = if accumulate { exchange.number_of(d)? } else { 0 };
        let operands = &mut exchange.operands[self.current % GROUP];
        (operands.a, operands.number, operands.descriptor, operands.accumulate) = (a, number, descriptor, accumulate);
        if accumulate && number == 0 {
            operands.d[..d.len()].copy_from_slice(d);
        }
        Ok(())
    }

    /// The poison of the last product of the current warpgroup.
    pub(super) fn poison(&self) -> f32 {
        let exchange = self.group_exchanges[self.current / GROUP].as_ref().expect("a product was issued");
        f32::from_bits(POISON | exchange.number)
    }

    pub(super) fn fence_products(&mut self, warp: usize) {
        self.groups[warp].fenced = true;
    }

    pub(super) fn commit_products(&mut self, warp: usize) {
        let groups = &mut self.groups[warp];
        groups.committed += 1;
        groups.fenced = false;
    }

    /// All but the `most_recent` groups of a warp are done.
    pub(super) fn wait_for_products(&mut self, warp: usize, most_recent: u32) {
        let groups = &mut self.groups[warp];
        groups.fenced = false;
        groups.done = groups.committed.saturating_sub(most_recent);
        if let Some(track) = groups.track {
            (warp * LANES..(warp + 1) * LANES).for_each(|lane| self.clocks.see(lane, track, groups.done));
        }
    }

    /// After a wait: the value of an accumulator, if that is done.
    pub(super) fn collect(&mut self, d: &mut [f32]) -> Result<(), Box<FaultKind>> {
        let (thread, warp) = (self.current % GROUP, self.current / LANES);
        let Some(exchange) = &mut self.group_exchanges[self.current / GROUP] else { return Ok(()) };
        let number = exchange.number_of(d)?;
        let Some(at) = exchange.in_flight.iter().position(|d| d.number == number) else { return Ok(()) };
        let accumulator = &mut exchange.in_flight[at];
        if accumulator.groups[warp % 4] > self.groups[warp].done {
            return Ok(());
        }
        if 2 * d.len() != accumulator.columns {
            return Err(Box::new(FaultKind::TouchedAccumulator));
        }
        let (row, column) = (thread / LANES * 16 + thread % LANES / 4, thread % 4 * 2);
        for (j, fragment) in d.chunks_exact_mut(4).enumerate() {
            for (half, pair) in fragment.chunks_exact_mut(2).enumerate() {
                let first = (row + 8 * half) * accumulator.columns + 8 * j + column;
                pair.copy_from_slice(&accumulator.value[first..first + 2]);
            }
        }
        accumulator.collected += 1;
        if accumulator.collected == GROUP {
            exchange.in_flight.swap_remove(at);
        }
        Ok(())
    }

    /// A product that all threads of the warpgroup of `warp` have handed in.
    pub(super) fn multiply(&mut self, warp: usize, product: Product) -> Result<(), (usize, Box<FaultKind>)> {
        let (group, first) = (warp / 4, warp / 4 * 4);
        let mut exchange = self.group_exchanges[group].take().expect("operands were handed in");
        let result = self.multiply_with(&mut exchange, first, product);
        self.group_exchanges[group] = Some(exchange);
        result.map_err(|(thread, kind)| (first * LANES + thread, kind))
    }

    fn multiply_with(
        &mut self,
        exchange: &mut GroupExchange,
        first: usize,
        product: Product,
    ) -> Result<(), (usize, Box<FaultKind>)> {
        let invalid = |thread: usize, what: &str| Err((thread, Box::new(FaultKind::Invalid { what: what.into() })));
        let Operands { descriptor, accumulate, number, .. } = exchange.operands[0];
        let columns = product.columns as usize;
        for (thread, operands) in exchange.operands.iter().enumerate() {
            if (operands.descriptor, operands.accumulate) != (descriptor, accumulate) {
                return invalid(thread, "the threads of a warpgroup do not agree on a product");
            }
            if accumulate && operands.number != number {
                return invalid(thread, "the threads of a warpgroup do not agree on an accumulator");
            }
        }
        for warp in 0..4 {
            if !self.groups[first + warp].fenced {
                return invalid(warp * LANES, "no wgmma_fence between the last commit or wait and this product");
            }
        }
        let b = self.read_b(first, product, descriptor).map_err(|kind| (0, kind))?;

        let pending = exchange.in_flight.iter().position(|d| d.number == number && number != 0);
        let mut value = match (pending, accumulate) {
            (Some(at), true) => {
                let old = exchange.in_flight.swap_remove(at);
                if old.columns != columns {
                    return invalid(0, "the accumulator in flight has another shape");
                }
                old.value
            }
            (None, true) if number != 0 => {
                return invalid(0, "it adds to a copy of an accumulator that was collected elsewhere");
            }
            (None, true) => gather(&exchange.operands, columns),
            (_, false) => vec![0.0; ROWS * columns],
        };
        let a = decode_a(&exchange.operands, product.bf16);
        for (d, a) in value.chunks_exact_mut(columns).zip(&a) {
            for (&a, b) in a.iter().zip(b.chunks_exact(columns)) {
                d.iter_mut().zip(b).for_each(|(d, b)| *d += a * b);
            }
        }
        exchange.number = exchange.number % NUMBER + 1;
        let groups = core::array::from_fn(|warp| self.groups[first + warp].committed + 1);
        self.groups[first..first + 4].iter_mut().zip(groups).for_each(|(warp, group)| warp.last = group);
        let number = exchange.number;
        exchange.in_flight.push(Accumulator { number, columns, value, groups, collected: 0 });
        Ok(())
    }

    /// B as `[k, n]`. Every warp reads all of it, until its group is waited for.
    fn read_b(&mut self, first: usize, product: Product, descriptor: u64) -> Result<Vec<f32>, Box<FaultKind>> {
        let descriptor = Descriptor::new(descriptor)?;
        for warp in first..first + 4 {
            if self.groups[warp].track.is_none() {
                self.groups[warp].track = Some(self.track((warp * LANES) as u32));
            }
        }
        self.clocks.settle_group(first);
        let clocks = &self.clocks;
        let until: [View<'_>; 4] = core::array::from_fn(|i| {
            let Groups { track, committed, .. } = self.groups[first + i];
            let track = track.expect("every warp has its track");
            let mut view = clocks.warp_view((first + i) * LANES);
            view.seen = view.seen_by_all;
            View { epoch: Epoch::new(track, committed + 1), ..view }
        });
        let seen = View { seen_by_all: clocks.group_floor(), ..clocks.view(first * LANES) };
        let columns = product.columns;
        let mut bits = vec![0u16; DEPTH * columns as usize];
        let mut read = |n: u32, k: u32| {
            let addr = descriptor.unit(product.transposed, n, k);
            let unit = self.shared.load_async(Action::Product, addr, &seen, &until)?;
            let (pairs, _) = unit.as_chunks::<2>();
            Ok::<[u16; 8], Box<FaultKind>>(core::array::from_fn(|i| u16::from_le_bytes(pairs[i])))
        };
        if product.transposed {
            for k in 0..DEPTH as u32 {
                for n in (0..columns).step_by(8) {
                    bits[(k * columns + n) as usize..][..8].copy_from_slice(&read(n, k)?);
                }
            }
        } else {
            for n in 0..columns {
                for k in (0..DEPTH as u32).step_by(8) {
                    let unit = read(n, k)?;
                    (0..8).for_each(|i| bits[((k + i) * columns + n) as usize] = unit[i as usize]);
                }
            }
        }
        let mut values = vec![0.0; bits.len()];
        let decode = if product.bf16 { decode_bf16 } else { decode_f16 };
        decode(&bits, &mut values);
        Ok(values)
    }
}

/// A as `[64, 16]`, out of fragments as `mma.m16n8k16` takes them, 16 rows a warp.
fn decode_a(operands: &[Operands], bf16: bool) -> [[f32; DEPTH]; ROWS] {
    let mut bits = [[0u16; DEPTH]; ROWS];
    for (thread, operands) in operands.iter().enumerate() {
        let (g, t) = (thread / LANES * 16 + thread % LANES / 4, thread % 4);
        for (i, register) in operands.a.into_iter().enumerate() {
            let (row, k) = (g + i % 2 * 8, 2 * t + i / 2 * 8);
            (bits[row][k], bits[row][k + 1]) = (register as u16, (register >> 16) as u16);
        }
    }
    let mut values = [[0.0; DEPTH]; ROWS];
    let decode = if bf16 { decode_bf16 } else { decode_f16 };
    decode(bits.as_flattened(), values.as_flattened_mut());
    values
}

/// D as `[64, columns]`.
fn gather(operands: &[Operands], columns: usize) -> Vec<f32> {
    let mut value = vec![0.0; ROWS * columns];
    for (thread, operands) in operands.iter().enumerate() {
        let (row, column) = (thread / LANES * 16 + thread % LANES / 4, thread % 4 * 2);
        for (j, fragment) in operands.d.chunks_exact(4).take(columns / 8).enumerate() {
            for (half, pair) in fragment.chunks_exact(2).enumerate() {
                let first = (row + 8 * half) * columns + 8 * j + column;
                value[first..first + 2].copy_from_slice(pair);
            }
        }
    }
    value
}
