//! Tests on real verbs: `cargo xtask rdma-test` runs them in a virtual machine with `rxe0` and
//! `rxe1`, two Soft-RoCE devices at the ends of one cable. No test depends on speed.

mod conformance;
mod connections;
mod faults;
mod numa;
mod other_process;
mod processes;
mod support;
mod transfers;
