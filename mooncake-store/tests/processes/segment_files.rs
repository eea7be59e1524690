//! Clients whose memory is a file: killed or closed, and started again, they serve their objects.

use std::path::Path;
use std::time::Instant;

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_store::client::{Client, ClientConfig, PutOptions, PutOutcome, SegmentFile};
use tempfile::TempDir;

use crate::cluster::{
    PATIENCE, SEGMENT, argument, builder_with, connect, eventually, in_segment_of, master, master_address,
    start, until_end_of_input,
};
use crate::process::{Process, free_port};

const OBJECTS: u64 = 200;

pub(crate) fn value(i: u64) -> Bytes {
    let mut bytes = vec![0; 1 + i as usize * 97 % 20_000];
    Rng::seeded(i).fill(&mut bytes);
    bytes.into()
}

async fn put(client: &Client, i: u64, config: &PutOptions) {
    let put = client.put_with(format!("key {i}"), &value(i)[..], config).await;
    assert_eq!(put.unwrap(), PutOutcome::Stored);
}

/// Process of a client: opens the file, stores objects according to its arguments, prints when they
/// would outlive it, and closes at the end of its input.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn owner() {
    let (Some(master), Some(file)) = (master_address(), argument::<String>("TEST_FILE")) else { return };
    let segment = argument("TEST_SEGMENT").unwrap_or(SEGMENT);
    let beside = SegmentFile::new(file);
    let index = argument("TEST_INDEX").unwrap_or(beside.index);
    let file = Some(SegmentFile { path: beside.path, index });
    let config = ClientConfig { segment_file: file, ..ClientConfig::default() };
    let client = match builder_with(config, &master, segment).connect().await {
        Ok(client) => client,
        Err(error) => return println!("\nsaid {error}"),
    };
    println!("\nsaid ready {}", client.hostname());
    if let Some(first) = argument::<u64>("TEST_FIRST") {
        let here = in_segment_of(client.hostname());
        let lasting: usize = argument("TEST_LASTING").unwrap();
        for i in first..first + argument("TEST_OBJECTS").unwrap_or(OBJECTS) {
            put(&client, i, &here).await;
        }
        eventually("all would outlive it", PATIENCE, async || {
            client.status().lasting_objects().await == lasting
        })
        .await;
        println!("said lasting");
    }
    let _ = until_end_of_input().await;
    client.close().await.unwrap();
}

pub(crate) struct Owner(pub(crate) Process, Box<dyn Iterator<Item = String>>);

impl Owner {
    fn start(port: u16, file: &Path, arguments: &[(&str, String)]) -> Self {
        let file = [("TEST_FILE", file.display().to_string())];
        let mut process = start("segment_files::owner", port, &[&file, arguments].concat());
        let said = Box::new(process.lines_after("said "));
        Self(process, said)
    }

    fn next_line(&mut self) -> String {
        self.1.next().unwrap_or_default()
    }

    /// Starts the process, which stores objects from a first number on and waits until this many
    /// are durable.
    fn ready(port: u16, file: &Path, first: Option<(u64, u64)>) -> Self {
        Self::ready_with(port, file, first, &[])
    }

    pub(crate) fn ready_with(
        port: u16,
        file: &Path,
        first: Option<(u64, u64)>,
        arguments: &[(&str, String)],
    ) -> Self {
        let first_arguments = first.map(|(first, lasting)| {
            [("TEST_FIRST", first.to_string()), ("TEST_LASTING", lasting.to_string())]
        });
        let arguments: Vec<_> =
            arguments.iter().cloned().chain(first_arguments.into_iter().flatten()).collect();
        let mut owner = Self::start(port, file, &arguments);
        let said = owner.next_line();
        assert!(said.starts_with("ready "), "{said}");
        if first.is_some() {
            assert_eq!(owner.next_line(), "lasting");
        }
        owner
    }

    /// Closes the input of the process, and waits until the client has closed.
    fn close(mut self) {
        drop(self.0.0.stdin.take());
        assert!(self.0.ended().success());
    }
}

pub(crate) fn folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Starts a master, a reader with memory of its own, and a folder for a file.
async fn stage(flags: &[&str]) -> (u16, Process, Client, TempDir) {
    let port = free_port();
    let server = master(port, flags);
    (port, server, connect(&format!("127.0.0.1:{port}"), SEGMENT).await, folder())
}

/// Returns the number of hits among these keys, and checks their bytes.
pub(crate) async fn hits(client: &Client, keys: std::ops::Range<u64>) -> u64 {
    let mut hits = 0;
    for i in keys {
        if let Ok(Some(bytes)) = client.get(format!("key {i}")).await {
            assert_eq!(bytes, value(i), "key {i}");
            hits += 1;
        }
    }
    hits
}

