//! A line of figures for people, in the words of the existing master.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_core::clock::Moment;
use parking_lot::Mutex;

use super::State;
use super::counting::Requests;
use mooncake_master::{DiskStats, Stats};
use mooncake_protocol::metrics::human;

/// What there is to say of several masters when there is one.
#[cfg(feature = "http")]
pub(super) const HA: &str = "HA Metrics Summary: last_seq=0, applied_seq=0, lag=0, pending=0, mutation_queue=0, \
                             batch_commits=0, sync_commits=0, skipped=0, checksum_fail=0, etcd_fail=0, watch_disconn=0, state=0";

/// Requests, failures, partial successes, items and failed items of each operation.
type Counts = HashMap<&'static str, [u64; 5]>;

/// What the rates in the line are counted from: where the counters stood one report ago and the one before. Shown is what happened
/// since the earlier one, so that a rate is never of a moment only.
#[derive(Debug)]
pub(super) struct Rates(Mutex<[(Moment, Counts); 2]>);

impl Rates {
    /// Counts from this moment on.
    pub(super) fn from(now: Moment) -> Self {
        Self(Mutex::new([(now, Counts::new()), (now, Counts::new())]))
    }

    /// Notes where the counters stand.
    pub(super) fn take(&self, now: Moment, requests: &Requests) {
        let mut taken = self.0.lock();
        taken.swap(0, 1);
        taken[1] = (now, counts(requests));
    }

    /// Per second and operation.
    fn since(&self, now: Moment, requests: &Requests) -> HashMap<&'static str, [f64; 5]> {
        let taken = self.0.lock();
        let (at, before) = &taken[0];
        let seconds = now.since(*at).as_secs_f64().max(1e-3);
        let rate = |name: &'static str, now: [u64; 5]| {
            let before = before.get(name).copied().unwrap_or_default();
            (name, std::array::from_fn(|i| now[i].saturating_sub(before[i]) as f64 / seconds))
        };
        counts(requests).into_iter().map(|(name, now)| rate(name, now)).collect()
    }
}

fn counts(requests: &Requests) -> Counts {
    let (single, batch) = requests.all();
    let single = single.into_iter().map(|(name, counters)| {
        let [requests, failures] = counters.read();
        (name, [requests, failures, 0, 0, 0])
    });
    single.chain(batch.into_iter().map(|(name, counters)| (name, counters.read()))).collect()
}

/// The line.
pub(super) fn line(state: &State) -> String {
    let stats = state.master.stats();
    let rates = state.rates.since(state.master.clock().now(), &state.requests);
    let mut line = storage(&stats);
    // Writing to a string cannot fail.
    let _ = write!(line, " | {} | {} | {}", singles(&rates), batches(&rates), evictions(&stats));
    let [success, failed] =
        [&state.snapshots.success, &state.snapshots.failed].map(|count| count.load(Relaxed));
    let _ = write!(line, " | Snapshots: Success={success}, Fail={failed}");
    line
}

fn storage(stats: &Stats) -> String {
    let (used, capacity) = (stats.used(), stats.capacity());
    let part = if capacity == 0 {
        String::new()
    } else {
        format!(" ({:.1}%)", used as f64 * 100.0 / capacity as f64)
    };
    format!(
        "Mem Storage: {} / {}{part} | NVMe-oF SSD: 0 B / 0 B | SSD Storage: {} / {} | Keys: {} (soft-pinned: {}) | Clients: {}",
        human(used),
        human(capacity),
        human(stats.disks.used),
        human(stats.disks.capacity),
        stats.keys,
        stats.soft_pinned,
        stats.clients,
    )
}

fn singles(rates: &HashMap<&str, [f64; 5]>) -> String {
    let shown = [
        ("PutStart", "put_start"),
        ("PutEnd", "put_end"),
        ("PutRevoke", "put_revoke"),
        ("Get", "get_replica_list"),
        ("Exist", "exist_key"),
        ("Del", "remove"),
        ("DelAll", "remove_all"),
        ("Ping", "ping"),
        ("CopyStart", "copy_start"),
        ("CopyEnd", "copy_end"),
        ("CopyRevoke", "copy_revoke"),
        ("MoveStart", "move_start"),
        ("MoveEnd", "move_end"),
        ("MoveRevoke", "move_revoke"),
        ("EvictDiskReplica", "evict_disk_replica"),
    ]
    .map(|(shown, name)| {
        let [total, failed, ..] = rates.get(name).copied().unwrap_or_default();
        format!("{shown}={:.2}/{total:.2}", total - failed)
    });
    format!("Requests (Success/Total per sec): {}", shown.join(", "))
}

