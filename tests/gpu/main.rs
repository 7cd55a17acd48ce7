//! The CUDA backend on a device.
//!
//! Without the feature `cuda` or without a device the tests say so and pass, unless `LIGHTNING_ATTENTION_REQUIRE_GPU=1`,
//! which makes that a failure. With `LIGHTNING_ATTENTION_RECORD=<path>` the errors are appended to that CSV file.

#[cfg(feature = "cuda")]
#[path = "../../benches/common/mod.rs"]
mod bench;
#[cfg(feature = "cuda")]
#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "cuda")]
mod contract;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod shapes;
#[cfg(feature = "cuda")]
mod streams;
#[cfg(feature = "cuda")]
mod table;

/// Reports why nothing is tested.
///
/// # Panics
/// When a GPU is required.
fn skip(reason: &str) {
    let required = std::env::var_os("LIGHTNING_ATTENTION_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(!required, "a GPU is required: {reason}");
    eprintln!("skipped: {reason}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn device() {
    skip("built without the feature `cuda`");
}
