//! The processes of the cluster, their faults, and what their parent sees of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::client::Counts;
use super::timeline::TimelineWriter;
use super::{CLIENTS, Memory, Settings};
use crate::process::{Lines, Process, free_port};

/// Owner that is stopped, but never killed, so that its memory can be compared.
pub(super) const STEADY: usize = 0;
/// Longest time until a process that was started is ready, and until one that leaves has ended.
const SLOW: Duration = Duration::from_secs(60);

/// Process of an owner or a client.
pub(super) struct Node {
    pub(super) name: String,
    pub(super) process: Process,
    said: Lines,
    pub(super) is_ready: bool,
    since: Instant,
    pub(super) stopped_until: Option<Instant>,
    pub(super) counts: Counts,
    /// Answers to commands that were not taken yet.
    responses: Vec<String>,
}

impl Node {
    /// Starts this test program for one of its ignored tests.
    fn start(name: String, test: &str, stage: &Stage, arguments: &[(&str, String)]) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env("TEST_MASTER", format!("127.0.0.1:{}", stage.port))
            .envs(arguments.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stage.settings.log(&name))
            .spawn();
        let mut process = Process(child.unwrap());
        let said = process.lines_after("> ");
        Self {
            name,
            process,
            said,
            is_ready: false,
            since: Instant::now(),
            stopped_until: None,
            counts: Counts::default(),
            responses: Vec::new(),
        }
    }

    /// Takes what the process has printed. Returns its name in the cluster if it has become ready.
    fn listen(&mut self) -> Result<Option<String>, String> {
        let mut ready = None;
        for line in self.said.arrived() {
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("ready", name) => ready = Some(name.to_owned()),
                ("counts", numbers) => {
                    let counts = Counts::parse(numbers);
                    self.counts = counts.ok_or_else(|| format!("{}: not counts: {numbers}", self.name))?;
                }
                ("wrong", wrong) => return Err(format!("{}: {wrong}", self.name)),
                _ => self.responses.push(line),
            }
        }
        self.is_ready |= ready.is_some();
        Ok(ready)
    }

    pub(super) fn send_command(&mut self, command: &str) -> Result<(), String> {
        let input = self.process.0.stdin.as_mut().ok_or("a process that leaves")?;
        writeln!(input, "{command}").map_err(|error| format!("{} does not listen: {error}", self.name))
    }

    /// Returns the rest of the response that begins with a word, once.
    pub(super) fn take_response(&mut self, word: &str) -> Option<String> {
        let at = self.responses.iter().position(|response| response.split(' ').next() == Some(word))?;
        Some(self.responses.remove(at)[word.len()..].trim().to_owned())
    }

    pub(super) fn stop(&mut self, span: Duration) {
        if self.stopped_until.is_none() {
            self.process.freeze();
        }
        self.stopped_until = Some(Instant::now() + span);
    }

    fn go_on(&mut self) {
        if self.stopped_until.take().is_some() {
            self.process.thaw();
        }
    }
}

/// The processes.
pub(super) struct Stage {
    pub(super) settings: Settings,
    port: u16,
    pub(super) pages: u16,
    timeline: TimelineWriter,
    snapshots: SnapshotFolder,
    pub(super) life: u64,
    pub(super) master: Option<Process>,
    master_stopped_until: Option<Instant>,
    pub(super) master_starts_at: Option<Instant>,
    pub(super) owners: Vec<Node>,
    pub(super) clients: Vec<Node>,
    generations: Vec<u64>,
    leaving: Vec<Node>,
    /// Counts of clients that have ended.
    past: Counts,
    pub(super) faults: BTreeMap<&'static str, u64>,
}

