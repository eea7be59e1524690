//! [`BuiltinPolicy`]: the policies of this crate behind one type, chosen by configuration.

use std::fmt;
use std::str::FromStr;

use super::{EvictionPolicy, Fifo, Lru, MergeableOrder, S3Fifo, S3FifoConfig, Tenure, TenureConfig};
use crate::ids::SlotId;

/// Name of a policy in configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// [`Fifo`]: `fifo`.
    Fifo,
    /// [`Lru`]: `lru`.
    Lru,
    /// [`S3Fifo`]: `s3fifo`.
    S3Fifo,
    /// [`Tenure`]: `tenure`.
    #[default]
    Tenure,
}

impl PolicyKind {
    /// Names that parse.
    pub const NAMES: &'static [&'static str] = &["fifo", "lru", "s3fifo", "tenure"];

    /// Policies, in the order of [`NAMES`](Self::NAMES).
    pub const ALL: &'static [PolicyKind] = &[Self::Fifo, Self::Lru, Self::S3Fifo, Self::Tenure];
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PolicyKind::Fifo => "fifo",
            PolicyKind::Lru => "lru",
            PolicyKind::S3Fifo => "s3fifo",
            PolicyKind::Tenure => "tenure",
        })
    }
}

impl FromStr for PolicyKind {
    type Err = ParsePolicyError;

    fn from_str(text: &str) -> Result<Self, ParsePolicyError> {
        match text {
            "fifo" => Ok(PolicyKind::Fifo),
            "lru" => Ok(PolicyKind::Lru),
            "s3fifo" => Ok(PolicyKind::S3Fifo),
            "tenure" => Ok(PolicyKind::Tenure),
            _ => Err(ParsePolicyError(text.into())),
        }
    }
}

/// Error for a text that names no policy. Holds the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsePolicyError(pub String);

impl fmt::Display for ParsePolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown eviction policy {:?}; use one of {}", self.0, PolicyKind::NAMES.join(", "))
    }
}

impl std::error::Error for ParsePolicyError {}

/// Options of [`BuiltinPolicy`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuiltinPolicyConfig {
    /// Policy to use.
    pub kind: PolicyKind,
    /// Options of [`S3Fifo`]; the other policies ignore them.
    pub s3fifo: S3FifoConfig,
    /// Options of [`Tenure`]; the other policies ignore them.
    pub tenure: TenureConfig,
}

impl From<PolicyKind> for BuiltinPolicyConfig {
    fn from(kind: PolicyKind) -> Self {
        Self { kind, ..Self::default() }
    }
}

/// Policy of this crate, chosen by [`PolicyKind`].
#[derive(Debug)]
pub enum BuiltinPolicy {
    /// First in, first out.
    Fifo(Fifo),
    /// Least recently used.
    Lru(Lru),
    /// S3-FIFO: small, main and ghost queue.
    S3Fifo(S3Fifo),
    /// LRU with tenure.
    Tenure(Tenure),
}

macro_rules! each {
    ($self:expr, $inner:ident => $call:expr) => {
        match $self {
            BuiltinPolicy::Fifo($inner) => $call,
            BuiltinPolicy::Lru($inner) => $call,
            BuiltinPolicy::S3Fifo($inner) => $call,
            BuiltinPolicy::Tenure($inner) => $call,
        }
    };
}

impl EvictionPolicy for BuiltinPolicy {
    type Config = BuiltinPolicyConfig;

    fn new(slots: usize, config: &BuiltinPolicyConfig) -> Self {
        match config.kind {
            PolicyKind::Fifo => Self::Fifo(Fifo::new(slots, &())),
            PolicyKind::Lru => Self::Lru(Lru::new(slots, &())),
            PolicyKind::S3Fifo => Self::S3Fifo(S3Fifo::new(slots, &config.s3fifo)),
            PolicyKind::Tenure => Self::Tenure(Tenure::new(slots, &config.tenure)),
        }
    }

    fn insert(&mut self, slot: SlotId, bytes: u64) {
        each!(self, inner => inner.insert(slot, bytes))
    }

    fn touch(&mut self, slot: SlotId) {
        each!(self, inner => inner.touch(slot))
    }

    fn remove(&mut self, slot: SlotId) {
        each!(self, inner => inner.remove(slot))
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        each!(self, inner => inner.evict(allowed))
    }

    fn len(&self) -> usize {
        each!(self, inner => inner.len())
    }
}

impl MergeableOrder for BuiltinPolicy {
    fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        each!(self, inner => inner.insert_hashed(slot, bytes, key_hash))
    }

    fn set_time(&mut self, now: u64) {
        each!(self, inner => inner.set_time(now))
    }

    fn victim_since(&self) -> Option<u64> {
        each!(self, inner => inner.victim_since())
    }

    fn heeds_use(&self) -> bool {
        each!(self, inner => inner.heeds_use())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_by_name() {
        assert_eq!(PolicyKind::NAMES.len(), PolicyKind::ALL.len());
        for (name, kind) in PolicyKind::NAMES.iter().zip(PolicyKind::ALL) {
            assert_eq!(name.parse(), Ok(*kind));
            assert_eq!(kind.to_string(), *name);
        }
        let error = "LRU".parse::<PolicyKind>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown eviction policy \"LRU\"; use one of fifo, lru, s3fifo, tenure"
        );
    }

    #[test]
    fn config_selects() {
        let of = |kind: PolicyKind| BuiltinPolicy::new(4, &kind.into());
        assert!(matches!(of(PolicyKind::Fifo), BuiltinPolicy::Fifo(_)));
        assert!(matches!(of(PolicyKind::Lru), BuiltinPolicy::Lru(_)));
        assert!(matches!(of(PolicyKind::default()), BuiltinPolicy::Tenure(_)));
        assert!(matches!(of(PolicyKind::S3Fifo), BuiltinPolicy::S3Fifo(_)));
    }
}
