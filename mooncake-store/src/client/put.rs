//! Writing objects: one call for space, one submission per member, one call that makes them readable.
//!
//! Space may be given back to the master only when nothing can be written to it any more. A transfer that failed
//! because the other side ended it, or that never began, is over; one that ran out of time may still land when its
//! target wakes up. So a grant is revoked after the former and left alone after the latter: the master takes it back
//! by itself, long after the last byte can have been under way.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Moment;
use mooncake_core::ids::ObjectKey;
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::{Slice, Transport};

use super::buffers::Outgoing;
use super::deadline::Deadline;
use super::send::{Flight, Target};
use super::{Inner, again, shown};
use crate::api::{EndItem, PutItem, WriteMode};

/// How often space is asked for, when members that were to hold the object could not be reached.
const ATTEMPTS: usize = 4;
/// A grant older than this is not given back any more: the key may be somebody else's by now.
const REVOKE_WITHIN: Duration = Duration::from_secs(25);

/// What became of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// It is stored and readable.
    Stored,
    /// The key was there already, or somebody is writing it; nothing was written.
    Existed,
}

/// Bytes to store.
#[derive(Debug)]
pub(crate) enum Payload<'a, T: Transport> {
    /// Ordinary memory: copied once, into the local buffer.
    Bytes(&'a [u8]),
    /// Ordinary memory that stays as it is: sent from where it is, when the wire can.
    Shared(&'a Bytes),
    /// Registered memory: sent from where it is.
    Slice(&'a Slice<T>),
}

impl<T: Transport> Payload<'_, T> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Bytes(bytes) => bytes.len(),
            Payload::Shared(bytes) => bytes.len(),
            Payload::Slice(slice) => slice.len(),
        }
    }

    /// The bytes, if they have to go through the local buffer.
    pub(crate) fn staged(&self, needs_registration: bool) -> Option<&[u8]> {
        match *self {
            Payload::Bytes(bytes) => Some(bytes),
            Payload::Shared(bytes) if needs_registration => Some(bytes),
            Payload::Shared(_) | Payload::Slice(_) => None,
        }
    }

    /// The bytes, if they are sent from where they are.
    pub(crate) fn direct(&self, needs_registration: bool) -> Option<Outgoing<T>> {
        match *self {
            Payload::Slice(slice) => Some(Outgoing::Slice(slice.clone())),
            Payload::Shared(bytes) if !needs_registration => Some(Outgoing::Plain(bytes.clone())),
            Payload::Shared(_) | Payload::Bytes(_) => None,
        }
    }
}

/// One object to store.
#[derive(Debug)]
pub(crate) struct Item<'a, T: Transport> {
    pub(crate) key: &'a [u8],
    pub(crate) value: Payload<'a, T>,
}

type Outcomes = Vec<Option<Result<PutOutcome>>>;

/// Stores every item, each for itself. The outer error means that nothing is known of any.
pub(crate) async fn write<T: Transport>(
    client: &Arc<Inner<T>>,
    mode: WriteMode,
    items: &[Item<'_, T>],
    config: &ReplicateConfig,
) -> Result<Vec<Result<PutOutcome>>> {
    client.usable()?;
    let deadline = client.deadline();
    let mut outcomes: Outcomes = items.iter().map(|item| refusal(client, item).map(Err)).collect();
    for attempt in 0..ATTEMPTS {
        let pending: Vec<usize> = (0..items.len()).filter(|&i| outcomes[i].is_none()).collect();
        if pending.is_empty() {
            break;
        }
        tell(client, &deadline).await;
        let config = placement(client, config, attempt);
        let mut writing = Writing::new(client, mode, &deadline);
        match writing.start(items, &pending, &config, &mut outcomes).await {
            Ok(()) => {}
            Err(error) if attempt == 0 => return Err(error),
            Err(error) => {
                for i in pending {
                    outcomes[i] = Some(Err(again(&error)));
                }
                break;
            }
        }
        writing.transfer(items).await;
        writing.finish(attempt + 1 == ATTEMPTS, &mut outcomes).await;
    }
    let lost = || Err(Error::internal("a put without an outcome"));
    Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect())
}

/// Tells the master of members that could not be reached, before it is asked for space.
async fn tell<T: Transport>(client: &Inner<T>, deadline: &Deadline) {
    for endpoint in client.unreachable.take_untold() {
        let call = client.master.report_unreachable(client.id, &endpoint);
        if let Err(error) = deadline.bound("report of a member", call).await {
            tracing::debug!(%endpoint, "the master was not told that a member is unreachable: {error}");
        }
    }
}

