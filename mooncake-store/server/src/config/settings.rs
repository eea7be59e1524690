//! Values of all flags with their origins. Precedence: command line, environment, file, default.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use mooncake_core::settings::Effect;
use mooncake_core::settings::Environment;
use mooncake_core::settings::values::{Parsed, seconds};
use mooncake_core::{Error, Result};

use super::MasterConfig;
use super::flags::{Flag, PREFIX, flag_by_name, flags, variable_of};
use super::values::nearest;
use mooncake_client::MAX_TIMEOUT;
use mooncake_master::GRANT_USE;

/// Origin of a value, in ascending precedence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Default value.
    Default,
    /// Configuration file.
    File(Arc<PathBuf>),
    /// Environment variable with this name.
    Environment(String),
    /// Command line.
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

/// A flag and its value.
#[derive(Clone, Debug)]
pub struct FlagValue {
    /// The flag.
    pub flag: &'static Flag,
    /// Value as text.
    pub value: String,
    /// Origin of the value.
    pub origin: Origin,
    /// True if an older name was used. The current name takes precedence within the same origin.
    by_alias: bool,
}

/// Values of all flags. The `Display` output is a YAML file with the same values.
#[derive(Clone, Debug)]
pub struct Settings {
    settings: Vec<FlagValue>,
    notes: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        let unset = |flag: &'static Flag| FlagValue {
            flag,
            value: flag.default.into(),
            origin: Origin::Default,
            by_alias: false,
        };
        Self { settings: flags().map(unset).collect(), notes: Vec::new() }
    }
}

impl Settings {
    /// Sets a value from the command line.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the nearest known name if the flag is unknown.
    pub fn command_line(&mut self, name: &str, value: &str) -> Result<()> {
        match flag_by_name(name) {
            Some(flag) => self.set(flag, name, value, Origin::CommandLine),
            None => return Err(unknown(&format!("flag --{name}"), name, "--", "--help lists all")),
        }
        Ok(())
    }

    /// Sets a value from a configuration file. A key without a value sets nothing.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the nearest known key if the key is unknown.
    pub fn file(&mut self, path: &Arc<PathBuf>, key: &str, value: Option<&str>) -> Result<()> {
        match (flag_by_name(key).filter(|flag| flag.name != "config_path"), value) {
            (Some(flag), Some(value)) => self.set(flag, key, value, Origin::File(path.clone())),
            (Some(_), None) => {}
            (None, _) => {
                let what = format!("key {key:?} in {}", path.display());
                return Err(unknown(&what, key, "", "mooncake_master --help lists all"));
            }
        }
        Ok(())
    }

    /// Sets values from the environment.
    pub fn environment(&mut self, environment: &Environment) {
        for flag in flags() {
            // The variable of this project is specific, so it overrides those of Mooncake C++.
            let theirs = flag.variables.iter().rev().map(|name| (*name).to_owned());
            for name in theirs.chain([variable_of(flag)]) {
                if let Some(value) = environment.get(&name) {
                    self.set(flag, flag.name, value, Origin::Environment(name));
                }
            }
        }
        let known: Vec<String> = flags().map(variable_of).collect();
        for name in environment.names().filter(|name| name.starts_with(PREFIX)) {
            if !known.iter().any(|flag| flag == name) {
                let hint = nearest(name, known.iter().map(String::as_str))
                    .map_or(String::new(), |known| format!("; did you mean {known}?"));
                self.notes.push(format!("{name} in the environment sets nothing{hint}"));
            }
        }
    }

    fn set(&mut self, flag: &'static Flag, name: &str, value: &str, origin: Origin) {
        let by_alias = name != flag.name;
        // In Mooncake C++, 0 means that the port is not set.
        if flag.name == "rpc_port" && value == "0" {
            return;
        }
        let Some(setting) = self.settings.iter_mut().find(|setting| setting.flag.name == flag.name) else {
            return;
        };
        if (rank(&origin), !by_alias) >= (rank(&setting.origin), !setting.by_alias) {
            *setting = FlagValue { flag, value: value.into(), origin, by_alias };
        }
    }

    /// Returns the value of a flag.
    pub fn value(&self, name: &str) -> Option<&FlagValue> {
        self.settings.iter().find(|setting| setting.flag.name == name)
    }

    /// Returns all flags with their values, in the order of the table.
    pub fn all(&self) -> &[FlagValue] {
        &self.settings
    }

