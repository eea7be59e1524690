//! Interface of a communicator.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mooncake_core::{Error, Result};
use tokio::sync::mpsc;

use super::counted::Counted;
use super::executor::{Call, Executor};
use super::p2p::failed_with;
use super::shared::{CommunicatorOptions, Shared, not_active, unavailable};
use crate::call::{Buffer, Collective};
use crate::driver::DriverGuard;
use crate::link::{DataPlane, Recipient};
use crate::message::{Envelope, ExchangeTag, Message};
use crate::operation::{Operation, closed};
use crate::staging::share_guard;
use crate::view::{MAX_RANKS, Membership, Slot};

/// Largest number of collective operations that wait for their turn.
const MAX_QUEUED: usize = 4096;

/// Operations of one group on this rank. The drop closes the communicator.
pub struct Communicator {
    pub(super) shared: Arc<Shared>,
    calls: mpsc::Sender<Call>,
}

impl Communicator {
    /// Creates the communicator of a group, publishes its endpoint and waits for calls.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a capacity of 0 or above [`MAX_RANKS`].
    pub fn new(
        plane: &DataPlane,
        membership: Arc<dyn Membership>,
        options: CommunicatorOptions,
    ) -> Result<Self> {
        if options.capacity == 0 || options.capacity > MAX_RANKS {
            let capacity = options.capacity;
            return Err(Error::invalid(format!(
                "cannot create communicator: invalid capacity. capacity={capacity} max={MAX_RANKS}"
            )));
        }
        let plane = plane.plane.clone();
        let number = plane.number();
        let shared = Arc::new(Shared::new(plane, membership, options, number));
        let recipient: Arc<dyn Recipient> = shared.clone();
        shared.plane.add(number, Arc::downgrade(&recipient));
        let (calls, queue) = mpsc::channel(MAX_QUEUED);
        shared.plane.driver.spawn(Executor::new(shared.clone()).run(queue));
        shared.membership.publish_endpoint(shared.plane.endpoint(number).encode());
        Ok(Self { shared, calls })
    }

    /// Makes this thread carry out the operations of this process, for [`Operation::drive_by`].
    /// Operations that are started meanwhile begin there. Returns `None` if another thread does so,
    /// or if a rank of another host takes part.
    pub fn drive(&self) -> Option<DriverGuard> {
        self.shared.plane.driver.enter()
    }

    /// Starts an operation: its first steps are done on this thread.
    fn begin<R>(&self, start: impl FnOnce() -> R) -> R {
        let driver_guard = self.drive();
        let started = start();
        if let Some(driver_guard) = driver_guard {
            driver_guard.run_ready();
        }
        started
    }

    /// Publishes the endpoint again, for a process that joins its group once more. From the next
    /// mask on, the rank takes part in the operations that the others call then.
    pub fn rejoin(&self) {
        self.shared.rejoins.store(true, Ordering::SeqCst);
        self.shared.membership.publish_endpoint(self.shared.plane.endpoint(self.shared.number).encode());
    }

    /// Starts a collective operation. Every active rank makes the same calls in the same order.
    /// While there is no view, the operation has this rank as its only participant.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for invalid arguments. `UNAVAILABLE_IN_CURRENT_STATUS` if this rank is not
    /// active, the communicator is closed or [quiescing](Self::set_quiescing), or too many
    /// operations wait. The guard is dropped then.
    ///
    /// # Safety
    /// Until `guard` is dropped, the buffers of the call stay allocated, no other code writes the
    /// inputs, and no other code touches the outputs.
    pub unsafe fn start(&self, collective: Collective, guard: Box<dyn Send>) -> Result<Operation> {
        let shared = &self.shared;
        shared.check_open()?;
        collective.check(shared.own, shared.options.capacity)?;
        if let Some(view) = &*shared.views.borrow()
            && !view.active().any(|slot| slot == shared.own)
        {
            return Err(not_active(shared.own));
        }
        let (operation, pending) = Operation::new(Some(&shared.plane.driver));
        let call =
            Call { collective, guard: share_guard(guard), pending, _counted: Counted::new(&shared.gauge) };
        match self.begin(|| self.calls.try_send(call)) {
            Ok(()) => Ok(operation),
            Err(mpsc::error::TrySendError::Full(_)) => Err(unavailable(format!(
                "cannot start collective: too many operations wait. max={MAX_QUEUED}"
            ))),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(closed()),
        }
    }

