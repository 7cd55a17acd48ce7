//! Lightning Attention-2 (causal linear attention with per-head decay), forward and backward.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(all(test, not(feature = "cuda")))]
#[path = "cuda/embedded.rs"]
mod embedded;
mod error;
pub mod plan;
pub mod problem;
pub mod reference;
mod slopes;
mod view;

pub use error::{Error, Result};
pub use plan::Plan;
pub use problem::Problem;
pub use slopes::Slopes;
pub use view::{Backward, DType, Element, Extent, Forward, Layout, Strides, View, ViewMut};