impl Stage {
    pub(super) fn set(settings: Settings) -> Self {
        let mut timeline = TimelineWriter::create(&settings.timeline());
        timeline.up(1);
        let mut stage = Self {
            port: free_port(),
            pages: free_port(),
            snapshots: SnapshotFolder::new(&settings.folder),
            settings,
            timeline,
            life: 1,
            master: None,
            master_stopped_until: None,
            master_starts_at: None,
            owners: Vec::new(),
            clients: Vec::new(),
            generations: vec![0; CLIENTS as usize],
            leaving: Vec::new(),
            past: Counts::default(),
            faults: BTreeMap::new(),
        };
        let tenants: Vec<_> = ["default", "three", "four"]
            .iter()
            .map(|name| format!("- {{name: {name}, quota: 1GB}}\n"))
            .collect();
        let policy = format!("version: 1\ntenants:\n{}", tenants.concat());
        std::fs::write(stage.settings.folder.join("tenants.yaml"), policy).unwrap();
        stage.master = Some(stage.start_master());
        stage.owners = (0..stage.settings.owners.len()).map(|slot| stage.start_owner(slot)).collect();
        stage.clients = (0..CLIENTS).map(|number| stage.start_client(number)).collect();
        stage
    }

    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn start_master(&self) -> Process {
        let folder = self.settings.folder.display();
        let child = Command::new(env!("CARGO_BIN_EXE_mooncake_master"))
            .args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"])
            .args([format!("--rpc_port={}", self.port), format!("--metrics_port={}", self.pages)])
            .args(["--client_ttl=3", "--default_kv_lease_ttl=300"])
            .args(["--put_start_discard_timeout_sec=28", "--put_start_release_timeout_sec=30"])
            .args(["--enable_snapshot", "--enable_snapshot_restore", "--snapshot_interval_seconds=3"])
            .args(["--enable_offload", "--enable_multi_tenants"])
            .arg(format!("--snapshot_local_path={folder}"))
            .arg(format!("--tenant_quota_connector_uri={folder}/tenants.yaml"))
            .stdout(self.settings.log("master"))
            .stderr(self.settings.log("master"))
            .spawn();
        Process(child.unwrap())
    }

    fn start_owner(&self, slot: usize) -> Node {
        let mut arguments = vec![("TEST_SLOT", slot.to_string())];
        let path = |path: PathBuf| path.display().to_string();
        match self.settings.owners[slot] {
            Memory::Plain => {}
            Memory::File => {
                arguments.push(("TEST_FILE", path(self.settings.memory.path().join(slot.to_string()))));
            }
            Memory::Disk => {
                arguments.push(("TEST_FOLDER", path(self.settings.folder.join(format!("disk-{slot}")))));
            }
        }
        Node::start(format!("owner-{slot}"), "torture::owner::owner", self, &arguments)
    }

    fn start_client(&mut self, number: u64) -> Node {
        let generation = self.generations[number as usize];
        self.timeline.client(number, generation);
        let settings = &self.settings;
        let arguments = [
            ("TEST_NUMBER", number.to_string()),
            ("TEST_GENERATION", generation.to_string()),
            ("TEST_SEED", settings.seed.to_string()),
            ("TEST_KEYS", settings.keys.to_string()),
            ("TEST_RATE", settings.rate.to_string()),
            ("TEST_TIMELINE", settings.timeline().display().to_string()),
        ];
        Node::start(format!("client-{number}"), "torture::client::client", self, &arguments)
    }

    /// Does what is due: ends stops, starts the master, and listens to all processes.
    ///
    /// # Errors
    /// Returns the first wrong outcome that a process reports. Names a process that has ended by
    /// itself or does not get ready.
    pub(super) fn tick(&mut self) -> Result<(), String> {
        let now = Instant::now();
        let mark = self.timeline.mark();
        self.watch_snapshots(mark);
        if self.master_stopped_until.is_some_and(|until| until <= now) {
            self.thaw_master();
        }
        if self.master_starts_at.is_some_and(|at| at <= now) {
            self.restart_master();
        }
        if let Some(master) = &mut self.master
            && let Some(status) = master.0.try_wait().unwrap()
        {
            return Err(format!("the master has ended: {status}"));
        }
        for (slot, owner) in self.owners.iter_mut().enumerate() {
            if let Some(name) = owner.listen()? {
                self.timeline.owner(slot, &name);
            }
        }
        for client in &mut self.clients {
            client.listen()?;
        }
        for node in self.owners.iter_mut().chain(&mut self.clients) {
            if node.stopped_until.is_some_and(|until| until <= now) {
                node.go_on();
            }
            if let Some(status) = node.process.0.try_wait().unwrap() {
                // The last line may not have been read yet.
                std::thread::sleep(Duration::from_millis(100));
                node.listen()?;
                return Err(format!("{} has ended: {status}", node.name));
            }
            if !node.is_ready && now - node.since > SLOW {
                return Err(format!("{} is not ready after {SLOW:?}", node.name));
            }
        }
        self.reap(now)
    }

