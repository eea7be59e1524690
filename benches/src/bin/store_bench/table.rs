//! Results, cell by cell.

use std::collections::BTreeMap;

/// Measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cell {
    /// Put of a value of this size from registered memory.
    Put(usize),
    /// Get of such a value into registered memory.
    Get(usize),
    /// Exist of one key.
    Exist,
    /// Exist of this many keys in one call.
    BatchExist(usize),
}

impl Cell {
    fn bytes(self) -> Option<usize> {
        match self {
            Cell::Put(size) | Cell::Get(size) => Some(size),
            Cell::Exist | Cell::BatchExist(_) => None,
        }
    }

    fn name(self) -> String {
        let size = |bytes: usize| match bytes >> 20 {
            0 => format!("{} KiB", bytes >> 10),
            mib => format!("{mib} MiB"),
        };
        match self {
            Cell::Put(bytes) => format!("put {}", size(bytes)),
            Cell::Get(bytes) => format!("get {}", size(bytes)),
            Cell::Exist => "exist".into(),
            Cell::BatchExist(keys) => format!("exist x{keys}"),
        }
    }

    /// Returns the longest wanted time, as a share of that of Mooncake C++.
    fn wanted(self) -> Option<f64> {
        match self {
            Cell::Put(4096) | Cell::Get(4096) => Some(0.6),
            Cell::Put(0x10_0000) | Cell::Get(0x10_0000) => Some(0.5),
            Cell::Put(0x100_0000) | Cell::Get(0x100_0000) => Some(1.0 / 1.3),
            Cell::Exist => Some(0.7),
            Cell::BatchExist(_) => Some(1.0),
            Cell::Put(_) | Cell::Get(_) => None,
        }
    }

    /// Returns the smallest wanted share of the throughput of raw loopback TCP.
    fn wanted_of_raw(self) -> Option<f64> {
        self.bytes().filter(|&bytes| bytes == 1 << 20 || bytes == 16 << 20).map(|_| 0.7)
    }
}

/// Transport of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// TCP, as between hosts.
    Tcp,
    /// Shared memory.
    SameHost,
}

#[derive(Default)]
struct Row {
    tcp: Vec<f64>,
    same_host: Vec<f64>,
    raw: Vec<f64>,
    memcpy: Vec<f64>,
    /// Medians, one per round.
    theirs: Vec<f64>,
}

/// Times in microseconds.
#[derive(Default)]
pub(crate) struct Table {
    rows: BTreeMap<Cell, Row>,
}

impl Table {
    pub(crate) fn ours(&mut self, way: Way, cell: Cell, times: Vec<f64>) {
        let row = self.rows.entry(cell).or_default();
        match way {
            Way::Tcp => row.tcp.extend(times),
            Way::SameHost => row.same_host.extend(times),
        }
    }

    pub(crate) fn raw(&mut self, cell: Cell, times: Vec<f64>) {
        self.rows.entry(cell).or_default().raw.extend(times);
    }

    pub(crate) fn memcpy(&mut self, cell: Cell, times: Vec<f64>) {
        self.rows.entry(cell).or_default().memcpy.extend(times);
    }

    pub(crate) fn theirs(&mut self, cell: Cell, median: f64) {
        self.rows.entry(cell).or_default().theirs.push(median);
    }

    /// Prints the results of this project over one transport, beside those that do not depend on
    /// it.
    pub(crate) fn print(&self, way: Way) {
        match way {
            Way::Tcp => println!("over TCP, as between hosts"),
            Way::SameHost => println!("through shared memory, as on one host"),
        }
        println!(
            "{:<12} {:>10} {:>7} {:>10} {:>8} {:>8} {:>10} {:>11}  wanted",
            "median", "ours µs", "GB/s", "raw µs", "of raw", "memcpy", "peer µs", "ours/peer"
        );
        for (cell, row) in &self.rows {
            let ours = match way {
                Way::Tcp => &row.tcp,
                Way::SameHost => &row.same_host,
            };
            let (ours, raw) = (median(ours), median(&row.raw));
            let rate =
                cell.bytes().map(|bytes| format!("{:.2}", bytes as f64 / ours / 1e3)).unwrap_or_default();
            let of_memcpy =
                if row.memcpy.is_empty() { String::new() } else { percent(median(&row.memcpy) / ours) };
            let theirs = median(&row.theirs);
            let (peer, ratio) = if row.theirs.is_empty() {
                (String::new(), String::new())
            } else {
                (format!("{theirs:.1}"), format!("{:.2}", ours / theirs))
            };
            println!(
                "{:<12} {ours:>10.1} {rate:>7} {raw:>10.1} {:>8} {of_memcpy:>8} {peer:>10} {ratio:>11}  {}",
                cell.name(),
                percent(raw / ours),
                verdict(*cell, raw / ours, (!row.theirs.is_empty()).then_some(ours / theirs))
            );
        }
        println!();
    }
}

fn verdict(cell: Cell, of_raw: f64, of_peer: Option<f64>) -> String {
    let mut words = Vec::new();
    if let (Some(wanted), Some(got)) = (cell.wanted(), of_peer) {
        words.push(format!("<= {wanted:.2} of Mooncake C++: {}", if got <= wanted { "yes" } else { "NO" }));
    }
    if let Some(wanted) = cell.wanted_of_raw() {
        words.push(format!(">= {} of raw: {}", percent(wanted), if of_raw >= wanted { "yes" } else { "NO" }));
    }
    words.join(", ")
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
