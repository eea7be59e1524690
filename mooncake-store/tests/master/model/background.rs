//! Copies, moves, drains, replicas of hot objects, and transfers to and from disks.

use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::error::ErrorCode;
use mooncake_core::ids::Uuid;
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig};
use mooncake_store::api::{CopyToken, WriteMode};
use mooncake_store::master::{DrainRequest, Master, Put, Writer};
use mooncake_store::protocol::wire::{OffloadItem, StoredAt, TaskKind, TaskReport, TaskStatus};

use super::NODES;
use super::world::{CHUNK, GRANT, LATE, LocatedReplica, Verdict, World, take};
use crate::common::rig::{client, endpoint};

/// Longest time from the expiry of a client to the end of its copies.
const LOST_WITHIN: Duration = Duration::from_secs(2);

/// Bytes that a node moves for the master.
pub(crate) struct Work {
    kind: Kind,
    /// Number of the client that moves them.
    client: u64,
    key: Vec<u8>,
    from: From,
    to: Vec<LocatedReplica>,
    /// Number of bytes moved, over all targets.
    done: usize,
    len: usize,
    pub(crate) until: Moment,
    /// Marks work whose end is never reported.
    silent: bool,
}

/// Copy or move, as its client names it.
#[derive(Clone)]
pub(crate) struct CopyCall {
    copier: Writer,
    kind: TaskKind,
    key: Vec<u8>,
    token: CopyToken,
}

/// End of a copy that arrives again, or for the first time after the copy was given up.
pub(crate) struct LateEnd {
    call: CopyCall,
    /// Names of the source and of the target.
    place: [String; 2],
    is_made: bool,
}

impl CopyCall {
    fn start(&self, master: &Master, from: &str, to: &str) -> mooncake_core::Result<(Replica, Vec<Replica>)> {
        match self.kind {
            TaskKind::Copy => master
                .hot_copy_start(self.copier, &self.key, from, &[to], self.token)
                .map(|plan| (plan.source, plan.targets)),
            TaskKind::Move => master
                .move_start(self.copier, &self.key, from, to)
                .map(|plan| (plan.source, plan.target.into_iter().collect())),
        }
    }

    fn end(&self, master: &Master) -> bool {
        match self.kind {
            TaskKind::Copy => master.hot_copy_end(self.copier, &self.key, self.token).is_ok(),
            TaskKind::Move => master.replication_end(self.copier, self.kind, &self.key).is_ok(),
        }
    }

    fn revoke(&self, master: &Master) {
        let _ = match self.kind {
            TaskKind::Copy => master.hot_copy_revoke(self.copier, &self.key, self.token),
            TaskKind::Move => master.replication_revoke(self.copier, self.kind, &self.key),
        };
    }
}

enum Kind {
    Copy {
        call: CopyCall,
        place: [String; 2],
        task: Option<Uuid>,
    },
    /// Transfer to a file, with the bytes read so far.
    Offload {
        item: OffloadItem,
        read: Vec<u8>,
        /// Number of the work that the owner was given, if it asks for numbered work.
        work: Option<u64>,
    },
    Promote {
        attempt: u64,
    },
}

enum From {
    Memory(LocatedReplica),
    File(Vec<u8>),
}

fn is_at(replica: &Replica, at: &str) -> bool {
    replica.location.memory().is_some() && endpoint(replica) == at
}

impl World {
    pub(crate) fn begin_copy(&mut self, key: u64, from: u64, to: u64, moves: bool) -> Verdict {
        let kind = if moves { TaskKind::Move } else { TaskKind::Copy };
        // Mostly from a node that holds the object; the others are refused.
        let replicas = self.rig.master.peek(&self.name(key)).unwrap_or_default();
        let holds = |number: &u64| {
            let at = &self.nodes[*number as usize].segment.endpoint;
            replicas.iter().any(|replica| is_at(replica, at))
        };
        let from = if key == 0 { from } else { (0..NODES).find(holds).unwrap_or(from) };
        let names = [from, to].map(|node| self.nodes[node as usize].segment.name.clone());
        // Mostly the owner of the source copies; any client may.
        let by = if key.is_multiple_of(2) { (from + 1) % NODES } else { from };
        let (who, key) = (self.nodes[by as usize].client, self.name(key));
        self.copy(who, kind, key, (&names[0], &names[1]), CopyToken::default(), None)
    }

