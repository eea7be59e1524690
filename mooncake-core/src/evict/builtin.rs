//! [`BuiltinPolicy`]: the policies of this crate behind one type, chosen by configuration.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::{
    CustomOrder, CustomPolicy, EvictionPolicy, Fifo, Gittins, GittinsConfig, KeySample, Learned, Lru,
    MergeableOrder, Place, S3Fifo, S3FifoConfig, Tenure, TenureConfig,
};
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
    Tenure,
    /// [`Gittins`]: `gittins`.
    #[default]
    Gittins,
}

impl PolicyKind {
    /// Names that parse.
    pub const NAMES: &'static [&'static str] = &["fifo", "lru", "s3fifo", "tenure", "gittins"];

    /// Policies, in the order of [`NAMES`](Self::NAMES).
    pub const ALL: &'static [PolicyKind] =
        &[Self::Fifo, Self::Lru, Self::S3Fifo, Self::Tenure, Self::Gittins];
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PolicyKind::Fifo => "fifo",
            PolicyKind::Lru => "lru",
            PolicyKind::S3Fifo => "s3fifo",
            PolicyKind::Tenure => "tenure",
            PolicyKind::Gittins => "gittins",
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
            "gittins" => Ok(PolicyKind::Gittins),
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
    /// Options of [`Gittins`]; the other policies ignore them.
    pub gittins: GittinsConfig,
    /// Policy of the application. It replaces `kind`.
    pub custom: Option<CustomPolicy>,
}

impl From<PolicyKind> for BuiltinPolicyConfig {
    fn from(kind: PolicyKind) -> Self {
        Self { kind, ..Self::default() }
    }
}

impl From<CustomPolicy> for BuiltinPolicyConfig {
    fn from(custom: CustomPolicy) -> Self {
        Self { custom: Some(custom), ..Self::default() }
    }
}

/// Policy of this crate, chosen by [`PolicyKind`], or of the application.
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
    /// Gittins index, learned from the uses.
    Gittins(Box<Gittins>),
    /// Policy of the application.
    Custom(CustomOrder),
}

macro_rules! each {
    ($self:expr, $inner:ident => $call:expr) => {
        match $self {
            BuiltinPolicy::Fifo($inner) => $call,
            BuiltinPolicy::Lru($inner) => $call,
            BuiltinPolicy::S3Fifo($inner) => $call,
            BuiltinPolicy::Tenure($inner) => $call,
            BuiltinPolicy::Gittins($inner) => $call,
            BuiltinPolicy::Custom($inner) => $call,
        }
    };
}

impl EvictionPolicy for BuiltinPolicy {
    type Config = BuiltinPolicyConfig;

    fn new(slots: usize, config: &BuiltinPolicyConfig) -> Self {
        if let Some(custom) = &config.custom {
            return Self::Custom(custom.open(slots));
        }
        match config.kind {
            PolicyKind::Fifo => Self::Fifo(Fifo::new(slots, &())),
            PolicyKind::Lru => Self::Lru(Lru::new(slots, &())),
            PolicyKind::S3Fifo => Self::S3Fifo(S3Fifo::new(slots, &config.s3fifo)),
            PolicyKind::Tenure => Self::Tenure(Tenure::new(slots, &config.tenure)),
            PolicyKind::Gittins => Self::Gittins(Box::new(Gittins::new(slots, &config.gittins))),
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
    fn for_one_cache(config: &BuiltinPolicyConfig) -> BuiltinPolicyConfig {
        BuiltinPolicyConfig {
            gittins: Gittins::for_one_cache(&config.gittins),
            custom: config.custom.as_ref().map(CustomPolicy::for_one_cache),
            ..config.clone()
        }
    }

    fn for_sample(config: &BuiltinPolicyConfig, sample: &Arc<KeySample>) -> BuiltinPolicyConfig {
        BuiltinPolicyConfig {
            gittins: Gittins::for_sample(&config.gittins, sample),
            custom: config.custom.as_ref().map(|custom| custom.for_sample(sample)),
            ..config.clone()
        }
    }

    fn learned(config: &BuiltinPolicyConfig) -> Option<Arc<dyn Learned>> {
        let is_gittins = config.kind == PolicyKind::Gittins && config.custom.is_none();
        is_gittins.then(|| Gittins::learned(&config.gittins))?
    }

    fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        each!(self, inner => inner.insert_hashed(slot, bytes, key_hash))
    }

    fn insert_at(&mut self, slot: SlotId, bytes: u64, key_hash: u64, place: &Place) {
        each!(self, inner => inner.insert_at(slot, bytes, key_hash, place))
    }

    fn touch_at(&mut self, slot: SlotId, place: &Place) {
        each!(self, inner => inner.touch_at(slot, place))
    }

    fn remembers(&self, key_hash: u64) -> bool {
        each!(self, inner => inner.remembers(key_hash))
    }

    fn take_back(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        each!(self, inner => inner.take_back(slot, bytes, key_hash))
    }

    fn parent(&self, slot: SlotId) -> u64 {
        each!(self, inner => inner.parent(slot))
    }

    fn change_children(&mut self, slot: SlotId, more: bool) {
        each!(self, inner => inner.change_children(slot, more))
    }

    fn set_time(&mut self, now: u64) {
        each!(self, inner => inner.set_time(now))
    }

    fn ranks_by_value(&self) -> bool {
        each!(self, inner => inner.ranks_by_value())
    }

    fn victim_value(&self) -> Option<u64> {
        each!(self, inner => inner.victim_value())
    }

    fn value(&self, slot: SlotId) -> Option<u64> {
        each!(self, inner => inner.value(slot))
    }

    fn least_value_of_use(&self, place: &Place) -> u64 {
        each!(self, inner => inner.least_value_of_use(place))
    }

    fn value_since(&self, used: u64) -> Option<u64> {
        each!(self, inner => inner.value_since(used))
    }

    fn value_if_used(&self, key_hash: u64, place: &Place) -> Option<u64> {
        each!(self, inner => inner.value_if_used(key_hash, place))
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
            "unknown eviction policy \"LRU\"; use one of fifo, lru, s3fifo, tenure, gittins"
        );
    }

    #[test]
    fn config_selects() {
        let of = |kind: PolicyKind| BuiltinPolicy::new(4, &kind.into());
        assert!(matches!(of(PolicyKind::Fifo), BuiltinPolicy::Fifo(_)));
        assert!(matches!(of(PolicyKind::Lru), BuiltinPolicy::Lru(_)));
        assert!(matches!(of(PolicyKind::S3Fifo), BuiltinPolicy::S3Fifo(_)));
        assert!(matches!(of(PolicyKind::Tenure), BuiltinPolicy::Tenure(_)));
        assert!(matches!(of(PolicyKind::default()), BuiltinPolicy::Gittins(_)));
    }
}
