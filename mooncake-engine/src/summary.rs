//! A line in the log from time to time: what the engine has moved since the last one.

use std::time::Duration;

use mooncake_transport::Engine;
use mooncake_transport::engine::Counts;

use crate::TransportSet;

/// Logs a line at this interval, if there is something to say.
pub(crate) async fn log_every(engine: Engine<TransportSet>, interval: Duration) {
    let mut last = total(&engine);
    loop {
        tokio::time::sleep(interval).await;
        let now = total(&engine);
        if let Some(line) = line(&now.since(&last), interval) {
            tracing::info!("transfer engine {}: {line}", engine.name());
        }
        last = now;
    }
}

/// Returns the log filter of a program at a level. It always includes the summary lines, because
/// they appear only on request.
pub(crate) fn log_filter(level: &str) -> String {
    format!("{},mooncake_engine::summary=info", level.to_lowercase())
}

fn total(engine: &Engine<TransportSet>) -> Counts {
    engine.metrics().iter().fold(Counts::default(), |sum, peer| sum.and(&peer.counts))
}

fn line(counts: &Counts, interval: Duration) -> Option<String> {
    if counts.postings() == 0 {
        return None;
    }
    let rate = |bytes: u64| bytes as f64 / interval.as_secs_f64() / 1e6;
    Some(format!(
        "{:.1} MB/s read in {} requests, {:.1} MB/s written in {}, {} failed; half took at most {:?}, 99 % {:?}",
        rate(counts.bytes_read),
        counts.reads,
        rate(counts.bytes_written),
        counts.writes,
        counts.failures,
        counts.latency_at(500),
        counts.latency_at(990),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_was_moved() {
        assert_eq!(line(&Counts::default(), Duration::from_secs(5)), None);
        let mut counts = Counts { reads: 3, bytes_read: 10_000_000, failures: 1, ..Counts::default() };
        counts.latency[7] = 4;
        assert_eq!(
            line(&counts, Duration::from_secs(5)).unwrap(),
            "2.0 MB/s read in 3 requests, 0.0 MB/s written in 0, 1 failed; half took at most 128µs, 99 % 128µs"
        );
    }
}
