//! The calls of a client.

use std::time::Duration;

use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, ErrorKind};
use mooncake_store::client::{PutOptions, RangeRead};
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::SliceMut;

use super::client::{Actor, Called, Class, Count, UNSETTLED, key_of, lengths};
use super::shadow::Outcome;
use super::value::{HEAD, LONGEST, Label};
use super::{CLIENTS, tenant_of};

type Slice = SliceMut<TransportSet>;

impl Actor {
    /// Runs one random call.
    ///
    /// # Errors
    /// Describes a wrong outcome.
    pub(super) async fn step(&mut self) -> Result<(), String> {
        match self.rng.below(100) {
            0..=13 => self.get().await,
            14..=23 => self.batch_get().await,
            24..=33 => self.get_into().await,
            34..=43 => self.read_ranges().await,
            44..=47 => self.exist().await,
            48..=53 => self.get_foreign().await,
            54..=76 => self.put().await,
            77..=84 => self.batch_put().await,
            85..=90 => self.remove().await,
            91..=93 => self.batch_remove().await,
            94 => self.remove_matching().await,
            95 => self.remove_all().await,
            _ => self.copy().await,
        }
    }

    fn any_key(&mut self) -> u64 {
        self.rng.below(self.shadows.len() as u64)
    }

    /// Returns distinct keys of one class.
    fn some_keys(&mut self) -> (Class, Vec<u64>) {
        let class = Class::of(self.any_key());
        let mut keys: Vec<u64> = (0..2 + self.rng.below(12)).map(|_| self.any_key()).collect();
        keys.retain(|key| Class::of(*key) == class);
        keys.sort_unstable();
        keys.dedup();
        (class, keys)
    }

    fn names(&self, keys: &[u64]) -> Vec<String> {
        keys.iter().map(|key| self.key(*key)).collect()
    }

    /// Returns the settings of a put, its lifetime, and whether the first read deletes its object.
    fn options(&mut self, class: Class, keys: &[u64]) -> (PutOptions, Option<Duration>) {
        // An object stays in its group.
        let group =
            |key: &u64| if key.is_multiple_of(5) { format!("group {}", key % 3) } else { String::new() };
        let group_ids = Some(keys.iter().map(group).collect());
        let config = ReplicateConfig { group_ids, ..ReplicateConfig::default() };
        let mut options = PutOptions::from(config).replicas(1 + u64::from(self.rng.below(3) == 0));
        if self.rng.below(3) > 0 {
            options = options.upsert();
        }
        if self.rng.below(4) == 0
            && let Some(owner) = self.any_owner()
        {
            options = options.prefer_segment(owner);
        }
        let span = Duration::from_millis(300 + self.rng.below(5000));
        match class {
            Class::Plain => (options, None),
            Class::Lifetime => (options.time_to_live(span), Some(span)),
            Class::OnlyRead => (options.delete_after_read(), None),
            Class::Pinned if self.rng.below(2) == 0 => (options.soft_pin(), None),
            Class::Pinned => (options.hard_pin(), None),
        }
    }

    fn any_owner(&mut self) -> Option<String> {
        let at = self.rng.below(self.timeline.owners.len() as u64) as usize;
        self.timeline.owners.values().nth(at).cloned()
    }

    fn memory(&self, len: usize) -> Option<Slice> {
        self.client.memory().alloc(len).ok()?.exclusive().ok()
    }

    /// Puts from unregistered memory, shared bytes, or registered memory.
    async fn put(&mut self) -> Result<(), String> {
        let key = self.any_key();
        let (class, name, client) = (Class::of(key), self.key(key), self.client.clone());
        let (options, time_to_live) = self.options(class, &[key]);
        let (label, len) = (self.next_label(key), lengths(&mut self.rng));
        let value = label.value(len);
        let memory = self.memory(len).filter(|_| self.rng.below(3) == 0);
        let called = if let Some(mut slice) = memory {
            slice.copy_from(0, &value).map_err(|error| format!("registered memory: {error}"))?;
            let slice = slice.into_shared();
            self.call("put of registered memory", client.put_with(&name, slice, &options)).await?
        } else if self.rng.below(2) == 0 {
            let value = bytes::Bytes::from(value);
            self.call("put of shared bytes", client.put_with(&name, value, &options)).await?
        } else {
            self.call("put", client.put_with(&name, &value[..], &options)).await?
        };
        let stored = called.result.map(|stored| self.fine("put", stored)).transpose()?.flatten();
        self.note_put(label, time_to_live, class == Class::OnlyRead, stored, called.outcome);
        Ok(())
    }

