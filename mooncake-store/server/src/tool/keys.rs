//! `mooncake doctor --keys`: compares the keys that two processes stored for one prompt.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use mooncake_core::{Error, Result};

use super::finding::Finding;
use crate::block_key::{BlockKey, Connector};

/// Digits of SHA-256, the default hash of vLLM.
const SHA_DIGITS: usize = 64;
/// Number of values that a finding shows.
const SHOWN: usize = 3;

/// Compares two files with a key in each line, as `mooncake ls` prints them.
///
/// # Errors
/// Returns an error if a file cannot be read as text.
pub(super) fn compare(paths: &[impl AsRef<Path>]) -> Result<Vec<Finding>> {
    let mut texts = Vec::new();
    for path in paths.iter().map(AsRef::as_ref) {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::invalid(format!("cannot read keys: {error}. file={}", path.display())).with_source(error)
        })?;
        texts.push(text);
    }
    let (mut findings, mut lists) = (Vec::new(), Vec::new());
    for (path, text) in paths.iter().zip(&texts) {
        let keys = Keys::parse(text);
        findings.push(keys.counted(&path.as_ref().display().to_string()));
        lists.push(keys);
    }
    if let [first, second] = &lists[..]
        && !first.blocks.is_empty()
        && !second.blocks.is_empty()
    {
        findings.extend(first.compared_with(second));
    }
    Ok(findings)
}

/// Keys of a process.
struct Keys<'a> {
    blocks: Vec<BlockKey<'a>>,
    /// Number of keys that no connector builds.
    others: usize,
}

impl<'a> Keys<'a> {
    fn parse(text: &'a str) -> Self {
        let mut keys = Self { blocks: Vec::new(), others: 0 };
        for line in text.lines().filter(|line| !line.is_empty()) {
            match BlockKey::parse(line) {
                Some(block) => keys.blocks.push(block),
                None => keys.others += 1,
            }
        }
        keys
    }

    /// Returns the values that a part of the keys has.
    fn values<T: Ord>(&self, of: impl Fn(&BlockKey<'a>) -> Option<T>) -> BTreeSet<T> {
        self.blocks.iter().filter_map(of).collect()
    }

    fn counted(&self, file: &str) -> Finding {
        if self.blocks.is_empty() {
            return Finding::bad(
                file,
                format!("no key of vLLM, SGLang or LMCache among {}", self.others),
                "send one prompt to one process with an empty store, then: mooncake ls > FILE",
            );
        }
        let connectors = self.values(|block| Some(name(block.connector)));
        let blocks = self.values(|block| Some(block.hash)).len();
        let mut found = format!("keys of {}: {}, blocks: {blocks}", shown(&connectors), self.blocks.len());
        if self.others > 0 {
            let _ = write!(found, ", other keys: {}", self.others);
        }
        Finding::good(file, found)
    }

    fn compared_with(&self, other: &Self) -> Vec<Finding> {
        let connectors = [self, other].map(|keys| keys.values(|block| Some(name(block.connector))));
        if connectors[0].is_disjoint(&connectors[1]) {
            return vec![Finding::bad(
                "connectors",
                format!("{}, and {}", shown(&connectors[0]), shown(&connectors[1])),
                "use one connector in both processes: none finds what another one has stored",
            )];
        }
        let mut findings = Vec::new();
        let models = [self, other].map(|keys| keys.values(|block| block.model));
        if models[0].is_disjoint(&models[1]) && !models[0].is_empty() {
            findings.push(Finding::bad(
                "models",
                format!("{}, and {}", shown(&models[0]), shown(&models[1])),
                "give both processes one name: the same --model, or the same --served-model-name where keys have it",
            ));
        }
        let rest = [self, other].map(|keys| keys.values(|block| Some((block.before, block.after))));
        if rest[0] != rest[1] && findings.is_empty() {
            findings.push(rests_compared(&rest[0], &rest[1]));
        }
        findings.push(self.hashes_compared(other));
        findings
    }

    fn hashes_compared(&self, other: &Self) -> Finding {
        let hashes = [self, other].map(|keys| keys.values(|block| Some(block.hash)));
        let common = hashes[0].intersection(&hashes[1]).count();
        let counts = (hashes[0].len(), hashes[1].len());
        if common == counts.0 && common == counts.1 {
            return Finding::good("hashes", format!("both processes have the same blocks: {common}"));
        }
        if common > 0 {
            return Finding::hint(
                "hashes",
                format!("{common} blocks are in both lists, of {} and {}", counts.0, counts.1),
                "the hashes agree; the prompts differ from some block on, or blocks were evicted or not yet written",
            );
        }
        let digits = [self, other].map(|keys| keys.values(|block| Some(block.hash.len())));
        let connector = self.blocks[0].connector;
        let (found, fix) = if digits[0].is_disjoint(&digits[1]) {
            let found = format!("{} digits, and {}", shown(&digits[0]), shown(&digits[1]));
            (found, "select one hash algorithm in both processes")
        } else {
            ("no hash is in both lists".into(), remedy(connector, digits[0].contains(&SHA_DIGITS)))
        };
        Finding::bad("hashes", found, fix)
    }
}

fn rests_compared(first: &BTreeSet<(&str, &str)>, second: &BTreeSet<(&str, &str)>) -> Finding {
    let common = first.intersection(second).count();
    let joined = |(before, after): &(&str, &str)| format!("{before}@..@{after}");
    let only = |one: &BTreeSet<_>, other: &BTreeSet<_>| {
        one.difference(other).next().map_or_else(|| "none".to_owned(), joined)
    };
    let found = format!(
        "{common} parts around the hash are in both lists, of {} and {}; only in the first: {}, only in the second: {}",
        first.len(),
        second.len(),
        only(first, second),
        only(second, first)
    );
    let fix = "use the same parallel sizes, types, prefixes, tags and salts: they are parts of the keys";
    if common == 0 {
        Finding::bad("ranks and names", found, fix)
    } else {
        Finding::hint("ranks and names", found, fix)
    }
}

/// Returns what makes the hashes of two processes equal.
fn remedy(connector: Connector, is_sha: bool) -> &'static str {
    match connector {
        Connector::Vllm if is_sha => {
            "--prefix-caching-hash-algo sha256_cbor in both processes: sha256 hashes pickled objects, which may differ for equal values; the block sizes must be equal, too"
        }
        Connector::Vllm => {
            "--prefix-caching-hash-algo sha256_cbor in both processes, or the same PYTHONHASHSEED: xxhash starts from a random seed; the block sizes must be equal, too"
        }
        Connector::Sglang => "the same tokenizer, --page-size and extra_key in both processes",
        Connector::LmCache => {
            "the same PYTHONHASHSEED, pre_caching_hash_algorithm and chunk_size in both processes, and vLLM in both or in none"
        }
        Connector::LmCacheServer => "the same hash_algorithm and chunk_size at both servers",
    }
}

