//! Parsers for values of flags.

use std::time::Duration;

pub(crate) type Parsed<T> = Result<T, String>;

pub(super) fn text(text: &str) -> Parsed<String> {
    if text.is_empty() { Err("must not be empty".into()) } else { Ok(text.into()) }
}

/// Accepts any text, including the empty one.
pub(super) fn any(text: &str) -> Parsed<String> {
    Ok(text.into())
}

pub(super) fn number<T: std::str::FromStr>(text: &str) -> Parsed<T>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(said)
}

pub(super) fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

pub(crate) fn switch(text: &str) -> Parsed<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "1" | "yes" | "y" | "on" => Ok(true),
        "false" | "f" | "0" | "no" | "n" | "off" => Ok(false),
        _ => Err("must be true or false".into()),
    }
}

/// Parses a size: a number, optionally with a fraction and a unit (`4 GB`, `512m`, `1.5GiB`). Units
/// are powers of 1024.
pub(crate) fn bytes(text: &str) -> Parsed<u64> {
    let refuse = || "must be a size such as 1048576, 512MB or 4 GB".to_owned();
    let text = text.trim().to_ascii_lowercase();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (count, unit) = text.split_at(digits);
    let power = match unit.trim().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(refuse()),
    };
    if let Ok(count) = count.parse::<u64>() {
        return count.checked_mul(1 << power).ok_or_else(refuse);
    }
    let count: f64 = count.parse().map_err(|_| refuse())?;
    let bytes = count * f64::from(1u32 << (power / 2)) * f64::from(1u32 << (power - power / 2));
    // A float represents sizes in this range exactly enough; larger ones are refused.
    if (0.0..=1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(refuse()) }
}

pub(super) fn ratio(text: &str) -> Parsed<f64> {
    match text.parse() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("must be a number between 0 and 1".into()),
    }
}

pub(super) fn millis(text: &str) -> Parsed<Duration> {
    duration(text, "ms")
}

pub(super) fn seconds(text: &str) -> Parsed<Duration> {
    duration(text, "s")
}

/// Parses seconds, where 0 stands for no limit.
pub(super) fn limit(text: &str) -> Parsed<Duration> {
    seconds(text).map(|limit| if limit.is_zero() { Duration::MAX } else { limit })
}

/// Parses a whole number with a unit, or in the given unit.
fn duration(text: &str, unit: &str) -> Parsed<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, given) = text.split_at(digits);
    let factor = match if given.is_empty() { unit } else { given } {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err("must be a whole number with ms, s, m or h".into()),
    };
    let count: u64 = count.parse().map_err(|_| "must be a whole number with ms, s, m or h".to_owned())?;
    count.checked_mul(factor).map(Duration::from_millis).ok_or_else(|| "is too long".into())
}

/// Parses a cluster id: 1 to 128 characters that are valid in directory keys.
pub(super) fn cluster_id(text: &str) -> Parsed<String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    if text.is_empty() || text.len() > 128 || !text.chars().all(fine) {
        return Err("must be 1 to 128 of A-Z a-z 0-9 _ . -".into());
    }
    Ok(text.into())
}

/// Parses `tcp://host:port`, where `*` stands for every address or a free port.
pub(super) fn endpoint(text: &str) -> Parsed<(String, u16)> {
    let refuse = || "must be tcp://host:port, with * for every address or a free port".to_owned();
    let (host, port) = text.strip_prefix("tcp://").and_then(|at| at.rsplit_once(':')).ok_or_else(refuse)?;
    let host = if host == "*" { "0.0.0.0" } else { host };
    let port = if port == "*" { 0 } else { port.parse().map_err(|_| refuse())? };
    if host.is_empty() { Err(refuse()) } else { Ok((host.into(), port)) }
}

/// Returns the known name with the smallest distance, if it is similar.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, nearest) = known.map(|known| (distance(name, known), known)).min()?;
    (distance <= 2 + name.len() / 4).then_some(nearest)
}

/// Returns the number of letters to change, insert or remove.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (corner + usize::from(x != y)).min(above + 1).min(row[j] + 1);
            corner = above;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_words() {
        for (text, size) in [
            ("0", 0),
            ("1048576", 1 << 20),
            ("4 GB", 4 << 30),
            ("512MB", 512 << 20),
            ("16k", 16 << 10),
            ("1.5GiB", 3 << 29),
            ("2tb", 2 << 40),
            (" 7 b ", 7),
        ] {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        for bad in ["", "GB", "-1", "4 XB", "1.2.3", "99999999999 TB", "4 GB more"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }
}