fn batches(rates: &HashMap<&str, [f64; 5]>) -> String {
    let of = |name: &str| rates.get(name).copied().unwrap_or_default();
    let many = [
        ("PutStart", "batch_put_start"),
        ("PutEnd", "batch_put_end"),
        ("PutRevoke", "batch_put_revoke"),
        ("Get", "batch_get_replica_list"),
        ("ExistKey", "batch_exist_key"),
        ("QueryIp", "batch_query_ip"),
        ("Clear", "batch_replica_clear"),
    ]
    .map(|(shown, name)| {
        let [total, failed, partial, items, failed_items] = of(name);
        let (fine, fine_items) = (total - failed - partial, items - failed_items);
        format!("{shown}:(Req={fine:.2}/{partial:.2}/{total:.2}, Item={fine_items:.2}/{items:.2})")
    });
    let tasks = [
        ("CreateMoveTask", "create_move_task"),
        ("CreateCopyTask", "create_copy_task"),
        ("QueryTask", "query_task"),
        ("FetchTasks", "fetch_tasks"),
        ("MarkTaskToComplete", "update_task"),
    ]
    .map(|(shown, name)| {
        let [total, failed, ..] = of(name);
        format!("{shown}:(Req={:.2}/{total:.2})", total - failed)
    });
    format!(
        "Batch Requests (per sec, Req=Success/PartialSuccess/Total, Item=Success/Total): {}, {}",
        many.join(", "),
        tasks.join(", ")
    )
}

/// Everything that is evicted is evicted from memory; of the other tiers there is nothing to tell.
fn evictions(stats: &Stats) -> String {
    let times = format!("Success/Attempts={}/{}", stats.evictions_successful, stats.evictions_attempted);
    let what = format!("keys={}, size={}", stats.evicted_keys, human(stats.evicted_bytes));
    format!(
        "Eviction: {times}, AllocFail={}, PartialAlloc={}, {what} | Mem Eviction: {times}, {what} | \
         NoF Eviction: Success/Attempts=0/0, keys=0, size=0 B | Discard: Released/Total={}/{}, StagingSize={} | \
         {}",
        stats.no_room,
        stats.partial,
        stats.released,
        stats.discarded,
        human(stats.resting()),
        promotions(&stats.disks),
    )
}

fn promotions(disks: &DiskStats) -> String {
    format!(
        "Promotion: in_flight={}, admitted={}, completed={}, failed={}, cancelled={}, expired={}, bytes={}, rejected(freq/wm/cap)={}/{}/{}",
        disks.promotions_in_flight,
        disks.promotions_admitted,
        disks.promotions_completed,
        disks.promotions_failed,
        disks.promotions_cancelled,
        disks.promotions_expired,
        human(disks.promoted_bytes),
        disks.promotions_too_rare,
        disks.promotions_too_full,
        disks.promotions_over_limit,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_protocol::message::{Ping, Request};
    use mooncake_protocol::service::Tally;
    use std::time::Duration;

    #[test]
    fn disks_are_told_of() {
        let disks = DiskStats {
            used: 1 << 20,
            capacity: 3 << 30,
            promotions_in_flight: 1,
            promotions_admitted: 2,
            promotions_completed: 3,
            promoted_bytes: 4 << 10,
            promotions_failed: 5,
            promotions_cancelled: 6,
            promotions_expired: 7,
            promotions_too_rare: 8,
            promotions_too_full: 9,
            promotions_over_limit: 10,
            ..DiskStats::default()
        };
        let text = promotions(&disks);
        assert!(text.starts_with(
            "Promotion: in_flight=1, admitted=2, completed=3, failed=5, cancelled=6, expired=7, bytes=4"
        ));
        assert!(text.ends_with(", rejected(freq/wm/cap)=8/9/10"), "{text}");
        let text = storage(&Stats { disks, ..Stats::default() });
        assert!(
            text.contains(&format!("| SSD Storage: {} / {} |", human(1 << 20), human(3 << 30))),
            "{text}"
        );
    }

    #[test]
    fn rates_are_of_the_last_two_reports() {
        let requests = Requests::default();
        let ping = |times: usize| {
            for _ in 0..times {
                requests.count(Ping::FUNCTION, Tally::default(), Duration::ZERO);
            }
        };
        let second = |seconds: u64| Moment(seconds * 1_000_000_000);
        let rates = Rates::from(second(0));
        let of = |now| rates.since(second(now), &requests)["ping"][0];
        ping(10);
        assert_eq!(of(5), 2.0);
        rates.take(second(10), &requests);
        assert_eq!(of(10), 1.0, "still since the start");
        ping(20);
        rates.take(second(20), &requests);
        assert_eq!(of(20), 2.0, "since the first report");
        rates.take(second(30), &requests);
        assert_eq!(of(40), 0.0);
    }
}
