//! Copies of objects in files that clients share, as the master records them, under a manual clock.

use std::borrow::Cow;

use crate::common::rig::{KIB, MIB, Rig, client};
use mooncake_core::ErrorCode::{self, *};
use mooncake_core::evict::PolicyKind;
use mooncake_core::replica::{Replica, ReplicaLocation, ReplicaStatus, ReplicaType, ReplicateConfig};
use mooncake_store::api::{EndItem, WriteMode};
use mooncake_store::master::{FileOptions, MasterOptions, Put, TenantQuota, Writer};
use mooncake_store::protocol::message::{GetReplicaList, Handle, PutEnd, PutStart, RemoveAll};

fn options() -> MasterOptions {
    let files = FileOptions { dir: "/mnt/x/lab".into(), ..FileOptions::default() };
    MasterOptions { files: Some(files), high_watermark: 1.0, ..MasterOptions::default() }
}

fn rig() -> Rig {
    let rig = Rig::with(options());
    rig.mount(1, MIB);
    rig
}

trait Files {
    fn file(&self, who: u64, key: &str) -> Result<(), ErrorCode>;
    fn no_file(&self, who: u64, key: &str) -> Result<(), ErrorCode>;
    /// Returns the number of replicas in memory, and the path of the file.
    fn replicas_of(&self, key: &str) -> (usize, Option<String>);
    fn stored(&self, key: &str);
    fn files(&self) -> (u64, u64);
}

impl Files for Rig {
    fn file(&self, who: u64, key: &str) -> Result<(), ErrorCode> {
        let writer = Writer::from(client(who));
        self.master.put_end(writer, key.as_bytes(), None, ReplicaType::Disk).map_err(|e| e.code())
    }

    fn no_file(&self, who: u64, key: &str) -> Result<(), ErrorCode> {
        let writer = Writer::from(client(who));
        self.master.put_revoke(writer, key.as_bytes(), ReplicaType::Disk).map_err(|e| e.code())
    }

    fn replicas_of(&self, key: &str) -> (usize, Option<String>) {
        let replicas = self.master.peek(key.as_bytes()).unwrap_or_default();
        assert!(replicas.iter().all(|replica| replica.status == ReplicaStatus::Complete));
        let file = replicas.iter().find_map(path);
        (replicas.iter().filter(|replica| replica.location.memory().is_some()).count(), file)
    }

    fn stored(&self, key: &str) {
        self.put(1, key, 64 * KIB).unwrap();
        self.file(1, key).unwrap();
    }

    fn files(&self) -> (u64, u64) {
        let disks = self.master.stats().disks;
        (disks.objects, disks.used)
    }
}

fn path(replica: &Replica) -> Option<String> {
    match &replica.location {
        ReplicaLocation::Disk { path, size } => {
            assert!(*size > 0);
            Some(path.clone())
        }
        _ => None,
    }
}

#[test]
fn a_put_is_granted_a_file_which_counts_after_its_own_put_end() {
    let rig = rig();
    let granted = rig.start(1, "k", 100).unwrap();
    assert_eq!(granted.len(), 2);
    assert!(granted.iter().all(|replica| replica.status == ReplicaStatus::Processing));
    let file = path(&granted[1]).unwrap();
    assert!(file.starts_with("/mnt/x/lab/"), "{file}");
    rig.end(1, "k").unwrap();
    assert_eq!(rig.replicas_of("k"), (1, None), "nobody has said that it is there");
    assert_eq!(rig.file(2, "k"), Err(IllegalClient), "another's");
    rig.file(1, "k").unwrap();
    assert_eq!(rig.replicas_of("k"), (1, Some(file)));
    assert_eq!(rig.file(1, "k"), Ok(()), "an answer may be lost");
    assert_eq!(rig.files(), (1, 100));
    assert_eq!(rig.locate("k").unwrap().replicas.len(), 2);
}

