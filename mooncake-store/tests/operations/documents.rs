//! Compares generated documents with the code that they describe. `cargo xtask docs` writes them.

use std::fmt::Write as _;
use std::path::PathBuf;

use mooncake_core::error::{ErrorCode, ErrorKind};
use mooncake_core::settings::Setting;
use mooncake_engine::environment::VARIABLES;
use mooncake_metadata::http_routes;
use mooncake_store::config::{ClientEnvironment, Flag, GROUPS, flags, variable_of};
use mooncake_store::tool;

fn documents() -> [(PathBuf, String); 3] {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs");
    [
        (folder.join("environment.md"), environment_document()),
        (folder.join("errors.md"), errors_document()),
        (folder.join("flags.md"), flags_document()),
    ]
}

const ERRORS_HEAD: &str = "# Error codes

Generated from `mooncake-core/src/code.rs` by `cargo xtask docs`; do not edit.

Python calls return these numbers; `last_error()` returns the code, its name and a message:

```python
if store.put(\"key\", b\"value\") < 0:
    error = store.last_error()
    print(error.code, error.name, error.message)
```

Rust calls return `mooncake_core::Error`; `error.code()` is the code and `error.kind()` its kind.
The REST server and the admin port put the code into the response. The numbers are those of
Mooncake C++. \"Mooncake C++ only\" marks codes that this project never creates itself.

## Kinds

A program decides by the kind; the code is for logs and people.

| kind | action of the caller |
|---|---|
";

/// Returns the action that callers take for a kind.
const fn action(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => "Treat it as a miss.",
        ErrorKind::AlreadyExists => "Continue: the value is stored.",
        ErrorKind::NoSpace => "Write less, or retry later.",
        ErrorKind::Busy => "Retry later.",
        ErrorKind::Expired => "Repeat the call.",
        ErrorKind::Invalid => "Correct the call; a repetition fails, too.",
        ErrorKind::Unavailable => "Use another node, or retry later.",
        ErrorKind::Timeout => "Repeat the call; it may have been applied.",
        ErrorKind::Corrupt => "Discard the bytes and recompute them.",
        ErrorKind::VersionMismatch => "Upgrade the older side.",
        ErrorKind::Unsupported => "Enable the feature, or do without it.",
        _ => "Report it.",
    }
}

/// Returns `docs/errors.md`.
fn errors_document() -> String {
    let mut text = String::from(ERRORS_HEAD);
    let mut kinds: Vec<ErrorKind> = Vec::new();
    for kind in ErrorCode::ALL.iter().map(|code| code.kind()) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
            writeln!(text, "| `{kind:?}` | {} |", action(kind)).unwrap();
        }
    }
    text.push_str(
        "\n## Codes\n\n| code | name | kind | meaning | cause | what to do |\n|---|---|---|---|---|---|\n",
    );
    for code in ErrorCode::ALL {
        let (number, name, kind) = (code.number(), code.name(), code.kind());
        let (meaning, cause, cure) = (code.meaning(), code.cause(), code.cure());
        writeln!(text, "| {number} | `{name}` | `{kind:?}` | {meaning} | {cause} | {cure} |").unwrap();
    }
    text
}

/// Variables that only code in Python reads: name, default, effect. A test compares the names with
/// the code.
const PYTHON: &[(&str, &str, &str)] = &[
    ("MC_LOG_LEVEL", "WARNING", "Log level of the native library, and of an engine in a C program"),
    (
        "MOONCAKE_CONFIG_PATH",
        "",
        "JSON file with the settings of a store; the variables below are then ignored",
    ),
    ("MOONCAKE_MASTER", "", "Address of the master"),
    ("MOONCAKE_LOCAL_HOSTNAME", "localhost", "Name or address of this process for other nodes"),
    ("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE", "Metadata service: `P2PHANDSHAKE` or a URL"),
    ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "3355443200", "Bytes that the store contributes to the cluster"),
    ("MOONCAKE_LOCAL_BUFFER_SIZE", "1073741824", "Bytes of the local buffer"),
    ("MOONCAKE_PROTOCOL", "tcp", "Protocol"),
    ("MOONCAKE_DEVICE", "", "RDMA devices, with commas between them"),
    ("MOONCAKE_TENANT_ID", "default", "Tenant"),
    ("MOONCAKE_OFFLOAD_ENABLED", "false", "Keep objects on a disk"),
    ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", "false", "Serve health and metrics of the store over HTTP"),
    ("MOONCAKE_CLIENT_HTTP_PORT", "9300", "Port of these endpoints"),
    (
        "MOONCAKE_PG_SECRET",
        "",
        "Secret that all ranks of process groups share ([pg.md](pg.md)); without it, ranks are not authenticated",
    ),
    (
        "MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE",
        "1",
        "Remove failed ranks from the active ranks of a process group; used without `pg_options`",
    ),
    (
        "MOONCAKE_PG_AUTO_SYNC_ON_FAILURE",
        "1",
        "Wait for the removal of failed ranks inside the operation; used without `pg_options`",
    ),
];

