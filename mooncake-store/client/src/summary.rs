//! Summary of the metrics of a client as text, in the format of Mooncake C++.

use std::fmt::Write;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_transport::Transport;

use crate::metrics::{Direction, Metrics, OperationCounts};
use crate::state::{Client, Inner};
use mooncake_protocol::message::{DISPLAY_VERSION, MASTER_VERSION};
use mooncake_protocol::metrics::{MICROS, Micros, human};

impl Metrics {
    /// Returns several lines of text: bytes, latencies, RPCs to the master, and calls of the store.
    pub fn summary(&self) -> String {
        let mut text = format!(
            "Client Metrics Summary\n\
             Build: version={MASTER_VERSION}, display_version={DISPLAY_VERSION}\n\
             === Transfer Metrics Summary ===\n"
        );
        let seconds = self.age().as_secs_f64().max(1e-3);
        let (read, written) = (self.read.bytes(), self.written.bytes());
        for (name, bytes) in [("Read", read), ("Write", written)] {
            let _ = writeln!(text, "Total {name}: {}", human(bytes));
        }
        for (name, bytes) in [("Read", read), ("Write", written)] {
            let _ = writeln!(text, "Average {name} Throughput: {}/s", human((bytes as f64 / seconds) as u64));
        }
        text.push_str("\n=== Latency Summary (microseconds) ===\n");
        for (name, latency) in [
            ("Get", &self.read.single),
            ("Put", &self.written.single),
            ("Batch Get", &self.read.batch),
            ("Batch Put", &self.written.batch),
        ] {
            let _ = writeln!(text, "{name}: {}", format_latency(latency));
        }
        text.push_str("\n=== RPC Metrics Summary ===\n");
        for call in self.calls.made() {
            let _ = writeln!(text, "{}: {}", call.name, format_latency(&call.latency));
        }
        text.push_str("\n=== Interface Operation Metrics Summary ===\n");
        for (name, direction) in [("Read", Direction::Read), ("Write", Direction::Write)] {
            let _ = writeln!(text, "{name} Interfaces:");
            self.operations(direction).for_each(|(name, counts)| operation(&mut text, name, counts));
        }
        for (name, objects) in
            [("Read: found, missing", &self.read), ("Write: stored, there already", &self.written)]
        {
            let [done, other, failed] = objects.outcomes();
            let _ = writeln!(text, "{name}, failed: {done}, {other}, {failed}");
        }
        text
    }
}

fn operation(text: &mut String, name: &str, counts: &OperationCounts) {
    let bytes = human(counts.bytes());
    let latency = format_latency(&counts.latency);
    let latency = latency.split_once(", ").map_or(String::new(), |(_, rest)| format!(", {rest}"));
    let _ = writeln!(text, "{name}: count={}, bytes={bytes}{latency}", counts.latency.count());
}

fn format_latency(latency: &Micros) -> String {
    let count = latency.count();
    if count == 0 {
        return "No data".into();
    }
    let highest = || MICROS.last().map_or_else(String::new, |bound| format!(">{bound}μs"));
    let at =
        |per_thousand| latency.bound_at(per_thousand).map_or_else(highest, |bound| format!("<{bound}μs"));
    format!("count={count}, p95{}, max{}", at(950), at(1000))
}

impl<T: Transport> Client<T> {
    /// Starts to log a summary periodically, if the configuration sets an interval.
    pub(crate) fn start_summaries(&self) {
        let interval = self.inner.config.metrics_interval;
        if self.inner.metrics.is_some() && !interval.is_zero() {
            self.inner.runtime.spawn(summarize(Arc::downgrade(&self.inner), interval));
        }
    }
}

async fn summarize<T: Transport>(client: Weak<Inner<T>>, interval: Duration) {
    let Some(mut closed) = client.upgrade().map(|client| client.closed.subscribe()) else { return };
    loop {
        tokio::select! {
            // An error means that the client was dropped.
            _ = closed.wait_for(|closed| *closed) => return,
            () = tokio::time::sleep(interval) => {}
        }
        let Some(client) = client.upgrade() else { return };
        if let Some(metrics) = &client.metrics {
            tracing::info!(client = %client.id, "{}", metrics.summary());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_bounds() {
        let latency = Micros::default();
        assert_eq!(format_latency(&latency), "No data");
        (0..99).for_each(|_| latency.note(10));
        latency.note(1_000_000_000);
        assert_eq!(format_latency(&latency), "count=100, p95<50μs, max>20000000μs");
    }
}
