//! Table of calls, compared with records of masters and clients of Mooncake C++ 0.3.13.post1 and
//! 0.3.14.

use mooncake_store::protocol::message::{ADDED, DISK_TABLE, EARLIER, TABLE, VerifyReplicas};
use mooncake_store::protocol::pack;
use mooncake_store::protocol::server::Class;
use mooncake_store::protocol::type_signature::TypeSignature;

/// Call, function number, type signature and hash of the arguments, type signature and hash of the
/// response.
type Recorded = (&'static str, u32, &'static str, u32, &'static str, u32);

#[rustfmt::skip]
const RECORDED: &[Recorded] = &[
    ("ServiceReady", 0x7b81_bb56, "", 0x0, "87800c01", 0x1cb3_cc34),
    ("GetStorageConfig", 0x8da9_b0a6, "", 0x0, "87fd800c0b04ff01", 0x9cb5_68ea),
    ("GetFsdir", 0x3e58_5123, "", 0x0, "87800c01", 0x1cb3_cc34),
    ("Ping", 0xd6c2_dae5, "fd04048989ff", 0x3c6d_83e0, "87fd0301ff01", 0x742a_8f52),
    ("ExistKey", 0x8938_5f09, "fd800c800cff", 0x7cf9_1ed8, "870b01", 0x90e8_00d2),
    ("BatchExistKey", 0xb89f_a6b0, "fd84800c800cff", 0x00f7_8d62, "84870b01", 0x2a5f_8c5c),
    ("ProbeKey", 0xd218_0da3, "fd800c800cff", 0x7cf9_1ed8, "870b01", 0x90e8_00d2),
    ("BatchProbeKey", 0xb7fb_502f, "fdfd06048989ff84800c800cff", 0xb75a_4d44, "84870b01", 0x2a5f_8c5c),
    ("GetReplicaList", 0x1f7e_f174, "fd800c800cff", 0x7cf9_1ed8, "87fd84fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff048504ff01", 0x88c6_276c),
    ("BatchGetReplicaList", 0x1b0d_20ff, "fd84800c800cff", 0x00f7_8d62, "8487fd84fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff048504ff01", 0x20c5_453a),
    ("GetReplicaListForAdmin", 0x6b66_74f3, "fd800c800cff", 0x7cf9_1ed8, "87fd84fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff048504ff01", 0x88c6_276c),
    ("BatchGetReplicaListForAdmin", 0xe750_ff12, "fd84800c800cff", 0x00f7_8d62, "8487fd84fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff048504ff01", 0x20c5_453a),
    ("GetReplicaListByRegex", 0xfe6a_f93c, "fd800c800cff", 0x7cf9_1ed8, "8782800c84fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff01", 0x7343_c040),
    ("BatchQueryIp", 0x7ce4_54a9, "84fd04048989ff", 0xa1ee_a206, "8782fd04048989ff84800c01", 0xf594_fb3c),
    ("BatchReplicaClear", 0x137b_01fc, "fd84800cfd04048989ff800c800cff", 0xfa9a_bb1a, "8784800c01", 0xe108_bdea),
    ("PutStart", 0x65ea_9ac1, "fdfd04048989ff800c04fd0404040685040b84800c800c84800c0b06800c8584800cff800cff", 0xe385_bd0e, "8784fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff01", 0xc439_27a6),
    ("PutEnd", 0x8e8b_2099, "fdfd04048989fffd800c8504ff01800cff", 0xd181_9222, "87fa01", 0xaf28_68cc),
    ("PutRevoke", 0xa076_7c44, "fdfd04048989ff800c01800cff", 0x1b7a_228a, "87fa01", 0xaf28_68cc),
    ("BatchPutStart", 0x56be_1822, "fdfd04048989ff84800c8404fd0404040685040b84800c800c84800c0b06800c8584800cff800cff", 0x5870_c0a4, "848784fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff01", 0xad00_6d02),
    ("BatchPutEnd", 0x80e0_20ab, "fdfd04048989ff84fd800c8504ff01800cff", 0xf57e_a7c8, "8487fa01", 0x39fc_52ce),
    ("BatchPutRevoke", 0xb825_67aa, "fdfd04048989ff84800c01800cff", 0x94ee_5d44, "8487fa01", 0x39fc_52ce),
    ("UpsertStart", 0xa133_5e41, "fdfd04048989ff800c04fd0404040685040b84800c800c84800c0b06800c8584800cff800cff", 0xe385_bd0e, "8784fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff01", 0xc439_27a6),
    ("UpsertEnd", 0x2e20_e258, "fdfd04048989fffd800c8504ff01800cff", 0xd181_9222, "87fa01", 0xaf28_68cc),
    ("UpsertRevoke", 0x610b_042e, "fdfd04048989ff800c01800cff", 0x1b7a_228a, "87fa01", 0xaf28_68cc),
    ("BatchUpsertStart", 0xd564_b423, "fdfd04048989ff84800c8404fd0404040685040b84800c800c84800c0b06800c8584800cff800cff", 0x5870_c0a4, "848784fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff01", 0xad00_6d02),
    ("BatchUpsertEnd", 0xb1bc_d72f, "fdfd04048989ff84fd800c8504ff800cff", 0xdce9_3710, "8487fa01", 0x39fc_52ce),
    ("BatchUpsertRevoke", 0x9093_ae79, "fdfd04048989ff84800c800cff", 0xd609_1496, "8487fa01", 0x39fc_52ce),
    ("Remove", 0xf1b0_9774, "fd800c0b800cff", 0x18e8_9fee, "87fa01", 0xaf28_68cc),
    ("BatchRemove", 0x5902_407d, "fd84800c0b800cff", 0x197a_9ca0, "8487fa01", 0x39fc_52ce),
    ("RemoveByRegex", 0xfccc_1fd3, "fd800c0b800cff", 0x18e8_9fee, "870301", 0xb833_81fe),
    ("RemoveAll", 0xd978_ceb0, "fd0b800cff", 0x48a6_c274, "03", 0x8666_6834),
    ("MountSegment", 0x3e7e_c4bb, "fdfdfd04048989ff800c0404800c800c800cfffd04048989ffff", 0x9ef7_0dae, "87fa01", 0xaf28_68cc),
    ("ReMountSegment", 0x0b05_3b72, "fd84fdfd04048989ff800c0404800c800c800cfffd04048989ffff", 0xc6c6_6b88, "87fa01", 0xaf28_68cc),
    ("UnmountSegment", 0x6f10_b465, "fdfd04048989fffd04048989ffff", 0xd4c5_12e0, "87fa01", 0xaf28_68cc),
    ("GracefulUnmountSegment", 0xa4ec_3175, "fdfd04048989fffd04048989ff04ff", 0x8e09_2e9c, "87fa01", 0xaf28_68cc),
    ("QuerySegmentStatus", 0x79b8_af8c, "800c", 0x9dcf_fa76, "870101", 0x9851_e9a8),
    ("QuerySegmentStatusById", 0x573f_d453, "fd04048989ff", 0x3c6d_83e0, "870101", 0x9851_e9a8),
    ("FetchTasks", 0xdf14_1844, "fdfd04048989ff04ff", 0x759a_9b84, "8784fdfd04048989ff01800c0302ff01", 0x59e1_4526),
    ("CreateCopyTask", 0x7801_dba0, "fd800c800c84800cff", 0x5e43_cb12, "87fd04048989ff01", 0x8f9b_ae8a),
    ("CreateMoveTask", 0x9720_0d2c, "fd800c800c800c800cff", 0x311d_ab7a, "87fd04048989ff01", 0x8f9b_ae8a),
    ("QueryTask", 0x0781_6a74, "fd04048989ff", 0x3c6d_83e0, "87fdfd04048989ff01010303fd04048989ff800cff01", 0x02d5_7de6),
    ("MarkTaskToComplete", 0xa706_0015, "fdfd04048989fffdfd04048989ff01800cffff", 0x2206_9e02, "87fa01", 0xaf28_68cc),
    ("CopyStart", 0x2983_6d38, "fdfd04048989ff800c800c800c84800cff", 0xb5bd_dd1a, "87fdfd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff84fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ffff01", 0x7c16_68cc),
    ("CopyEnd", 0xf696_f1d9, "fdfd04048989ff800c800cff", 0x6a21_01f4, "87fa01", 0xaf28_68cc),
    ("CopyRevoke", 0x1f55_8b5c, "fdfd04048989ff800c800cff", 0x6a21_01f4, "87fa01", 0xaf28_68cc),
    ("MoveStart", 0x458e_4ce0, "fdfd04048989ff800c800c800c800cff", 0xef2e_e70c, "87fdfd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff85fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ffff01", 0x3e9e_d4b8),
    ("MoveEnd", 0x636a_8b47, "fdfd04048989ff800c800cff", 0x6a21_01f4, "87fa01", 0xaf28_68cc),
    ("MoveRevoke", 0x919b_315f, "fdfd04048989ff800c800cff", 0x6a21_01f4, "87fa01", 0xaf28_68cc),
    ("DynamicReplicaCopyStart", 0x2111_8d62, "fdfd04048989ff800c800c800c84800cfd04048989ff04ff", 0x4e78_be0e, "87fdfd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ff84fd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ffff01", 0x7c16_68cc),
    ("DynamicReplicaCopyEnd", 0x4f22_bba4, "fdfd04048989ff800c800cfd04048989ff04ff", 0xa1da_4cba, "87fa01", 0xaf28_68cc),
    ("DynamicReplicaCopyRevoke", 0x9976_8752, "fdfd04048989ff800c800cfd04048989ff04ff", 0xa1da_4cba, "87fa01", 0xaf28_68cc),
    ("MountLocalDiskSegment", 0x281f_c089, "fdfd04048989ff0bff", 0xbfd5_0c0e, "87fa01", 0xaf28_68cc),
    ("UnmountLocalDiskSegment", 0x59fe_76e4, "fd04048989ff", 0x3c6d_83e0, "87fa01", 0xaf28_68cc),
    ("OffloadObjectHeartbeat", 0x2a9b_08f8, "fdfd04048989ff0bff", 0xbfd5_0c0e, "8784fd800c800c03ff01", 0x7246_74e6),
    ("NotifyOffloadSuccess", 0x2df8_5842, "fdfd04048989ff84fd800c800c03ff84fd03030303800cffff", 0xd4e7_9a92, "87fa01", 0xaf28_68cc),
    ("PollRemoveAll", 0x05b2_1025, "fd04048989ff", 0x3c6d_83e0, "870b01", 0x90e8_00d2),
    ("ReportSsdCapacity", 0x7e10_9a9c, "fdfd04048989ff03ff", 0x70a8_41e4, "87fa01", 0xaf28_68cc),
    ("PromotionObjectHeartbeat", 0x0a19_072a, "fd04048989ff", 0x3c6d_83e0, "8784fd800c800c03ff01", 0x7246_74e6),
    ("PromotionAllocStart", 0x3643_0f70, "fdfd04048989ff800c800c0484800cff", 0xc6e7_29cc, "87fdfd0486fdfd0404800c800cfffffdfd0404800c800cfffffd800c04fffdfd04048989ff04800cfffd800c04040401ffff01ffff01", 0x5c03_2896),
    ("NotifyPromotionSuccess", 0xfe6e_3d25, "fdfd04048989ff800c800cff", 0x6a21_01f4, "87fa01", 0xaf28_68cc),
    ("NotifyPromotionFailure", 0xcbec_f2b4, "fdfd04048989ff800c800cff", 0x6a21_01f4, "87fa01", 0xaf28_68cc),
    ("RegisterPrefetchTask", 0x126a_e007, "fdfd04048989ff800c800cff", 0x6a21_01f4, "87fa01", 0xaf28_68cc),
    ("EvictDiskReplica", 0xd00a_c42b, "fdfd04048989ff800c800c01ff", 0xf47f_2e6a, "87fa01", 0xaf28_68cc),
    ("BatchEvictDiskReplica", 0x74d1_e980, "fdfd04048989ff84800c800c01ff", 0xd125_1872, "8487fa01", 0x39fc_52ce),
    ("EvictDiskReplicaIfCurrent", 0x20f9_ede8, "fdfd04048989ff800c800c0104ff", 0xa1c1_6070, "870b01", 0x90e8_00d2),
    ("MountNoFSegment", 0x14d3_f74c, "fdfdfd04048989ff800c0404800cfffd04048989ffff", 0x70fc_b3da, "87fa01", 0xaf28_68cc),
    ("ReMountNoFSegment", 0xc15a_1a37, "fd84fdfd04048989ff800c0404800cfffd04048989ffff", 0xc3dd_cd16, "87fa01", 0xaf28_68cc),
    ("UnmountNoFSegment", 0xbb26_3e21, "fdfd04048989fffd04048989ffff", 0xd4c5_12e0, "87fa01", 0xaf28_68cc),
    ("GetAllNoFSegments", 0x04eb_3c85, "", 0x0, "8784fdfd04048989ff800c0404800cff01", 0x8c27_4b46),
    ("GetNoFSegmentsByName", 0x6b19_4364, "800c", 0x9dcf_fa76, "8784fdfd04048989fffd04048989ffff01", 0xaab0_7daa),
    ("BeginWeightImport", 0xdee3_3c59, "fdfdfd800c800c800c800c04ff800c0404ff800cff", 0x0744_4846, "87fdfd800c800c800c800c04fffd800c800c800c800c0404ff06060604040404ff06", 0x47e3_cd90),
    ("CommitWeightImport", 0x9630_acc5, "fdfdfd800c800c800c800c04ff04fd800c800c800c800c0404ffff800cff", 0x2582_ad4a, "87fdfd800c800c800c800c04fffd800c800c800c800c0404ff06060604040404ff06", 0x47e3_cd90),
    ("AbortWeightImport", 0x48c3_d9a4, "fdfdfd800c800c800c800c04ff04ff800cff", 0xb887_2ca6, "87fdfd800c800c800c800c04fffd800c800c800c800c0404ff06060604040404ff06", 0x47e3_cd90),
    ("GetWeightRevision", 0xedbe_421c, "fdfdfd800c800c800c800c04ffff800cff", 0x8c12_86d2, "87fdfdfd800c800c800c800c04fffd800c800c800c800c0404ff06060604040404ff048504ff06", 0x8227_e634),
    ("ListWeightRevisions", 0x9a90_ad59, "fdfd800c800c800c800c02ff800cff", 0xabd0_6836, "87fd84fdfdfd800c800c800c800c04fffd800c800c800c800c0404ff06060604040404ff048504ff800cff06", 0x5f81_e2f8),
    ("AcquireWeightRevisionLease", 0xf973_3f46, "fdfdfd800c800c800c800c04ff04800c04ff800cff", 0x4904_6382, "87fd04fd800c800c800c800c04ff800c0404ff06", 0x0608_330c),
    ("RenewWeightRevisionLease", 0x3259_6b92, "fdfd800c0404ff800cff", 0x6597_d46e, "87fd04fd800c800c800c800c04ff800c0404ff06", 0x0608_330c),
    ("ReleaseWeightRevisionLease", 0xa0cd_ae45, "fdfd800c04ff800cff", 0x79aa_860c, "87fa06", 0x6a5a_6b08),
    ("DeleteWeightRevision", 0xb913_1698, "fdfdfd800c800c800c800c04ff04ff800cff", 0xb887_2ca6, "87fdfd800c800c800c800c04fffd800c800c800c800c0404ff06060604040404ff06", 0x47e3_cd90),
    ("StartWeightResidencyOperation", 0xa9d3_0e49, "fdfdfd800c800c800c800c04ff0406ff800cff", 0x51c6_16b4, "87fd04fd800c800c800c800c04ff06060404040404800c800cff06", 0x6938_aa04),
    ("QueryWeightOperation", 0x5f08_43de, "fdfd800c04ff800cff", 0x79aa_860c, "87fd04fd800c800c800c800c04ff06060404040404800c800cff06", 0x6938_aa04),
];

/// Calls with other arguments in Mooncake C++ 0.3.13.post1 than in 0.3.14.
const RECORDED_EARLIER: &[Recorded] = &[(
    "ClearOfAnyTenant",
    0x137b_01fc,
    "fd84800cfd04048989ff800cff",
    0x472b_2fa2,
    "8784800c01",
    0xe108_bdea,
)];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_call_is_as_recorded() {
    assert_eq!((TABLE.len(), EARLIER.len()), (RECORDED.len(), RECORDED_EARLIER.len()));
    let pairs = TABLE.iter().zip(RECORDED).chain(EARLIER.iter().zip(RECORDED_EARLIER));
    for (ours, &(name, function, arguments, arguments_hash, reply, reply_hash)) in pairs {
        assert_eq!(ours.name, name);
        assert_eq!(ours.function, function, "function number of {name}");
        assert_eq!(hex(ours.arguments), arguments, "arguments of {name}");
        assert_eq!(hex(ours.reply), reply, "answer of {name}");
        assert_eq!(TypeSignature::new(ours.reply).hash(), reply_hash, "hash of the answer of {name}");
        if !arguments.is_empty() {
            assert_eq!(
                TypeSignature::new(ours.arguments).hash(),
                arguments_hash,
                "hash of the arguments of {name}"
            );
        }
    }
}

#[test]
fn no_function_number_is_taken_twice() {
    let numbers: std::collections::BTreeSet<u32> = TABLE.iter().map(|shape| shape.function).collect();
    assert_eq!(numbers.len(), TABLE.len());
}

/// A call that ends a write or keeps a client alive is never refused.
#[test]
fn under_overload_only_reads_and_starts_of_writes_are_refused() {
    let of_class = |class| {
        let calls = TABLE.iter().chain(ADDED).filter(move |shape| shape.treatment.class == class);
        calls.map(|shape| shape.name).collect::<Vec<_>>()
    };
    assert_eq!(of_class(Class::Heartbeat), ["Ping"]);
    assert_eq!(
        of_class(Class::Sheddable),
        [
            "ExistKey",
            "BatchExistKey",
            "ProbeKey",
            "BatchProbeKey",
            "GetReplicaList",
            "BatchGetReplicaList",
            "GetReplicaListForAdmin",
            "BatchGetReplicaListForAdmin",
            "GetReplicaListByRegex",
            "PutStart",
            "BatchPutStart",
            "UpsertStart",
            "BatchUpsertStart",
            "RegisterPrefetchTask",
            "StartWrites",
            "LocatePrefix",
            "LocateAgain",
            "StartHintedWrites",
            "LocateMatching",
            "LocateForRead"
        ]
    );
}

/// Bodies between a client and a master of Mooncake C++, one per line: call, side, bytes in
/// hexadecimal.
const BODIES: &str = include_str!("recorded.txt");

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn recorded_bodies_are_read_and_written_to_the_same_bytes() {
    let mut checked = 0;
    for line in BODIES.lines() {
        let [name, side, body] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let shape = TABLE.iter().find(|shape| shape.name == name).unwrap();
        let body = unhex(body);
        let again = match side {
            "arguments" => shape.rewrite_arguments(&body, true),
            _ => shape.rewrite_reply(&body, true),
        };
        assert_eq!(again.as_deref(), Ok(&*body), "{side} of {name}");
        checked += 1;
    }
    assert!(checked > 100, "{checked}");
}

/// Responses of an owner of a disk in Mooncake C++: to a lookup of one key that it has and one that
/// it lacks, and to the release of an unknown buffer.
#[rustfmt::skip]
const LENT: [(&str, &str); 3] = [
    ("LendObjects", "b1ac03fd0487fd048404800c04ff01000102000000000000000100f0ff4fc37f00001031302e3231332e302e313a31363938378813000000000000"),
    ("LendObjects", "b1ac03fd0487fd048404800c04ff01000070feffff"),
    ("ReturnObjects", "d9ffc813040b0000"),
];

#[test]
fn calls_to_the_owner_of_a_disk_are_as_recorded() {
    for (name, body) in LENT {
        let shape = DISK_TABLE.iter().find(|shape| shape.name == name).unwrap();
        let body = unhex(body);
        assert_eq!(shape.rewrite_reply(&body, true).as_deref(), Ok(&*body), "{name}");
    }
    let [lend, back, ranges, verify, prefetch] = DISK_TABLE else { panic!("five calls") };
    assert_eq!((hex(lend.arguments), hex(back.arguments)), ("fd84800c8403ff".into(), "04".into()));
    // The names of the calls are those of Mooncake C++.
    assert_eq!((lend.function, back.function), (0xdc8109d6, 0xaa143bb9));
    assert_eq!((ranges.function, verify.function), (0xaca03ff7, 0x3da01425));
    assert_eq!(ranges.reply, lend.reply);
    assert_eq!((prefetch.function, hex(prefetch.arguments)), (0x30cb75ec, "fd84800c8403800cff".into()));
    // A request and a response of Mooncake C++ 0.3.14.
    let request =
        "7b05dcd1052e00fd800c84800cff000764656661756c7401026f30010764656661756c7401013c00000000000000";
    let body = unhex(request);
    let request: VerifyReplicas<'_> = pack::decode(&body).unwrap();
    assert_eq!((request.tenant, &request.keys[..]), ("default", &[&b"o0"[..]][..]));
    assert_eq!((request.resolved_tenant.as_deref(), request.replica_ids), (Some("default"), Some(vec![60])));
    assert_eq!(verify.rewrite_arguments(&body, true).as_deref(), Ok(&*body));
    let reply = "674d23b20487fd8406ff01000101".to_owned() + "00";
    assert_eq!(verify.rewrite_reply(&unhex(&reply), true), Ok(unhex(&reply)));
}