    async fn batch_put(&mut self) -> Result<(), String> {
        let (class, keys) = self.some_keys();
        let client = self.client.clone();
        let (options, time_to_live) = self.options(class, &keys);
        let labels: Vec<Label> = keys.iter().map(|key| self.next_label(*key)).collect();
        let value = |actor: &mut Self, label: &Label| label.value(lengths(&mut actor.rng));
        let items: Vec<(String, Vec<u8>)> =
            labels.iter().map(|label| (self.key(label.key), value(self, label))).collect();
        let called = self.call("batch_put", client.batch_put(&items, &options)).await?;
        let results = self.results_of_batch("batch_put", called.result, keys.len())?;
        for (label, result) in labels.into_iter().zip(results) {
            let stored = result.map(|stored| self.fine("batch_put", stored)).transpose()?.flatten();
            self.note_put(label, time_to_live, class == Class::OnlyRead, stored, called.outcome);
        }
        Ok(())
    }

    /// Returns one result for each key of a batch, `None` if it is not known.
    fn results_of_batch<T>(
        &mut self,
        what: &str,
        result: Option<Result<Vec<Result<T, Error>>, Error>>,
        keys: usize,
    ) -> Result<Vec<Option<Result<T, Error>>>, String> {
        let results = result.map(|results| self.fine(what, results)).transpose()?.flatten();
        let Some(results) = results else { return Ok((0..keys).map(|_| None).collect()) };
        if results.len() != keys {
            return Err(format!("{what}: {} results for {keys} keys", results.len()));
        }
        Ok(results.into_iter().map(Some).collect())
    }

    /// Notes a read without a result: the object may be deleted after it.
    fn note_failed_read(&mut self, key: u64, outcome: Outcome) {
        if Class::of(key) == Class::OnlyRead {
            self.shadows[key as usize].remove(Outcome { is_certain: false, ..outcome });
        }
    }

    /// Checks the result of a read. `None` if there is none.
    fn note_read(
        &mut self,
        what: &str,
        key: u64,
        result: Option<Result<Option<Label>, Error>>,
        (began, outcome): (Duration, Outcome),
    ) -> Result<(), String> {
        match result.map(|read| self.fine(what, read)).transpose()?.flatten() {
            Some(label) => {
                self.check_read(key, label, began, outcome).map_err(|wrong| format!("{what}: {wrong}"))
            }
            None => {
                self.note_failed_read(key, outcome);
                Ok(())
            }
        }
    }

    async fn get(&mut self) -> Result<(), String> {
        let (key, client) = (self.any_key(), self.client.clone());
        let name = self.key(key);
        let Called { result, began, outcome } = self.call("get", client.get(&name)).await?;
        let result = result.map(|read| read.map(|value| value.map(|bytes| Label::of(&bytes))));
        let result = result.map(transpose).transpose().map_err(|wrong| format!("get {name}: {wrong}"))?;
        self.note_read("get", key, result, (began, outcome))
    }

    async fn batch_get(&mut self) -> Result<(), String> {
        let ((_, keys), client) = (self.some_keys(), self.client.clone());
        let names = self.names(&keys);
        let Called { result, began, outcome } = self.call("batch_get", client.batch_get(&names)).await?;
        let results = self.results_of_batch("batch_get", result, keys.len())?;
        for (key, result) in keys.into_iter().zip(results) {
            let result = result.map(|read| read.map(|value| value.map(|bytes| Label::of(&bytes))));
            let result =
                result.map(transpose).transpose().map_err(|wrong| format!("batch_get {key}: {wrong}"))?;
            self.note_read("batch_get", key, result, (began, outcome))?;
        }
        Ok(())
    }

    async fn get_into(&mut self) -> Result<(), String> {
        let (key, client) = (self.any_key(), self.client.clone());
        let (name, Some(memory)) = (self.key(key), self.memory(LONGEST)) else { return Ok(()) };
        let Called { result, began, outcome } = self.call("get_into", client.get_into(&name, memory)).await?;
        let label = |len: usize, slice: &Slice| {
            let mut bytes = vec![0; len];
            slice.copy_to(0, &mut bytes).map_err(|error| error.to_string())?;
            Label::of(&bytes)
        };
        let result = result.map(|read| read.result.map(|len| len.map(|len| label(len, &read.into))));
        let result =
            result.map(transpose).transpose().map_err(|wrong| format!("get_into {name}: {wrong}"))?;
        self.note_read("get_into", key, result, (began, outcome))
    }

