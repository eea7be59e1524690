//! Normal form of the command line arguments that programs of Mooncake C++ accept, and the flags of
//! gflags that bring others: `--flagfile`, `--fromenv`, `--tryfromenv` and `--undefok`.

#[cfg(feature = "arguments")]
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::io::Read;
use std::path::Path;

use mooncake_core::settings::Environment;
use mooncake_core::{Error, Result};

/// Maximum size of a file with flags, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Maximum number of files with flags, of which one may name the next.
const MAX_FILES: usize = 64;

/// Description of the flags of gflags, for the help of a program.
pub const HELP: &str = "--flagfile=FILE[,FILE..] reads flags from files, one --flag=value per \
    line. --fromenv=NAME[,NAME..] and --tryfromenv=NAME[,NAME..] take flags from variables \
    FLAGS_<NAME>. --undefok=NAME[,NAME..] ignores flags that do not exist.";

/// Arguments of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagKind {
    /// A switch, whose value only follows `=`.
    Switch,
    /// A flag with a value.
    Value,
}

/// Command line after [`expand`].
#[derive(Debug)]
pub struct Expanded {
    /// Arguments in their normal form.
    pub arguments: Vec<OsString>,
    /// Remarks for the log.
    pub notes: Vec<String>,
}

/// Brings arguments into their [`normal`] form, and replaces `--flagfile`, `--fromenv`,
/// `--tryfromenv` and `--undefok` by the flags that they stand for, as gflags does. The first
/// argument is the name of the program. `kind` returns the kind of a known flag.
///
/// Unknown flags stay, so that the parser refuses them; those that `--undefok` names are left out.
///
/// # Errors
/// `INVALID_PARAMS` with the name of the file or the variable that cannot be read.
pub fn expand(
    arguments: impl IntoIterator<Item = OsString>,
    environment: &Environment,
    kind: impl Fn(&str) -> Option<FlagKind>,
) -> Result<Expanded> {
    let mut arguments = arguments.into_iter();
    let program = arguments.next();
    let mut expansion = Expansion {
        program: program.as_deref().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        environment,
        kind: &kind,
        given: Vec::new(),
        allowed: Vec::new(),
        notes: Vec::new(),
        files: 0,
    };
    expansion.add_all(arguments)?;
    let Expansion { given, allowed, notes, .. } = expansion;
    let mut expanded: Vec<OsString> = program.into_iter().collect();
    let mut given = given.into_iter().peekable();
    while let Some(argument) = given.next() {
        let Argument::Unknown { name, has_value, text } = argument else {
            expanded.push(argument.into_text());
            continue;
        };
        let is_allowed = |name: &str| allowed.iter().any(|allowed| allowed == name);
        if !is_allowed(&name) && !name.strip_prefix("no").is_some_and(is_allowed) {
            expanded.push(text);
        } else if !has_value {
            // The value of a flag that does not exist here may be the next argument.
            given.next_if(|next| matches!(next, Argument::Plain(_)));
        }
    }
    Ok(Expanded { arguments: expanded, notes })
}

/// Returns a program's command with the behaviour of gflags: the last value of a flag counts, and a
/// value may begin with a dash.
#[cfg(feature = "arguments")]
pub fn command(command: clap::Command) -> clap::Command {
    let command = command.args_override_self(true).after_help(HELP);
    command.mut_args(|argument| match kind_of(&argument) {
        FlagKind::Value => argument.allow_hyphen_values(true),
        FlagKind::Switch => argument,
    })
}

/// Returns the kinds of the flags of a command, for [`expand`].
#[cfg(feature = "arguments")]
pub fn kinds(command: &clap::Command) -> impl Fn(&str) -> Option<FlagKind> + use<> {
    let kind = |argument: &clap::Arg| Some((argument.get_long()?.to_owned(), kind_of(argument)));
    let kinds: BTreeMap<String, FlagKind> = command.get_arguments().filter_map(kind).collect();
    move |name| match name {
        "help" | "version" => Some(FlagKind::Switch),
        name => kinds.get(name).copied(),
    }
}

