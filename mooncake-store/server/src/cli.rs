//! Command line of `mooncake_master`: the flags of [`crate::config::GROUPS`] in every syntax that
//! Mooncake C++ accepts.

use std::ffi::OsString;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};
use mooncake_core::Result;
use mooncake_core::settings::Environment;
use mooncake_engine::flags;

use crate::config::{Flag, GROUPS, MasterConfig, Origin, Settings};

/// Result of parsing a command line.
#[derive(Debug)]
pub enum Run {
    /// Run a master.
    Master {
        /// Configuration of the master.
        config: Box<MasterConfig>,
        /// Remarks on the configuration for the log.
        notes: Vec<String>,
    },
    /// Print each value with its origin (`--print_config`).
    Print(Settings),
}

/// Parses the arguments, the environment and the configuration file. The first argument is the name
/// of the program.
///
/// Accepts `--flag=value`, `--flag value` and the same with one dash; for switches also `--flag`
/// and `--noflag`; and the flags of gflags that bring others ([`flags::expand`]).
///
/// # Errors
/// The text to print and the exit status, also for `--help` and `--version`, which are not
/// failures.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Run, clap::Error> {
    let mut settings = Settings::default();
    settings.environment(&Environment::of_process());
    parse_over(settings, arguments)
}

fn parse_over(settings: Settings, arguments: impl IntoIterator<Item = OsString>) -> Result<Run, clap::Error> {
    let mut command = command();
    let expanded = flags::expand(arguments, &Environment::of_process(), flags::kinds(&command))
        .map_err(|error| command.error(ErrorKind::ValueValidation, error.message()))?;
    let matches = command.try_get_matches_from_mut(expanded.arguments)?;
    let mut given = Vec::new();
    for flag in GROUPS.iter().flat_map(|group| group.flags) {
        given.extend(flag.names().filter_map(|name| Some((name, matches.get_one::<String>(name)?.as_str()))));
    }
    let print = matches.get_flag(PRINT);
    let mut run = run(settings, &given, print)
        .map_err(|error| command.error(ErrorKind::ValueValidation, error.message()))?;
    if let Run::Master { notes, .. } = &mut run {
        notes.splice(0..0, expanded.notes);
    }
    Ok(run)
}

const PRINT: &str = "print_config";

fn run(mut settings: Settings, given: &[(&str, &str)], print: bool) -> Result<Run> {
    for (name, value) in given {
        settings.command_line(name, value)?;
    }
    let file = settings.value("config_path").filter(|setting| setting.origin != Origin::Default);
    if let Some(path) = file.map(|setting| setting.value.clone()).filter(|path| !path.is_empty()) {
        settings.read_file(Path::new(&path))?;
    }
    let config = Box::new(settings.config()?);
    Ok(if print { Run::Print(settings) } else { Run::Master { config, notes: settings.notes() } })
}

fn command() -> Command {
    let mut command = Command::new("mooncake_master")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Master of a Mooncake store: stores the metadata of the KV cache, and places objects in the memory of clients.")
        .after_help(format!(
            "-h omits flags without effect. Each flag is also a key of a configuration file \
            (--config_path) and, in capitals after MC_MASTER_, a variable of the environment. \
            Command line > environment > file > default. {}",
            flags::HELP
        ))
        .args_override_self(true)
        .arg(
            Arg::new(PRINT)
                .long(PRINT)
                .help("Print each value with its origin as a configuration file, and exit")
                .action(ArgAction::SetTrue),
        );
    for group in GROUPS {
        for flag in group.flags {
            let also = flag.older.iter().map(|alias| argument(flag, alias).hide(true));
            command = command.arg(argument(flag, flag.name).help_heading(group.name)).args(also);
        }
    }
    command
}

