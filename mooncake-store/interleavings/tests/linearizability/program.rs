//! Random programs: threads of calls for masters that follow each other.

use mooncake_core::clock::Rng;

use crate::model::{Id, Life, OWNERS, Owner};

/// Write of one or more keys, which one call starts and one call ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Write {
    pub(crate) id: Id,
    pub(crate) client: Owner,
    /// Set of keys.
    pub(crate) keys: u8,
    pub(crate) replace: bool,
    pub(crate) life: Life,
    /// True if the objects are never evicted.
    pub(crate) is_pinned: bool,
}

/// Copy of an object from one segment to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyOf {
    pub(crate) number: u8,
    pub(crate) client: Owner,
    pub(crate) key: u8,
    pub(crate) from: Owner,
    pub(crate) to: Owner,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Start(Write),
    End(Write),
    Revoke(Write),
    Remove {
        key: u8,
        force: bool,
    },
    RemoveAll {
        by_pattern: bool,
        force: bool,
    },
    Locate {
        key: u8,
    },
    Exists {
        key: u8,
    },
    CopyStart(CopyOf),
    CopyEnd(CopyOf),
    CopyRevoke(CopyOf),
    Snapshot,
    /// A client receives the changes in its segment.
    Hear {
        owner: Owner,
    },
    /// Time passes. One client may have expired by then. A long time ends the announcements of
    /// values of earlier masters.
    Pass {
        expires: Option<Owner>,
        is_long: bool,
    },
    /// A client that expired mounts its memory again and announces what the master lists.
    Rejoin {
        owner: Owner,
    },
    /// A client mounts memory that it held under an earlier master.
    Return {
        owner: Owner,
    },
    /// A client announces what it holds of a key.
    Announce {
        owner: Owner,
        key: u8,
    },
}

/// Calls to one master: first those of no thread, then threads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Epoch {
    /// True if the master reads the last snapshot.
    pub(crate) recalls: bool,
    pub(crate) before: Vec<Call>,
    pub(crate) threads: Vec<Vec<Call>>,
    pub(crate) after: Vec<Call>,
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) keys: u8,
    pub(crate) policy_is_default: bool,
    pub(crate) epochs: Vec<Epoch>,
}

/// Calls that a program makes more often than others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Focus {
    Writes,
    Snapshots,
    Restarts,
    Copies,
    Members,
    Lives,
}

const FOCI: [Focus; 6] =
    [Focus::Writes, Focus::Snapshots, Focus::Restarts, Focus::Copies, Focus::Members, Focus::Lives];

fn focus_of(bug: &str) -> Option<Focus> {
    match bug {
        "stamp-before-lock" => Some(Focus::Snapshots),
        "announced-value-confirms-ends" => Some(Focus::Restarts),
        "forget-removals-at-restart" | "epochs-unordered" | "horizon-ends" => Some(Focus::Restarts),
        "copy-outlives-client" | "copy-end-any" => Some(Focus::Copies),
        _ => None,
    }
}

struct Generator {
    rng: Rng,
    focus: Focus,
    /// True if segments come and go during calls. A start that finds none evicts what it finds
    /// later, so the objects are pinned.
    changes_members: bool,
    keys: u8,
    next_id: Id,
    /// Writes that have been started and may be ended.
    started: Vec<Write>,
    /// Last client that was to write each key.
    last_writers: [Owner; 8],
    /// Copies that have been started.
    copies: Vec<CopyOf>,
}

impl Program {
    /// Draws a program. Planted bugs have a focus each, within which they are frequent.
    pub(crate) fn random(seed: u64, bug: Option<&str>) -> Self {
        let mut rng = Rng::seeded(seed);
        let focus = FOCI[rng.below(FOCI.len() as u64) as usize];
        let focus = bug.and_then(focus_of).unwrap_or(focus);
        let keys = if focus == Focus::Snapshots { 2 + rng.below(2) } else { 1 + rng.below(3) } as u8;
        let masters = match focus {
            Focus::Writes | Focus::Copies | Focus::Members => 1 + rng.below(2),
            Focus::Snapshots | Focus::Lives => 2,
            Focus::Restarts => 2 + rng.below(4).min(1),
        };
        let policy_is_default = rng.below(4) > 0;
        let changes_members = matches!(focus, Focus::Members | Focus::Restarts) || rng.below(3) > 0;
        let (started, copies) = (Vec::new(), Vec::new());
        let mut generator = Generator {
            rng,
            focus,
            changes_members,
            keys,
            next_id: 0,
            started,
            last_writers: [0; 8],
            copies,
        };
        let epochs = (0..masters).map(|number| generator.epoch(number, number + 1 == masters)).collect();
        Self { keys, policy_is_default, epochs }
    }
}

