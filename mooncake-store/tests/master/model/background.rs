//! Copies, moves, drains, replicas of hot objects, and transfers to and from disks.

use mooncake_core::clock::Moment;
use mooncake_core::ids::Uuid;
use mooncake_core::replica::Replica;
use mooncake_store::api::CopyToken;
use mooncake_store::master::DrainRequest;
use mooncake_store::protocol::wire::{OffloadItem, StoredAt, TaskKind, TaskReport, TaskStatus};

use super::world::{CHUNK, GRANT, LATE, LocatedReplica, World, take};
use crate::common::rig::{client, endpoint};

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

enum Kind {
    Copy {
        kind: TaskKind,
        token: CopyToken,
        task: Option<Uuid>,
    },
    /// Transfer to a file, with the bytes read so far.
    Offload {
        item: OffloadItem,
        read: Vec<u8>,
    },
    Promote,
}

enum From {
    Memory(LocatedReplica),
    File(Vec<u8>),
}

fn is_at(replica: &Replica, at: &str) -> bool {
    replica.location.memory().is_some() && endpoint(replica) == at
}

impl World {
    pub(crate) fn begin_copy(&mut self, key: u64, from: u64, to: u64, moves: bool) {
        let kind = if moves { TaskKind::Move } else { TaskKind::Copy };
        let names = [from, to].map(|node| self.nodes[node as usize].segment.name.clone());
        let (who, key) = (self.nodes[from as usize].client, self.name(key));
        self.copy(who, kind, key, &names[0], &names[1], CopyToken::default(), None);
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of a task")]
    fn copy(
        &mut self,
        who: u64,
        kind: TaskKind,
        key: Vec<u8>,
        from: &str,
        to: &str,
        token: CopyToken,
        task: Option<Uuid>,
    ) {
        let master = &self.rig.master;
        let until = self.now().after(GRANT);
        let plan = match kind {
            TaskKind::Copy => master
                .hot_copy_start(client(who), &key, from, &[to], token)
                .map(|plan| (plan.source, plan.targets)),
            TaskKind::Move => master
                .move_start(client(who), &key, from, to)
                .map(|plan| (plan.source, plan.target.into_iter().collect())),
        };
        let Ok((source, targets)) = plan else {
            self.complete(who, task, false);
            return;
        };
        let (from, to) = (self.place(&source), targets.iter().map(|target| self.place(target)).collect());
        let len = source.location.size() as usize;
        let kind = Kind::Copy { kind, token, task };
        let from = From::Memory(from);
        self.works.push(Work { kind, client: who, key, from, to, done: 0, len, until, silent: false });
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

    pub(crate) fn take_tasks(&mut self, node: u64) {
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
            self.copy(who, task.kind, key, &text("source"), &target, token, Some(task.id));
        }
    }

    /// Moves one transfer on, and reports its end.
    pub(crate) fn work(&mut self, which: usize) {
        let Some(mut work) = take(&mut self.works, which) else { return };
        let total = work.len * work.to.len().max(usize::from(matches!(work.kind, Kind::Offload { .. })));
        if self.now() >= work.until {
            return;
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
                return self.fail(work);
            }
            work.done += to - from;
        }
        if work.done < total {
            self.works.push(work);
        } else if !work.silent {
            self.end_work(work);
        }
    }

    fn end_work(&mut self, work: Work) {
        let (who, master) = (client(work.client), &self.rig.master);
        match work.kind {
            Kind::Copy { kind, token, task } => {
                let ended = match kind {
                    TaskKind::Copy => master.hot_copy_end(who, &work.key, token),
                    TaskKind::Move => master.replication_end(who, kind, &work.key),
                };
                self.complete(work.client, task, ended.is_ok());
            }
            Kind::Offload { item, read } => {
                let (len, key) = (item.size, work.key);
                self.files.insert((work.client, key), read);
                self.report(work.client, item, len);
            }
            Kind::Promote => drop(master.promoted(who, &work.key)),
        }
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
            let (who, master) = (client(work.client), &self.rig.master);
            match &work.kind {
                Kind::Copy { kind, token, task } => {
                    let _ = match kind {
                        TaskKind::Copy => master.hot_copy_revoke(who, &work.key, *token),
                        TaskKind::Move => master.replication_revoke(who, *kind, &work.key),
                    };
                    self.complete(work.client, *task, false);
                }
                Kind::Offload { item, .. } => {
                    self.report(work.client, item.clone(), -1);
                    return;
                }
                Kind::Promote => drop(master.promotion_failed(who, &work.key)),
            }
            work.silent = true;
            work.until = work.until.min(self.now().after(LATE));
        }
        self.works.push(work);
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
        for item in self.rig.master.to_offload(client(who), true).unwrap_or_default() {
            let key = self.scoped(&item.tenant, &item.key);
            let len = usize::try_from(item.size).unwrap_or(0);
            let replicas = self.rig.master.peek(&key).unwrap_or_default();
            let own = replicas
                .iter()
                .find(|replica| is_at(replica, &at) && replica.location.size() as usize == len);
            let Some(own) = own else {
                self.report(who, item, -1);
                continue;
            };
            let from = From::Memory(self.place(own));
            let kind = Kind::Offload { item, read: Vec::new() };
            let to = Vec::new();
            self.works.push(Work { kind, client: who, key, from, to, done: 0, len, until, silent: false });
        }
    }

    fn report(&self, who: u64, item: OffloadItem, len: i64) {
        let endpoint = format!("disk{who}:1");
        let place = StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: len, endpoint };
        let _ = self.rig.master.offloaded(client(who), &[item], &[place]);
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
            let start = self.rig.master.promotion_start(client(who), &key, len as u64, &[&name]);
            let Ok(replica) = start else { continue };
            let (kind, from, to) = (Kind::Promote, From::File(file), vec![self.place(&replica)]);
            self.works.push(Work { kind, client: who, key, from, to, done: 0, len, until, silent: false });
        }
    }
}
