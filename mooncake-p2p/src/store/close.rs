//! End of copies of this node.

use std::sync::Arc;

use mooncake_core::Result;

use super::inner::{Inner, Opened};
use crate::catalogue::Role;

impl Inner {
    /// Ends the copies of this node in one role.
    pub(super) async fn leave(self: &Arc<Self>, name: &str, role: Role) -> Result<()> {
        let (object, mut reservation) = self.reserve_opened(name, role)?;
        let roles = [role];
        let removed = self.remove_copies(name, &roles, &self.segment);
        if let Err(error) = self.bounded("end copies", removed).await {
            reservation.outcome = Some(object);
            return Err(error);
        }
        drop(object);
        drop(reservation);
        self.engine.settle_publication().await
    }

    /// Cancels reads, waits for other calls, ends all copies, and then the lease. After a failure,
    /// the lease expires, and the copies that are left end with it.
    pub(super) async fn close(self: &Arc<Self>) -> Result<()> {
        {
            // No name is reserved from now on.
            let _objects = self.objects.lock();
            self.is_closing.send_replace(true);
        }
        let settled = async {
            self.settle_calls().await;
            Ok(())
        };
        let mut result = self.bounded("close P2P store", settled).await;
        let opened = |(name, opened): (&String, &Opened)| match opened {
            Opened::Object(object) => Some((name.clone(), object.role)),
            Opened::InProgress => None,
        };
        let objects: Vec<_> = self.objects.lock().iter().filter_map(opened).collect();
        for (name, role) in objects {
            result = result.and(self.leave(&name, role).await);
        }
        result?;
        self.bounded("end lease", self.end_lease()).await
    }
}
