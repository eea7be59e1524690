//! New space for a reserved object whose segment has left before anything was written to it.

use std::sync::Arc;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::replica::{MemoryLocation, Replica, ReplicateConfig};
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_protocol::api::{PutItem, WriteMode};
use mooncake_protocol::message::CountSegments;
use mooncake_transport::Transport;

use super::requested_space::RequestedSpace;
use super::reservation::Reservation;
use super::write_batch::{WriteBatch, revoke};
use super::written::{GrantedSpace, Written};
use crate::attempt::Attempt;
use crate::deadline::Deadline;
use crate::put::report_unreachable;
use crate::state::{Inner, is_newer};

/// Request for new space. It runs to its end, whatever becomes of the call that needs it.
struct Relocation<T: Transport> {
    client: Arc<Inner<T>>,
    key: Vec<u8>,
    size: u64,
    config: ReplicateConfig,
    written: Arc<Written>,
    deadline: Deadline,
}

/// Outcome of a request for new space.
enum NewSpace {
    Granted(GrantedSpace),
    /// The master still has the old space and grants no other.
    Unchanged,
    /// The old space was returned, and there is no other.
    Lost,
}

impl<T: Transport> WriteBatch<'_, T> {
    /// Requests new space for an object, all of whose writes in this call have failed. `of_object`
    /// has their indices. Returns whether they can be repeated.
    pub(super) async fn relocate(
        &mut self,
        client: &Arc<Inner<T>>,
        object: &Reservation,
        of_object: &[usize],
        deadline: &Deadline,
    ) -> bool {
        let Some(writes) = self.numbers_of(of_object) else { return false };
        if deadline.is_over()
            || is_planted("sessions-stay-with-their-segment")
            || !object.written.begin_move(&writes)
        {
            return false;
        }
        let (at, all) = object.item;
        let relocation = Relocation {
            client: client.clone(),
            key: object.key.clone(),
            size: object.size,
            config: object.config.of_keys(at..at + 1, all),
            written: object.written.clone(),
            deadline: deadline.clone(),
        };
        let moved = client.runtime.spawn(relocation.run()).await.unwrap_or(false);
        if moved {
            self.move_to(of_object, &object.written.space());
        }
        moved
    }
}

impl<T: Transport> Relocation<T> {
    /// Replaces the space. Returns whether there is new space to write to.
    async fn run(self) -> bool {
        let outcome = self.find().await;
        let (space, stays) = match outcome {
            NewSpace::Granted(space) => (Some(space), false),
            NewSpace::Unchanged => (None, true),
            NewSpace::Lost => (None, false),
        };
        let moved = space.is_some();
        if space.is_none() && !stays && !self.client.master.fences_writes() {
            self.written.seal();
        }
        let wanted = self.written.end_move(space, stays);
        // The call may have been dropped, and the space given up meanwhile.
        if let Some(attempt) = self.written.take_given_up() {
            revoke(self.client.clone(), attempt, self.key.clone()).await;
        }
        moved && wanted
    }

    async fn find(&self) -> NewSpace {
        let client = &*self.client;
        report_unreachable(client, &self.deadline).await;
        let old = self.written.space();
        if client.master.fences_writes() {
            // A master that has dropped the write grants new space. Otherwise it repeats the grant.
            let again = Attempt { requested_at: client.config.clock.now(), ..old.attempt };
            match self.request_space(again).await {
                Ok(space) if are_same_locations(&space.replicas, &old.replicas) => {}
                Ok(space) => return self.reject_same_client(self.confirmed(space).await, &old).await,
                Err(_) => return NewSpace::Unchanged,
            }
        }
        // Without another segment, the old space may still be of use.
        let count = self.deadline.bound("number of segments", client.master.call(CountSegments {})).await;
        if count.unwrap_or(0) < 2 {
            return NewSpace::Unchanged;
        }
        for at in &old.replicas {
            client.unreachable.report(&at.endpoint);
        }
        if !old.attempt.revoke(client, &[&self.key], &self.deadline).await {
            // The master may have freed the space. If the master recognizes writers, it repeats the
            // grant, or refuses the end.
            return if client.master.fences_writes() { NewSpace::Unchanged } else { NewSpace::Lost };
        }
        report_unreachable(client, &self.deadline).await;
        let attempt = Attempt::new(client, WriteMode::Put);
        match self.request_space(attempt).await {
            Ok(space) => NewSpace::Granted(self.confirmed(space).await),
            Err(error) => {
                if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) {
                    // The master may have granted the space.
                    drop(RequestedSpace::new(&self.client, attempt, vec![&self.key]));
                }
                NewSpace::Lost
            }
        }
    }

    /// Connects to the owners of new space. If an owner was found after the master was asked, the
    /// master is asked for the same space again, as for a reservation.
    async fn confirmed(&self, space: GrantedSpace) -> GrantedSpace {
        let client = &*self.client;
        let endpoints: Vec<String> = space.replicas.iter().map(|at| at.endpoint.clone()).collect();
        if !client.reach_granted(&endpoints, space.look_ups, &self.deadline).await.iter().any(is_newer) {
            return space;
        }
        if !client.master.fences_writes() {
            return GrantedSpace { look_ups: client.engine.look_ups(), ..space };
        }
        // If the grant is no longer valid, the writes to it fail.
        self.request_space(space.attempt).await.unwrap_or(space)
    }

    /// Returns space to the master that is at the same client. The process there may be another
    /// one, and the caller chose the earlier one.
    async fn reject_same_client(&self, space: GrantedSpace, old: &GrantedSpace) -> NewSpace {
        let is_old_endpoint =
            |at: &MemoryLocation| old.replicas.iter().any(|old| old.endpoint == at.endpoint);
        let same = space.attempt.number == old.attempt.number && space.replicas.len() < old.replicas.len();
        if same || !space.replicas.iter().all(is_old_endpoint) {
            return NewSpace::Granted(space);
        }
        revoke(self.client.clone(), space.attempt, self.key.clone()).await;
        NewSpace::Lost
    }

    async fn request_space(&self, attempt: Attempt) -> Result<GrantedSpace> {
        let client = &*self.client;
        let look_ups = client.engine.look_ups();
        let items = [PutItem { key: &self.key, len: self.size }];
        let mut results = attempt.request_space(client, &items, &self.config, &self.deadline).await?;
        let granted = results.pop().unwrap_or_else(|| Err(Error::internal("response without an item")))?;
        let memory = granted.iter().filter_map(|replica: &Replica| replica.location.memory().cloned());
        let replicas: Vec<MemoryLocation> = memory.filter(|at| at.size == self.size).collect();
        if replicas.is_empty() {
            return Err(Error::internal("the master granted no memory to write to"));
        }
        Ok(GrantedSpace { replicas, attempt, look_ups })
    }
}

/// Returns whether replicas are at the same endpoints and addresses, in the same order.
fn are_same_locations(now: &[MemoryLocation], then: &[MemoryLocation]) -> bool {
    let location = |at: &MemoryLocation| (at.endpoint.clone(), at.address);
    now.iter().map(location).eq(then.iter().map(location))
}
