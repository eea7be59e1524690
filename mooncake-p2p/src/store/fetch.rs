//! Read of an object: runs the schedule, enters shards that have arrived, and ends in order.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use futures::future::{BoxFuture, join_all};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use mooncake_core::clock::Rng;
use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_engine::TransportSet;
use mooncake_transport::SliceMut;
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::inner::{Copies, Inner, not_found};
use super::sources::Sources;
use crate::catalogue::{Entry, Location, Payload, Role, Shard};
use crate::checksum;
use crate::object::{Object, ObjectMemory, divide, locations_of};
use crate::options::{GetOptions, GetProgress};
use crate::records::{ChecksumRecord, ReadRecord, SlotOfSource};
use crate::schedule::{Choice, Outcome, Schedule};

/// Event of a read of an object.
enum Event {
    Read(ShardRead),
    Refreshed(Result<(Option<Entry>, Vec<SlotOfSource>)>),
    Freed,
    Entered { restarts: u32, shards: Vec<usize>, result: Result<Option<Entry>> },
}

/// Ended read of a shard.
struct ShardRead {
    choice: Choice,
    memory: SliceMut<TransportSet>,
    result: Result<Arrival>,
}

/// Success of a read of a shard.
enum Arrival {
    /// The bytes are there. `stated` are the checksums that the source stated, if they were read.
    Read { crc64: u64, stated: Option<ChecksumRecord>, held: SlotOfSource },
    /// The reader chose the shard without knowledge of other readers. The slot is free again.
    Outdated,
    /// Another reader took the slot first.
    SlotTaken,
}

/// Copies of a shard at other nodes and reads in progress by other readers, as a reader knew them
/// when it chose the shard.
#[derive(Clone, Copy)]
struct Seen {
    copies: usize,
    reads: usize,
}

/// Read of an object in progress.
struct Fetch {
    inner: Arc<Inner>,
    known: Payload,
    locations: Vec<Location>,
    schedule: Schedule,
    sources: Sources,
    rng: Rng,
    /// Memory of each shard, except of those that are being read.
    memory: Vec<Option<SliceMut<TransportSet>>>,
    /// Checksums of the shards that have arrived.
    own: Vec<Option<u64>>,
    /// Checksums of the shards as a source stated them.
    stated: Vec<Option<u64>>,
    is_entered: Vec<bool>,
    /// Slots of shards that have arrived and are not entered yet, by shard.
    held: HashMap<usize, SlotOfSource>,
    /// Slots to be freed.
    ended: Vec<SlotOfSource>,
    arrived_bytes: u64,
    is_entering: bool,
    is_refreshing: bool,
    needs_refresh: bool,
    /// True from an outdated choice to the next refresh.
    is_outdated: bool,
    /// True from a failure of the metadata service to the next tick.
    is_waiting: bool,
    /// Number of restarts. An entry of shards that began before a restart has no effect.
    restarts: u32,
    last_error: Option<Error>,
    options: GetOptions,
}

type Events = FuturesUnordered<BoxFuture<'static, Event>>;

impl Inner {
    pub(super) async fn get_replica(
        self: &Arc<Self>,
        name: &str,
        memory: Vec<Arc<dyn MemorySource>>,
        options: GetOptions,
        cancel: oneshot::Receiver<()>,
    ) -> Result<()> {
        let mut reservation = self.reserve(name)?;
        let entry = self.bounded("read object", self.catalogue.read(name)).await?;
        let entry = entry.ok_or_else(|| not_found(name))?;
        let sizes: Vec<u64> = memory.iter().map(|memory| memory.span().len as u64).collect();
        if sizes != entry.payload.size_list {
            return Err(Error::invalid(format!(
                "cannot read object: the ranges have other lengths. name={name:?} lengths={sizes:?} expected={:?}",
                entry.payload.size_list
            )));
        }
        let starts: Vec<u64> = memory.iter().map(|memory| memory.span().addr()).collect();
        let regions = self.engine.register_many(memory).await?;
        let shards = divide(regions, entry.payload.max_shard_size)?;
        let mut fetch = Fetch::new(self.clone(), entry, &starts, shards, options);
        let result = fetch.run(cancel).await;
        if let Err(error) = result {
            // The memory stays open to peers until no entry names it.
            let undone = self.remove_copies(name, &[Role::Replica], &self.segment);
            if let Err(error) = self.bounded("undo a read", undone).await {
                tracing::warn!(name, %error, "read not undone; its entries end with the lease");
            }
            drop(fetch);
            drop(reservation);
            if let Err(error) = self.engine.settle_publication().await {
                tracing::warn!(name, %error, "descriptor not published after a failed read");
            }
            return Err(error);
        }
        reservation.outcome = Some(Arc::new(fetch.into_object()));
        Ok(())
    }

