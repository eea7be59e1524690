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
    let text = text.trim();
    text.parse().map_err(|error: T::Err| match text.strip_prefix('-') {
        Some(digits) if digits.starts_with(|c: char| c.is_ascii_digit()) => "must not be negative".to_owned(),
        _ => error.to_string(),
    })
}

/// Checks that [`number`] accepts a text.
pub fn check<T: FromStr<Err: Display>>(text: &str) -> Parsed<()> {
    number::<T>(text).map(drop)
}

/// Longest time of a setting: a century. Sums of such times fit into the types of clocks.
pub const LONGEST_TIME: Duration = Duration::from_secs(36_525 * 24 * 60 * 60);

/// Largest size of a setting in bytes. No file is larger.
pub const LARGEST_SIZE: u64 = i64::MAX as u64;

/// Largest number of things of a setting. More than that never fits into a process.
pub const LARGEST_COUNT: usize = 1_000_000_000;

/// Parses a number of things, from 0 to [`LARGEST_COUNT`].
pub fn count(text: &str) -> Parsed<usize> {
    within(text, 0, LARGEST_COUNT)
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
    let time = count.checked_mul(factor).map(Duration::from_millis);
    time.filter(|time| *time <= LONGEST_TIME)
        .ok_or_else(|| format!("is too long: at most {} h", LONGEST_TIME.as_secs() / 3600))
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
    let too_large = || "is too large: at most 8388607 TB".to_owned();
    if let Ok(count) = count.parse::<u64>() {
        let bytes = count.checked_mul(1 << power).filter(|bytes| *bytes <= LARGEST_SIZE);
        return bytes.ok_or_else(too_large);
    }
    let count: f64 = count.parse().map_err(|_| refuse())?;
    let bytes = count * f64::from(1u32 << (power / 2)) * f64::from(1u32 << (power - power / 2));
    // A float represents sizes in this range exactly enough.
    if (0.0..LARGEST_SIZE as f64).contains(&bytes) { Ok(bytes as u64) } else { Err(too_large()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
        let refused = |result: Parsed<u64>| result.unwrap_err();
        assert_eq!(refused(number("-1")), "must not be negative");
        assert!(refused(number("18446744073709551616")).contains("too large"));
        assert!(count("18446744073709551615").unwrap_err().contains("is not from 0 to"));
        for time in ["18446744073709551615", "9223372036854775807", "876601h", "99999999999999999999"] {
            assert!(millis(time).is_err(), "{time}");
        }
        assert_eq!(millis("876600h"), Ok(LONGEST_TIME));
        assert!(seconds("3155760001").unwrap_err().contains("at most 876600 h"));
    }

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
        for bad in [
            "18446744073709551615",
            "99999999999999999999999",
            "1e30",
            "8388608 TB",
            "8388608.5 TB",
            "",
            "GB",
            "-1",
            "4 XB",
            "1.2.3",
            "99999999999 TB",
            "4 GB more",
        ] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }
}
