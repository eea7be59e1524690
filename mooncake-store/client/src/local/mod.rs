//! Shared clients: one node of the cluster for many processes of a host.
//!
//! The *daemon* ([`LocalServer`], in the program `mooncake_client`) is an ordinary
//! [`Client`](crate::Client) that also listens on a Unix socket. A *shared client*
//! ([`LocalClient`]) contributes no memory to the cluster, and its only connections are to that
//! socket. The shared client creates its own memory (memfds with a sealed size) and sends the file
//! descriptors to the daemon. Its calls name ranges of this memory. The daemon maps the same pages
//! and moves objects into and out of them. No byte of a value crosses the socket, and a value in
//! such memory is not copied on the way.
//!
//! A shared client allocates from its own memory; the daemon records only the files that it
//! received. The socket of a shared client closes when the process ends. If the socket closes or is
//! idle for too long, the daemon releases the memory once the transfers that use it have ended. If
//! the daemon ends, the calls of its shared clients fail. The shared clients continue with the next
//! daemon at the same path, with the same memory and addresses.
//!
//! Calls are RPCs of [`IPC_TABLE`](mooncake_protocol::message::IPC_TABLE), in the frames of the
//! calls to a master. Every connection begins with a hello in both directions, to which the client
//! may attach the file of memory that it shares.
//!
//! | file | content |
//! |---|---|
//! | `hello.rs` | first record of every connection |
//! | `server.rs`, `session.rs` | daemon: the socket, a connection with its calls |
//! | `daemon.rs`, `shared_client.rs` | daemon: state of the server, one shared client |
//! | `server_config.rs` | daemon: settings and statistics |
//! | `client.rs`, `daemon_link.rs`, `call.rs` | shared client: construction, the control connection, one call |
//! | `shared.rs`, `memory.rs` | shared client: memory that the daemon also maps, and its allocation |
//! | `objects.rs`, `writes.rs`, `pieces.rs` | shared client: operations on objects, writes, reads in pieces |
//! | `read_plan.rs` | shared client: destinations of reads into memory of the caller |
//! | `store_client.rs` | interface of full and shared clients |
//! | `call_memory.rs` | operations of both clients on memory that a program names by its address |

mod call;
#[allow(unsafe_code)]
mod call_memory;
mod client;
mod daemon;
mod daemon_link;
pub mod hello;
#[allow(unsafe_code)]
mod memory;
mod objects;
mod pieces;
mod read_plan;
mod released;
mod server;
mod server_config;
#[allow(unsafe_code)]
mod session;
mod shared;
mod shared_client;
mod socket_file;
mod store_client;
mod writes;

use std::path::PathBuf;

pub use self::call_memory::{CallMemory, unify_read_error};
pub use self::client::{LocalClient, LocalConfig};
pub use self::objects::{LocalRange, LocatedLocal};
pub use self::read_plan::LocalRead;
pub use self::server::LocalServer;
pub use self::server_config::{LocalServerConfig, LocalStats};
pub use self::shared::LocalBuf;
pub use self::store_client::{StoreClient, StoreObject, StoreRange};

/// Port that names the socket of a daemon by default.
pub const DEFAULT_PORT: u16 = 50052;

/// Returns the default path of the socket of the daemon with that port.
pub fn default_path(port: u16) -> PathBuf {
    PathBuf::from(format!("/tmp/mooncake_client_{port}.sock"))
}
