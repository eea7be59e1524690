//! Managed weights, under a manual clock. The expected errors are those of Mooncake C++ 0.3.14 for
//! the same calls.

use std::fmt::Write;
use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client};
use mooncake_core::ErrorCode::{
    self, InvalidParams, ObjectAlreadyExists, ObjectNotFound, UnavailableInCurrentStatus,
};
use mooncake_core::replica::{DataType, ReplicateConfig};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{DiskOptions, MasterOptions, PromotionOptions, Put, Snapshot, TenantQuota};
use mooncake_store::protocol::metrics;
use mooncake_store::protocol::pack::Byte;
use mooncake_store::protocol::wire::WeightAvailability::{Degraded, Deleted, Deleting, Importing, Ready};
use mooncake_store::protocol::wire::WeightError::{self, *};
use mooncake_store::protocol::wire::WeightResidency::{Absent, Cold, Hot, Mixed, Unknown};
use mooncake_store::protocol::wire::{
    OffloadItem, StoredAt, WeightAvailability, WeightChange, WeightCommit, WeightId, WeightImport,
    WeightLease, WeightLeaseRelease, WeightLeaseRenewal, WeightLeaseRequest, WeightList, WeightManifest,
    WeightMoveRequest, WeightOperation, WeightOperationQuery, WeightQuery, WeightResidency, WeightRevision,
};
use sha2::{Digest, Sha256};

pub(crate) const TENANT: &str = "default";
pub(crate) const WEIGHT: DataType = DataType(3);
pub(crate) const METADATA: DataType = DataType(8);
/// Length of each payload in bytes.
const LEN: u64 = 100;

type Outcome<T> = Result<T, WeightError>;

