//! Descriptions of settings. A table has one row per setting: its names, default, effect in words
//! and effect in code. Flags, keys of files, environment variables, help and documents come from
//! the rows.
//!
//! A table belongs to the type that its rows set: the master's to its configuration, the engine's
//! to its builder, the client's to its settings. The type decides where a setting applies.

mod environment;
pub mod values;

use std::fmt;

pub use self::environment::Environment;
use self::values::{Parsed, switch};

/// A setting of `T`: a row of a table that [`settings!`](crate::settings!) makes.
pub struct Setting<T: 'static> {
    /// Name: a flag and the key in a file, or an environment variable.
    pub name: &'static str,
    /// Older names.
    pub older: &'static [&'static str],
    /// Environment variables of Mooncake C++ that set the flag, too.
    pub variables: &'static [&'static str],
    /// Default value as text.
    pub default: &'static str,
    /// Effect in words.
    pub help: &'static str,
    /// Effect in code.
    pub effect: Effect<T>,
}

/// Effect of a setting.
pub enum Effect<T> {
    /// Assignment to a field.
    Sets(fn(&mut T, &str) -> Parsed<()>),
    /// Read by name, together with the settings on which its meaning depends.
    Read,
    /// Switch of a missing feature: only the default is accepted. The text names the feature.
    Off(&'static str),
    /// Absence of an effect; the text gives the reason. The value must still be valid.
    Idle(&'static str, fn(&str) -> Parsed<()>),
}

impl<T> fmt::Debug for Setting<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl<T> Setting<T> {
    /// Returns the name, then the older names.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.older.iter().copied())
    }

    /// Returns whether the setting is a switch: as a flag, it needs no value.
    pub fn is_switch(&self) -> bool {
        matches!(self.default, "true" | "false")
    }

    /// Returns whether the setting has no effect.
    pub fn is_idle(&self) -> bool {
        matches!(self.effect, Effect::Idle(..))
    }

    /// Returns the effect in words, with the reason if the setting has none.
    pub fn remark(&self) -> Option<String> {
        match self.effect {
            Effect::Sets(_) | Effect::Read => None,
            Effect::Off(missing) => Some(format!("only the default is accepted: {missing}")),
            Effect::Idle(why, _) => Some(format!("no effect: {why}")),
        }
    }

    /// Applies a value to `target`.
    ///
    /// # Errors
    /// Returns the reason why the value is refused.
    pub fn apply(&self, target: &mut T, text: &str) -> Parsed<()> {
        match self.effect {
            Effect::Sets(set) => set(target, text),
            Effect::Read => Ok(()),
            Effect::Idle(_, check) => check(text),
            Effect::Off(missing) => {
                let same = text == self.default
                    || (self.is_switch() && switch(text).is_ok_and(|on| switch(self.default) == Ok(on)));
                if same {
                    return Ok(());
                }
                Err(format!("{missing}; leave it out (its only value is {:?})", self.default))
            }
        }
    }
}

/// Applies the variables of a table to `target`. The first name of a setting that is set counts.
/// Returns a text about each value that is invalid and was ignored.
pub fn apply<T>(table: &[Setting<T>], target: &mut T, environment: &Environment) -> Vec<String> {
    let mut ignored = Vec::new();
    for setting in table {
        let set = setting.names().find_map(|name| Some((name, environment.get(name)?)));
        let Some((name, value)) = set else { continue };
        if let Err(why) = setting.apply(target, value) {
            ignored.push(format!("{name}={value} is ignored: {why}"));
        }
    }
    ignored
}

/// Makes a table of [`Setting`]s.
///
/// A row has the effect in words as doc comment, then the name, older names after `|`, variables of
/// Mooncake C++ in brackets, the default after a colon, and the [`Effect`]:
///
/// ```
/// use mooncake_core::settings::{Effect::*, Setting, values::*};
///
/// #[derive(Default)]
/// struct Config {
///     port: u16,
///     threads: usize,
/// }
///
/// const SETTINGS: &[Setting<Config>] = mooncake_core::settings! {
///     /// RPC port
///     rpc_port | port: "50051" => mooncake_core::set!(port = number),
///     /// RPC threads, 1 at least
///     rpc_threads [MC_THREADS]: "1" => mooncake_core::set!(|config, text| config.threads = within(text, 1, 64)?),
///     /// Small pages
///     small_pages: "true" => Off("large pages are not built"),
/// };
///
/// let mut config = Config::default();
/// SETTINGS[0].apply(&mut config, "7").unwrap();
/// assert!(SETTINGS[1].apply(&mut config, "0").is_err());
/// assert_eq!((config.port, config.threads, SETTINGS[0].help), (7, 0, "RPC port"));
/// ```
#[macro_export]
macro_rules! settings {
    ($(
        $(#[doc = $help:literal])+
        $name:ident $(| $older:ident)* $([$($variable:ident),+])? : $default:literal => $effect:expr
    ),* $(,)?) => {
        &[$($crate::settings::Setting {
            name: stringify!($name),
            older: &[$(stringify!($older)),*],
            variables: &[$($(stringify!($variable)),+)?],
            default: $default,
            help: concat!($($help),+).trim_ascii_start(),
            effect: $effect,
        }),*]
    };
}

/// Makes the [`Effect`] of a row that sets a field: `set!(field = parser)`, or an assignment that
/// may fail, `set!(|target, text| target.field = parser(text)?)`.
#[macro_export]
macro_rules! set {
    (|$target:ident, $text:ident| $assignment:expr) => {
        $crate::settings::Effect::Sets(|$target, $text| {
            $assignment;
            Ok(())
        })
    };
    ($($field:ident).+ = $parse:expr) => {
        $crate::settings::Effect::Sets(|target, text| {
            target.$($field).+ = $parse(text)?;
            Ok(())
        })
    };
}

#[cfg(test)]
mod tests {
    use super::Effect::*;
    use super::values::*;
    use super::*;

    #[derive(Debug, Default, PartialEq)]
    struct Config {
        port: u16,
        ratio: f64,
    }

    const SETTINGS: &[Setting<Config>] = crate::settings! {
        /// Port
        port | old_port: "1" => set!(port = number),
        /// Share of a long
        /// sentence
        ratio [SHARE]: "0.5" => set!(|config, text| config.ratio = ratio(text)?),
        /// Missing
        missing: "false" => Off("it is not built"),
        /// Idle
        idle: "1" => Idle("for no reason", check::<u8>),
        /// Read
        read: "" => Read,
    };

    #[test]
    fn a_row_has_names_help_and_an_effect() {
        let [port, share, ..] = SETTINGS else { panic!("two rows at least") };
        assert_eq!(port.names().collect::<Vec<_>>(), ["port", "old_port"]);
        assert_eq!((share.help, share.variables), ("Share of a long sentence", &["SHARE"][..]));
        let refused = |at: usize, text| SETTINGS[at].apply(&mut Config::default(), text).unwrap_err();
        assert!(refused(0, "70000").contains("too large"));
        assert!(refused(2, "true").starts_with("it is not built; leave it out"));
        assert!(refused(3, "300").contains("too large"));
        SETTINGS[2].apply(&mut Config::default(), "off").unwrap();
        assert_eq!(SETTINGS[3].remark().unwrap(), "no effect: for no reason");
        assert!(SETTINGS[4].remark().is_none());
    }

    #[test]
    fn the_environment_sets_the_first_name_that_is_set() {
        let mut config = Config::default();
        let variables = [("old_port", "2"), ("port", "3"), ("ratio", "2"), ("idle", "")];
        let ignored = apply(SETTINGS, &mut config, &variables.into_iter().collect());
        assert_eq!(config, Config { port: 3, ratio: 0.0 });
        assert_eq!(ignored, ["ratio=2 is ignored: must be a number between 0 and 1"]);
        let ignored = apply(SETTINGS, &mut config, &[("port", ""), ("old_port", "2")].into_iter().collect());
        assert_eq!((config.port, ignored.len()), (2, 0), "an empty variable counts as unset");
    }
}
