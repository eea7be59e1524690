//! HTTP server of a program: connections of a listener, and parameters of a query.

mod query;
mod serving;

pub use query::{decoded, parameter, raw};
pub use serving::{STOP_PATIENCE, Turns, http_limits, serve};