/// Returns the digest of texts as Mooncake C++ defines it.
pub(crate) fn digest(texts: &[&str]) -> String {
    let mut text = String::new();
    texts.iter().for_each(|one| writeln!(text, "{}:{one}", one.len()).unwrap());
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn id(resource: &str) -> WeightId {
    let [tenant, namespace, resource, revision] = [TENANT, "ns", resource, "rev"].map(str::to_owned);
    WeightId { tenant, namespace, resource, revision, generation: 1 }
}

pub(crate) fn group(id: &WeightId) -> String {
    let generation = id.generation.to_string();
    let parts = [&id.tenant, &id.namespace, &id.resource, &id.revision, &generation].map(String::as_str);
    format!("weight:{}", digest(&parts))
}

pub(crate) fn manifest_key(id: &WeightId) -> String {
    format!("weights/{}/{}/{}/{}/manifest", id.namespace, id.resource, id.revision, id.generation)
}

/// Returns the manifest of a revision with these payloads.
pub(crate) fn manifest(id: &WeightId, keys: &[&str]) -> WeightManifest {
    WeightManifest {
        manifest_key: manifest_key(id),
        sha256: "1".repeat(64),
        group: group(id),
        keys_sha256: digest(keys),
        payloads: keys.len() as u64,
        bytes: keys.len() as u64 * LEN,
    }
}

pub(crate) trait Weights {
    fn write(&self, mode: WriteMode, group: Option<&str>, key: &str, of: DataType) -> Result<(), ErrorCode>;
    fn begin(&self, id: &WeightId, payloads: u64) -> Outcome<WeightRevision>;
    fn commit(&self, id: &WeightId, generation: u64, manifest: WeightManifest) -> Outcome<WeightRevision>;
    fn abort(&self, id: &WeightId, generation: u64) -> Outcome<WeightRevision>;
    fn delete(&self, id: &WeightId, generation: u64) -> Outcome<WeightRevision>;
    fn lease(&self, id: &WeightId, generation: u64, holder: &str, ttl_ms: u64) -> Outcome<WeightLease>;
    fn renew(&self, lease: u64, ttl_ms: u64) -> Outcome<WeightLease>;
    fn release(&self, lease: u64) -> Outcome<()>;
    fn start_move(&self, id: &WeightId, generation: u64, to: WeightResidency) -> Outcome<WeightOperation>;
    fn query_move(&self, operation: u64) -> Outcome<WeightOperation>;
    /// Returns availability, residency, generation, and number of leases.
    fn state(&self, id: &WeightId) -> (WeightAvailability, WeightResidency, u64, u64);
    /// Puts the payloads and the manifest.
    fn import(&self, id: &WeightId, keys: &[&str]);
    /// Imports and commits. The generation is 2 from then on.
    fn make(&self, id: &WeightId, keys: &[&str]);
}

impl Weights for Rig {
    fn write(
        &self,
        mode: WriteMode,
        group: Option<&str>,
        key: &str,
        data_type: DataType,
    ) -> Result<(), ErrorCode> {
        let group_ids = group.map(|group| vec![group.to_owned()]);
        let config = ReplicateConfig { data_type, group_ids, ..ReplicateConfig::default() };
        let put = Put {
            writer: client(1).into(),
            mode,
            key: key.as_bytes(),
            len: LEN,
            config: &config,
            group: group.unwrap_or_default(),
            session: None,
        };
        self.master.put_start(&put).map_err(|error| error.code())?;
        self.end(1, key)
    }

    fn begin(&self, id: &WeightId, payloads: u64) -> Outcome<WeightRevision> {
        let import = WeightImport { id: id.clone(), group: String::new(), payloads, bytes: payloads * LEN };
        self.master.begin_weight_import(TENANT, import)
    }

    fn commit(&self, id: &WeightId, generation: u64, manifest: WeightManifest) -> Outcome<WeightRevision> {
        let commit = WeightCommit { id: id.clone(), metadata_generation: generation, manifest };
        self.master.commit_weight_import(TENANT, commit)
    }

    fn abort(&self, id: &WeightId, metadata_generation: u64) -> Outcome<WeightRevision> {
        self.master.abort_weight_import(TENANT, WeightChange { id: id.clone(), metadata_generation })
    }

    fn delete(&self, id: &WeightId, metadata_generation: u64) -> Outcome<WeightRevision> {
        self.master.delete_weights(TENANT, WeightChange { id: id.clone(), metadata_generation })
    }

    fn lease(&self, id: &WeightId, generation: u64, holder: &str, ttl_ms: u64) -> Outcome<WeightLease> {
        let (id, holder) = (id.clone(), holder.to_owned());
        let request = WeightLeaseRequest { id, metadata_generation: generation, holder, ttl_ms };
        self.master.lease_weights(TENANT, request)
    }

    fn renew(&self, lease: u64, ttl_ms: u64) -> Outcome<WeightLease> {
        self.master.renew_weight_lease(TENANT, WeightLeaseRenewal { tenant: TENANT.into(), lease, ttl_ms })
    }

    fn release(&self, lease: u64) -> Outcome<()> {
        self.master.release_weight_lease(TENANT, WeightLeaseRelease { tenant: TENANT.into(), lease })
    }

    fn start_move(&self, id: &WeightId, generation: u64, to: WeightResidency) -> Outcome<WeightOperation> {
        let target = Byte(to as u8);
        let request = WeightMoveRequest { id: id.clone(), metadata_generation: generation, target };
        self.master.start_weight_move(TENANT, request)
    }

    fn query_move(&self, operation: u64) -> Outcome<WeightOperation> {
        self.master.weight_move(TENANT, WeightOperationQuery { tenant: TENANT.into(), operation })
    }

    fn state(&self, id: &WeightId) -> (WeightAvailability, WeightResidency, u64, u64) {
        let view = self.master.weight_revision(TENANT, WeightQuery { id: id.clone() }).unwrap();
        let revision = view.revision;
        (revision.availability, revision.residency, revision.metadata_generation, view.leases)
    }

    fn import(&self, id: &WeightId, keys: &[&str]) {
        self.begin(id, keys.len() as u64).unwrap();
        let group = group(id);
        for key in keys {
            self.write(WriteMode::Put, Some(&group), key, WEIGHT).unwrap();
        }
        self.write(WriteMode::Put, Some(&group), &manifest_key(id), METADATA).unwrap();
    }

    fn make(&self, id: &WeightId, keys: &[&str]) {
        self.import(id, keys);
        self.commit(id, 1, manifest(id, keys)).unwrap();
    }
}

fn rig() -> Rig {
    let rig = Rig::without_watermark();
    rig.mount(1, MIB);
    rig
}

#[test]
fn an_import_is_begun_once() {
    let rig = rig();
    let of = id("res");
    let begun = rig.begin(&of, 2).unwrap();
    assert_eq!((begun.availability, begun.residency, begun.metadata_generation), (Importing, Unknown, 1));
    assert_eq!((begun.manifest.group.as_str(), begun.manifest.payloads), (&*group(&of), 2));
    assert_eq!(begun.manifest.manifest_key, "");
    assert_eq!(rig.begin(&of, 2), Ok(begun.clone()));
    assert_eq!(rig.begin(&of, 3), Err(Conflict));
    let import_in =
        |group: &str| WeightImport { id: of.clone(), group: group.into(), payloads: 2, bytes: 2 * LEN };
    assert_eq!(rig.master.begin_weight_import(TENANT, import_in(&group(&of))), Ok(begun.clone()));
    assert_eq!(rig.master.begin_weight_import(TENANT, import_in("g")), Err(InvalidArgument));
    assert_eq!(rig.begin(&id("none"), 0), Err(InvalidArgument));
    // Without tenants, the tenant of a call does not matter.
    let other = WeightId { tenant: "other".into(), ..of.clone() };
    assert_eq!(rig.begin(&other, 2), Ok(begun));
    rig.abort(&of, 1).unwrap();
    assert_eq!(rig.begin(&of, 2), Err(Conflict), "a removed revision does not return");
    assert!(rig.begin(&WeightId { generation: 2, ..of }, 2).is_ok());
}

#[test]
fn a_commit_compares_the_objects_with_the_manifest() {
    let rig = rig();
    let (of, keys) = (id("res"), ["w0", "w1"]);
    let good = manifest(&of, &keys);
    assert_eq!(rig.commit(&of, 1, good.clone()), Err(NotFound));
    rig.begin(&of, 2).unwrap();
    assert_eq!(rig.commit(&of, 1, good.clone()), Err(NotFound), "there is no object");
    let put = |key: &str, of_type| rig.write(WriteMode::Put, Some(&group(&of)), key, of_type);
    put("w0", WEIGHT).unwrap();
    put("w1", WEIGHT).unwrap();
    assert_eq!(rig.commit(&of, 1, good.clone()), Err(Conflict), "there is no manifest");
    put(&manifest_key(&of), METADATA).unwrap();
    for bad in [
        WeightManifest { payloads: 3, ..good.clone() },
        WeightManifest { bytes: 2 * LEN + 1, ..good.clone() },
        WeightManifest { keys_sha256: digest(&["w1", "w0"]), ..good.clone() },
    ] {
        assert_eq!(rig.commit(&of, 1, bad), Err(Conflict));
    }
    assert_eq!(rig.commit(&of, 5, good.clone()), Err(StaleGeneration));
    let upper = WeightManifest { sha256: "F".repeat(64), ..good.clone() };
    assert_eq!(rig.commit(&of, 1, upper), Err(InvalidArgument));
    let done = rig.commit(&of, 1, good.clone()).unwrap();
    assert_eq!((done.availability, done.residency, done.metadata_generation), (Ready, Hot, 2));
    assert_eq!(done.manifest, good);
    // A repetition has no effect, whether the caller knows the outcome or not.
    for generation in [1, 2] {
        assert_eq!(rig.commit(&of, generation, good.clone()), Ok(done.clone()));
        let other = WeightManifest { sha256: "2".repeat(64), ..good.clone() };
        assert_eq!(rig.commit(&of, generation, other), Err(Conflict));
    }
    let other = WeightManifest { sha256: "2".repeat(64), ..good.clone() };
    assert_eq!(rig.commit(&of, 5, other), Err(Conflict));
    assert_eq!(rig.commit(&of, 5, good), Err(StaleGeneration));
    assert_eq!((rig.abort(&of, 2), rig.abort(&of, 1)), (Err(Conflict), Err(StaleGeneration)));
}

/// An object that no manifest has makes the commit fail: one more, one of another type, one that is
/// being written.
#[test]
fn other_objects_of_the_group_are_conflicts() {
    let rig = rig();
    let keys = ["w0", "w1"];
    for (at, of_type) in [WEIGHT, METADATA, DataType(2)].into_iter().enumerate() {
        let of = id(&at.to_string());
        let keys = keys.map(|key| format!("{key}/{at}"));
        let keys = keys.each_ref().map(String::as_str);
        rig.import(&of, &keys);
        let more = format!("more/{at}");
        rig.write(WriteMode::Put, Some(&group(&of)), &more, of_type).unwrap();
        assert_eq!(rig.commit(&of, 1, manifest(&of, &keys)), Err(Conflict), "{of_type:?}");
    }
    // A payload of another type, which a later write corrects.
    let of = id("typed");
    rig.begin(&of, 2).unwrap();
    let write = |mode, key: &str, of_type| rig.write(mode, Some(&group(&of)), key, of_type);
    write(WriteMode::Put, "t0", WEIGHT).unwrap();
    write(WriteMode::Put, "t1", DataType(2)).unwrap();
    write(WriteMode::Put, &manifest_key(&of), METADATA).unwrap();
    let good = manifest(&of, &["t0", "t1"]);
    assert_eq!(rig.commit(&of, 1, good.clone()), Err(Conflict));
    rig.alive_for(11.0);
    write(WriteMode::Upsert, "t1", WEIGHT).unwrap();
    assert!(rig.commit(&of, 1, good).is_ok());

    let of = id("written");
    rig.import(&of, &["u0"]);
    let (group_ids, name) = (Some(vec![group(&of)]), group(&of));
    let config = ReplicateConfig { data_type: WEIGHT, group_ids, ..ReplicateConfig::default() };
    let (writer, mode) = (client(1).into(), WriteMode::Put);
    let put = Put { writer, mode, key: b"u1", len: LEN, config: &config, group: &name, session: None };
    rig.master.put_start(&put).unwrap();
    assert_eq!(rig.commit(&of, 1, manifest(&of, &["u0"])), Err(Conflict));
    rig.revoke(1, "u1").unwrap();
    assert!(rig.commit(&of, 1, manifest(&of, &["u0"])).is_ok());
}

#[test]
fn objects_of_weights_are_removed_and_replaced_only_with_them() {
    let rig = rig();
    let (of, name) = (id("res"), group(&id("res")));
    let refused = Err(UnavailableInCurrentStatus);
    let write = |mode, group: Option<&str>, key: &str| rig.write(mode, group, key, WEIGHT);
    // Before the import, the group is like any other one.
    write(WriteMode::Put, Some(&name), "early").unwrap();
    rig.remove("early", true).unwrap();
    rig.import(&of, &["w0", "w1"]);
    let check = || {
        assert_eq!((rig.remove("w0", true), rig.remove("w0", false)), (refused, refused));
        assert_eq!(rig.remove(&manifest_key(&of), true), refused);
        assert_eq!((rig.master.remove_all(true), rig.master.remove_matching("w", true).unwrap()), (0, 0));
        assert_eq!(rig.master.clear_replicas(&[b"w0"], client(1), ""), []);
        assert_eq!(rig.master.clear_replicas(&[b"w0"], client(1), "node1:1"), []);
        assert_eq!(write(WriteMode::Upsert, None, "w0"), refused);
        assert_eq!(write(WriteMode::Put, None, "w0"), Err(ObjectAlreadyExists));
        assert!(rig.has("w0") && rig.has("w1") && rig.has(&manifest_key(&of)));
    };
    check();
    assert_eq!(write(WriteMode::Upsert, Some(&name), "w0"), Ok(()), "a part of the import");
    assert_eq!(write(WriteMode::Put, Some(&name), "w0"), Err(ObjectAlreadyExists));
    rig.commit(&of, 1, manifest(&of, &["w0", "w1"])).unwrap();
    check();
    for mode in [WriteMode::Put, WriteMode::Upsert] {
        assert_eq!(write(mode, Some(&name), "w0"), refused);
        assert_eq!(write(mode, Some(&name), "new"), refused);
    }
    assert_eq!(write(WriteMode::Upsert, Some("g"), "w0"), Err(InvalidParams));
    rig.put(1, "other", KIB).unwrap();
    assert_eq!(rig.master.remove_all(true), 1, "others are removed");
    rig.delete(&of, 2).unwrap();
    assert_eq!(write(WriteMode::Put, Some(&name), "w0"), refused);
    assert_eq!(rig.remove("w0", true), Err(ObjectNotFound));
    rig.put(1, "w0", KIB).unwrap();
    rig.remove("w0", true).unwrap();
}

/// Objects of weights need no hard pin.
#[test]
fn weights_are_not_evicted() {
    let rig = Rig::without_watermark();
    rig.mount(1, 64 * KIB);
    let of = id("res");
    // An object that was there before the import, and one of the import.
    rig.write(WriteMode::Put, Some(&group(&of)), "w0", WEIGHT).unwrap();
    rig.begin(&of, 2).unwrap();
    rig.write(WriteMode::Put, Some(&group(&of)), "w1", WEIGHT).unwrap();
    rig.write(WriteMode::Put, Some(&group(&of)), &manifest_key(&of), METADATA).unwrap();
    rig.commit(&of, 1, manifest(&of, &["w0", "w1"])).unwrap();
    for number in 0..200 {
        rig.put(1, &format!("o{number}"), 16 * KIB).unwrap();
    }
    assert!(rig.has("w0") && rig.has("w1") && rig.has(&manifest_key(&of)) && !rig.has("o0"));
    assert_eq!(rig.state(&of), (Ready, Hot, 2, 0));
}

#[test]
fn an_aborted_import_is_removed() {
    let rig = rig();
    let of = id("res");
    assert_eq!(rig.abort(&of, 1), Err(NotFound));
    rig.import(&of, &["w0", "w1"]);
    assert!(rig.exists("w0"), "a lease of a reader is no obstacle");
    assert_eq!((rig.abort(&of, 9), rig.abort(&of, 0)), (Err(StaleGeneration), Err(InvalidArgument)));
    let aborted = rig.abort(&of, 1).unwrap();
    assert_eq!((aborted.availability, aborted.metadata_generation), (Deleting, 2));
    assert!(!rig.has("w0") && !rig.has("w1") && !rig.has(&manifest_key(&of)));
    assert_eq!((rig.abort(&of, 1), rig.abort(&of, 2)), (Ok(aborted.clone()), Ok(aborted)));
    let good = manifest(&of, &["w0", "w1"]);
    assert_eq!(rig.commit(&of, 1, good.clone()), Err(StaleGeneration));
    assert_eq!(rig.commit(&of, 2, good), Err(Conflict));
    assert_eq!((rig.lease(&of, 1, "h", 1), rig.lease(&of, 2, "h", 1)), (Err(StaleGeneration), Err(NotReady)));
    rig.alive_for(2.0);
    assert_eq!(rig.state(&of), (Deleted, Absent, 3, 0));
    assert_eq!((rig.abort(&of, 2), rig.abort(&of, 3)), (Err(StaleGeneration), Err(Conflict)));
}

#[test]
fn an_idle_import_is_aborted() {
    let rig = rig();
    let (idle, busy) = (id("idle"), id("busy"));
    rig.import(&idle, &["i0"]);
    rig.import(&busy, &["b0"]);
    rig.alive_for(299.0);
    assert_eq!((rig.state(&idle).0, rig.state(&busy).0), (Importing, Importing));
    rig.write(WriteMode::Put, Some(&group(&busy)), "b1", WEIGHT).unwrap();
    rig.alive_for(3.0);
    assert_eq!((rig.state(&idle).0, rig.state(&busy).0), (Deleted, Importing));
    assert!(!rig.has("i0") && rig.has("b0"));
    rig.alive_for(300.0);
    assert_eq!(rig.state(&busy).0, Deleted);
}

/// A write in progress delays the end of a removal, and its object does not stay.
#[test]
fn a_removal_waits_for_writes() {
    let rig = rig();
    let (of, name) = (id("res"), group(&id("res")));
    rig.import(&of, &["w0"]);
    let config =
        ReplicateConfig { data_type: WEIGHT, group_ids: Some(vec![name.clone()]), ..Default::default() };
    let (writer, mode) = (client(1).into(), WriteMode::Put);
    let put = Put { writer, mode, key: b"w1", len: LEN, config: &config, group: &name, session: None };
    rig.master.put_start(&put).unwrap();
    rig.abort(&of, 1).unwrap();
    rig.alive_for(2.0);
    assert_eq!(rig.state(&of), (Deleting, Unknown, 2, 0));
    rig.end(1, "w1").unwrap();
    rig.alive_for(2.0);
    assert!(!rig.has("w1"));
    assert_eq!(rig.state(&of), (Deleted, Absent, 3, 0));
}

#[test]
fn a_lease_keeps_a_revision() {
    let rig = rig();
    let of = id("res");
    assert_eq!(rig.lease(&of, 1, "h", 1000), Err(NotFound));
    rig.import(&of, &["w0"]);
    assert_eq!(rig.lease(&of, 2, "h", 1000), Err(StaleGeneration));
    assert_eq!(rig.lease(&of, 1, "h", 1000), Err(NotReady));
    rig.commit(&of, 1, manifest(&of, &["w0"])).unwrap();
    for (holder, ttl) in [("", 1000), ("a\nb", 1000), ("h", 0), ("h", 86_400_001), ("h", u64::MAX)] {
        assert_eq!(rig.lease(&of, 2, holder, ttl), Err(InvalidArgument));
    }
    assert_eq!(rig.lease(&of, 1, "h", 1000), Err(StaleGeneration));
    let first = rig.lease(&of, 2, "h", 10_000).unwrap();
    assert_eq!((first.metadata_generation, &*first.holder, &first.revision), (2, "h", &of));
    assert_eq!(rig.lease(&of, 2, "h", 60_000), Ok(first.clone()), "one lease for each holder");
    let second = rig.lease(&of, 2, "other", 20_000).unwrap();
    assert_eq!(rig.state(&of), (Ready, Hot, 2, 2));
    let view = rig.master.weight_revision(TENANT, WeightQuery { id: of.clone() }).unwrap();
    assert_eq!(view.nearest_expiry_ms, Some(first.expires_ms));
    assert_eq!((rig.delete(&of, 2), rig.delete(&of, 1)), (Err(Busy), Err(StaleGeneration)));
    assert_eq!(rig.start_move(&of, 2, Hot), Err(Busy));

    assert_eq!((rig.renew(first.id + 99, 1), rig.renew(0, 1)), (Err(NotFound), Err(InvalidArgument)));
    assert_eq!(
        (rig.renew(first.id, 0), rig.renew(first.id, 86_400_001)),
        (Err(InvalidArgument), Err(InvalidArgument))
    );
    assert_eq!(rig.renew(first.id, 1), Ok(first.clone()), "a lease is not shortened");
    assert_eq!(rig.renew(first.id, 15_000).unwrap().expires_ms, first.expires_ms + 5000);
    rig.alive_for(15.0);
    assert_eq!(rig.renew(first.id, 1000), Err(LeaseExpired));
    assert_eq!((rig.state(&of).3, rig.delete(&of, 2)), (1, Err(Busy)));
    assert_eq!((rig.release(0), rig.release(first.id + 99)), (Err(InvalidArgument), Ok(())));
    assert_eq!((rig.release(second.id), rig.release(second.id)), (Ok(()), Ok(())));
    assert!(rig.has("w0"));
    let deleted = rig.delete(&of, 2).unwrap();
    assert_eq!((deleted.availability, deleted.residency, deleted.metadata_generation), (Deleted, Absent, 4));
    assert!(!rig.has("w0") && !rig.has(&manifest_key(&of)));
    assert_eq!((rig.delete(&of, 3), rig.delete(&of, 4)), (Ok(deleted.clone()), Ok(deleted)));
    assert_eq!((rig.delete(&of, 2), rig.delete(&of, 9)), (Err(StaleGeneration), Err(StaleGeneration)));
    assert_eq!((rig.lease(&of, 2, "h", 1), rig.lease(&of, 4, "h", 1)), (Err(StaleGeneration), Err(NotReady)));
    rig.alive_for(120.0);
    assert_eq!(rig.renew(first.id, 1000), Err(NotFound), "an expired lease is forgotten");
}

#[test]
fn an_import_is_not_deleted() {
    let rig = rig();
    let of = id("res");
    assert_eq!(rig.delete(&of, 1), Err(NotFound));
    rig.import(&of, &["w0"]);
    assert_eq!((rig.delete(&of, 1), rig.delete(&of, 2)), (Err(NotReady), Err(StaleGeneration)));
}

#[test]
fn lost_objects_degrade_a_revision() {
    let rig = rig();
    let of = id("res");
    rig.make(&of, &["w0", "w1"]);
    rig.alive_for(5.0);
    assert_eq!(rig.state(&of), (Ready, Hot, 2, 0), "nothing has changed");
    // The client sends no heartbeats.
    rig.pass(11.0);
    rig.pass(1.5);
    assert_eq!(rig.state(&of), (Degraded, Absent, 3, 0));
    assert_eq!((rig.lease(&of, 3, "h", 1), rig.start_move(&of, 3, Hot)), (Err(NotReady), Err(NotReady)));
    let deleted = rig.delete(&of, 3).unwrap();
    assert_eq!((deleted.availability, deleted.metadata_generation), (Deleted, 5));
}

#[test]
fn revisions_are_listed_by_pages() {
    let rig = rig();
    for resource in ["a", "b"] {
        rig.begin(&id(resource), 1).unwrap();
        rig.begin(&WeightId { generation: 2, ..id(resource) }, 1).unwrap();
    }
    let list = |resource: &str, token: &str, limit| {
        let [tenant, namespace, resource, token] = [TENANT, "ns", resource, token].map(str::to_owned);
        rig.master.weight_revisions(TENANT, WeightList { tenant, namespace, resource, token, limit })
    };
    let page = list("a", "", 1).unwrap();
    assert_eq!((page.views.len(), &*page.next), (1, "rev\u{1f}1"));
    let page = list("a", &page.next, 1).unwrap();
    assert_eq!((page.views[0].revision.id.generation, &*page.next), (2, ""));
    assert_eq!(list("none", "", 1).unwrap().views, []);
    for (resource, token, limit) in [("", "", 1), ("a", "", 0), ("a", "", 1001), ("a", "zz", 1)] {
        assert_eq!(list(resource, token, limit), Err(InvalidArgument));
    }
}

/// Returns a master with disks, whose client 1 has memory and a disk.
fn with_disks(promotion: Option<PromotionOptions>) -> Rig {
    let disks = DiskOptions { promotion, on_evict: true, ..DiskOptions::default() };
    let options = MasterOptions { disks: Some(disks), high_watermark: 1.0, ..MasterOptions::default() };
    let rig = Rig::with(options);
    rig.mount(1, MIB);
    rig
}

/// Sends the heartbeats of the disk, and reports all requested writes and promotions as done.
fn serve_disk(rig: &Rig) {
    for OffloadItem { tenant, key, size } in rig.master.to_offload(client(1), true).unwrap() {
        let endpoint = "disk1:1".into();
        let place = StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: size, endpoint };
        rig.master.offloaded(client(1), &[OffloadItem { tenant, key, size }], &[place]).unwrap();
    }
    for item in rig.master.to_promote(client(1)).unwrap() {
        rig.master.promotion_start(client(1), &item.key, item.size.cast_unsigned(), &[]).unwrap();
        rig.master.promoted(client(1), &item.key).unwrap();
    }
}