const ENVIRONMENT_HEAD: &str = "# Environment variables

Generated from the tables of settings by `cargo xtask docs`; do not edit. An empty variable counts
as unset. [unread-variables.md](unread-variables.md) lists variables of Mooncake C++ that are not
read.

A switch is on for `true`, `t`, `1`, `yes`, `y`, `on`, `enable` and `enabled`, and off for `false`,
`f`, `0`, `no`, `n`, `off`, `disable` and `disabled`, in upper or lower case. \"Unless off\" means
that every other text switches on, too, as in Mooncake C++.

```sh
mooncake_master --print_config    # each value of the master and its origin
```

## Read by the master

`mooncake_master` reads a variable for each of its flags. The command line takes precedence over the
environment, the environment over the configuration file. The master warns about unknown variables
that begin with `MC_MASTER_`. The Rust libraries read the environment only on request.

| variable | flag | default | effect |
|---|---|---|---|
";

const ENGINE_HEAD: &str = "
## Read by the transfer engine

A transfer engine reads these variables with `TransferEngineBuilder::environment`. Engines of the C
interface, of the Python package and of `transfer_engine_bench` do. Stores of Python and C and
`mooncake_client` read those about TCP, RDMA and the choice of a transport. Older names follow the
newer ones.
";

const CLIENT_HEAD: &str = "
## Read by clients

`mooncake_client` and stores of the Python package and of the C interface read these variables.
Older names follow the newer ones.
";

/// Returns `docs/environment.md`.
fn environment_document() -> String {
    let mut text = String::from(ENVIRONMENT_HEAD);
    for flag in flags() {
        let names =
            std::iter::once(variable_of(flag)).chain(flag.variables.iter().map(|name| (*name).into()));
        let (names, default) = (list(names, ", "), code(flag.default));
        writeln!(text, "| {names} | `--{}` | {default} | {} |", flag.name, effect(flag)).unwrap();
    }
    text.push_str(ENGINE_HEAD);
    text.push_str(&variables(VARIABLES));
    text.push_str("\n## Read by `mooncake_http_metadata_server`\n");
    text.push_str(&variables(http_routes::VARIABLES));
    text.push_str("\n## Read by the CLI `mooncake`\n");
    text.push_str(&variables(tool::VARIABLES));
    text.push_str(CLIENT_HEAD);
    text.push_str(&variables(ClientEnvironment::VARIABLES));
    text.push_str("\n## Read by the Python package\n\n| variable | default | effect |\n|---|---|---|\n");
    for (name, default, effect) in PYTHON {
        writeln!(text, "| `{name}` | {} | {effect} |", code(default)).unwrap();
    }
    text
}

fn variables<T>(table: &[Setting<T>]) -> String {
    let mut text = String::from("\n| variable | default | effect |\n|---|---|---|\n");
    for variable in table {
        let (names, default) = (list(variable.names(), ", "), code(variable.default));
        writeln!(text, "| {names} | {default} | {} |", variable.help).unwrap();
    }
    text
}

const FLAGS_HEAD: &str = "# Flags of `mooncake_master`

Generated from `mooncake-store/server/src/config/flags.rs` by `cargo xtask docs`;
do not edit.

```sh
mooncake_master --rpc_port=50051 --print_config    # each value and its origin
```

Each flag is also a key of a configuration file (`--config_path=master.yaml`, `.yml`,
`.json` or `.toml`: one flat map). In capitals after `MC_MASTER_` it is an environment
variable ([environment.md](environment.md)). Command line > environment > file >
default.

