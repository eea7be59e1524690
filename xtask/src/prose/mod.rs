//! `cargo xtask prose`: the language of comments, documents and texts of programs.
//!
//! The rules are those of CONTRIBUTING that a pattern can check. They look at comments and string
//! literals of `*.rs`, comments and docstrings of `*.py` and `*.pyi`, and at `*.md`.

mod passages;
mod rules;

use std::collections::BTreeMap;

use crate::run::{Result, command, root};
use rules::{Hit, Rule, Rules};

/// Passages that may break a rule: path, name of the rule, text in the message, reason.
const EXCEPTIONS: &[(&str, &str, &str, &str)] = &[
    ("mooncake-python/python/mooncake/_bundle_types.py", "glossary", "`member", MEMBERS),
    ("mooncake-python/python/mooncake/_bundles.py", "glossary", "`member", MEMBERS),
    ("mooncake-python/python/mooncake/_manifests.py", "glossary", "`member", MEMBERS),
    ("mooncake-python/python/mooncake/_member_reads.py", "glossary", "`member", MEMBERS),
    ("mooncake-python/python/mooncake/_members.py", "glossary", "`member", MEMBERS),
    ("mooncake-python/python/mooncake/_writes.py", "glossary", "`member", MEMBERS),
    ("mooncake-python/python/mooncake/structured_object_store.py", "glossary", "`member", MEMBERS),
];

/// Reason for a term of structured objects in the Python package.
const MEMBERS: &str = "the interface of Mooncake C++ has this term";

/// Most entries that [`EXCEPTIONS`] may have.
const MAX_EXCEPTIONS: usize = 20;

const _: () = assert!(EXCEPTIONS.len() <= MAX_EXCEPTIONS, "reword the text instead of excepting it");

const USAGE: &str = "\
cargo xtask prose [--summary] [--rule NAME] [--sample N] [PATH..]

  Prints every violation as `file:line: rule: message`, then their number by rule. Exits with 1 if
  there is one. PATH chooses files whose path begins with it, `--rule` chooses one rule,
  `--summary` prints a table of crates and rules only, `--sample N` prints every Nth violation.

  rules: opening, fragment, comment-opening, relative-subject, glossary, width
";

/// Runs the task.
pub(crate) fn check(arguments: &[&str]) -> Result {
    let options = Options::parse(arguments)?;
    let rules = Rules::new();
    let (mut counts, mut total) = (BTreeMap::<String, BTreeMap<Rule, usize>>::new(), 0);
    for path in files()? {
        if !options.paths.is_empty() && !options.paths.iter().any(|chosen| path.starts_with(chosen)) {
            continue;
        }
        // A file that git lists and that is deleted is no longer prose.
        let Ok(text) = std::fs::read_to_string(root().join(&path)) else { continue };
        for hit in hits(&rules, &path, &text) {
            if options.rule.is_some_and(|rule| rule != hit.rule) {
                continue;
            }
            if !options.summary && total % options.every == 0 {
                println!("{path}:{}: {}: {}", hit.line, hit.rule.name(), hit.message);
            }
            total += 1;
            *counts.entry(group(&path)).or_default().entry(hit.rule).or_default() += 1;
        }
    }
    if total == 0 {
        println!("prose: 0 violations");
        return Ok(());
    }
    print_counts(&counts, options.summary);
    Err(format!("{total} violations of the rules of prose (`cargo xtask prose --help`)"))
}

struct Options<'a> {
    summary: bool,
    rule: Option<Rule>,
    every: usize,
    paths: Vec<&'a str>,
}

impl<'a> Options<'a> {
    fn parse(arguments: &[&'a str]) -> Result<Self> {
        let mut options = Self { summary: false, rule: None, every: 1, paths: Vec::new() };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match *argument {
                "--summary" => options.summary = true,
                "--rule" => {
                    let name = rest.next().copied().unwrap_or_default();
                    let rule = Rule::ALL.into_iter().find(|rule| rule.name() == name);
                    options.rule = Some(rule.ok_or_else(|| format!("no such rule: `{name}`\n\n{USAGE}"))?);
                }
                "--sample" => {
                    let number = rest.next().and_then(|text| text.parse().ok()).filter(|n| *n > 0);
                    options.every = number.ok_or_else(|| format!("--sample needs a number\n\n{USAGE}"))?;
                }
                path if !path.starts_with('-') && root().join(path).exists() => {
                    options.paths.push(path.trim_start_matches("./"));
                }
                _ => return Err(format!("no such file or option: `{argument}`\n\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

/// Files that git tracks or would track.
fn files() -> Result<Vec<String>> {
    let listed = command("git", &["ls-files", "--cached", "--others", "--exclude-standard"]).output()?;
    let mut files: Vec<String> = listed.lines().map(str::to_owned).collect();
    files.sort_unstable();
    files.dedup();
    Ok(files)
}

fn hits(rules: &Rules, path: &str, text: &str) -> Vec<Hit> {
    let Some(prose) = passages::of_file(path, text) else { return Vec::new() };
    let mut hits = Vec::new();
    for passage in &prose.passages {
        rules.check(path, passage, &mut hits);
    }
    let wide = |(line, width)| Hit {
        line,
        rule: Rule::Width,
        message: format!("{width} columns: wrap at {}", passages::WIDTH),
    };
    hits.extend(prose.wide.into_iter().map(wide));
    hits.retain(|hit| !excepted(path, hit));
    hits.sort_by_key(|hit| hit.line);
    hits
}

fn excepted(path: &str, hit: &Hit) -> bool {
    EXCEPTIONS
        .iter()
        .any(|(file, rule, text, _)| *file == path && *rule == hit.rule.name() && hit.message.contains(text))
}

/// The folder at the top that a file belongs to; documents at the top are a group of their own.
fn group(path: &str) -> String {
    path.split_once('/').map_or("(top level)", |(folder, _)| folder).to_owned()
}

fn print_counts(counts: &BTreeMap<String, BTreeMap<Rule, usize>>, by_group: bool) {
    let mut header = format!("{:20}", "");
    for rule in Rule::ALL {
        header += &format!("{:>17}", rule.name());
    }
    println!("{header}{:>8}", "sum");
    let mut sums = BTreeMap::<Rule, usize>::new();
    for (group, of_group) in counts {
        if by_group {
            print_row(group, of_group);
        }
        for (rule, count) in of_group {
            *sums.entry(*rule).or_default() += count;
        }
    }
    print_row("all", &sums);
}

fn print_row(name: &str, counts: &BTreeMap<Rule, usize>) {
    let mut row = format!("{name:20}");
    for rule in Rule::ALL {
        row += &format!("{:>17}", counts.get(&rule).copied().unwrap_or(0));
    }
    println!("{row}{:>8}", counts.values().sum::<usize>());
}