#[test]
fn weights_move_to_disk_and_back() {
    let rig = with_disks(Some(PromotionOptions::default()));
    rig.master.mount_disk(client(1), true).unwrap();
    let of = id("res");
    rig.make(&of, &["w0", "w1"]);
    assert_eq!(rig.start_move(&of, 1, Cold), Err(StaleGeneration));
    for target in [Unknown, Mixed, Absent] {
        assert_eq!(rig.start_move(&of, 2, target), Err(InvalidArgument));
    }
    let begun = rig.start_move(&of, 2, Cold).unwrap();
    assert_eq!((begun.metadata_generation, begun.done, begun.total, &*begun.message), (3, 0, 3, ""));
    assert_eq!(rig.query_move(begun.id), Ok(begun.clone()));
    assert_eq!((rig.lease(&of, 3, "h", 1), rig.start_move(&of, 3, Hot)), (Err(Busy), Err(Busy)));
    rig.alive_for(2.0);
    assert_eq!(rig.query_move(begun.id).unwrap().done, 0, "the disk has not written them");
    serve_disk(&rig);
    assert!(rig.exists("w0"), "a reader");
    rig.alive_for(2.0);
    assert_eq!(rig.query_move(begun.id).unwrap().done, 0, "a lease on one object is one on its group");
    rig.alive_for(11.0);
    let done = rig.query_move(begun.id).unwrap();
    assert_eq!((done.done, &*done.message), (3, "completed"));
    rig.alive_for(2.0);
    assert_eq!(rig.state(&of), (Ready, Cold, 5, 0));
    assert_eq!((rig.used(), rig.remove("w0", true)), (0, Err(UnavailableInCurrentStatus)));
    // Removal of all objects leaves the disk.
    rig.master.remove_all(true);
    assert!(!rig.master.must_clear_disk(client(1)).unwrap());

    let begun = rig.start_move(&of, 5, Hot).unwrap();
    // The owner promotes one object in each heartbeat.
    for done in 0..3 {
        rig.alive_for(2.0);
        assert_eq!(rig.query_move(begun.id).unwrap().done, done);
        serve_disk(&rig);
    }
    rig.alive_for(2.0);
    assert_eq!(&*rig.query_move(begun.id).unwrap().message, "completed");
    rig.alive_for(2.0);
    assert_eq!((rig.state(&of).0, rig.state(&of).1, rig.used() > 0), (Ready, Hot, true));
    let generation = rig.state(&of).2;
    rig.delete(&of, generation).unwrap();
    assert!(!rig.has("w0") && rig.query_move(begun.id) == Err(NotFound));
}