#[test]
fn a_file_may_be_there_before_the_memory() {
    let rig = rig();
    rig.start(1, "k", 100).unwrap();
    rig.file(1, "k").unwrap();
    assert_eq!(rig.locate("k"), Err(ReplicaIsNotReady), "a put is whole or not there");
    rig.end(1, "k").unwrap();
    assert!(matches!(rig.replicas_of("k"), (1, Some(_))));
}

#[test]
fn a_put_that_fails_takes_its_file_along() {
    let rig = rig();
    rig.start(1, "k", 100).unwrap();
    rig.file(1, "k").unwrap();
    rig.revoke(1, "k").unwrap();
    assert_eq!((rig.replicas_of("k"), rig.files()), ((0, None), (0, 0)));
    // A file could not be written, before and after the end of the put.
    rig.start(1, "a", 100).unwrap();
    rig.no_file(1, "a").unwrap();
    rig.end(1, "a").unwrap();
    assert_eq!(rig.file(1, "a"), Err(InvalidWrite));
    rig.put(1, "b", 100).unwrap();
    rig.no_file(1, "b").unwrap();
    assert_eq!([rig.replicas_of("a"), rig.replicas_of("b")], [(1, None), (1, None)]);
    rig.stored("c");
    assert_eq!(rig.no_file(2, "c"), Err(IllegalClient));
    rig.no_file(1, "c").unwrap();
    assert_eq!((rig.replicas_of("c"), rig.files()), ((1, None), (0, 0)));
}

#[test]
fn a_file_outlives_memory() {
    let rig = rig();
    (0..64).for_each(|n| rig.stored(&format!("k{n}")));
    let left: Vec<_> = (0..64).map(|n| rig.replicas_of(&format!("k{n}"))).collect();
    assert!(left.iter().all(|(_, file)| file.is_some()));
    assert!(left.iter().filter(|(memory, _)| *memory == 0).count() >= 48, "memory has room for 16");
    assert_eq!(rig.files(), (64, 64 * 64 * KIB));
    let stats = rig.master.stats();
    assert_eq!(stats.disks.objects, 64);
    assert!(rig.exists("k0") && rig.start(1, "k0", 5) == Err(ObjectAlreadyExists));
    // The same holds when the client is gone.
    rig.pass(60.0);
    assert_eq!(rig.replicas_of("k63").0, 0);
    assert!(rig.exists("k63"));
    assert_eq!(rig.locate("k63").unwrap().replicas.len(), 1);
    assert_eq!(rig.master.keys().len(), 64);
}

#[test]
fn memory_waits_for_a_file_but_not_for_ever() {
    let rig = Rig::with_policy(options(), PolicyKind::Lru);
    rig.mount(1, MIB);
    for n in 0..16 {
        rig.put(1, &format!("k{n}"), 64 * KIB).unwrap();
    }
    assert_eq!(rig.start(1, "more", 64 * KIB), Err(NoAvailableHandle));
    rig.file(1, "k5").unwrap();
    rig.stored("more");
    assert!(matches!(rig.replicas_of("k5"), (0, Some(_))), "the one that has its file went");
    rig.alive_for(11.0);
    rig.stored("even more");
    let gone = (0..16).filter(|n| !rig.has(&format!("k{n}"))).count();
    assert_eq!(gone, 1, "its writer has had its time");
}

#[test]
fn a_value_that_is_replaced_takes_its_file_along() {
    let rig = rig();
    rig.stored("k");
    let (_, first) = rig.replicas_of("k");
    let granted = rig.upsert(1, "k", 64 * KIB).unwrap();
    assert_eq!(rig.replicas_of("k"), (1, first.clone()), "until the end");
    rig.end(1, "k").unwrap();
    assert_eq!(rig.replicas_of("k"), (1, None));
    rig.file(1, "k").unwrap();
    let (_, second) = rig.replicas_of("k");
    assert_eq!(second, granted.iter().find_map(path));
    assert_ne!(first, second, "a writer of the first that comes late hits nothing");
    assert_eq!(rig.files(), (1, 64 * KIB));
    rig.remove("k", true).unwrap();
    assert_eq!((rig.has("k"), rig.files()), (false, (0, 0)));
    let again = rig.start(1, "k", 64 * KIB).unwrap();
    assert_ne!(second, again.iter().find_map(path));
}

