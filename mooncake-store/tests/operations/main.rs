//! Interfaces for operators: HTTP endpoints, metrics, dashboards, events, settings of tenants in
//! etcd, and the documents that are generated from the code.
//!
//! Masters and clients of the tests run in this process on free ports, each with its own metrics,
//! so the tests run in parallel.

#[path = "../common"]
#[allow(dead_code, reason = "each test program uses a part")]
mod common {
    pub(crate) mod http;
    pub(crate) mod rig;
}
#[cfg(all(feature = "cli", feature = "metadata-etcd"))]
#[path = "../../../mooncake-transport/metadata/tests/servers/mod.rs"]
mod servers;

mod admin_pages;
mod client_pages;
mod dashboards;
#[cfg(feature = "cli")]
mod documents;
mod events;
mod key_lists;
mod master_server;
#[cfg(all(feature = "cli", feature = "metadata-etcd"))]
mod tenant_policy;
