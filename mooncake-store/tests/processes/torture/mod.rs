//! A torture of real processes: clients with a shadow of their own keys, while owners, clients and
//! masters are stopped, killed and replaced at random.
//!
//! Each client is the only writer of its keys, and checks every hit: the bytes, their writer and
//! key, and that no acknowledged change has replaced or removed them. Changes that a dead master
//! acknowledged after the begin of its last snapshot may be lost, as `docs/ha.md` says. Every call
//! must end in time. At the end everything is removed, and nothing may be left of keys, space,
//! descriptors and processes.
//!
//! `cargo xtask torture` runs it for longer. A seed gives the same calls and faults, though not at
//! the same moments.
#![allow(clippy::disallowed_methods, reason = "real processes take real time")]
#![allow(clippy::print_stderr, reason = "processes write their logs to their standard error")]

mod calm;
mod client;
mod health;
mod operations;
mod owner;
mod shadow;
mod stage;
mod timeline;
mod value;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use mooncake_core::clock::Rng;
use mooncake_core::testkit::test_seed;
use tempfile::TempDir;

use self::client::{Count, Counts};
use self::health::{Health, processes_in};
use self::stage::{STEADY, Stage};
use crate::cluster::argument;
use crate::process::metric;

const CLIENTS: u64 = 5;
/// Interval between two looks at the processes.
const TICK: Duration = Duration::from_millis(50);
/// Duration in seconds, unless `TEST_SECONDS` sets it.
const SECONDS: u64 = 6;
/// Duration in seconds from which memory and descriptors are compared.
const LONG: u64 = 30;
/// Longest time until space that was granted to writers that gave up is free again.
const SETTLED: Duration = Duration::from_secs(100);

/// Returns the tenant of a client. The last two have tenants of their own.
fn tenant_of(number: u64) -> &'static str {
    match number {
        3 => "three",
        4 => "four",
        _ => "default",
    }
}

/// Returns whether a client offers memory, which is lost when the client is killed.
fn offers_memory(number: u64) -> bool {
    number % 3 == 2
}

/// Memory of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Plain,
    /// A file that the next process of this owner takes over.
    File,
    /// Beside a disk that the next process of this owner takes over.
    Disk,
}

impl Memory {
    fn letter(self) -> char {
        match self {
            Self::Plain => 'p',
            Self::File => 'f',
            Self::Disk => 'd',
        }
    }

    fn parse(text: &str) -> Vec<Self> {
        let memory = |letter| match letter {
            'f' => Self::File,
            'd' => Self::Disk,
            _ => Self::Plain,
        };
        text.chars().map(memory).collect()
    }
}

/// Owners, unless `TEST_OWNERS` names them.
const OWNERS: &[Memory] = &[Memory::Plain, Memory::Plain, Memory::File, Memory::Disk];

/// Settings of a run.
struct Settings {
    seed: u64,
    seconds: u64,
    /// Masters are killed, too.
    restarts: bool,
    /// Memory of each owner.
    owners: Vec<Memory>,
    /// Keys of each client.
    keys: u64,
    /// Calls of each client in a second.
    rate: u64,
    folder: PathBuf,
    /// Folder in memory for the segment in a file.
    memory: TempDir,
}

impl Settings {
    fn new(restarts: bool) -> Self {
        let seed = argument("TEST_SEED").unwrap_or_else(|| test_seed() & 0xffff_ffff);
        let kind = if restarts { "restarts" } else { "plain" };
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("torture-{kind}-{seed}"));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        Self {
            seed,
            seconds: argument("TEST_SECONDS").unwrap_or(SECONDS),
            restarts,
            owners: argument("TEST_OWNERS").map_or(OWNERS.to_vec(), |text: String| Memory::parse(&text)),
            // Every other seed fills the memory, so that objects are evicted.
            keys: argument("TEST_KEYS").unwrap_or(if seed.is_multiple_of(2) { 40 } else { 240 }),
            rate: argument("TEST_RATE").unwrap_or(60),
            folder,
            memory: tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap(),
        }
    }

    fn repeat(&self) -> String {
        let Self { seed, seconds, keys, rate, .. } = self;
        let owners: String = self.owners.iter().map(|owner| owner.letter()).collect();
        let restarts = if self.restarts { " --restarts" } else { "" };
        format!(
            "cargo xtask torture --seconds {seconds} --seed {seed} --keys {keys} --rate {rate} --owners {owners}{restarts}"
        )
    }
}