As in gflags, `--flagfile=FILE[,FILE..]` reads flags from files, one `--flag=value` per
line, at its position in the command line. `--fromenv` and `--tryfromenv` take flags from
variables `FLAGS_<name>`, and `--undefok=NAME[,NAME..]` ignores flags that do not exist.
`mooncake_client`, `transfer_engine_bench` and `mooncake_http_metadata_server` have these
flags, too.

A whole number may be hexadecimal (`0x10`). A time has the unit that the flag names, or `ms`,
`s`, `m` or `h`: `5 s`. A size has the unit `K`, `M`, `G` or `T` of 1024, with `B` or `iB` if
you like: `1.5 GB`. A switch is `true`, `yes`, `on`, `1` or the opposite. Capitals make no
difference.

Flags of missing features are known. A switch is accepted at its default and refused
otherwise. Other settings are accepted without effect, and the master notes that at the
start.
";

/// Returns `docs/flags.md`.
fn flags_document() -> String {
    let mut text = String::from(FLAGS_HEAD);
    for group in GROUPS {
        write!(text, "\n## {}\n\n| flag | default | effect |\n|---|---|---|\n", group.name).unwrap();
        for flag in group.flags {
            let names = list(flag.names().map(|name| format!("--{name}")), ", formerly ");
            writeln!(text, "| {names} | {} | {} |", code(flag.default), effect(flag)).unwrap();
        }
    }
    text
}

fn list(names: impl Iterator<Item: std::fmt::Display>, between: &str) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(between)
}

fn code(value: &str) -> String {
    if value.is_empty() { String::new() } else { format!("`{value}`") }
}

fn effect(flag: &Flag) -> String {
    match flag.remark() {
        None => flag.help.into(),
        Some(remark) => format!("{} ({remark})", flag.help),
    }
}

#[test]
fn documents_are_up_to_date() {
    for (path, text) in documents() {
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(written == text, "{} is out of date: run `cargo xtask docs`", path.display());
    }
}

#[test]
#[ignore = "writes the documents: `cargo xtask docs`"]
fn write() {
    for (path, text) in documents() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
}

/// Every environment variable that the Python package reads is in the document.
#[test]
fn what_python_reads_is_listed() {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../mooncake-python/python/mooncake");
    let name = regex::Regex::new(r#"["']((?:MC|MOONCAKE)_[A-Z0-9_]+)["']"#).unwrap();
    let read = environment_document();
    let mut count = 0;
    for file in std::fs::read_dir(package).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_none_or(|extension| extension != "py") {
            continue;
        }
        let code = std::fs::read_to_string(&file).unwrap();
        for found in name.captures_iter(&code).map(|found| found[1].to_owned()) {
            // The first column may contain older names, too.
            let names = |line: &str| {
                line.strip_prefix("| ").and_then(|line| line.split(" | ").next().map(str::to_owned))
            };
            let listed = read.lines().filter_map(names).any(|names| names.contains(&format!("`{found}`")));
            assert!(listed, "{found} of {} is missing in docs/environment.md", file.display());
            count += 1;
        }
    }
    assert!(count > 15, "only {count} were found");
}

/// A variable is read, or `unread-variables.md` says why not. Only variables with several readers
/// are listed several times.
#[test]
fn no_variable_is_listed_twice() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/unread-variables.md");
    let unread = std::fs::read_to_string(path).unwrap();
    let name = regex::Regex::new(r"`([A-Z][A-Z0-9_]+\*?)`").unwrap();
    let first_column = unread.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let mut names: Vec<String> =
        first_column.flat_map(|names| name.captures_iter(names)).map(|found| found[1].to_owned()).collect();
    assert!(names.len() > 50, "only {} were found", names.len());
    // Flags set by variables of other programs, and what a client and its engine share.
    let both = ["MC_FORCE_TCP", "MC_BIND_ADDRESS"];
    let shared = |name: &str| both.contains(&name) || flags().any(|flag| flag.variables.contains(&name));
    let engine = VARIABLES.iter().flat_map(Setting::names);
    let client = ClientEnvironment::VARIABLES.iter().flat_map(Setting::names);
    let python = PYTHON.iter().map(|(name, ..)| *name);
    names.extend(engine.chain(client).chain(python).filter(|name| !shared(name)).map(Into::into));
    names.extend(flags().map(variable_of));
    names.extend(flags().flat_map(|flag| flag.variables).map(|name| (*name).into()));
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}