    /// Returns notes for the start: settings without effect or with another meaning, and unknown
    /// variables.
    pub fn notes(&self) -> Vec<String> {
        let idle = self.settings.iter().filter_map(|setting| match setting.flag.effect {
            Effect::Idle(why, _) if setting.value != setting.flag.default => {
                Some(format!("{} ({}) has no effect: {why}", setting.flag.name, setting.origin))
            }
            _ => None,
        });
        let older = self
            .settings
            .iter()
            .filter(|setting| setting.flag.name == "memory_allocator" && setting.value == "cachelib");
        let older = older.map(|setting| {
            format!("memory_allocator={} ({}) is not supported; using offset", setting.value, setting.origin)
        });
        let short = self.settings.iter().filter(|setting| {
            setting.flag.name == "put_start_release_timeout_sec"
                && seconds(&setting.value).is_ok_and(|time| time < GRANT_USE)
        });
        let short = short.map(|setting| {
            format!(
                "put_start_release_timeout_sec={} ({}) counts as {}: clients may write for {} s after the start of a write",
                setting.value,
                setting.origin,
                GRANT_USE.as_secs(),
                MAX_TIMEOUT.as_secs()
            )
        });
        let is_set = |setting: &&FlagValue| setting.flag.name == "default_kv_lease_ttl";
        let lease = self.settings.iter().find(is_set).and_then(|setting| {
            let mut config = MasterConfig::default();
            setting.flag.apply(&mut config, &setting.value).ok()?;
            (!config.options.unprotected_lease.is_zero()).then(|| {
                format!(
                    "default_kv_lease_ttl={} ({}): the lease is too short to read under, so \
                     objects may be removed and evicted while they are read; their space is reused \
                     after {} ms",
                    setting.value,
                    setting.origin,
                    config.options.lease_ttl.as_millis()
                )
            })
        });
        let given = |name: &str| self.value(name).filter(|setting| setting.origin != Origin::Default);
        let overruled = given("client_ttl").zip(given("client_active_ttl_sec"));
        let overruled =
            overruled.filter(|(older, newer)| older.value != newer.value && !newer.value.is_empty());
        let overruled = overruled.map(|(older, newer)| {
            format!(
                "client_ttl={} ({}) has no effect: client_active_ttl_sec={} ({}) replaces it",
                older.value, older.origin, newer.value, newer.origin
            )
        });
        let notes = self.notes.iter().cloned().chain(idle).chain(older).chain(short);
        notes.chain(lease).chain(overruled).collect()
    }

    /// Parses the value of a flag.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with flag and origin if the value is invalid.
    pub(super) fn read<T>(&self, name: &str, parse: impl Fn(&str) -> Parsed<T>) -> Result<T> {
        let setting = self.value(name).ok_or_else(|| Error::invalid(format!("unknown flag --{name}")))?;
        parse(&setting.value).map_err(|why| setting.refused(&why))
    }

    /// Applies the flags that set a field of the configuration.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with flag and origin if a value is invalid.
    pub(super) fn apply(&self, config: &mut MasterConfig) -> Result<()> {
        for setting in self.settings.iter().filter(|setting| setting.origin != Origin::Default) {
            setting.flag.apply(config, &setting.value).map_err(|why| setting.refused(&why))?;
        }
        Ok(())
    }
}

impl FlagValue {
    fn refused(&self, why: &str) -> Error {
        let Self { flag, value, origin, .. } = self;
        Error::invalid(match origin {
            Origin::CommandLine | Origin::Default => format!("--{}={value}: {why}", flag.name),
            Origin::File(path) => format!("{}: {}: {value}: {why}", path.display(), flag.name),
            Origin::Environment(name) => format!("{name}={value} in the environment: {why}"),
        })
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for FlagValue { flag, value, origin, .. } in &self.settings {
            // The name of the file does not belong into the file.
            let hidden = if flag.name == "config_path" { "# " } else { "" };
            // A secret does not belong there either.
            let is_secret = flag.name == "metadata_http_token" && !value.is_empty();
            let (hidden, value) = if is_secret { ("# ", "(hidden)") } else { (hidden, value.as_str()) };
            // A JSON string is a YAML string.
            let value = serde_json::Value::from(value);
            let value = match value.as_str() {
                Some(plain) if is_plain(plain) => plain.to_owned(),
                _ => value.to_string(),
            };
            writeln!(f, "{hidden}{}: {value}  # {origin}", flag.name)?;
        }
        Ok(())
    }
}

/// Returns whether YAML reads the value the same with and without quotes.
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

/// Returns the error about an unknown name, with the nearest known name.
fn unknown(what: &str, name: &str, before: &str, otherwise: &str) -> Error {
    let hint = match nearest(name, flags().flat_map(|flag| flag.names())) {
        Some(known) => format!("did you mean {before}{known}?"),
        None => otherwise.into(),
    };
    Error::invalid(format!("unknown {what}; {hint}"))
}

impl MasterConfig {
    /// Returns the configuration of these flags, given by name and value; other flags have their
    /// defaults. Neither a file nor the environment is read; [`Settings`] does that.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the flag: a name is unknown, a value is invalid, contradicts another
    /// one, or requires a missing feature.
    pub fn from_flags<'a>(flags: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut settings = Settings::default();
        for (name, value) in flags {
            settings.command_line(name, value)?;
        }
        settings.config()
    }
}
