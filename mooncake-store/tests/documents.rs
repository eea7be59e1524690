//! Documents that are made from code say what the code does. `cargo xtask docs` writes them.

use std::path::PathBuf;

use mooncake_store::config::{environment_document, flags_document};

fn documents() -> [(PathBuf, String); 2] {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs");
    [(folder.join("environment.md"), environment_document()), (folder.join("flags.md"), flags_document())]
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

/// What the Python package reads of the environment is in the document.
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
            // In the first column, which may hold older names too.
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
