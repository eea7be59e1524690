//! Format of the results.

use std::time::Duration;

use serde_json::{Value, json};

/// Unit of throughput.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Unit {
    name: &'static str,
    bytes: f64,
}

const UNITS: [Unit; 9] = [
    Unit { name: "GB", bytes: 1e9 },
    Unit { name: "GiB", bytes: (1u64 << 30) as f64 },
    Unit { name: "Gb", bytes: 1e9 / 8.0 },
    Unit { name: "MB", bytes: 1e6 },
    Unit { name: "MiB", bytes: (1u64 << 20) as f64 },
    Unit { name: "Mb", bytes: 1e6 / 8.0 },
    Unit { name: "KB", bytes: 1e3 },
    Unit { name: "KiB", bytes: 1024.0 },
    Unit { name: "Kb", bytes: 1e3 / 8.0 },
];

impl Unit {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let names: Vec<&str> = UNITS.iter().map(|unit| unit.name).collect();
        UNITS
            .into_iter()
            .find(|unit| unit.name == text)
            .ok_or_else(|| format!("there are {}", names.join(", ")))
    }

    fn show(self, bytes_per_second: f64, digits: u8) -> String {
        format!("{:.*} {}/s", usize::from(digits), bytes_per_second / self.bytes, self.name)
    }
}

/// Line of results.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) what: &'static str,
    pub(super) bytes: u64,
    pub(super) time: Duration,
    /// Durations of the batches.
    pub(super) batches: Vec<Duration>,
}

impl Row {
    fn per_second(&self) -> f64 {
        self.bytes as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// Returns the percentile of the durations in microseconds.
    fn percentile(&self, share: f64) -> f64 {
        let mut times = self.batches.clone();
        times.sort_unstable();
        let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
        times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "what": self.what,
            "seconds": self.time.as_secs_f64(),
            "batches": self.batches.len(),
            "bytes": self.bytes,
            "bytes_per_second": self.per_second(),
            "batch_us": {"p50": self.percentile(0.5), "p99": self.percentile(0.99)},
        })
    }

    pub(super) fn line(&self, unit: Unit, digits: u8) -> String {
        format!(
            "{:<12} {:>8.2} s {:>10} batches {:>16}   batch p50 {:>9.1} us   p99 {:>9.1} us",
            self.what,
            self.time.as_secs_f64(),
            self.batches.len(),
            unit.show(self.per_second(), digits),
            self.percentile(0.5),
            self.percentile(0.99),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_percentiles() {
        assert_eq!(Unit::parse("GiB").unwrap().show((1u64 << 31) as f64, 2), "2.00 GiB/s");
        assert_eq!(Unit::parse("Gb").unwrap().show(1e9, 1), "8.0 Gb/s");
        assert!(Unit::parse("GBit").unwrap_err().contains("GiB"));
        let row = Row {
            what: "read",
            bytes: 2_000_000,
            time: Duration::from_secs(2),
            batches: (1..=100).rev().map(Duration::from_micros).collect(),
        };
        let json = row.json();
        assert_eq!((json["bytes_per_second"].as_f64(), json["batches"].as_u64()), (Some(1e6), Some(100)));
        assert_eq!((row.percentile(0.5), row.percentile(0.99)), (51.0, 100.0));
        let none = Row { batches: Vec::new(), ..row };
        assert_eq!(none.percentile(0.5), 0.0);
    }
}
