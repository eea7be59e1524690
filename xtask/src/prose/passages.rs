//! Prose in source files: which text of a file a person reads, and in which role.

use std::ops::Range;

use crate::source::{Kind, Token, test_code, tokens};

/// Longest line of prose, in columns.
pub(super) const WIDTH: usize = 100;

/// The role of a [`Passage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// First paragraph of a doc comment or a docstring.
    Summary,
    /// First paragraph of any other comment.
    Comment,
    /// Other text: later paragraphs, Markdown, texts of a program.
    Text,
    /// A heading or the first row of a table, which needs no verb.
    Label,
}

/// A paragraph, a list item, a table cell or a string literal.
#[derive(Debug)]
pub(super) struct Passage {
    pub(super) role: Role,
    /// Lines of plain text, markup removed, each with its number in the file.
    pub(super) lines: Vec<(usize, String)>,
}

/// Prose of one file.
#[derive(Debug, Default)]
pub(super) struct Prose {
    pub(super) passages: Vec<Passage>,
    /// Lines of prose wider than [`WIDTH`], each with its width.
    pub(super) wide: Vec<(usize, usize)>,
}

/// Reads the prose of a file by the ending of its name; `None` if the ending is another one.
pub(super) fn of_file(path: &str, text: &str) -> Option<Prose> {
    let in_test = path.split('/').any(|part| matches!(part, "tests" | "benches" | "tests.rs"));
    let ending = path.rsplit_once('.').map(|(_, ending)| ending);
    let mut prose = Prose::default();
    match ending {
        Some("rs") => prose.rust(text, in_test),
        Some("py" | "pyi") => prose.python(text, in_test),
        Some("md") => {
            let lines = text.lines().enumerate().map(|(n, line)| (n + 1, line.to_owned()));
            prose.markdown(lines.collect(), Role::Text, true);
        }
        _ => return None,
    }
    prose.wide.sort_unstable();
    prose.wide.dedup();
    Some(prose)
}

impl Prose {
    fn rust(&mut self, text: &str, in_test: bool) {
        let found = tokens(text);
        let tests = test_code(&found);
        let source: Vec<&str> = text.lines().collect();
        let mut at = 0;
        while at < found.len() {
            let token = found[at];
            let mut end = at + 1;
            match token.kind {
                Kind::Documentation | Kind::Comment => {
                    let mut last = token;
                    while let Some(next) = found.get(end)
                        && continues(&source, &last, next)
                    {
                        last = *next;
                        end += 1;
                    }
                    self.comment(&found[at..end], &source);
                }
                Kind::Literal if !in_test && !tests.iter().any(|range| range.contains(&at)) => {
                    self.literal(literal_text(token.text), token.line, &source);
                }
                _ => {}
            }
            at = end;
        }
    }