#[allow(clippy::disallowed_methods, reason = "the measurement is of real time")]
async fn served(objects: u64, mut there: impl AsyncFnMut() -> u64) {
    let begun = Instant::now();
    eventually("they are there again", PATIENCE, async || there().await == objects).await;
    println!("{objects} objects are there again {:?} after their process came up", begun.elapsed());
}

/// Flips a bit of these bytes in a file.
fn damage(file: &Path, bytes: &[u8]) {
    let mut all = std::fs::read(file).unwrap();
    let at = all.windows(bytes.len()).position(|window| window == bytes).expect("the bytes are in the file");
    all[at + bytes.len() / 2] ^= 1;
    let file = std::fs::File::options().write(true).open(file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &all[at..at + bytes.len()], at as u64).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_process_serves_what_a_killed_one_left() {
    let (port, _master, reader, folder) = stage(&["--client_ttl=60"]).await;
    let file = folder.path().join("segment");
    let owner = Owner::ready(port, &file, Some((0, OBJECTS)));
    assert_eq!(hits(&reader, 0..OBJECTS).await, OBJECTS);
    owner.0.kill();
    // Changes meanwhile count.
    assert!(reader.remove("key 7", true).await.unwrap());
    assert!(reader.remove("key 9", true).await.unwrap());
    let here = in_segment_of(reader.hostname());
    let put = reader.put_with("key 9", "another", &here).await;
    assert_eq!(put.unwrap(), PutOutcome::Stored);
    damage(&file, &value(11));

    let owner = Owner::ready(port, &file, None);
    served(OBJECTS - 3, async || hits(&reader, 0..9).await + hits(&reader, 10..OBJECTS).await).await;
    assert_eq!(reader.get("key 7").await.unwrap(), None, "what was removed stays removed");
    assert_eq!(reader.get("key 9").await.unwrap().unwrap(), "another");
    assert_eq!(reader.get("key 11").await.unwrap(), None, "damaged");

    // The owner returns again, with the objects written since, after a close instead of a kill.
    drop(owner);
    let owner = Owner::ready(port, &file, Some((1000, 2 * OBJECTS - 3)));
    served(2 * OBJECTS - 3, async || {
        hits(&reader, 0..9).await
            + hits(&reader, 10..OBJECTS).await
            + hits(&reader, 1000..1000 + OBJECTS).await
    })
    .await;
    owner.close();
    let _owner = Owner::ready(port, &file, None);
    served(OBJECTS, async || hits(&reader, 1000..1000 + OBJECTS).await).await;
    assert_eq!(reader.get("key 7").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_outlives_its_process_and_the_master_at_once() {
    let (port, server, reader, folder) = stage(&[]).await;
    let file = folder.path().join("segment");
    let owner = Owner::ready(port, &file, Some((0, OBJECTS)));
    owner.0.kill();
    server.kill();
    let _server = master(port, &[]);
    let _owner = Owner::ready(port, &file, None);
    served(OBJECTS, async || hits(&reader, 0..OBJECTS).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_comes_too_late_finds_an_empty_segment() {
    let (port, _master, reader, folder) = stage(&["--client_ttl=2"]).await;
    let file = folder.path().join("segment");
    Owner::ready(port, &file, Some((0, OBJECTS))).0.kill();
    eventually("the master has given it up", PATIENCE, async || {
        !reader.exist("key 0").await.unwrap() && !reader.exist("key 199").await.unwrap()
    })
    .await;
    let _owner = Owner::ready(port, &file, Some((1000, OBJECTS)));
    served(OBJECTS, async || hits(&reader, 1000..1000 + OBJECTS).await).await;
    assert_eq!(hits(&reader, 0..OBJECTS).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_not_to_be_had_is_refused_by_name() {
    let (port, _master, reader, folder) = stage(&[]).await;
    let file = folder.path().join("segment");
    let mut owner = Owner::ready(port, &file, Some((0, OBJECTS)));
    let second = Owner::start(port, &file, &[]).next_line();
    assert!(second.contains("holds it; stop that process") && second.contains("segment"), "{second}");
    assert_eq!(hits(&reader, 0..OBJECTS).await, OBJECTS, "the first is none the worse");
    assert!(owner.0.0.try_wait().unwrap().is_none());
    let foreign = folder.path().join("letter");
    std::fs::write(&foreign, "dear all").unwrap();
    let refused = Owner::start(port, &foreign, &[]).next_line();
    assert!(refused.contains("remove it, or give another") && refused.contains("letter"), "{refused}");
    assert_eq!(std::fs::read(&foreign).unwrap(), b"dear all");
    let nowhere = folder.path().join("no such folder/segment");
    let refused = Owner::start(port, &nowhere, &[]).next_line();
    assert!(refused.contains("no such folder"), "{refused}");
    // Another size makes another segment.
    owner.0.kill();
    let arguments = [("TEST_SEGMENT", (2 * SEGMENT).to_string())];
    assert!(Owner::start(port, &file, &arguments).next_line().starts_with("ready "));
    assert_eq!(hits(&reader, 0..OBJECTS).await, 0);
}

/// Changes one byte of a file.
fn set_byte(file: &Path, at: usize, byte: u8) {
    let mut all = std::fs::read(file).unwrap();
    all[at] = byte;
    std::fs::write(file, all).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_of_another_version_is_an_empty_segment() {
    let (port, _master, reader, folder) = stage(&[]).await;
    let file = folder.path().join("segment");
    let index = SegmentFile::new(&file).index;
    // The version is the eighth byte; a header with a wrong checksum stands for an unknown format.
    for (first, at) in [(0, 7), (1000, 20)] {
        let owner = Owner::ready(port, &file, Some((first, OBJECTS)));
        owner.0.kill();
        set_byte(&index, at, b'9');
        let owner = Owner::ready(port, &file, None);
        assert_eq!(hits(&reader, first..first + OBJECTS).await, 0);
        owner.close();
    }
}

/// Script that reserves huge pages for one segment of these tests, and not for another.
const RESERVED: &str = r#"
pages=/proc/sys/vm/nr_hugepages; before=$(cat $pages) || exit 77
free() { sed -n 's/^HugePages_Free: *//p' /proc/meminfo; }
trap 'echo $before >$pages' EXIT
echo $((before - $(free) + $3)) >$pages && [ "$(free)" = "$3" ] || exit 77
mount -t hugetlbfs -o pagesize=2M none "$1" || exit 77
TEST_FOLDER="$1" "$2" --exact segment_files::in_huge_pages --ignored --nocapture
"#;

/// The test runs in a mount namespace of its own with a folder of huge pages, which ends with the
/// processes.
#[test]
#[allow(clippy::print_stderr, reason = "a test that is left out says why")]
fn a_file_of_huge_pages_outlives_its_process() {
    let folder = tempfile::tempdir().unwrap();
    let test = std::env::current_exe().unwrap();
    let pages = (SEGMENT >> 21).to_string();
    let run = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", RESERVED, "sh"])
        .args([folder.path(), &test])
        .arg(pages)
        .output()
        .unwrap();
    let said = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    if run.status.code() == Some(77) || said.contains("unshare failed") {
        return eprintln!("left out: no huge pages can be had here: {said}");
    }
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of the test above, with huge pages"]
async fn in_huge_pages() {
    let Some(huge) = argument::<String>("TEST_FOLDER") else { return };
    let (port, _master, reader, folder) = stage(&["--client_ttl=60"]).await;
    let file = Path::new(&huge).join("segment");
    let refused = Owner::start(port, &file, &[]).next_line();
    assert!(
        refused.contains("MOONCAKE_STORE_SEGMENT_INDEX") && refused.contains("segment.objects"),
        "{refused}"
    );
    assert_eq!(std::fs::read_dir(&huge).unwrap().count(), 1, "nothing is left of an index there");

    let index = ("TEST_INDEX", folder.path().join("index").display().to_string());
    // The size needs one page more than there are.
    let larger = [index.clone(), ("TEST_SEGMENT", (SEGMENT + 1).to_string())];
    let refused = Owner::start(port, &file, &larger).next_line();
    let pages = format!("{} huge pages of 2048 KiB, {} are free", (SEGMENT >> 21) + 1, SEGMENT >> 21);
    assert!(refused.contains(&pages) && refused.contains("segment"), "{refused}");

    // The size needs all pages, though not all of their bytes.
    let arguments = [index, ("TEST_SEGMENT", (SEGMENT - 4096).to_string())];
    let owner = Owner::ready_with(port, &file, Some((0, OBJECTS)), &arguments);
    assert_eq!(std::fs::metadata(&file).unwrap().len(), SEGMENT);
    assert_eq!(hits(&reader, 0..OBJECTS).await, OBJECTS);
    owner.0.kill();
    assert!(reader.remove("key 7", true).await.unwrap());
    let owner = Owner::ready_with(port, &file, None, &arguments);
    served(OBJECTS - 1, async || hits(&reader, 0..7).await + hits(&reader, 8..OBJECTS).await).await;
    assert_eq!(reader.get("key 7").await.unwrap(), None, "what was removed stays removed");
    owner.close();
    let _owner = Owner::ready_with(port, &file, None, &arguments);
    served(OBJECTS - 1, async || hits(&reader, 0..7).await + hits(&reader, 8..OBJECTS).await).await;
}