    fn copy(
        &mut self,
        who: u64,
        kind: TaskKind,
        key: Vec<u8>,
        (from, to): (&str, &str),
        token: CopyToken,
        task: Option<Uuid>,
    ) -> Verdict {
        self.next += 1;
        // Some clients number their copies, and others do not.
        let attempt = if self.next.is_multiple_of(4) { 0 } else { self.next };
        let call = CopyCall { copier: Writer { client: client(who), attempt }, kind, key, token };
        let until = self.now().after(GRANT);
        let place = [from.to_owned(), to.to_owned()];
        let Ok((source, targets)) = call.start(&self.rig.master, from, to) else {
            self.complete(who, task, false);
            return Ok(());
        };
        if attempt != 0 && !call.start(&self.rig.master, from, to).is_ok_and(|(_, again)| again == targets) {
            return Err("a copy start repeated has another plan".into());
        }
        self.copiers.insert(call.key.clone(), who);
        let (from, to) = (self.place(&source), targets.iter().map(|target| self.place(target)).collect());
        let len = source.location.size() as usize;
        let (from, key) = (From::Memory(from), call.key.clone());
        let kind = Kind::Copy { call, place, task };
        self.works.push(Work { kind, client: who, key, from, to, done: 0, len, until, silent: false });
        Ok(())
    }

    fn complete(&self, who: u64, task: Option<Uuid>, succeeded: bool) {
        let Some(id) = task else { return };
        let status = if succeeded { TaskStatus::Success } else { TaskStatus::Failed };
        let report = TaskReport { id, status, message: String::new() };
        let _ = self.rig.master.complete_task(client(who), &report);
    }

    pub(crate) fn begin_drain(&mut self, from: u64, to: u64) {
        let names = [from, to].map(|node| vec![self.nodes[node as usize].segment.name.clone()]);
        let request = DrainRequest { segments: &names[0], targets: &names[1], max_concurrency: 2 };
        if let Ok(id) = self.rig.master.drain_start(&request) {
            self.drain = Some(id);
        }
    }

    pub(crate) fn cancel_drain(&mut self) {
        if let Some(id) = self.drain.take() {
            let _ = self.rig.master.drain_cancel(id);
        }
    }

    pub(crate) fn take_tasks(&mut self, node: u64) -> Verdict {
        let who = self.nodes[node as usize].client;
        for task in self.rig.master.fetch_tasks(client(who), 4) {
            let payload: serde_json::Value = serde_json::from_str(&task.payload).unwrap();
            let text = |field: &str| payload[field].as_str().unwrap_or_default().to_owned();
            let number = |field: &str| payload[field].as_u64().unwrap_or_default();
            let lease = Uuid::new(
                number("dynamic_replication_lease_id_high"),
                number("dynamic_replication_lease_id_low"),
            );
            let token = CopyToken { lease, epoch: number("dynamic_replication_version_epoch") };
            let key = self.scoped(&text("tenant_id"), text("key").as_bytes());
            let target = match task.kind {
                TaskKind::Copy => payload["targets"][0].as_str().unwrap_or_default().to_owned(),
                TaskKind::Move => text("target"),
            };
            self.copy(who, task.kind, key, (&text("source"), &target), token, Some(task.id))?;
        }
        Ok(())
    }

    /// Moves one transfer on, and reports its end.
    pub(crate) fn work(&mut self, which: usize) -> Verdict {
        let Some(mut work) = take(&mut self.works, which) else { return Ok(()) };
        let total = work.len * work.to.len().max(usize::from(matches!(work.kind, Kind::Offload { .. })));
        if self.now() >= work.until {
            return Ok(());
        }
        if work.done < total {
            let (target, from) = (work.done / work.len, work.done % work.len);
            let to = (from + CHUNK).min(work.len);
            let part = match &work.from {
                From::File(file) => Some(file[from..to].to_vec()),
                From::Memory(place) => self.memory(place).map(|memory| memory[from..to].to_vec()),
            };
            let moved = part.is_some_and(|part| match &mut work.kind {
                Kind::Offload { read, .. } => {
                    read.extend(part);
                    true
                }
                _ => self
                    .memory(&work.to[target])
                    .map(|memory| memory[from..to].copy_from_slice(&part))
                    .is_some(),
            });
            if !moved {
                self.fail(work);
                return Ok(());
            }
            work.done += to - from;
        }
        if work.done < total {
            self.works.push(work);
        } else if !work.silent {
            return self.end_work(work);
        }
        Ok(())
    }

    fn end_work(&mut self, work: Work) -> Verdict {
        let master = &self.rig.master;
        match work.kind {
            Kind::Copy { call, place, task } => {
                let is_made = call.end(master);
                if is_made && call.copier.attempt != 0 && !call.end(master) {
                    return Err("the end of a copy repeated is refused".into());
                }
                self.complete(work.client, task, is_made);
                self.late_ends.push(LateEnd { call, place, is_made });
            }
            Kind::Offload { item, read, work: number } => {
                let (len, key) = (item.size, work.key);
                self.files.insert((work.client, key), read);
                self.report(work.client, item.clone(), len, number);
                self.late_reports.extend(number.map(|number| (work.client, item, number)));
            }
            Kind::Promote { attempt } => {
                let promoter = Writer { client: client(work.client), attempt };
                let end = || master.promoted(promoter, &work.key);
                if end().is_ok() && end().is_err() {
                    return Err("the end of a promotion repeated is refused".into());
                }
            }
        }
        Ok(())
    }

