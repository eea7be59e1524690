//! Values that name their key, their writer and their version, and whose every byte is checked.

use std::sync::LazyLock;

use mooncake_core::clock::Rng;

/// Length of the head of a value: its label, its length, and a checksum of both.
pub(super) const HEAD: usize = 48;
/// Length of the longest value.
pub(super) const LONGEST: usize = 300_000;
/// Number of positions of the block at which a value may begin.
const STARTS: u64 = 1 << 20;

/// Random bytes that are equal in all processes. A value is a part of them behind its head, which
/// costs one copy or comparison.
static BLOCK: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut bytes = vec![0; STARTS as usize + LONGEST];
    Rng::seeded(0x6d6f_6f6e).fill(&mut bytes);
    bytes
});

/// Identity of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label {
    /// Number and generation of the client that wrote the value.
    pub(super) writer: u64,
    /// Number of the key among those of the writer.
    pub(super) key: u64,
    /// Number of the write, which counts up for each writer.
    pub(super) version: u64,
}

impl Label {
    fn hash(self, len: u64) -> u64 {
        [self.writer, self.key, self.version, len].into_iter().fold(0x1234_5678_9abc_def1, |hash, word| {
            let mixed = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ mixed >> 29
        })
    }

    /// Returns the value of this label with a length between [`HEAD`] and [`LONGEST`].
    pub(super) fn value(self, len: usize) -> Vec<u8> {
        let hash = self.hash(len as u64);
        let mut bytes = Vec::with_capacity(len);
        for word in [self.writer, self.key, self.version, len as u64, hash, !hash] {
            bytes.extend(word.to_le_bytes());
        }
        let start = (hash % STARTS) as usize;
        bytes.extend_from_slice(&BLOCK[start + HEAD..start + len]);
        bytes
    }

    /// Returns the label of a complete value.
    ///
    /// # Errors
    /// Describes the first difference between the bytes and every value.
    pub(super) fn of(bytes: &[u8]) -> Result<Self, String> {
        let (label, len) = Self::of_head(bytes)?;
        if bytes.len() != len {
            return Err(format!("{label:?} has {len} bytes, and {} were read", bytes.len()));
        }
        label.check_part(len, HEAD, &bytes[HEAD..])?;
        Ok(label)
    }

    /// Returns the label and the length of a value, from its first bytes.
    pub(super) fn of_head(bytes: &[u8]) -> Result<(Self, usize), String> {
        let word = |at: usize| bytes.get(at * 8..at * 8 + 8).and_then(|word| word.try_into().ok());
        let words: Option<Vec<u64>> = (0..HEAD / 8).map(|at| word(at).map(u64::from_le_bytes)).collect();
        let words = words.ok_or_else(|| format!("{} bytes are no value", bytes.len()))?;
        let label = Self { writer: words[0], key: words[1], version: words[2] };
        let hash = label.hash(words[3]);
        if (words[4], words[5]) != (hash, !hash) {
            return Err(format!("a damaged head: {:?}", &bytes[..HEAD]));
        }
        Ok((label, words[3] as usize))
    }

    /// Compares a part of the value behind its head.
    pub(super) fn check_part(self, len: usize, offset: usize, part: &[u8]) -> Result<(), String> {
        let start = (self.hash(len as u64) % STARTS) as usize + offset;
        let expected = &BLOCK[start..start + part.len()];
        if part == expected {
            return Ok(());
        }
        let first = part.iter().zip(expected).position(|(found, wanted)| found != wanted).unwrap_or(0);
        let differing = part.iter().zip(expected).filter(|(found, wanted)| found != wanted).count();
        Err(format!(
            "{label:?} of {len} bytes: {differing} bytes differ, the first at {}",
            offset + first,
            label = self
        ))
    }
}

#[test]
fn values_are_checked_to_the_last_byte() {
    let label = Label { writer: 1, key: 2, version: 3 };
    for len in [HEAD, HEAD + 1, 4096, LONGEST] {
        let value = label.value(len);
        assert_eq!(Label::of(&value), Ok(label));
        let mut other = value.clone();
        other[len - 1] ^= 1;
        assert!(Label::of(&other).is_err());
        assert!(Label::of(&value[..len - 1]).is_err());
    }
    let later = Label { version: 4, ..label }.value(4096);
    let torn = [&label.value(4096)[..1000], &later[1000..]].concat();
    assert!(Label::of(&torn).is_err());
}
