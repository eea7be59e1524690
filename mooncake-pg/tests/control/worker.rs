//! Process of one rank, which its parent commands over the standard streams.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use mooncake_pg::control::{Agent, CoordinatorServer, GroupHandle};
use mooncake_pg::protocol::{AttachMode, Change};
use mooncake_pg::view::{Evidence, GlobalRank, Membership, Slot};

use crate::{PATIENCE, active, settings, spec};

const HOST: &str = "127.0.0.1";
/// Mark of the lines for the parent.
const MARK: &str = "> ";

/// Worker process, whose output its parent reads. The drop kills it.
pub(crate) struct Worker {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
    /// Active slots of the last view.
    view: String,
}

impl Worker {
    /// Starts the process of a rank of four. Rank 0 without a coordinator starts one.
    pub(crate) fn start(rank: u8, coordinator: &str, is_extension: bool) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker::worker", "--ignored", "--nocapture"])
            .env("TEST_RANK", rank.to_string())
            .env("TEST_COORDINATOR", coordinator)
            .env("TEST_EXTENSION", is_extension.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tell, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some((_, line)) = line.split_once(MARK)
                    && tell.send(line.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        Self { child, input, lines, view: String::new() }
    }

    pub(crate) fn command(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    /// Waits for a line that begins with `word`, and returns the rest of it.
    pub(crate) fn expect(&mut self, word: &str) -> String {
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => {
                    if let Some(view) = line.strip_prefix("view ") {
                        view.clone_into(&mut self.view);
                    }
                    if let Some(rest) = line.strip_prefix(word) {
                        return rest.trim().to_owned();
                    }
                    seen.push(line);
                }
                Err(reason) => {
                    let view = &self.view;
                    panic!("{word:?} does not come after {seen:?}: {reason}. view={view:?}");
                }
            }
        }
    }

    /// Waits until the view has these active slots. A process tells the latest view, not each one:
    /// the view must not change until the call returns.
    pub(crate) fn expect_view(&mut self, active: &str) {
        while self.view != active {
            self.expect("view ");
        }
    }

    /// Sends a command and waits for its result.
    pub(crate) fn result(&mut self, command: &str) -> String {
        self.command(command);
        self.expect(&format!("done {command}:"))
    }

    pub(crate) fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Stops the process, and waits until none of its threads runs any more.
    pub(crate) fn stop(&self) {
        self.signal("-STOP");
        let tasks = format!("/proc/{}/task", self.child.id());
        let runs = |task: std::io::Result<std::fs::DirEntry>| {
            let state = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            !state.rsplit(')').next().unwrap().trim_start().starts_with('T')
        };
        while std::fs::read_dir(&tasks).unwrap().any(runs) {
            std::thread::yield_now();
        }
    }

    /// Kills the process as `kill -9` does.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for the end of the process, and returns whether it succeeded.
    pub(crate) fn wait(&mut self) -> bool {
        self.child.wait().unwrap().success()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[allow(clippy::disallowed_methods, reason = "arguments come from the environment")]
fn argument(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn tell(line: &str) {
    // A new line first: the test harness leaves its own line open.
    println!("\n{MARK}{line}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process that other tests start"]
async fn worker() {
    let Some(rank) = argument("TEST_RANK").and_then(|rank| rank.parse().ok()) else { return };
    let settings = settings(Duration::from_secs(120));
    let mut coordinator = argument("TEST_COORDINATOR").unwrap_or_default();
    let mut server = None;
    if coordinator.is_empty() {
        let started = CoordinatorServer::start(HOST, settings.clone()).await.unwrap();
        coordinator = started.address().to_owned();
        server = Some(started);
        tell(&format!("coordinator {coordinator}"));
    }
    let agent = Agent::connect(&coordinator, GlobalRank(rank), HOST, settings).await.unwrap();
    let is_extension = argument("TEST_EXTENSION").is_some_and(|text| text == "true");
    let mode = if is_extension { AttachMode::AttachOrExtend } else { AttachMode::CreateOrAttach };
    let group = agent.register_group(spec("cpu:0", 4, 4, mode)).await.unwrap();
    group.publish_endpoint(format!("process {}", std::process::id()).into());
    group.wait_until_ready().await.unwrap();
    tell("ready");
    let mut views = group.view();
    tokio::spawn(async move {
        loop {
            let view = views.borrow_and_update().clone();
            if let Some(view) = view {
                tell(&format!("view {:?}", active(&view)));
            }
            if views.changed().await.is_err() {
                break;
            }
        }
    });
    let (commands, mut received) = tokio::sync::mpsc::channel(16);
    // The thread of a read from the standard input cannot be ended: the process exits instead.
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if commands.blocking_send(line).is_err() {
                break;
            }
        }
    });
    while let Some(command) = received.recv().await {
        if command == "quit" {
            break;
        }
        let result = execute(&group, &command).await;
        tell(&format!("done {command}: {result}"));
    }
    agent.shut_down().await;
    if let Some(server) = server {
        server.shut_down(GlobalRank(rank), Duration::from_secs(1)).await;
    }
    tell("left");
    std::process::exit(0);
}

async fn execute(group: &GroupHandle, command: &str) -> String {
    let (verb, slot) = command.split_once(' ').unwrap_or((command, "0"));
    let slot = Slot(slot.parse().unwrap());
    match verb {
        "join" => format!("{:?}", group.join().await),
        "activate" => {
            let usable = async {
                while group.peer_state(&[slot]) != [true] {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            if tokio::time::timeout(PATIENCE, usable).await.is_err() {
                return format!("not usable: {:?}", group.last_view());
            }
            format!("{:?}", group.propose(Change::Activate, &[slot]).await)
        }
        "deactivate" => format!("{:?}", group.propose(Change::Deactivate, &[slot]).await),
        "alive" => format!("{}", group.is_alive(slot).await),
        "fail" => {
            let view = group.last_view().unwrap();
            let incarnation = view.members[usize::from(slot.0)].incarnation;
            group.report(slot, incarnation, Evidence::Failure);
            format!("{:?}", group.sync_after_failure().await)
        }
        _ => panic!("no such command: {command}"),
    }
}
