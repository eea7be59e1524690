//! Files on a file system that clients share: written after puts, and read where no other replica
//! exists.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::replica::ReplicaLocation;
use mooncake_store::client::{
    Client, ClientBuilder, ClientConfig, FileReport, PutOptions, PutOutcome, RangeOutcome, RangeRead,
    ReadInto,
};
use mooncake_store::master::{FileOptions, Master, MasterOptions};
use mooncake_store::protocol::server::{Server, ServerOptions};
use mooncake_store::protocol::service::MasterService;

use crate::cluster::{Cluster, Kind, OtherShapes, eventually, value};

/// Length of a value above that of one read.
const LONG: usize = 5 << 20;

async fn cluster(dir: &Path, files: FileOptions) -> Cluster {
    let files = FileOptions { dir: dir.join("lab").to_str().unwrap().into(), ..files };
    Cluster::start(Kind::Tcp, MasterOptions { files: Some(files), ..MasterOptions::default() }).await
}

/// Returns the settings of a client that allows temporary folders.
fn builder(cluster: &Cluster) -> ClientBuilder {
    cluster.builder().fs_roots([std::env::temp_dir()])
}

/// Returns the path of the file of a key, if the master lists one.
fn file(cluster: &Cluster, key: &[u8]) -> Option<PathBuf> {
    listed(&cluster.master, key)
}

fn listed(master: &Master, key: &[u8]) -> Option<PathBuf> {
    let replicas = master.peek(key).unwrap_or_default();
    replicas.iter().find_map(|replica| match &replica.location {
        ReplicaLocation::Disk { path, .. } => Some(path.into()),
        _ => None,
    })
}

async fn written(cluster: &Cluster, key: &[u8]) -> PathBuf {
    eventually("it has a file", async || file(cluster, key).is_some()).await;
    file(cluster, key).unwrap()
}

