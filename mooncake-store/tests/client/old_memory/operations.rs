//! Operations of the test: writes of each kind, removals, and reads that are compared.

use bytes::Bytes;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::client::{Client, PutOptions, RangeRead, RangeWrite, Reservation};
use mooncake_transport::Slice;
use mooncake_transport::testkit::Faults;

use super::expected::{Key, name};
use super::stage::{Member, SEGMENT, Stage, run};
use crate::faults::Wire;

/// Number of keys of each tenant. Memory does not hold all of their objects.
const KEYS: u64 = 24;
/// Number of sessions that are open at a time.
const SESSIONS: usize = 6;

/// Object that is written in parts, and its bytes as far as they were written.
pub(super) struct Session {
    key: Key,
    reservation: Reservation,
    bytes: Vec<Option<u8>>,
}

fn filled(client: &Client<Wire>, bytes: &[u8]) -> Slice<Wire> {
    let mut slice = client.memory().alloc(bytes.len()).unwrap().exclusive().unwrap();
    slice.copy_from(0, bytes).unwrap();
    slice.into_shared()
}

impl Stage {
    fn key_of(&mut self, tenant: usize) -> Key {
        (tenant, self.rng.below(KEYS))
    }

    /// Returns the client of a tenant, whose transport has faults from now on.
    fn disturbed_writer(&mut self, tenant: usize) -> Member {
        let faults = self.faults();
        let writer = self.writers[tenant].clone();
        writer.1.set(faults);
        writer
    }

    fn put_options(&mut self) -> PutOptions {
        let mut options = PutOptions::new().replicas(self.rng.range(1..3));
        if self.rng.below(3) == 0 {
            let owner = self.rng.below(2) as usize;
            options = options.prefer_segment(self.owners[owner].0.hostname());
        }
        if self.rng.below(2) == 0 { options.upsert() } else { options }
    }

    /// Cuts a value into pieces of registered memory.
    fn pieces(&mut self, client: &Client<Wire>, value: &[u8]) -> Vec<Slice<Wire>> {
        let (mut pieces, mut rest) = (Vec::new(), value);
        while !rest.is_empty() {
            let most = if pieces.len() == 4 {
                rest.len()
            } else {
                self.rng.range(1..rest.len() as u64 + 1) as usize
            };
            pieces.push(filled(client, &rest[..most]));
            rest = &rest[most..];
        }
        pieces
    }

    pub(super) async fn put(&mut self) -> Result<(), String> {
        let tenant = self.tenant();
        let (key, options, drops) = (self.key_of(tenant), self.put_options(), self.drops());
        let mut value = self.value();
        if self.rng.below(3) == 0
            && let Some(len) = self.expected.len(key)
        {
            // An upsert of a value of the same length.
            value = self.values.next(&mut self.rng, len);
        }
        let (client, wire) = self.disturbed_writer(tenant);
        let (name, form) = (name(key), self.rng.below(4));
        let pieces = self.pieces(&client, &value);
        let outcome = match form {
            0 => run(&wire, drops, client.put_with(&name, &value[..], &options)).await,
            1 => run(&wire, drops, client.put_with(&name, &value, &options)).await,
            2 => run(&wire, drops, client.put_with(&name, filled(&client, &value), &options)).await,
            _ => run(&wire, drops, client.put_with(&name, pieces, &options)).await,
        };
        self.expected.record(key, &value, outcome.as_ref(), &mut self.seen);
        Ok(())
    }

    /// Puts several values, of which some may be refused: a repeated key, no bytes, too many bytes.
    pub(super) async fn batch_put(&mut self) -> Result<(), String> {
        let tenant = self.tenant();
        let (options, drops) = (self.put_options(), self.drops());
        let mut items: Vec<(Key, Bytes)> = Vec::new();
        for _ in 0..self.rng.range(2..6) {
            let value = match self.rng.below(16) {
                0 => Bytes::new(),
                1 => self.values.next(&mut self.rng, SEGMENT + 1),
                _ => self.value(),
            };
            items.push((self.key_of(tenant), value));
        }
        let (client, wire) = self.disturbed_writer(tenant);
        let outcomes = if self.rng.below(2) == 0 {
            let whole: Vec<(String, Bytes)> =
                items.iter().map(|(key, value)| (name(*key), value.clone())).collect();
            run(&wire, drops, client.batch_put(&whole, &options)).await
        } else {
            let mut split = Vec::new();
            for (key, value) in &items {
                split.push((name(*key), self.pieces(&client, value)));
            }
            run(&wire, drops, client.batch_put(&split, &options)).await
        };
        for (at, (key, value)) in items.iter().enumerate() {
            let outcome = match &outcomes {
                None => None,
                Some(Ok(outcomes)) => Some(outcomes[at].clone()),
                Some(Err(error)) => Some(Err(error.clone())),
            };
            if value.is_empty() || value.len() > SEGMENT {
                if matches!(outcome, Some(Ok(mooncake_store::client::PutOutcome::Stored))) {
                    return Err(format!("{key:?} was stored with {} bytes", value.len()));
                }
                continue;
            }
            self.expected.record(*key, value, outcome.as_ref(), &mut self.seen);
        }
        Ok(())
    }

