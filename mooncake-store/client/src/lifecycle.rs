//! The end of a client, and the start of its heartbeat.

use mooncake_core::Result;
use mooncake_transport::Transport;
use std::sync::Arc;

use crate::heartbeat;
use crate::mounted::drop_region;
use crate::state::Client;

impl<T: Transport> Client<T> {
    /// Leaves the cluster: unmounts all memory and stops. The objects in that memory are lost.
    /// Space of open reservations is returned to the master.
    ///
    /// Objects in a [file](crate::ClientConfig::segment_file) stay there for the next process. The
    /// file is not unmounted. The master drops its objects if no process mounts it in time.
    ///
    /// A second call has no effect. Every other operation fails after this call.
    ///
    /// # Errors
    /// Returns an error if the master cannot be reached. The client is closed nevertheless, and the
    /// master notices its absence later.
    pub async fn close(&self) -> Result<()> {
        self.inner.closed.send_replace(true);
        let heartbeat_task = self.inner.heartbeat_task.lock().take();
        if let Some(heartbeat_task) = heartbeat_task {
            // The task stops by itself. Waiting for it prevents a mount of what is unmounted here.
            let _ = heartbeat_task.await;
        }
        self.inner.stop_announcing().await;
        self.inner.return_reserved_space(&self.inner.deadline()).await;
        let deadline = self.inner.deadline();
        if let Some(files) = &self.inner.files {
            let idle = async {
                files.idle().await;
                Ok(())
            };
            if let Err(error) = deadline.bound("files that are being written", idle).await {
                tracing::warn!("{error}");
            }
        }
        self.inner.close_disk(&deadline).await;
        let mut outcome = Ok(());
        // With the lock held, no mount is in progress. A later mount sees that the client is
        // closed.
        let _changing = self.inner.mounting.lock().await;
        self.inner.moving.lock().clear();
        for id in self.segments().ids() {
            if self.inner.segments.lock().iter().any(|mounted| mounted.id() == id && mounted.is_lasting()) {
                outcome = outcome.and(self.inner.take_inventory(&deadline).await.map(drop));
                drop_region(self.inner.take(id)).await?;
                continue;
            }
            let unmounted = self.inner.unmount_listed(id, &deadline).await;
            if let Err(error) = unmounted {
                drop_region(self.inner.take(id)).await?;
                outcome = outcome.and(Err(error));
            }
        }
        if self.inner.keeps_engine {
            return outcome;
        }
        let left = deadline.bound("leaving the directory", self.inner.engine.close()).await;
        outcome.and(left)
    }

    pub(crate) fn start_heartbeat(&self) {
        let mut heartbeat_task = self.inner.heartbeat_task.lock();
        if heartbeat_task.is_none() && !*self.inner.closed.borrow() {
            let heartbeat = heartbeat::run(Arc::downgrade(&self.inner), self.inner.closed.subscribe());
            *heartbeat_task = Some(self.inner.runtime.spawn(heartbeat));
        }
    }
}
