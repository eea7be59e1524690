//! Crashes and bad sectors: a value that is read is one that was put, and an object that was
//! acknowledged before a crash is present.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{dir, engines, get, open, pattern, put};
use mooncake_core::ErrorKind;
use mooncake_core::clock::Rng;
use mooncake_core::testkit::{effort, test_seed};
use mooncake_disk::{DiskConfig, EngineKind, FileStore, StoreConfig};
use tempfile::TempDir;

const CAPACITY: u64 = 16 * 8192;

fn threads() -> DiskConfig {
    DiskConfig { engine: EngineKind::Threads, threads: 1, ..DiskConfig::default() }
}

type Objects = Vec<(&'static str, Vec<u8>)>;

/// Creates a store with objects put, replaced and removed. `present` are present keys, `missing`
/// are missing ones.
fn image() -> (TempDir, Objects, Vec<&'static str>) {
    let dir = dir();
    let (store, _) = open(&threads(), dir.path(), CAPACITY);
    for (seed, key) in ["one", "two", "three", "four"].into_iter().enumerate() {
        put(&store, key.as_bytes(), &pattern(seed as u64, 600)).unwrap();
    }
    put(&store, b"two", &pattern(10, 300)).unwrap();
    futures::executor::block_on(store.remove(["three"]));
    put(&store, b"five", &pattern(11, 700)).unwrap();
    let present = [("one", 0, 600), ("two", 10, 300), ("four", 3, 600), ("five", 11, 700)];
    let present = present.map(|(key, seed, len)| (key, pattern(seed, len))).to_vec();
    (dir, present, vec!["three"])
}

fn copy(from: &Path) -> TempDir {
    let to = dir();
    for name in ["index", "objects"] {
        std::fs::copy(from.join(name), to.path().join(name)).unwrap();
    }
    to
}

/// Opens a damaged copy and reads everything. Returns how many objects are right. None may be
/// wrong.
fn check(dir: &Path, present: &[(&str, Vec<u8>)], missing: &[&str], what: &str) -> usize {
    let (store, found) = open(&threads(), dir, CAPACITY);
    let mut intact = 0;
    for (key, value) in present {
        match get(&store, key.as_bytes()) {
            Ok(None) => {}
            Ok(Some(read)) => {
                assert!(read == *value, "{what}: {key} has bytes that were not put");
                intact += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {key}: {error}");
                assert_eq!(get(&store, key.as_bytes()).unwrap(), None, "{what}: {key} stays a miss");
            }
        }
    }
    for key in missing {
        assert_eq!(get(&store, key.as_bytes()).unwrap(), None, "{what}: {key} came back");
    }
    assert!(found.objects >= intact as u64);
    intact
}

#[test]
fn every_prefix_of_the_index() {
    let (dir, present, missing) = image();
    let index = std::fs::read(dir.path().join("index")).unwrap();
    let mut max_found = 0;
    let step = effort(5, 1);
    for len in (0..=index.len()).filter(|len| len % step == 0 || *len == index.len()) {
        let copy = copy(dir.path());
        std::fs::write(copy.path().join("index"), &index[..len]).unwrap();
        let intact = check(copy.path(), &present, &missing, &format!("{len} bytes of the index"));
        assert!(intact >= max_found, "a longer index never has fewer objects");
        max_found = intact;
    }
    assert_eq!(max_found, present.len(), "the whole index has all objects");
}

#[test]
fn every_prefix_of_the_objects() {
    let (dir, present, missing) = image();
    let objects = std::fs::read(dir.path().join("objects")).unwrap();
    // Tests each byte of the used parts, and the middle of the empty ones.
    let used: Vec<usize> = (0..objects.len()).filter(|at| objects[*at] != 0 || at % 512 == 0).collect();
    for len in used.iter().copied().step_by(effort(29, 7)).chain([objects.len()]) {
        let copy = copy(dir.path());
        std::fs::write(copy.path().join("objects"), &objects[..len]).unwrap();
        check(copy.path(), &present, &missing, &format!("{len} bytes of objects"));
    }
}

#[test]
fn every_flipped_byte() {
    let (dir, present, missing) = image();
    for name in ["index", "objects"] {
        let bytes = std::fs::read(dir.path().join(name)).unwrap();
        let copy = copy(dir.path());
        let mut damaged = 0;
        let mut flipped = 0;
        for at in (0..bytes.len()).step_by(effort(13, 1)) {
            // Zeros far from any record are covered by their neighbours.
            if bytes[at] == 0 && at % 64 != 0 && name == "objects" {
                continue;
            }
            let mut corrupted = bytes.clone();
            corrupted[at] ^= 1 << (at % 8);
            for (file, content) in [("index", None), ("objects", None), (name, Some(&corrupted))] {
                match content {
                    Some(content) => std::fs::write(copy.path().join(file), content).unwrap(),
                    None => drop(std::fs::copy(dir.path().join(file), copy.path().join(file)).unwrap()),
                }
            }
            let intact = check(copy.path(), &present, &missing, &format!("byte {at} of {name}"));
            assert!(
                intact + 1 >= present.len() || (name == "index" && at < 64),
                "byte {at} of {name} costs at most one object"
            );
            damaged += usize::from(intact < present.len());
            flipped += 1;
        }
        assert!(damaged > effort(7, 100), "{name}: only {damaged} of {flipped} flips were detected");
    }
}

#[test]
fn an_index_of_another_version_is_set_aside_and_the_store_begins_empty() {
    use mooncake_disk::layout::{IndexHeader, VERSION};
    let (dir, present, missing) = image();
    let mut index = std::fs::read(dir.path().join("index")).unwrap();
    let header = IndexHeader::decode(&index).unwrap();
    index[..64].copy_from_slice(&IndexHeader { version: VERSION + 1, ..header }.encode());
    std::fs::write(dir.path().join("index"), &index).unwrap();
    assert_eq!(check(dir.path(), &present, &missing, "objects of another version"), 0);
    let renamed_index = dir.path().join(format!("index.version-{}", VERSION + 1));
    assert_eq!(std::fs::read(renamed_index).unwrap(), index);
    // The new store works, and is found again.
    let config = || StoreConfig::new(dir.path(), CAPACITY);
    let (store, _) = FileStore::open(threads(), config()).unwrap();
    put(&store, b"key", b"value").unwrap();
    drop(store);
    let (_store, found) = FileStore::open(threads(), config()).unwrap();
    assert_eq!((found.objects, found.other_version), (1, None));
}

/// Objects of one store are not taken for those of another, even at the same offset.
#[test]
fn records_of_another_store_do_not_count() {
    let (one, present, missing) = image();
    let (two, ..) = image();
    std::fs::copy(two.path().join("objects"), one.path().join("objects")).unwrap();
    assert_eq!(check(one.path(), &present, &missing, "objects of another store"), 0);
}

/// Process that the next test kills. It prints what it is about to do, does it, and prints that it
/// is done.
#[test]
#[ignore = "run by killed_while_writing"]
fn writer() {
    let Some(dir) = std::env::args().skip_while(|arg| arg != "--skip").nth(1) else { return };
    let (dir, seed) = dir.rsplit_once('#').unwrap();
    let seed: u64 = seed.parse().unwrap();
    let disk = engines()[(seed % 3) as usize].clone();
    let (store, _) = open(&disk, Path::new(dir), 4 << 20);
    let out = std::io::stdout();
    let print = |line: String| {
        let mut out = out.lock();
        out.write_all(line.as_bytes()).and_then(|()| out.flush()).unwrap();
    };
    let mut rng = Rng::seeded(seed);
    for n in 0.. {
        let (key, value) = (rng.below(12), seed * 1_000_000 + n);
        let len = 1 + rng.below(120_000);
        if rng.below(8) == 0 {
            print(format!("\nremove {key}\n"));
            futures::executor::block_on(store.remove([key.to_le_bytes()]));
        } else {
            print(format!("\nput {key} {value} {len}\n"));
            put(&store, &key.to_le_bytes(), &pattern(value, len as usize)).unwrap();
        }
        print("done\n".into());
    }
}

#[test]
fn killed_while_writing() {
    let dir = dir();
    let mut rng = Rng::seeded(test_seed());
    // Possible content of each key: the last acknowledged value, and the one in progress.
    let mut possible: std::collections::HashMap<u64, Vec<Option<(u64, u64)>>> = Default::default();
    let (mut survivors, mut rounds) = (0, 0);
    let all = effort(50, 200);
    for seed in 0..all {
        let argument = format!("{}#{seed}", dir.path().display());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--ignored", "--nocapture", "--skip", &argument])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (mut remaining, mut pending) = (1 + rng.below(40), None);
        let mut killed = false;
        while let Some(Ok(line)) = lines.next() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words[at].parse::<u64>().unwrap();
            match words.first() {
                Some(&"put") => pending = Some((number(1), Some((number(2), number(3))))),
                Some(&"remove") => pending = Some((number(1), None)),
                Some(&"done") => {
                    if let Some((key, what)) = pending.take() {
                        possible.insert(key, vec![what]);
                    }
                }
                _ => continue,
            }
            remaining -= 1;
            if remaining == 0 && !killed {
                // Often in the middle of an operation: the child runs while this loop does.
                for n in 0..rng.below(200_000) {
                    std::hint::black_box(n);
                }
                child.kill().unwrap();
                killed = true;
            }
            remaining = remaining.max(1);
        }
        child.wait().unwrap();
        assert!(killed, "the writer ended by itself");
        if let Some((key, what)) = pending {
            possible.entry(key).or_insert_with(|| vec![None]).push(what);
        }
        let (store, _) = open(&engines()[(rng.below(3)) as usize], dir.path(), 4 << 20);
        for (key, options) in &mut possible {
            let read = get(&store, &key.to_le_bytes()).unwrap();
            let is = |option: &Option<(u64, u64)>| match (option, &read) {
                (None, None) => true,
                (Some((value, len)), Some(read)) => *read == pattern(*value, *len as usize),
                _ => false,
            };
            let now = options.iter().position(is);
            let now = now.unwrap_or_else(|| {
                let read = read.as_ref().map(Vec::len);
                panic!("round {seed}, key {key}: {read:?} bytes, expected one of {options:?}")
            });
            survivors += usize::from(read.is_some());
            *options = vec![options[now]];
        }
        rounds += 1;
    }
    assert!(rounds == all && survivors > 5 * all as usize, "{survivors} objects found in {rounds} rounds");
}
