//! HTTP server of a program: connections of a listener, limits of requests, and parameters of a
//! query.

mod limits;
mod query;
mod serving;

pub use limits::{BodyLimit, Content, MAX_ADDRESS, MAX_HEADER, MAX_HEADER_FIELDS, Refusal};
pub use query::{decoded, parameter, raw};
pub use serving::{STOP_PATIENCE, Turns, http_limits, serve};
