//! End of transfers at the end of the interpreter, which frees memory that transfers of this
//! process may still use.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_engine::TransportSet;
use mooncake_engine::addressed::{Leaving, Regions};
use mooncake_transport::Transport;
use parking_lot::Mutex;

/// Time that transfers have to finish.
const FINISH_WITHIN: Duration = Duration::from_secs(1);
/// Time that stopped transfers have to release their memory.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// Regions of every engine and store, with their transports.
static WATCHED: Mutex<Vec<WatchedRegions>> = Mutex::new(Vec::new());

/// Regions of an engine or a store. A program may drop the regions earlier.
pub(crate) struct WatchedRegions {
    regions: Weak<Regions>,
    /// Memory that was registered with the regions.
    leaving: Arc<Leaving>,
    transport: Option<Weak<TransportSet>>,
}

/// Makes the end of the interpreter end transfers that use memory of these regions.
pub(crate) fn watch(regions: &Arc<Regions>, transport: Option<&Arc<TransportSet>>) {
    let mut watched = WATCHED.lock();
    watched.retain(|watched| watched.regions.strong_count() > 0 || !watched.leaving.is_empty());
    watched.push(WatchedRegions {
        regions: Arc::downgrade(regions),
        leaving: regions.leaving(),
        transport: transport.map(Arc::downgrade),
    });
}

/// Takes the watched regions, for [`end_transfers`].
pub(crate) fn take_watched() -> Vec<WatchedRegions> {
    std::mem::take(&mut *WATCHED.lock())
}

/// Runs `closing`, withdraws the memory of the regions from other nodes, and returns when no
/// transfer uses that memory. Transfers that do not finish in time, such as those with a stopped
/// peer, are stopped with an error.
///
/// A device that does not release memory in time is not waited for: it keeps the pages of memory
/// that is registered with it until the process ends.
pub(crate) async fn end_transfers(watched: Vec<WatchedRegions>, closing: impl Future<Output = ()>) {
    let finished = async {
        futures::future::join(closing, wait_until_unused(&watched)).await;
    };
    if tokio::time::timeout(FINISH_WITHIN, finished).await.is_ok() {
        return;
    }
    for transport in watched.iter().filter_map(|watched| watched.transport.as_ref()?.upgrade()) {
        transport.stop_transfers();
    }
    if tokio::time::timeout(STOP_WITHIN, wait_until_unused(&watched)).await.is_err() {
        tracing::warn!("the program ends while a device may still use its memory");
    }
}

async fn wait_until_unused(watched: &[WatchedRegions]) {
    let all = watched.iter().map(|watched| async {
        if let Some(regions) = watched.regions.upgrade() {
            regions.clear().await;
        }
        watched.leaving.wait().await;
    });
    futures::future::join_all(all).await;
}
