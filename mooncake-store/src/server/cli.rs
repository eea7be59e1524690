//! The command line of `mooncake_master`: the flags of [`crate::config::FLAGS`] in every form the existing system takes.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

use crate::config::{FLAGS, MasterConfig};

/// The configuration these arguments ask for; the first is the program's name.
///
/// `--flag=value`, `--flag value` and the same with one dash; switches also as `--flag` and `--noflag`.
///
/// # Errors
/// What to show, and the status to exit with: also for `--help` and `--version`, which are no failures.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<MasterConfig, clap::Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(arguments.into_iter().map(normal))?;
    let given = FLAGS.iter().filter_map(|flag| {
        let value = matches.get_one::<String>(flag.name)?;
        Some((flag.name, value.as_str()))
    });
    MasterConfig::from_flags(given)
        .map_err(|error| command.error(clap::error::ErrorKind::ValueValidation, error.message()))
}

fn command() -> Command {
    let mut command = Command::new("mooncake_master")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Holds the metadata of a cluster's KV cache, and places objects in its clients' memory.")
        .args_override_self(true);
    for flag in FLAGS {
        let arg = Arg::new(flag.name).long(flag.name).help(flag.help).action(ArgAction::Set);
        let shown = if flag.default.is_empty() { "none" } else { flag.default };
        let arg = arg.help(format!("{} [default: {shown}]", flag.help)).value_name("VALUE");
        command = command.arg(if flag.is_switch() {
            arg.num_args(0..=1).require_equals(true).default_missing_value("true")
        } else {
            arg.num_args(1)
        });
    }
    command
}

/// One dash is as good as two, `-` in a name as good as `_`, and `--noswitch` means `--switch=false`.
fn normal(argument: OsString) -> OsString {
    let Some(text) = argument.to_str() else { return argument };
    let Some(flag) = text.strip_prefix("--").or_else(|| text.strip_prefix('-')) else { return argument };
    // `-h` is help, and `-V` the version.
    if matches!(flag, "h" | "V" | "") || !flag.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return argument;
    }
    let (name, value) = match flag.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (flag, None),
    };
    let name = name.replace('-', "_");
    let off = name.strip_prefix("no").filter(|on| FLAGS.iter().any(|f| f.is_switch() && f.name == *on));
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
    use std::time::Duration;

    fn run(arguments: &[&str]) -> Result<MasterConfig, String> {
        let all = std::iter::once("mooncake_master").chain(arguments.iter().copied());
        parse(all.map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn every_form_of_a_flag() {
        for form in [
            &["--rpc_port=7"][..],
            &["-rpc_port=7"],
            &["--rpc_port", "7"],
            &["-rpc_port", "7"],
            &["--rpc-port=7"],
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
        let ttl = run(&["--default_kv_lease_ttl=5s"]).unwrap().options.lease_ttl;
        assert_eq!(ttl, Duration::from_secs(5));
        assert_eq!(run(&[]).unwrap(), MasterConfig::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (arguments, says) in [
            (&["--rpc_prot=7"][..], "--rpc_port"),
            (&["--eviction_ratio=2"], "--eviction_ratio=2: must be a number between 0 and 1"),
            (&["--enable_ha"], "not supported yet"),
            (&["stray"], "stray"),
            (&["--rpc_port"], "rpc_port"),
        ] {
            let error = run(arguments).unwrap_err();
            assert!(error.contains(says), "{arguments:?}: {error}");
        }
        assert!(run(&["--help"]).unwrap_err().contains("--default_kv_lease_ttl"));
    }
}
