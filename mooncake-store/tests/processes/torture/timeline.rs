//! Lives of the masters and their snapshots, written by the process that starts and kills them and
//! read by the clients.
//!
//! No clock is compared between processes. The parent writes a line before each event, so a client
//! that reads no such line after a call knows that the call ended before the event.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

/// Moment in the life of a master: the last mark that was written before it or during it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MasterTime {
    pub(super) life: u64,
    pub(super) mark: u64,
}

/// Writer of the lines.
pub(super) struct TimelineWriter {
    file: File,
    mark: u64,
}

impl TimelineWriter {
    pub(super) fn create(path: &Path) -> Self {
        let file = OpenOptions::new().append(true).create_new(true).open(path).unwrap();
        Self { file, mark: 0 }
    }

    fn write(&mut self, line: &str) {
        self.file.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Notes that a master begins to live, before it is started.
    pub(super) fn up(&mut self, life: u64) {
        self.write(&format!("up {life}"));
    }

    /// Notes that a master ends, before it is killed.
    pub(super) fn down(&mut self, life: u64) {
        self.write(&format!("down {life}"));
    }

    /// Writes the next mark.
    pub(super) fn mark(&mut self) -> u64 {
        self.mark += 1;
        self.write(&format!("mark {}", self.mark));
        self.mark
    }

    /// Notes that a snapshot of this life is complete, which began after this mark was written.
    pub(super) fn snapshot(&mut self, life: u64, mark: u64) {
        self.write(&format!("snap {life} {mark}"));
    }

    pub(super) fn owner(&mut self, slot: usize, name: &str) {
        self.write(&format!("owner {slot} {name}"));
    }

    pub(super) fn client(&mut self, number: u64, generation: u64) {
        self.write(&format!("client {number} {generation}"));
    }
}

/// The lines that a client has read.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    file: Option<File>,
    /// Begin of a line whose end was not written yet.
    rest: String,
    life: u64,
    is_up: bool,
    mark: u64,
    /// Latest mark that a snapshot of each life contains.
    snapshots: BTreeMap<u64, u64>,
    pub(super) owners: BTreeMap<usize, String>,
    /// Generation of each client.
    pub(super) clients: BTreeMap<u64, u64>,
}

impl Timeline {
    pub(super) fn open(path: &Path) -> Self {
        Self { file: Some(File::open(path).unwrap()), ..Self::default() }
    }

    /// Reads the lines that were written since the last call. Returns the time of the living
    /// master, if there is one.
    pub(super) fn update(&mut self) -> Option<MasterTime> {
        let mut text = std::mem::take(&mut self.rest);
        self.file.as_mut().unwrap().read_to_string(&mut text).unwrap();
        let complete = text.rfind('\n').map_or(0, |end| end + 1);
        self.rest = text.split_off(complete);
        for line in text.lines() {
            self.apply(line).unwrap_or_else(|| panic!("a line that makes no sense: {line}"));
        }
        self.is_up.then_some(MasterTime { life: self.life, mark: self.mark })
    }

    pub(super) fn apply(&mut self, line: &str) -> Option<()> {
        let mut words = line.split(' ');
        let (event, first) = (words.next()?, words.next()?);
        let number: u64 = first.parse().ok()?;
        match event {
            "up" => (self.life, self.is_up) = (number, true),
            "down" => self.is_up = false,
            "mark" => self.mark = number,
            "snap" => {
                let mark: u64 = words.next()?.parse().ok()?;
                let latest = self.snapshots.entry(number).or_default();
                *latest = mark.max(*latest);
            }
            "owner" => drop(self.owners.insert(number as usize, words.next()?.to_owned())),
            "client" => drop(self.clients.insert(number, words.next()?.parse().ok()?)),
            _ => return None,
        }
        Some(())
    }

    /// Returns whether the master of that time is still alive.
    pub(super) fn lives(&self, at: MasterTime) -> bool {
        self.is_up && self.life == at.life
    }

    /// Returns whether a complete snapshot began after that time in the same life.
    pub(super) fn is_in_snapshot(&self, at: MasterTime) -> bool {
        self.snapshots.get(&at.life).is_some_and(|mark| at.mark < *mark)
    }
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { life, is_up, mark, snapshots, .. } = self;
        let first = life.saturating_sub(4);
        let snapshots: Vec<_> = snapshots.iter().filter(|(life, _)| **life >= first).collect();
        write!(f, "life {life}, up {is_up}, mark {mark}, snapshots {snapshots:?}")
    }
}
