//! Rules of prose: openings, glossary words and relative clauses as subjects.

use super::passages::{Passage, Role};

/// A violation: the line, the name of the rule and an explanation.
pub(super) struct Hit {
    pub(super) line: usize,
    pub(super) rule: Rule,
    pub(super) message: String,
}

/// The rule that a [`Hit`] breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    /// Forbidden first word of a doc comment.
    Opening,
    /// Doc comment that begins in the middle of a sentence.
    Fragment,
    /// Pronoun without a noun at the beginning of any other comment.
    CommentOpening,
    /// Sentence whose subject is a relative clause.
    RelativeSubject,
    /// Word of the glossary's left column.
    Glossary,
    /// Line wider than 100 columns.
    Width,
}

impl Rule {
    pub(super) const ALL: [Self; 6] = [
        Self::Opening,
        Self::Fragment,
        Self::CommentOpening,
        Self::RelativeSubject,
        Self::Glossary,
        Self::Width,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Fragment => "fragment",
            Self::CommentOpening => "comment-opening",
            Self::RelativeSubject => "relative-subject",
            Self::Glossary => "glossary",
            Self::Width => "width",
        }
    }
}

/// First words that a doc comment must not have: no noun phrase and no verb begins with them.
const OPENINGS: &[&str] = &[
    "what",
    "whatever",
    "whether",
    "who",
    "whoever",
    "whose",
    "whom",
    "which",
    "whichever",
    "where",
    "wherever",
    "when",
    "why",
    "how",
    "it",
    "its",
    "it's",
    "they",
    "their",
    "them",
    "he",
    "his",
    "of",
    "one",
    "ones",
    "one's",
    "that",
    "those",
    "these",
    "nobody",
    "nothing",
    "none",
    "somebody",
    "someone",
    "something",
    "everybody",
    "everyone",
    "anybody",
    "anyone",
    "anything",
    "and",
    "but",
    "so",
    "or",
    "yes",
    "there",
];

/// First words in lower case that continue another sentence.
const CONTINUATIONS: &[&str] = &[
    "a", "an", "the", "and", "or", "but", "to", "of", "in", "on", "at", "by", "for", "from", "with", "until",
    "since", "if", "as", "than", "because", "while", "before", "after", "is", "are", "was", "has", "not",
];

/// First words that a plain comment must not have.
const COMMENT_OPENINGS: &[&str] =
    &["it", "its", "they", "their", "them", "whoever", "who", "whose", "nobody", "somebody", "of", "theirs"];

/// Sentence openings that make a relative clause the subject.
const RELATIVES: &[&str] = &["what", "whatever", "whoever", "who", "whose", "whichever", "whom", "which"];

/// Words before `who`, `that` and `which` that only stand for the clause.
const HOLLOW: &[&str] = &["one", "those", "that", "he", "they", "all", "everything", "anything"];

/// Line of the glossary.
struct Entry {
    pattern: Vec<Element>,
    exceptions: Vec<Vec<Element>>,
    folders: Vec<String>,
    term: String,
}

enum Element {
    OneOf(Vec<String>),
    NoneOf(Vec<String>),
    End,
}

/// All rules, with the glossary read.
pub(super) struct Rules(Vec<Entry>);

impl Rules {
    pub(super) fn new() -> Self {
        let lines = include_str!("glossary.txt").lines();
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self(lines.map(Entry::parse).collect())
    }

    /// Finds the violations of one passage of the file at `path`.
    pub(super) fn check(&self, path: &str, passage: &Passage, hits: &mut Vec<Hit>) {
        let words = words_of(passage);
        opening(passage.role, &words, hits);
        if passage.role != Role::Label {
            relative_subjects(&words, hits);
        }
        for entry in &self.0 {
            entry.check(path, &words, hits);
        }
    }
}

struct Word {
    line: usize,
    /// In lower case; one character for punctuation.
    text: String,
    capital: bool,
    begins_sentence: bool,
}

impl Word {
    fn is_punctuation(&self) -> bool {
        self.text.chars().all(|c| !c.is_alphanumeric() && c != '`')
    }
}

fn words_of(passage: &Passage) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
    let mut begins = true;
    for (line, text) in &passage.lines {
        let mut push = |text: &str| {
            let closing = matches!(text, "." | "!" | "?");
            let capital = text.starts_with(char::is_uppercase);
            words.push(Word { line: *line, text: text.to_lowercase(), capital, begins_sentence: begins });
            // Brackets and quotation marks do not hide the beginning of a sentence.
            begins = closing || (begins && matches!(text, "\"" | "(" | "“"));
        };
        for chunk in text.split_whitespace() {
            split_chunk(chunk, &mut push);
        }
    }
    words
}