#[test]
fn moves_that_cannot_be_made_end() {
    let of = id("res");
    let plain = rig();
    plain.make(&of, &["w0"]);
    assert_eq!(plain.start_move(&of, 2, Cold), Err(NotReady), "there are no disks");
    let begun = plain.start_move(&of, 2, Hot).unwrap();
    plain.alive_for(2.0);
    assert_eq!(&*plain.query_move(begun.id).unwrap().message, "completed", "they are in memory");
    assert_eq!((plain.query_move(0), plain.query_move(begun.id + 1)), (Err(InvalidArgument), Err(NotFound)));

    let no_disk = with_disks(None);
    no_disk.make(&of, &["w0"]);
    let begun = no_disk.start_move(&of, 2, Cold).unwrap();
    no_disk.alive_for(2.0);
    let ended = no_disk.query_move(begun.id).unwrap();
    assert!(
        ended.message.starts_with("cannot move weights: no client with the object has a disk"),
        "{ended:?}"
    );
    assert_eq!(no_disk.state(&of), (Ready, Hot, 4, 0));

    no_disk.master.mount_disk(client(1), true).unwrap();
    let begun = no_disk.start_move(&of, 4, Cold).unwrap();
    no_disk.alive_for(2.0);
    serve_disk(&no_disk);
    no_disk.alive_for(4.0);
    assert_eq!(&*no_disk.query_move(begun.id).unwrap().message, "completed");
    assert_eq!(no_disk.state(&of).1, Cold);
    let generation = no_disk.state(&of).2;
    assert_eq!(no_disk.start_move(&of, generation, Hot), Err(PolicyUnsatisfiable), "nothing is promoted");
}

