//! Output of the tool: lines, JSON documents, tables and sizes.

use std::io::Write;

use mooncake_core::{Error, Result};

/// Writes a line to standard output.
pub(super) fn say(text: impl std::fmt::Display) -> Result<()> {
    writeln!(std::io::stdout().lock(), "{text}").map_err(Error::from)
}

/// Writes a JSON document to standard output.
pub(super) fn say_json(value: &serde_json::Value) -> Result<()> {
    say(format_args!("{value:#}"))
}

/// Formats a number of bytes for people.
pub(super) fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut size = bytes as f64;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{size:.1} {}", UNITS[unit]) }
}

/// Formats rows as a table with columns of equal width: the first is left-aligned, the others are
/// right-aligned.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (index, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            match index {
                0 => line += &format!("{cell:<width$}"),
                _ => line += &format!("  {cell:>width$}"),
            }
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// Formats a share as a percentage.
pub(super) fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up() {
        let rows = [["name", "bytes"], ["a", "1"], ["longer", "22"]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(ToString::to_string).collect()).collect();
        assert_eq!(table(&rows), "name    bytes\na           1\nlonger     22\n");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(7), "7 B");
    }
}