    /// Ends work that cannot continue, and reports it unless the work is silent.
    fn fail(&mut self, work: Work) {
        if work.silent {
            return;
        }
        self.works.push(work);
        self.give_up_work(self.works.len() - 1);
    }

    /// Gives up the work of a node; bytes that it sent may still arrive for a while.
    pub(crate) fn give_up_work(&mut self, which: usize) {
        let Some(mut work) = take(&mut self.works, which) else { return };
        if !work.silent {
            let master = &self.rig.master;
            match &work.kind {
                Kind::Copy { call, place, task } => {
                    call.revoke(master);
                    self.complete(work.client, *task, false);
                    // The end may have been sent and not answered before.
                    let (call, place) = (call.clone(), place.clone());
                    self.late_ends.push(LateEnd { call, place, is_made: false });
                }
                Kind::Offload { item, work: number, .. } => {
                    self.report(work.client, item.clone(), -1, *number);
                    return;
                }
                Kind::Promote { attempt } => {
                    let promoter = Writer { client: client(work.client), attempt: *attempt };
                    let _ = master.promotion_failed(promoter, &work.key);
                }
            }
            work.silent = true;
            work.until = work.until.min(self.now().after(LATE));
        }
        self.works.push(work);
    }

    /// Lets the end of a copy, or a report of a disk, arrive late.
    pub(crate) fn end_late(&mut self, which: usize) -> Verdict {
        if let Some((who, item, number)) = take(&mut self.late_reports, which) {
            let len = item.size;
            self.report(who, item, len, Some(number));
        }
        let Some(late) = take(&mut self.late_ends, which) else { return Ok(()) };
        if !late.is_made && which.is_multiple_of(2) {
            // The client tries again before the end of its first copy arrives.
            let (CopyCall { copier, kind, key, token }, [from, to]) = (late.call.clone(), &late.place);
            self.copy(copier.client.0.second, kind, key, (from, to), token, None)?;
            self.late_ends.push(late);
            return Ok(());
        }
        // A client without numbers sends no more than one copy of a key at a time.
        if late.call.copier.attempt != 0 && late.call.end(&self.rig.master) && !late.is_made {
            return Err("a late end of a copy has ended something".into());
        }
        Ok(())
    }

    /// Records the death of a client: no more of it arrives.
    pub(crate) fn client_died(&mut self, who: u64) {
        self.works.retain(|work| work.client != who);
        self.died.insert(who, self.now());
    }

    /// Returns whether the client that began the last copy of a key may be alive, as far as the
    /// master knows.
    fn may_be_copied(&self, key: &[u8]) -> bool {
        let until = self.rig.master.options().client_ttl + LOST_WITHIN;
        self.copiers.get(key).is_some_and(|who| {
            let died = self.died.get(who);
            died.is_none_or(|at| at.after(until) > self.now())
        })
    }

    /// Checks, once for each copy whose client died a while ago, that it blocks no write.
    pub(crate) fn check_copiers(&mut self) -> Verdict {
        let lost: Vec<_> = self.copiers.keys().filter(|key| !self.may_be_copied(key)).cloned().collect();
        for key in lost {
            self.next += 1;
            let writer = Writer { client: client(100_000 + self.next), attempt: self.next };
            let config = ReplicateConfig::default();
            let put = Put {
                writer,
                mode: WriteMode::Upsert,
                key: &key,
                len: 1,
                config: &config,
                group: "",
                session: None,
            };
            self.check_copier(&put)?;
            self.copiers.remove(&key);
        }
        Ok(())
    }

    /// Checks that a put was refused because of a copy whose client may be alive.
    pub(crate) fn check_copier(&self, put: &Put<'_>) -> Verdict {
        if self.may_be_copied(put.key) || self.mistake.is_some() {
            return Ok(());
        }
        self.rig.master.tick();
        match self.rig.master.put_start(put).map_err(|error| error.code()) {
            Err(ErrorCode::ObjectHasReplicationTask) => Err("a lost client copies an object".into()),
            Err(_) => Ok(()),
            Ok(_) => {
                let _ = self.rig.master.put_revoke(put.writer, put.key, ReplicaType::All);
                Ok(())
            }
        }
    }

