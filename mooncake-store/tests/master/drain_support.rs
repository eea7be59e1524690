//! Short calls that drain segments and inspect the jobs.

use mooncake_core::error::ErrorCode;
use mooncake_core::ids::Uuid;
use mooncake_core::replica::{ReplicateConfig, SegmentStatus};
use mooncake_store::master::{DrainInfo, DrainRequest};
use mooncake_store::protocol::wire::{TaskKind::Move, TaskReport, TaskStatus};

use crate::common::rig::{MIB, Rig, client, segment};

/// Returns the name of a segment.
pub(crate) fn name(number: u64) -> String {
    segment(number, MIB).name
}

pub(crate) trait Drains {
    fn put_in(&self, number: u64, key: &str, len: u64);
    fn drain(&self, from: &[u64], to: &[u64], at_once: u64) -> Result<Uuid, ErrorCode>;
    fn job(&self, id: Uuid) -> DrainInfo;
    fn state(&self, number: u64) -> SegmentStatus;
    /// Executes the moves that the client is given. Returns their keys.
    fn work(&self, who: u64) -> Vec<String>;
    fn lies_in(&self, key: &str) -> Vec<u64>;
    /// Moves the clock by half a second, as between two polls of a job.
    fn round(&self);
}

impl Drains for Rig {
    fn put_in(&self, number: u64, key: &str, len: u64) {
        let config = ReplicateConfig { preferred_segment: name(number), ..ReplicateConfig::default() };
        self.put_with(9, key, len, &config).unwrap();
    }

    fn drain(&self, from: &[u64], to: &[u64], at_once: u64) -> Result<Uuid, ErrorCode> {
        let names = |numbers: &[u64]| numbers.iter().map(|number| name(*number)).collect::<Vec<_>>();
        let (from, to) = (names(from), names(to));
        let request = DrainRequest { segments: &from, targets: &to, max_concurrency: at_once };
        self.master.drain_start(&request).map_err(|error| error.code())
    }

    fn job(&self, id: Uuid) -> DrainInfo {
        self.master.drain(id).unwrap()
    }

    fn state(&self, number: u64) -> SegmentStatus {
        self.master.segment_status_by_name(&name(number)).unwrap()
    }

    fn work(&self, who: u64) -> Vec<String> {
        let mut moved = Vec::new();
        for task in self.master.fetch_tasks(client(who), 1000) {
            assert_eq!(task.kind, Move);
            let payload: serde_json::Value = serde_json::from_str(&task.payload).unwrap();
            let text = |field: &str| payload[field].as_str().unwrap().to_owned();
            let key = text("key");
            let made = self
                .master
                .move_start(client(who), key.as_bytes(), &text("source"), &text("target"))
                .and_then(|_| self.master.replication_end(client(who), Move, key.as_bytes()));
            let status = if made.is_ok() { TaskStatus::Success } else { TaskStatus::Failed };
            let message = made.err().map_or("done".into(), |error| error.to_string());
            self.master.complete_task(client(who), &TaskReport { id: task.id, status, message }).unwrap();
            moved.push(key);
        }
        moved
    }

    fn lies_in(&self, key: &str) -> Vec<u64> {
        let replicas = self.master.peek(key.as_bytes()).unwrap();
        let here = |number: &u64| {
            let endpoint = segment(*number, MIB).endpoint;
            replicas.iter().any(|replica| replica.location.memory().unwrap().endpoint == endpoint)
        };
        (1..20).filter(here).collect()
    }

    fn round(&self) {
        self.alive_for(0.5);
    }
}