    /// Sends a tensor to the process of a slot. Messages of one pair arrive in the order of their
    /// calls. The operation is over when the receiver has the bytes; without bytes, at once.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` if the communicator has no view yet, is closed or quiescing.
    /// `INVALID_PARAMS` for a slot that no process has had, and for the own slot. If the process of
    /// the slot has failed, the operation fails.
    ///
    /// # Safety
    /// Until `guard` is dropped, the buffer stays allocated and no other code writes it.
    pub unsafe fn send(&self, tensor: Buffer, to: Slot, guard: Box<dyn Send>) -> Result<Operation> {
        if !self.shared.check_partner(to)? {
            return Ok(failed_at_once(to));
        }
        Ok(self.begin(|| self.shared.post_send(tensor, to, share_guard(guard))))
    }

    /// Receives a tensor from the process of a slot. A shorter message fills the start of the
    /// tensor, and a longer one is an error on both sides.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Safety
    /// Until `guard` is dropped, the buffer stays allocated and no other code touches it.
    pub unsafe fn receive(&self, tensor: Buffer, from: Slot, guard: Box<dyn Send>) -> Result<Operation> {
        if !self.shared.check_partner(from)? {
            return Ok(failed_at_once(from));
        }
        Ok(self.begin(|| self.shared.post_receive(tensor, Some(from), share_guard(guard))))
    }

    /// Receives a tensor from any other slot, and returns that slot in
    /// [`Outcome::source`](crate::operation::Outcome::source).
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` if the communicator has no view yet, is closed or quiescing.
    ///
    /// # Safety
    /// As [`receive`](Self::receive).
    pub unsafe fn receive_any(&self, tensor: Buffer, guard: Box<dyn Send>) -> Result<Operation> {
        self.shared.check_open()?;
        self.shared.check_global()?;
        Ok(self.begin(|| self.shared.post_receive(tensor, None, share_guard(guard))))
    }

    /// Exchanges messages of any length with other ranks, until all have arrived or `timeout` has
    /// passed. The buffers of `outputs[slot]`, one after the other, are the message to the slot.
    /// The message of a slot fills the start of `inputs[slot]`. The outcome has
    /// [the slots](crate::operation::Outcome::arrived) whose messages are there, and
    /// [their lengths](crate::operation::Outcome::lengths).
    ///
    /// The exchange touches no membership and reports no failed link. A rank whose connection has
    /// ended has not arrived, at once. Data of earlier rounds of the buffer is dropped.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` if the communicator has no view yet, is closed or quiescing.
    ///
    /// # Safety
    /// Until `guard` is dropped, the buffers stay allocated, no other code writes the outputs, and
    /// no other code touches the inputs.
    pub unsafe fn exchange(
        &self,
        tag: ExchangeTag,
        outputs: Vec<Option<Vec<Buffer>>>,
        inputs: Vec<Option<Buffer>>,
        timeout: Option<Duration>,
        guard: Box<dyn Send>,
    ) -> Result<Operation> {
        self.shared.check_open()?;
        self.shared.check_global()?;
        Ok(self.shared.post_exchange(tag, outputs, inputs, timeout, share_guard(guard)))
    }

    /// Ends the rounds of a buffer. Messages for it are refused from now on.
    pub fn end_exchanges(&self, buffer: u64) {
        self.shared.end_exchanges(buffer);
    }

    /// Refuses new calls, or accepts them again.
    pub fn set_quiescing(&self, yes: bool) {
        self.shared.quiescing.store(yes, Ordering::SeqCst);
    }

    /// Waits until no operation is in progress, for at most `timeout`. Returns whether that is so.
    pub async fn drain(&self, timeout: Duration) -> bool {
        tokio::time::timeout(timeout, self.shared.gauge.drain()).await.is_ok()
    }

    /// Ends all operations with an error and tells the other ranks, which count this rank as failed
    /// in operations that still need it.
    pub fn close(&self) {
        self.shared.close();
    }
}

/// Returns the operation with a slot whose process has failed, or closed its communicator, before.
fn failed_at_once(slot: Slot) -> Operation {
    let (operation, pending) = Operation::new(None);
    pending.finish(failed_with(slot.0, "it has ended, or closed its communicator"));
    operation
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    fn close(self: &Arc<Self>) {
        if self.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        self.plane.remove(self.number);
        let members: Vec<_> = {
            let inbox = self.inbox.lock();
            inbox.members.iter().filter_map(|member| member.present.clone()).collect()
        };
        for (_, endpoint, link) in members {
            let (communicator, slot) = (endpoint.communicator, self.own.0);
            link.send(&Envelope { communicator, slot, message: Message::Bye });
        }
        self.changed.notify_one();
        self.exchanges.close();
        self.fail_all_pairs();
    }
}
