//! One member of the cluster for many processes of a host.
//!
//! The *owner* ([`LocalServer`], in the program `mooncake_client`) is an ordinary
//! [`Client`](crate::Client) that also listens at a Unix socket. A *light client* ([`LocalClient`])
//! has no memory in the cluster and opens no connection but to that socket: it makes memory of its
//! own (memfds whose size is sealed), hands the owner the file descriptors, and names ranges of it
//! in its calls. The owner maps the same pages and moves objects out of and into them, so no byte
//! crosses the socket, and a value in such memory is not copied on its way.
//!
//! A light client divides its memory up by itself; the owner only remembers which files it was
//! given. When the socket of a light client closes (a death closes it) or stays silent, the owner
//! lets go of its memory as soon as the transfers that use it have ended. When the owner dies,
//! calls of light clients fail, and they go on with the next owner at the same path: memory and
//! addresses stay what they were.
//!
//! | file | what |
//! |---|---|
//! | `record.rs` | the control connection: who is there, which memory there is, signs of life |
//! | `message.rs` | data connections: one call at a time on each |
//! | `owner.rs`, `serve.rs`, `host.rs`, `guest.rs` | owner: the socket, calls, state of the server, one light client |
//! | `server_config.rs` | owner: settings and statistics |
//! | `client.rs`, `link.rs`, `call.rs` | light client: construction, the control connection, one call |
//! | `shared.rs`, `memory.rs` | light client: memory that the owner also maps, and its allocation |
//! | `objects.rs` | light client: operations on objects |

mod call;
mod client;
mod guest;
mod host;
mod link;
#[allow(unsafe_code)]
mod memory;
pub mod message;
mod objects;
mod owner;
pub mod record;
#[allow(unsafe_code)]
mod serve;
mod server_config;
mod shared;

use std::path::PathBuf;

pub use self::client::{LocalClient, LocalConfig};
pub use self::objects::{LocalRange, LocatedLocal};
pub use self::owner::LocalServer;
pub use self::server_config::{LocalServerConfig, LocalStats};
pub use self::shared::LocalBuf;

/// Port that names an owner's socket when nothing else is said.
pub const DEFAULT_PORT: u16 = 50052;

/// Where the owner of that port listens when it is not told another path.
pub fn default_path(port: u16) -> PathBuf {
    PathBuf::from(format!("/tmp/mooncake_client_{port}.sock"))
}