    fn reap(&mut self, now: Instant) -> Result<(), String> {
        for mut node in std::mem::take(&mut self.leaving) {
            node.listen()?;
            match node.process.0.try_wait().unwrap() {
                Some(status) if status.success() => {
                    std::thread::sleep(Duration::from_millis(20));
                    node.listen()?;
                    self.past.add(&node.counts);
                }
                Some(status) => return Err(format!("{} has ended: {status}", node.name)),
                None if now - node.since > 3 * SLOW => {
                    return Err(format!("{} hangs when it leaves", node.name));
                }
                None => self.leaving.push(node),
            }
        }
        Ok(())
    }

    fn watch_snapshots(&mut self, mark: u64) {
        for begun_after in self.snapshots.look(mark) {
            self.timeline.snapshot(self.life, begun_after);
        }
    }

    pub(super) fn stop_master(&mut self, span: Duration) {
        if let Some(master) = &self.master {
            if self.master_stopped_until.is_none() {
                master.freeze();
            }
            self.master_stopped_until = Some(Instant::now() + span);
        }
    }

    fn thaw_master(&mut self) {
        if self.master_stopped_until.take().is_some()
            && let Some(master) = &self.master
        {
            master.thaw();
        }
    }

    /// Kills the master, and starts the next one after a time.
    pub(super) fn kill_master(&mut self, pause: Duration) {
        let Some(master) = self.master.take() else { return };
        self.timeline.down(self.life);
        master.kill();
        self.master_stopped_until = None;
        // The last snapshot may have been completed since the last look.
        let mark = self.timeline.mark();
        self.watch_snapshots(mark);
        self.master_starts_at = Some(Instant::now() + pause);
    }

    fn restart_master(&mut self) {
        self.master_starts_at = None;
        self.life += 1;
        self.timeline.up(self.life);
        self.master = Some(self.start_master());
    }

    /// Kills an owner and starts it again.
    pub(super) fn kill_owner(&mut self, slot: usize) {
        let node = self.start_owner_after(slot, |node| {
            node.process.0.kill().unwrap();
            node.process.ended();
        });
        drop(node);
    }

