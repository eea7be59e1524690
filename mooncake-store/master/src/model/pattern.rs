//! Patterns over keys: ECMAScript as in `std::regex`, which Mooncake C++ uses, matched in linear
//! time.

use std::iter::Peekable;
use std::str::Chars;

use mooncake_core::{Error, Result};
use regex::bytes::{Regex, RegexBuilder};

/// Maximum length of a pattern, in bytes.
const MAX_PATTERN: usize = 4096;
/// Maximum memory of a compiled pattern, in bytes.
const MAX_PROGRAM: usize = 1 << 20;

/// Compiles a pattern over bytes; text beyond ASCII matches as it is encoded. Constructs that need
/// more than linear time (back references, look-around) are refused.
///
/// # Errors
/// `INVALID_PARAMS` if the text is not a pattern, or is too large.
pub fn compile(pattern: &str) -> Result<Regex> {
    if pattern.len() > MAX_PATTERN {
        return Err(Error::invalid(format!(
            "cannot compile pattern: it is longer than {MAX_PATTERN} bytes. len={}",
            pattern.len()
        )));
    }
    let here = translated(pattern)?;
    let build = |unicode| RegexBuilder::new(&here).unicode(unicode).size_limit(MAX_PROGRAM).build();
    // Classes of characters beyond ASCII exist only in Unicode mode.
    build(false)
        .or_else(|_| build(true))
        .map_err(|error| Error::invalid(format!("cannot compile pattern: {error}")))
}

/// Translates a pattern to the language of the crate `regex` where the two differ.
fn translated(pattern: &str) -> Result<String> {
    let mut out = String::with_capacity(pattern.len() + 16);
    let mut rest = pattern.chars().peekable();
    while let Some(next) = rest.next() {
        match next {
            '\\' => escape(&mut rest, false, &mut out),
            '.' => out.push_str(r"[^\n\r]"),
            '[' => class(&mut rest, &mut out)?,
            other => out.push(other),
        }
    }
    Ok(out)
}

/// Translates the text after a backslash. A letter without a meaning stands for itself.
fn escape(rest: &mut Peekable<Chars<'_>>, in_class: bool, out: &mut String) {
    match rest.next() {
        None => out.push('\\'),
        Some('0') => out.push_str(r"\x00"),
        Some('b') if in_class => out.push_str(r"\x08"),
        Some('c') => match rest.next() {
            Some(control) => out.push_str(&format!(r"\x{:02x}", control as u32 & 0x1f)),
            // An error in both languages.
            None => out.push('\\'),
        },
        Some(letter) if letter.is_ascii_alphabetic() && !"dDsSwWbBnrtvfxu".contains(letter) => {
            out.push(letter)
        }
        Some(plain @ ('<' | '>')) => out.push(plain),
        Some(other) => out.extend(['\\', other]),
    }
}

/// Translates the text after an opening bracket. ECMAScript has named classes in a class, but no
/// other nested class, and no union or difference of classes.
fn class(rest: &mut Peekable<Chars<'_>>, out: &mut String) -> Result<()> {
    let negated = rest.next_if_eq(&'^').is_some();
    if rest.next_if_eq(&']').is_some() {
        out.push_str(if negated { r"[\s\S]" } else { r"[^\s\S]" });
        return Ok(());
    }
    out.push_str(if negated { "[^" } else { "[" });
    let mut before = ' ';
    while let Some(next) = rest.next() {
        match next {
            ']' => {
                out.push(']');
                return Ok(());
            }
            '\\' => escape(rest, true, out),
            '[' if rest.peek() == Some(&':') => copy_class(rest, out),
            '[' if matches!(rest.peek(), Some('=' | '.')) => {
                return Err(Error::invalid("cannot compile pattern: [= =] and [. .] are not supported"));
            }
            '-' if before == '-' => out.push_str(r"\-"),
            '[' | '&' | '~' | '^' => out.extend(['\\', next]),
            other => out.push(other),
        }
        before = next;
    }
    Ok(())
}

/// Copies a named class to its end. The crate `regex` checks its name.
fn copy_class(rest: &mut Peekable<Chars<'_>>, out: &mut String) {
    out.push('[');
    for next in rest.by_ref() {
        out.push(next);
        if next == ']' {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_they_mean_there() {
        for (pattern, matched, not) in [
            ("b", "abc", "ac"),
            ("^p.q$", "p q", "p\rq"),
            ("^p.q$", "p\u{0}q", "p\nq"),
            (r"^\<\>$", "<>", ""),
            (r"^\e\A\z$", "eAz", "ez"),
            ("^[a&&b]$", "&", "c"),
            ("^[+--]$", ",", "/"),
            ("^[~~]$", "~", "a"),
            ("^[[]a", "[a", "a"),
            ("^[^]$", "]", ""),
            ("^[[:digit:]_]$", "7", "a"),
            (r"^[\]]$", "]", "["),
            (r"^[\b]$", "\u{8}", "b"),
            (r"^\cA\0$", "\u{1}\u{0}", "A"),
            (r"^\u002e\x2e$", "..", "ab"),
            ("ä+", "bää", "a"),
        ] {
            let compiled = compile(pattern).unwrap_or_else(|error| panic!("{pattern}: {error}"));
            assert!(compiled.is_match(matched.as_bytes()), "{pattern} finds {matched:?}");
            assert!(!compiled.is_match(not.as_bytes()), "{pattern} does not find {not:?}");
        }
        assert!(!compile("[]").unwrap().is_match(b"a"));
    }

    #[test]
    fn what_is_no_pattern_or_takes_too_long_is_refused() {
        let long = "a".repeat(MAX_PATTERN + 1);
        for pattern in [
            "(",
            "[",
            "[[:",
            "[[=a=]]",
            "[[.a.]]",
            "*",
            r"\",
            r"\c",
            "a{2,1}",
            "(?=a)",
            "(?!a)",
            r"(a)\1",
            "((a{9}){99}){99}{9}",
            &long,
        ] {
            assert!(compile(pattern).is_err(), "{pattern:.20}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_a_pattern_or_refused(pattern in r#"[\[\]\\^&~:.a-c(){}?*+|<>-]{0,24}"#) {
            let _ = compile(&pattern);
        }
    }
}
