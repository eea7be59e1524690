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
