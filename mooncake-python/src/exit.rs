//! Wait for transfers at the end of the interpreter, which frees memory that transfers of this
//! process may still use.

use std::sync::{Arc, Weak};

use mooncake_engine::addressed::{Leaving, Regions};
use parking_lot::Mutex;

/// Regions of every engine and store, and the memory that was registered with them.
static WATCHED: Mutex<Vec<(Weak<Regions>, Arc<Leaving>)>> = Mutex::new(Vec::new());

/// Makes the end of the interpreter wait for transfers that use memory of these regions. A program
/// may drop the regions earlier.
pub(crate) fn watch(regions: &Arc<Regions>) {
    let mut watched = WATCHED.lock();
    watched.retain(|(regions, leaving)| regions.strong_count() > 0 || !leaving.is_empty());
    watched.push((Arc::downgrade(regions), regions.leaving()));
}

/// Takes the watched regions, for [`wait_until_unused`].
pub(crate) fn take_watched() -> Vec<(Weak<Regions>, Arc<Leaving>)> {
    std::mem::take(&mut *WATCHED.lock())
}

/// Withdraws the memory of the regions from other nodes, and waits until no transfer uses that
/// memory. A transfer ends at its deadline at the latest.
pub(crate) async fn wait_until_unused(watched: Vec<(Weak<Regions>, Arc<Leaving>)>) {
    let all = watched.into_iter().map(|(regions, leaving)| async move {
        if let Some(regions) = regions.upgrade() {
            regions.clear().await;
        }
        leaving.wait().await;
    });
    futures::future::join_all(all).await;
}
