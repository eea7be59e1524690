//! Metadata directories in a folder, with the real library (Debian 12: `librocksdb7.8`). Without it
//! a test reports that and passes, except in CI.
#![cfg(all(feature = "metadata-rocksdb", not(miri)))]
#![allow(clippy::disallowed_methods, reason = "CI says who it is in the environment")]
#![allow(clippy::print_stderr, reason = "a test that did not run says so")]

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use futures::StreamExt;
use mooncake_core::clock::Rng;
use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_core::testkit::meta::check;
use mooncake_core::testkit::test_seed;
use mooncake_core::{ErrorCode, ErrorKind, Result};
use mooncake_metadata::rocksdb::RocksMetadata;
use mooncake_metadata::{DirectoryOptions, connect};
use mooncake_transport::Directory;
use tempfile::TempDir;

fn url(folder: &Path) -> String {
    format!("rocksdb://{}", folder.display())
}

fn open(folder: &Path) -> Result<RocksMetadata> {
    RocksMetadata::open(&url(folder))
}

/// A folder, and the directory in it if there is a library.
fn start() -> Option<(TempDir, Arc<RocksMetadata>)> {
    let folder = tempfile::tempdir().unwrap();
    match open(folder.path()) {
        Ok(backend) => Some((folder, Arc::new(backend))),
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::NotSupported, "{error}");
            assert!(std::env::var_os("MOONCAKE_CI").is_none(), "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// This program again, with one of its ignored tests, which finds `word` with [`given`].
fn other(test: &str, word: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture", "--skip", word]);
    command
}

/// Returns the argument of [`other`].
fn given() -> Option<String> {
    std::env::args().skip_while(|arg| arg != "--skip").nth(1)
}

fn passed(mut test: Command) {
    let outcome = test.output().unwrap();
    let text =
        [outcome.stdout, outcome.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(outcome.status.success() && text.contains("1 passed"), "{text}");
}

async fn text(backend: &RocksMetadata, key: &str) -> Option<String> {
    let value = backend.get(key).await.unwrap()?.value;
    Some(String::from_utf8(value.to_vec()).unwrap())
}

#[tokio::test]
async fn rocksdb_conforms() {
    let Some((_folder, backend)) = start() else { return };
    check(backend.clone()).await;
    backend.put("", "0".into(), Expect::Any).await.unwrap();
    backend.put("é", "2".into(), Expect::Any).await.unwrap();
    let all = backend.list("").await.unwrap();
    assert_eq!(all.iter().map(|(key, _)| &**key).collect::<Vec<_>>(), ["", "é"], "and nothing of its own");
}

#[tokio::test]
async fn what_was_put_survives_and_revisions_are_never_used_again() {
    let Some((folder, backend)) = start() else { return };
    let first = backend.put("k", "1".into(), Expect::Absent).await.unwrap();
    backend.put("gone", "x".into(), Expect::Any).await.unwrap();
    assert!(backend.delete("gone").await.unwrap() && backend.delete("k").await.unwrap());
    drop(backend);
    let backend = open(folder.path()).unwrap();
    assert!(backend.list("").await.unwrap().is_empty());
    let again = backend.put("k", "2".into(), Expect::Absent).await.unwrap();
    let stale = backend.put("k", "3".into(), Expect::At(first)).await.unwrap_err();
    assert!(stale.kind() == ErrorKind::AlreadyExists && again > first, "{stale}, {first}, {again}");
    drop(backend);
    check(Arc::new({
        let backend = open(folder.path()).unwrap();
        assert_eq!(text(&backend, "k").await.unwrap(), "2");
        assert!(backend.delete("k").await.unwrap());
        backend
    }))
    .await;
}

/// In one process it is one, however often it is opened; a connection string is enough.
#[tokio::test]
async fn all_in_one_process_share_it() {
    let Some((folder, backend)) = start() else { return };
    let options = DirectoryOptions::default();
    let Directory::Metadata { backend: other, .. } = connect(&url(folder.path()), &options).unwrap() else {
        panic!("a directory with a backend")
    };
    let mut events = other.watch("").await.unwrap();
    backend.put("k", "v".into(), Expect::Any).await.unwrap();
    assert_eq!(events.next().await.unwrap().key, "k");
    assert!(other.get("k").await.unwrap().is_some());
    drop((backend, other));
    assert!(events.next().await.is_none(), "nobody is left to change anything");
    for _ in 0..20 {
        // While the last one that had it is still closing it.
        let backend = open(folder.path()).unwrap();
        std::thread::spawn(move || drop(backend));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_writers_one_wins() {
    let Some((_folder, backend)) = start() else { return };
    let mut sum = 0;
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let backend = backend.clone();
            tokio::spawn(async move {
                let mut won = 0u64;
                while won < 5 {
                    let now = backend.get("n").await.unwrap();
                    let (count, expect) = match &now {
                        Some(now) => (now.value.len(), Expect::At(now.revision)),
                        None => (0, Expect::Absent),
                    };
                    match backend.put("n", vec![0; count + 1].into(), expect).await {
                        Ok(_) => won += 1,
                        Err(error) => assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}"),
                    }
                }
                won
            })
        })
        .collect();
    for task in tasks {
        sum += task.await.unwrap();
    }
    assert_eq!(backend.get("n").await.unwrap().unwrap().value.len() as u64, sum);
}

#[test]
fn a_second_process_is_refused() {
    let Some((folder, _backend)) = start() else { return };
    passed(other("refuses_a_folder_in_use", &folder.path().to_string_lossy()));
}

#[test]
#[ignore = "run by a_second_process_is_refused"]
fn refuses_a_folder_in_use() {
    let Some(folder) = given() else { return };
    let error = open(Path::new(&folder)).unwrap_err();
    assert!(
        error.code() == ErrorCode::FileLockFail && error.message().contains("another process"),
        "{error}"
    );
    assert!(error.to_string().contains(&folder), "{error}");
}

#[test]
fn what_is_no_folder_of_ours_is_refused() {
    let Some((folder, _backend)) = start() else { return };
    let file = folder.path().join("file");
    fs::write(&file, "something").unwrap();
    for path in [&file, &file.join("below"), Path::new("/proc/nowhere")] {
        let error = open(path).unwrap_err();
        assert!(
            error.code() == ErrorCode::FileOpenFail && error.to_string().contains("rocksdb:///"),
            "{error}"
        );
    }
    let full = tempfile::tempdir().unwrap();
    fs::write(full.path().join("letter"), "dear all").unwrap();
    let error = open(full.path()).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.message().contains("other contents"), "{error}");
    assert_eq!(fs::read_dir(full.path()).unwrap().count(), 1);
    for text in ["rocksdb://", "rocksdb://host:1", "rocksdb:relative", "rocksdb://."] {
        let error = RocksMetadata::open(text).unwrap_err();
        assert!(
            error.kind() == ErrorKind::Invalid && error.message().contains("absolute path"),
            "{text}: {error}"
        );
    }
}

/// Process that the next test kills, not a test of its own. It reports each change before it begins
/// and after it is done.
#[tokio::test]
#[ignore = "run by killed_while_writing_metadata"]
async fn writer_of_metadata() {
    let Some(place) = given() else { return };
    let (folder, seed) = place.rsplit_once('#').unwrap();
    let seed: u64 = seed.parse().unwrap();
    let backend = open(Path::new(folder)).unwrap();
    let out = std::io::stdout();
    let say = |line: String| {
        let mut out = out.lock();
        out.write_all(line.as_bytes()).and_then(|()| out.flush()).unwrap();
    };
    let mut rng = Rng::seeded(seed);
    for n in 0.. {
        let key = rng.below(12);
        if rng.below(6) == 0 {
            say(format!("\ndelete {key}\n"));
            backend.delete(&key.to_string()).await.unwrap();
        } else {
            // Long enough for the log to become files now and then.
            let (value, length) = (seed * 1_000_000 + n, rng.below(300_000));
            say(format!("\nput {key} {value} {length}\n"));
            backend.put(&key.to_string(), long(value, length).into(), Expect::Any).await.unwrap();
        }
        say("done\n".into());
    }
}

fn long(value: u64, length: u64) -> String {
    let mut text = value.to_string();
    text.extend((0..length).map(|at| char::from(b'a' + ((value + at) % 26) as u8)));
    text
}

#[tokio::test]
async fn killed_while_writing_metadata() {
    let Some((folder, backend)) = start() else { return };
    drop(backend);
    let mut rng = Rng::seeded(test_seed());
    // Permitted states of each key: the last acknowledged one, and those in progress.
    let mut may: HashMap<u64, Vec<Option<(u64, u64)>>> = HashMap::new();
    let mut found = 0;
    for seed in 0..40u64 {
        let mut child = other("writer_of_metadata", &format!("{}#{seed}", folder.path().display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (mut left, mut pending, mut killed) = (1 + rng.below(60), None, false);
        while let Some(Ok(line)) = lines.next() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words[at].parse::<u64>().unwrap();
            match words.first() {
                Some(&"put") => pending = Some((number(1), Some((number(2), number(3))))),
                Some(&"delete") => pending = Some((number(1), None)),
                Some(&"done") => {
                    if let Some((key, what)) = pending.take() {
                        may.insert(key, vec![what]);
                    }
                }
                _ => continue,
            }
            left -= 1;
            if left == 0 && !killed {
                // In the middle of something as often as not: the child runs on while this does.
                for n in 0..rng.below(200_000) {
                    std::hint::black_box(n);
                }
                child.kill().unwrap();
                killed = true;
            }
            left = left.max(1);
        }
        child.wait().unwrap();
        assert!(killed, "the writer ended by itself");
        if let Some((key, what)) = pending {
            may.entry(key).or_insert_with(|| vec![None]).push(what);
        }
        let backend = open(folder.path()).unwrap();
        for (key, options) in &mut may {
            let read = text(&backend, &key.to_string()).await;
            let is = |option: &Option<(u64, u64)>| read == option.map(|(value, length)| long(value, length));
            let now = options.iter().position(is);
            let now = now.unwrap_or_else(|| {
                let read = read.as_ref().map(|text| &text[..text.len().min(20)]);
                panic!("round {seed}, key {key}: {read:?}, may be {options:?}")
            });
            found += usize::from(read.is_some());
            *options = vec![options[now]];
        }
    }
    assert!(found > 100, "{found} keys found");
}

/// The files of a folder.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    files.sort();
    files
}

/// A small directory, some of it in a file and some in the log, and its entries.
async fn image() -> Option<(TempDir, Vec<(String, String)>)> {
    let (folder, backend) = start()?;
    let mut entries = Vec::new();
    for number in 0..6u64 {
        if number == 3 {
            // The contents of the log are written to a file when it is opened again.
            continue;
        }
        let (key, value) = (format!("key/{number}"), long(number, 40));
        backend.put(&key, value.clone().into(), Expect::Any).await.unwrap();
        entries.push((key, value));
    }
    backend.put("key/gone", "x".into(), Expect::Any).await.unwrap();
    drop(backend);
    let backend = open(folder.path()).unwrap();
    let (key, value) = ("key/3".to_owned(), long(3, 40));
    backend.put(&key, value.clone().into(), Expect::Any).await.unwrap();
    assert!(backend.delete("key/gone").await.unwrap());
    entries.insert(3, (key, value));
    Some((folder, entries))
}

/// Checks that all entries are present. Otherwise the open must have been refused.
async fn whole(folder: &Path, entries: &[(String, String)], what: &str) -> bool {
    let read = async { open(folder)?.list("").await }.await;
    match read {
        Ok(found) => {
            let found: Vec<_> = found
                .into_iter()
                .map(|(key, value)| (key, String::from_utf8_lossy(&value.value).into_owned()))
                .collect();
            assert_eq!(found, entries, "{what}");
            true
        }
        Err(error) => {
            let codes = [ErrorCode::ChecksumMismatch, ErrorCode::FileOpenFail, ErrorCode::FileReadFail];
            let foreign = error.message().contains("other contents");
            assert!(codes.contains(&error.code()) || foreign, "{what}: {error}");
            assert!(error.to_string().contains("rocksdb:///"), "{what}: {error}");
            false
        }
    }
}

#[tokio::test]
async fn a_damaged_folder_is_refused_or_whole() {
    let Some((folder, entries)) = image().await else { return };
    let image = files(folder.path());
    let (mut refused, mut tried) = (0, 0);
    for (path, bytes) in &image {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // Texts for people.
        if name.starts_with("LOG") {
            continue;
        }
        let step = bytes.len() / 40 + 1;
        let cut = (0..bytes.len()).step_by(step).map(|length| bytes[..length].to_vec());
        let flipped = (0..bytes.len()).step_by(step).map(|at| {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (at % 8);
            bytes
        });
        let missing = std::iter::once(None);
        for (case, damaged) in missing.chain(cut.chain(flipped).map(Some)).enumerate() {
            let copy = tempfile::tempdir().unwrap();
            for (path, bytes) in &image {
                fs::write(copy.path().join(path.file_name().unwrap()), bytes).unwrap();
            }
            match &damaged {
                Some(bytes) => fs::write(copy.path().join(&name), bytes).unwrap(),
                None => fs::remove_file(copy.path().join(&name)).unwrap(),
            }
            tried += 1;
            refused += usize::from(!whole(copy.path(), &entries, &format!("{name}, case {case}")).await);
        }
    }
    assert!(refused > tried / 3 && refused < tried, "{refused} of {tried} refused");
    assert!(whole(folder.path(), &entries, "as it was").await);
}

#[test]
fn a_full_file_system() {
    let Some((folder, backend)) = start() else { return };
    drop(backend);
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount"]);
        command
    };
    if !unshare().args(["mount", "-t", "tmpfs", "none", "/tmp"]).status().is_ok_and(|s| s.success()) {
        return;
    }
    let place = folder.path().display().to_string();
    let writer = other("lives_on_a_full_file_system", &place);
    let words = [writer.get_program()].into_iter().chain(writer.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let mut command = unshare();
    command.args([
        "sh",
        "-c",
        &format!("mount -t tmpfs -o size=32m none {place} && exec {}", words.join(" ")),
    ]);
    passed(command);
}

/// A value that does not fit is an error, and earlier values remain. With free space again the
/// directory continues, watchers included.
#[tokio::test]
#[ignore = "run by a_full_file_system"]
async fn lives_on_a_full_file_system() {
    let Some(folder) = given() else { return };
    let folder = Path::new(&folder);
    let backend = open(&folder.join("metadata")).unwrap();
    let mut events = backend.watch("").await.unwrap();
    let ballast = folder.join("ballast");
    fs::write(&ballast, vec![0; 22 << 20]).unwrap();
    let value = long(1, 100_000);
    let (mut stored, mut refused) = (Vec::new(), 0);
    for number in 0..150 {
        match backend.put(&number.to_string(), value.clone().into(), Expect::Any).await {
            Ok(_) => stored.push(number),
            Err(error) => {
                assert!(error.to_string().contains("No space"), "{error}");
                refused += 1;
            }
        }
    }
    assert!(stored.len() > 5 && refused > 5, "{} kept, {refused} refused", stored.len());
    fs::remove_file(&ballast).unwrap();
    backend.put("again", "there is room".into(), Expect::Any).await.unwrap();
    let there = backend.list("").await.unwrap();
    for number in &stored {
        assert_eq!(text(&backend, &number.to_string()).await.as_ref(), Some(&value), "{number}");
    }
    // Watchers received each stored value, in order.
    let mut received = Vec::new();
    loop {
        let event = events.next().await.unwrap();
        let last = event.key == "again";
        received.push(event.key);
        if last {
            break;
        }
    }
    let mut revisions: Vec<_> = there.into_iter().map(|(key, value)| (value.revision, key)).collect();
    revisions.sort();
    assert_eq!(received, revisions.into_iter().map(|(_, key)| key).collect::<Vec<_>>());
    drop(backend);
    let backend = open(&folder.join("metadata")).unwrap();
    assert_eq!(text(&backend, "again").await.as_deref(), Some("there is room"));
}

/// RocksDB creates files with permissions that depend on the umask.
#[tokio::test]
async fn keys_and_values_are_private_to_the_user() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
    let Some((folder, backend)) = start() else { return };
    let path = folder.path();
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o7777;
    let widen = |path: &Path, bits| fs::set_permissions(path, fs::Permissions::from_mode(bits)).unwrap();
    let check = || {
        assert_eq!(mode(path), 0o700);
        let files: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() > 3, "{files:?}");
        files
    };
    backend.put("key", b"value"[..].into(), Expect::Any).await.unwrap();
    for file in check() {
        widen(&file, 0o644);
    }
    widen(path, 0o755);
    drop(backend);
    let backend = open(path).unwrap();
    assert!(backend.get("key").await.unwrap().is_some());
    check();
    drop(backend);
    let mark = path.join("acknowledged");
    assert_eq!(mode(&mark), 0o600);
    // New files inherit permissions where the file system supports it.
    let probe = path.join("probe");
    fs::write(&probe, "").unwrap();
    if mode(&probe) == 0o600 {
        assert!(check().iter().all(|file| mode(file) == 0o600));
    }
    fs::remove_file(&probe).unwrap();
    if chown(&mark, Some(65534), None).is_ok() {
        let error = open(path).unwrap_err();
        assert!(error.message().contains("user 65534"), "{error}");
        chown(&mark, Some(0), None).unwrap();
        chown(path, Some(65534), None).unwrap();
        let error = open(path).unwrap_err();
        assert!(error.message().contains("user 65534"), "{error}");
        chown(path, Some(0), None).unwrap();
    }
    fs::remove_file(&mark).unwrap();
    symlink("/etc/hostname", &mark).unwrap();
    assert!(open(path).unwrap_err().message().contains("symbolic link"));
    let link = tempfile::tempdir().unwrap();
    symlink(path, link.path().join("link")).unwrap();
    assert!(open(&link.path().join("link")).unwrap_err().message().contains("symbolic link"));
}
