//! Coordinator of a replay: starts the processes, distributes the requests, kills one process if
//! requested, and sums up.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use mooncake_core::Clock;
use mooncake_core::clock::SystemClock;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

use crate::args::{Args, RoleArgs};
use crate::master::{Loss, MasterReplay};
use crate::policies::endless;
use crate::reader::TraceFile;
use crate::report::{MasterStats, Outcome, Totals};
use crate::table::{grouped, short};
use crate::trace::Trace;

/// Maximum difference of the hit rate with disks from that of an unbounded cache.
const BEHIND: f64 = 0.01;
/// Maximum factor by which disks may slow down the slowest hundredth of memory hits.
const SLOWER: f64 = 1.3;

/// Default lease of a master, scaled by the speed-up.
const LEASE: Duration = Duration::from_secs(10);
/// Shortest time, with a client to be killed, until the master gives up a silent client.
const SILENCE: Duration = Duration::from_secs(2);
/// Factor of the speed of the trace, where hit ratios are compared. Faster, the shortest leases and
/// requests at the same time would change them.
const SPEED: f64 = 60.0;
/// Maximum difference of the hit ratio of a cluster from that of a master alone.
const APART: f64 = 0.01;

pub(crate) fn run(args: &Args) -> Result<bool, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the async runtime: {e}"))?;
    runtime.block_on(replay(args))
}

async fn replay(args: &Args) -> Result<bool, String> {
    let processes = u64::from(args.processes);
    if args.replicas > processes {
        return Err(format!(
            "cannot replicate blocks: each copy needs its own process. replicas={} processes={processes}",
            args.replicas
        ));
    }
    if args.kill_one_after.is_some() && processes == 1 && !args.replace_killed {
        return Err("cannot kill a client: no other one would be left. processes=1; \
                    raise --processes, or use --replace-killed"
            .into());
    }
    let trace = load(args)?;
    if !args.blocks.is_empty() {
        return replay_sizes(args, &trace).await;
    }
    check_space(args, &trace)?;
    if !args.beside_memory {
        return Ok(replay_once(args, &trace).await?.good(args));
    }
    println!("--- memory alone");
    let alone = replay_once(&Args { disk_blocks: None, ..args.clone() }, &trace).await?;
    println!("--- memory and disks");
    let both = replay_once(args, &trace).await?;
    let endless = endless(&trace);
    let slower = both.memory_p99() as f64 / alone.memory_p99().max(1) as f64;
    println!(
        "hit rate               {:.4} of {endless:.4} for an unbounded cache; without disks {:.4}",
        both.hit_rate(),
        alone.hit_rate()
    );
    println!(
        "memory hits, p99     {:.2} ms, without disks {:.2} ms: x{slower:.2}",
        both.memory_p99() as f64 / 1000.0,
        alone.memory_p99() as f64 / 1000.0
    );
    let kept_up = endless - both.hit_rate() <= BEHIND && slower <= SLOWER;
    if !kept_up {
        println!(
            "FAILED: hit rate more than {BEHIND} behind, or memory hits more than {SLOWER} times as slow"
        );
    }
    Ok(kept_up && alone.good(args) && both.good(args))
}

/// Replays the trace with each size of memory, and compares with a master alone.
async fn replay_sizes(args: &Args, trace: &Trace) -> Result<bool, String> {
    let processes = u64::from(args.processes);
    let (mut is_good, mut rows) = (true, Vec::new());
    for &blocks in &args.blocks {
        let copies = blocks.next_multiple_of(processes) * args.replicas;
        let capacity = copies.checked_mul(args.block_bytes).ok_or_else(|| {
            format!("cannot replay: memory is out of range. blocks={blocks} block_bytes={}", args.block_bytes)
        })?;
        let args = Args { capacity, speed: args.speed.or(Some(SPEED)), ..args.clone() };
        check_space(&args, trace)?;
        println!("--- {} blocks", grouped(blocks));
        let totals = replay_once(&args, trace).await?;
        let loss = Pace::of(&args, trace)?.loss(totals.killed_root);
        let alone = |loss| {
            MasterReplay { policy: args.policy, blocks, clients: args.processes, loss }
                .hit_ratio(&args, trace)
                .map_err(|e| e.to_string())
        };
        let whole = alone(None)?;
        let expected = if loss.is_some() { alone(loss)? } else { whole };
        let cluster = totals.hit_rate();
        is_good &= totals.good(&args) && (cluster - expected).abs() <= APART;
        rows.push(format!(
            "| {} | {} | {} | {} | {:+.4} | {} |",
            grouped(blocks),
            short(whole),
            if loss.is_some() { short(expected) } else { "-".into() },
            short(cluster),
            cluster - expected,
            totals.mismatches()
        ));
    }
    println!(
        "\n| blocks of memory | master alone | it loses a client, too | cluster | difference | mismatches |"
    );
    println!("|---|---|---|---|---|---|\n{}", rows.join("\n"));
    if !is_good {
        println!("FAILED: a failure above, or a hit ratio more than {APART} apart");
    }
    Ok(is_good)
}