    fn comment(&mut self, tokens: &[Token<'_>], source: &[&str]) {
        let first = tokens[0];
        let mut lines = Vec::new();
        for token in tokens {
            for (n, line) in token.text.lines().enumerate() {
                let line = line.trim_start();
                let line = if token.text.starts_with("/*") {
                    line.trim_start_matches(['/', '*', '!']).trim_end_matches("*/")
                } else {
                    line.trim_start_matches('/').trim_start_matches('!')
                };
                lines.push((token.line + n, line.strip_prefix(' ').unwrap_or(line).to_owned()));
            }
        }
        let role = if first.kind == Kind::Documentation { Role::Summary } else { Role::Comment };
        let numbers = self.markdown(lines, role, false);
        self.widths(numbers, source);
    }

    /// Adds a text of the program, if it has enough words to be read by a person.
    fn literal(&mut self, text: &str, line: usize, source: &[&str]) {
        if text.split_whitespace().count() < 3 {
            return;
        }
        let lines: Vec<(usize, String)> =
            text.lines().enumerate().map(|(n, text)| (line + n, without_placeholders(text))).collect();
        if lines.len() > 1 {
            self.widths(lines.iter().map(|(n, _)| *n).collect(), source);
        }
        for paragraph in lines.split(|(_, text)| text.trim().is_empty()) {
            if !paragraph.is_empty() {
                self.passages.push(Passage { role: Role::Text, lines: paragraph.to_vec() });
            }
        }
    }

    fn python(&mut self, text: &str, in_test: bool) {
        let source: Vec<&str> = text.lines().collect();
        let parts = python_parts(text);
        let mut at = 0;
        while at < parts.len() {
            let (line, part) = &parts[at];
            let mut end = at + 1;
            if part.starts_with('#') {
                let own = |line: usize| source[line - 1].trim_start().starts_with('#');
                let mut lines = vec![(*line, comment_text(part))];
                while let Some((next, part)) = parts.get(end)
                    && part.starts_with('#')
                    && own(*line)
                    && own(*next)
                    && *next == line + end - at
                {
                    lines.push((*next, comment_text(part)));
                    end += 1;
                }
                let numbers = self.markdown(lines, Role::Comment, false);
                self.widths(numbers, &source);
            } else {
                let alone = source[line - 1].trim_start().starts_with(part.lines().next().unwrap_or(part));
                let inner = part.trim_start_matches(|c: char| c.is_ascii_alphabetic());
                let inner = inner.trim_matches(|c| c == '"' || c == '\'');
                if part.contains("\"\"\"") && alone {
                    let lines = inner.lines().enumerate().map(|(n, text)| (line + n, text.trim().to_owned()));
                    let numbers = self.markdown(lines.collect(), Role::Summary, false);
                    self.widths(numbers, &source);
                } else if !in_test {
                    self.literal(inner, *line, &source);
                }
            }
            at = end;
        }
    }

    /// Adds Markdown: paragraphs, list items and table cells; returns the lines that are prose.
    fn markdown(&mut self, lines: Vec<(usize, String)>, first: Role, measured: bool) -> Vec<usize> {
        let (mut role, mut fence, mut table) = (first, false, false);
        let mut open: Vec<(usize, String)> = Vec::new();
        let mut numbers = Vec::new();
        for (number, line) in lines {
            let trimmed = line.trim();
            if trimmed.starts_with("```") || trimmed.starts_with("~~~") {
                fence = !fence;
                self.close(&mut open, &mut role);
                continue;
            }
            if fence {
                continue;
            }
            let row = trimmed.starts_with('|');
            if trimmed.is_empty() || row {
                self.close(&mut open, &mut role);
            }
            if row {
                let cell_role = if table { Role::Text } else { Role::Label };
                for cell in trimmed.trim_matches('|').split('|').filter(|cell| !is_rule(cell)) {
                    let lines = vec![(number, plain(cell))];
                    self.passages.push(Passage { role: cell_role, lines });
                }
                role = Role::Text;
            }
            table = row;
            if row || trimmed.is_empty() {
                continue;
            }
            if measured && !line.contains("://") && line.chars().count() > WIDTH {
                self.wide.push((number, line.chars().count()));
            }
            numbers.push(number);
            if trimmed.starts_with('#') {
                self.close(&mut open, &mut role);
                let lines = vec![(number, plain(trimmed.trim_start_matches('#')))];
                self.passages.push(Passage { role: Role::Label, lines });
                role = Role::Text;
                continue;
            }
            if let Some(item) = list_item(trimmed) {
                self.close(&mut open, &mut role);
                role = Role::Text;
                open.push((number, plain(item)));
            } else {
                open.push((number, plain(trimmed)));
            }
        }
        self.close(&mut open, &mut role);
        numbers
    }

    fn close(&mut self, open: &mut Vec<(usize, String)>, role: &mut Role) {
        if !open.is_empty() {
            self.passages.push(Passage { role: *role, lines: std::mem::take(open) });
            *role = Role::Text;
        }
    }

    fn widths(&mut self, numbers: Vec<usize>, source: &[&str]) {
        for number in numbers {
            let line = source.get(number - 1).copied().unwrap_or_default();
            let width = line.chars().count();
            if width > WIDTH && !line.contains("://") {
                self.wide.push((number, width));
            }
        }
    }
}

/// Returns whether a comment continues the one on the line above.
fn continues(source: &[&str], last: &Token<'_>, next: &Token<'_>) -> bool {
    let prefix = |text: &str| text.chars().take_while(|c| matches!(c, '/' | '!')).count();
    let own = |token: &Token<'_>| source[token.line - 1].trim_start().starts_with("//");
    next.kind == last.kind
        && next.line == last.line + 1
        && own(last)
        && own(next)
        && prefix(next.text) == prefix(last.text)
}

fn comment_text(part: &str) -> String {
    part.trim_start_matches(['#', '!', ':']).trim().to_owned()
}

/// Returns the text between the delimiters of a Rust string literal.
fn literal_text(literal: &str) -> &str {
    let inner = literal.trim_start_matches(|c: char| c.is_ascii_alphabetic());
    let inner = inner.trim_matches('#');
    inner.strip_prefix('"').and_then(|inner| inner.strip_suffix('"')).unwrap_or(inner)
}

/// Replaces format placeholders by inline code, and escapes by spaces.
fn without_placeholders(text: &str) -> String {
    let (mut out, mut depth) = (String::new(), 0);
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '{' if characters.peek() == Some(&'{') => drop(characters.next()),
            '{' => depth += 1,
            '}' if depth > 0 => {
                depth -= 1;
                out.push_str("` `");
            }
            '\\' => {
                characters.next();
                out.push(' ');
            }
            _ if depth == 0 => out.push(c),
            _ => {}
        }
    }
    plain(&out)
}

