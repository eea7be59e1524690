//! A flag of the master.

use super::draft::Draft;
use super::values::{Parsed, switch};

/// A flag of `mooncake_master`.
#[derive(Debug)]
pub struct Flag {
    /// Name without dashes; also the key in a configuration file.
    pub name: &'static str,
    /// Older names of the flag.
    pub aliases: &'static [&'static str],
    /// Variables of Mooncake C++ that set the flag, beside [`Flag::variable`].
    pub variables: &'static [&'static str],
    /// Default value as text.
    pub default: &'static str,
    /// Effect in one line.
    pub help: &'static str,
    /// State of the flag in this master.
    pub state: FlagState,
    set: fn(&mut Draft, &str) -> Parsed<()>,
}

/// State of a flag of Mooncake C++ in this master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagState {
    /// Supported.
    Works,
    /// Switch of a missing feature: only the default is accepted. The text names the feature.
    Off(&'static str),
    /// Accepted without effect; the text gives the reason.
    Idle(&'static str),
}

/// Flags of one subject, as `--help` shows them.
#[derive(Debug)]
pub struct Group {
    /// Subject of the group.
    pub name: &'static str,
    /// Flags of the group.
    pub flags: &'static [Flag],
}

impl Flag {
    /// Returns whether the flag is a switch: it needs no value, and `--no<name>` turns it off.
    pub fn is_switch(&self) -> bool {
        matches!(self.default, "true" | "false")
    }

    /// Returns the environment variable: `MC_MASTER_` and the name in capitals.
    pub fn variable(&self) -> String {
        format!("MC_MASTER_{}", self.name.to_ascii_uppercase())
    }

    /// Returns the name, then the older names.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }

    /// Returns the reason why the flag is not supported or has no effect.
    pub fn remark(&self) -> Option<String> {
        match self.state {
            FlagState::Works => None,
            FlagState::Off(missing) => Some(format!("only the default is accepted: {missing}")),
            FlagState::Idle(why) => Some(format!("no effect: {why}")),
        }
    }

    pub(super) fn apply(&self, draft: &mut Draft, value: &str) -> Parsed<()> {
        if let FlagState::Off(missing) = self.state {
            let same = value == self.default
                || (self.is_switch() && switch(value).is_ok_and(|on| switch(self.default) == Ok(on)));
            return if same {
                Ok(())
            } else {
                Err(format!("{missing}; leave it out (its only value is {:?})", self.default))
            };
        }
        (self.set)(draft, value)
    }

    pub(super) const fn or(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }

    pub(super) const fn from(mut self, variables: &'static [&'static str]) -> Self {
        self.variables = variables;
        self
    }
}

pub(super) const fn flag(
    name: &'static str,
    default: &'static str,
    help: &'static str,
    set: fn(&mut Draft, &str) -> Parsed<()>,
) -> Flag {
    Flag { name, aliases: &[], variables: &[], default, help, state: FlagState::Works, set }
}

/// Returns the switch of a missing feature.
pub(super) const fn off(
    name: &'static str,
    default: &'static str,
    help: &'static str,
    missing: &'static str,
) -> Flag {
    Flag { state: FlagState::Off(missing), ..flag(name, default, help, |_, _| Ok(())) }
}

/// Returns a setting without effect. Its value must still pass `check`.
pub(super) const fn idle(
    name: &'static str,
    default: &'static str,
    help: &'static str,
    why: &'static str,
    check: fn(&mut Draft, &str) -> Parsed<()>,
) -> Flag {
    Flag { state: FlagState::Idle(why), ..flag(name, default, help, check) }
}