async fn replay_once(args: &Args, trace: &Trace) -> Result<Totals, String> {
    let total = trace.requests.len();
    let (blocks, distinct) = trace.blocks();
    let Pace { kill_at, lease, silence, speed_up } = Pace::of(args, trace)?;
    let args = &Args {
        role: RoleArgs { silence_ms: silence.as_millis() as u64, ..args.role.clone() },
        ..args.clone()
    };
    println!(
        "{total} requests, {blocks} blocks, {distinct} distinct; the trace covers {:.0} s",
        trace.span_s()
    );

    let clock = SystemClock::new();
    let mut master = Process::start("master", args, &["--lease-ms".into(), lease.as_millis().to_string()])?;
    let address = master.ready().await?;
    let disks = args.disk_blocks.map(|_| folder(args)).transpose()?;
    let mut workers = Workers::start(args, &address, disks.as_ref().map(TempDir::path)).await?;
    let mut is_killed = false;
    let bar = progress(total);
    let started = clock.now();
    let mut totals = Totals::new(args.block_bytes, trace.input_tokens());
    let mut todo: VecDeque<usize> = (0..total).collect();
    while (totals.requests as usize) < total {
        let elapsed = clock.now().since(started);
        workers
            .deal(trace, &mut todo, args.inflight.into(), |index| due(args, trace, index) <= elapsed)
            .await;
        let event = match todo.front().map(|&index| due(args, trace, index)) {
            Some(due) if due > elapsed => tokio::time::timeout(due - elapsed, workers.next()).await,
            _ => Ok(workers.next().await),
        };
        // The next request is due.
        let Ok(event) = event else { continue };
        match event? {
            Event::Done(outcome) => {
                totals.add(&outcome, trace.found_tokens(outcome.index, outcome.hit as usize));
                bar.inc(1);
                bar.set_message(format!(
                    "hit rate {:.3}, {} mismatches",
                    totals.hit_rate(),
                    totals.mismatches()
                ));
            }
            Event::Gone(lost) => lost.into_iter().rev().for_each(|index| todo.push_front(index)),
        }
        if !is_killed && kill_at.is_some_and(|at| totals.requests as usize >= at) {
            is_killed = true;
            let holders = match trace.root() {
                Some(root) => master.holders(root).await?,
                None => Vec::new(),
            };
            totals.killed_root = workers.kill_one(&holders, &bar);
            if args.replace_killed {
                workers.add(args, &address, disks.as_ref().map(TempDir::path)).await?;
            }
        }
    }
    let elapsed = clock.now().since(started);
    bar.finish_and_clear();
    let stats = master.stats().await?;
    workers.stop().await;
    totals.print(elapsed, &stats);
    println!(
        "speed-up               x{:.0} expected, x{:.0} measured; lease {} s -> {} ms",
        speed_up,
        trace.span_s() / elapsed.as_secs_f64(),
        LEASE.as_secs(),
        lease.as_millis()
    );
    if !totals.good(args) {
        println!("FAILED: a mismatch, a failure that is not a miss, or a wait over {} s", args.limit);
    }
    Ok(totals)
}

/// Times of a replay.
struct Pace {
    /// Number of requests after which a client is killed.
    kill_at: Option<usize>,
    lease: Duration,
    /// Time until the master gives up a silent client.
    silence: Duration,
    /// Expected factor of the speed of the trace.
    speed_up: f64,
}

impl Pace {
    fn of(args: &Args, trace: &Trace) -> Result<Self, String> {
        let kill_at = args.kill_one_after.map(|point| point.of(trace.requests.len())).transpose()?;
        let slowest = args.speed.map_or(0.0, |speed| trace.span_s() / speed);
        let expected = expected_s(trace.blocks().0, args).max(slowest).max(f64::MIN_POSITIVE);
        let lease = match args.lease_ms {
            Some(ms) => Duration::from_millis(ms),
            None => scaled_lease(trace.span_s(), expected),
        };
        let silence = if kill_at.is_some() { lease.clamp(SILENCE, LEASE) } else { LEASE };
        Ok(Self { kill_at, lease, silence, speed_up: trace.span_s() / expected })
    }

    /// Returns the loss of a client at the pace of the trace.
    fn loss(&self, with_root: bool) -> Option<Loss> {
        let silence = Duration::try_from_secs_f64(self.silence.as_secs_f64() * self.speed_up);
        let silence = silence.unwrap_or(Duration::MAX);
        self.kill_at.map(|after| Loss { after, silence, with_root })
    }
}