/// Returns the files below a folder.
fn all(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().map_while(Result::ok) {
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(all(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

/// Starts a cluster in which only files have these values: the owners of the memory are gone.
async fn only_in_files(dir: &Path, items: &[(&[u8], Bytes)]) -> (Cluster, Client) {
    let cluster = cluster(dir, FileOptions::default()).await;
    let (holder, client) = (
        builder(&cluster).connect().await.unwrap(),
        builder(&cluster).segment(0).local_buffer(16 << 20).connect().await.unwrap(),
    );
    for (key, value) in items {
        assert_eq!(client.put(key, &value[..]).await.unwrap(), PutOutcome::Stored);
        written(&cluster, key).await;
    }
    holder.close().await.unwrap();
    for (key, _) in items {
        let replicas = cluster.master.peek(key).unwrap();
        assert!(replicas.iter().all(|replica| replica.location.memory().is_none()), "{replicas:?}");
    }
    (cluster, client)
}

fn report(client: &Client) -> FileReport {
    client.status().files().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_is_its_file_and_comes_back_from_it() {
    let dir = tempfile::tempdir().unwrap();
    let (short, long) = (value(1, 100), value(2, LONG));
    let items: [(&[u8], Bytes); 2] = [(b"short", short.clone()), (b"long", long.clone())];
    let (cluster, client) = only_in_files(dir.path(), &items).await;
    for (key, value) in &items {
        let path = file(&cluster, key).unwrap();
        assert!(path.starts_with(dir.path().join("lab")) && std::fs::read(path).unwrap() == *value);
        assert!(client.get(key).await.unwrap().as_ref() == Some(value));
    }
    let both = client.batch_get(&["short", "absent", "long"]).await.unwrap();
    let both: Vec<_> = both.into_iter().map(Result::unwrap).collect();
    assert!(both == [Some(short.clone()), None, Some(long.clone())]);
    let into = client.memory().alloc(LONG + 7).unwrap().exclusive().unwrap();
    let ReadInto { result: length, into, .. } = client.get_into("long", into).await;
    assert_eq!(length.unwrap(), Some(LONG));
    let mut bytes = vec![0; LONG];
    into.copy_to(0, &mut bytes).unwrap();
    assert!(bytes == *long);

    // Clients that join later read the files, too.
    let other = builder(&cluster).segment(0).connect().await.unwrap();
    assert!(other.get("short").await.unwrap().as_ref() == Some(&short));
    assert_eq!(report(&client).written, 2);
    assert_eq!((report(&other).read, report(&other).unread), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_are_read_from_files_and_nothing_else_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let long = value(2, LONG);
    let (_cluster, client) = only_in_files(dir.path(), &[(b"k", long.clone())]).await;
    let object = client.ranges().locate(&["k"]).await.unwrap().remove(0).unwrap().unwrap();
    let parts = [(0, 10), (LONG - 3, 3), (123_457, 65_537)];
    let read = |&(offset, len): &(usize, usize)| RangeRead {
        object: object.clone(),
        offset: offset as u64,
        into: client.memory().alloc(len).unwrap().exclusive().unwrap(),
    };
    let outcomes = client.ranges().read(parts.iter().map(read).collect()).await;
    for ((offset, len), RangeOutcome { result, into }) in parts.into_iter().zip(outcomes) {
        result.unwrap();
        let mut bytes = vec![0; len];
        into.copy_to(0, &mut bytes).unwrap();
        assert!(bytes == long[offset..offset + len], "{offset} {len}");
    }
    assert_eq!(report(&client).read_bytes, parts.iter().map(|(_, len)| *len as u64).sum::<u64>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_file_of_the_value_is_a_miss_and_the_key_is_free_again() {
    let dir = tempfile::tempdir().unwrap();
    let names: [&[u8]; 6] = [b"missing", b"short", b"long", b"folder", b"link", b"pipe"];
    let items: Vec<(&[u8], Bytes)> = names.iter().map(|&name| (name, value(3, 1000))).collect();
    let (cluster, client) = only_in_files(dir.path(), &items).await;
    let elsewhere = dir.path().join("elsewhere");
    std::fs::write(&elsewhere, value(4, 1000)).unwrap();
    for name in names {
        let path = file(&cluster, name).unwrap();
        match name {
            b"short" => std::fs::write(&path, &value(3, 1000)[..999]).unwrap(),
            b"long" => std::fs::write(&path, value(3, 1001)).unwrap(),
            _ => std::fs::remove_file(&path).unwrap(),
        }
        match name {
            b"folder" => std::fs::create_dir(&path).unwrap(),
            b"link" => std::os::unix::fs::symlink(&elsewhere, &path).unwrap(),
            b"pipe" => assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success()),
            _ => {}
        }
    }
    // The test reads parts first, because they report nothing to the master.
    for object in client.ranges().locate(&names).await.unwrap() {
        let into = client.memory().alloc(10).unwrap().exclusive().unwrap();
        let read = RangeRead { object: object.unwrap().unwrap(), offset: 0, into };
        client.ranges().read(vec![read]).await.remove(0).result.unwrap_err();
    }
    let unread = report(&client).unread;
    assert!(unread >= names.len() as u64);
    for name in names {
        assert_eq!(client.get(name).await.unwrap(), None, "{}", name.escape_ascii());
    }
    assert!(report(&client).unread >= unread + names.len() as u64);
    eventually("the master has heard", async || cluster.master.keys().is_empty()).await;
    let _holder = builder(&cluster).connect().await.unwrap();
    for name in names {
        assert_eq!(client.put(name, b"again").await.unwrap(), PutOutcome::Stored);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_all_kinds_stay_below_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let long = "L".repeat(3000);
    let keys: [&[u8]; 9] =
        [b"..", b".", b"../../x", b"/etc/x", b"a/b", b"a_b", b"k\0z", b"\xff\xfe", long.as_bytes()];
    let items: Vec<(&[u8], Bytes)> = keys.iter().zip(0..).map(|(&key, n)| (key, value(n, 500))).collect();
    let (_cluster, client) = only_in_files(dir.path(), &items).await;
    for (key, value) in &items {
        assert!(client.get(key).await.unwrap().as_ref() == Some(value), "{}", key.escape_ascii());
    }
    assert_eq!(all(&dir.path().join("lab")).len(), keys.len());
    assert_eq!(all(dir.path()).len(), keys.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_folder_objects_are_in_memory_only() {
    let dir = tempfile::tempdir().unwrap();
    let (absent, blocked) = (dir.path().join("not mounted"), dir.path().join("file"));
    std::fs::write(&blocked, b"").unwrap();
    for root in [absent, blocked] {
        let cluster = cluster(&root, FileOptions::default()).await;
        let client = builder(&cluster).connect().await.unwrap();
        client.put("k", b"value").await.unwrap();
        eventually("it was not written", async || report(&client).refused == 1).await;
        assert_eq!(client.get("k").await.unwrap().as_deref(), Some(&b"value"[..]));
        client.close().await.unwrap();
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was made there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_oldest_files_are_evicted_and_the_master_is_notified() {
    let dir = tempfile::tempdir().unwrap();
    let before = dir.path().join("lab/a/b");
    std::fs::create_dir_all(&before).unwrap();
    let earlier = before.join("of somebody.0123456789abcdef");
    std::fs::write(&earlier, [0; 400]).unwrap();
    let cluster = cluster(dir.path(), FileOptions { quota: 1000, ..FileOptions::default() }).await;
    let client = builder(&cluster).connect().await.unwrap();
    for n in 0..5 {
        client.put(format!("k{n}"), &value(n, 300)[..]).await.unwrap();
        written(&cluster, format!("k{n}").as_bytes()).await;
    }
    eventually("the oldest are gone", async || all(dir.path()).len() == 3).await;
    assert!(!earlier.exists());
    let listed =
        async || (0..5).map(|n| file(&cluster, format!("k{n}").as_bytes()).is_some()).collect::<Vec<_>>();
    eventually("the master knows", async || listed().await == [false, false, true, true, true]).await;
    assert_eq!((report(&client).evicted, report(&client).used), (3, 900));
    client.put("too large", &value(9, 1001)[..]).await.unwrap();
    eventually("it was not written", async || report(&client).refused == 1).await;
    assert_eq!(all(dir.path()).len(), 3, "nothing goes for what cannot come");
    client.close().await.unwrap();

    let fixed = FileOptions { quota: 1000, evict: false, ..FileOptions::default() };
    let cluster = self::cluster(dir.path(), fixed).await;
    let client = builder(&cluster).connect().await.unwrap();
    client.put("more", &value(9, 200)[..]).await.unwrap();
    eventually("it was not written", async || report(&client).refused == 1).await;
    assert_eq!(all(dir.path()).len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_replaced_or_removed_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = cluster(dir.path(), FileOptions::default()).await;
    let client = builder(&cluster).connect().await.unwrap();
    let gone = async || all(dir.path()).is_empty();
    client.put("k", &value(1, 300)[..]).await.unwrap();
    let first = written(&cluster, b"k").await;
    client.put_with("k", &value(2, 300)[..], &PutOptions::new().upsert()).await.unwrap();
    eventually("the second has a file", async || file(&cluster, b"k").is_some_and(|path| path != first))
        .await;
    eventually("the first has none", async || !first.exists()).await;
    assert!(std::fs::read(file(&cluster, b"k").unwrap()).unwrap() == value(2, 300));
    assert!(client.remove("k", true).await.unwrap());
    eventually("it is gone", gone).await;
    for n in 0..3 {
        client.put(format!("k{n}"), &value(n, 300)[..]).await.unwrap();
        written(&cluster, format!("k{n}").as_bytes()).await;
    }
    assert_eq!(client.remove_matching("k[01]", true).await.unwrap(), 2);
    eventually("two are gone", async || all(dir.path()).len() == 1).await;
    assert!(file(&cluster, b"k2").unwrap().exists());
    assert_eq!(client.remove_all(true).await.unwrap(), 1);
    eventually("all are gone", gone).await;
    assert_eq!(report(&client).used, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_and_pieces_and_registered_memory_are_written_whole() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = cluster(dir.path(), FileOptions::default()).await;
    let client = builder(&cluster).connect().await.unwrap();
    let once = PutOptions::default();
    let [a, b, c] = [1, 2, 3].map(|n| value(n, 200_000));
    client.batch_put(&[("a", &a[..]), ("b", &b[..])], &once).await.unwrap();
    client.put_with("bytes", &c, &once).await.unwrap();
    let mut slice = client.memory().alloc(c.len()).unwrap().exclusive().unwrap();
    slice.copy_from(0, &c).unwrap();
    let slice = slice.into_shared();
    client.put_with("slice", &slice, &once).await.unwrap();
    let pieces = vec![slice.slice(0..70_000).unwrap(), slice.slice(70_000..200_000).unwrap()];
    client.batch_put(&[("pieces", pieces)], &once).await.unwrap();
    for (key, value) in [("a", a), ("b", b), ("bytes", c.clone()), ("slice", c.clone()), ("pieces", c)] {
        let path = written(&cluster, key.as_bytes()).await;
        assert!(std::fs::read(path).unwrap() == value, "{key}");
    }
    // A client that leaves completes its writes.
    client.put("last", &value(7, 100)[..]).await.unwrap();
    client.close().await.unwrap();
    assert_eq!(all(dir.path()).len(), 6);
    assert!(all(dir.path()).iter().all(|path| !path.file_name().unwrap().to_str().unwrap().starts_with('.')));
}

/// The second value, which is shorter, gets its file first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_file_of_an_earlier_value_leaves_that_of_the_later_value() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = cluster(dir.path(), FileOptions::default()).await;
    for round in 0..4 {
        let client = builder(&cluster).segment(64 << 20).local_buffer(32 << 20).connect().await.unwrap();
        let (key, second) = (format!("k{round}"), value(round, 100));
        for value in [&value(100, 16 << 20), &second] {
            client.put_with(&key, &value[..], &PutOptions::new().upsert()).await.unwrap();
        }
        let path = written(&cluster, key.as_bytes()).await;
        // Waits for all files.
        client.close().await.unwrap();
        assert_eq!(file(&cluster, key.as_bytes()).as_ref(), Some(&path));
        assert!(std::fs::read(&path).unwrap() == second, "{key}");
        assert_eq!(all(dir.path()).len() as u64, round + 1);
    }
}

/// A master that does not fence writes takes every report for that of the file of the present
/// value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_waits_for_files_of_earlier_values_if_the_master_does_not_fence_writes() {
    let dir = tempfile::tempdir().unwrap();
    let files =
        FileOptions { dir: dir.path().join("lab").to_str().unwrap().into(), ..FileOptions::default() };
    let options = MasterOptions { files: Some(files), ..MasterOptions::default() };
    let master = Arc::new(Master::new(options).unwrap());
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let address = server.local_addr().to_string();
    let running = server.start(Arc::new(OtherShapes(MasterService(master.clone()))));
    let builder = Client::builder()
        .master(address)
        .fs_roots([std::env::temp_dir()])
        .segment(64 << 20)
        .local_buffer(32 << 20);
    let client = builder.connect().await.unwrap();
    for round in 0..4 {
        let values = [value(2 * round, LONG), value(2 * round + 1, LONG)];
        client.put("k", &values[0][..]).await.unwrap();
        client.remove("k", true).await.unwrap();
        client.put("k", &values[1][..]).await.unwrap();
        eventually("it has a file", async || listed(&master, b"k").is_some()).await;
        assert!(std::fs::read(listed(&master, b"k").unwrap()).unwrap() == values[1], "round {round}");
        client.remove("k", true).await.unwrap();
    }
    client.close().await.unwrap();
    running.stop().await;
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eviction_removes_no_file_of_others_and_follows_no_link() {
    let dir = tempfile::tempdir().unwrap();
    let (lab, outside) = (dir.path().join("lab"), dir.path().join("outside"));
    let letters = outside.join("a/b");
    std::fs::create_dir_all(&letters).unwrap();
    std::fs::create_dir_all(lab.join("a/b")).unwrap();
    std::fs::create_dir_all(lab.join("sub/folder")).unwrap();
    let names = ["letter", "letter.txt", "value.0123456789abcdef", "0123456789abcdef"];
    let mut others: Vec<PathBuf> = names.iter().map(|name| letters.join(name)).collect();
    // Names of this program count only in the folders of this program.
    others
        .extend(["letter", "0123456789abcdef", "k.0123456789ABCDEF"].map(|name| lab.join("a/b").join(name)));
    others.extend([lab.join("sub/folder/k.0123456789abcdef"), lab.join("a/k.0123456789abcdef")]);
    for path in &others {
        std::fs::write(path, [0; 400]).unwrap();
    }
    // Links at each level.
    symlink(&outside, lab.join("z")).unwrap();
    symlink(outside.join("a"), lab.join("c")).unwrap();
    symlink(&letters, lab.join("a/d")).unwrap();
    symlink(letters.join("letter"), lab.join("a/b/k.0123456789abcdef")).unwrap();
    let cluster = cluster(dir.path(), FileOptions { quota: 1000, ..FileOptions::default() }).await;
    let client = builder(&cluster).connect().await.unwrap();
    for n in 0..5 {
        client.put(format!("k{n}"), &value(n, 400)[..]).await.unwrap();
        written(&cluster, format!("k{n}").as_bytes()).await;
    }
    eventually("the oldest are gone", async || report(&client).evicted == 3).await;
    assert!(others.iter().all(|path| path.exists()), "{others:?}");
    assert!(lab.join("a/b/k.0123456789abcdef").is_symlink());
}

/// Another user of a shared folder puts a link where the folders of a key are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_behind_a_link_is_neither_written_nor_read_nor_removed() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = value(3, 1000);
    let (cluster, client) = only_in_files(dir.path(), &[(b"k", bytes.clone())]).await;
    let path = file(&cluster, b"k").unwrap();
    let (folder, moved) = (path.parent().unwrap().to_owned(), dir.path().join("moved"));
    std::fs::rename(&folder, &moved).unwrap();
    symlink(&moved, &folder).unwrap();
    assert!(path.exists(), "the link leads to it");
    assert_eq!(client.get("k").await.unwrap(), None);
    client.remove("k", true).await.unwrap();
    // The folders of a key do not depend on its value.
    let holder = builder(&cluster).connect().await.unwrap();
    holder.put("k", &bytes[..]).await.unwrap();
    eventually("it was not written", async || report(&holder).refused == 1).await;
    assert_eq!(all(&moved).len(), 1);
    assert!(folder.is_symlink());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_decides_which_folder_a_master_may_name() {
    for (allow, is_used) in [
        ("nothing", false),
        ("other root", false),
        ("folder beside", false),
        ("mark and other root", false),
        ("contents of others", false),
        ("layout and others", false),
        ("link as mark", false),
        ("root", true),
        ("folder as root", true),
        ("mark in root", true),
        ("mark in folder", true),
        ("layout of before", true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let lab = dir.path().join("lab");
        let mark = |folder: &Path| std::fs::write(folder.join(".mooncake-root"), "").unwrap();
        let folder = |name: &str| std::fs::create_dir_all(lab.join(name)).unwrap();
        let mut roots = Vec::new();
        match allow {
            "nothing" => {}
            "other root" => roots.push(dir.path().join("other")),
            "mark and other root" => {
                mark(dir.path());
                roots.push(dir.path().join("other"));
            }
            "folder beside" => roots.push(dir.path().join("la")),
            "contents of others" => folder("letters"),
            "layout and others" => ["a/b", "a/letters"].into_iter().for_each(folder),
            "link as mark" => symlink("/etc/hostname", dir.path().join(".mooncake-root")).unwrap(),
            "root" => roots.push(dir.path().to_owned()),
            "folder as root" => {
                folder("");
                roots.push(lab.clone());
            }
            "mark in root" => mark(dir.path()),
            "mark in folder" => {
                folder("letters");
                mark(&lab);
            }
            "layout of before" => folder("a/b"),
            _ => unreachable!(),
        }
        let before = all(dir.path()).len();
        let cluster = cluster(dir.path(), FileOptions::default()).await;
        let client = cluster.builder().fs_roots(roots).connect().await.unwrap();
        client.put("k", b"value").await.unwrap();
        if is_used {
            written(&cluster, b"k").await;
        } else {
            eventually("it was not written", async || report(&client).refused == 1).await;
            assert_eq!(all(dir.path()).len(), before, "{allow}");
        }
        assert_eq!(client.get("k").await.unwrap().as_deref(), Some(&b"value"[..]));
        client.close().await.unwrap();
    }
    let roots =
        |root: &str| ClientConfig { fs_roots: vec![root.into()], ..ClientConfig::default() }.validate();
    roots("/mnt/x").unwrap();
    for bad in ["/", "relative", "/mnt/../etc"] {
        assert!(roots(bad).unwrap_err().message().contains("fs_roots"), "{bad}");
    }
}

/// A client that does not allow the folder reports no file as missing, because others read it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_folder_is_a_miss_here_and_a_hit_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = value(3, 1000);
    let (cluster, client) = only_in_files(dir.path(), &[(b"k", bytes.clone())]).await;
    let elsewhere = [dir.path().join("elsewhere")];
    std::fs::write(dir.path().join("lab/letter"), "dear all").unwrap();
    let other = cluster.builder().segment(0).fs_roots(elsewhere).connect().await.unwrap();
    for _ in 0..3 {
        assert_eq!(other.get("k").await.unwrap(), None);
    }
    assert!(report(&other).unread >= 3);
    assert_eq!(client.get("k").await.unwrap(), Some(bytes));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_files_have_the_permissions_of_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    for (setting, file, folder) in
        [(None, 0o640, 0o750), (Some("660"), 0o660, 0o770), (Some("600"), 0o600, 0o700)]
    {
        let dir = dir.path().join(format!("{file:o}"));
        std::fs::create_dir(&dir).unwrap();
        let cluster = cluster(&dir, FileOptions::default()).await;
        let client = match setting {
            Some(mode) => builder(&cluster).file_mode(mode.parse().unwrap()),
            None => builder(&cluster),
        };
        let client = client.connect().await.unwrap();
        client.put("k", b"value").await.unwrap();
        let path = written(&cluster, b"k").await;
        assert_eq!(mode(&path), file);
        for above in path.ancestors().skip(1).take(3) {
            assert_eq!(mode(above), folder, "{}", above.display());
        }
        client.close().await.unwrap();
    }
}