/// Splits text without white space into words and punctuation.
fn split_chunk(chunk: &str, push: &mut impl FnMut(&str)) {
    // A dot inside a name, a number or an abbreviation ends no sentence.
    if ["e.g.", "i.e.", "etc.", "cf.", "vs."].contains(&chunk) || chunk.contains("::") {
        push("`");
        return;
    }
    let inner = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '+' | '`' | '/');
    let mut rest = chunk;
    while let Some(first) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("'s")
            && !after.starts_with(inner)
        {
            push("'s");
            rest = after;
            continue;
        }
        let mut end = first.len_utf8();
        if inner(first) {
            let mut characters = rest.char_indices().peekable();
            while let Some((at, c)) = characters.next() {
                let next = characters.peek().map(|(_, c)| *c);
                let dotted = matches!(c, '.' | '\'' | ':' | '=')
                    && next.is_some_and(inner)
                    && !(c == '\'' && rest[at..].starts_with("'s"));
                if !inner(c) && !dotted {
                    break;
                }
                end = at + c.len_utf8();
            }
        }
        push(&rest[..end]);
        rest = &rest[end..];
    }
}

fn opening(role: Role, words: &[Word], hits: &mut Vec<Hit>) {
    let Some(first) = words.first() else { return };
    let text = first.text.as_str();
    // `if` and the like are names of the language when they stand alone.
    if words.len() < 2 || words[1].text == "`" && first.text == "`" {
        return;
    }
    let (rule, message) = match role {
        Role::Summary if first.capital && OPENINGS.contains(&text) => {
            (Rule::Opening, "begin with a noun phrase or a third-person verb")
        }
        Role::Summary if !first.capital && (OPENINGS.contains(&text) || CONTINUATIONS.contains(&text)) => {
            (Rule::Fragment, "begin a sentence of its own")
        }
        Role::Comment if COMMENT_OPENINGS.contains(&text) => (Rule::CommentOpening, "name the subject"),
        _ => return,
    };
    hits.push(Hit { line: first.line, rule, message: format!("`{}`: {message}", phrase(&words[..2])) });
}

fn relative_subjects(words: &[Word], hits: &mut Vec<Hit>) {
    for (at, word) in words.iter().enumerate() {
        if !word.begins_sentence {
            continue;
        }
        let end = words[at..].iter().position(|word| matches!(word.text.as_str(), "." | "!" | "?"));
        let question = end.is_some_and(|end| words[at + end].text == "?");
        let second = words.get(at + 1).map_or("", |word| word.text.as_str());
        let hollow = HOLLOW.contains(&word.text.as_str()) && matches!(second, "who" | "which" | "that");
        // A clause that is short of words is a heading or the beginning of a list.
        let long = end.unwrap_or(words.len() - at) > 3;
        if !question && long && (RELATIVES.contains(&word.text.as_str()) || hollow) {
            let shown = phrase(&words[at..(at + 3).min(words.len())]);
            let message = format!("`{shown}`: make a noun the subject");
            hits.push(Hit { line: word.line, rule: Rule::RelativeSubject, message });
        }
    }
}

impl Entry {
    fn parse(line: &str) -> Self {
        let (left, term) = line.split_once("=>").unwrap_or((line, ""));
        let mut parts = left.split(';').map(str::trim);
        let mut entry = Self {
            pattern: Element::sequence(parts.next().unwrap_or_default()),
            exceptions: Vec::new(),
            folders: Vec::new(),
            term: term.trim().to_owned(),
        };
        for part in parts {
            if let Some(phrases) = part.strip_prefix("except ") {
                entry.exceptions = phrases.split(", ").map(Element::sequence).collect();
            } else if let Some(folders) = part.strip_prefix("in ") {
                entry.folders = folders.split(' ').map(str::to_owned).collect();
            }
        }
        entry
    }

    fn check(&self, path: &str, words: &[Word], hits: &mut Vec<Hit>) {
        let here = |folder: &String| path.starts_with(folder.as_str());
        if !self.folders.is_empty() && !self.folders.iter().any(here) {
            return;
        }
        for at in 0..words.len() {
            let Some(length) = matched(&self.pattern, &words[at..]) else { continue };
            if self.exceptions.iter().any(|phrase| overlaps(phrase, words, at, at + length)) {
                continue;
            }
            let message = format!("`{}`: write {}", phrase(&words[at..at + length]), self.term);
            hits.push(Hit { line: words[at].line, rule: Rule::Glossary, message });
        }
    }
}

