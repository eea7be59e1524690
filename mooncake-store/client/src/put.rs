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

use mooncake_core::ids::ObjectKey;
use mooncake_core::replica::{Replica, ReplicaLocation, ReplicaType, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;

use crate::attempt::{Attempt, REVOKE_PAUSE};
use crate::deadline::{Deadline, late};
use crate::disk::GrantedFile;
use crate::errors::shown;
use crate::metrics::Operation;
use crate::offload::FilePut;
use crate::payload::{Item, PutOutcome};
use crate::retry_on_full::{RetryOnFull, is_full, too_large};
use crate::state::{Inner, is_newer};
use crate::writing::{Grant, Target, Writing};
use mooncake_protocol::api::{EndItem, PutItem, WriteMode};

/// Maximum number of requests for space if clients that were to hold the object cannot be reached.
const ATTEMPTS: usize = 4;

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
    let deadline = client.deadline();
    client.forget(items.iter().map(|item| item.key));
    let mut outcomes: Outcomes = items.iter().map(|item| refusal(client, item).map(Err)).collect();
    let repeated = repeated(mode, items, &outcomes);
    for &(item, _) in &repeated {
        outcomes[item] = Some(Ok(PutOutcome::Existed));
    }
    let mut retry = RetryOnFull::new(client, &deadline);
    // Only attempts with failed clients are counted. The wait for free space has a limit of its
    // own.
    let (mut attempt, mut asked) = (0, false);
    while attempt < ATTEMPTS {
        let pending: Vec<usize> = (0..items.len()).filter(|&i| outcomes[i].is_none()).collect();
        if pending.is_empty() {
            break;
        }
        tell(client, &deadline).await;
        let config = placement(client, config, attempt);
        let mut writing = Writing::new(client, mode, &deadline);
        match writing.start(items, &pending, &config, &mut outcomes).await {
            Ok(()) => {}
            Err(error) if !asked => return Err(error),
            Err(error) => {
                for i in pending {
                    outcomes[i] = Some(Err(error.clone()));
                }
                break;
            }
        }
        asked = true;
        writing.reach_owners(items, &config).await;
        let since = counting.moving();
        writing.transfer(items).await;
        counting.moved(since, writing.landed_bytes(items));
        writing.finish(items, attempt + 1 == ATTEMPTS, &mut outcomes).await;
        attempt += usize::from(pending.iter().any(|&i| outcomes[i].is_none()));
        let mut full = pending;
        full.retain(|&i| outcomes[i].as_ref().is_some_and(is_full));
        if !full.is_empty() && attempt < ATTEMPTS && retry.wait(client).await {
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
    let ended: Vec<_> =
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost).map_err(too_large)).collect();
    ended.iter().zip(items).for_each(|(outcome, item)| counting.written(outcome, item.value.len()));
    counting.end();
    Ok(ended)
}

/// Reports clients that could not be reached to the master, before space is requested.
async fn tell<T: Transport>(client: &Inner<T>, deadline: &Deadline) {
    for endpoint in client.unreachable.take_untold() {
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
    let asked: Vec<usize> = (0..items.len()).filter(|&item| refused[item].is_none()).collect();
    let mut stored = HashMap::with_capacity(asked.len());
    for &item in &asked {
        let stored = stored.entry(items[item].key).or_insert(item);
        if mode == WriteMode::Upsert {
            *stored = item;
        }
    }
    let stored = asked.iter().map(|&item| (item, stored.get(items[item].key).copied().unwrap_or(item)));
    stored.filter(|(item, stored)| item != stored).collect()
}

/// Checks an item before any request is sent. Returns the reason to refuse the item.
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

/// Returns the placement for a request for space. The master notices the failure of a client later
/// than the clients that use it. So after a failed attempt, memory of this client is preferred. The
/// last attempt asks for one replica only.
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

/// Returns the configuration for some of the items, of which there are `all` with these keys. Each
/// item has a group of its own, and hints are about the first key.
pub(crate) fn of_some<'c, 'k>(
    config: &'c ReplicateConfig,
    some: &[usize],
    all: usize,
    key: impl Fn(usize) -> &'k [u8],
) -> Cow<'c, ReplicateConfig> {
    let mut config = match &config.group_ids {
        Some(groups) if some.len() < all && groups.len() == all => {
            let group_ids = Some(some.iter().map(|&i| groups[i].clone()).collect());
            Cow::Owned(ReplicateConfig { group_ids, ..config.clone() })
        }
        _ => Cow::Borrowed(config),
    };
    let first = some.first().copied().unwrap_or_default();
    if first > 0 && config.hints.is_some() {
        let config = config.to_mut();
        config.hints = config.hints.take().map(|hints| Box::new(hints.after_keys(first, key(first - 1))));
    }
    config
}

