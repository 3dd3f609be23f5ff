//! Not built.
fn main() {}