/// Returns the time of a request, from the start on. Without a requested speed, every request is
/// due at once.
fn due(args: &Args, trace: &Trace, index: usize) -> Duration {
    let ms = trace.requests[index].timestamp as f64;
    args.speed.map_or(Duration::ZERO, |speed| Duration::from_secs_f64(ms / 1000.0 / speed))
}

/// Creates a folder that is removed on drop.
fn folder(args: &Args) -> Result<TempDir, String> {
    let made = match &args.disk_in {
        Some(inside) => TempDir::new_in(inside),
        None => TempDir::new(),
    };
    made.map_err(|e| format!("cannot create a folder for the disks: {e}"))
}

/// Loads the requested trace, which has at least one request. Prints how a file was read.
pub(crate) fn load(args: &Args) -> Result<Trace, String> {
    let mut trace = match &args.trace {
        Some(path) => {
            let file = TraceFile::read(path, &args.trace_options)?;
            println!("{file}");
            file.trace
        }
        None => match args.workload {
            Some(workload) => Trace::with_pauses(workload.requests(args.seed)),
            None => Trace::generate(args.requests.unwrap_or(2000), args.seed),
        },
    };
    trace.requests.truncate(args.requests.unwrap_or(usize::MAX));
    Ok(trace)
}

fn check_space(args: &Args, trace: &Trace) -> Result<(), String> {
    let longest = trace.requests.iter().map(|r| r.ids.len()).max().unwrap_or(0) as u64;
    let of_each = args.capacity / u64::from(args.processes) / args.block_bytes;
    if of_each < longest {
        return Err(format!(
            "cannot replay: the longest request does not fit into one process. \
             longest={longest} fit={of_each}; raise the memory, or use fewer --processes"
        ));
    }
    Ok(())
}

/// Returns the expected duration of the replay: a fixed cost per block, and its bytes at a modest
/// speed.
fn expected_s(blocks: u64, args: &Args) -> f64 {
    blocks as f64 * (25e-6 + args.block_bytes as f64 * args.replicas as f64 / 1.2e9)
}

/// Returns a lease that covers the same share of the replay as 10 s do of the trace, but at least
/// the time of one request.
fn scaled_lease(span_s: f64, expected_s: f64) -> Duration {
    let scale = if span_s > expected_s { expected_s / span_s } else { 1.0 };
    LEASE.mul_f64(scale).max(Duration::from_millis(50))
}

fn progress(total: usize) -> ProgressBar {
    let bar = ProgressBar::new(total as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {per_sec}, {msg}") {
        bar.set_style(style);
    }
    bar
}

enum Event {
    Done(Box<Outcome>),
    /// End of a worker, with the requests that it did not complete.
    Gone(Vec<usize>),
}

/// Client processes, and the requests that each is working on.
struct Workers {
    members: Vec<ClientProcess>,
    events: mpsc::UnboundedReceiver<(usize, Option<Outcome>)>,
    sender: mpsc::UnboundedSender<(usize, Option<Outcome>)>,
    /// Number of the client that was killed.
    killed: Option<usize>,
}

struct ClientProcess {
    name: String,
    child: Child,
    input: ChildStdin,
    busy: Vec<usize>,
    alive: bool,
}

impl Workers {
    async fn start(args: &Args, master: &str, disks: Option<&Path>) -> Result<Self, String> {
        let (sender, events) = mpsc::unbounded_channel();
        let mut workers = Self { members: Vec::new(), events, sender, killed: None };
        for _ in 0..args.processes {
            workers.add(args, master, disks).await?;
        }
        Ok(workers)
    }

    /// Starts a client process.
    async fn add(&mut self, args: &Args, master: &str, disks: Option<&Path>) -> Result<(), String> {
        let number = self.members.len();
        let mut words = vec!["--master-at".into(), master.into()];
        if let Some(disks) = disks {
            let disk = disks.join(number.to_string());
            words.extend(["--disk-at".into(), disk.to_string_lossy().into_owned()]);
        }
        let mut process = Process::start("client", args, &words)?;
        let name = process.ready().await?;
        let Process { child, input, lines } = process;
        tokio::spawn(forward(number, lines, self.sender.clone()));
        self.members.push(ClientProcess { name, child, input, busy: Vec::new(), alive: true });
        Ok(())
    }

    /// Passes requests to free workers, in the order of the trace.
    async fn deal(
        &mut self,
        trace: &Trace,
        todo: &mut VecDeque<usize>,
        inflight: usize,
        is_due: impl Fn(usize) -> bool,
    ) {
        while let Some(index) = todo.front().copied().filter(|&index| is_due(index)) {
            let Some(member) = self
                .members
                .iter_mut()
                .filter(|m| m.alive && m.busy.len() < inflight)
                .min_by_key(|m| m.busy.len())
            else {
                return;
            };
            todo.pop_front();
            member.busy.push(index);
            let line = format!("{}\n", json!({"index": index, "ids": trace.requests[index].ids}));
            // The end of its output reports the end of a worker; its requests come back then.
            let _ = member.input.write_all(line.as_bytes()).await;
        }
    }