/// What is wrong with an item before anybody is asked.
fn refusal<T: Transport>(client: &Inner<T>, item: &Item<'_, T>) -> Option<Error> {
    if let Err(error) = ObjectKey::check(item.key) {
        return Some(error.into());
    }
    if item.value.len() == 0 {
        return Some(Error::invalid("a value must not be empty").context(shown(item.key)));
    }
    if client.staging.is_none() && item.value.staged(client.needs_registration()).is_some() {
        return Some(Error::invalid(
            "this client has no local buffer: put from registered memory, or give it one",
        ));
    }
    None
}

/// Where to ask for space. The master learns of a member's death later than those who talk to it, so after a failure
/// our own memory comes first, and at last one copy is better than none.
fn placement<'c, T: Transport>(
    client: &Inner<T>,
    config: &'c ReplicateConfig,
    attempt: usize,
) -> Cow<'c, ReplicateConfig> {
    if attempt == 0 {
        return Cow::Borrowed(config);
    }
    let mut config = config.clone();
    if !client.segments.lock().is_empty() {
        let mut preferred = vec![client.name.clone()];
        preferred.extend(config.preferred().iter().filter(|name| **name != client.name).cloned());
        config.preferred_segment.clear();
        config.preferred_segments = preferred;
    }
    if attempt + 1 == ATTEMPTS {
        config.replicas = config.replicas.min(1);
    }
    Cow::Owned(config)
}

/// Granted space that has neither been made readable nor given back.
pub(super) struct Grant<'a> {
    /// Which item it is for.
    pub(super) item: usize,
    key: &'a [u8],
    /// Why the bytes are not there.
    pub(super) failure: Option<Error>,
    /// They may still come.
    late: bool,
    /// Readable, given back, or to be left alone.
    settled: bool,
}

impl Grant<'_> {
    /// The bytes are not there, and nothing of them is under way.
    pub(super) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    /// A transfer failed. The wire answers for its end, unless all it knows is that time is up.
    pub(super) fn lose(&mut self, error: Error) {
        self.late |= error.kind() == ErrorKind::Timeout;
        self.fail(error);
    }
}

/// Puts between start and end. Dropped before that, it lets what is under way land and then gives the space back.
pub(super) struct Writing<'a, T: Transport> {
    pub(super) client: &'a Arc<Inner<T>>,
    pub(super) deadline: &'a Deadline,
    mode: WriteMode,
    asked: Moment,
    pub(super) grants: Vec<Grant<'a>>,
    pub(super) targets: Vec<Target>,
    pub(super) endpoints: Vec<String>,
    pub(super) flights: VecDeque<Flight<T>>,
    /// Some replica is of a kind that is not written from here.
    others: bool,
}

impl<'a, T: Transport> Writing<'a, T> {
    fn new(client: &'a Arc<Inner<T>>, mode: WriteMode, deadline: &'a Deadline) -> Self {
        Self {
            client,
            deadline,
            mode,
            asked: client.config.clock.now(),
            grants: Vec::new(),
            targets: Vec::new(),
            endpoints: Vec::new(),
            flights: VecDeque::new(),
            others: false,
        }
    }

