//! Writes of objects. One RPC requests space, one submission per client writes the bytes, and one
//! RPC makes the objects readable.
//!
//! Space may be returned to the master only if nothing can be written to it any more. A transfer is
//! over if the other side ended it, or if it never began. A transfer that ran out of time may still
//! arrive when its target resumes. So the grant is revoked after a failure of the first kind. After
//! a timeout, the grant is left to the master. The master reclaims the space by itself, long after
//! the last byte can have been in flight.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::ObjectKey;
use mooncake_core::replica::{Replica, ReplicaLocation, ReplicaType, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;

use crate::attempt::Attempt;
use crate::batch_parts::PART_OBJECTS;
use crate::deadline::Deadline;
use crate::disk::GrantedFile;
use crate::errors::display_key;
use crate::metrics::{Counting, Operation};
use crate::offload::FilePut;
use crate::payload::{Item, PutOutcome};
use crate::refusals::explain;
use crate::retry_on_full::{RetryOnFull, is_full, too_large};
use crate::state::{Inner, is_newer};
use crate::writing::{Grant, ReplicaTarget, Writing};
use mooncake_protocol::api::{EndItem, PutItem, WriteMode};
use mooncake_protocol::parts::part_of;

/// Maximum number of attempts that fail at clients that have failed in this put before. The first
/// failure of a client does not count.
const ATTEMPTS: usize = 4;
/// Longest pause before a write that the master has dropped is repeated.
const MAX_PAUSE: Duration = Duration::from_millis(500);

type Outcomes = Vec<Option<Result<PutOutcome>>>;

/// Stores every item. Each item has an outcome of its own. The outer error means that no outcome is
/// known.
pub(crate) async fn write<T: Transport>(
    client: &Arc<Inner<T>>,
    mode: WriteMode,
    operation: Operation,
    items: &[Item<'_, T>],
    config: &ReplicateConfig,
) -> Result<Vec<Result<PutOutcome>>> {
    client.can_transfer()?;
    let mut counting = client.counting(operation);
    let ended = write_in_parts(client, mode, items, config, &mut counting).await?;
    ended.iter().zip(items).for_each(|(outcome, item)| counting.written(outcome, item.value.len()));
    counting.end();
    Ok(ended)
}

/// Stores items in consecutive parts, each with the time of one operation. After a part whose
/// outcomes are unknown, the items behind it are not written, and have its error.
async fn write_in_parts<T: Transport>(
    client: &Arc<Inner<T>>,
    mode: WriteMode,
    items: &[Item<'_, T>],
    config: &ReplicateConfig,
    counting: &mut Counting<'_>,
) -> Result<Vec<Result<PutOutcome>>> {
    let mut outcomes = Vec::new();
    loop {
        let done = outcomes.len();
        // Parts end front to back, so the objects of one call to the master stay together.
        let count = (items.len() - done).min(PART_OBJECTS);
        let part = &items[done..done + count];
        let config = part_of(config, done, count, items.len(), |i| items[i].key);
        match write_part(client, mode, part, &config, counting).await {
            Ok(ended) if count == items.len() => return Ok(ended),
            Ok(ended) => outcomes.extend(ended),
            Err(error) if done == 0 => return Err(error),
            Err(error) => {
                outcomes.resize_with(items.len(), || Err(error.clone()));
            }
        }
        if outcomes.len() >= items.len() {
            return Ok(outcomes);
        }
    }
}

/// Stores the items of one part.
async fn write_part<T: Transport>(
    client: &Arc<Inner<T>>,
    mode: WriteMode,
    items: &[Item<'_, T>],
    config: &ReplicateConfig,
    counting: &mut Counting<'_>,
) -> Result<Vec<Result<PutOutcome>>> {
    let deadline = client.deadline();
    client.forget(items.iter().map(|item| item.key));
    let mut outcomes: Outcomes = items.iter().map(|item| refusal(client, item).map(Err)).collect();
    let repeated = repeated(mode, items, &outcomes);
    for &(item, _) in &repeated {
        outcomes[item] = Some(Ok(PutOutcome::Existed));
    }
    let mut retry = RetryOnFull::new(client, &deadline);
    // The wait for free space has a limit of its own.
    let (mut failures, mut has_response) = (Failures::default(), false);
    while failures.counted < ATTEMPTS {
        let pending: Vec<usize> = (0..items.len()).filter(|&i| outcomes[i].is_none()).collect();
        if pending.is_empty() {
            break;
        }
        report_unreachable(client, &deadline).await;
        let config = placement(client, config, &failures);
        let mut writing = Writing::new(client, mode, &deadline);
        match writing.start(items, &pending, &config, &mut outcomes).await {
            Ok(()) => {}
            Err(error) if !has_response => return Err(error),
            Err(error) => {
                for i in pending {
                    outcomes[i] = Some(Err(error.clone()));
                }
                break;
            }
        }
        has_response = true;
        writing.reach_owners(items, &config).await;
        let start = counting.transfer_start();
        writing.transfer(items).await;
        counting.record_transfer(start, writing.landed_bytes(items));
        writing.finish(items, &mut failures, &mut outcomes).await;
        if pending.iter().any(|&i| outcomes[i].is_none()) {
            failures.end_attempt(client, &deadline).await;
        }
        let mut full = pending;
        full.retain(|&i| outcomes[i].as_ref().is_some_and(is_full));
        let puts = full.iter().map(|&i| PutItem { key: items[i].key, len: items[i].value.len() as u64 });
        if !full.is_empty() && failures.counted < ATTEMPTS && retry.wait(client, mode, &config, puts).await {
            full.into_iter().for_each(|i| outcomes[i] = None);
        }
    }
    // The cache may have begun to fetch the previous value meanwhile.
    client.forget(items.iter().map(|item| item.key));
    for (item, stored) in repeated {
        if let Some(Err(error)) = &outcomes[stored] {
            outcomes[item] = Some(Err(error.clone()));
        }
    }
    let lost = || Err(Error::internal("a put without an outcome"));
    let mut ended: Vec<_> = outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect();
    let keys = || items.iter().map(|item| item.key);
    retry.name_refusal(keys(), &mut ended);
    let mut ended: Vec<_> = ended.into_iter().map(|outcome| outcome.map_err(too_large)).collect();
    explain(client, config, keys(), &mut ended).await;
    if ended.iter().any(|outcome| matches!(outcome, Ok(PutOutcome::Stored))) {
        client.has_stored.store(true, Relaxed);
    }
    Ok(ended)
}

/// Failed attempts of one put.
#[derive(Default)]
struct Failures {
    /// Attempts that failed, all of them.
    attempts: usize,
    /// Attempts that count towards `ATTEMPTS`.
    counted: usize,
    /// Attempts whose writes the master had dropped.
    dropped: u32,
    /// Endpoints of the clients that failed in earlier attempts.
    endpoints: Vec<String>,
    /// Endpoints of other clients that failed in the present attempt.
    new_endpoints: Vec<String>,
    /// True if the present attempt counts.
    counts: bool,
    /// True if the master has dropped a write of the present attempt.
    drops: bool,
}

impl Failures {
    /// Returns whether the next attempt that counts is the last one.
    fn is_last(&self) -> bool {
        self.counted + 1 == ATTEMPTS
    }

    /// Returns whether a write that failed at this endpoint may be repeated.
    fn may_repeat(&self, at: Option<&str>) -> bool {
        !self.is_last() || at.is_some_and(|at| !self.endpoints.iter().any(|other| other == at))
    }

    /// Records a write that is to be repeated. `at` is the endpoint of the client that failed.
    fn record<T: Transport>(&mut self, client: &Inner<T>, at: Option<&str>) {
        match at {
            Some(at) if self.endpoints.iter().any(|other| other == at) => {
                // The master has granted memory of this client twice, so it does not know of the
                // failure. The client may be alive and refuse the address.
                client.unreachable.report(at);
                self.counts = true;
            }
            Some(at) if self.new_endpoints.iter().any(|other| other == at) => {}
            Some(at) => self.new_endpoints.push(at.to_owned()),
            None => self.counts = true,
        }
    }

    /// Ends an attempt after which items are left. Waits for a moment if the master has dropped
    /// writes more than once.
    async fn end_attempt<T: Transport>(&mut self, client: &Inner<T>, deadline: &Deadline) {
        self.attempts += 1;
        self.counted += usize::from(std::mem::take(&mut self.counts));
        self.endpoints.append(&mut self.new_endpoints);
        if !std::mem::take(&mut self.drops) {
            return;
        }
        self.dropped += 1;
        if self.dropped > 1 {
            let pause = (Duration::from_millis(5) * (1 << self.dropped.min(8))).min(MAX_PAUSE);
            tokio::time::sleep(pause.min(deadline.left())).await;
        }
        tracing::debug!(client = %client.id, "a write that the master has dropped is repeated");
    }
}

/// Reports clients that could not be reached to the master, before space is requested.
pub(crate) async fn report_unreachable<T: Transport>(client: &Inner<T>, deadline: &Deadline) {
    for endpoint in client.unreachable.take_unreported() {
        let call = client.master.report_unreachable(client.id, &endpoint);
        if let Err(error) = deadline.bound("report of an unreachable client", call).await {
            tracing::debug!(%endpoint, "the master was not notified of an unreachable client: {error}");
        }
    }
}

/// Returns the items that are not stored because another item has the same key, each with the item
/// that is stored. The result is as if the items came one after the other: a put stores the first,
/// an upsert the last. In one call, the master would grant the same space to both.
fn repeated<T: Transport>(mode: WriteMode, items: &[Item<'_, T>], refused: &Outcomes) -> Vec<(usize, usize)> {
    if items.len() < 2 {
        return Vec::new();
    }
    let requested: Vec<usize> = (0..items.len()).filter(|&item| refused[item].is_none()).collect();
    let mut stored = HashMap::with_capacity(requested.len());
    for &item in &requested {
        let stored = stored.entry(items[item].key).or_insert(item);
        if mode == WriteMode::Upsert {
            *stored = item;
        }
    }
    let stored = requested.iter().map(|&item| (item, stored.get(items[item].key).copied().unwrap_or(item)));
    stored.filter(|(item, stored)| item != stored).collect()
}

/// Checks an item before any request is sent. Returns the reason to refuse the item.
fn refusal<T: Transport>(client: &Inner<T>, item: &Item<'_, T>) -> Option<Error> {
    if let Err(error) = ObjectKey::check(item.key) {
        return Some(error.into());
    }
    if item.value.len() == 0 {
        return Some(Error::invalid("a value must not be empty").context(display_key(item.key)));
    }
    if client.staging.is_none() && item.value.staged(client.needs_registration()).is_some() {
        return Some(Error::invalid(
            "this client has no local buffer: put from registered memory, or give it one",
        ));
    }
    None
}

/// Returns the placement for a request for space. The master notices the failure of a client later
/// than the clients that use it. So after a failed attempt, memory of this client is preferred. The
/// last attempt asks for one replica only.
fn placement<'c, T: Transport>(
    client: &Inner<T>,
    config: &'c ReplicateConfig,
    failures: &Failures,
) -> Cow<'c, ReplicateConfig> {
    if failures.attempts == 0 {
        return Cow::Borrowed(config);
    }
    let mut config = config.clone();
    if !client.segments.lock().is_empty() {
        let mut preferred = vec![client.name.clone()];
        preferred.extend(config.preferred().iter().filter(|name| **name != client.name).cloned());
        config.preferred_segment.clear();
        config.preferred_segments = preferred;
    }
    if failures.is_last() {
        config.replicas = config.replicas.min(1);
    }
    Cow::Owned(config)
}

/// Returns the configuration for some of the items, of which there are `all` with these keys. Each
/// item has its own items of lists, and hints are about the first key.
pub(crate) fn config_of_items<'c, 'k>(
    config: &'c ReplicateConfig,
    some: &[usize],
    all: usize,
    key: impl Fn(usize) -> &'k [u8],
) -> Cow<'c, ReplicateConfig> {
    let mut config = if some.len() < all && config.has_lists() {
        Cow::Owned(config.of_keys(some.iter().copied(), all))
    } else {
        Cow::Borrowed(config)
    };
    let first = some.first().copied().unwrap_or_default();
    if first > 0 && config.hints.is_some() {
        let config = config.to_mut();
        config.hints = config.hints.take().map(|hints| Box::new(hints.after_keys(first, key(first - 1))));
    }
    config
}

/// Names the group of an item that the master has refused, because the response has only a code.
fn with_group(error: Error, mode: WriteMode, config: &ReplicateConfig, item: usize) -> Error {
    let group = config.group_ids.as_ref().and_then(|groups| groups.get(item));
    match (error.code(), mode, group) {
        (ErrorCode::InvalidParams, WriteMode::Upsert, Some(group)) => Error::invalid(format!(
            "cannot write object: the master refused it. group={group:?}; an existing object stays in its group, so remove it first, or name no group"
        ))
        .with_source(error),
        _ => error,
    }
}

impl<'a, T: Transport> Writing<'a, T> {
    fn new(client: &'a Arc<Inner<T>>, mode: WriteMode, deadline: &'a Deadline) -> Self {
        Self {
            client,
            deadline,
            attempt: Attempt::new(client, mode),
            unanswered_keys: Vec::new(),
            grants: Vec::new(),
            targets: Vec::new(),
            endpoints: Vec::new(),
            look_ups: client.engine.look_ups(),
            peers: Vec::new(),
            submissions: VecDeque::new(),
            has_other_replicas: false,
        }
    }

    /// Requests space for the items in `pending`. Items that are refused permanently get their
    /// outcome.
    async fn start(
        &mut self,
        items: &[Item<'a, T>],
        pending: &[usize],
        config: &ReplicateConfig,
        outcomes: &mut Outcomes,
    ) -> Result<()> {
        let config = &config_of_items(config, pending, items.len(), |i| items[i].key);
        let item = |&i: &usize| PutItem { key: items[i].key, len: items[i].value.len() as u64 };
        let requested: Vec<PutItem<'_>> = pending.iter().map(item).collect();
        let keys = requested.iter().map(|item| item.key);
        let mut reserved = self.client.reserve_files(keys, self.deadline).await?.into_iter();
        self.unanswered_keys.extend(pending.iter().map(|&i| items[i].key));
        let results = self.attempt.request_space(self.client, &requested, config, self.deadline).await?;
        self.unanswered_keys.clear();
        self.grants.reserve(results.len());
        self.targets.reserve(results.len());
        for (at, (&i, result)) in pending.iter().zip(results).enumerate() {
            let file = reserved.next();
            match result {
                Ok(replicas) => self.grant(i, &items[i], &replicas, file),
                Err(error) if error.code() == ErrorCode::ObjectAlreadyExists => {
                    outcomes[i] = Some(Ok(PutOutcome::Existed));
                }
                Err(error) => {
                    let error = with_group(error, self.attempt.mode, config, at);
                    outcomes[i] = Some(Err(error.context(display_key(items[i].key))));
                }
            }
        }
        Ok(())
    }

    fn grant(
        &mut self,
        item: usize,
        object: &Item<'a, T>,
        replicas: &[Replica],
        mut file: Option<GrantedFile>,
    ) {
        let grant = self.grants.len();
        self.grants.push(Grant {
            item,
            key: object.key,
            checksum: None,
            failure: None,
            failed_at: None,
            late: false,
            settled: false,
            file: None,
        });
        let mut written = false;
        for replica in replicas {
            let Some(at) = replica.location.memory() else {
                self.has_other_replicas = true;
                if let ReplicaLocation::Disk { path, .. } = &replica.location {
                    self.grants[grant].file = Some(self.client.file_grant(object.key, path, file.take()));
                }
                continue;
            };
            if at.size != object.value.len() as u64 {
                let text = format!("the master granted {} bytes for {}", at.size, object.value.len());
                return self.grants[grant].fail(Error::internal(text));
            }
            let peer = self.peer(&at.endpoint);
            self.targets.push(ReplicaTarget { grant, peer, remote: at.address });
            written = true;
        }
        if !written {
            self.grants[grant].fail(Error::internal("the master granted no memory to write to"));
        }
    }

    /// Connects to the clients whose memory was granted. If a client was found after the master was
    /// asked, the grant may be in memory of an earlier process. So the master is asked again, and
    /// repeats the grant only if the grant is still valid. A master that does not [fence
    /// writes](mooncake_protocol::master_client::MasterClient::fences_writes) cannot repeat it.
    async fn reach_owners(&mut self, items: &[Item<'a, T>], config: &ReplicateConfig) {
        let mut reached = self.client.reach_granted(&self.endpoints, self.look_ups, self.deadline).await;
        if reached.iter().any(is_newer) && !self.deadline.is_over() {
            self.look_ups = self.client.engine.look_ups();
            if self.client.master.fences_writes() {
                self.confirm_grants(items, config).await;
            }
            reached = self.client.reach_granted(&self.endpoints, self.look_ups, self.deadline).await;
        }
        self.peers = reached.into_iter().map(|reached| reached.map_err(|why| why.error().clone())).collect();
    }

    /// Requests the same space again, and fails the grants that are no longer valid.
    async fn confirm_grants(&mut self, items: &[Item<'a, T>], config: &ReplicateConfig) {
        let indices: Vec<usize> = self.grants.iter().map(|grant| grant.item).collect();
        let config = config_of_items(config, &indices, items.len(), |i| items[i].key);
        let item = |&i: &usize| PutItem { key: items[i].key, len: items[i].value.len() as u64 };
        let requested: Vec<PutItem<'_>> = indices.iter().map(item).collect();
        match self.attempt.request_space(self.client, &requested, &config, self.deadline).await {
            Ok(results) => {
                let mut runs = GrantRuns(&self.targets);
                for (grant, result) in results.into_iter().enumerate() {
                    let granted =
                        runs.take(grant).iter().map(|target| (&*self.endpoints[target.peer], target.remote));
                    if !result.is_ok_and(|replicas| are_at(&replicas, granted)) {
                        self.grants[grant].fail(Error::new(ErrorCode::TransferFail, REPLACED));
                    }
                }
            }
            Err(error) => self.grants.iter_mut().for_each(|grant| grant.fail(error.clone())),
        }
    }

    /// Returns the number of bytes that have arrived, summed over all replicas.
    fn landed_bytes(&self, items: &[Item<'_, T>]) -> u64 {
        let landed = self.targets.iter().map(|target| &self.grants[target.grant]);
        let landed = landed.filter(|grant| grant.failure.is_none());
        landed.map(|grant| items[grant.item].value.len() as u64).sum()
    }

    /// Returns the index of the client at that endpoint.
    fn peer(&mut self, endpoint: &str) -> usize {
        // A linear search is enough, because a put has only a few clients.
        self.endpoints.iter().position(|e| e == endpoint).unwrap_or_else(|| {
            self.endpoints.push(endpoint.to_owned());
            self.endpoints.len() - 1
        })
    }

    /// Ends the writes that have arrived, and returns the space of the others. Items that may be
    /// tried again get no outcome.
    async fn finish(mut self, items: &[Item<'_, T>], failures: &mut Failures, outcomes: &mut Outcomes) {
        failures.drops = self.end(outcomes).await;
        self.keep_files(items, outcomes).await;
        let is_revocable = |grant: &&Grant<'_>| grant.failure.is_some() && !grant.late;
        let keys: Vec<&[u8]> = self.grants.iter().filter(is_revocable).map(|grant| grant.key).collect();
        let revoked = keys.is_empty() || self.attempt.revoke(self.client, &keys, self.deadline).await;
        for grant in &mut self.grants {
            let Some(error) = grant.failure.take() else { continue };
            grant.settled = grant.late || revoked;
            let at = grant.failed_at.map(|peer| &*self.endpoints[peer]);
            if !grant.late && revoked && failures.may_repeat(at) && !self.deadline.is_over() {
                failures.record(self.client, at);
            } else {
                outcomes[grant.item] = Some(Err(error.context(display_key(grant.key))));
            }
        }
    }

    /// Writes stored values to the granted files, in the background.
    async fn keep_files(&mut self, items: &[Item<'_, T>], outcomes: &Outcomes) {
        let mut unwritten = Vec::new();
        for grant in &mut self.grants {
            let Some(file) = grant.file.take() else { continue };
            if !matches!(outcomes[grant.item], Some(Ok(_))) {
                continue;
            }
            let (attempt, key) = (self.attempt, grant.key.to_vec());
            let put = FilePut { attempt, key, file, checksum: grant.checksum };
            if let Err(put) = self.client.write_file_in_background(put, &items[grant.item].value).await {
                unwritten.push(put);
            }
        }
        if !unwritten.is_empty() {
            let (client, attempt) = (self.client.clone(), self.attempt);
            self.client.runtime.spawn(async move {
                let keys: Vec<&[u8]> = unwritten.iter().map(|put| &*put.key).collect();
                attempt.refuse_files(&client, &keys).await;
            });
        }
    }

    /// Makes the values that have arrived readable. A write that the master has dropped gets no
    /// outcome if it may be repeated. Returns whether there is one.
    async fn end(&mut self, outcomes: &mut Outcomes) -> bool {
        let landed = |grant: &&Grant<'_>| grant.failure.is_none();
        let item = |grant: &Grant<'a>| EndItem { key: grant.key, checksum: grant.checksum };
        let items: Vec<EndItem<'_>> = self.grants.iter().filter(landed).map(item).collect();
        if items.is_empty() {
            return false;
        }
        let kind = if self.has_other_replicas { ReplicaType::Memory } else { ReplicaType::All };
        let (response, calls) = self.attempt.end(self.client, &items, kind, self.deadline, 2).await;
        let mut drops = false;
        let ended = self.grants.iter_mut().filter(|grant| grant.failure.is_none());
        match response {
            Ok(results) => {
                // A first call without a response may have made the value readable, and another
                // client may have removed it since. A repetition would bring it back.
                let repeatable = calls == 1 || is_planted("repeats-puts-with-a-lost-end");
                let repeatable = repeatable && !self.deadline.is_over();
                for (grant, result) in ended.zip(results) {
                    grant.settled = true;
                    outcomes[grant.item] = match result {
                        Ok(()) => Some(Ok(PutOutcome::Stored)),
                        Err(error) if repeatable && is_dropped(&error) => {
                            drops = true;
                            None
                        }
                        Err(error) => Some(Err(dropped_write(error).context(display_key(grant.key)))),
                    };
                }
            }
            // The request may still reach the master and must not end another grant of the same
            // key. So the grant is not revoked. The master reclaims the space by itself.
            Err(error) => ended.for_each(|grant| {
                grant.settled = true;
                outcomes[grant.item] = Some(Err(error.clone().context(display_key(grant.key))));
            }),
        }
        drops
    }
}

/// Targets of grants, for passes over the grants in their order. Targets are in the order of their
/// grants, so a pass takes one step per target.
struct GrantRuns<'t>(&'t [ReplicaTarget]);

impl<'t> GrantRuns<'t> {
    /// Returns the targets of a grant. Each call names a later grant than the call before.
    fn take(&mut self, grant: usize) -> &'t [ReplicaTarget] {
        let later = self.0.iter().take_while(|target| target.grant < grant).count();
        let of_grant = self.0[later..].iter().take_while(|target| target.grant == grant).count();
        let (run, rest) = self.0[later..].split_at(of_grant);
        self.0 = rest;
        run
    }
}

/// Error text for granted space whose owner was replaced by another process.
pub(crate) const REPLACED: &str = "cannot write to granted space: its owner was replaced by another process";

/// Returns whether the replicas in memory are at these endpoints and addresses, in this order.
pub(crate) fn are_at<'a>(replicas: &[Replica], mut granted: impl Iterator<Item = (&'a str, u64)>) -> bool {
    let mut memory = replicas.iter().filter_map(|replica| replica.location.memory());
    let all = granted.all(|(endpoint, address)| {
        memory.next().is_some_and(|at| at.endpoint == endpoint && at.address == address)
    });
    all && memory.next().is_none()
}

/// Returns whether the master has ended a write without its writer: every segment of the write has
/// left, the master was restarted, or another client writes the key now. Nothing of the write is
/// left, so the writer may repeat it with the same bytes.
fn is_dropped(error: &Error) -> bool {
    let dropped = matches!(
        error.code(),
        ErrorCode::ObjectNotFound | ErrorCode::InvalidWrite | ErrorCode::IllegalClient
    );
    dropped && !is_planted("put-fails-with-its-segment")
}

/// Converts the error of a master that no longer has a write. The master was restarted, or has lost
/// the memory that was granted. After a restart, an earlier value of this client may be there
/// again.
pub(crate) fn dropped_write(error: Error) -> Error {
    match error.code() {
        ErrorCode::ObjectNotFound | ErrorCode::InvalidWrite => {
            let text = "cannot end put: the master no longer has this write; put the object again";
            Error::new(ErrorCode::UnavailableInCurrentStatus, text).with_source(error)
        }
        _ => error,
    }
}

impl<T: Transport> Drop for Writing<'_, T> {
    fn drop(&mut self) {
        // Space that may have been granted is revoked only if the revoke cannot affect another
        // write.
        let unanswered_keys = if self.client.master.fences_writes() {
            std::mem::take(&mut self.unanswered_keys)
        } else {
            Vec::new()
        };
        if unanswered_keys.is_empty() && self.grants.iter().all(|grant| grant.settled) {
            return;
        }
        let (client, attempt) = (self.client.clone(), self.attempt);
        let unanswered_keys: Vec<Vec<u8>> = unanswered_keys.into_iter().map(<[u8]>::to_vec).collect();
        let mut grants: Vec<(Vec<u8>, bool)> =
            self.grants.iter().map(|grant| (grant.key.to_vec(), grant.late || grant.settled)).collect();
        let submissions = std::mem::take(&mut self.submissions);
        self.client.runtime.spawn(async move {
            for submission in submissions {
                for (grant, result) in submission.landed().await {
                    grants[grant].1 |= result.is_err_and(|error| error.kind() == ErrorKind::Timeout);
                }
            }
            let unsettled = grants.iter().filter(|(_, is_settled)| !is_settled);
            let unsettled = unsettled.map(|(key, _)| key.as_slice());
            let keys: Vec<&[u8]> = unsettled.chain(unanswered_keys.iter().map(Vec::as_slice)).collect();
            if !keys.is_empty() {
                attempt.revoke_requested(&client, &keys, unanswered_keys.is_empty()).await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_the_master_dropped_may_be_repeated() {
        for code in [ErrorCode::ObjectNotFound, ErrorCode::InvalidWrite] {
            let error = dropped_write(code.into());
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
        assert_eq!(dropped_write(ErrorCode::IllegalClient.into()).code(), ErrorCode::IllegalClient);
    }

    /// A pass that scans all targets for each grant takes 10^12 steps here.
    #[test]
    fn targets_are_found_in_one_pass() {
        const GRANTS: usize = 1 << 20;
        let target = |grant| ReplicaTarget { grant, peer: 0, remote: grant as u64 };
        // Every third grant has no target, and the others have one or two.
        let targets: Vec<ReplicaTarget> =
            (0..GRANTS).flat_map(|grant| (0..grant % 3).map(move |_| target(grant))).collect();
        let mut runs = GrantRuns(&targets);
        for grant in 0..GRANTS {
            let run = runs.take(grant);
            assert_eq!(run.len(), grant % 3);
            assert!(run.iter().all(|target| target.remote == grant as u64));
        }
        let mut some = GrantRuns(&targets);
        assert_eq!(some.take(5).len(), 2, "a pass may leave grants out");
        assert_eq!(some.take(6).len(), 0);
        assert_eq!(some.take(7).len(), 1);
    }
}