fn owners() -> impl Iterator<Item = Owner> {
    0..OWNERS as Owner
}

impl Generator {
    fn chance(&mut self, percent: u64) -> bool {
        self.rng.below(100) < percent
    }

    fn key(&mut self) -> u8 {
        self.rng.below(u64::from(self.keys)) as u8
    }

    fn owner(&mut self) -> Owner {
        self.rng.below(OWNERS as u64) as Owner
    }

    /// Draws the calls to the master of this number; `is_last` is true for the last one.
    fn epoch(&mut self, number: u64, is_last: bool) -> Epoch {
        let (of_snapshots, of_restarts) = (self.focus == Focus::Snapshots, self.focus == Focus::Restarts);
        let recalls = number > 0 && (of_snapshots || self.chance(75));
        let mut epoch = Epoch { recalls, ..Epoch::default() };
        if number == 0 {
            for key in 0..self.keys {
                if self.chance(if of_snapshots { 30 } else { 70 }) {
                    let write = self.write(Some(1 << key));
                    self.started.pop();
                    epoch.before.extend([Call::Start(write), Call::End(write)]);
                }
            }
            if self.chance(50) {
                epoch.before.extend(owners().map(|owner| Call::Hear { owner }));
            }
        } else {
            let percent = if of_restarts { 55 } else { 80 };
            let returns = owners().filter(|_| !self.changes_members || self.chance(percent));
            let returns: Vec<_> = returns.collect();
            epoch.before.extend(returns.into_iter().map(|owner| Call::Return { owner }));
            if of_restarts && self.next_id < 24 && self.chance(50) {
                let write = self.write(None);
                epoch.before.extend([Call::Start(write), Call::End(write)]);
            }
        }
        self.add_threads(number, &mut epoch);
        if of_snapshots || self.chance(if of_restarts { 90 } else { 60 }) {
            epoch.after.extend(owners().map(|owner| Call::Hear { owner }));
        }
        if number > 0 {
            epoch.after.extend((0..self.keys).map(|key| Call::Locate { key }));
            if of_restarts && is_last && self.chance(30) {
                epoch.after.push(Call::Pass { expires: None, is_long: true });
            }
            // Owners that have not returned come late, or to a later master.
            let percent = match (self.focus, is_last) {
                (Focus::Snapshots, _) | (Focus::Restarts, true) => 100,
                (Focus::Restarts, false) => 35,
                _ => 70,
            };
            let late: Vec<_> = owners().filter(|_| self.chance(percent)).collect();
            for owner in late {
                epoch.after.push(Call::Return { owner });
                epoch.after.extend((0..self.keys).map(|key| Call::Announce { owner, key }));
            }
            if self.chance(50) {
                // The end of a write that may have begun under an earlier master.
                let write = self.old_write();
                epoch.after.push(Call::End(write));
            }
        }
        epoch.after.extend((0..self.keys).map(|key| Call::Locate { key }));
        epoch
    }

    fn add_threads(&mut self, number: u64, epoch: &mut Epoch) {
        if self.focus == Focus::Snapshots && number == 0 && self.changes_members && self.chance(40) {
            // A client that expires and returns beside a snapshot.
            let write = self.write(Some((1 << self.keys) - 1));
            epoch.before.extend([Call::Start(write), Call::End(write)]);
            let owner = write.client;
            epoch.threads.push(vec![Call::Snapshot]);
            let leaves = Call::Pass { expires: Some(owner), is_long: false };
            epoch.threads.push(vec![leaves, Call::Rejoin { owner }]);
            return;
        }
        if self.focus == Focus::Snapshots && number == 0 {
            // The end of a batch beside a snapshot, and a few other calls.
            let write = self.write(Some((1 << self.keys) - 1));
            epoch.before.push(Call::Start(write));
            epoch.threads.push(vec![Call::End(write)]);
            epoch.threads.push(vec![Call::Snapshot]);
            if self.chance(50) {
                let calls = 1 + self.rng.below(2);
                epoch.threads.push((0..calls).map(|_| self.call(number)).collect());
            }
            return;
        }
        if self.next_id < 24 && self.chance(30) {
            // A batch whose end may race with other calls.
            let write = self.write(None);
            epoch.before.push(Call::Start(write));
        }
        if self.focus == Focus::Copies && self.changes_members && self.chance(40) {
            // A client that expires while it copies from a second one to a third one.
            let key = self.key();
            let from = self.last_writers[key as usize];
            let (to, client) = ((from + 1) % OWNERS as Owner, (from + 2) % OWNERS as Owner);
            if self.copies.len() < 32 {
                let copy = CopyOf { number: self.copies.len() as u8, client, key, from, to };
                self.copies.push(copy);
                epoch.before.push(Call::CopyStart(copy));
                epoch.threads.push(vec![Call::Pass { expires: Some(client), is_long: false }]);
                epoch.after.push(Call::Remove { key, force: true });
            }
        }
        for _ in 0..2 + self.rng.below(2) {
            let calls = 1 + self.rng.below(5);
            epoch.threads.push((0..calls).map(|_| self.call(number)).collect());
        }
    }

