//! [`BuiltinAllocator`]: the allocators of this crate behind one type, chosen by configuration.

use std::fmt;
use std::str::FromStr;

use super::{AllocError, BestFit, Extent, SegmentAllocator, Tlsf, TlsfConfig};

/// Name of an allocator in configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AllocatorKind {
    /// [`Tlsf`]: `tlsf`, or `offset`, the name of the default in Mooncake C++.
    #[default]
    Tlsf,
    /// [`BestFit`]: `best_fit`.
    BestFit,
}

impl AllocatorKind {
    /// Names that parse, preferred ones first.
    pub const NAMES: &'static [&'static str] = &["tlsf", "best_fit", "offset"];
}

impl fmt::Display for AllocatorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            AllocatorKind::Tlsf => "tlsf",
            AllocatorKind::BestFit => "best_fit",
        })
    }
}

impl FromStr for AllocatorKind {
    type Err = ParseAllocatorError;

    fn from_str(text: &str) -> Result<Self, ParseAllocatorError> {
        match text {
            "tlsf" | "offset" => Ok(AllocatorKind::Tlsf),
            "best_fit" => Ok(AllocatorKind::BestFit),
            _ => Err(ParseAllocatorError(text.into())),
        }
    }
}

/// Error for a text that names no allocator. Holds the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseAllocatorError(pub String);

impl fmt::Display for ParseAllocatorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown allocator {:?}; use one of {}", self.0, AllocatorKind::NAMES.join(", "))
    }
}

impl std::error::Error for ParseAllocatorError {}

/// Options of [`BuiltinAllocator`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuiltinAllocatorConfig {
    /// Allocator to use.
    pub kind: AllocatorKind,
    /// Options of [`Tlsf`]; the other allocators ignore them.
    pub tlsf: TlsfConfig,
}

impl From<AllocatorKind> for BuiltinAllocatorConfig {
    fn from(kind: AllocatorKind) -> Self {
        Self { kind, ..Self::default() }
    }
}

/// Allocator of this crate, chosen by [`AllocatorKind`].
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a segment has one allocator, and a box would add a pointer access to each call"
)]
pub enum BuiltinAllocator {
    /// Two-level segregated fit, in constant time.
    Tlsf(Tlsf),
    /// Best fit, with the least waste.
    BestFit(BestFit),
}

macro_rules! each {
    ($self:expr, $inner:ident => $call:expr) => {
        match $self {
            BuiltinAllocator::Tlsf($inner) => $call,
            BuiltinAllocator::BestFit($inner) => $call,
        }
    };
}

impl SegmentAllocator for BuiltinAllocator {
    type Config = BuiltinAllocatorConfig;

    fn new(capacity: u64, config: &BuiltinAllocatorConfig) -> Self {
        match config.kind {
            AllocatorKind::Tlsf => Self::Tlsf(Tlsf::new(capacity, &config.tlsf)),
            AllocatorKind::BestFit => Self::BestFit(BestFit::new(capacity, &())),
        }
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        each!(self, inner => inner.allocate(len, align))
    }

    fn release(&mut self, extent: Extent) {
        each!(self, inner => inner.release(extent))
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        each!(self, inner => inner.reserve(extent))
    }

    fn capacity(&self) -> u64 {
        each!(self, inner => inner.capacity())
    }

    fn used(&self) -> u64 {
        each!(self, inner => inner.used())
    }

    fn largest_free(&self) -> u64 {
        each!(self, inner => inner.largest_free())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_by_name() {
        assert_eq!("offset".parse(), Ok(AllocatorKind::Tlsf));
        for kind in [AllocatorKind::Tlsf, AllocatorKind::BestFit] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert!(AllocatorKind::NAMES.iter().all(|name| name.parse::<AllocatorKind>().is_ok()));
        let error = "cachelib".parse::<AllocatorKind>().unwrap_err();
        assert_eq!(error.to_string(), "unknown allocator \"cachelib\"; use one of tlsf, best_fit, offset");
    }

    #[test]
    fn config_selects() {
        let best = BuiltinAllocator::new(10, &AllocatorKind::BestFit.into());
        assert!(matches!(best, BuiltinAllocator::BestFit(_)));
        let default = BuiltinAllocator::new(10, &BuiltinAllocatorConfig::default());
        assert!(matches!(default, BuiltinAllocator::Tlsf(_)));
    }
}