    /// Asks for space for `pending`. Those refused for good get their outcome.
    async fn start(
        &mut self,
        items: &[Item<'a, T>],
        pending: &[usize],
        config: &ReplicateConfig,
        outcomes: &mut Outcomes,
    ) -> Result<()> {
        let item = |&i: &usize| PutItem { key: items[i].key, len: items[i].value.len() as u64 };
        let asked: Vec<PutItem<'_>> = pending.iter().map(item).collect();
        let call = self.client.master.put_start(self.client.caller(), self.mode, &asked, config);
        let answers = self.deadline.bound("put start", call).await?;
        self.grants.reserve(answers.len());
        self.targets.reserve(answers.len());
        for (&i, answer) in pending.iter().zip(answers) {
            match answer {
                Ok(replicas) => self.grant(i, &items[i], &replicas),
                Err(error) if error.code() == ErrorCode::ObjectAlreadyExists => {
                    outcomes[i] = Some(Ok(PutOutcome::Existed));
                }
                Err(error) => outcomes[i] = Some(Err(error.context(shown(items[i].key)))),
            }
        }
        Ok(())
    }

    fn grant(&mut self, item: usize, wanted: &Item<'a, T>, replicas: &[Replica]) {
        let grant = self.grants.len();
        self.grants.push(Grant { item, key: wanted.key, failure: None, late: false, settled: false });
        let mut written = false;
        for replica in replicas {
            let Some(at) = replica.location.memory() else {
                self.others = true;
                continue;
            };
            if at.size != wanted.value.len() as u64 {
                let text = format!("the master granted {} bytes for {}", at.size, wanted.value.len());
                return self.grants[grant].fail(Error::internal(text));
            }
            let peer = self.peer(&at.endpoint);
            self.targets.push(Target { grant, peer, remote: at.address });
            written = true;
        }
        if !written {
            self.grants[grant].fail(Error::internal("the master granted no memory to write to"));
        }
    }

    /// Index of the member at that endpoint.
    fn peer(&mut self, endpoint: &str) -> usize {
        // A put has a handful of members at most.
        self.endpoints.iter().position(|e| e == endpoint).unwrap_or_else(|| {
            self.endpoints.push(endpoint.to_owned());
            self.endpoints.len() - 1
        })
    }

    /// Ends what has landed, gives back what has not. What may be tried again keeps no outcome, unless `last`.
    async fn finish(mut self, last: bool, outcomes: &mut Outcomes) {
        self.end(outcomes).await;
        let clean = |grant: &&Grant<'_>| grant.failure.is_some() && !grant.late;
        let keys: Vec<&[u8]> = self.grants.iter().filter(clean).map(|grant| grant.key).collect();
        let revoked =
            keys.is_empty() || revoke(self.client, self.mode, &keys, self.asked, self.deadline).await;
        for grant in &mut self.grants {
            let Some(error) = grant.failure.take() else { continue };
            grant.settled = grant.late || revoked;
            if grant.late || !revoked || last || self.deadline.is_over() {
                outcomes[grant.item] = Some(Err(error.context(shown(grant.key))));
            }
        }
    }

    async fn end(&mut self, outcomes: &mut Outcomes) {
        let landed = |grant: &&Grant<'_>| grant.failure.is_none();
        let item = |grant: &Grant<'a>| EndItem { key: grant.key, checksum: None };
        let items: Vec<EndItem<'_>> = self.grants.iter().filter(landed).map(item).collect();
        if items.is_empty() {
            return;
        }
        let kind = if self.others { ReplicaType::Memory } else { ReplicaType::All };
        let call = || self.client.master.put_end(self.client.caller(), self.mode, &items, kind);
        let mut answer = self.deadline.bound("put end", call()).await;
        if answer.is_err() && !self.deadline.is_over() {
            // The bytes are there, and the call may be repeated: one lost answer need not cost them.
            answer = self.deadline.bound("put end", call()).await;
        }
        let ended = self.grants.iter_mut().filter(|grant| grant.failure.is_none());
        match answer {
            Ok(answers) => {
                for (grant, answer) in ended.zip(answers) {
                    grant.settled = true;
                    outcomes[grant.item] = Some(match answer {
                        Ok(()) => Ok(PutOutcome::Stored),
                        Err(error) => Err(forgotten(error).context(shown(grant.key))),
                    });
                }
            }
            // The end may still come through, so the grant is not given back: another one of the same key must not be
            // ended by it. The master takes it back in its own time.
            Err(error) => ended.for_each(|grant| {
                grant.settled = true;
                outcomes[grant.item] = Some(Err(again(&error).context(shown(grant.key))));
            }),
        }
    }
}

/// A master that no longer knows of a write was restarted, or lost the memory it was to lie in.
fn forgotten(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => {
            Error::new(ErrorCode::UnavailableInCurrentStatus, "the master dropped this write before it ended")
                .with_source(error)
        }
        _ => error,
    }
}

/// Gives space back; whether the master has it.
async fn revoke<T: Transport>(
    client: &Inner<T>,
    mode: WriteMode,
    keys: &[&[u8]],
    asked: Moment,
    deadline: &Deadline,
) -> bool {
    if client.config.clock.now().since(asked) > REVOKE_WITHIN {
        return false;
    }
    let call = client.master.put_revoke(client.caller(), mode, keys, ReplicaType::All);
    match deadline.bound("put revoke", call).await {
        Ok(_) => true,
        Err(error) => {
            tracing::debug!(keys = keys.len(), "space was not given back: {error}");
            false
        }
    }
}

impl<T: Transport> Drop for Writing<'_, T> {
    fn drop(&mut self) {
        if self.grants.iter().all(|grant| grant.settled) {
            return;
        }
        let (client, mode, asked) = (self.client.clone(), self.mode, self.asked);
        let mut grants: Vec<(Vec<u8>, bool)> =
            self.grants.iter().map(|grant| (grant.key.to_vec(), grant.late || grant.settled)).collect();
        let flights = std::mem::take(&mut self.flights);
        self.client.runtime.spawn(async move {
            for flight in flights {
                for (grant, result) in flight.landed().await {
                    grants[grant].1 |= result.is_err_and(|error| error.kind() == ErrorKind::Timeout);
                }
            }
            let open = grants.iter().filter(|(_, leave)| !leave);
            let keys: Vec<&[u8]> = open.map(|(key, _)| key.as_slice()).collect();
            if !keys.is_empty() {
                let deadline = client.deadline();
                revoke(&client, mode, &keys, asked, &deadline).await;
            }
        });
    }
}