/// Entry of `cargo xtask torture`.
#[test]
#[ignore = "run by `cargo xtask torture`"]
fn torture_by_hand() {
    torture(Settings::new(argument("TEST_RESTARTS").unwrap_or(false)));
}

fn torture(settings: Settings) {
    let (folder, repeat) = (settings.folder.clone(), settings.repeat());
    println!("seed {}: {repeat}", settings.seed);
    let mut stage = Stage::set(settings);
    let outcome = run(&mut stage);
    let counts = stage.counts();
    drop(stage);
    let outcome = outcome.and_then(|()| match processes_in(&folder) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("processes are left: {left:?}")),
    });
    println!("{counts}");
    match outcome {
        Ok(()) => {
            println!("PASS {repeat}");
            std::fs::remove_dir_all(folder).unwrap();
        }
        Err(reason) => {
            println!("FAIL: {reason}\nlogs: {}\nrepeat: {repeat}", folder.display());
            panic!("{reason}\nlogs: {}\nrepeat: {repeat}", folder.display());
        }
    }
}

fn run(stage: &mut Stage) -> Result<(), String> {
    stage.calm()?;
    let seconds = stage.settings.seconds;
    let (begun, mut rng) = (Instant::now(), Rng::seeded(stage.settings.seed));
    let span = Duration::from_secs(seconds);
    let warm = (span / 4).max(Duration::from_secs(15));
    let (mut reported, mut warmed) = (Duration::ZERO, None);
    let mut next_fault = Duration::from_secs(1);
    while begun.elapsed() < span {
        stage.tick()?;
        let now = begun.elapsed();
        if now >= next_fault {
            inject(stage, &mut rng)?;
            next_fault = now + Duration::from_millis(500 + rng.below(2500));
        }
        if now >= reported + Duration::from_secs(10) {
            reported = now;
            report(stage, now);
        }
        if warmed.is_none() && now >= warm && stage.master.is_some() {
            warmed = Some(health_of(stage));
        }
        std::thread::sleep(TICK);
    }
    stage.calm()?;
    stage.command_clients("quiet", "quiet")?;
    let offering = (0..CLIENTS).filter(|number| offers_memory(*number)).count();
    assert_empty(stage, stage.owners.len() + offering)?;
    await_lasting(stage, 0)?;
    let (now, lives) = (health_of(stage), stage.life);
    println!("memory and descriptors: warm {warmed:?}, now {now:?}, master {lives}");
    if let Some(warmed) = warmed.filter(|_| seconds >= LONG) {
        now[1].assert_flat(&warmed[1], "owner")?;
        if lives == 1 {
            now[0].assert_flat(&warmed[0], "master")?;
        }
    }
    if stage.settings.restarts {
        check_calm_restart(stage)?;
        stage.command_clients("quiet", "quiet")?;
    }
    stage.leave(|stage| std::mem::take(&mut stage.clients))?;
    assert_empty(stage, stage.owners.len())?;
    report(stage, begun.elapsed());
    assert_sane(&stage.counts(), seconds)
}

/// Injects one random fault.
fn inject(stage: &mut Stage, rng: &mut Rng) -> Result<(), String> {
    let stop = |rng: &mut Rng| Duration::from_millis(300 + rng.below(6700));
    let owners = stage.owners.len() as u64;
    let (owner, client) = (rng.below(owners) as usize, rng.below(CLIENTS) as usize);
    let mortal = 1 + rng.below(owners - 1) as usize;
    let kinds = if stage.settings.restarts { 14 } else { 11 };
    let fault = match rng.below(kinds) {
        0..=2 => {
            let span = stop(rng);
            stage.owners[owner].stop(span);
            "owner stopped"
        }
        3 => {
            stage.kill_owner(mortal);
            "owner killed"
        }
        4 => {
            stage.close_owner(mortal);
            "owner closed"
        }
        5 => {
            if stage.owners[owner].is_ready {
                stage.owners[owner].send_command("mount")?;
            }
            "segment mounted or unmounted"
        }
        6 | 7 => {
            let span = stop(rng);
            stage.clients[client].stop(span);
            "client stopped"
        }
        8 => {
            stage.kill_client(client)?;
            "client killed"
        }
        9 | 10 => {
            stage.stop_master(Duration::from_millis(300 + rng.below(4000)));
            "master stopped"
        }
        _ => {
            // An owner that is away may return to the next master late.
            if rng.below(2) == 0 {
                let span = Duration::from_millis(2000 + rng.below(8000));
                stage.owners[owner].stop(span);
            }
            stage.kill_master(Duration::from_millis(rng.below(1500)));
            "master killed"
        }
    };
    *stage.faults.entry(fault).or_default() += 1;
    Ok(())
}