    /// Reads a shard in a slot of its source. The slot of a shard that has arrived stays taken
    /// until the shard is entered, so that other readers see one or the other.
    async fn read_in_slot(
        &self,
        (source, slot, address): (String, usize, u64),
        read: ReadRecord,
        seen: Option<Seen>,
        memory: SliceMut<TransportSet>,
        expected: Option<u64>,
    ) -> (Result<Arrival>, SliceMut<TransportSet>) {
        let taken = self.bounded("take a slot", self.records.take_slot(&source, slot, &read)).await;
        let revision = match taken {
            Ok(Some(revision)) => revision,
            Ok(None) => return (Ok(Arrival::SlotTaken), memory),
            Err(error) => return (Err(error), memory),
        };
        let held = SlotOfSource { source, slot, revision, read };
        if let Some(seen) = seen
            && self.is_outdated(&held, seen).await
        {
            self.free_slot(&held).await;
            return (Ok(Arrival::Outdated), memory);
        }
        let (result, memory) = self.transfer(&held.source, address, memory).await;
        let (result, memory) = match result {
            Ok(()) => self.verify(&held, memory, expected).await,
            Err(error) => {
                // The next read looks the source up again.
                self.engine.forget(&held.source);
                (Err(error), memory)
            }
        };
        match result {
            Ok((crc64, stated)) => (Ok(Arrival::Read { crc64, stated, held }), memory),
            Err(error) => {
                self.free_slot(&held).await;
                (Err(error), memory)
            }
        }
    }

    async fn free_slot(&self, held: &SlotOfSource) {
        let SlotOfSource { source, slot, revision, .. } = held;
        let freed = self.bounded("free a slot", self.records.free_slot(source, *slot, *revision)).await;
        if let Err(error) = freed {
            tracing::warn!(source, slot, %error, "slot not freed; it is freed at the next refresh");
        }
    }

    /// Returns whether other readers had begun to read the shard before this reader took the slot,
    /// or have it, and this reader has not seen that. Another shard may be rarer then.
    async fn is_outdated(&self, held: &SlotOfSource, seen: Seen) -> bool {
        let ReadRecord { name, shard, .. } = &held.read;
        // A read that ends meanwhile is in the reads or in the catalogue.
        let present = async {
            let reads = self.records.reads().await?;
            Ok((reads, self.catalogue.read(name).await?))
        };
        let Ok((reads, Some(entry))) = self.bounded("read object", present).await else { return false };
        let is_earlier = |other: &&SlotOfSource| {
            let ReadRecord { reader, name: other_name, shard: other_shard } = &other.read;
            (other_name, other_shard) == (name, shard)
                && *reader != self.segment
                && other.revision < held.revision
        };
        let is_other = |(location, _): &(&Location, Role)| location.segment_name != self.segment;
        let copies = entry.payload.shards.get(*shard).map_or(0, |s| s.locations().filter(is_other).count());
        copies > seen.copies || reads.iter().filter(is_earlier).count() > seen.reads
    }

    async fn transfer(
        &self,
        source: &str,
        address: u64,
        memory: SliceMut<TransportSet>,
    ) -> (Result<()>, SliceMut<TransportSet>) {
        let deadline = self.engine.clock().now().after(self.engine.timeout_for(memory.len() as u64));
        match self.engine.open_by(source, deadline).await {
            Ok(target) => self.engine.read(&target, address, memory, Some(deadline)).await,
            Err(error) => (Err(error), memory),
        }
    }