/// A disk that never writes does not keep a revision busy for ever.
#[test]
fn a_move_without_progress_ends() {
    let rig = with_disks(None);
    rig.master.mount_disk(client(1), true).unwrap();
    let of = id("res");
    rig.make(&of, &["w0"]);
    let begun = rig.start_move(&of, 2, Cold).unwrap();
    for _ in 0..601 {
        rig.master.to_offload(client(1), true).unwrap();
        rig.alive_for(1.0);
    }
    assert!(rig.query_move(begun.id).unwrap().message.contains("no progress for 600s"));
    let generation = rig.state(&of).2;
    assert!(rig.lease(&of, generation, "h", 1).is_ok());
}

fn snapshot_of(rig: &Rig) -> Snapshot {
    let mut bytes = Vec::new();
    let write = |more: &[u8]| {
        bytes.extend_from_slice(more);
        Ok(())
    };
    rig.master.snapshot(write).unwrap();
    let snapshot = Snapshot::read(&bytes).unwrap();
    assert_eq!(Snapshot::read(&snapshot.write()).unwrap(), snapshot);
    snapshot
}

/// The next master knows revisions and leases, and protects the objects.
#[test]
fn a_snapshot_keeps_weights() {
    let rig = rig();
    let (done, begun, removed) = (id("done"), id("begun"), id("removed"));
    rig.make(&done, &["w0"]);
    rig.import(&begun, &["b0"]);
    rig.write(WriteMode::Put, Some(&group(&begun)), "b1", DataType(2)).unwrap();
    rig.make(&removed, &["r0"]);
    rig.delete(&removed, 2).unwrap();
    let lease = rig.lease(&done, 2, "h", 60_000).unwrap();
    let snapshot = snapshot_of(&rig);

    let next = Rig::without_watermark();
    next.clock.advance(Duration::from_secs(1));
    next.master.recall(snapshot);
    assert_eq!(next.state(&done), (Ready, Hot, 2, 1));
    assert_eq!(next.state(&removed), (Deleted, Absent, 4, 0));
    assert_eq!(next.delete(&done, 2), Err(Busy));
    assert_eq!(next.renew(lease.id, 1000).unwrap().holder, "h");
    // The owners may still return, so the objects are not lost.
    next.mount(1, MIB);
    next.alive_for(5.0);
    assert_eq!(next.state(&done), (Ready, Absent, 3, 1));
    let name = group(&done);
    assert_eq!(next.write(WriteMode::Put, Some(&name), "w0", WEIGHT), Err(UnavailableInCurrentStatus));
    // The import goes on: the object of another type is still known.
    next.write(WriteMode::Put, Some(&group(&begun)), "b0", WEIGHT).unwrap();
    next.write(WriteMode::Put, Some(&group(&begun)), &manifest_key(&begun), METADATA).unwrap();
    next.write(WriteMode::Put, None, "b1", DataType(2)).unwrap();
    let generation = next.state(&begun).2;
    assert!(next.commit(&begun, generation, manifest(&begun, &["b0"])).is_ok());
    // Later they are. The snapshot is forgotten part by part.
    next.release(lease.id).unwrap();
    next.alive_for(700.0);
    (0..5000).for_each(|_| drop(next.master.tick()));
    next.alive_for(2.0);
    assert_eq!((next.state(&done).0, next.state(&done).1), (Degraded, Absent));
}

