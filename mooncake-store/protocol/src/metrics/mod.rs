//! Counters without locks, and their metric families for Prometheus.

mod families;
mod histogram;

pub use self::families::{Families, Label, collector, text};
pub use self::histogram::{Histogram, MICROS, Micros};

/// Formats bytes with the unit names of Mooncake C++: a KB has 1024 bytes.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{size:.2} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_for_people() {
        assert_eq!(human(1023), "1023 B");
        assert_eq!(human(1536), "1.50 KB");
        assert_eq!(human(u64::MAX), "16777216.00 TB");
    }
}
