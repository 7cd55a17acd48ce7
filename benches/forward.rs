//! The forward pass over the recorded shapes.

mod common;

use criterion::{Criterion, criterion_group, criterion_main};

fn forward(criterion: &mut Criterion) {
    common::criterion_run::run(criterion, common::Pass::Forward);
}

criterion_group!(benches, forward);
criterion_main!(benches);
