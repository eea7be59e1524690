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

/// Parses a number or another value with [`FromStr`]. Whole numbers may be hexadecimal, as in flags
/// of Mooncake C++ (`0x10`).
pub fn number<T: FromStr<Err: Display>>(text: &str) -> Parsed<T> {
    let text = text.trim();
    let decimal = decimal_of_hex(text);
    let parsed = decimal.as_deref().unwrap_or(text).parse();
    parsed.map_err(|error: T::Err| match text.strip_prefix('-') {
        Some(digits) if digits.starts_with(|c: char| c.is_ascii_digit()) => "must not be negative".to_owned(),
        _ => error.to_string(),
    })
}

/// Returns a hexadecimal number as a decimal one with its sign: `-16` for `-0x10`.
fn decimal_of_hex(text: &str) -> Option<String> {
    let sign = if text.starts_with('-') { "-" } else { "" };
    let number = text.strip_prefix(['-', '+']).unwrap_or(text);
    let digits = number.strip_prefix("0x").or_else(|| number.strip_prefix("0X"))?;
    let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let value = u128::from_str_radix(digits, 16).ok().filter(|_| is_hex)?;
    Some(format!("{sign}{value}"))
}

/// Splits a text into a number and a unit in small letters, which may have spaces between them.
fn split_unit(text: &str) -> (&str, String) {
    let text = text.trim();
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let is_hex = unsigned.starts_with("0x") || unsigned.starts_with("0X");
    let part = unsigned.bytes().enumerate().take_while(|&(at, byte)| match byte {
        b'0'..=b'9' | b'.' | b'_' => true,
        b'x' | b'X' => is_hex && at == 1,
        b'a'..=b'f' | b'A'..=b'F' if is_hex => true,
        // An exponent: e, an optional sign, and digits.
        b'e' | b'E' => {
            let exponent = &unsigned[at + 1..];
            let exponent = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
            exponent.starts_with(|digit: char| digit.is_ascii_digit())
        }
        b'-' | b'+' => at > 0 && unsigned.as_bytes()[at - 1].eq_ignore_ascii_case(&b'e'),
        _ => false,
    });
    let (number, unit) = text.split_at(text.len() - unsigned.len() + part.count());
    (number, unit.trim().to_ascii_lowercase())
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
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "t" | "1" | "yes" | "y" | "on" | "enable" | "enabled" => Ok(true),
        "false" | "f" | "0" | "no" | "n" | "off" | "disable" | "disabled" => Ok(false),
        _ => Err("must be true or false".into()),
    }
}

/// Parses a variable that switches something on by its presence, as in Mooncake C++, unless
/// [`switch`] reads its text as false.
pub fn unless_off(text: &str) -> Parsed<bool> {
    Ok(switch(text).unwrap_or(true))
}