    /// Compares the bytes that have arrived with the checksum, which is read from the record of the
    /// source unless it is known.
    async fn verify(
        &self,
        held: &SlotOfSource,
        memory: SliceMut<TransportSet>,
        expected: Option<u64>,
    ) -> (Result<(u64, Option<ChecksumRecord>)>, SliceMut<TransportSet>) {
        let (source, read) = (held.source.as_str(), &held.read);
        let stated = match expected {
            Some(_) => None,
            None => match self.bounded("read checksums", self.records.checksums(&read.name, source)).await {
                Ok(stated) => Some(stated),
                Err(error) => return (Err(error), memory),
            },
        };
        let of_shard = |record: &ChecksumRecord| record.crc64.get(read.shard).copied().flatten();
        let expected = expected.or_else(|| stated.as_ref().and_then(of_shard));
        let computed = tokio::task::spawn_blocking(move || (checksum::of_slice_mut(&memory), memory)).await;
        let (crc64, memory) = match computed {
            Ok((Ok(crc64), memory)) => (crc64, memory),
            Ok((Err(error), memory)) => return (Err(error), memory),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        match expected {
            Some(expected) if expected != crc64 => {
                let error = Error::new(
                    ErrorCode::ChecksumMismatch,
                    format!(
                        "cannot use shard: its bytes changed at the source. name={:?} shard={} \
                         source={source:?} crc64={crc64:016x} expected={expected:016x}; \
                         another source is tried",
                        read.name, read.shard
                    ),
                );
                (Err(error), memory)
            }
            _ => (Ok((crc64, stated)), memory),
        }
    }
}

impl Fetch {
    fn new(
        inner: Arc<Inner>,
        entry: Entry,
        starts: &[u64],
        memory: Vec<SliceMut<TransportSet>>,
        options: GetOptions,
    ) -> Self {
        let count = entry.payload.shards.len();
        let mut sources = Sources::new();
        sources.set_copies(&inner, &entry.payload);
        let rng = inner.rng.lock().split();
        Self {
            locations: locations_of(&entry.payload, starts, &inner.segment),
            schedule: Schedule::new(count, inner.options.limits),
            sources,
            rng,
            memory: memory.into_iter().map(Some).collect(),
            own: vec![None; count],
            stated: vec![None; count],
            is_entered: vec![false; count],
            held: HashMap::new(),
            ended: Vec::new(),
            arrived_bytes: 0,
            is_entering: false,
            is_refreshing: false,
            needs_refresh: true,
            is_outdated: false,
            is_waiting: false,
            restarts: 0,
            last_error: None,
            known: entry.payload,
            inner,
            options,
        }
    }

    fn into_object(self) -> Object {
        let mut layout = self.known;
        layout.remove_all_copies();
        Object {
            layout,
            role: Role::Replica,
            locations: self.locations,
            checksums: parking_lot::Mutex::new(ChecksumRecord { crc64: self.own }),
            memory: ObjectMemory::Replica(self.memory.into_iter().flatten().collect()),
        }
    }

    /// Reads until all shards are entered. No read is in progress afterwards.
    async fn run(&mut self, mut cancel: oneshot::Receiver<()>) -> Result<()> {
        if self.options.resume {
            self.keep_valid_shards().await?;
        }
        self.report();
        let mut events = Events::new();
        let result = self.run_events(&mut events, &mut cancel).await;
        while let Some(event) = events.next().await {
            if let Event::Read(read) = event {
                self.memory[read.choice.shard] = Some(read.memory);
                if let Ok(Arrival::Read { held, .. }) = read.result {
                    self.ended.push(held);
                }
            }
        }
        let held: Vec<_> = self.held.drain().map(|(_, held)| held).chain(self.ended.drain(..)).collect();
        join_all(held.iter().map(|held| self.inner.free_slot(held))).await;
        result
    }

    async fn run_events(&mut self, events: &mut Events, cancel: &mut oneshot::Receiver<()>) -> Result<()> {
        let stall_timeout = self.inner.options.stall_timeout;
        let inner = self.inner.clone();
        let mut closing = std::pin::pin!(inner.until_closing());
        let mut stall = std::pin::pin!(sleep(stall_timeout));
        let mut ticks = interval(self.inner.options.poll_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.begin_refresh(events);
            self.begin_frees(events);
            self.begin_entry(events);
            self.begin_reads(events);
            if self.is_entered.iter().all(|is_entered| *is_entered) {
                return Ok(());
            }
            tokio::select! {
                biased;
                _ = &mut *cancel => return Err(cancelled_error(&self.known.name)),
                () = &mut closing => return Err(cancelled_error(&self.known.name)),
                Some(event) = events.next() => {
                    if self.handle(event)? {
                        stall.set(sleep(stall_timeout));
                    }
                }
                _ = ticks.tick() => {
                    self.needs_refresh = true;
                    self.is_waiting = false;
                }
                () = &mut stall => return Err(self.stall_error()),
            }
        }
    }

