//! Reads stores that releases have written.
//!
//! `MOONCAKE_CORPUS=v0.1.0 cargo test -p mooncake-disk --test corpus -- --ignored` writes the store
//! of this version. A release adds its folder and never changes the folder of another.

mod common;

use std::path::{Path, PathBuf};

use common::{dir, get, open, pattern, put};
use mooncake_disk::{DiskConfig, EngineKind};

const CAPACITY: u64 = 16 * 8192;
/// Key, seed of the value, and length of each object.
const OBJECTS: [(&str, u64, usize); 4] =
    [("one", 0, 600), ("two", 10, 300), ("four", 3, 6000), ("five", 11, 1)];

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

fn threads() -> DiskConfig {
    DiskConfig { engine: EngineKind::Threads, threads: 1, ..DiskConfig::default() }
}

fn copy(from: &Path, to: &Path) {
    for name in ["index", "objects"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

#[test]
#[ignore = "writes the corpus of a release"]
fn write() {
    #[allow(clippy::disallowed_methods, reason = "the release comes from the environment")]
    let Ok(release) = std::env::var("MOONCAKE_CORPUS") else { return };
    let folder = dir();
    let (store, _) = open(&threads(), folder.path(), CAPACITY);
    for (key, seed, len) in OBJECTS {
        put(&store, key.as_bytes(), &pattern(seed + 1, len)).unwrap();
        put(&store, key.as_bytes(), &pattern(seed, len)).unwrap();
    }
    put(&store, b"three", &pattern(2, 100)).unwrap();
    futures::executor::block_on(store.remove(["three"]));
    drop(store);
    let to = corpus().join(release);
    std::fs::create_dir_all(&to).unwrap();
    copy(folder.path(), &to);
}

#[test]
fn stores_of_every_release_are_read() {
    let releases = std::fs::read_dir(corpus()).unwrap().map(|entry| entry.unwrap().path());
    let releases: Vec<_> = releases.collect();
    assert!(!releases.is_empty(), "the corpus has at least one release");
    for release in releases {
        let folder = dir();
        copy(&release, folder.path());
        let (store, found) = open(&threads(), folder.path(), CAPACITY);
        let shown = release.display();
        assert_eq!((found.objects, found.other_version), (OBJECTS.len() as u64, None), "{shown}");
        for (key, seed, len) in OBJECTS {
            assert_eq!(get(&store, key.as_bytes()).unwrap(), Some(pattern(seed, len)), "{shown}: {key}");
        }
        assert_eq!(get(&store, b"three").unwrap(), None, "{shown}");
    }
}