    pub(super) async fn reserve(&mut self) {
        if self.sessions.len() >= SESSIONS {
            return;
        }
        let tenant = self.tenant();
        let (client, wire) = self.writers[tenant].clone();
        wire.set(Faults::none());
        let mut keys = Vec::new();
        for _ in 0..self.rng.range(1..3) {
            let len = self.value().len() as u64;
            keys.push((self.key_of(tenant), len));
        }
        let items: Vec<(String, u64)> = keys.iter().map(|(key, len)| (name(*key), *len)).collect();
        let config = ReplicateConfig::replicas(self.rng.range(1..3));
        let Ok(reserved) = client.ranges().reserve(&items, &config).await else { return };
        for ((key, len), reservation) in keys.into_iter().zip(reserved) {
            let Ok(reservation) = reservation else { continue };
            self.sessions.push(Session { key, reservation, bytes: vec![None; len as usize] });
        }
    }

    fn any_session(&mut self) -> Option<usize> {
        let len = self.sessions.len() as u64;
        (len > 0).then(|| self.rng.below(len) as usize)
    }

    /// Writes ranges of a session: the first missing one, or any.
    pub(super) async fn write(&mut self) -> Result<(), String> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let drops = self.drops();
        let len = self.sessions[at].bytes.len();
        let mut ranges = Vec::new();
        for _ in 0..self.rng.below(3) {
            let start = self.rng.below(len as u64) as usize;
            ranges.push(start..self.rng.range(start as u64 + 1..len as u64 + 1) as usize);
        }
        if self.rng.below(3) > 0 {
            let missing = self.sessions[at].bytes.iter().position(Option::is_none).unwrap_or_default();
            ranges.push(missing..if self.rng.below(4) > 0 { len } else { (missing + len).div_ceil(2) });
        }
        // Two writes of one call land in any order.
        ranges.sort_by_key(|range| range.start);
        ranges.dedup_by(|later, earlier| later.start < earlier.end);
        let values: Vec<Bytes> =
            ranges.iter().map(|range| self.values.next(&mut self.rng, range.len())).collect();
        let (client, wire) = self.disturbed_writer(self.sessions[at].key.0);
        let session = &mut self.sessions[at];
        let write = |(range, bytes): (&std::ops::Range<usize>, &Bytes)| RangeWrite {
            object: &session.reservation,
            offset: range.start as u64,
            from: filled(&client, bytes),
        };
        let writes: Vec<_> = ranges.iter().zip(&values).map(write).collect();
        let outcomes = run(&wire, drops, client.ranges().write(writes)).await;
        for (i, (range, bytes)) in ranges.into_iter().zip(values).enumerate() {
            let is_written = outcomes.as_ref().is_some_and(|outcomes| outcomes[i].is_ok());
            let bytes = bytes.iter().map(|byte| is_written.then_some(*byte));
            session.bytes[range].iter_mut().zip(bytes).for_each(|(old, new)| *old = new);
        }
        Ok(())
    }

    pub(super) async fn commit(&mut self) -> Result<(), String> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let (client, _) = self.writers[self.sessions[at].key.0].clone();
        let outcome = client.ranges().commit(&[&self.sessions[at].reservation]).await;
        if !outcome.is_ok_and(|mut outcomes| outcomes.remove(0).is_ok()) {
            self.seen.refused += 1;
            return Ok(());
        }
        self.seen.committed += 1;
        let Session { key, bytes, .. } = self.sessions.swap_remove(at);
        if let Some(hole) = bytes.iter().position(Option::is_none) {
            return Err(format!("{key:?} was committed, and its byte {hole} was never written"));
        }
        self.expected.set(key, bytes.into_iter().flatten().collect());
        self.read(key).await
    }

    /// Gives a session up, or forgets it.
    pub(super) async fn abandon(&mut self) {
        let Some(at) = self.any_session() else { return };
        let Session { key, reservation, .. } = self.sessions.swap_remove(at);
        self.seen.abandoned += 1;
        if self.rng.below(2) == 0 {
            self.writers[key.0].0.ranges().give_back(&[&reservation]).await;
        }
    }

    pub(super) async fn copy(&mut self) {
        let tenant = self.tenant();
        let key = name(self.key_of(tenant));
        let (from, to) = (self.owners[0].0.hostname(), self.owners[1].0.hostname());
        let (from, to) = if self.rng.below(2) == 0 { (from, to) } else { (to, from) };
        let replicas = self.writers[tenant].0.replicas();
        let requested = if self.rng.below(2) == 0 {
            replicas.copy(&key, &[to]).await
        } else {
            replicas.move_to(&key, from, to).await
        };
        self.seen.copies += u64::from(requested.is_ok());
    }

    pub(super) async fn remove(&mut self) {
        let tenant = self.tenant();
        let key = self.key_of(tenant);
        let forced = self.rng.below(2) == 0;
        if let Ok(true) = self.writers[tenant].0.remove(name(key), forced).await {
            self.seen.removed += 1;
            self.expected.remove(key);
        }
    }

    pub(super) async fn prefetch(&mut self) {
        let tenant = self.tenant();
        let key = name(self.key_of(tenant));
        let _ = self.writers[tenant].0.replicas().prefetch(&[key]).await;
    }

    fn check(&mut self, key: Key, got: Option<&[u8]>) -> Result<(), String> {
        match got {
            None => self.seen.missed += 1,
            Some(got) => {
                self.seen.read += 1;
                self.expected.check(key, 0, got, true)?;
            }
        }
        Ok(())
    }

    async fn read(&mut self, key: Key) -> Result<(), String> {
        let (client, wire) = self.writers[key.0].clone();
        wire.set(Faults::none());
        match client.get(name(key)).await {
            Ok(got) => self.check(key, got.as_deref()),
            Err(_) => Ok(()),
        }
    }

    pub(super) async fn read_all(&mut self) -> Result<(), String> {
        for tenant in 0..self.writers.len() {
            for number in 0..KEYS {
                self.read((tenant, number)).await?;
            }
        }
        Ok(())
    }

    /// Reads a value, with faults of the transport.
    pub(super) async fn get(&mut self) -> Result<(), String> {
        let tenant = self.tenant();
        let (key, drops) = (self.key_of(tenant), self.drops());
        let (client, wire) = self.disturbed_writer(tenant);
        if self.rng.below(2) == 0 {
            return match run(&wire, drops, client.get(name(key))).await {
                Some(Ok(got)) => self.check(key, got.as_deref()),
                _ => Ok(()),
            };
        }
        let into = client.memory().alloc(32 << 10).unwrap().exclusive().unwrap();
        let Some(read) = run(&wire, drops, client.get_into(name(key), into)).await else { return Ok(()) };
        let Ok(Some(len)) = read.result else { return Ok(()) };
        let mut bytes = vec![0; len];
        read.into.copy_to(0, &mut bytes).unwrap();
        self.check(key, Some(&bytes))
    }

    pub(super) async fn batch_get(&mut self) -> Result<(), String> {
        let tenant = self.tenant();
        let keys: Vec<Key> = (0..self.rng.range(2..7)).map(|_| self.key_of(tenant)).collect();
        let drops = self.drops();
        let (client, wire) = self.disturbed_writer(tenant);
        let names: Vec<String> = keys.iter().map(|key| name(*key)).collect();
        let Some(Ok(got)) = run(&wire, drops, client.batch_get(&names)).await else { return Ok(()) };
        for (key, got) in keys.into_iter().zip(got) {
            if let Ok(got) = got {
                self.check(key, got.as_deref())?;
            }
        }
        Ok(())
    }

    /// Reads a range of an object.
    pub(super) async fn read_range(&mut self) -> Result<(), String> {
        let tenant = self.tenant();
        let (key, drops) = (self.key_of(tenant), self.drops());
        let (client, wire) = self.disturbed_writer(tenant);
        let Ok(mut located) = client.ranges().locate(&[name(key)]).await else { return Ok(()) };
        let Ok(Some(object)) = located.remove(0) else { return Ok(()) };
        let start = self.rng.below(object.size());
        let len = self.rng.range(1..object.size() - start + 1) as usize;
        let into = client.memory().alloc(len).unwrap().exclusive().unwrap();
        let reads = vec![RangeRead { object, offset: start, into }];
        let Some(mut read) = run(&wire, drops, client.ranges().read(reads)).await else { return Ok(()) };
        let read = read.remove(0);
        if read.result.is_ok() {
            let mut bytes = vec![0; len];
            read.into.copy_to(0, &mut bytes).unwrap();
            self.seen.read += 1;
            self.expected.check(key, start as usize, &bytes, false)?;
        }
        Ok(())
    }
}