fn name(connector: Connector) -> &'static str {
    match connector {
        Connector::Vllm => "vLLM",
        Connector::Sglang => "SGLang",
        Connector::LmCache => "LMCache in the process",
        Connector::LmCacheServer => "LMCache's server",
    }
}

/// Returns the first values as a text.
fn shown(values: &BTreeSet<impl ToString>) -> String {
    let mut text = values.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if values.len() > SHOWN {
        let _ = write!(text, " and {} more", values.len() - SHOWN);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::finding::Grade;

    /// Compares two lists. Returns the subject, grade, text and fix of the last finding.
    fn last(first: &str, second: &str) -> (String, Grade, String, String) {
        let [first, second] = [first, second].map(Keys::parse);
        let finding = first.compared_with(&second).pop().unwrap();
        (finding.subject, finding.grade, finding.found, finding.fix)
    }

    fn vllm(model: &str, rank: u8, hash: &str) -> String {
        format!("{model}@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{hash}\n")
    }

    #[test]
    fn equal_lists_agree() {
        let [a, b] = ["ab", "cd"].map(|digits| digits.repeat(32));
        let list = vllm("m", 0, &a) + &vllm("m", 0, &b);
        let (subject, grade, found, _) = last(&list, &list);
        assert_eq!((subject.as_str(), grade), ("hashes", Grade::Good));
        assert!(found.contains("same blocks: 2"), "{found}");
        let (_, grade, found, _) = last(&list, &vllm("m", 0, &a));
        assert_eq!(grade, Grade::Hint);
        assert!(found.contains("of 2 and 1"), "{found}");
    }

    #[test]
    fn hashes_that_differ_have_a_remedy() {
        let [a, b] = ["ab", "cd"].map(|digits| digits.repeat(32));
        let [short, other] = ["ab", "cd"].map(|digits| digits.repeat(16));
        for (first, second, remedy) in [
            (vllm("m", 0, &a), vllm("m", 0, &b), "sha256 hashes pickled objects"),
            (vllm("m", 0, &short), vllm("m", 0, &other), "random seed"),
            (vllm("m", 0, &a), vllm("m", 0, &short), "one hash algorithm"),
            ("m@1@0@ab@half".into(), "m@1@0@cd@half".into(), "PYTHONHASHSEED"),
            (format!("m@01000100@0@{a}"), format!("m@01000100@0@{b}"), "hash_algorithm"),
            (format!("{a}_0_k"), format!("{b}_0_k"), "--page-size"),
        ] {
            let (subject, grade, _, fix) = last(&first, &second);
            assert_eq!((subject.as_str(), grade), ("hashes", Grade::Bad), "{first}");
            assert!(fix.contains(remedy), "{fix}");
        }
    }

    #[test]
    fn other_parts_of_the_keys_are_compared() {
        let a = "ab".repeat(32);
        let findings = |first: &str, second: &str| {
            let [first, second] = [first, second].map(Keys::parse);
            let findings = first.compared_with(&second);
            findings.iter().map(|at| (at.subject.clone(), at.grade)).collect::<Vec<_>>()
        };
        let good = ("hashes".to_owned(), Grade::Good);
        let models = findings(&vllm("org/m", 0, &a), &vllm("m", 0, &a));
        assert_eq!(models, [("models".to_owned(), Grade::Bad), good.clone()]);
        let ranks = findings(&vllm("m", 0, &a), &(vllm("m", 0, &a) + &vllm("m", 1, &a)));
        assert_eq!(ranks, [("ranks and names".to_owned(), Grade::Hint), good.clone()]);
        let types = findings(&format!("m@1@0@{a}@half"), &format!("m@1@0@{a}@bfloat16"));
        assert_eq!(types, [("ranks and names".to_owned(), Grade::Bad), good]);
        let connectors = findings(&vllm("m", 0, &a), &format!("m@1@0@{a}@half"));
        assert_eq!(connectors, [("connectors".to_owned(), Grade::Bad)]);
    }

    #[test]
    fn lists_without_blocks_are_named() {
        assert_eq!(Keys::parse("a\n\nb").counted("f").grade, Grade::Bad);
        let mixed = format!("a\n{}", vllm("m", 0, "ab"));
        assert_eq!(Keys::parse(&mixed).counted("f").found, "keys of vLLM: 1, blocks: 1, other keys: 1");
    }
}
