//! Table of hit ratios, as Markdown.

use std::fmt;

/// Hit ratios of policies at several sizes of memory.
pub(crate) struct Table {
    /// Sizes of memory in blocks.
    pub(crate) sizes: Vec<u64>,
    pub(crate) rows: Vec<Row>,
}

/// Hit ratios of one policy, or of a bound, at each size.
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) ratios: Vec<f64>,
    /// True for a row that other rows are compared with.
    pub(crate) is_bound: bool,
}

/// Smallest gap of which shares are printed.
const GAP: f64 = 0.001;

impl Table {
    /// Returns the hit ratios of the row with a name, or none.
    pub(crate) fn ratios_of(&self, name: &str) -> Vec<f64> {
        self.rows.iter().find(|row| row.name == name).map_or_else(Vec::new, |row| row.ratios.clone())
    }

    /// Returns the share of the gap between LRU and Belady that a ratio closes at a size.
    fn closed(&self, ratio: f64, at: usize) -> Option<f64> {
        let of = |names: [&str; 2]| {
            self.rows.iter().find(|row| names.contains(&row.name.as_str())).map(|row| row.ratios[at])
        };
        let (lru, belady) = (of(["exact LRU", "`lru`"])?, of(["Belady"; 2])?);
        (belady - lru >= GAP && ratio != lru).then(|| (ratio - lru) / (belady - lru))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| blocks of memory |")?;
        self.sizes.iter().try_for_each(|size| write!(f, " {} |", grouped(*size)))?;
        writeln!(f, "\n|---|{}", "---|".repeat(self.sizes.len()))?;
        for row in &self.rows {
            write!(f, "| {} |", row.name)?;
            for (at, ratio) in row.ratios.iter().enumerate() {
                write!(f, " {}", short(*ratio))?;
                if let Some(share) = self.closed(*ratio, at).filter(|_| !row.is_bound) {
                    write!(f, " ({:.0} %)", 100.0 * share)?;
                }
                write!(f, " |")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Returns `12,031` for 12031.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns `.1234` for 0.1234.
pub(crate) fn short(ratio: f64) -> String {
    let text = format!("{ratio:.4}");
    text.strip_prefix('0').map_or(text.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_the_ratio_and_the_share_of_the_gap() {
        let row = |name: &str, ratios: [f64; 2], is_bound| Row {
            name: name.into(),
            ratios: ratios.into(),
            is_bound,
        };
        let rows = vec![
            row("`lru`", [0.1, 1.0], false),
            row("`gittins`", [0.15, 1.0], false),
            row("Belady", [0.3, 1.0], true),
        ];
        let expected = "| blocks of memory | 500 | 1,234,567 |\n|---|---|---|\n| `lru` | .1000 | 1.0000 |\n\
                        | `gittins` | .1500 (25 %) | 1.0000 |\n| Belady | .3000 | 1.0000 |\n";
        assert_eq!(Table { sizes: vec![500, 1_234_567], rows }.to_string(), expected);
    }
}
