//! Client of a Mooncake store. A client stores objects in the memory of the cluster, reads them,
//! and offers memory of its own.
//!
//! A module imports only from its own row of the table and from the rows below it.
//!
//! | layer | modules |
//! |---|---|
//! | processes on one host | `local` |
//! | construction and end of a client | `builder`, `lifecycle`, `pages`, `scrape`, `setup`, `status`, `summary` |
//! | background work | `heartbeat`, `remount`, `announce`, `persistent_segment`, `mount`, `tasks` |
//! | public operations | `objects`, `ranges`, `sessions` |
//! | reads and writes | `get`, `located`, `cache_fill`, `put`, `send`, `writing`, `retry_on_full`, `refusals`, `read_numbers`, `read_reports` |
//! | objects on disks | `offload` |
//! | helpers on the shared state | `attempt`, `counting`, `handles` |
//! | shared state | `state` |
//! | parts of the shared state | `cache`, `disk`, `inventory`, `mounted`, `promise`, `peers`, `staging`, `metrics` |
//! | values and settings | `config`, `payload`, `put_options`, `exist_options`, `replicas`, `buffers`, `checksum`, `deadline`, `errors`, `issuer`, `names`, `openapi`, `overcommit`, `version` |

#![deny(unsafe_code)]

mod address_check;
mod address_state;
mod announce;
mod attempt;
mod batch_parts;
#[allow(unsafe_code)]
mod buffers;
mod builder;
mod cache;
mod cache_fill;
mod checksum;
mod config;
mod counting;
mod deadline;
mod disk;
mod errors;
mod exist_options;
mod get;
mod grants;
mod handles;
mod heartbeat;
mod inventory;
mod issuer;
mod lifecycle;
#[cfg(feature = "local")]
pub mod local;
mod located;
mod metrics;
mod mount;
mod mounted;
mod names;
mod objects;
mod offload;
#[cfg(feature = "http")]
mod openapi;
mod overcommit;
#[cfg(feature = "http")]
mod pages;
mod payload;
mod peers;
mod persistent_segment;
mod promise;
mod put;
mod put_options;
mod ranges;
mod read_numbers;
mod read_reports;
mod refusals;
mod remount;
mod replicas;
mod retry_on_full;
mod scrape;
mod send;
mod sessions;
mod setup;
mod staging;
mod state;
mod status;
mod summary;
mod tasks;
mod version;
mod writing;
mod zeroes;

pub use self::builder::{BuiltIn, ClientBuilder, MasterHandle, Setting, SuppliedTransport, TransportSource};
pub use self::cache::HotCacheStats;
pub use self::config::{
    AddressPolicy, ClientConfig, ClientEnvironment, DiskFaults, HotCacheConfig, MAX_TIMEOUT, OffloadConfig,
    PrefetchConfig, RPC_ONLY, SegmentFile,
};
pub use self::disk::{DiskReport, FileReport};
pub use self::exist_options::ExistOptions;
pub use self::handles::{ClientMemory, ClientRanges, ClientReplicas, ClientSegments, ClientStatus};
pub use self::located::Located;
pub use self::metrics::{Metrics, Operation, StartedCall};
pub use self::objects::{BatchRead, ReadInto};
pub use self::offload::Prefetch;
#[cfg(feature = "http")]
pub use self::pages::ClientPages;
pub use self::payload::{AsPayload, Payload, PutOutcome};
pub use self::put_options::PutOptions;
pub use self::ranges::{RangeOutcome, RangeRead};
pub use self::sessions::{RangeWrite, Reservation};
pub use self::setup::StoreSetup;
pub use self::state::Client;
pub use self::version::MASTER_VERSIONS;

/// Parts of the client that the programs of the store and the benchmarks share.
#[doc(hidden)]
pub mod programs {
    pub use super::builder::locate_master;
    pub use super::cache::{CacheTable, CachedValue};
    pub use super::config::host_id;
    #[cfg(feature = "http")]
    pub use super::openapi::openapi_document;
    pub use super::version::check as check_version;
}
