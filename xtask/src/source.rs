//! The lexical structure of a Rust source file: words, punctuation, comments and string literals.
//!
//! [`tokens`] is a lexer, not a parser: it knows where comments and literals begin and end, and
//! nothing about the grammar. That is enough for `arrows` and `prose`, and needs no dependency.

/// Lexical unit of a source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind,
    /// The text in the file, delimiters included.
    pub(crate) text: &'a str,
    /// Offset of the first byte in the file.
    pub(crate) start: usize,
    /// Line of the first byte, counted from 1.
    pub(crate) line: usize,
}

/// The kind of a [`Token`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An identifier or a keyword.
    Word,
    /// Character of no other kind.
    Punctuation,
    /// A character, byte, number or lifetime.
    Scalar,
    /// A string literal of any form.
    Literal,
    /// A comment that rustdoc shows: `///`, `//!`, `/** */`, `/*! */`.
    Documentation,
    /// Any other comment.
    Comment,
}

/// Splits a Rust source file into its tokens. White space is left out.
pub(crate) fn tokens(source: &str) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let (mut found, mut at, mut line) = (Vec::new(), 0, 1);
    while at < bytes.len() {
        let start = at;
        let kind = match bytes[at] {
            b'\n' | b' ' | b'\t' | b'\r' => {
                line += usize::from(bytes[at] == b'\n');
                at += 1;
                continue;
            }
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at = source[at..].find('\n').map_or(bytes.len(), |n| at + n);
                comment_kind(&source[start..at])
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                at = block_comment_end(bytes, at);
                comment_kind(&source[start..at])
            }
            b'"' => {
                at = string_end(bytes, at + 1);
                Kind::Literal
            }
            b'\'' => {
                at = quote_end(source, at);
                Kind::Scalar
            }
            byte if is_word(byte) => {
                if let Some(end) = prefixed_literal_end(bytes, at) {
                    at = end;
                    Kind::Literal
                } else if byte == b'b' && bytes.get(at + 1) == Some(&b'\'') {
                    at = quote_end(source, at + 1);
                    Kind::Scalar
                } else {
                    // A raw identifier keeps its prefix, which no module name here has.
                    at += if source[at..].starts_with("r#") { 2 } else { 0 };
                    at += bytes[at..].iter().take_while(|byte| is_word(**byte)).count();
                    if byte.is_ascii_digit() { Kind::Scalar } else { Kind::Word }
                }
            }
            _ => {
                at += 1;
                Kind::Punctuation
            }
        };
        let text = &source[start..at];
        found.push(Token { kind, text, start, line });
        line += text.bytes().filter(|byte| *byte == b'\n').count();
    }
    found
}

