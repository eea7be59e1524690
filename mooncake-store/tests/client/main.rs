//! The client against a real master: embedded over loopback, and remote over RPC and TCP.

mod checksum;
mod drain;
mod faults;
#[path = "../http_support/mod.rs"]
mod http;
mod lossy;
mod parts;
mod restart;
mod scenarios;
mod support;
mod tasks;