#[test]
fn tenants_have_weights_of_their_own() {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: MIB };
    let tenants = Some(vec![quota("a"), quota("default")]);
    let rig = Rig::with(MasterOptions { tenants, high_watermark: 1.0, ..MasterOptions::default() });
    rig.mount(1, MIB);
    let of = |tenant: &str| WeightId { tenant: tenant.into(), ..id("res") };
    let begin = |tenant: &str, in_request: &str| {
        let (id, group) = (of(in_request), String::new());
        rig.master.begin_weight_import(tenant, WeightImport { id, group, payloads: 1, bytes: LEN })
    };
    assert_eq!(begin("a", "").unwrap().id, of("a"));
    assert_eq!(begin("", "").unwrap().id, of("default"));
    assert_eq!((begin("a", "default"), begin("none", "")), (Err(InvalidArgument), Err(InvalidArgument)));
    let put = |tenant: &str, key: &str, name: &str, data_type| {
        let config = ReplicateConfig { data_type, group_ids: Some(vec![name.into()]), ..Default::default() };
        let key = rig.master.scoped(tenant, key.as_bytes()).unwrap();
        let (writer, group) = (client(1).into(), format!("{tenant}\0{name}"));
        let mode = WriteMode::Put;
        let put = Put { writer, mode, key: &key, len: LEN, config: &config, group: &group, session: None };
        rig.master.put_start(&put).map_err(|error| error.code())?;
        let ended = rig.master.put_end(writer, &key, None, mooncake_core::replica::ReplicaType::All);
        ended.map_err(|error| error.code())
    };
    let name = group(&of("a"));
    put("a", "w0", &name, WEIGHT).unwrap();
    put("a", &manifest_key(&of("a")), &name, METADATA).unwrap();
    let commit = WeightCommit { id: of("a"), metadata_generation: 1, manifest: manifest(&of("a"), &["w0"]) };
    assert!(rig.master.commit_weight_import("a", commit).is_ok());
    assert_eq!(put("a", "w1", &name, WEIGHT), Err(UnavailableInCurrentStatus));
    assert_eq!(put("default", "w1", &name, WEIGHT), Ok(()), "a group of another tenant");
    let remove =
        |tenant: &str, key: &str| rig.master.remove_of(tenant, key.as_bytes(), true).map_err(|e| e.code());
    assert_eq!(remove("a", "w0"), Err(UnavailableInCurrentStatus));
    assert_eq!(remove("default", "w1"), Ok(()));
    assert_eq!(rig.master.remove_all_of("a", true), 0);
}

