//! The backward pass over the recorded shapes.

mod common;

use criterion::{Criterion, criterion_group, criterion_main};

fn backward(criterion: &mut Criterion) {
    common::criterion_run::run(criterion, common::Pass::Backward);
}

criterion_group!(benches, backward);
criterion_main!(benches);
