//! Keys of Mooncake C++ in a metadata directory, and the format of their values.

use bytes::Bytes;

/// Builder of keys: `mooncake/[<cluster>/]ram/<segment>` and
/// `mooncake/[<cluster>/]rpc_meta/<segment>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaKeys {
    prefix: String,
    newline: bool,
}

impl MetaKeys {
    /// Creates the keys of a cluster. An empty id (the default of Mooncake C++) adds no level.
    pub fn new(cluster_id: &str) -> Self {
        let prefix =
            if cluster_id.is_empty() { "mooncake/".into() } else { format!("mooncake/{cluster_id}/") };
        Self { prefix, newline: false }
    }

    /// Appends a newline to values, as etcd and Redis directories do. Readers accept both.
    #[must_use]
    pub fn with_newline(mut self) -> Self {
        self.newline = true;
        self
    }

    /// Returns the stored form of a JSON text.
    pub fn value(&self, json: impl Into<Vec<u8>>) -> Bytes {
        let mut json = json.into();
        if self.newline {
            json.push(b'\n');
        }
        json.into()
    }

    /// Returns the key of a segment descriptor. A name with a slash is already a path of its own.
    pub fn segment(&self, name: &str) -> String {
        if name.contains('/') {
            format!("{}{name}", self.prefix)
        } else {
            format!("{}ram/{name}", self.prefix)
        }
    }

    /// Returns the key of the handshake port of a segment.
    pub fn rpc_meta(&self, name: &str) -> String {
        format!("{}rpc_meta/{name}", self.prefix)
    }
}

/// Returns the key of the current leader of a cluster of several masters. The value is `host:port`
/// of the leader's RPC server, held under a lease.
pub fn master_view(cluster_id: &str) -> String {
    format!("mooncake-store/{cluster_id}/master_view")
}

/// Key under which the masters of a cluster keep the longest time, in milliseconds, for which
/// leases and grants of one of them may hold. Masters of Mooncake C++ have no such key.
pub fn longest_promise(cluster_id: &str) -> String {
    format!("mooncake-store/{cluster_id}/longest_promise_ms")
}

impl Default for MetaKeys {
    fn default() -> Self {
        Self::new("")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_of_mooncake_cpp() {
        let keys = MetaKeys::default();
        assert_eq!(keys.segment("node:1"), "mooncake/ram/node:1");
        assert_eq!(keys.segment("a/b"), "mooncake/a/b");
        assert_eq!(keys.rpc_meta("a/b"), "mooncake/rpc_meta/a/b");
        assert_eq!(MetaKeys::new("c").segment("n"), "mooncake/c/ram/n");
        assert_eq!(MetaKeys::new("c").rpc_meta("n"), "mooncake/c/rpc_meta/n");
        assert_eq!(keys.value("{}"), "{}");
        assert_eq!(keys.with_newline().value("{}"), "{}\n");
    }
}