#[test]
fn the_late_end_of_an_earlier_write_does_not_count() {
    let rig = rig();
    let config = ReplicateConfig::default();
    let writer = |attempt| Writer { client: client(1), attempt };
    let put = |attempt, mode| Put {
        writer: writer(attempt),
        mode,
        key: b"k",
        len: 9,
        config: &config,
        group: "",
        session: None,
    };
    let end = |attempt, kind| rig.master.put_end(writer(attempt), b"k", None, kind).map_err(|e| e.code());
    rig.master.put_start(&put(1, WriteMode::Put)).unwrap();
    end(1, ReplicaType::Memory).unwrap();
    rig.master.put_start(&put(2, WriteMode::Upsert)).unwrap();
    end(2, ReplicaType::Memory).unwrap();
    assert_eq!(end(1, ReplicaType::Disk), Err(IllegalClient));
    assert_eq!(rig.replicas_of("k"), (1, None));
    end(2, ReplicaType::Disk).unwrap();
    assert!(rig.replicas_of("k").1.is_some());
}

#[test]
fn a_file_that_is_gone_frees_the_key() {
    let rig = rig();
    rig.stored("k");
    rig.stored("other");
    rig.pass(60.0);
    assert!(matches!(rig.replicas_of("k"), (0, Some(_))));
    rig.master.dropped_file(client(7), b"k").unwrap();
    assert!(!rig.has("k"));
    assert_eq!(rig.master.dropped_file(client(7), b"k").unwrap_err().code(), ObjectNotFound);
    rig.mount(2, MIB);
    rig.put(2, "k", 5).unwrap();
    assert_eq!(rig.files(), (1, 64 * KIB));
}

#[test]
fn remove_all_takes_the_files_of_the_tenant_that_asked() {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: MIB };
    let rig = Rig::with(MasterOptions { tenants: Some(vec![quota("a"), quota("b")]), ..options() });
    rig.mount(1, MIB);
    let config = ReplicateConfig::default();
    for tenant in ["a", "b"] {
        let (client, config) = (client(1), Cow::Borrowed(&config));
        rig.master.handle(PutStart { client, key: b"k", size: 100, config, tenant }).unwrap();
        for replicas in [ReplicaType::All, ReplicaType::Disk] {
            let item = EndItem { key: b"k", checksum: None };
            rig.master.handle(PutEnd { client, item, replicas, tenant }).unwrap();
        }
    }
    let files = |tenant| {
        let list = rig.master.handle(GetReplicaList { key: b"k", tenant });
        list.map_or(0, |list| list.replicas.iter().filter_map(path).count())
    };
    assert_eq!(rig.master.handle(RemoveAll { force: true, tenant: "a" }).unwrap(), 1);
    assert_eq!((files("a"), files("b"), rig.files()), (0, 1, (1, 100)));
}

#[test]
fn without_a_folder_nothing_is_granted_and_the_folder_is_a_location() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    assert_eq!(rig.start(1, "k", 100).unwrap().len(), 1);
    assert_eq!(rig.master.storage().fs_dir, "");
    let bad = |dir: &str| {
        let files = FileOptions { dir: dir.into(), ..FileOptions::default() };
        MasterOptions { files: Some(files), ..MasterOptions::default() }.check().unwrap_err()
    };
    for dir in ["", "x/y", "/a/../b", "/a/./b", "/a/\0"] {
        assert!(bad(dir).message().contains("root_fs_dir"), "{dir}");
    }
}