fn argument(flag: &Flag, name: &'static str) -> Arg {
    let shown = if flag.default.is_empty() { "none" } else { flag.default };
    let remark = flag.remark().map_or(String::new(), |remark| format!("; {remark}"));
    let arg = Arg::new(name)
        .long(name)
        .help(format!("{} [default: {shown}{remark}]", flag.help))
        .action(ArgAction::Set)
        .hide_short_help(flag.is_idle())
        .value_name("VALUE");
    if flag.is_switch() {
        arg.num_args(0..=1).require_equals(true).default_missing_value("true")
    } else {
        arg.num_args(1).allow_hyphen_values(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn parsed(arguments: &[&str]) -> Result<Run, String> {
        let all = std::iter::once("mooncake_master").chain(arguments.iter().copied());
        parse_over(Settings::default(), all.map(OsString::from)).map_err(|error| error.to_string())
    }

    fn run(arguments: &[&str]) -> Result<MasterConfig, String> {
        match parsed(arguments)? {
            Run::Master { config, .. } => Ok(*config),
            Run::Print(settings) => Err(settings.to_string()),
        }
    }

    #[test]
    fn every_form_of_a_flag() {
        for form in [
            &["--rpc_port=7"][..],
            &["-rpc_port=7"],
            &["--rpc_port", "7"],
            &["-rpc_port", "7"],
            &["--rpc-port=7"],
            &["--port=7"],
            &["--rpc_port=0", "--port=7"],
            &["--rpc_port=7", "--port=8"],
        ] {
            assert_eq!(run(form).unwrap().rpc_port, 7, "{form:?}");
        }
        for (form, on) in [
            ("--enable_metric_reporting", true),
            ("-enable_metric_reporting", true),
            ("--noenable_metric_reporting", false),
            ("-noenable_metric_reporting", false),
            ("--enable_metric_reporting=false", false),
            ("--enable_metric_reporting=0", false),
        ] {
            assert_eq!(run(&[form]).unwrap().metric_reporting, on, "{form}");
        }
        assert_eq!(run(&["--rpc_port=7", "--rpc_port=8"]).unwrap().rpc_port, 8, "the last one counts");
        assert!(run(&["--logbuflevel", "-1"]).is_ok(), "a value may be below 0");
        let ttl = run(&["--default_kv_lease_ttl=5s"]).unwrap().options.lease_ttl;
        assert_eq!(ttl, Duration::from_secs(5));
        assert_eq!(run(&[]).unwrap(), MasterConfig::default());
    }

    #[test]
    fn invalid_arguments_error_states_cause() {
        for (arguments, says) in [
            (&["--rpc_prot=7"][..], "--rpc_port"),
            (&["--eviction_ratio=2"], "--eviction_ratio=2: must be a number between 0 and 1"),
            (&["--enable_ha"], "--enable_ha needs --etcd_endpoints"),
            (&["--config_path=/nonexistent.yaml"], "--config_path=/nonexistent.yaml: No such file"),
            (&["stray"], "stray"),
            (&["--rpc_port"], "rpc_port"),
        ] {
            let error = run(arguments).unwrap_err();
            assert!(error.contains(says), "{arguments:?}: {error}");
        }
    }

    #[test]
    fn flags_of_gflags_bring_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.flags");
        std::fs::write(&path, "# ports\n--rpc_port=7\n-noenable_metric_reporting\n--rpc_prot=8\n").unwrap();
        let file = format!("--flagfile={}", path.display());
        let Ok(Run::Master { config, notes }) = parsed(&["--rpc_port=6", &file, "--metrics_port=8"]) else {
            panic!("it is to run")
        };
        assert_eq!((config.rpc_port, config.metrics_port, config.metric_reporting), (7, 8, false));
        assert!(notes.len() == 1 && notes[0].starts_with("--rpc_prot=8 in "), "{notes:?}");
        assert_eq!(run(&[&file, "--rpc_port=9"]).unwrap().rpc_port, 9, "the last one counts");
        assert_eq!(run(&["--undefok=enable_gc", "--enable_gc=false"]), run(&[]));
        assert!(run(&["--enable_gc=false"]).unwrap_err().contains("enable_gc"));
        let error = run(&["--flagfile=/nonexistent.flags"]).unwrap_err();
        assert!(error.contains("/nonexistent.flags"), "{error}");
    }

    #[test]
    fn help_comes_in_groups() {
        let help = run(&["--help"]).unwrap_err();
        let mut lines = help.lines();
        for group in GROUPS {
            let heading = format!("{}:", group.name);
            assert!(lines.any(|line| line == heading), "no {heading} in {help}");
            for flag in group.flags {
                let shown = |line: &str| {
                    let name = line.trim_start().strip_prefix("--").unwrap_or_default();
                    name.strip_prefix(flag.name).is_some_and(|rest| rest.starts_with([' ', '[']))
                };
                assert!(lines.any(shown), "{} is not in its group", flag.name);
            }
        }
        let short = run(&["-h"]).unwrap_err();
        assert!(short.contains("--rpc_port") && !short.contains("--nof_eviction_ratio"), "{short}");
        assert!(!help.contains("--port "), "older names are not shown");
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.toml");
        std::fs::write(&path, "rpc_port = 7\nmetrics_port = 8\nlogbufsecs = 0\n").unwrap();
        let path = format!("--config_path={}", path.display());
        let config = run(&[&path, "--rpc_port=9"]).unwrap();
        assert_eq!((config.rpc_port, config.metrics_port), (9, 8));
        let Ok(Run::Master { notes, .. }) = parsed(&[&path]) else { panic!("it is to run") };
        assert!(notes[0].starts_with("logbufsecs (file "), "{notes:?}");
        let printed = run(&[&path, "--port=9", "--print_config"]).unwrap_err();
        for line in ["rpc_port: 9  # command line", "metrics_host: \"0.0.0.0\"  # default"] {
            assert!(printed.lines().any(|have| have == line), "no {line:?} in {printed}");
        }
        assert!(printed.contains("metrics_port: 8  # file "), "{printed}");
    }
}
