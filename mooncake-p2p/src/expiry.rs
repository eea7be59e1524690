//! Nodes whose heartbeats have ended, as one observer sees them.

use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::clock::Moment;

/// Revisions of the nodes' records, and the moments at which the observer first saw them. The
/// clocks of nodes are never compared.
#[derive(Debug, Default)]
pub(crate) struct Expiry {
    seen: HashMap<String, (u64, Moment)>,
    last: Moment,
}

impl Expiry {
    /// Records the present revisions of all nodes. Returns the nodes, with their revisions, that
    /// have had the same revision for the time of a lease.
    ///
    /// If the last call was more than half a lease ago, the metadata service may have been out of
    /// reach, for the other nodes, too. All leases then begin again.
    pub(crate) fn observe(
        &mut self,
        nodes: Vec<(String, u64)>,
        now: Moment,
        lease: Duration,
    ) -> Vec<(String, u64)> {
        if now.since(self.last) > lease / 2 {
            self.seen.clear();
        }
        self.last = now;
        let mut seen = HashMap::with_capacity(nodes.len());
        let mut expired = Vec::new();
        for (segment, revision) in nodes {
            let since = match self.seen.get(&segment) {
                Some((known, since)) if *known == revision => *since,
                _ => now,
            };
            if now.since(since) >= lease {
                expired.push((segment.clone(), revision));
            }
            seen.insert(segment, (revision, since));
        }
        self.seen = seen;
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(a: u64, b: u64) -> Vec<(String, u64)> {
        vec![("a".to_owned(), a), ("b".to_owned(), b)]
    }

    const LEASE: Duration = Duration::from_secs(30);

    fn at(seconds: u64) -> Moment {
        Moment(seconds * 1_000_000_000)
    }

    #[test]
    fn a_record_that_does_not_change_expires() {
        let mut expiry = Expiry::default();
        for (seconds, b) in [(100, 1), (110, 2), (120, 2)] {
            assert!(expiry.observe(nodes(1, b), at(seconds), LEASE).is_empty());
        }
        assert_eq!(expiry.observe(nodes(1, 2), at(130), LEASE), [("a".to_owned(), 1)]);
        assert!(expiry.observe(nodes(2, 3), at(140), LEASE).is_empty(), "both sent heartbeats");
        assert!(expiry.observe(Vec::new(), at(150), LEASE).is_empty());
        assert!(expiry.observe(nodes(2, 3), at(160), LEASE).is_empty(), "a node that returns is new");
    }

    #[test]
    fn an_outage_of_the_metadata_service_ends_no_lease() {
        let mut expiry = Expiry::default();
        expiry.observe(nodes(1, 1), at(100), LEASE);
        assert!(expiry.observe(nodes(1, 1), at(140), LEASE).is_empty());
        expiry.observe(nodes(1, 1), at(155), LEASE);
        assert_eq!(expiry.observe(nodes(1, 1), at(170), LEASE).len(), 2);
    }
}