    /// Handles an event. Returns whether a shard has arrived.
    fn handle(&mut self, event: Event) -> Result<bool> {
        match event {
            Event::Read(read) => Ok(self.end_read(read)),
            Event::Freed => Ok(false),
            Event::Refreshed(result) => {
                (self.is_refreshing, self.is_outdated) = (false, false);
                match result {
                    Ok((Some(entry), reads)) => {
                        self.apply(entry)?;
                        let name = self.known.name.clone();
                        for unused in self.sources.set_reads(&self.inner, &name, reads, &self.held) {
                            self.free_unused(unused);
                        }
                        if let Some(shard) = self.schedule.refused_shard(&self.sources.view) {
                            return Err(self.refused_error(shard));
                        }
                    }
                    // A reader that has all shards enters the object again.
                    Ok((None, _)) if self.schedule.is_complete() => {}
                    Ok((None, _)) => return Err(not_found(&self.known.name)),
                    Err(error) => self.wait_after(error),
                }
                Ok(false)
            }
            Event::Entered { restarts, shards, result } => {
                self.is_entering = false;
                match result {
                    // The entry belongs to the object before the restart.
                    _ if restarts != self.restarts => self.needs_refresh = true,
                    Ok(Some(entry)) => {
                        for shard in shards {
                            self.is_entered[shard] = true;
                            self.release_slot(shard);
                        }
                        self.apply(entry)?;
                    }
                    Ok(None) => self.restart(),
                    Err(error) if error.kind() == ErrorKind::NotFound => return Err(error),
                    Err(error) => self.wait_after(error),
                }
                Ok(false)
            }
        }
    }

    /// Takes over the present state of the object in the catalogue.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` if the name stands for an object with other shards now.
    fn apply(&mut self, entry: Entry) -> Result<()> {
        let payload = entry.payload;
        if !payload.has_layout_of(&self.known) {
            return Err(Error::invalid(format!(
                "cannot read object: another one with other shards replaced it. name={:?}; read that one",
                payload.name
            )));
        }
        if self.known.has_copies() && !payload.shares_copy_with(&self.known) {
            self.restart();
        }
        for (shard, of_shard) in payload.shards.iter().enumerate() {
            // An entry vanishes if the lease of this node has ended meanwhile.
            self.is_entered[shard] &= of_shard.replica_list.contains(&self.locations[shard]);
        }
        self.sources.set_copies(&self.inner, &payload);
        self.known = payload;
        Ok(())
    }

    /// Begins again, because the name stands for another object now. The next refresh reads it.
    fn restart(&mut self) {
        tracing::warn!(name = self.known.name, "object was replaced during the read; reading it again");
        self.schedule.restart();
        self.restarts += 1;
        (0..self.locations.len()).for_each(|shard| self.release_slot(shard));
        self.own.fill(None);
        self.stated.fill(None);
        self.is_entered.fill(false);
        self.arrived_bytes = 0;
        self.known.remove_all_copies();
        self.sources.set_copies(&self.inner, &self.known);
        self.needs_refresh = true;
    }

    fn wait_after(&mut self, error: Error) {
        tracing::warn!(name = self.known.name, %error, "metadata service failed during a read");
        self.last_error = Some(error);
        self.is_waiting = true;
    }

    fn begin_refresh(&mut self, events: &mut Events) {
        if self.is_refreshing || !self.needs_refresh || self.is_waiting {
            return;
        }
        (self.is_refreshing, self.needs_refresh) = (true, false);
        let (inner, name) = (self.inner.clone(), self.known.name.clone());
        let refresh = async move {
            // A read that ends meanwhile is in the reads or in the catalogue.
            let read = async {
                let reads = inner.records.reads().await?;
                Ok((inner.catalogue.read(&name).await?, reads))
            };
            Event::Refreshed(inner.bounded("read object", read).await)
        };
        events.push(refresh.boxed());
    }

