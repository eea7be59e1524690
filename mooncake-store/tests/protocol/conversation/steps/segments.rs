//! Mounts, placement and unmounts.

use super::*;

impl<P: Pass> Talk<'_, P> {
    pub(super) async fn without_segments(&mut self) {
        self.show("empty: version", &ServiceReady {}).await;
        let config = self.rpc.call(&GetStorageConfig {}).await.unwrap();
        self.note("empty: storage", format!("{config:?}"));
        self.show("empty: directory", &GetFsdir {}).await;
        self.start("empty: put", 1, "early", 100, &plain()).await;
        self.upsert("empty: upsert", 1, "early", 100, &plain()).await;
        self.exist("empty: exist", "early").await;
        let ping = self.rpc.call(&Ping { client: client(1) }).await.unwrap().unwrap();
        self.note("empty: ping", format!("{} {}", ping.view, ping.need_remount));
        self.fetch_none("empty: tasks").await;
        self.ask(
            "empty: remount nothing",
            &ReMountSegment { segments: Cow::Borrowed(&[]), client: client(3) },
        )
        .await;
        let ping = self.rpc.call(&Ping { client: client(3) }).await.unwrap().unwrap();
        self.note("empty: ping after remounting nothing", format!("{} {}", ping.view, ping.need_remount));
    }

    async fn fetch_none(&mut self, step: &str) {
        let answer = self.rpc.call(&FetchTasks { client: client(1), limit: 16 }).await.unwrap();
        self.note(step, brief(&answer.map(|tasks| tasks.len())));
    }

    async fn mount(&mut self, step: &str, who: u64, segment: &Segment) {
        self.ask(step, &MountSegment { segment: Cow::Borrowed(segment), client: client(who) }).await;
    }

    pub(super) async fn mounts(&mut self) {
        let odd = segment(5);
        self.mount("mount: no base", 5, &Segment { base: 0, ..odd.clone() }).await;
        self.mount("mount: no bytes", 5, &Segment { size: 0, ..odd.clone() }).await;
        self.mount("mount: beyond all addresses", 5, &Segment { base: u64::MAX - 5, ..segment(6) }).await;
        self.mount("mount: odd", 5, &odd).await;
        self.mount("mount: its id, other size", 5, &Segment { size: 128 * MIB, ..odd.clone() }).await;
        self.mount("mount: its id, by another", 7, &odd).await;
        let twin = Segment { id: segment(7).id, name: segment(7).name, ..odd.clone() };
        self.mount("mount: its memory under another id", 5, &twin).await;
        for (number, segment) in [(5, odd.id), (6, segment(6).id), (7, twin.id)] {
            let call = UnmountSegment { segment, client: client(5) };
            self.ask(&format!("mount: {number} is taken back"), &call).await;
        }
        self.mount("mount", 1, &segment(1)).await;
        self.mount("mount: again", 1, &segment(1)).await;
        let ping = self.rpc.call(&Ping { client: client(1) }).await.unwrap().unwrap();
        self.note("mount: ping", format!("{} {}", ping.view, ping.need_remount));
        for number in [1, 2] {
            let segments = [segment(number)];
            let call = ReMountSegment { segments: Cow::Borrowed(&segments), client: client(number) };
            self.ask(&format!("mount: remount {number}"), &call).await;
            let ping = self.rpc.call(&Ping { client: client(number) }).await.unwrap().unwrap();
            self.note(&format!("mount: ping {number}"), format!("{} {}", ping.view, ping.need_remount));
        }
        let segments = [segment(1)];
        let call = ReMountSegment { segments: Cow::Borrowed(&segments), client: client(1) };
        self.ask("mount: remount again", &call).await;
        let segments = [Segment { size: 0, ..segment(5) }];
        let call = ReMountSegment { segments: Cow::Borrowed(&segments), client: client(5) };
        self.ask("mount: remount no bytes", &call).await;
        self.show("segment: by name", &QuerySegmentStatus { segment_name: &segment(1).name }).await;
        self.show("segment: by id", &QuerySegmentStatusById { segment: segment(1).id }).await;
        self.show("segment: no name", &QuerySegmentStatus { segment_name: "" }).await;
        self.show("segment: unknown", &QuerySegmentStatusById { segment: segment(9).id }).await;
        self.addresses("addresses: of all", &[1, 2, 9, 1]).await;
        self.addresses("addresses: of a stranger", &[9]).await;
        self.addresses("addresses: of nobody", &[]).await;
        // A restarted master places no objects for a while in a segment that it does not know.
        self.pass(2.5).await;
    }

    async fn addresses(&mut self, step: &str, who: &[u64]) {
        let clients: Vec<_> = who.iter().map(|number| client(*number)).collect();
        let answer = self.rpc.call(&BatchQueryIp { clients: Cow::Owned(clients) }).await.unwrap();
        let answer = answer.map(|pairs| {
            let mut pairs: Vec<_> = pairs.0.into_iter().map(|(who, at)| (who.0.second, at)).collect();
            pairs.sort();
            pairs
        });
        self.note(step, brief(&answer));
    }

    pub(super) async fn placing(&mut self) {
        let prefer = |names: &[&str], replicas| ReplicateConfig {
            preferred_segments: names.iter().map(|name| (*name).to_owned()).collect(),
            replicas,
            ..plain()
        };
        let (first, second) = (&segment(1).name, &segment(2).name);
        self.start("place: three copies", 1, "place/3", 100, &prefer(&[], 3)).await;
        self.start("place: a thousand copies", 1, "place/1000", 100, &prefer(&[], 1000)).await;
        self.start("place: preferred", 1, "place/a", 100, &prefer(&[second], 1)).await;
        self.start("place: preferred, the other", 1, "place/b", 100, &prefer(&[first, second], 1)).await;
        self.start("place: preferred is unknown", 1, "place/c", 100, &prefer(&["host9:1", second], 1)).await;
        self.start("place: preferred twice", 1, "place/d", 100, &prefer(&[second, second], 2)).await;
        let single = ReplicateConfig { preferred_segment: second.clone(), ..prefer(&[first], 1) };
        self.start("place: the older form wins", 1, "place/e", 100, &single).await;
        self.start("place: preferred is too small", 1, "place/f", 60 * MIB, &prefer(&[second], 1)).await;
        self.start("place: preferred is full", 1, "place/g", 60 * MIB, &prefer(&[second], 1)).await;
        self.start("place: all are full", 1, "place/h", 60 * MIB, &prefer(&[], 1)).await;
        self.exist("place: nothing of it is there", "place/h").await;
        for key in ["3", "1000", "a", "b", "c", "d", "e", "f", "g"] {
            self.revoke(&format!("place: revoke {key}"), 1, &format!("place/{key}"), ReplicaType::All).await;
        }
        let near = ReplicateConfig { same_node: true, host_id: "host2".into(), ..plain() };
        self.start("place: near", 2, "place/near", 100, &near).await;
        let nearer = ReplicateConfig { preferred_segments: vec![first.clone()], ..near };
        self.start("place: near and preferred", 2, "place/nearer", 100, &nearer).await;
        // A revoked allocation stays reserved for a while, because its writer may still write.
        self.pass(10.5).await;
    }

    pub(super) async fn unmounts(&mut self) {
        let (segment_1, segment_2) = (segment(1).id, segment(2).id);
        self.ask("unmount: unknown", &UnmountSegment { segment: segment(9).id, client: client(1) }).await;
        let later =
            |segment, who, grace_ms| GracefulUnmountSegment { segment, client: client(who), grace_ms };
        self.ask("unmount later: unknown", &later(segment(9).id, 1, 5)).await;
        self.ask("unmount later: by another", &later(segment_2, 1, 5)).await;
        self.put(2, "leaving", &ReplicateConfig { preferred_segments: vec![segment(2).name], ..plain() })
            .await;
        self.ask("unmount later", &later(segment_2, 2, 60_000)).await;
        self.show("unmount later: state", &QuerySegmentStatusById { segment: segment_2 }).await;
        self.show("unmount later: state by name", &QuerySegmentStatus { segment_name: &segment(2).name })
            .await;
        self.ask("unmount later: again", &later(segment_2, 2, 70_000)).await;
        self.locate("unmount later: read", "leaving").await;
        let two = ReplicateConfig { replicas: 2, ..plain() };
        self.start("unmount later: nothing new", 1, "leaving/new", 100, &two).await;
        let segments = [segment(2)];
        self.mount("unmount later: mount", 2, &segments[0]).await;
        let call = ReMountSegment { segments: Cow::Borrowed(&segments), client: client(2) };
        self.ask("unmount later: remount", &call).await;
        self.show("unmount later: state after that", &QuerySegmentStatusById { segment: segment_2 }).await;
        let targets = [segment(2).name];
        let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
        let create = CreateCopyTask { key: b"copy", tenant: TENANT, targets: Cow::Borrowed(&targets) };
        let answer = self.rpc.call(&create).await.unwrap();
        self.note("unmount later: copy there", answer.map_or_else(number, |_| "a task".into()));
        self.ask("unmount: by another", &UnmountSegment { segment: segment_1, client: client(2) }).await;
        self.show("unmount: state after that", &QuerySegmentStatusById { segment: segment_1 }).await;
        self.ask("unmount", &UnmountSegment { segment: segment_2, client: client(2) }).await;
        self.ask("unmount: again", &UnmountSegment { segment: segment_2, client: client(2) }).await;
        self.exist("unmount: nothing there", "leaving").await;
        self.locate("unmount: nothing found", "leaving").await;
        self.show("unmount: state", &QuerySegmentStatusById { segment: segment_2 }).await;
        self.mount("unmount: mount again", 2, &segment(2)).await;
        self.show("unmount: state of it", &QuerySegmentStatusById { segment: segment_2 }).await;
        // Mooncake C++ begins to evict when a put finds no free space, so this step comes last.
        self.start("too large", 1, "large", 65 * MIB, &plain()).await;
        self.start("far too large", 1, "large", u64::MAX, &plain()).await;
    }
}
