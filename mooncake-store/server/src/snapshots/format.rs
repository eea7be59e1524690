//! Names of snapshots, and the sink of their bytes.

use mooncake_core::Result;

/// Prefix of the names of snapshots; a number of twenty digits follows.
pub(super) const NAME: &str = "snapshot-";
/// Prefix of the names of unfinished snapshots.
pub(super) const UNFINISHED: &str = "unfinished-";
/// Name of a file that contains the name of the latest snapshot, for people.
pub(super) const LATEST: &str = "latest";

/// Name of the order of the masters.
pub(super) const ORDER: &str = "masters";
/// First line of the order of the masters.
const ORDER_HEAD: &str = "mooncake masters 1";
/// Maximum number of masters in the order.
const MAX_ORDER: usize = 64;

/// Receiver of the bytes of a snapshot.
pub(super) type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

pub(super) fn name(number: u64) -> String {
    format!("{NAME}{number:020}")
}

/// Adds a master to the order of the masters before it, the latest first. Returns the text of the
/// order, and the earlier masters.
pub(super) fn add_to_order(text: &[u8], own: u64) -> (String, Vec<u64>) {
    let mut lines = str::from_utf8(text).unwrap_or_default().lines();
    let is_known = lines.next() == Some(ORDER_HEAD);
    let numbers = lines.map_while(|line| u64::from_str_radix(line, 16).ok()).filter(|number| *number != own);
    let mut earlier: Vec<u64> = if is_known { numbers.collect() } else { Vec::new() };
    earlier.truncate(MAX_ORDER - 1);
    let mut order = format!("{ORDER_HEAD}\n{own:016x}\n");
    earlier.iter().for_each(|number| order.push_str(&format!("{number:016x}\n")));
    (order, earlier)
}