    fn begin_frees(&mut self, events: &mut Events) {
        for held in self.ended.drain(..) {
            let inner = self.inner.clone();
            let free = async move {
                inner.free_slot(&held).await;
                Event::Freed
            };
            events.push(free.boxed());
        }
    }

    /// Releases the slot of a shard that has arrived.
    fn release_slot(&mut self, shard: usize) {
        if let Some(held) = self.held.remove(&shard) {
            self.sources.free_slot(shard);
            self.ended.push(held);
        }
    }

    /// Enters all shards that have arrived since the last entry.
    fn begin_entry(&mut self, events: &mut Events) {
        if self.is_entering || self.is_waiting {
            return;
        }
        let is_new = |shard: &usize| self.schedule.has_arrived(*shard) && !self.is_entered[*shard];
        let shards: Vec<usize> = (0..self.locations.len()).filter(is_new).collect();
        if shards.is_empty() || !self.known.has_copies() {
            return;
        }
        self.is_entering = true;
        let arrived = (0..self.locations.len()).filter(|shard| self.schedule.has_arrived(*shard));
        let locations = arrived.map(|shard| (shard, self.locations[shard].clone())).collect();
        let checksums = ChecksumRecord { crc64: self.own.clone() };
        let copies = Copies { role: Role::Replica, locations, checksums };
        let (inner, known, restarts) = (self.inner.clone(), self.known.clone(), self.restarts);
        let enter = async move {
            let result = inner.bounded("enter shards", inner.enter(&copies, &known)).await;
            Event::Entered { restarts, shards, result }
        };
        events.push(enter.boxed());
    }

    fn begin_reads(&mut self, events: &mut Events) {
        if self.is_waiting || self.is_outdated {
            return;
        }
        let now = self.inner.engine.clock().now();
        while let Some(choice) = self.schedule.begin_next(&self.sources.view, now, &mut self.rng) {
            let slots = self.inner.options.limits.readers_per_source;
            let slot = self.sources.choose_slot(choice, slots, &mut self.rng);
            let (Some(slot), Some(address)) = (slot, self.sources.address(choice)) else {
                // The slots are numbered beyond the limit of this node.
                self.sources.free_slot(choice.shard);
                self.schedule.finish(choice, Outcome::NotBegun);
                return;
            };
            let Some(memory) = self.memory[choice.shard].take() else {
                self.sources.free_slot(choice.shard);
                self.schedule.finish(choice, Outcome::NotBegun);
                return;
            };
            let (inner, source) = (self.inner.clone(), self.sources.name(choice.source).to_owned());
            let (reader, name) = (inner.segment.clone(), self.known.name.clone());
            let read = ReadRecord { reader, name, shard: choice.shard };
            let expected = self.stated[choice.shard];
            let seen = self.sources.view.copies.get(choice.shard).and_then(|copies| {
                let reads = self.sources.view.reads.iter().filter(|read| read.shard == Some(choice.shard));
                // Only reads from seeders need be few.
                let is_rare = copies.iter().all(|copy| copy.role == Role::Gold);
                is_rare.then_some(Seen { copies: copies.len(), reads: reads.count() })
            });
            let read = async move {
                let at = (source, slot, address);
                let (result, memory) = inner.read_in_slot(at, read, seen, memory, expected).await;
                Event::Read(ShardRead { choice, memory, result })
            };
            events.push(read.boxed());
        }
    }

