//! Statistics of a replay, and the table at the end.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::args::Args;

/// Outcome of one request, as its worker reports it to the coordinator.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Index in the trace.
    pub(crate) index: usize,
    /// Blocks in the request.
    pub(crate) blocks: u64,
    /// Number of blocks of its prefix that were read correctly.
    pub(crate) hit: u64,
    /// Number of blocks with wrong bytes.
    pub(crate) mismatches: u64,
    /// Number of blocks put, and of those that were present already.
    pub(crate) put: u64,
    pub(crate) existed: u64,
    /// Number of matched blocks that were gone when read: misses.
    pub(crate) lost: u64,
    /// Number of blocks without space.
    pub(crate) out_of_space: u64,
    /// Number of blocks whose owner could not be reached.
    pub(crate) unreachable: u64,
    /// Number of blocks that owners of disks have read for it.
    pub(crate) from_disk: u64,
    /// Failures that are not misses, by message.
    pub(crate) failures: BTreeMap<String, u64>,
    /// Duration of each step in microseconds; absent when the step had nothing to do.
    pub(crate) match_us: Option<u64>,
    pub(crate) get_us: Option<u64>,
    pub(crate) put_us: Option<u64>,
}

/// Statistics of the master.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MasterStats {
    pub(crate) evicted_objects: u64,
    pub(crate) evicted_bytes: u64,
    pub(crate) objects: u64,
    pub(crate) used_bytes: u64,
    pub(crate) capacity_bytes: u64,
    /// Number of copies on disks, and their bytes.
    pub(crate) on_disk: u64,
    pub(crate) disk_bytes: u64,
}

/// Sum of all outcomes.
pub(crate) struct Totals {
    block_bytes: u64,
    /// True if a killed client held the block that most requests begin with.
    pub(crate) killed_root: bool,
    pub(crate) requests: u64,
    sum: Outcome,
    /// Tokens of all prompts, 0 if they are unknown, and those that were found.
    input_tokens: u64,
    found_tokens: u64,
    steps: [(&'static str, Histogram<u64>); 4],
}

impl Totals {
    pub(crate) fn new(block_bytes: u64, input_tokens: u64) -> Self {
        let steps = ["match prefix", "get", "put", "get, memory only"].map(|name| {
            // Three digits from a microsecond to a minute.
            (name, Histogram::new_with_bounds(1, 60_000_000, 3).expect("constant bounds are valid"))
        });
        Self {
            block_bytes,
            killed_root: false,
            requests: 0,
            sum: Outcome::default(),
            input_tokens,
            found_tokens: 0,
            steps,
        }
    }

    /// Adds a request that found so many tokens.
    pub(crate) fn add(&mut self, one: &Outcome, found_tokens: u64) {
        self.requests += 1;
        self.found_tokens += found_tokens;
        let sum = &mut self.sum;
        for (to, from) in [
            (&mut sum.blocks, one.blocks),
            (&mut sum.hit, one.hit),
            (&mut sum.mismatches, one.mismatches),
            (&mut sum.put, one.put),
            (&mut sum.existed, one.existed),
            (&mut sum.lost, one.lost),
            (&mut sum.out_of_space, one.out_of_space),
            (&mut sum.unreachable, one.unreachable),
            (&mut sum.from_disk, one.from_disk),
        ] {
            *to += from;
        }
        for (what, count) in &one.failures {
            *sum.failures.entry(what.clone()).or_default() += count;
        }
        let from_memory = one.get_us.filter(|_| one.from_disk == 0);
        for ((_, histogram), time) in
            self.steps.iter_mut().zip([one.match_us, one.get_us, one.put_us, from_memory])
        {
            if let Some(time) = time {
                histogram.saturating_record(time);
            }
        }
    }

    /// Returns the longest single step of any request.
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_micros(self.steps.iter().map(|(_, h)| h.max()).max().unwrap_or(0))
    }

    /// Returns the share of all blocks that a cached prefix covered.
    pub(crate) fn hit_rate(&self) -> f64 {
        ratio(self.sum.hit as f64, self.sum.blocks as f64)
    }

    /// Returns whether the run passes: right bytes, misses at worst, and no wait beyond the limit.
    /// Only blocks of a killed client without another copy may be unreachable.
    pub(crate) fn good(&self, args: &Args) -> bool {
        let may_lose = args.kill_one_after.is_some() && args.replicas == 1;
        self.sum.mismatches == 0
            && self.sum.failures.is_empty()
            && (may_lose || self.sum.unreachable == 0)
            && self.longest() <= Duration::from_secs_f64(args.limit)
    }

    pub(crate) fn mismatches(&self) -> u64 {
        self.sum.mismatches
    }

    /// Returns the 99th percentile of the reads without a disk, in microseconds.
    pub(crate) fn memory_p99(&self) -> u64 {
        self.steps[3].1.value_at_quantile(0.99)
    }

    pub(crate) fn print(&self, elapsed: Duration, master: &MasterStats) {
        let sum = &self.sum;
        let moved = (sum.hit + sum.put - sum.existed) * self.block_bytes;
        let row = |name: &str, value: String| println!("{name:<22} {value}");
        row("requests", self.requests.to_string());
        row("blocks", format!("{} of {} bytes", sum.blocks, self.block_bytes));
        row("prefix hit rate", format!("{:.4}", self.hit_rate()));
        if self.input_tokens > 0 {
            let share = ratio(self.found_tokens as f64, self.input_tokens as f64);
            row("of the tokens", format!("{share:.4} of {}", self.input_tokens));
        }
        row("gets", format!("{} blocks, each checked", sum.hit));
        row("puts", format!("{} blocks, {} of them present already", sum.put, sum.existed));
        row("of these from disks", format!("{} blocks", sum.from_disk));
        row("misses after match", sum.lost.to_string());
        row("no space", sum.out_of_space.to_string());
        row("owner unreachable", sum.unreachable.to_string());
        row(
            "payload moved",
            format!(
                "{:.2} GB/s over {:.1} s",
                ratio(moved as f64 / 1e9, elapsed.as_secs_f64()),
                elapsed.as_secs_f64()
            ),
        );
        for (name, histogram) in &self.steps {
            let at = |q: f64| histogram.value_at_quantile(q) as f64 / 1000.0;
            row(
                &format!("{name} latency"),
                format!(
                    "p50 {:.2} ms  p99 {:.2} ms  max {:.2} ms  ({} calls)",
                    at(0.5),
                    at(0.99),
                    histogram.max() as f64 / 1000.0,
                    histogram.len()
                ),
            );
        }
        row("evictions", format!("{} objects, {} MiB", master.evicted_objects, master.evicted_bytes >> 20));
        row(
            "memory at the end",
            format!(
                "{} of {} MiB, {} objects",
                master.used_bytes >> 20,
                master.capacity_bytes >> 20,
                master.objects
            ),
        );
        row("on disks at the end", format!("{} objects, {} MiB", master.on_disk, master.disk_bytes >> 20));
        for (what, count) in &sum.failures {
            row("FAILED", format!("{count} x {what}"));
        }
        row("mismatches", sum.mismatches.to_string());
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}
