//! Clients that send no heartbeats, and that have not expired yet. Nothing is read from them, and
//! nothing is placed there.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use mooncake_core::ids::ClientId;

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Suspicion of one client, which its segments and its disk share.
#[derive(Clone, Default)]
pub(crate) struct Suspicion(Arc<AtomicBool>);

impl Suspicion {
    /// Returns whether the heartbeats of the client are overdue.
    pub(crate) fn is_suspected(&self) -> bool {
        self.0.load(SeqCst)
    }
}

/// Suspicions of the clients with segments or disks.
#[derive(Default)]
pub(crate) struct Suspicions(Mutex<HashMap<ClientId, Weak<AtomicBool>>>);

impl Suspicions {
    /// Returns the suspicion of a client that mounts something.
    pub(crate) fn of(&self, client: ClientId) -> Suspicion {
        let mut suspicions = self.0.lock();
        if let Some(shared) = suspicions.get(&client).and_then(Weak::upgrade) {
            return Suspicion(shared);
        }
        if suspicions.len() == suspicions.capacity() {
            suspicions.retain(|_, suspicion| suspicion.strong_count() > 0);
        }
        let suspicion = Suspicion::default();
        suspicions.insert(client, Arc::downgrade(&suspicion.0));
        suspicion
    }

    /// Records whether the heartbeats of a client are overdue.
    pub(crate) fn set(&self, client: ClientId, is_suspected: bool) {
        if let Some(suspicion) = self.0.lock().get(&client).and_then(Weak::upgrade) {
            suspicion.store(is_suspected, SeqCst);
        }
    }
}
