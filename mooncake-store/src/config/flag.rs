//! One flag of the master, and what can be said of it.

use super::draft::Draft;
use super::values::{Parsed, switch};

/// One flag of `mooncake_master`.
#[derive(Debug)]
pub struct Flag {
    /// Its name, without dashes; also its key in a configuration file.
    pub name: &'static str,
    /// Older names that mean the same.
    pub aliases: &'static [&'static str],
    /// Variables of the existing system that set it, beside [`Flag::variable`].
    pub variables: &'static [&'static str],
    /// Its default, as it would be written.
    pub default: &'static str,
    /// What it does, in a line.
    pub help: &'static str,
    /// What it is to this master.
    pub state: FlagState,
    set: fn(&mut Draft, &str) -> Parsed<()>,
}

/// What a flag of the existing system is to this master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagState {
    /// It does what it says.
    Works,
    /// The switch of something that is not built: only its default is taken. The text says what is missing.
    Off(&'static str),
    /// Taken and without effect; the text says why.
    Idle(&'static str),
}

/// Flags of one subject, as `--help` shows them.
#[derive(Debug)]
pub struct Group {
    /// The subject.
    pub name: &'static str,
    /// Its flags.
    pub flags: &'static [Flag],
}

impl Flag {
    /// Whether it is a switch: may stand without a value, and be turned off as `--no<name>`.
    pub fn is_switch(&self) -> bool {
        matches!(self.default, "true" | "false")
    }

    /// The variable that sets it: `MC_MASTER_` and its name in capitals.
    pub fn variable(&self) -> String {
        format!("MC_MASTER_{}", self.name.to_ascii_uppercase())
    }

    /// Its name, then its older ones.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }

    /// What there is to say beside what it does: why it can only be left as it is, or has no effect.
    pub fn remark(&self) -> Option<String> {
        match self.state {
            FlagState::Works => None,
            FlagState::Off(missing) => {
                Some(format!("not supported, only the default is accepted: {missing}"))
            }
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

/// The switch of something that is not built.
pub(super) const fn off(
    name: &'static str,
    default: &'static str,
    help: &'static str,
    missing: &'static str,
) -> Flag {
    Flag { state: FlagState::Off(missing), ..flag(name, default, help, |_, _| Ok(())) }
}

/// A setting without effect: a knob of something that is switched off, or of a thing done otherwise here. What it is set to
/// must still be a value, which `check` says.
pub(super) const fn idle(
    name: &'static str,
    default: &'static str,
    help: &'static str,
    why: &'static str,
    check: fn(&mut Draft, &str) -> Parsed<()>,
) -> Flag {
    Flag { state: FlagState::Idle(why), ..flag(name, default, help, check) }
}