impl Element {
    fn sequence(text: &str) -> Vec<Self> {
        text.split_whitespace().map(Self::parse).collect()
    }

    fn parse(text: &str) -> Self {
        let list = |text: &str| text.split('|').map(str::to_owned).collect();
        match text.strip_prefix('!') {
            Some(excluded) => Self::NoneOf(list(excluded)),
            None if text == "$" => Self::End,
            None => Self::OneOf(list(text)),
        }
    }

    /// Returns how many words match here: 1, or 0 for the end of the text.
    fn matches(&self, word: Option<&Word>) -> Option<usize> {
        let end = word.is_none_or(Word::is_punctuation);
        match (self, word) {
            (Self::End, _) => end.then_some(0),
            (Self::OneOf(list), Some(word)) if list.contains(&word.text) => Some(1),
            (Self::OneOf(list), _) => (end && list.iter().any(|text| text == "$")).then_some(0),
            (Self::NoneOf(list), Some(word)) => (!end && !list.contains(&word.text)).then_some(1),
            (Self::NoneOf(_), None) => None,
        }
    }
}

/// Returns how many of the first words the pattern covers, if it matches them.
fn matched(pattern: &[Element], words: &[Word]) -> Option<usize> {
    let mut length = 0;
    for element in pattern {
        length += element.matches(words.get(length))?;
    }
    (length > 0).then_some(length)
}

fn overlaps(phrase: &[Element], words: &[Word], start: usize, end: usize) -> bool {
    let earliest = start.saturating_sub(phrase.len());
    (earliest..end).any(|at| matched(phrase, &words[at..]).is_some_and(|length| at + length > start))
}

fn phrase(words: &[Word]) -> String {
    let mut text = String::new();
    for word in words {
        let joined = word.is_punctuation() || word.text == "'s" || text.is_empty();
        text.push_str(if joined { "" } else { " " });
        text.push_str(if word.text == "`" { "…" } else { &word.text });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(role: Role, text: &str) -> Vec<(Rule, String)> {
        let passage = Passage { role, lines: vec![(1, text.to_owned())] };
        let mut hits = Vec::new();
        Rules::new().check("mooncake-core/src/lib.rs", &passage, &mut hits);
        let quoted = |hit: &Hit| hit.message.split('`').nth(1).unwrap_or_default().to_owned();
        hits.iter().map(|hit| (hit.rule, quoted(hit))).collect()
    }

    #[test]
    fn a_doc_comment_begins_with_a_noun_or_a_verb() {
        for text in ["Whether it lives.", "Its size.", "One of them.", "How many there are."] {
            assert!(matches!(rules(Role::Summary, text)[..], [(Rule::Opening, _), ..]), "{text}");
        }
        assert!(matches!(rules(Role::Summary, "and the completion")[..], [(Rule::Fragment, _)]));
        for text in ["Returns the size.", "`One` of the codes.", "Onerous work.", "etcd over JSON."] {
            assert!(rules(Role::Summary, text).is_empty(), "{text}");
        }
        assert!(matches!(rules(Role::Comment, "It ends.")[..], [(Rule::CommentOpening, _)]));
    }

    #[test]
    fn relative_clauses_are_no_subjects_unless_they_ask() {
        let found = rules(Role::Text, "Fine. What is not there is skipped. Those who wait are woken.");
        assert_eq!(found.len(), 2);
        assert!(rules(Role::Text, "What does the master do? It waits for e.g. what follows.").is_empty());
        assert!(rules(Role::Label, "What it does for you").is_empty());
    }

    #[test]
    fn the_glossary_knows_its_exceptions() {
        for text in [
            "Sent on the wire in the wire format.",
            "A workspace member cannot be told apart.",
            "Copied in place, which takes place in the first place.",
            "There is no answer from `wire`, which is no longer open.",
            "Doubles the size of a double free.",
        ] {
            let found = rules(Role::Text, text);
            assert!(found.is_empty() || text.contains("no answer") && found.len() == 1, "{found:?}");
        }
        for (text, quoted) in [
            ("A new wire is a crate.", "wire"),
            ("The member's memory is full.", "member"),
            ("as the existing master does", "existing master"),
            ("as the existing one, too", "existing one"),
            ("` is no number", "… is no number"),
            ("a double of libcuda", "a double of"),
        ] {
            assert_eq!(rules(Role::Text, text)[0], (Rule::Glossary, quoted.to_owned()), "{text}");
        }
    }
}
