//! Writes, reads and removal.

use super::*;
use mooncake_core::replica::SoftPin;

impl<P: Pass> Talk<'_, P> {
    pub(super) async fn refused_puts(&mut self) {
        let cases = [
            ("no copies", ReplicateConfig { replicas: 0, ..plain() }),
            ("on a target", ReplicateConfig { nof_replicas: 1, ..plain() }),
            ("only on a target", ReplicateConfig { replicas: 0, nof_replicas: 1, ..plain() }),
            ("two on targets", ReplicateConfig { nof_replicas: 2, ..plain() }),
            ("in a file system", ReplicateConfig { dfs_replicas: 1, ..plain() }),
            ("only in a file system", ReplicateConfig { replicas: 0, dfs_replicas: 1, ..plain() }),
            ("twice in a file system", ReplicateConfig { dfs_replicas: 2, ..plain() }),
            ("same node, two", ReplicateConfig { same_node: true, replicas: 2, ..plain() }),
            ("pin time, no pin", ReplicateConfig { soft_pin_ttl_ms: Some(5), ..plain() }),
            (
                "pin time, unpinned",
                ReplicateConfig { soft_pin: SoftPin::Disable, soft_pin_ttl_ms: Some(5), ..plain() },
            ),
            (
                "pinned for too long",
                ReplicateConfig { soft_pin: SoftPin::Enable, soft_pin_ttl_ms: Some(10_001), ..plain() },
            ),
            ("two groups", ReplicateConfig { group_ids: Some(vec!["a".into(), "b".into()]), ..plain() }),
            ("no group of none", ReplicateConfig { group_ids: Some(Vec::new()), ..plain() }),
        ];
        for (what, config) in &cases {
            let key = format!("refused, {what}");
            self.start(&format!("refused: {what}"), 1, &key, 100, config).await;
            let key = format!("refused upsert, {what}");
            self.upsert(&format!("refused upsert: {what}"), 1, &key, 100, config).await;
        }
        self.start("refused: no key", 1, "", 100, &plain()).await;
        self.upsert("refused upsert: no key", 1, "", 100, &plain()).await;
        self.start("refused: no bytes", 1, "refused", 0, &plain()).await;
        self.upsert("refused upsert: no bytes", 1, "refused", 0, &plain()).await;
        self.locate("refused: nothing is left", "refused").await;
        self.exist("refused: no key is there", "").await;
        self.locate("refused: no key is found", "").await;
        self.remove("refused: no key is removed", "", false).await;
        let longest = ReplicateConfig { soft_pin: SoftPin::Enable, soft_pin_ttl_ms: Some(10_000), ..one() };
        self.start("pinned as long as it goes", 1, "longest", 100, &longest).await;
        self.revoke("pinned as long as it goes: revoke", 1, "longest", ReplicaType::All).await;
        let (keys, sizes): ([&[u8]; 2], [u64; 1]) = ([b"batch/a", b"batch/b"], [100]);
        let (keys, sizes) = (Cow::Borrowed(&keys[..]), Cow::Borrowed(&sizes[..]));
        let config = Cow::Owned(plain());
        let call = BatchPutStart { client: client(1), keys, sizes, config, tenant: TENANT };
        let answers = self.rpc.call(&call).await.unwrap();
        let answers: Vec<_> = answers.iter().map(grants).collect();
        self.note("batch: fewer lengths than keys", answers.join("; "));
        let groups = ReplicateConfig { group_ids: Some(vec!["a".into()]), ..plain() };
        self.batch_start("batch: fewer groups than keys", &["batch/a", "batch/b"], &groups).await;
        self.batch_start("batch: the same key twice", &["batch/a", "batch/a"], &plain()).await;
        self.batch_start("batch: one of them empty", &["batch/c", ""], &plain()).await;
        self.batch_start("batch: no keys", &[], &plain()).await;
        let ends =
            ["batch/a", "batch/none", "batch/c"].map(|key| EndItem { key: key.as_bytes(), checksum: None });
        let items = Cow::Borrowed(&ends[..]);
        let call = BatchPutEnd { client: client(1), items, replicas: ReplicaType::All, tenant: TENANT };
        let answers = self.rpc.call(&call).await.unwrap();
        self.note("batch: ends", answers.iter().map(brief).collect::<Vec<_>>().join("; "));
    }

    async fn batch_start(&mut self, step: &str, keys: &[&str], config: &ReplicateConfig) {
        let sizes = vec![100; keys.len()];
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        let (keys, sizes) = (Cow::Owned(keys), Cow::Owned(sizes));
        let config = Cow::Borrowed(config);
        let call = BatchPutStart { client: client(1), keys, sizes, config, tenant: TENANT };
        let answers = self.rpc.call(&call).await.unwrap();
        let in_short = |answer: &Answer<Vec<Replica>>| match answer {
            Ok(replicas) => format!("{} copies", replicas.len()),
            Err(code) => number(*code),
        };
        self.note(step, answers.iter().map(in_short).collect::<Vec<_>>().join("; "));
    }

    pub(super) async fn puts(&mut self) {
        use ReplicaType::*;
        let here = &ReplicateConfig { preferred_segments: vec![segment(1).name], ..plain() };
        self.start("put: start", 1, "put", 100, here).await;
        self.exist("put: not there yet", "put").await;
        self.locate("put: not ready", "put").await;
        self.start("put: start again", 1, "put", 100, here).await;
        self.start("put: start by another", 2, "put", 100, here).await;
        self.remove("put: remove unfinished", "put", false).await;
        self.remove("put: remove unfinished, by force", "put", true).await;
        self.end("put: end by another", 2, "put", All).await;
        self.revoke("put: revoke by another", 2, "put", All).await;
        for kind in [Disk, LocalDisk, NofSsd, Dfs] {
            self.end(&format!("put: end of what was not granted, {kind:?}"), 1, "put", kind).await;
        }
        for kind in [Disk, LocalDisk, NofSsd, Dfs] {
            self.revoke(&format!("put: revoke of what was not granted, {kind:?}"), 1, "put", kind).await;
        }
        self.locate("put: still not ready", "put").await;
        self.end("put: end", 1, "put", Memory).await;
        self.end("put: end again", 1, "put", All).await;
        self.end("put: end again, in memory", 1, "put", Memory).await;
        self.end("put: end again, on disk", 1, "put", Disk).await;
        self.end("put: end again by another", 2, "put", All).await;
        self.revoke("put: revoke what is complete", 1, "put", All).await;
        self.revoke("put: revoke what is complete, by another", 2, "put", All).await;
        self.start("put: what is there", 1, "put", 100, here).await;
        self.start("put: what is there, another length", 2, "put", 200, here).await;
        self.end("put: end unknown", 1, "unknown", All).await;
        self.revoke("put: revoke unknown", 1, "unknown", All).await;
        self.locate("put: unknown", "unknown").await;
        self.locate("put: ready", "put").await;
        self.start("put: start one to revoke", 1, "revoked", 100, here).await;
        self.revoke("put: revoke", 1, "revoked", Memory).await;
        self.exist("put: revoked", "revoked").await;
        self.end("put: end what was revoked", 1, "revoked", All).await;
        self.start("put: start what was revoked", 2, "revoked", 100, here).await;
        self.end("put: end it by its upsert", 2, "revoked", All).await;
        for (key, checksum) in [("sum", Some(7)), ("no sum", None)] {
            self.start(&format!("put: {key}"), 1, key, 100, here).await;
            let item = EndItem { key: key.as_bytes(), checksum };
            let end = PutEnd { client: client(1), item, replicas: All, tenant: TENANT };
            self.ask(&format!("put: end with {key}"), &end).await;
            let item = EndItem { key: key.as_bytes(), checksum: Some(8) };
            let end = PutEnd { client: client(1), item, replicas: All, tenant: TENANT };
            self.ask(&format!("put: end with {key} again, another sum"), &end).await;
            self.locate(&format!("put: read {key}"), key).await;
        }
    }

    pub(super) async fn taken_over(&mut self) {
        use ReplicaType::All;
        for key in ["late", "own", "slow", "gone", "left"] {
            self.start(&format!("take over: start {key}"), 1, key, 100, &one()).await;
        }
        self.start("take over: too early", 2, "late", 100, &one()).await;
        self.pass(DISCARD).await;
        self.locate("take over: nobody ended it", "late").await;
        self.start("take over: in time", 2, "late", 100, &one()).await;
        self.end("take over: end by the first", 1, "late", All).await;
        self.revoke("take over: revoke by the first", 1, "late", All).await;
        self.end("take over: end by the second", 2, "late", All).await;
        self.start("take over: its own", 1, "own", 100, &one()).await;
        self.end("take over: end its own", 1, "own", All).await;
        self.end("take over: end late, nobody came", 1, "slow", All).await;
        self.exist("take over: late and there", "slow").await;
        self.remove("take over: remove unfinished", "gone", false).await;
        self.remove("take over: remove unfinished, by force", "left", true).await;
        self.start("take over: start what is unfinished", 2, "left", 100, &one()).await;
        self.revoke("take over: revoke what is unfinished", 2, "left", All).await;
    }

    pub(super) async fn upserts(&mut self) {
        use ReplicaType::All;
        self.upsert("upsert: start new", 1, "up", 100, &one()).await;
        self.upsert_end("upsert: end by another", 2, "up").await;
        self.upsert_end("upsert: end", 1, "up").await;
        self.upsert_end("upsert: end again", 1, "up").await;
        self.locate("upsert: there", "up").await;
        self.upsert("upsert: same length", 2, "up", 100, &one()).await;
        self.exist("upsert: exists meanwhile", "up").await;
        self.locate("upsert: read meanwhile", "up").await;
        self.start("upsert: put meanwhile", 1, "up", 100, &one()).await;
        self.remove("upsert: remove meanwhile", "up", true).await;
        self.upsert_end("upsert: end by the writer before", 1, "up").await;
        self.upsert_end("upsert: end same length", 2, "up").await;
        self.upsert("upsert: other length", 1, "up", 200, &one()).await;
        self.locate("upsert: read meanwhile, other length", "up").await;
        self.upsert_end("upsert: end other length", 1, "up").await;
        self.locate("upsert: new length", "up").await;
        self.upsert("upsert: one to revoke", 1, "up", 200, &one()).await;
        let key = b"up".as_slice();
        let revoke = UpsertRevoke { client: client(1), key, replicas: All, tenant: TENANT };
        self.ask("upsert: revoke", &revoke).await;
        self.locate("upsert: revoked", "up").await;
        self.ask("upsert: revoke again", &revoke).await;
        self.start("upsert: a put in progress", 1, "raced", 100, &one()).await;
        self.upsert("upsert: over another's put", 2, "raced", 100, &one()).await;
        self.end("upsert: end of the put", 1, "raced", All).await;
        self.revoke("upsert: revoke of the put", 1, "raced", All).await;
        self.upsert_end("upsert: end over another's put", 2, "raced").await;
        self.end("upsert: late end of the put", 1, "raced", All).await;
        self.start("upsert: a put of its own", 1, "own race", 100, &one()).await;
        self.upsert("upsert: over its own put", 1, "own race", 100, &one()).await;
        self.upsert_end("upsert: end over its own put", 1, "own race").await;
        self.upsert(
            "upsert: copies that do not count",
            1,
            "up",
            200,
            &ReplicateConfig { replicas: 3, ..one() },
        )
        .await;
        self.upsert_end("upsert: end of those", 1, "up").await;
        self.upsert_end("upsert: end unknown", 1, "unknown").await;
        self.ask(
            "upsert: revoke unknown",
            &UpsertRevoke { client: client(1), key: b"unknown", replicas: All, tenant: TENANT },
        )
        .await;
        self.put(1, "by put", &one()).await;
        self.upsert("upsert: what was put", 1, "by put", 100, &one()).await;
        self.end("upsert: ended as a put", 1, "by put", All).await;
    }

    pub(super) async fn leases(&mut self) {
        let keys =
            ["lease/exist", "lease/exists", "lease/locate", "lease/locates", "lease/regex", "lease/none"];
        for key in keys {
            self.put(1, key, &one()).await;
        }
        self.exist("lease: by exist", "lease/exist").await;
        let many: [&[u8]; 2] = [b"lease/exists", b"unknown"];
        let answers =
            self.rpc.call(&BatchExistKey { keys: Cow::Borrowed(&many), tenant: TENANT }).await.unwrap();
        self.note("lease: by exist of many", answers.iter().map(brief).collect::<Vec<_>>().join("; "));
        self.locate("lease: by locate", "lease/locate").await;
        let many: [&[u8]; 2] = [b"lease/locates", b"unknown"];
        let answers =
            self.rpc.call(&BatchGetReplicaList { keys: Cow::Borrowed(&many), tenant: TENANT }).await.unwrap();
        let counts =
            answers.iter().map(|answer| brief(&answer.as_ref().map(|l| l.replicas.len()).map_err(|c| *c)));
        let counts = counts.collect::<Vec<_>>().join("; ");
        self.note("lease: by locate of many", counts);
        self.matching("lease: by a pattern", "^lease/re").await;
        for key in keys {
            self.remove(&format!("lease: remove {key}"), key, false).await;
        }
        self.remove("lease: remove by force", "lease/exist", true).await;
        self.pass(LEASE).await;
        for key in keys {
            self.remove(&format!("lease: remove {key} later"), key, false).await;
        }
    }

    async fn matching(&mut self, step: &str, pattern: &str) {
        let answer = self.rpc.call(&GetReplicaListByRegex { pattern, tenant: TENANT }).await.unwrap();
        let keys = answer.map(|found| {
            let mut keys: Vec<_> =
                found.0.iter().map(|(key, _)| String::from_utf8_lossy(key).into_owned()).collect();
            keys.sort();
            keys
        });
        self.note(step, brief(&keys));
    }

    pub(super) async fn removals(&mut self) {
        for key in ["rm/a", "rm/b", "rm/c1", "rm/c2", "rm/read"] {
            self.put(1, key, &one()).await;
        }
        for key in ["p&q", "p-q", "p[q]", "p<q>", "p\nq", "p\rq", "p~q", "p/q", "p.q", "Pq"] {
            self.put(1, key, &one()).await;
        }
        self.start("remove: one unfinished", 1, "rm/open", 100, &one()).await;
        self.exist("remove: one read", "rm/read").await;
        self.remove("remove: unknown", "unknown", false).await;
        let keys: [&[u8]; 5] = [b"rm/a", b"unknown", b"rm/read", b"rm/open", b"rm/a"];
        let call = BatchRemove { keys: Cow::Borrowed(&keys), force: false, tenant: TENANT };
        let answers = self.rpc.call(&call).await.unwrap();
        self.note("remove: many", answers.iter().map(brief).collect::<Vec<_>>().join("; "));
        let call = BatchRemove { keys: Cow::Borrowed(&[]), force: false, tenant: TENANT };
        let answers = self.rpc.call(&call).await.unwrap();
        self.note("remove: none", format!("{answers:?}"));
        let patterns = [
            ("m/c", true),
            ("^m/c", false),
            ("rm/c[12]$", false),
            ("(", false),
            ("[", false),
            ("a{2,1}", false),
            ("*", false),
            ("\\", false),
            ("(?i)RM", false),
            ("(?=rm)", false),
            ("(a)\\1", false),
            ("rm\\/none", false),
            ("\\d\\w\\s\\b", false),
            ("[[:alpha:]]{9}", false),
            ("x{1000}", false),
        ];
        for (pattern, read) in patterns {
            if read {
                self.matching(&format!("pattern: {pattern}, read"), pattern).await;
                self.pass(LEASE).await;
            }
            let call = RemoveByRegex { pattern, force: false, tenant: TENANT };
            self.show(&format!("pattern: {pattern}"), &call).await;
        }
        for pattern in [
            "^p[&&]q$",
            "^p[a&&&]q$",
            "^p[+--]q$",
            "^p[~~]q$",
            "^p[[]q",
            "^p\\[q\\]$",
            "^p\\<q\\>$",
            "^p.q$",
            "^p[^x]q$",
            "^p\\/q$",
            "^p[^]q$",
            "^p[]q$",
            "^p\\x2eq$",
            "^p\\u002eq$",
            "^p\\nq$",
            "^p[\\n]q$",
            "^p[\\]]",
            "^p[[:punct:]]q$",
            "a**",
            "^p$",
            "^q$",
            "q$",
            "^P\\q",
            "^p\\.q|^P",
            "{",
            "}",
            "]",
            "a{",
            "a{,2}",
            "\\e",
            "\\Aq",
            "\\cAq",
            "[a-",
            "[b-a]",
            "()",
            "",
            "^p\\-q",
            "^p\\&q",
            "(?:p)(?<n>q)",
            "(?P<n>q)",
            "\\p{L}",
            "\\0",
            "p\\D\\W\\Sq",
            "^p[\\D]q",
            "[[=p=]]",
            "[[.p.]]",
            "a++",
            "a+?",
            "a{1,2}?",
            "$p",
            "q^",
        ] {
            self.matching(&format!("pattern: {pattern:?}"), pattern).await;
        }
        self.pass(LEASE).await;
        self.exist("remove: one read again", "rm/read").await;
        self.show("pattern: what is read", &RemoveByRegex { pattern: "^rm/", force: false, tenant: TENANT })
            .await;
        self.show("pattern: by force", &RemoveByRegex { pattern: "^rm/", force: true, tenant: TENANT }).await;
        self.put(1, "all/a", &plain()).await;
        self.put(1, "all/read", &plain()).await;
        self.pass(DISCARD).await;
        self.exist("remove: one read before all go", "all/read").await;
        self.start("remove: one unfinished before all go", 1, "all/open", 100, &one()).await;
        self.exist("remove: there before all go", "put").await;
        let count = self.rpc.call(&RemoveAll { force: false, tenant: TENANT }).await.unwrap();
        self.note("remove: all", if count > 3 { "many".into() } else { count.to_string() });
        let count = self.rpc.call(&RemoveAll { force: false, tenant: TENANT }).await.unwrap();
        self.note("remove: all again", count.to_string());
        let count = self.rpc.call(&RemoveAll { force: true, tenant: TENANT }).await.unwrap();
        self.note("remove: all, by force", count.to_string());
        self.exist("remove: nothing is there", "all/read").await;
        self.end("remove: end of the unfinished", 1, "all/open", ReplicaType::All).await;
        self.remove("remove: what was unfinished", "all/open", false).await;
        for tenant in ["", "other", "_bad"] {
            self.put(1, "tenant", &plain()).await;
            let there = ExistKey { key: b"tenant", tenant };
            self.show(&format!("tenants: there for {tenant:?}"), &there).await;
            let count = self.rpc.call(&RemoveAll { force: true, tenant }).await.unwrap();
            self.note(&format!("tenants: all of {tenant:?}"), count.to_string());
            let _ = self.rpc.call(&RemoveAll { force: true, tenant: TENANT }).await.unwrap();
        }
    }

    pub(super) async fn clearing(&mut self) {
        let two = ReplicateConfig { replicas: 2, ..plain() };
        for key in ["clear/a", "clear/b", "clear/read", "clear/c"] {
            self.put(1, key, &two).await;
        }
        self.put(2, "clear/theirs", &two).await;
        self.start("clear: one unfinished", 1, "clear/open", 100, &one()).await;
        self.exist("clear: one read", "clear/read").await;
        let all = ["clear/a", "clear/read", "clear/theirs", "clear/open", "unknown", "clear/a"];
        self.clear("clear: in no segment", 1, &all, "host9:1").await;
        self.clear("clear: in one segment", 1, &all, &segment(2).name).await;
        self.locate("clear: what is left", "clear/a").await;
        self.clear("clear: whole", 1, &["clear/b", "clear/b", "clear/theirs"], "").await;
        self.exist("clear: gone", "clear/b").await;
        self.clear("clear: by another", 2, &["clear/c"], "").await;
        self.pass(LEASE).await;
        self.clear("clear: the rest in one segment", 1, &["clear/a"], &segment(1).name).await;
        self.exist("clear: gone part by part", "clear/a").await;
        self.clear("clear: later", 1, &["clear/read", "clear/open"], "").await;
        self.clear("clear: none", 1, &[], "").await;
        self.clear("clear: by a stranger", 9, &["clear/c"], "").await;
        self.revoke("clear: the unfinished", 1, "clear/open", ReplicaType::All).await;
    }

    async fn clear(&mut self, step: &str, who: u64, keys: &[&str], segment_name: &str) {
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        let call = ClearOfAnyTenant { keys: Cow::Owned(keys), client: client(who), segment_name };
        let answer = self.rpc.call(&call).await.unwrap();
        let answer = answer.map(|keys| {
            let mut keys: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
            keys.sort();
            keys
        });
        self.note(step, brief(&answer));
    }

    pub(super) async fn groups(&mut self) {
        let of = |name: &str| ReplicateConfig { group_ids: Some(vec![name.into()]), ..one() };
        self.start("group: put", 1, "group/a", 100, &of("g")).await;
        self.end("group: end", 1, "group/a", ReplicaType::All).await;
        self.put(1, "group/b", &of("g")).await;
        self.put(1, "group/alone", &one()).await;
        self.upsert("group: another one", 1, "group/a", 100, &of("h")).await;
        self.upsert("group: none named", 1, "group/a", 100, &of("")).await;
        self.upsert_end("group: end none named", 1, "group/a").await;
        self.upsert("group: no list", 1, "group/a", 300, &one()).await;
        self.upsert_end("group: end no list", 1, "group/a").await;
        self.upsert("group: the same", 1, "group/a", 300, &of("g")).await;
        self.upsert_end("group: end the same", 1, "group/a").await;
        self.upsert("group: still another one", 1, "group/a", 300, &of("h")).await;
        self.upsert("group: for one without", 1, "group/alone", 100, &of("g")).await;
        self.upsert("group: for one without, another length", 1, "group/alone", 200, &of("g")).await;
        self.upsert_end("group: end for one without", 1, "group/alone").await;
        self.exist("group: one is read", "group/a").await;
        self.remove("group: the other is removed", "group/b", false).await;
        self.remove("group: the read one is not", "group/a", false).await;
        let odd = "g\u{0}\u{7}é ".repeat(50);
        self.start("group: an odd name", 1, "group/odd", 100, &of(&odd)).await;
        self.end("group: end an odd name", 1, "group/odd", ReplicaType::All).await;
    }
}

/// Returns the configuration of an object in the first segment.
pub(super) fn one() -> ReplicateConfig {
    ReplicateConfig { preferred_segments: vec![segment(1).name], ..plain() }
}
