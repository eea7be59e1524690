//! Names of snapshots, and the sink of their bytes.

use mooncake_core::Result;

/// Prefix of the names of snapshots; a number of twenty digits follows.
pub(super) const NAME: &str = "snapshot-";
/// Prefix of the names of unfinished snapshots.
pub(super) const UNFINISHED: &str = "unfinished-";
/// Name of a file that contains the name of the latest snapshot, for people.
pub(super) const LATEST: &str = "latest";

/// Receiver of the bytes of a snapshot.
pub(super) type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

pub(super) fn name(number: u64) -> String {
    format!("{NAME}{number:020}")
}