/// Removes inline markup: code spans and addresses become `` ` ``, emphasis and link targets go.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '`' => {
                out.push('`');
                if let Some(end) = rest.find('`') {
                    rest = &rest[end + 1..];
                }
            }
            '*' | '[' => {}
            ']' => {
                let closing = match rest.chars().next() {
                    Some('(') => rest.find(')'),
                    Some('[') => rest.find(']'),
                    _ => None,
                };
                rest = closing.map_or(rest, |end| &rest[end + 1..]);
            }
            ':' if rest.starts_with("//") => {
                out.push('`');
                let end = rest.find([' ', ')', '>', '"']).unwrap_or(rest.len());
                rest = &rest[end..];
            }
            _ => out.push(c),
        }
    }
    out
}

fn is_rule(cell: &str) -> bool {
    cell.trim().chars().all(|c| matches!(c, '-' | ':'))
}

fn list_item(line: &str) -> Option<&str> {
    let bullet = line.strip_prefix("- ").or_else(|| line.strip_prefix("* "));
    bullet.or_else(|| {
        let (number, rest) = line.split_once(". ")?;
        (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(rest)
    })
}

/// Splits Python into its comments and string literals, each with the line of its beginning.
fn python_parts(text: &str) -> Vec<(usize, &str)> {
    let bytes = text.as_bytes();
    let (mut parts, mut at, mut line) = (Vec::new(), 0, 1);
    while at < bytes.len() {
        let span: Option<Range<usize>> = match bytes[at] {
            b'#' => Some(at..text[at..].find('\n').map_or(bytes.len(), |n| at + n)),
            quote @ (b'"' | b'\'') => Some(at..python_string_end(bytes, at, quote)),
            _ => None,
        };
        let Some(span) = span else {
            line += usize::from(bytes[at] == b'\n');
            at += 1;
            continue;
        };
        let part = &text[span.clone()];
        parts.push((line, part));
        line += part.bytes().filter(|byte| *byte == b'\n').count();
        at = span.end;
    }
    parts
}

fn python_string_end(bytes: &[u8], start: usize, quote: u8) -> usize {
    let triple = bytes[start..].starts_with(&[quote; 3]);
    let mut at = start + if triple { 3 } else { 1 };
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'\n' if !triple => return at,
            byte if byte == quote && (!triple || bytes[at..].starts_with(&[quote; 3])) => {
                return at + if triple { 3 } else { 1 };
            }
            _ => at += 1,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(path: &str, text: &str) -> Vec<(Role, usize, String)> {
        let prose = of_file(path, text).unwrap();
        let joined = |lines: &[(usize, String)]| {
            lines.iter().map(|(_, text)| text.trim()).collect::<Vec<_>>().join(" ")
        };
        prose.passages.iter().map(|p| (p.role, p.lines[0].0, joined(&p.lines))).collect()
    }

    #[test]
    fn a_doc_comment_has_a_summary_and_further_paragraphs_but_no_code() {
        let source =
            "/// First [`X`] line\n/// goes on.\n///\n/// Second.\n/// ```\n/// code\n/// ```\nfn f() {}\n";
        let expected =
            [(Role::Summary, 1, "First ` line goes on.".to_owned()), (Role::Text, 4, "Second.".to_owned())];
        assert_eq!(texts("a.rs", source), expected);
    }

    #[test]
    fn texts_of_a_program_count_and_those_of_tests_do_not() {
        let source = "fn f() { g(\"a text of {n} words\") }\n#[cfg(test)]\nmod tests { fn t() { g(\"a text of tests here\") } }";
        assert_eq!(texts("a.rs", source), [(Role::Text, 1, "a text of ` words".to_owned())]);
    }

    #[test]
    fn python_has_docstrings_comments_and_texts() {
        let source = "\"\"\"Summary.\n\nMore.\n\"\"\"\n# one\n# two\nx = 'a text of words'  # three\n";
        let expected = [
            (Role::Summary, 1, "Summary.".to_owned()),
            (Role::Text, 3, "More.".to_owned()),
            (Role::Comment, 5, "one two".to_owned()),
            (Role::Text, 7, "a text of words".to_owned()),
            (Role::Comment, 7, "three".to_owned()),
        ];
        assert_eq!(texts("a.py", source), expected);
    }

    #[test]
    fn tables_and_addresses_may_be_wide() {
        let long = "word ".repeat(30);
        let text = format!("{long}\n\n| {long} |\n\n{long} https://example.org\n```\n{long}\n```\n");
        assert_eq!(of_file("a.md", &text).unwrap().wide, [(1, 150)]);
        let code = format!("let x = \"{long}\";\n// {long}\n");
        assert_eq!(of_file("a.rs", &code).unwrap().wide, [(2, 153)]);
    }
}
