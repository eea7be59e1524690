//! Normal form of the command line arguments that programs of Mooncake C++ accept.

use std::ffi::OsString;

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
}
