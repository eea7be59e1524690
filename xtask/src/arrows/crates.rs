//! Dependencies between the crates of the workspace, in the manifests and in ARCHITECTURE.md.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::run::{Result, root};

const DOCUMENT: &str = "ARCHITECTURE.md";

/// A crate of the workspace.
pub(super) struct Package {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    /// Roots of its targets but tests, relative to the workspace.
    pub(super) roots: Vec<PathBuf>,
    depends_on: BTreeSet<String>,
}

/// Reads the manifests of all crates of the workspace.
pub(super) fn packages() -> Result<Vec<Package>> {
    let manifest = read("Cargo.toml")?;
    // The crates are the first list of the manifest.
    let list = manifest.split_once(" = [\n").and_then(|(_, rest)| rest.split_once(']'));
    let (folders, _) = list.ok_or("Cargo.toml has no list of crates")?;
    folders.split('"').skip(1).step_by(2).map(package).collect()
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(root().join(path)).map_err(|e| format!("cannot read {path}: {e}"))
}

fn package(folder: &str) -> Result<Package> {
    let manifest = read(&format!("{folder}/Cargo.toml"))?;
    let (mut section, mut name) = (String::new(), String::new());
    let (mut roots, mut depends_on) = (Vec::new(), BTreeSet::new());
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']).to_owned();
            // `[dependencies.name]`.
            if let Some(name) = section.strip_prefix("dependencies.") {
                depends_on.extend(own_crate(name));
            }
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        let (key, value) = (key.trim(), value.trim().trim_matches('"'));
        match section.as_str() {
            "package" if key == "name" => name = value.to_owned(),
            "lib" | "bin" | "example" | "bench" if key == "path" => roots.push(value.into()),
            // Those of development are in sections of another name.
            section if section == "dependencies" || section.ends_with(".dependencies") => {
                depends_on.extend(own_crate(key.split('.').next().unwrap_or(key)));
            }
            _ => {}
        }
    }
    let folder = PathBuf::from(folder);
    for known in ["src/lib.rs", "src/main.rs"] {
        roots.push(known.into());
    }
    for targets in ["src/bin", "examples", "benches", "."] {
        for entry in std::fs::read_dir(root().join(&folder).join(targets)).into_iter().flatten().flatten() {
            let path = PathBuf::from(targets).join(entry.file_name());
            let file = if entry.path().is_dir() { path.join("main.rs") } else { path };
            let is_root = file.extension().is_some_and(|ending| ending == "rs") && targets != ".";
            if is_root {
                roots.push(file);
            }
        }
    }
    let mut roots: Vec<PathBuf> = roots.into_iter().map(|path| folder.join(path)).collect();
    roots.retain(|path| root().join(path).is_file());
    roots.sort();
    roots.dedup();
    Ok(Package { name, folder, roots, depends_on })
}

fn own_crate(name: &str) -> Option<String> {
    name.starts_with("mooncake").then(|| name.to_owned())
}

/// Compares the manifests with the table; returns the differences as sentences.
pub(super) fn differences(packages: &[Package]) -> Result<Vec<String>> {
    let table = table(&read(DOCUMENT)?)?;
    let mut found = Vec::new();
    for package in packages {
        let Some(allowed) = table.get(&package.name) else {
            found.push(format!("{DOCUMENT} has no row for the crate `{}`", package.name));
            continue;
        };
        for name in package.depends_on.difference(allowed) {
            let manifest = package.folder.join("Cargo.toml");
            found.push(format!(
                "{}: `{}` depends on `{name}`, which its row in {DOCUMENT} does not name",
                manifest.display(),
                package.name
            ));
        }
        for name in allowed.difference(&package.depends_on) {
            found.push(format!("{DOCUMENT}: `{}` does not depend on `{name}`", package.name));
        }
    }
    Ok(found)
}

/// Reads the table whose first two columns are `crate` and `depends on`.
fn table(document: &str) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let cells = |line: &str| -> Vec<String> {
        line.trim().trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
    };
    let is_header =
        |line: &&str| matches!(cells(line).as_slice(), [a, b, ..] if a == "crate" && b == "depends on");
    let rows = document.lines().skip_while(|line| !is_header(line)).skip(2);
    let rows = rows.take_while(|line| line.trim_start().starts_with('|'));
    let row = |line: &str| {
        let mut cells = cells(line).into_iter();
        let name = cells.next()?;
        let names = cells.next()?;
        let names = names.split([',', ' ']).filter(|name| name.starts_with("mooncake"));
        Some((name, names.map(str::to_owned).collect()))
    };
    let table: BTreeMap<_, _> = rows.filter_map(row).collect();
    if table.is_empty() {
        return Err(format!("{DOCUMENT} has no table with the columns `crate` and `depends on`"));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_found_by_its_columns() {
        let document = "| a | b |\n|---|---|\n| x | y |\n\n| crate | depends on | why |\n|---|---|---|\n| `mooncake-a` | `mooncake-b`, `mooncake-c` | z |\n| xtask | nothing | |\n\n| no | more |\n";
        let table = table(document).unwrap();
        assert_eq!(table.len(), 2);
        assert_eq!(table["mooncake-a"].iter().collect::<Vec<_>>(), ["mooncake-b", "mooncake-c"]);
        assert!(table["xtask"].is_empty());
        assert!(super::table("| a |\n").is_err());
    }

    #[test]
    fn every_crate_of_the_workspace_has_a_root() {
        for package in packages().unwrap() {
            assert!(!package.roots.is_empty(), "{}", package.name);
        }
    }
}