    /// Lets an owner leave, and starts the next one.
    pub(super) fn close_owner(&mut self, slot: usize) {
        // The next process needs the file or the folder of the one before.
        let waits = self.settings.owners[slot] != Memory::Plain;
        let node = self.start_owner_after(slot, |node| {
            node.go_on();
            drop(node.process.0.stdin.take());
            let begun = Instant::now();
            while waits && begun.elapsed() < SLOW && node.process.0.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        self.leaving.push(Node { since: Instant::now(), ..node });
    }

    fn start_owner_after(&mut self, slot: usize, end: impl FnOnce(&mut Node)) -> Node {
        end(&mut self.owners[slot]);
        let next = self.start_owner(slot);
        std::mem::replace(&mut self.owners[slot], next)
    }

    /// Kills a client and starts the next generation of it.
    pub(super) fn kill_client(&mut self, number: usize) -> Result<(), String> {
        let client = &mut self.clients[number];
        client.listen()?;
        self.past.add(&client.counts);
        client.process.0.kill().unwrap();
        client.process.ended();
        self.generations[number] += 1;
        self.clients[number] = self.start_client(number as u64);
        Ok(())
    }

    pub(super) fn counts(&self) -> Counts {
        let mut counts = self.past;
        self.clients.iter().chain(&self.leaving).for_each(|client| counts.add(&client.counts));
        counts
    }

    /// Runs until a condition holds.
    ///
    /// # Errors
    /// Those of [`tick`](Self::tick), and the condition that does not hold in time.
    pub(super) fn run_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut holds: impl FnMut(&mut Self) -> Result<bool, String>,
    ) -> Result<(), String> {
        let begun = Instant::now();
        while !holds(self)? {
            self.tick()?;
            if begun.elapsed() > limit {
                return Err(format!("not within {limit:?}: {what}"));
            }
            std::thread::sleep(super::TICK);
        }
        Ok(())
    }

    /// Ends all faults, and waits until all processes are ready.
    pub(super) fn calm(&mut self) -> Result<(), String> {
        self.thaw_master();
        self.owners.iter_mut().chain(&mut self.clients).for_each(Node::go_on);
        self.run_until("all processes are ready", 2 * SLOW, |stage| {
            let mut nodes = stage.owners.iter().chain(&stage.clients);
            Ok(stage.master.is_some() && stage.leaving.is_empty() && nodes.all(|node| node.is_ready))
        })
    }

    /// Sends a command to all clients, and waits for a response of each. Returns the responses.
    pub(super) fn command_clients(&mut self, command: &str, word: &str) -> Result<Vec<String>, String> {
        for client in &mut self.clients {
            client.send_command(command)?;
        }
        let mut responses = BTreeMap::new();
        self.run_until(command, 4 * SLOW, |stage| {
            for (number, client) in stage.clients.iter_mut().enumerate() {
                if let Some(response) = client.take_response(word) {
                    responses.insert(number, response);
                }
            }
            Ok(responses.len() == stage.clients.len())
        })?;
        Ok(responses.into_values().collect())
    }

    /// Lets all clients or owners leave.
    pub(super) fn leave(&mut self, nodes: impl FnOnce(&mut Self) -> Vec<Node>) -> Result<(), String> {
        for mut node in nodes(self) {
            drop(node.process.0.stdin.take());
            self.leaving.push(Node { since: Instant::now(), ..node });
        }
        self.run_until("all have left", 4 * SLOW, |stage| Ok(stage.leaving.is_empty()))
    }
}

/// Folder of the snapshots of a master.
struct SnapshotFolder {
    path: PathBuf,
    /// Complete snapshots, and files of snapshots in progress, of the last look.
    seen: BTreeSet<String>,
    /// Snapshots in progress, each with the mark before the look that did not find it yet.
    begun: BTreeMap<String, u64>,
    last_mark: u64,
}

impl SnapshotFolder {
    fn new(folder: &Path) -> Self {
        let path = folder.join("mooncake_cluster");
        Self { path, seen: BTreeSet::new(), begun: BTreeMap::new(), last_mark: 0 }
    }

    /// Looks into the folder after this mark was written. Returns, for each snapshot that was
    /// completed since the last look, a mark that was written before it began.
    ///
    /// A snapshot creates its unfinished file first. If an earlier look did not find the file, the
    /// snapshot began after that look.
    fn look(&mut self, mark: u64) -> Vec<u64> {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let names: BTreeSet<String> = entries
            .filter(|entry| entry.metadata().is_ok_and(|file| file.is_file()))
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                // The claim of a number is an empty file that the complete one replaces.
                let is_claim = name.starts_with("snapshot-") && entry.metadata().ok()?.len() == 0;
                (!is_claim).then_some(name)
            })
            .collect();
        let mut complete = Vec::new();
        for name in names.difference(&self.seen) {
            if let Some(number) = name.strip_prefix("snapshot-") {
                let begun = self.begun.remove(number).unwrap_or(self.last_mark);
                complete.push(begun);
            } else if let Some(number) = name.strip_prefix("unfinished-") {
                let number = number.split('-').next().unwrap_or_default();
                self.begun.insert(number.to_owned(), self.last_mark);
            }
        }
        (self.seen, self.last_mark) = (names, mark);
        complete
    }
}

impl Settings {
    pub(super) fn timeline(&self) -> PathBuf {
        self.folder.join("timeline")
    }

    fn log(&self, name: &str) -> File {
        let path = self.folder.join(format!("{name}.log"));
        OpenOptions::new().append(true).create(true).open(path).unwrap()
    }
}
