//! Memory of the program at the end of the interpreter, which frees that memory while transfers of this process may be under way.

use std::sync::{Arc, Weak};

use mooncake_engine::addressed::{Leaving, Regions};
use parking_lot::Mutex;

/// Regions of every engine and store, and the memory that was registered with them.
static WATCHED: Mutex<Vec<(Weak<Regions>, Arc<Leaving>)>> = Mutex::new(Vec::new());

/// Has the end of the interpreter wait for transfers that use memory of these regions. A program may drop the regions before.
pub(crate) fn watch(regions: &Arc<Regions>) {
    let mut watched = WATCHED.lock();
    watched.retain(|(regions, leaving)| regions.strong_count() > 0 || !leaving.is_empty());
    watched.push((Arc::downgrade(regions), regions.leaving()));
}

/// Takes the regions that are watched, for [`wait_until_unused`].
pub(crate) fn take_watched() -> Vec<(Weak<Regions>, Arc<Leaving>)> {
    std::mem::take(&mut *WATCHED.lock())
}

/// Withdraws the memory of regions from peers, and waits until no transfer uses that memory. A transfer ends with its time limit, at the latest.
pub(crate) async fn wait_until_unused(watched: Vec<(Weak<Regions>, Arc<Leaving>)>) {
    let all = watched.into_iter().map(|(regions, leaving)| async move {
        if let Some(regions) = regions.upgrade() {
            regions.clear().await;
        }
        leaving.wait().await;
    });
    futures::future::join_all(all).await;
}
