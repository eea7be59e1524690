//! Compares generated documents with the code that they describe. `cargo xtask docs` writes them.

use std::fmt::Write as _;
use std::path::PathBuf;

use mooncake_core::error::{ErrorCode, ErrorKind};
use mooncake_store::config::{environment_document, flags_document};

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
    let document = environment_document();
    let read = document.split("\n## Variables").next().unwrap();
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
            assert!(listed, "{found} of {} is missing in config/environment.rs", file.display());
            count += 1;
        }
    }
    assert!(count > 15, "only {count} were found");
}