    /// Records the end of a read of a shard. Returns whether the shard has arrived.
    fn end_read(&mut self, read: ShardRead) -> bool {
        let ShardRead { choice, memory, result } = read;
        let (shard, bytes) = (choice.shard, memory.len() as u64);
        self.memory[shard] = Some(memory);
        self.needs_refresh = true;
        let outcome = match &result {
            Ok(Arrival::SlotTaken) => {
                self.sources.slot_was_taken(choice);
                Outcome::NotBegun
            }
            Ok(Arrival::Outdated) => {
                self.is_outdated = true;
                Outcome::NotBegun
            }
            Ok(Arrival::Read { .. }) => {
                self.sources.worked(choice.source);
                Outcome::Arrived
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => Outcome::Refused,
            Err(_) => {
                let now = self.inner.engine.clock().now();
                Outcome::Failed { until: self.sources.failed(choice.source, now, &mut self.rng) }
            }
        };
        let has_arrived = self.schedule.finish(choice, outcome);
        if !has_arrived {
            self.sources.free_slot(choice.shard);
        }
        match result {
            Ok(Arrival::Read { crc64, stated, held }) if has_arrived => {
                self.held.insert(shard, held);
                self.own[shard] = Some(crc64);
                for (known, stated) in self.stated.iter_mut().zip(stated.unwrap_or_default().crc64) {
                    *known = known.or(stated);
                }
                self.arrived_bytes += bytes;
                self.report();
            }
            Ok(Arrival::Read { held, .. }) => self.ended.push(held),
            Err(error) => {
                let source = self.sources.name(choice.source);
                tracing::warn!(name = self.known.name, shard, source, %error, "shard not read");
                self.last_error = Some(error);
            }
            Ok(_) => {}
        }
        has_arrived
    }

    /// Frees a slot of this reader in the background.
    fn free_unused(&self, unused: SlotOfSource) {
        let inner = self.inner.clone();
        tokio::spawn(async move {
            let SlotOfSource { source, slot, revision, .. } = unused;
            // A failure leaves the slot to the next refresh.
            let _ = inner.records.free_slot(&source, slot, revision).await;
        });
    }

    /// Keeps the shards whose bytes in the memory have the checksums that a source states.
    async fn keep_valid_shards(&mut self) -> Result<()> {
        let name = self.known.name.clone();
        let locations = self.known.shards.iter().flat_map(Shard::locations);
        let segments: BTreeSet<&str> =
            locations.map(|(location, _)| location.segment_name.as_str()).collect();
        for segment in segments {
            if self.stated.iter().all(Option::is_some) {
                break;
            }
            let stated = self.inner.records.checksums(&name, segment);
            let stated = self.inner.bounded("read checksums", stated).await?;
            for (known, stated) in self.stated.iter_mut().zip(stated.crc64) {
                *known = known.or(stated);
            }
        }
        for (shard, stated) in self.stated.iter().enumerate() {
            let (Some(stated), Some(memory)) = (*stated, self.memory[shard].take()) else { continue };
            let computed =
                tokio::task::spawn_blocking(move || (checksum::of_slice_mut(&memory), memory)).await;
            let (crc64, memory) =
                computed.map_err(|error| Error::internal(format!("cannot compute checksum: {error}")))?;
            if crc64? == stated {
                self.own[shard] = Some(stated);
                self.arrived_bytes += memory.len() as u64;
                self.schedule.skip(shard);
            }
            self.memory[shard] = Some(memory);
        }
        Ok(())
    }

    fn report(&self) {
        if let Some(on_progress) = &self.options.on_progress {
            on_progress(GetProgress { arrived_bytes: self.arrived_bytes, total_bytes: self.known.size });
        }
    }

    fn refused_error(&self, shard: usize) -> Error {
        let text = format!(
            "cannot read object: every source has wrong bytes. name={:?} shard={shard}; register the object again",
            self.known.name
        );
        let error = Error::new(ErrorCode::ChecksumMismatch, text);
        match self.last_error.clone() {
            Some(last) => error.with_source(last),
            None => error,
        }
    }

    fn stall_error(&self) -> Error {
        let missing = (0..self.locations.len()).filter(|shard| !self.schedule.has_arrived(*shard)).count();
        let text = format!(
            "cannot read object: no shard arrived in time. name={:?} missing={missing} \
             limit={:?}; check the nodes that hold it",
            self.known.name, self.inner.options.stall_timeout
        );
        let error = Error::new(ErrorCode::TransferFail, text);
        match self.last_error.clone() {
            Some(last) => error.with_source(last),
            None => error,
        }
    }
}

fn cancelled_error(name: &str) -> Error {
    let text = format!("cannot read object: the call was cancelled, or the store closed. name={name:?}");
    Error::new(ErrorCode::UnavailableInCurrentStatus, text)
}
