//! Keys of blocks of KV caches, as connectors build them.
//!
//! Formats of vLLM 0.33.0 (`MooncakeStoreConnector`), SGLang 0.5.23 (HiCache) and LMCache 0.5.6 (in
//! the process, and its multi-process server).

use std::str;

/// Digits of a hash of 64 bits.
const DIGITS: usize = 16;
/// Digits of a hash of SGLang, SHA-256.
const SGLANG_DIGITS: usize = 64;
/// Digits of the ranks in a key of LMCache's server.
const SERVER_RANK_DIGITS: usize = 8;

/// Program that builds keys of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connector {
    /// `[PREFIX@]MODEL[@store_NAME:VALUE..]@tp_rank:N@pcpN@dcpN@pp_rank:N@group:N@HASH`.
    Vllm,
    /// `[TAG_][MODEL_]HASH_RANKS_NAME`, such as `HASH_0_k` or `HASH__k`.
    Sglang,
    /// `MODEL@WORKERS@WORKER@HASH@TYPE[@LAYER][@TAG%VALUE..]`.
    LmCache,
    /// `MODEL@RANKS@GROUP@HASH[@SALT]`, all numbers hexadecimal.
    LmCacheServer,
}

/// Parts of the key of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockKey<'a> {
    pub(crate) connector: Connector,
    /// Hash of the block and of those before it, in hexadecimal digits, possibly with a sign.
    pub(crate) hash: &'a str,
    /// Text before the hash and its separator.
    pub(crate) before: &'a str,
    /// Text behind the hash and its separator.
    pub(crate) after: &'a str,
    /// Name of the model as the engine has it.
    pub(crate) model: Option<&'a str>,
    pub(crate) tp_rank: Option<u64>,
    pub(crate) pp_rank: Option<u64>,
    /// Rank among all workers of the model.
    pub(crate) worker: Option<u64>,
    /// Group of layers with a cache of their own.
    pub(crate) cache_group: Option<u64>,
}

impl<'a> BlockKey<'a> {
    /// Returns the parts of a key, or `None` if no connector builds such keys.
    pub(crate) fn parse(key: &'a str) -> Option<Self> {
        Self::of_vllm(key).or_else(|| Self::of_lmcache(key)).or_else(|| Self::of_sglang(key))
    }

    fn new(connector: Connector, key: &'a str, hash: &'a str, at: usize) -> Self {
        let before = &key[..at];
        let after = &key[at + hash.len()..];
        Self {
            connector,
            hash,
            before: before.strip_suffix(['@', '_']).unwrap_or(before),
            after: after.strip_prefix(['@', '_']).unwrap_or(after),
            model: None,
            tp_rank: None,
            pp_rank: None,
            worker: None,
            cache_group: None,
        }
    }

    fn of_vllm(key: &'a str) -> Option<Self> {
        let (before, hash) = key.rsplit_once('@')?;
        if !is_hex(hash) {
            return None;
        }
        let mut fields = before.rsplit('@');
        let cache_group = number(fields.next()?.strip_prefix("group:")?)?;
        let pp_rank = number(fields.next()?.strip_prefix("pp_rank:")?)?;
        number(fields.next()?.strip_prefix("dcp")?)?;
        number(fields.next()?.strip_prefix("pcp")?)?;
        let tp_rank = number(fields.next()?.strip_prefix("tp_rank:")?)?;
        // The layout of the values, if it is not that of one rank.
        let model = fields.find(|field| !field.starts_with("store_"))?;
        Some(Self {
            model: Some(model).filter(|name| !name.is_empty()),
            tp_rank: Some(tp_rank),
            pp_rank: Some(pp_rank),
            cache_group: Some(cache_group),
            ..Self::new(Connector::Vllm, key, hash, before.len() + 1)
        })
    }

    fn of_lmcache(key: &'a str) -> Option<Self> {
        let mut fields = key.split('@');
        let model = fields.next().filter(|name| !name.is_empty())?;
        let [workers, worker, hash] = [fields.next()?, fields.next()?, fields.next()?];
        if !is_hex(hash.strip_prefix('-').unwrap_or(hash)) {
            return None;
        }
        let at = model.len() + workers.len() + worker.len() + 3;
        if workers.len() == SERVER_RANK_DIGITS && is_hex(workers) && is_hex(worker) {
            // Bits 24 to 31 are the number of workers, 16 to 23 the rank among them.
            let ranks = u64::from_str_radix(workers, 16).ok()?;
            return Some(Self {
                model: Some(model),
                worker: Some((ranks >> 16) & 0xff),
                cache_group: u64::from_str_radix(worker, 16).ok(),
                ..Self::new(Connector::LmCacheServer, key, hash, at)
            });
        }
        number(workers)?;
        fields.next().filter(|element| element.starts_with(|first: char| first.is_ascii_alphabetic()))?;
        Some(Self {
            model: Some(model),
            worker: Some(number(worker)?),
            ..Self::new(Connector::LmCache, key, hash, at)
        })
    }

    fn of_sglang(key: &'a str) -> Option<Self> {
        let mut at = 0;
        for part in key.split('_') {
            let end = at + part.len();
            if part.len() == SGLANG_DIGITS && is_hex(part) && key[end..].starts_with('_') {
                let block = Self::new(Connector::Sglang, key, part, at);
                // `_RANK_k`, or `_RANK_STAGE_k` with several stages; caches that ranks share have
                // no rank, and other pools have other names.
                let [tp_rank, pp_rank] = match block.after.split('_').collect::<Vec<_>>()[..] {
                    [rank, "k" | "v"] => [number(rank), None],
                    [rank, stage, "k" | "v"] => [number(rank), number(stage)],
                    _ => [None, None],
                };
                return Some(Self { tp_rank, pp_rank, ..block });
            }
            at = end + 1;
        }
        None
    }