fn report(stage: &Stage, now: Duration) {
    let faults: Vec<_> = stage.faults.iter().map(|(fault, count)| format!("{fault} {count}")).collect();
    println!("{:4} s: {}; {}", now.as_secs(), stage.counts(), faults.join(", "));
}

/// Returns the health of the master and of the steady owner.
fn health_of(stage: &Stage) -> [Health; 2] {
    let master = stage.master.as_ref().unwrap().0.id();
    [master, stage.owners[STEADY].process.0.id()].map(Health::of)
}

/// Waits until the master holds nothing but so many clients that offer memory, after removing what
/// killed clients have left.
fn assert_empty(stage: &mut Stage, offering: usize) -> Result<(), String> {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let address = stage.address();
    let mut cleaners = Vec::new();
    for number in [0, 3, 4] {
        let builder = crate::cluster::builder(&address, 0).tenant(tenant_of(number));
        cleaners
            .push(runtime.block_on(builder.connect()).map_err(|error| format!("cannot connect: {error}"))?);
    }
    let pages = stage.pages;
    let names =
        ["key_count", "puts_in_progress", "allocated_bytes", "allocated_file_size_bytes", "active_clients"];
    let figures = || names.map(|name| metric(pages, &format!("master_{name}")));
    let expected = [0, 0, 0, 0, offering as u64].map(Some);
    let outcome = stage.run_until("nothing is left", SETTLED, |_| {
        for cleaner in &cleaners {
            let _ = runtime.block_on(cleaner.remove_all(true));
        }
        Ok(figures() == expected)
    });
    for cleaner in &cleaners {
        runtime.block_on(cleaner.close()).map_err(|error| format!("cannot close: {error}"))?;
    }
    outcome.map_err(|reason| format!("{reason}: {names:?} {:?}, expected {expected:?}", figures()))
}

/// Restarts the master without other faults. Objects that would outlive it must not be lost.
fn check_calm_restart(stage: &mut Stage) -> Result<(), String> {
    let sum =
        |numbers: Vec<String>| numbers.iter().filter_map(|one| one.parse::<usize>().ok()).sum::<usize>();
    let all = sum(stage.command_clients("store", "stored")?);
    await_lasting(stage, all)?;
    stage.kill_master(Duration::from_millis(200));
    let missing = sum(stage.command_clients("verify", "missing")?);
    println!("restart without other faults: {missing} of {all} objects are missing");
    if missing == 0 { Ok(()) } else { Err(format!("a restart lost {missing} of {all} objects")) }
}

/// Waits until so many replicas would outlive the master.
fn await_lasting(stage: &mut Stage, all: usize) -> Result<(), String> {
    let mut lasting = vec![usize::MAX; stage.owners.len() + stage.clients.len()];
    let mut pending = vec![false; lasting.len()];
    let would_last = stage.run_until("all objects would outlive the master", SETTLED, |stage| {
        let nodes = stage.owners.iter_mut().chain(&mut stage.clients);
        for ((node, lasting), is_pending) in nodes.zip(&mut lasting).zip(&mut pending) {
            if let Some(response) = node.take_response("lasting") {
                *lasting = response.parse().map_err(|_| format!("not a number: {response}"))?;
                *is_pending = false;
            }
            if !*is_pending {
                node.send_command("lasting")?;
                *is_pending = true;
            }
        }
        Ok(!lasting.contains(&usize::MAX) && lasting.iter().sum::<usize>() == all)
    });
    would_last.map_err(|reason| format!("{reason}: {lasting:?} of {all}"))
}

/// Checks that the run has done something, and lost little.
fn assert_sane(counts: &Counts, seconds: u64) -> Result<(), String> {
    let [hits, present, lost] = [Count::Hits, Count::Present, Count::Lost].map(|count| counts.of(count));
    if hits == 0 || counts.of(Count::Stored) < seconds {
        return Err(format!("too few calls succeed: {counts}"));
    }
    println!(
        "{:.1} % of the values of living masters were there",
        100.0 * present as f64 / (present + lost) as f64
    );
    Ok(())
}