/// Returns the ranges of token indices that only tests compile: items under `#[cfg(test)]` or
/// `#[test]`.
pub(crate) fn test_code(tokens: &[Token<'_>]) -> Vec<std::ops::Range<usize>> {
    let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
    for at in 0..tokens.len() {
        if ranges.last().is_some_and(|last| last.contains(&at)) || !is_attribute(&tokens[at..]) {
            continue;
        }
        let end = at + 2 + balanced(&tokens[at + 1..]);
        if is_test_attribute(&tokens[at + 2..end]) {
            ranges.push(at..end + item_length(&tokens[end..]));
        }
    }
    ranges
}

fn is_attribute(tokens: &[Token<'_>]) -> bool {
    tokens.len() > 1 && tokens[0].text == "#" && tokens[1].text == "["
}

/// Returns whether the attribute excludes its item from every build but that of tests.
fn is_test_attribute(inside: &[Token<'_>]) -> bool {
    let words: Vec<&str> = inside.iter().map(|token| token.text).collect();
    match words.as_slice() {
        ["test", ..] => true,
        ["cfg", "(", "test", ")", ..] => true,
        ["cfg", "(", "all", "(", rest @ ..] => {
            let mut depth = 0;
            rest.iter().any(|word| {
                depth += i32::from(*word == "(") - i32::from(*word == ")");
                depth == 0 && *word == "test"
            })
        }
        // `#[tokio::test]` and the like.
        _ => words.iter().take_while(|word| **word != "(").any(|word| *word == "test") && words[0] != "cfg",
    }
}

/// Returns the number of tokens from an opening bracket to the one that closes it.
pub(crate) fn balanced(tokens: &[Token<'_>]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len().saturating_sub(1)
}

/// Returns the number of tokens of the item that begins here, its other attributes included.
fn item_length(tokens: &[Token<'_>]) -> usize {
    let mut at = 0;
    // A comma ends a field, a variant or an argument, but stands in the generics of an item.
    let mut named = false;
    while at < tokens.len() {
        match tokens[at].text {
            ";" => return at + 1,
            "," if !named => return at + 1,
            "fn" | "impl" | "mod" | "struct" | "enum" | "trait" | "type" | "use" | "let" => {
                named = true;
                at += 1;
            }
            // The end of the block that encloses an expression or a field.
            "}" => return at,
            "{" => return at + balanced(&tokens[at..]) + 1,
            "(" | "[" => at += balanced(&tokens[at..]) + 1,
            _ => at += 1,
        }
    }
    tokens.len()
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn comment_kind(text: &str) -> Kind {
    let documentation = (text.starts_with("///") && !text.starts_with("////"))
        || text.starts_with("//!")
        || (text.starts_with("/**") && !text.starts_with("/***") && text.len() > 4)
        || text.starts_with("/*!");
    if documentation { Kind::Documentation } else { Kind::Comment }
}

fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < bytes.len() {
        match &bytes[at..(at + 2).min(bytes.len())] {
            b"/*" => {
                depth += 1;
                at += 2;
            }
            b"*/" => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Returns the end of a string with escapes whose text begins at `at`.
fn string_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() {
        match bytes[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Returns the end of a character literal or a lifetime that begins at `at`.
fn quote_end(source: &str, at: usize) -> usize {
    let rest = &source[at + 1..];
    if let Some(escaped) = rest.strip_prefix('\\') {
        // The escaped character may be the quote itself.
        let skipped = escaped.chars().next().map_or(0, char::len_utf8);
        return escaped[skipped..].find('\'').map_or(source.len(), |n| at + 2 + skipped + n + 1);
    }
    let mut characters = rest.chars();
    let first = characters.next().map_or(0, char::len_utf8);
    if characters.next() == Some('\'') {
        return at + 1 + first + 1;
    }
    at + 1 + rest.bytes().take_while(|byte| is_word(*byte)).count()
}

/// Returns the end of a literal such as `b"…"`, `r#"…"#` or `c"…"` that begins at `at`.
fn prefixed_literal_end(bytes: &[u8], at: usize) -> Option<usize> {
    let prefix = bytes[at..].iter().take_while(|byte| byte.is_ascii_lowercase()).count();
    let name = &bytes[at..at + prefix];
    if !matches!(name, b"b" | b"c" | b"r" | b"br" | b"cr") {
        return None;
    }
    let hashes = bytes[at + prefix..].iter().take_while(|byte| **byte == b'#').count();
    let text = at + prefix + hashes;
    if bytes.get(text) != Some(&b'"') {
        return None;
    }
    if !name.ends_with(b"r") {
        return (hashes == 0).then(|| string_end(bytes, text + 1));
    }
    let mut end = text + 1;
    while end < bytes.len() {
        let closing =
            bytes[end] == b'"' && bytes[end + 1..].iter().take_while(|byte| **byte == b'#').count() >= hashes;
        if closing {
            return Some(end + 1 + hashes);
        }
        end += 1;
    }
    Some(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(source: &str) -> Vec<(Kind, &str)> {
        tokens(source).into_iter().map(|token| (token.kind, token.text)).collect()
    }

    #[test]
    fn comments_and_literals_keep_their_contents_together() {
        let source = "/// a \"b\n// c\nlet s = r#\"x // \"y\"#; /* a /* b */ c */ f(\"\\\"//\")";
        let found = kinds(source);
        assert_eq!(found[0], (Kind::Documentation, "/// a \"b"));
        assert_eq!(found[1], (Kind::Comment, "// c"));
        assert_eq!(found[5], (Kind::Literal, "r#\"x // \"y\"#"));
        assert_eq!(found[7], (Kind::Comment, "/* a /* b */ c */"));
        assert_eq!(found[10], (Kind::Literal, "\"\\\"//\""));
        assert_eq!(found[11], (Kind::Punctuation, ")"));
    }

    #[test]
    fn a_quote_begins_a_character_or_a_lifetime() {
        let found = kinds("'a' 'static '\\'' b'\"' '\u{e9}' '\\u{1f}' x");
        let texts: Vec<&str> = found.iter().map(|(_, text)| *text).collect();
        assert_eq!(texts, ["'a'", "'static", "'\\''", "b'\"'", "'\u{e9}'", "'\\u{1f}'", "x"]);
        assert!(found[..6].iter().all(|(kind, _)| *kind == Kind::Scalar));
    }

    #[test]
    fn test_code_is_what_only_tests_compile() {
        let source = "#[cfg(test)]\nmod a { b }\n#[cfg(any(test, c))]\nfn d() {}\n#[tokio::test]\nasync fn e() { f(); }\n#[cfg(not(test))] fn g() {}";
        let found = tokens(source);
        let left: Vec<&str> = test_code(&found).iter().map(|r| found[r.end - 2].text).collect();
        assert_eq!(left, ["b", ";"]);
    }

    #[test]
    fn lines_are_counted_across_literals() {
        let lines: Vec<usize> = tokens("a \"b\nc\" d\n/* e\n */ f").iter().map(|t| t.line).collect();
        assert_eq!(lines, [1, 1, 2, 3, 4]);
    }
}
