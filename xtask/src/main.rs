//! The task runner: `cargo xtask help`.
fn main() {}
