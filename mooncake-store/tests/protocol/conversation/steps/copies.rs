//! Copies, moves and tasks.

use super::objects::one;
use super::*;
use mooncake_store::protocol::wire::{TaskReport, TaskStatus};

impl<P: Pass> Talk<'_, P> {
    pub(super) async fn copies(&mut self) {
        let (first, second) = (&segment(1).name, &segment(2).name);
        self.put(1, "copy", &one()).await;
        self.copy_start("copy: unknown", 1, "unknown", first, &[second]).await;
        self.copy_start("copy: from no segment", 1, "copy", "host9:1", &[second]).await;
        self.copy_start("copy: from where it is not", 1, "copy", second, &[first]).await;
        self.copy_start("copy: to no segment", 1, "copy", first, &["host9:1"]).await;
        self.copy_start("copy: unknown, to no segment", 1, "unknown", first, &["host9:1"]).await;
        self.copy_start("copy: from no segment to none", 1, "copy", "host9:1", &["host8:1"]).await;
        self.copy_start("copy: to where it is", 1, "copy", first, &[first]).await;
        self.copy_end("copy: end to where it is", 1, "copy").await;
        self.copy_start("copy: to nowhere", 1, "copy", first, &[]).await;
        self.copy_end("copy: end to nowhere", 1, "copy").await;
        self.copy_end("copy: end of none", 1, "copy").await;
        self.copy_end("copy: end of unknown", 1, "unknown").await;
        self.copy_start("copy: start", 1, "copy", first, &[second, second, first]).await;
        self.copy_start("copy: start again", 1, "copy", first, &[second]).await;
        self.copy_start("copy: start by another", 2, "copy", first, &[second]).await;
        self.locate("copy: read meanwhile", "copy").await;
        self.start("copy: put meanwhile", 1, "copy", 100, &one()).await;
        self.upsert("copy: upsert meanwhile", 1, "copy", 100, &one()).await;
        self.upsert("copy: upsert another length meanwhile", 1, "copy", 200, &one()).await;
        self.remove("copy: remove meanwhile", "copy", false).await;
        self.remove("copy: remove meanwhile by force", "copy", true).await;
        self.show(
            "copy: by pattern meanwhile",
            &RemoveByRegex { pattern: "^copy$", force: true, tenant: TENANT },
        )
        .await;
        self.end("copy: end of the put meanwhile", 1, "copy", ReplicaType::All).await;
        self.copy_end("copy: end by another", 2, "copy").await;
        let key = b"copy".as_slice();
        self.ask("copy: end as a move", &MoveEnd { client: client(1), key, tenant: TENANT }).await;
        self.ask("copy: revoke as a move", &MoveRevoke { client: client(1), key, tenant: TENANT }).await;
        self.ask("copy: revoke by another", &CopyRevoke { client: client(2), key, tenant: TENANT }).await;
        self.copy_end("copy: end", 1, "copy").await;
        self.copy_end("copy: end again", 1, "copy").await;
        self.locate("copy: two copies", "copy").await;
        self.copy_start("copy: one to revoke", 1, "copy", first, &[first]).await;
        self.ask("copy: revoke", &CopyRevoke { client: client(1), key, tenant: TENANT }).await;
        self.ask("copy: revoke again", &CopyRevoke { client: client(1), key, tenant: TENANT }).await;
        let unknown = CopyRevoke { client: client(1), key: b"unknown", tenant: TENANT };
        self.ask("copy: revoke unknown", &unknown).await;
        self.start("copy: one unfinished", 1, "copy/open", 100, &one()).await;
        self.copy_start("copy: of the unfinished", 1, "copy/open", first, &[second]).await;
        self.revoke("copy: revoke the unfinished", 1, "copy/open", ReplicaType::All).await;
        self.put(1, "copy/read", &one()).await;
        self.exist("copy: one read", "copy/read").await;
        self.copy_start("copy: of one read", 1, "copy/read", first, &[second]).await;
        self.copy_end("copy: end of one read", 1, "copy/read").await;
    }

    async fn copy_start(&mut self, step: &str, who: u64, key: &str, source: &str, targets: &[&str]) {
        let (key, targets) = (key.as_bytes(), Cow::Borrowed(targets));
        let call = CopyStart { client: client(who), key, tenant: TENANT, source, targets };
        let answer = self.rpc.call(&call).await.unwrap();
        let text = answer.map_or_else(number, |plan| {
            format!("from {} to {}", shown(std::slice::from_ref(&plan.source)), shown(&plan.targets))
        });
        self.note(step, text);
    }

    async fn copy_end(&mut self, step: &str, who: u64, key: &str) {
        self.ask(step, &CopyEnd { client: client(who), key: key.as_bytes(), tenant: TENANT }).await;
    }

    pub(super) async fn moves(&mut self) {
        let (first, second) = (&segment(1).name, &segment(2).name);
        self.put(1, "move", &one()).await;
        self.move_start("move: unknown", 1, "unknown", first, second).await;
        self.move_start("move: to itself", 1, "move", first, first).await;
        self.move_start("move: unknown to itself", 1, "unknown", first, first).await;
        self.move_start("move: from no segment", 1, "move", "host9:1", second).await;
        self.move_start("move: to no segment", 1, "move", first, "host9:1").await;
        self.move_start("move: start", 1, "move", first, second).await;
        self.move_start("move: start again", 1, "move", first, second).await;
        self.locate("move: read meanwhile", "move").await;
        self.upsert("move: upsert meanwhile", 1, "move", 100, &one()).await;
        self.remove("move: remove meanwhile", "move", true).await;
        self.copy_end("move: end as a copy", 1, "move").await;
        let key = b"move".as_slice();
        self.ask("move: end by another", &MoveEnd { client: client(2), key, tenant: TENANT }).await;
        self.ask("move: end", &MoveEnd { client: client(1), key, tenant: TENANT }).await;
        self.ask("move: end again", &MoveEnd { client: client(1), key, tenant: TENANT }).await;
        self.locate("move: moved", "move").await;
        self.move_start("move: back", 2, "move", second, first).await;
        self.ask("move: revoke", &MoveRevoke { client: client(2), key, tenant: TENANT }).await;
        self.locate("move: revoked", "move").await;
        let two = ReplicateConfig { replicas: 2, ..plain() };
        self.put(1, "move/two", &two).await;
        self.move_start("move: to where it is", 1, "move/two", first, second).await;
        self.remove("move: remove meanwhile, to where it is", "move/two", true).await;
        let key = b"move/two".as_slice();
        self.ask("move: end to where it is", &MoveEnd { client: client(1), key, tenant: TENANT }).await;
        self.locate("move: one of two", "move/two").await;
        self.ask("move: end unknown", &MoveEnd { client: client(1), key: b"unknown", tenant: TENANT }).await;
    }

    async fn move_start(&mut self, step: &str, who: u64, key: &str, source: &str, target: &str) {
        let call = MoveStart { client: client(who), key: key.as_bytes(), tenant: TENANT, source, target };
        let answer = self.rpc.call(&call).await.unwrap();
        let text = answer.map_or_else(number, |plan| {
            let target = plan.target.map_or("nowhere".into(), |target| shown(&[target]));
            format!("from {} to {target}", shown(&[plan.source]))
        });
        self.note(step, text);
    }

    async fn new_copy(&mut self, step: &str, key: &str, targets: &[&str]) -> Option<Uuid> {
        let call = CreateCopyTask { key: key.as_bytes(), tenant: TENANT, targets: Cow::Borrowed(targets) };
        let answer = self.rpc.call(&call).await.unwrap();
        self.note(step, answer.as_ref().map_or_else(|code| number(*code), |_| "a task".into()));
        answer.ok()
    }

    async fn new_move(&mut self, step: &str, key: &str, source: &str, target: &str) -> Option<Uuid> {
        let call = CreateMoveTask { key: key.as_bytes(), tenant: TENANT, source, target };
        let answer = self.rpc.call(&call).await.unwrap();
        self.note(step, answer.as_ref().map_or_else(|code| number(*code), |_| "a task".into()));
        answer.ok()
    }

    async fn fetch(&mut self, step: &str, who: u64, limit: u64) {
        let answer = self.rpc.call(&FetchTasks { client: client(who), limit }).await.unwrap();
        let text = answer.map_or_else(number, |tasks| {
            let one = |task: &mooncake_store::protocol::wire::Task| {
                // The fields of the JSON object may come in any order.
                let payload: serde_json::Value = serde_json::from_str(&task.payload).unwrap();
                format!("{:?} {payload} {}", task.kind, task.max_retries)
            };
            format!("[{}]", tasks.iter().map(one).collect::<Vec<_>>().join(", "))
        });
        self.note(step, text);
    }

    async fn query(&mut self, step: &str, task: Uuid) {
        let answer = self.rpc.call(&QueryTask { task }).await.unwrap();
        let text = answer.map_or_else(number, |info| {
            format!("{:?} {:?} of {} {:?}", info.kind, info.status, info.client.0.second, info.message)
        });
        self.note(step, text);
    }

    async fn report(&mut self, step: &str, who: u64, id: Uuid, status: TaskStatus) {
        let report = TaskReport { id, status, message: format!("{status:?} it is") };
        self.ask(step, &MarkTaskToComplete { client: client(who), report }).await;
    }

    pub(super) async fn tasks(&mut self) {
        let (first, second) = (&segment(1).name, &segment(2).name);
        self.put(1, "task", &one()).await;
        self.new_copy("task: to nowhere", "task", &[]).await;
        self.new_copy("task: to no segment", "task", &["host9:1"]).await;
        self.new_copy("task: to one of two", "task", &[second, "host9:1"]).await;
        self.new_copy("task: of unknown", "unknown", &[second]).await;
        self.new_copy("task: of unknown to no segment", "unknown", &["host9:1"]).await;
        self.new_copy("task: of unknown to nowhere", "unknown", &[]).await;
        self.new_move("task: move to itself", "task", first, first).await;
        self.new_move("task: move to no segment", "task", first, "host9:1").await;
        self.new_move("task: move from no segment", "task", "host9:1", second).await;
        self.new_move("task: move from where it is not", "task", second, first).await;
        self.new_move("task: move unknown", "unknown", first, second).await;
        self.new_move("task: move unknown from no segment", "unknown", "host9:1", second).await;
        self.query("task: unknown", Uuid::new(1, 2)).await;
        self.report("task: report unknown", 1, Uuid::new(1, 2), TaskStatus::Success).await;
        let copy = self.new_copy("task: copy", "task", &[second]).await.unwrap_or_default();
        let again = self.new_copy("task: copy again", "task", &[second]).await.unwrap_or_default();
        let mover = self.new_move("task: move", "task", first, second).await.unwrap_or_default();
        self.query("task: pending", copy).await;
        self.fetch("task: for another", 2, 16).await;
        self.fetch("task: for a stranger", 9, 16).await;
        self.fetch("task: none wanted", 1, 0).await;
        self.fetch("task: one", 1, 1).await;
        self.query("task: processing", copy).await;
        self.fetch("task: the rest", 1, 16).await;
        self.fetch("task: no more", 1, 16).await;
        self.report("task: report by another", 2, copy, TaskStatus::Success).await;
        self.report("task: report pending", 1, copy, TaskStatus::Pending).await;
        self.report("task: report processing", 1, copy, TaskStatus::Processing).await;
        self.query("task: after such reports", copy).await;
        self.report("task: report success", 1, copy, TaskStatus::Success).await;
        self.query("task: success", copy).await;
        self.report("task: report failure after success", 1, copy, TaskStatus::Failed).await;
        self.query("task: still success", copy).await;
        self.report("task: report failure", 1, again, TaskStatus::Failed).await;
        self.query("task: failed", again).await;
        self.report("task: end of the move", 1, mover, TaskStatus::Success).await;
        let early =
            self.new_copy("task: one that nobody fetches", "task", &[second]).await.unwrap_or_default();
        self.report("task: report what was not fetched", 1, early, TaskStatus::Success).await;
        self.query("task: reported unfetched", early).await;
        self.fetch("task: fetched after its report", 1, 16).await;
        self.start("task: one unfinished", 1, "task/open", 100, &one()).await;
        self.new_copy("task: of the unfinished", "task/open", &[second]).await;
        self.new_move("task: move the unfinished", "task/open", first, second).await;
        self.revoke("task: revoke the unfinished", 1, "task/open", ReplicaType::All).await;
    }
}