#[cfg(feature = "arguments")]
fn kind_of(argument: &clap::Arg) -> FlagKind {
    let takes_none = !argument.get_action().takes_values();
    let is_optional = argument.get_num_args().is_some_and(|number| number.min_values() == 0);
    if takes_none || is_optional { FlagKind::Switch } else { FlagKind::Value }
}

/// An argument of the command line or of a file.
enum Argument {
    /// Known flag, value of one, or argument after `--`.
    Known(OsString),
    /// Flag that the program does not have.
    Unknown { name: String, has_value: bool, text: OsString },
    /// Argument that is neither a flag nor the value of a known one.
    Plain(OsString),
}

impl Argument {
    fn into_text(self) -> OsString {
        match self {
            Self::Known(text) | Self::Unknown { text, .. } | Self::Plain(text) => text,
        }
    }
}

struct Expansion<'a, K> {
    program: String,
    environment: &'a Environment,
    kind: &'a K,
    given: Vec<Argument>,
    /// Names that `--undefok` allows.
    allowed: Vec<String>,
    notes: Vec<String>,
    files: usize,
}

impl<K: Fn(&str) -> Option<FlagKind>> Expansion<'_, K> {
    fn add_all(&mut self, arguments: impl IntoIterator<Item = OsString>) -> Result<()> {
        let is_switch = |name: &str| (self.kind)(name) == Some(FlagKind::Switch);
        let mut arguments: std::vec::IntoIter<OsString> =
            arguments.into_iter().collect::<Vec<_>>().into_iter();
        while let Some(argument) = arguments.next() {
            if argument == "--" {
                self.given.push(Argument::Known(argument));
                self.given.extend(arguments.by_ref().map(Argument::Known));
                return Ok(());
            }
            let text = normal(argument, is_switch);
            let Some((name, value)) = flag_of(&text) else {
                self.given.push(Argument::Plain(text));
                continue;
            };
            if let Some(special) = Special::from_name(&name) {
                let value = value.map(str::to_owned).map(OsString::from).or_else(|| arguments.next());
                let value = value.and_then(|value| value.into_string().ok()).unwrap_or_default();
                self.add_special(special, &value)?;
                continue;
            }
            match ((self.kind)(&name), value.is_some()) {
                (Some(FlagKind::Value), false) => {
                    self.given.push(Argument::Known(text));
                    self.given.extend(arguments.next().map(Argument::Known));
                }
                (Some(_), _) => self.given.push(Argument::Known(text)),
                (None, has_value) => self.given.push(Argument::Unknown { name, has_value, text }),
            }
        }
        Ok(())
    }

    fn add_special(&mut self, special: Special, value: &str) -> Result<()> {
        let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
        match special {
            Special::Undefok => self.allowed.extend(names.map(|name| name.replace('-', "_"))),
            Special::FlagFile => {
                for path in names {
                    self.add_file(path)?;
                }
            }
            Special::FromEnvironment { is_required } => {
                for name in names {
                    let name = name.replace('-', "_");
                    let variable = format!("FLAGS_{name}");
                    if let Some(value) = self.environment.get(&variable) {
                        let argument = format!("--{name}={value}").into();
                        self.add_all([argument])?;
                    } else if is_required {
                        return Err(Error::invalid(format!(
                            "cannot read flag from the environment: the variable is not set. \
                             variable={variable}; set it, or use --tryfromenv={name}"
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds the flags of a file. Flags that do not exist are noted, because files of gflags may
    /// have flags for several programs.
    fn add_file(&mut self, path: &str) -> Result<()> {
        let refuse = |why: &dyn fmt::Display| {
            Error::invalid(format!("cannot read flags: {why}. --flagfile={path}; name a readable text file"))
        };
        self.files += 1;
        if self.files > MAX_FILES {
            return Err(refuse(&format!("more than {MAX_FILES} files of flags name each other")));
        }
        let text = read(path).map_err(|error| refuse(&error))?;
        let mut is_relevant = true;
        let mut was_program = false;
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if !line.starts_with('-') {
                // Names of the programs that the following flags are for.
                is_relevant = (was_program && is_relevant)
                    || line.split_whitespace().any(|pattern| self.is_program(pattern));
                was_program = true;
                continue;
            }
            was_program = false;
            if is_relevant {
                self.add_line(path, line)?;
            }
        }
        Ok(())
    }

    fn add_line(&mut self, path: &str, line: &str) -> Result<()> {
        let is_switch = |name: &str| (self.kind)(name) == Some(FlagKind::Switch);
        let text = normal(line.into(), is_switch);
        let Some((name, value)) = flag_of(&text) else { return Ok(()) };
        let kind = (self.kind)(&name);
        if kind.is_none() && Special::from_name(&name).is_none() {
            if !self.allowed.contains(&name) {
                self.notes.push(format!("{line} in {path} sets nothing: no such flag; write --flag=value"));
            }
            return Ok(());
        }
        if value.is_none() && kind != Some(FlagKind::Switch) {
            return Err(Error::invalid(format!(
                "cannot read flags: --{name} has no value. --flagfile={path}; write --{name}=value"
            )));
        }
        self.add_all([text])
    }

    /// Returns whether a pattern is the name of this program, with or without its path.
    fn is_program(&self, pattern: &str) -> bool {
        let short = Path::new(&self.program).file_name().map(|name| name.to_string_lossy());
        matches(pattern.as_bytes(), self.program.as_bytes())
            || short.is_some_and(|name| matches(pattern.as_bytes(), name.as_bytes()))
    }
}

/// Flags of gflags that bring others.
#[derive(Clone, Copy)]
enum Special {
    FlagFile,
    FromEnvironment { is_required: bool },
    Undefok,
}

impl Special {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "flagfile" => Some(Self::FlagFile),
            "fromenv" => Some(Self::FromEnvironment { is_required: true }),
            "tryfromenv" => Some(Self::FromEnvironment { is_required: false }),
            "undefok" => Some(Self::Undefok),
            _ => None,
        }
    }
}

/// Returns the name and the value of a flag in its normal form.
fn flag_of(text: &OsString) -> Option<(String, Option<&str>)> {
    let flag = text.to_str()?.strip_prefix("--").filter(|flag| !flag.is_empty())?;
    let (name, value) = match flag.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (flag, None),
    };
    Some((name.to_owned(), value))
}

/// Reads a file of bounded size.
fn read(path: &str) -> std::io::Result<String> {
    let mut text = String::new();
    let size = std::fs::File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if size as u64 > MAX_FILE {
        return Err(std::io::Error::other(format!("a file of flags has at most {MAX_FILE} bytes")));
    }
    Ok(text)
}

/// Returns whether a pattern with `*` and `?` matches a name.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => (0..=name.len()).any(|from| matches(rest, &name[from..])),
        (Some((b'?', pattern)), Some((_, name))) => matches(pattern, name),
        (Some((a, pattern)), Some((b, name))) => a == b && matches(pattern, name),
        _ => false,
    }
}

/// Converts an argument into its normal form: two dashes, `_` in names, and `--switch=false` for
/// `--noswitch`.
pub fn normal(argument: OsString, is_switch: impl Fn(&str) -> bool) -> OsString {
    let Some(text) = argument.to_str() else { return argument };
    let Some(flag) = text.strip_prefix("--").or_else(|| text.strip_prefix('-')) else { return argument };
    // `-h` and `-V` are the help and the version.
    if matches!(flag, "h" | "V" | "") || !flag.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return argument;
    }
    let (name, value) = match flag.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (flag, None),
    };
    let name = name.replace('-', "_");
    let off = name.strip_prefix("no").filter(|on| is_switch(on));
    match (off, value) {
        (Some(on), None) => format!("--{on}=false"),
        (_, None) => format!("--{name}"),
        (_, Some(value)) => format!("--{name}={value}"),
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        for (given, made) in [
            ("--block_size=1", "--block_size=1"),
            ("-block-size", "--block_size"),
            ("--noauto_discovery", "--auto_discovery=false"),
            ("--note=no-de", "--note=no-de"),
            ("-h", "-h"),
            ("-1", "-1"),
            ("plain", "plain"),
        ] {
            assert_eq!(normal(given.into(), |name| name == "auto_discovery"), made, "{given}");
        }
    }

    fn expanded(arguments: &[&str], variables: &[(&str, &str)]) -> Result<(Vec<String>, Vec<String>)> {
        let kind = |name: &str| match name {
            "port" | "name" => Some(FlagKind::Value),
            "on" => Some(FlagKind::Switch),
            _ => None,
        };
        let arguments = std::iter::once(&"/bin/program").chain(arguments).map(OsString::from);
        let expanded = expand(arguments, &variables.iter().copied().collect(), kind)?;
        let texts = expanded.arguments.into_iter().skip(1).map(|text| text.into_string().unwrap());
        Ok((texts.collect(), expanded.notes))
    }

    fn arguments(given: &[&str]) -> Vec<String> {
        expanded(given, &[]).unwrap().0
    }

    #[test]
    fn a_flag_file_stands_for_its_flags_at_its_position() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        let (first, second) = (path("first"), path("second"));
        std::fs::write(&second, "--name=from the second\r\n").unwrap();
        let text = format!(
            "# a comment\n\n  -port=7  \n--noon\nother_program\n--port=8\n\
             other_* pro?ram\n--flagfile={second}\n--absent=1\n"
        );
        std::fs::write(&first, text).unwrap();
        for form in [vec![format!("--flagfile={first}")], vec!["-flagfile".into(), first.clone()]] {
            let given: Vec<&str> =
                ["--port=6"].into_iter().chain(form.iter().map(String::as_str)).chain(["--on"]).collect();
            let (texts, notes) = expanded(&given, &[]).unwrap();
            let wanted = ["--port=6", "--port=7", "--on=false", "--name=from the second", "--on"];
            assert_eq!(texts, wanted);
            assert_eq!(notes.len(), 1);
            assert!(notes[0].starts_with("--absent=1 in ") && notes[0].contains("sets nothing"), "{notes:?}");
        }
        let two = format!("--flagfile={second},{second}");
        assert_eq!(arguments(&[&two]).len(), 2);
    }

    #[test]
    fn unreadable_flag_file_error_states_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("flags").to_string_lossy().into_owned();
        let given = format!("--flagfile={path}");
        let error = || expanded(&[&given], &[]).unwrap_err().message().to_owned();
        assert!(error().contains(&path), "{}", error());
        std::fs::write(&path, "--port\n").unwrap();
        assert!(error().contains("--port has no value") && error().contains(&path), "{}", error());
        std::fs::write(&path, format!("--flagfile={path}\n")).unwrap();
        assert!(error().contains("name each other"), "{}", error());
        std::fs::write(&path, "#".repeat(2 << 20)).unwrap();
        assert!(error().contains("at most"), "{}", error());
    }

    #[test]
    fn undefok_allows_only_listed_flags() {
        assert_eq!(arguments(&["--undefok=gc,old-name", "--gc=false", "--port=1"]), ["--port=1"]);
        assert_eq!(arguments(&["--gc", "false", "--undefok", "gc", "--port", "1"]), ["--port", "1"]);
        assert_eq!(arguments(&["--nogc", "--old_name", "-port=1", "--undefok=gc,old_name"]), ["--port=1"]);
        assert_eq!(arguments(&["--undefok=gc", "--cg=1", "stray"]), ["--cg=1", "stray"]);
        assert_eq!(arguments(&["--undefok=port", "--port=1"]), ["--port=1"], "a known flag counts");
        assert_eq!(arguments(&["--name", "--undefok", "--", "--gc"]), ["--name", "--undefok", "--", "--gc"]);
    }

    #[test]
    fn fromenv_reads_listed_variables() {
        let variables = [("FLAGS_port", "7"), ("FLAGS_on", "true")];
        let (texts, _) = expanded(&["--fromenv=port,on", "--tryfromenv=name"], &variables).unwrap();
        assert_eq!(texts, ["--port=7", "--on=true"]);
        let error = expanded(&["--fromenv=name"], &variables).unwrap_err();
        assert!(error.message().contains("FLAGS_name"), "{error}");
    }
}