    async fn next(&mut self) -> Result<Event, String> {
        let Some((number, outcome)) = self.events.recv().await else {
            return Err("the channel of the client processes is closed".into());
        };
        match outcome {
            Some(outcome) => {
                self.members[number].busy.retain(|&index| index != outcome.index);
                Ok(Event::Done(Box::new(outcome)))
            }
            None => {
                self.members[number].alive = false;
                if !self.members.iter().any(|member| member.alive) {
                    return Err("every client process has ended".into());
                }
                if self.killed != Some(number) {
                    return Err(format!("client process {number} ended unexpectedly"));
                }
                Ok(Event::Gone(std::mem::take(&mut self.members[number].busy)))
            }
        }
    }

    /// Kills the last client. Returns whether it is one of the named ones, which hold the block
    /// that most requests begin with.
    fn kill_one(&mut self, holders: &[String], bar: &ProgressBar) -> bool {
        self.killed = self.members.len().checked_sub(1);
        let Some(member) = self.members.last_mut() else { return false };
        let holds_root = holders.contains(&member.name);
        let of = if holds_root { ", which holds the block that most requests begin with" } else { "" };
        bar.suspend(|| println!("kill -9 {}{of}", member.child.id().unwrap_or(0)));
        let _ = member.child.start_kill();
        holds_root
    }

    async fn stop(self) {
        for ClientProcess { mut child, input, alive, .. } in self.members {
            // The end of its input makes a worker close.
            drop(input);
            if alive {
                let _ = child.wait().await;
            }
        }
    }
}

async fn forward(
    number: usize,
    mut lines: Lines<BufReader<ChildStdout>>,
    to: mpsc::UnboundedSender<(usize, Option<Outcome>)>,
) {
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(outcome) = serde_json::from_str(&line) {
            let _ = to.send((number, Some(outcome)));
        }
    }
    let _ = to.send((number, None));
}

/// This program in another role.
struct Process {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(role: &str, args: &Args, extra: &[String]) -> Result<Self, String> {
        let program =
            std::env::current_exe().map_err(|e| format!("cannot find the path of this program: {e}"))?;
        let mut command = Command::new(program);
        command
            .args(["--role", role, "--policy", &args.policy.to_string()])
            .args(["--block-bytes", &args.block_bytes.to_string()])
            .args(["--capacity", &args.capacity.to_string()])
            .args(["--processes", &args.processes.to_string()])
            .args(["--inflight", &args.inflight.to_string()])
            .args(["--replicas", &args.replicas.to_string()])
            .args(["--watermark", &args.watermark.to_string()])
            .args(["--limit", &args.limit.to_string()])
            .args(["--silence-ms", &args.role.silence_ms.to_string()])
            .args(args.disk_blocks.iter().flat_map(|blocks| ["--disk-blocks".into(), blocks.to_string()]))
            .args(args.offload_on_evict.then_some("--offload-on-evict"))
            .args(args.protocol.iter().flat_map(|protocol| ["--protocol", protocol]))
            .args(extra)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(|e| format!("cannot start a {role} process: {e}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a child process has no pipes".into());
        };
        Ok(Self { child, input, lines: BufReader::new(output).lines() })
    }

    /// Returns the address that the process prints once it is up.
    async fn ready(&mut self) -> Result<String, String> {
        match self.line().await?.get("ready").and_then(Value::as_str) {
            Some(address) => Ok(address.to_owned()),
            None => Err("a child process did not start; its messages are above".into()),
        }
    }

    /// Returns the names of the clients that hold a block, from the master.
    async fn holders(&mut self, block: u64) -> Result<Vec<String>, String> {
        let line = format!("{block}\n");
        self.input.write_all(line.as_bytes()).await.map_err(|e| format!("the master has ended: {e}"))?;
        serde_json::from_value(self.line().await?["holders"].take())
            .map_err(|e| format!("cannot read who holds a block: {e}"))
    }

    /// Returns the statistics of the master.
    async fn stats(&mut self) -> Result<MasterStats, String> {
        self.input.write_all(b"stats\n").await.map_err(|e| format!("the master has ended: {e}"))?;
        serde_json::from_value(self.line().await?)
            .map_err(|e| format!("cannot read the statistics of the master: {e}"))
    }

    async fn line(&mut self) -> Result<Value, String> {
        let line =
            self.lines.next_line().await.and_then(|line| line.ok_or(io::ErrorKind::UnexpectedEof.into()));
        let line = line.map_err(|_| "a child process ended; its messages are above".to_owned())?;
        serde_json::from_str(&line).map_err(|e| format!("a child process printed `{line}`: {e}"))
    }
}