    /// Checks that nothing blocks an object whose removal was refused, except writes of the last
    /// time and copies of clients that may be alive.
    pub(crate) fn check_blocked(&mut self, key: &[u8]) -> Verdict {
        let (now, options) = (self.now(), self.rig.master.options());
        let is_written = self.started.get(key).is_some_and(|at| at.after(options.put_discard) > now);
        if is_written || self.may_be_copied(key) || self.mistake.is_some() {
            return Ok(());
        }
        self.rig.master.tick();
        match self.rig.master.remove(key, true).map_err(|error| error.code()) {
            Ok(()) | Err(ErrorCode::ObjectNotFound) => Ok(()),
            Err(code) => Err(format!("an object is blocked by a lost client: {code:?}")),
        }
    }

    /// Drops the work: its transfers continue, and their end is not reported.
    pub(crate) fn drop_work(&mut self, which: usize) {
        if let Some(mut work) = take(&mut self.works, which) {
            work.silent = true;
            self.works.push(work);
        }
    }

    pub(crate) fn offer_disk(&mut self, node: u64) {
        let _ = self.rig.master.mount_disk(client(self.nodes[node as usize].client), true);
    }

    /// Sends the heartbeat of a disk. Like an owner of Mooncake C++, this one reads the bytes at
    /// any time until its promise ends.
    pub(crate) fn offload(&mut self, node: u64) {
        let (who, at) = {
            let node = &self.nodes[node as usize];
            (node.client, node.segment.endpoint.clone())
        };
        let until = self.now().after(GRANT);
        let (number, items) = self.next_offloads(node, who);
        for item in items {
            let key = self.scoped(&item.tenant, &item.key);
            let len = usize::try_from(item.size).unwrap_or(0);
            let replicas = self.rig.master.peek(&key).unwrap_or_default();
            let own = replicas
                .iter()
                .find(|replica| is_at(replica, &at) && replica.location.size() as usize == len);
            let Some(own) = own else {
                self.report(who, item, -1, number);
                continue;
            };
            let from = From::Memory(self.place(own));
            let kind = Kind::Offload { item, read: Vec::new(), work: number };
            let to = Vec::new();
            self.works.push(Work { kind, client: who, key, from, to, done: 0, len, until, silent: false });
        }
    }

    /// Returns the objects that an owner is to write to its disk, with the number of this work.
    /// Some owners ask for numbered work, after they have finished the work before.
    fn next_offloads(&mut self, node: u64, who: u64) -> (Option<u64>, Vec<OffloadItem>) {
        if !self.setup.on_evict {
            return (None, self.rig.master.to_offload(client(who), true).unwrap_or_default());
        }
        let is_busy = |work: &Work| work.client == who && matches!(work.kind, Kind::Offload { .. });
        if self.works.iter().any(is_busy) {
            return (None, Vec::new());
        }
        let done = self.nodes[node as usize].work_done;
        let Ok(given) = self.rig.master.disk_work(client(who), false, done) else {
            return (None, Vec::new());
        };
        self.nodes[node as usize].work_done = given.number;
        for item in given.dropped {
            let key = self.scoped(&item.tenant, &item.key);
            self.files.remove(&(who, key));
        }
        (Some(given.number), given.write)
    }

    fn report(&self, who: u64, item: OffloadItem, len: i64, work: Option<u64>) {
        let endpoint = format!("disk{who}:1");
        let place = StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: len, endpoint };
        let master = &self.rig.master;
        let _ = match work {
            Some(work) => master.report_offloaded(client(who), work, &[item], &[place]),
            None => master.offloaded(client(who), &[item], &[place]),
        };
    }

    pub(crate) fn promote(&mut self, node: u64) {
        let (who, name) = {
            let node = &self.nodes[node as usize];
            (node.client, node.segment.name.clone())
        };
        let until = self.now().after(GRANT);
        for item in self.rig.master.to_promote(client(who)).unwrap_or_default() {
            let key = self.scoped(&item.tenant, &item.key);
            let len = usize::try_from(item.size).unwrap_or(0);
            let file = self.files.get(&(who, key.clone())).filter(|file| file.len() == len).cloned();
            let Some(file) = file else {
                let _ = self.rig.master.promotion_failed(client(who), &key);
                continue;
            };
            self.next += 1;
            let (attempt, master) = (self.next, &self.rig.master);
            let promoter = Writer { client: client(who), attempt };
            let start = master.promotion_start(promoter, &key, len as u64, &[&name]);
            let Ok(replica) = start else { continue };
            self.started.insert(key.clone(), self.now());
            let (kind, from, to) = (Kind::Promote { attempt }, From::File(file), vec![self.place(&replica)]);
            self.works.push(Work { kind, client: who, key, from, to, done: 0, len, until, silent: false });
        }
    }
}