/// Parses a number from 0 to 1.
pub fn ratio(text: &str) -> Parsed<f64> {
    match number(text) {
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

/// Parses a time in seconds or with a unit, from `least` to `most` seconds.
pub fn seconds_within(text: &str, least: u64, most: u64) -> Parsed<Duration> {
    let time = seconds(text)?;
    if time < Duration::from_secs(least) || time > Duration::from_secs(most) {
        return Err(format!("{} is not from {least} to {most}", time.as_secs_f64()));
    }
    Ok(time)
}

/// Parses a time in milliseconds or with a unit, from `least` to `most` milliseconds.
pub fn millis_within(text: &str, least: u64, most: u64) -> Parsed<Duration> {
    let time = millis(text)?;
    if time < Duration::from_millis(least) || time > Duration::from_millis(most) {
        return Err(format!("{} is not from {least} to {most}", time.as_millis()));
    }
    Ok(time)
}

/// Parses a whole number with a unit, or in the given unit.
fn duration(text: &str, unit: &str) -> Parsed<Duration> {
    let (count, given) = split_unit(text);
    let refuse = || "must be a whole number with ms, s, m or h".to_owned();
    let factor = match if given.is_empty() { unit } else { &given } {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(refuse()),
    };
    let too_long = || format!("is too long: at most {} h", LONGEST_TIME.as_secs() / 3600);
    let count: u64 = number(count).map_err(|reason| match &*reason {
        "must not be negative" => reason,
        _ => refuse(),
    })?;
    let time = count.checked_mul(factor).map(Duration::from_millis);
    time.filter(|time| *time <= LONGEST_TIME).ok_or_else(too_long)
}

/// Parses a size: a number, optionally with a fraction and a unit (`4 GB`, `512m`, `1.5GiB`). Units
/// are powers of 1024.
pub fn bytes(text: &str) -> Parsed<u64> {
    let refuse = || "must be a size such as 1048576, 512MB or 4 GB".to_owned();
    let (count, unit) = split_unit(text);
    let power = match unit.strip_suffix("ib").or(unit.strip_suffix('b')).unwrap_or(&unit) {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(refuse()),
    };
    let too_large = || "is too large: at most 8388607 TB".to_owned();
    if count.starts_with('-') {
        return Err("must not be negative".into());
    }
    // `_` separates digits.
    if count.starts_with('_') || count.ends_with('_') || count.contains("__") {
        return Err(refuse());
    }
    let count = count.replace('_', "");
    if let Ok(count) = number::<u64>(&count) {
        let bytes = count.checked_mul(1 << power).filter(|bytes| *bytes <= LARGEST_SIZE);
        return bytes.ok_or_else(too_large);
    }
    let count: f64 = number(&count).map_err(|_| refuse())?;
    let bytes = count * f64::from(1u32 << (power / 2)) * f64::from(1u32 << (power - power / 2));
    // A float represents sizes in this range exactly enough.
    if (0.0..LARGEST_SIZE as f64).contains(&bytes) { Ok(bytes as u64) } else { Err(too_large()) }
}

/// Parses a size from `least` to `most` bytes.
pub fn bytes_within<T>(text: &str, least: T, most: T) -> Parsed<T>
where
    T: TryFrom<u64> + PartialOrd + Display,
{
    let bytes = bytes(text)?;
    let size = T::try_from(bytes).ok().filter(|size| (&least..=&most).contains(&size));
    size.ok_or_else(|| format!("{bytes} is not from {least} to {most}"))
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
    fn numbers_as_flags_of_mooncake_cpp_take_them() {
        for text in ["33554432", "+33554432", "0x2000000", "0X2000000", "+0x2000000", " 33554432 "] {
            assert_eq!(number(text), Ok(33_554_432_u64), "{text}");
            assert_eq!(bytes(text), Ok(33_554_432), "{text}");
            assert_eq!(millis(text), Ok(Duration::from_millis(33_554_432)), "{text}");
            assert_eq!(within(text, 0, u32::MAX), Ok(33_554_432), "{text}");
        }
        assert_eq!(number("-0x10"), Ok(-16));
        assert_eq!(number::<u16>("-0x10").unwrap_err(), "must not be negative");
        for bad in ["0x", "0x-1", "0x+1", "x10", "0xg", "++1", "+", "1_0"] {
            assert!(number::<u64>(bad).is_err(), "{bad}");
        }
        for (text, time) in [("5s", 5000), ("5 s", 5000), ("5S", 5000), ("5 MS", 5), (" 2\tm ", 120_000)] {
            assert_eq!(millis(text), Ok(Duration::from_millis(time)), "{text}");
        }
        assert_eq!(seconds("+0x5 S"), Ok(Duration::from_secs(5)));
        assert_eq!(seconds_within("1m", 5, 60), Ok(Duration::from_secs(60)));
        assert_eq!(seconds_within("4999 ms", 5, 60).unwrap_err(), "4.999 is not from 5 to 60");
        for bad in ["", "s", "1.5s", "5 d", "5ss", "5 s s", "1e3", "1_0s"] {
            assert!(millis(bad).is_err(), "{bad}");
        }
        assert_eq!(millis("-5s").unwrap_err(), "must not be negative");
        for (text, is_on) in [("TRUE", true), (" on ", true), ("Enabled", true), ("disable", false)] {
            assert_eq!(switch(text), Ok(is_on), "{text}");
        }
        for (text, is_on) in
            [(" False ", false), ("n", false), ("disabled", false), ("1", true), ("2MB", true)]
        {
            assert_eq!(unless_off(text), Ok(is_on), "{text}");
        }
        assert_eq!(bytes_within("64KB", 1, 1 << 16), Ok(1 << 16));
        assert_eq!(bytes_within("65 KB", 1, 1 << 16).unwrap_err(), "66560 is not from 1 to 65536");
        assert_eq!(millis_within("5s", 0, 5000), Ok(Duration::from_secs(5)));
        assert_eq!(millis_within("6s", 0, 5000).unwrap_err(), "6000 is not from 0 to 5000");
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
            ("1.6777216e7", 16 << 20),
            ("1e3k", 1_024_000),
            ("16_777_216", 16 << 20),
            ("0x10 KB", 16 << 10),
            (".5k", 512),
        ] {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        for bad in [
            "18446744073709551615",
            "99999999999999999999999",
            "1e30",
            "1e400",
            "1e",
            "1_",
            "1__0",
            "5bib",
            "8388608 TB",
            "8388608.5 TB",
            "",
            "GB",
            "-1",
            "--1",
            "4 XB",
            "1.2.3",
            "99999999999 TB",
            "4 GB more",
        ] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }
}
