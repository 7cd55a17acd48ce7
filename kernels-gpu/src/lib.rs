//! The kernels of [`lightning-attention`](https://docs.rs/lightning-attention), and the contract they share with the host.
//!
//! Compiled three ways: for `nvptx64-nvidia-cuda` it yields the PTX that the host crate embeds; for the host without
//! features it is only the contract ([`abi`], [`variants`]); with feature `sim` the very same kernel source runs
//! on the CPU, one coroutine per GPU thread, with every memory access checked.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, stdarch_nvptx, asm_experimental_arch))]

#[cfg(feature = "sim")]
extern crate std;

pub mod abi;
#[cfg(any(target_arch = "nvptx64", feature = "sim"))]
mod decay;
#[cfg(any(target_arch = "nvptx64", feature = "sim"))]
pub mod device;
#[cfg(any(target_arch = "nvptx64", feature = "sim"))]
mod element;
#[cfg(any(target_arch = "nvptx64", feature = "sim"))]
pub mod kernels;
#[cfg(any(target_arch = "nvptx64", feature = "sim"))]
mod tile;
pub mod variants;
