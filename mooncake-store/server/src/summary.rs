//! Summary of the metrics in one line, in the format of Mooncake C++.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

use super::state::State;
use mooncake_master::{DiskStats, Stats};
use mooncake_protocol::metrics::human;

/// Formats the line.
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

/// Formats evictions. Only memory is evicted; the other tiers show 0.
fn evictions(stats: &Stats) -> String {
    let times = format!("Success/Attempts={}/{}", stats.evictions_successful, stats.evictions_attempted);
    let what = format!("keys={}, size={}", stats.evicted_keys, human(stats.evicted_bytes));
    format!(
        "Eviction: {times}, AllocFail={}, PartialAlloc={}, {what} | \
         Mem Eviction: {times}, {what} | \
         NoF Eviction: Success/Attempts=0/0, keys=0, size=0 B | \
         Discard: Released/Total={}/{}, StagingSize={} | {}",
        stats.out_of_space,
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

    #[test]
    fn summary_includes_disks() {
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
}
