//! Reports of the ends of reads to the master.
//!
//! The master gives space of a removed object away as soon as its readers have ended, or at the end
//! of their leases. The number up to which all reads have ended travels with the next request for
//! locations. Without a next one, it travels beside a removal or before a put that found no space
//! is repeated, and after a short pause. No read waits for a report.

use std::fmt;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::clock::Moment;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::ReplicaList;
use mooncake_protocol::master_client::ReadNumber;
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::state::Inner;

/// Bounds of the pauses that a master may ask for.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(60));

/// Read in progress. It ends when this value is dropped: its bytes were checked, or are discarded.
pub(crate) struct NumberedRead<'c, T: Transport> {
    client: &'c Arc<Inner<T>>,
    number: u64,
}

impl<'c, T: Transport> NumberedRead<'c, T> {
    pub(crate) fn begin(client: &'c Arc<Inner<T>>) -> Self {
        let number = client.read_numbers.begin();
        Self { client, number }
    }

    /// Returns the number, and the number up to which all reads have ended.
    pub(crate) fn number(&self) -> ReadNumber {
        self.client.read_numbers.describe(self.number, || self.client.config.clock.now())
    }

    /// Converts the read to one of located objects. Their last lease ends at `until`.
    pub(crate) fn of_located(self, until: Moment) -> Arc<LocatedRead<T>> {
        self.client.read_numbers.end_at(self.number, until);
        let read = LocatedRead { client: Arc::downgrade(self.client), number: self.number };
        // The read does not end here.
        std::mem::forget(self);
        Arc::new(read)
    }
}

/// Read of located objects. It ends when this value is dropped, or with their leases.
pub(crate) struct LocatedRead<T: Transport> {
    client: Weak<Inner<T>>,
    number: u64,
}

impl<T: Transport> fmt::Debug for LocatedRead<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocatedRead").field("number", &self.number).finish_non_exhaustive()
    }
}

impl<T: Transport> Drop for LocatedRead<T> {
    fn drop(&mut self) {
        if let Some(client) = self.client.upgrade() {
            client.read_numbers.end(self.number);
            client.plan_report();
        }
    }
}

impl<T: Transport> Drop for NumberedRead<'_, T> {
    fn drop(&mut self) {
        self.client.read_numbers.end(self.number);
        self.client.plan_report();
    }
}

impl<T: Transport> Inner<T> {
    /// Requests the locations of objects for a read. `located` has a replica of each object, if
    /// this client has located them before.
    pub(crate) async fn locate_for_read(
        &self,
        keys: &[&[u8]],
        located: &[ReplicaId],
        number: ReadNumber,
    ) -> Result<Vec<Result<ReplicaList>>> {
        let results = self.master.locate_for_read(&self.config.tenant, keys, located, number).await?;
        self.read_numbers.record_reported(number.ended);
        Ok(results)
    }

    /// Reports the ends of reads to the master, if it does not know them. Returns whether it has
    /// received a report.
    pub(crate) async fn report_reads(&self, deadline: &Deadline) -> bool {
        let numbers = &self.read_numbers;
        let Some(ended) = numbers.unreported(|| self.config.clock.now()) else { return false };
        let call = self.master.report_reads(numbers.reader, ended);
        match deadline.bound("report of reads", call).await {
            Ok(Some(pause)) => {
                self.read_numbers.record_reported(ended);
                let pause = pause.clamp(PAUSES.0, PAUSES.1).as_millis();
                numbers.pause_ms.store(u64::try_from(pause).unwrap_or(u64::MAX), SeqCst);
                true
            }
            // Without this call, the leases count.
            Ok(None) => {
                self.read_numbers.record_reported(ended);
                false
            }
            Err(error) => {
                tracing::debug!("the ends of reads were not reported: {error}");
                false
            }
        }
    }

    /// Plans a report after a pause, unless one is planned.
    fn plan_report(self: &Arc<Self>) {
        if self.read_numbers.is_planned.load(SeqCst) || self.read_numbers.is_planned.swap(true, SeqCst) {
            return;
        }
        let client = Arc::downgrade(self);
        let pause = Duration::from_millis(self.read_numbers.pause_ms.load(SeqCst));
        self.runtime.spawn(async move {
            tokio::time::sleep(pause).await;
            let Some(client) = client.upgrade() else { return };
            client.read_numbers.is_planned.store(false, SeqCst);
            if client.usable().is_ok() {
                client.report_reads(&client.deadline()).await;
            }
        });
    }
}