    fn write(&mut self, keys: Option<u8>) -> Write {
        let all = (1 << self.keys) - 1;
        let keys = keys.unwrap_or_else(|| if self.chance(70) { all } else { 1 << self.key() });
        let life = match self.focus {
            Focus::Lives => [Life::Long, Life::Short, Life::OneRead][self.rng.below(3) as usize],
            _ => Life::Long,
        };
        let (client, replace) = (self.owner(), self.chance(70));
        let write = Write { id: self.next_id, client, keys, replace, life, is_pinned: self.changes_members };
        self.next_id += 1;
        (0..8).filter(|key| keys & 1 << key != 0).for_each(|key| self.last_writers[key] = client);
        self.started.push(write);
        write
    }

    fn old_write(&mut self) -> Write {
        if self.started.is_empty() {
            // A write that has never begun.
            return self.write(None);
        }
        self.started[self.rng.below(self.started.len() as u64) as usize]
    }

    /// Returns a copy that has been started, with this chance in percent, or a new one.
    fn copy(&mut self, percent: u64) -> CopyOf {
        let copies = self.copies.len() as u64;
        if copies > 0 && (self.chance(percent) || copies == 32) {
            return self.copies[self.rng.below(copies) as usize];
        }
        let (client, key) = (self.owner(), self.key());
        let holds = self.last_writers[key as usize];
        let from = if self.chance(75) { holds } else { self.owner() };
        let to = (from + 1 + self.rng.below(OWNERS as u64 - 1) as Owner) % OWNERS as Owner;
        let copy = CopyOf { number: copies as u8, client, key, from, to };
        self.copies.push(copy);
        copy
    }

    fn call(&mut self, number: u64) -> Call {
        let is = |focus: Focus, focus_now: Focus, more: u64, otherwise: u64| {
            if focus == focus_now { more } else { otherwise }
        };
        let f = self.focus;
        let announces = if number == 0 { 0 } else { is(Focus::Restarts, f, 30, 15) };
        let weights = [
            8,
            is(Focus::Snapshots, f, 25, 14),
            2,
            is(Focus::Restarts, f, 14, 8),
            is(Focus::Restarts, f, 6, 2),
            is(Focus::Lives, f, 25, 10),
            5,
            is(Focus::Copies, f, 20, 0),
            is(Focus::Copies, f, 20, 0),
            is(Focus::Copies, f, 4, 0),
            is(Focus::Snapshots, f, 20, 7),
            5,
            is(Focus::Members, f, 10, is(Focus::Copies, f, 10, is(Focus::Lives, f, 6, 3))),
            is(Focus::Members, f, 14, 0),
            announces / 5,
            announces,
        ];
        let mut draw = self.rng.below(weights.iter().sum());
        let kind = weights.iter().position(|weight| {
            let is_it = draw < *weight;
            draw = draw.saturating_sub(*weight);
            is_it
        });
        match kind.unwrap_or(0) {
            0 if self.next_id < 32 => Call::Start(self.write(None)),
            0 => Call::Start(self.old_write()),
            1 => Call::End(self.old_write()),
            2 => Call::Revoke(self.old_write()),
            3 => Call::Remove { key: self.key(), force: self.chance(80) },
            4 => Call::RemoveAll { by_pattern: self.chance(50), force: self.chance(80) },
            5 => Call::Locate { key: self.key() },
            6 => Call::Exists { key: self.key() },
            7 => Call::CopyStart(self.copy(30)),
            8 => Call::CopyEnd(self.copy(90)),
            9 => Call::CopyRevoke(self.copy(90)),
            10 => Call::Snapshot,
            11 => Call::Hear { owner: self.owner() },
            12 => {
                let expires =
                    self.changes_members && self.chance(if self.focus == Focus::Lives { 30 } else { 70 });
                let is_long = number > 0 && !expires && self.chance(40);
                Call::Pass { expires: expires.then(|| self.owner()), is_long }
            }
            13 => Call::Rejoin { owner: self.owner() },
            14 => Call::Return { owner: self.owner() },
            _ => Call::Announce { owner: self.owner(), key: self.key() },
        }
    }
}