    /// Returns the hash as the engine reports it in events with hashes of 64 bits.
    pub(crate) fn hash64(&self) -> Option<u64> {
        let (sign, digits) = self.hash.strip_prefix('-').map_or((1, self.hash), |digits| (u64::MAX, digits));
        let part = match self.connector {
            Connector::Sglang => digits.get(..DIGITS)?,
            _ => digits.get(digits.len().saturating_sub(DIGITS)..)?,
        };
        u64::from_str_radix(part, 16).ok().map(|value| value.wrapping_mul(sign))
    }
}

/// Returns the parts of the key of a block, and the hash of 64 bits that a key contains: that of
/// the block, or the whole key as a number, decimal or hexadecimal after `0x`, as in Mooncake C++.
pub(crate) fn read(key: &[u8]) -> (Option<BlockKey<'_>>, Option<u64>) {
    let Ok(text) = str::from_utf8(key) else { return (None, None) };
    let block = BlockKey::parse(text);
    (block, block.map_or_else(|| number_in(text), |block| block.hash64()))
}

fn number_in(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    // The parser would accept a sign.
    digits
        .starts_with(|first: char| first.is_digit(radix))
        .then(|| u64::from_str_radix(digits, radix).ok())?
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_hexdigit())
}

fn number(text: &str) -> Option<u64> {
    // The parser would accept a sign.
    text.starts_with(|first: char| first.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHA: &str = "00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210";

    #[test]
    fn hashes_of_keys() {
        for (key, hash) in [
            ("12345", Some(12345)),
            ("0x2a", Some(42)),
            ("0XFF", Some(255)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("", None),
            ("0x", None),
            ("-1", None),
            ("+1", None),
            ("0x-1", None),
            ("123abc", None),
        ] {
            assert_eq!(read(key.as_bytes()), (None, hash), "{key}");
        }
        assert_eq!(read(&[0xff]), (None, None));
    }

    #[test]
    fn keys_of_vllm() {
        let plain = format!("Qwen/Qwen2.5-7B@tp_rank:1@pcp0@dcp0@pp_rank:2@group:3@{SHA}");
        let block = BlockKey::parse(&plain).unwrap();
        assert_eq!((block.connector, block.model), (Connector::Vllm, Some("Qwen/Qwen2.5-7B")));
        assert_eq!((block.tp_rank, block.pp_rank, block.cache_group), (Some(1), Some(2), Some(3)));
        assert_eq!((block.hash, block.before), (SHA, plain.rsplit_once('@').unwrap().0));
        assert_eq!(block.hash64(), Some(0xfedc_ba98_7654_3210));
        let long = format!(
            "team@m@store_tp:4@store_pp:1@store_format:x@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{SHA}"
        );
        assert_eq!(BlockKey::parse(&long).unwrap().model, Some("m"));
        for other in ["m@tp_rank:x@pcp0@dcp0@pp_rank:0@group:0@ab", "m@tp_rank:0@pcp0@dcp0@pp_rank:0@ab"] {
            assert_eq!(BlockKey::parse(other), None, "{other}");
        }
    }

    #[test]
    fn keys_of_lmcache() {
        let block = BlockKey::parse("meta/L@8@5@1f2e@bfloat16@kind%chat").unwrap();
        assert_eq!((block.connector, block.model), (Connector::LmCache, Some("meta/L")));
        assert_eq!((block.worker, block.hash64()), (Some(5), Some(0x1f2e)));
        assert_eq!((block.before, block.after), ("meta/L@8@5", "bfloat16@kind%chat"));
        // Python prints a negative hash with a sign.
        let negative = BlockKey::parse("m@1@0@-2@half").unwrap();
        assert_eq!(negative.hash64(), Some((-2_i64).cast_unsigned()));
        let server = format!("m@08050401@1@{SHA}@alice");
        let block = BlockKey::parse(&server).unwrap();
        assert_eq!((block.connector, block.worker), (Connector::LmCacheServer, Some(5)));
        assert_eq!((block.cache_group, block.after), (Some(1), "alice"));
        assert_eq!(block.hash64(), Some(0xfedc_ba98_7654_3210));
        assert_eq!(BlockKey::parse("m@1@0@ab"), None);
        assert_eq!(BlockKey::parse("m@1@0@ab@7"), None);
    }

    #[test]
    fn keys_of_sglang() {
        for (before, after, ranks) in [
            ("", "0_k", (Some(0), None)),
            ("tag_meta-L", "3_v", (Some(3), None)),
            ("meta-L", "3_1_v", (Some(3), Some(1))),
            ("m", "_k", (None, None)),
            ("m", "0_temporal", (None, None)),
        ] {
            let key = format!("{before}{}{SHA}_{after}", if before.is_empty() { "" } else { "_" });
            let block = BlockKey::parse(&key).unwrap();
            assert_eq!((block.connector, block.hash), (Connector::Sglang, SHA), "{key}");
            assert_eq!((block.before, block.after), (before, after), "{key}");
            assert_eq!((block.tp_rank, block.pp_rank), ranks, "{key}");
            assert_eq!((block.model, block.hash64()), (None, Some(0x0011_2233_4455_6677)), "{key}");
        }
        assert_eq!(BlockKey::parse(SHA), None, "no part of a cache is named");
    }
}