#[test]
fn weights_are_counted() {
    let rig = with_disks(None);
    rig.master.mount_disk(client(1), true).unwrap();
    let of = id("res");
    rig.make(&of, &["w0"]);
    rig.begin(&id("begun"), 1).unwrap();
    let value = |name: &str| {
        let text =
            metrics::text(&metrics::collector("weights", "", |it| rig.master.add_metrics(it))).unwrap();
        let line =
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
        line.unwrap_or_else(|| panic!("{name} in {text}")).parse::<f64>().unwrap()
    };
    let lease = rig.lease(&of, 2, "h", 1000).unwrap();
    assert_eq!(value("master_weight_revisions{availability=\"ready\"}"), 1.0);
    assert_eq!(value("master_weight_revisions{availability=\"importing\"}"), 1.0);
    assert_eq!(value("master_weight_revision_residency{residency=\"hot\"}"), 1.0);
    assert_eq!((value("master_weight_active_leases"), value("master_weight_pending_operations")), (1.0, 0.0));
    rig.release(lease.id).unwrap();
    rig.start_move(&of, 2, Cold).unwrap();
    rig.alive_for(3.0);
    assert_eq!((value("master_weight_active_leases"), value("master_weight_pending_operations")), (0.0, 1.0));
    assert_eq!(value("master_weight_oldest_operation_age_ms"), 3000.0);
    assert_eq!(value("master_weight_reconciliation_failures_total"), 0.0);
    // The owner of the disk and of the memory is gone.
    rig.pass(11.0);
    rig.pass(1.5);
    assert_eq!(value("master_weight_pending_operations"), 0.0);
    assert_eq!(value("master_weight_reconciliation_failures_total"), 1.0);
}