impl<'a, T: Transport> Writing<'a, T> {
    fn new(client: &'a Arc<Inner<T>>, mode: WriteMode, deadline: &'a Deadline) -> Self {
        Self {
            client,
            deadline,
            attempt: Attempt::new(client, mode),
            asking: Vec::new(),
            grants: Vec::new(),
            targets: Vec::new(),
            endpoints: Vec::new(),
            known: client.engine.look_ups(),
            peers: Vec::new(),
            flights: VecDeque::new(),
            others: false,
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
        let config = &of_some(config, pending, items.len(), |i| items[i].key);
        let item = |&i: &usize| PutItem { key: items[i].key, len: items[i].value.len() as u64 };
        let asked: Vec<PutItem<'_>> = pending.iter().map(item).collect();
        let keys = asked.iter().map(|item| item.key);
        let mut reserved = self.client.reserve_files(keys, self.deadline).await?.into_iter();
        self.asking.extend(pending.iter().map(|&i| items[i].key));
        let answers = self.ask(&asked, config).await?;
        self.asking.clear();
        self.grants.reserve(answers.len());
        self.targets.reserve(answers.len());
        for (&i, answer) in pending.iter().zip(answers) {
            let file = reserved.next();
            match answer {
                Ok(replicas) => self.grant(i, &items[i], &replicas, file),
                Err(error) if error.code() == ErrorCode::ObjectAlreadyExists => {
                    outcomes[i] = Some(Ok(PutOutcome::Existed));
                }
                Err(error) => outcomes[i] = Some(Err(error.context(shown(items[i].key)))),
            }
        }
        Ok(())
    }

    /// Sends a request for space. The request is repeated once if the master recognizes
    /// repetitions, so that a lost response does not fail the put.
    async fn ask(
        &self,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        let Attempt { mode, number, .. } = self.attempt;
        let call = || self.client.master.put_start(self.client.caller(number), mode, items, config);
        match self.deadline.bound("put start", call()).await {
            Err(error)
                if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
                    && self.client.master.fences_writes()
                    && !self.deadline.is_over() =>
            {
                self.deadline.bound("put start", call()).await
            }
            answer => answer,
        }
    }

    fn grant(
        &mut self,
        item: usize,
        wanted: &Item<'a, T>,
        replicas: &[Replica],
        mut file: Option<GrantedFile>,
    ) {
        let grant = self.grants.len();
        self.grants.push(Grant {
            item,
            key: wanted.key,
            checksum: None,
            failure: None,
            late: false,
            settled: false,
            file: None,
        });
        let mut written = false;
        for replica in replicas {
            let Some(at) = replica.location.memory() else {
                self.others = true;
                if let ReplicaLocation::Disk { path, .. } = &replica.location {
                    self.grants[grant].file = Some(self.client.grant_of_file(wanted.key, path, file.take()));
                }
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

    /// Connects to the clients whose memory was granted. If a client was found after the master was
    /// asked, the grant may be in memory of an earlier process. So the master is asked again, and
    /// repeats the grant only if the grant is still valid. A master that does not [fence
    /// writes](mooncake_protocol::master_client::MasterClient::fences_writes) cannot repeat it.
    async fn reach_owners(&mut self, items: &[Item<'a, T>], config: &ReplicateConfig) {
        let mut reached = self.client.reach_granted(&self.endpoints, self.known, self.deadline).await;
        if reached.iter().any(is_newer) && !self.deadline.is_over() {
            self.known = self.client.engine.look_ups();
            if self.client.master.fences_writes() {
                self.confirm_grants(items, config).await;
            }
            reached = self.client.reach_granted(&self.endpoints, self.known, self.deadline).await;
        }
        self.peers = reached.into_iter().map(|reached| reached.map_err(|why| why.error().clone())).collect();
    }

    /// Requests the same space again, and fails the grants that are no longer valid.
    async fn confirm_grants(&mut self, items: &[Item<'a, T>], config: &ReplicateConfig) {
        let of: Vec<usize> = self.grants.iter().map(|grant| grant.item).collect();
        let config = of_some(config, &of, items.len(), |i| items[i].key);
        let item = |&i: &usize| PutItem { key: items[i].key, len: items[i].value.len() as u64 };
        let asked: Vec<PutItem<'_>> = of.iter().map(item).collect();
        match self.ask(&asked, &config).await {
            Ok(answers) => {
                for (grant, answer) in answers.into_iter().enumerate() {
                    let targets = self.targets.iter().filter(|target| target.grant == grant);
                    let granted = targets.map(|target| (&*self.endpoints[target.peer], target.remote));
                    if !answer.is_ok_and(|replicas| are_at(&replicas, granted)) {
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
    /// tried again get no outcome, unless `last` is set.
    async fn finish(mut self, items: &[Item<'_, T>], last: bool, outcomes: &mut Outcomes) {
        self.end(outcomes).await;
        self.keep_files(items, outcomes).await;
        let clean = |grant: &&Grant<'_>| grant.failure.is_some() && !grant.late;
        let keys: Vec<&[u8]> = self.grants.iter().filter(clean).map(|grant| grant.key).collect();
        let revoked = keys.is_empty() || self.attempt.revoke(self.client, &keys, self.deadline).await;
        for grant in &mut self.grants {
            let Some(error) = grant.failure.take() else { continue };
            grant.settled = grant.late || revoked;
            if grant.late || !revoked || last || self.deadline.is_over() {
                outcomes[grant.item] = Some(Err(error.context(shown(grant.key))));
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
            if let Err(put) = self.client.keep_in_file(put, &items[grant.item].value).await {
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

    async fn end(&mut self, outcomes: &mut Outcomes) {
        let landed = |grant: &&Grant<'_>| grant.failure.is_none();
        let item = |grant: &Grant<'a>| EndItem { key: grant.key, checksum: grant.checksum };
        let items: Vec<EndItem<'_>> = self.grants.iter().filter(landed).map(item).collect();
        if items.is_empty() {
            return;
        }
        let kind = if self.others { ReplicaType::Memory } else { ReplicaType::All };
        let Attempt { mode, number, .. } = self.attempt;
        let call = || self.client.master.put_end(self.client.caller(number), mode, &items, kind);
        let mut answer = Err(late("put end: others may write the key by now"));
        // The bytes have arrived and the call may be repeated, so a lost response need not fail the
        // put.
        for _ in 0..2 {
            if answer.is_err() && !self.deadline.is_over() && self.attempt.is_ours(self.client) {
                answer = self.deadline.bound("put end", call()).await;
            }
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
            // The request may still reach the master and must not end another grant of the same
            // key. So the grant is not revoked. The master reclaims the space by itself.
            Err(error) => ended.for_each(|grant| {
                grant.settled = true;
                outcomes[grant.item] = Some(Err(error.clone().context(shown(grant.key))));
            }),
        }
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

/// Converts the error of a master that no longer knows a write. The master was restarted, or has
/// lost the memory that was granted.
fn forgotten(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => {
            Error::new(ErrorCode::UnavailableInCurrentStatus, "the master dropped this write before it ended")
                .with_source(error)
        }
        _ => error,
    }
}

impl<T: Transport> Drop for Writing<'_, T> {
    fn drop(&mut self) {
        // Space that may have been granted is revoked only if the revoke cannot affect another
        // write.
        let asking =
            if self.client.master.fences_writes() { std::mem::take(&mut self.asking) } else { Vec::new() };
        if asking.is_empty() && self.grants.iter().all(|grant| grant.settled) {
            return;
        }
        let (client, attempt) = (self.client.clone(), self.attempt);
        let asking: Vec<Vec<u8>> = asking.into_iter().map(<[u8]>::to_vec).collect();
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
            let open = open.map(|(key, _)| key.as_slice());
            let keys: Vec<&[u8]> = open.chain(asking.iter().map(Vec::as_slice)).collect();
            if keys.is_empty() || !attempt.revoke_until_heard(&client, &keys).await || asking.is_empty() {
                return;
            }
            // The master may have received the request for space, whose response never arrived,
            // after the first revoke.
            tokio::time::sleep(REVOKE_PAUSE).await;
            attempt.revoke(&client, &keys, &client.deadline()).await;
        });
    }
}
