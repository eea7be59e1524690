//! Identity of a process behind an address.
//!
//! An address of memory has a meaning in one process only, and another process may listen on the
//! same host and port later. A transport draws an [`Instance`], publishes it in its descriptor, and
//! each side of a connection between nodes of this project names the instance that it expects.
//! Mooncake C++ has no instances and ignores the keys.

use std::fmt;
use std::io;

use mooncake_core::clock::Rng;
use mooncake_core::{Error, Result};
use serde_json::Value;

use crate::SegmentDesc;

/// Identity of one transport of one process: a random number, printed as 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instance(pub u64);

impl Instance {
    /// Draws a random instance.
    pub fn draw() -> Self {
        Self(Rng::from_os().next_u64())
    }

    /// Parses 16 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let is_hex = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        is_hex.then(|| u64::from_str_radix(text, 16).ok().map(Self))?
    }

    /// Parses a JSON string of 16 hexadecimal digits.
    pub fn from_json(value: &Value) -> Option<Self> {
        value.as_str().and_then(Self::parse)
    }

    /// Returns the instance that a descriptor has under a key; `None` without the key, as in
    /// descriptors of Mooncake C++.
    ///
    /// # Errors
    /// Returns `Invalid` if the value is not an instance.
    pub fn of_segment(desc: &SegmentDesc, key: &str) -> Result<Option<Self>> {
        let Some(value) = desc.extra.get(key) else { return Ok(None) };
        Self::from_json(value).map(Some).ok_or_else(|| {
            let expected = "expected 16 hexadecimal digits; publish the segment again";
            Error::invalid(format!(
                "cannot connect to segment {:?}: invalid {key}. value={value} {expected}",
                desc.name
            ))
        })
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Mismatch between the expected process and the one at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherInstance {
    /// Expected instance.
    pub expected: Instance,
    /// Instance of the process found, unknown if it does not tell one.
    pub found: Option<Instance>,
}

impl fmt::Display for OtherInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "another process has the port now. expected_instance={} found_instance=", self.expected)?;
        match self.found {
            Some(found) => write!(f, "{found}; look the segment up again"),
            None => write!(f, "unknown; look the segment up again"),
        }
    }
}

impl std::error::Error for OtherInstance {}

impl OtherInstance {
    /// Returns the mismatch that an error of a socket carries, if any.
    pub fn from_error(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<OtherInstance> for io::Error {
    fn from(other: OtherInstance) -> Self {
        io::Error::new(io::ErrorKind::ConnectionRefused, other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_sixteen_digits() {
        let instance = Instance(0xabc);
        assert_eq!(Instance::parse(&instance.to_string()), Some(instance));
        for text in
            ["", "abc", "+000000000000abc", "0000000000000abcd", "000000000000xabc", "00000000000000é"]
        {
            assert_eq!(Instance::parse(text), None, "{text:?}");
        }
        assert_ne!(Instance::draw(), Instance::draw());
    }

    #[test]
    fn invalid_instance_error_states_value() {
        let mut desc = SegmentDesc::new("host:1");
        assert_eq!(Instance::of_segment(&desc, "key").unwrap(), None);
        desc.extra.insert("key".into(), Instance(7).to_string().into());
        assert_eq!(Instance::of_segment(&desc, "key").unwrap(), Some(Instance(7)));
        desc.extra.insert("key".into(), 7.into());
        let error = Instance::of_segment(&desc, "key").unwrap_err();
        assert!(error.to_string().contains("invalid key. value=7"), "{error}");
    }
}