    /// Locates an object and reads its head and another part of it.
    async fn read_ranges(&mut self) -> Result<(), String> {
        let (key, client) = (self.any_key(), self.client.clone());
        let name = self.key(key);
        let (head, draw) = (self.memory(HEAD), self.rng.next_u64());
        let work = async {
            let Some(object) = client.ranges().locate(&[&name]).await?.remove(0)? else { return Ok(None) };
            let len = object.size() as usize;
            let offset = HEAD + (draw % (len - HEAD + 1) as u64) as usize;
            let mut reads = vec![(0, head)];
            if offset < len {
                let memory = client.memory().alloc((len - offset).min(20_000))?.exclusive().ok();
                reads.push((offset as u64, memory));
            }
            let reads = reads
                .into_iter()
                .filter_map(|(offset, into)| Some(RangeRead { object: object.clone(), offset, into: into? }));
            let outcomes = client.ranges().read(reads.collect()).await;
            let mut parts = Vec::new();
            for outcome in outcomes {
                // The object was removed, or no replica of it is left.
                if outcome.result.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
                    return Ok(None);
                }
                outcome.result?;
                let mut bytes = vec![0; outcome.into.len()];
                outcome.into.copy_to(0, &mut bytes)?;
                parts.push(bytes);
            }
            Ok::<_, Error>(Some((len, offset, parts)))
        };
        let Called { result, began, outcome } = self.call("ranges", work).await?;
        let label = |(len, offset, parts): (usize, usize, Vec<Vec<u8>>)| {
            let (label, stated) = Label::of_head(parts.first().map_or(&[], Vec::as_slice))?;
            if stated != len {
                return Err(format!("{label:?} of {stated} bytes in an object of {len}"));
            }
            parts.get(1).map_or(Ok(()), |part| label.check_part(len, offset, part))?;
            Ok(label)
        };
        let result = result.map(|read| read.map(|found| found.map(label)));
        let result = result.map(transpose).transpose().map_err(|wrong| format!("ranges {name}: {wrong}"))?;
        self.note_read("ranges", key, result, (began, outcome))
    }

    /// Asks for the existence of keys, the length of a value, or the length of a prefix.
    async fn exist(&mut self) -> Result<(), String> {
        let ((class, keys), client) = (self.some_keys(), self.client.clone());
        let names = self.names(&keys);
        if class == Class::OnlyRead || self.rng.below(2) == 0 {
            let called = self.call("batch_exist", client.batch_exist(&names)).await?;
            self.results_of_batch("batch_exist", called.result, keys.len())?;
            return Ok(());
        }
        let Some(first) = names.first() else { return Ok(()) };
        let called = self.call("size", client.size(first)).await?;
        called.result.map(|size| self.fine("size", size)).transpose()?;
        let called = self.call("prefix_hits", client.replicas().prefix_hits(&names)).await?;
        let hits = called.result.map(|hits| self.fine("prefix_hits", hits)).transpose()?.flatten();
        if hits.is_some_and(|hits| hits > names.len()) {
            return Err(format!("{hits:?} hits among {} keys", names.len()));
        }
        Ok(())
    }

    /// Reads a key of another client of this tenant.
    async fn get_foreign(&mut self) -> Result<(), String> {
        let other = self.rng.below(CLIENTS);
        let key = self.any_key();
        let Some(generation) = self.timeline.clients.get(&other) else { return Ok(()) };
        if tenant_of(other) != tenant_of(self.number) || Class::of(key) == Class::OnlyRead {
            return Ok(());
        }
        let (writer, client) = (generation * CLIENTS + other, self.client.clone());
        let name = key_of(writer, key);
        let called = self.call("get", client.get(&name)).await?;
        let read = called.result.map(|read| self.fine("get", read)).transpose()?.flatten().flatten();
        let Some(bytes) = read else { return Ok(()) };
        let label = Label::of(&bytes).map_err(|wrong| format!("get of another client's {name}: {wrong}"))?;
        if (label.writer, label.key) != (writer, key) {
            return Err(format!("a read of {name} returns {label:?}"));
        }
        self.count(Count::ForeignHits);
        Ok(())
    }

    async fn remove(&mut self) -> Result<(), String> {
        let (key, client, force) = (self.any_key(), self.client.clone(), self.rng.below(3) > 0);
        let name = self.key(key);
        let called = self.call("remove", client.remove(&name, force)).await?;
        let removed = called.result.map(|removed| self.fine("remove", removed)).transpose()?.flatten();
        self.note_removal(key, removed.is_some(), called.outcome);
        Ok(())
    }

    fn note_removal(&mut self, key: u64, is_certain: bool, outcome: Outcome) {
        if is_certain {
            self.count(Count::Removed);
        }
        let shadow = &mut self.shadows[key as usize];
        shadow.remove(Outcome { is_certain, ..outcome });
        shadow.prune(&self.timeline);
    }

    async fn batch_remove(&mut self) -> Result<(), String> {
        let ((_, keys), client, force) = (self.some_keys(), self.client.clone(), self.rng.below(3) > 0);
        let names = self.names(&keys);
        let called = self.call("batch_remove", client.batch_remove(&names, force)).await?;
        let results = self.results_of_batch("batch_remove", called.result, keys.len())?;
        for (key, result) in keys.into_iter().zip(results) {
            let removed = result.map(|removed| self.fine("batch_remove", removed)).transpose()?.flatten();
            self.note_removal(key, removed.is_some(), called.outcome);
        }
        Ok(())
    }

    /// Removes the keys whose number begins with two digits.
    async fn remove_matching(&mut self) -> Result<(), String> {
        let client = self.client.clone();
        let begin = 10 + self.rng.below(90);
        let prefix = self.key(begin);
        let pattern = format!("^{prefix}");
        let called = self.call("remove_matching", client.remove_matching(&pattern, true)).await?;
        self.note_mass_removal("remove_matching", &prefix, called)
    }

    /// Removes all keys of a tenant that no other client has.
    async fn remove_all(&mut self) -> Result<(), String> {
        if tenant_of(self.number) == tenant_of(0) || self.rng.below(4) > 0 {
            return Ok(());
        }
        let client = self.client.clone();
        let called = self.call("remove_all", client.remove_all(true)).await?;
        self.note_mass_removal("remove_all", "", called)
    }

    /// Notes the removal of all keys with a prefix. Objects in use are skipped.
    fn note_mass_removal(
        &mut self,
        what: &str,
        prefix: &str,
        called: Called<Result<u64, Error>>,
    ) -> Result<(), String> {
        let removed = called.result.map(|removed| self.fine(what, removed)).transpose()?.flatten();
        for key in 0..self.shadows.len() as u64 {
            if self.key(key).starts_with(prefix) {
                let is_settled = self.shadows[key as usize].is_settled(called.began);
                self.note_removal(key, removed.is_some() && is_settled, called.outcome);
            }
        }
        Ok(())
    }

    /// Requests a copy or a move, or drops replicas.
    async fn copy(&mut self) -> Result<(), String> {
        let (key, client) = (self.any_key(), self.client.clone());
        let (Some(source), Some(target)) = (self.any_owner(), self.any_owner()) else { return Ok(()) };
        let name = self.key(key);
        let until = self.now() + UNSETTLED;
        self.shadows[key as usize].unsettle(until);
        let outcome = if tenant_of(self.number) == tenant_of(0) && self.rng.below(6) == 0 {
            let called = self.call("clear", client.replicas().clear(&[&name], &source)).await?;
            self.shadows[key as usize].remove(Outcome { is_certain: false, ..called.outcome });
            called.result.map(|cleared| cleared.map(drop))
        } else if self.rng.below(2) == 0 {
            let called = self.call("copy", client.replicas().copy(&name, &[&target])).await?;
            called.result.map(|task| task.map(drop))
        } else {
            let called = self.call("move", client.replicas().move_to(&name, &source, &target)).await?;
            called.result.map(|task| task.map(drop))
        };
        // The object or an owner may be missing.
        if matches!(outcome, Some(Ok(()))) {
            self.count(Count::Copies);
        }
        Ok(())
    }
}

/// Turns a wrong value into an error of its own.
fn transpose(
    read: Result<Option<Result<Label, String>>, Error>,
) -> Result<Result<Option<Label>, Error>, String> {
    match read {
        Ok(Some(Err(wrong))) => Err(wrong),
        Ok(Some(Ok(label))) => Ok(Ok(Some(label))),
        Ok(None) => Ok(Ok(None)),
        Err(error) => Ok(Err(error)),
    }
}
