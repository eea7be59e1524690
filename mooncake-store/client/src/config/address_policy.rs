//! Consequence of an address that does not lead to its client.

use std::str::FromStr;

/// Consequence of an address that does not lead to its client, as the master finds after a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressPolicy {
    /// The address is not checked.
    Off,
    /// The client logs a warning with both addresses.
    #[default]
    Warn,
    /// The client does not join the cluster.
    Refuse,
}

impl FromStr for AddressPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "warn" => Ok(Self::Warn),
            "refuse" => Ok(Self::Refuse),
            _ => Err("must be off, warn or refuse".into()),
        }
    }
}
