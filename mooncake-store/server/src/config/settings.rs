//! What every flag is set to, and who said so: command line, then environment, then file, then default.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use mooncake_core::{Error, Result};

use super::MasterConfig;
use super::draft::Draft;
use super::flag::{Flag, FlagState};
use super::flags::{flag_named, flags};
use super::values::nearest;
use mooncake_client::MAX_TIMEOUT;
use mooncake_master::GRANT_USE;

/// Who set a flag. The later ones win.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody.
    Default,
    /// A configuration file.
    File(Arc<PathBuf>),
    /// A variable of the environment, by name.
    Environment(String),
    /// The command line.
    CommandLine,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => write!(f, "file {}", path.display()),
            Origin::Environment(name) => write!(f, "environment {name}"),
            Origin::CommandLine => f.write_str("command line"),
        }
    }
}

/// One flag and its value.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The flag.
    pub flag: &'static Flag,
    /// Its value, as it was written.
    pub value: String,
    /// Who set it.
    pub origin: Origin,
    /// Whether an older name of it was used; the present name wins then, if the same source has both.
    by_alias: bool,
}

/// The value of every flag. Printed, it is a YAML file that sets the same.
#[derive(Clone, Debug)]
pub struct Settings {
    settings: Vec<Setting>,
    notes: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        let unset = |flag: &'static Flag| Setting {
            flag,
            value: flag.default.into(),
            origin: Origin::Default,
            by_alias: false,
        };
        Self { settings: flags().map(unset).collect(), notes: Vec::new() }
    }
}

impl Settings {
    /// Takes a value from the command line.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, with the nearest known name, when there is no such flag.
    pub fn command_line(&mut self, name: &str, value: &str) -> Result<()> {
        match flag_named(name) {
            Some(flag) => self.set(flag, name, value, Origin::CommandLine),
            None => return Err(unknown(&format!("flag --{name}"), name, "--", "--help lists all")),
        }
        Ok(())
    }

    /// Takes a value from a configuration file.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, with the nearest known key, when there is no such key.
    pub fn file(&mut self, path: &Arc<PathBuf>, key: &str, value: &str) -> Result<()> {
        match flag_named(key).filter(|flag| flag.name != "config_path") {
            Some(flag) => self.set(flag, key, value, Origin::File(path.clone())),
            None => {
                let what = format!("key {key:?} in {}", path.display());
                return Err(unknown(&what, key, "", "mooncake_master --help lists all"));
            }
        }
        Ok(())
    }

    /// Takes a value from a variable of the environment.
    pub(super) fn environment(&mut self, flag: &'static Flag, variable: String, value: &str) {
        self.set(flag, flag.name, value, Origin::Environment(variable));
    }

    /// Adds a sentence for whoever starts the master.
    pub(super) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    fn set(&mut self, flag: &'static Flag, name: &str, value: &str, origin: Origin) {
        let by_alias = name != flag.name;
        // 0 is how the existing master says that the port is not given here.
        if flag.name == "rpc_port" && value == "0" {
            return;
        }
        let Some(setting) = self.settings.iter_mut().find(|setting| setting.flag.name == flag.name) else {
            return;
        };
        if (rank(&origin), !by_alias) >= (rank(&setting.origin), !setting.by_alias) {
            *setting = Setting { flag, value: value.into(), origin, by_alias };
        }
    }

    /// What a flag is set to.
    pub fn value(&self, name: &str) -> Option<&Setting> {
        self.settings.iter().find(|setting| setting.flag.name == name)
    }

    /// Every flag with its value, in the order of the table.
    pub fn all(&self) -> &[Setting] {
        &self.settings
    }

    /// What is to be said at the start: settings without effect or taken as others, variables that are none.
    pub fn notes(&self) -> Vec<String> {
        let idle = self.settings.iter().filter_map(|setting| match setting.flag.state {
            FlagState::Idle(why) if setting.value != setting.flag.default => {
                Some(format!("{} ({}) has no effect: {why}", setting.flag.name, setting.origin))
            }
            _ => None,
        });
        let older = self
            .settings
            .iter()
            .filter(|setting| setting.flag.name == "memory_allocator" && setting.value == "cachelib");
        let older = older.map(|setting| {
            format!(
                "memory_allocator={} ({}) is not built: offset takes its place",
                setting.value, setting.origin
            )
        });
        let short = self.settings.iter().filter(|setting| {
            setting.flag.name == "put_start_release_timeout_sec"
                && setting.value.parse().is_ok_and(|seconds: u64| seconds < GRANT_USE.as_secs())
        });
        let short = short.map(|setting| {
            format!(
                "put_start_release_timeout_sec={} ({}) is taken as {}: clients may write for {} s after the start of a write",
                setting.value,
                setting.origin,
                GRANT_USE.as_secs(),
                MAX_TIMEOUT.as_secs()
            )
        });
        self.notes.iter().cloned().chain(idle).chain(older).chain(short).collect()
    }

    /// Puts all together.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming flag and origin: a value that does not parse, one that contradicts another, or one that asks for
    /// something not built.
    pub fn config(&self) -> Result<MasterConfig> {
        let mut draft = Draft::default();
        for setting in self.settings.iter().filter(|setting| setting.origin != Origin::Default) {
            let Setting { flag, value, origin, .. } = setting;
            flag.apply(&mut draft, value).map_err(|why| {
                Error::invalid(match origin {
                    Origin::CommandLine | Origin::Default => format!("--{}={value}: {why}", flag.name),
                    Origin::File(path) => format!("{}: {}: {value}: {why}", path.display(), flag.name),
                    Origin::Environment(name) => format!("{name}={value} in the environment: {why}"),
                })
            })?;
        }
        draft.finish()
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Setting { flag, value, origin, .. } in &self.settings {
            // The name of the file is no setting of the file.
            let hidden = if flag.name == "config_path" { "# " } else { "" };
            // A JSON string is a YAML string.
            let value = serde_json::Value::from(value.as_str());
            let value = match value.as_str() {
                Some(plain) if is_plain(plain) => plain.to_owned(),
                _ => value.to_string(),
            };
            writeln!(f, "{hidden}{}: {value}  # {origin}", flag.name)?;
        }
        Ok(())
    }
}

/// Whether a value reads the same with and without quotes.
fn is_plain(value: &str) -> bool {
    value.parse::<u64>().is_ok() || matches!(value, "true" | "false")
}

fn rank(origin: &Origin) -> u8 {
    match origin {
        Origin::Default => 0,
        Origin::File(_) => 1,
        Origin::Environment(_) => 2,
        Origin::CommandLine => 3,
    }
}

/// `what` is not known, and this is what was probably meant.
fn unknown(what: &str, name: &str, before: &str, otherwise: &str) -> Error {
    let hint = match nearest(name, flags().flat_map(Flag::names)) {
        Some(known) => format!("did you mean {before}{known}?"),
        None => otherwise.into(),
    };
    Error::invalid(format!("unknown {what}; {hint}"))
}

impl MasterConfig {
    /// The configuration of these flags, by name and value; what is not named has its default. No file and no environment is
    /// looked at; [`Settings`] does that.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming the flag: an unknown one (with the nearest known name), a value that does not parse, one that
    /// contradicts another, or one that asks for something not built.
    pub fn from_flags<'a>(flags: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut settings = Settings::default();
        for (name, value) in flags {
            settings.command_line(name, value)?;
        }
        settings.config()
    }
}
