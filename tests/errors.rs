//! Bad input is refused with an error that names the argument.

use lightning_attention::{Error, Problem};

#[test]
fn dimensions_out_of_range() {
    let got = Problem::new(1, 1, 1, 257, 64).validate();
    assert_eq!(got, Err(Error::Dimension { argument: "head_dim", got: 257, expected: "1 to 256" }));
}
