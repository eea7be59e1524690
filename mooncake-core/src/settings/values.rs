//! Parsers of values of settings.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

/// Parsed value, or the reason why the text is refused.
pub type Parsed<T> = Result<T, String>;

/// Accepts any text that is not empty.
pub fn text(text: &str) -> Parsed<String> {
    if text.is_empty() { Err("must not be empty".into()) } else { Ok(text.into()) }
}

/// Accepts any text, including the empty one.
pub fn any<T: for<'t> From<&'t str>>(text: &str) -> Parsed<T> {
    Ok(text.into())
}

/// Accepts any text, of which the empty one means none.
pub fn optional<T: for<'t> From<&'t str>>(text: &str) -> Parsed<Option<T>> {
    Ok((!text.is_empty()).then(|| text.into()))
}

/// Parses a number or another value with [`FromStr`].
pub fn number<T: FromStr<Err: Display>>(text: &str) -> Parsed<T> {
    text.trim().parse().map_err(|error: T::Err| error.to_string())
}

/// Checks that [`number`] accepts a text.
pub fn check<T: FromStr<Err: Display>>(text: &str) -> Parsed<()> {
    number::<T>(text).map(drop)
}

/// Parses a number from `least` to `most`.
pub fn within<T>(text: &str, least: T, most: T) -> Parsed<T>
where
    T: FromStr<Err: Display> + PartialOrd + Display,
{
    let value: T = number(text)?;
    if value < least || value > most {
        return Err(format!("{value} is not from {least} to {most}"));
    }
    Ok(value)
}

/// Parses a switch.
pub fn switch(text: &str) -> Parsed<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "1" | "yes" | "y" | "on" => Ok(true),
        "false" | "f" | "0" | "no" | "n" | "off" => Ok(false),
        _ => Err("must be true or false".into()),
    }
}

/// Parses a variable that switches something on unless its text is 0, false, no or off.
pub fn unless_off(text: &str) -> Parsed<bool> {
    Ok(!["0", "false", "no", "off"].iter().any(|off| text.eq_ignore_ascii_case(off)))
}

/// Parses a number from 0 to 1.
pub fn ratio(text: &str) -> Parsed<f64> {
    match text.parse() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("must be a number between 0 and 1".into()),
    }
}

/// Parses a time in milliseconds or with a unit.
pub fn millis(text: &str) -> Parsed<Duration> {
    duration(text, "ms")
}

/// Parses a time in seconds or with a unit.
pub fn seconds(text: &str) -> Parsed<Duration> {
    duration(text, "s")
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

/// Parses a size: a number, optionally with a fraction and a unit (`4 GB`, `512m`, `1.5GiB`). Units
/// are powers of 1024.
pub fn bytes(text: &str) -> Parsed<u64> {
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
