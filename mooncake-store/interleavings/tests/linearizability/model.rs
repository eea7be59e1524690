//! Sequential model of one key: what each call may return, if calls followed each other.

/// Number of clients, each with one segment.
pub(crate) const OWNERS: usize = 3;

/// Number of a write, counted from 0.
pub(crate) type Id = u8;
/// Number of a client and of its segment, counted from 0.
pub(crate) type Owner = u8;

/// Way in which a value ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Life {
    Long,
    /// Ends when time passes.
    Short,
    /// Ends with its first read.
    OneRead,
}

/// Call about one key, with its result.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Start {
        id: Id,
        replace: bool,
        life: Life,
        placed: Option<Owner>,
    },
    End {
        id: Id,
        ok: bool,
    },
    Revoke {
        id: Id,
        ok: bool,
    },
    Remove {
        force: bool,
        outcome: Removal,
    },
    RemoveAll {
        force: bool,
    },
    Locate {
        found: Option<(Id, u8)>,
    },
    Exists {
        found: bool,
    },
    CopyStart {
        number: u8,
        client: Owner,
        from: Owner,
        to: Owner,
        ok: bool,
    },
    CopyEnd {
        number: u8,
        ok: bool,
    },
    CopyRevoke {
        number: u8,
        ok: bool,
    },
    Snapshot,
    /// Time passes: leases and short lives end.
    Time,
    /// Time passes until clients no longer announce replicas of earlier masters.
    Close,
    /// A client expires: its segment takes no more objects.
    Leave {
        owner: Owner,
    },
    /// Writes to the segment of a client that expires are lost.
    LoseWrites {
        owner: Owner,
    },
    /// Replicas in the segment of a client that expires cannot be read any more.
    LoseValues {
        owner: Owner,
    },
    /// Copies by a client that expires are lost.
    LoseCopies {
        owner: Owner,
    },
    /// A client mounts its segment.
    Mount {
        owner: Owner,
    },
    /// A client that expired announces a listed replica.
    AnnounceExpired {
        owner: Owner,
        id: Id,
        ok: bool,
    },
    /// A client announces a replica to the next master.
    Announce {
        owner: Owner,
        id: Id,
        ok: bool,
    },
    /// The next master begins, with the last snapshot or without.
    Restart {
        recalls: bool,
    },
}

/// Outcome of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    Removed,
    Absent,
    Busy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Value {
    id: Id,
    /// Set of the segments that hold it.
    owners: u8,
    life: Life,
    was_read: bool,
    leased: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Write {
    id: Id,
    owner: Owner,
    life: Life,
    /// True if the client of the segment has expired since.
    is_lost: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Copying {
    number: u8,
    client: Owner,
    from: Owner,
    /// Segment of the new replica, unless the object had one there.
    to: Option<Owner>,
}

/// State of one key. Sets of writes and of segments are bit sets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Model {
    value: Option<Value>,
    write: Option<Write>,
    copying: Option<Copying>,
    /// Copies that were made, and those that were revoked.
    made: u32,
    revoked: u32,
    /// Segments that are mounted.
    alive: u8,
    /// Replicas of expired clients, by segment.
    listed: [u32; OWNERS],
    /// Values in the order in which they became readable.
    order: Vec<Id>,
    /// Values that this master knows to be removed or replaced.
    gone: u32,
    /// Values that this master has stored or read of in a snapshot.
    seen: u32,
    /// Values that have ended by themselves after a time.
    ended: u32,
    snapshot: Option<View>,
    /// True once clients no longer announce replicas of earlier masters.
    is_closed: bool,
    /// Value that this master must accept if its owner returns.
    required: Option<Id>,
    /// Lives of the values, two bits each.
    lives: u64,
}

/// Content of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct View {
    gone: u32,
    seen: u32,
    /// Values of earlier masters that their owners had not announced, and that the snapshot does
    /// not name. The next master cannot know whether they were removed before.
    unseen: u32,
}

fn bit(number: u8) -> u8 {
    1 << number
}

fn set(id: Id) -> u32 {
    1 << id
}

impl Model {
    /// Returns the states that a call with this result may lead to; none if the result is wrong.
    pub(crate) fn apply(&self, step: &Step) -> Vec<Self> {
        let mut next = self.clone();
        let is_possible = match *step {
            Step::Start { id, replace, life, placed } => next.start(id, replace, life, placed),
            Step::End { id, ok } => next.end(id, ok),
            Step::Revoke { id, ok } => next.revoke(id, ok),
            Step::Remove { force, outcome } => next.remove(force, outcome),
            Step::RemoveAll { force } => next.remove_all(force),
            Step::Locate { found } => next.locate(found),
            Step::Exists { found } => next.exists(found),
            Step::CopyStart { number, client, from, to, ok } => {
                next.copy_start(Copying { number, client, from, to: Some(to) }, ok)
            }
            Step::CopyEnd { number, ok } => next.copy_end(number, ok),
            Step::CopyRevoke { number, ok } => next.copy_revoke(number, ok),
            Step::Snapshot => {
                let (gone, seen) = (self.gone, self.seen);
                next.snapshot = Some(View { gone, seen, unseen: self.all() & !seen });
                true
            }
            Step::Time => next.pass_time(),
            Step::Close => {
                next.required = None;
                next.is_closed = true;
                true
            }
            Step::Leave { owner } => {
                next.alive &= !bit(owner);
                true
            }
            Step::LoseWrites { owner } => next.lose_writes(owner),
            Step::LoseValues { owner } => next.lose_values(owner),
            Step::LoseCopies { owner } => {
                next.copying = next.copying.filter(|copying| copying.client != owner);
                true
            }
            Step::Mount { owner } => {
                next.alive |= bit(owner);
                true
            }
            Step::AnnounceExpired { owner, id, ok } => next.announce_expired(owner, id, ok),
            Step::Announce { owner, id, ok } => next.announce(owner, id, ok),
            Step::Restart { recalls } => {
                next.restart(recalls);
                true
            }
        };
        if !is_possible {
            return Vec::new();
        }
        let mut states = vec![next];
        // A copy by a client that this master has not met ends after a while.
        let is_stranger = |copying: &Copying| self.alive & bit(copying.client) == 0;
        if matches!(step, Step::Time) && self.copying.as_ref().is_some_and(is_stranger) {
            states.push(Self { copying: None, ..states[0].clone() });
        }
        // `RemoveAll` skips an object with a write whose segment has expired a moment ago.
        if matches!(step, Step::RemoveAll { .. }) && self.write.is_some() && self.live_write().is_none() {
            states.push(self.clone());
        }
        states
    }

    /// Returns the value that can be read.
    fn live(&self) -> Option<Value> {
        self.value.filter(|value| !value.was_read)
    }

    fn live_write(&self) -> Option<Write> {
        self.write.filter(|write| !write.is_lost)
    }

    fn all(&self) -> u32 {
        self.order.iter().fold(0, |all, id| all | set(*id))
    }

    fn age(&self, id: Id) -> usize {
        self.order.iter().position(|other| *other == id).unwrap_or(usize::MAX)
    }

    fn life_of(&self, id: Id) -> Life {
        match self.lives >> (2 * id) & 3 {
            0 => Life::Long,
            1 => Life::Short,
            _ => Life::OneRead,
        }
    }

    /// Forgets every value of the key, for good.
    fn forget_all(&mut self) {
        self.gone |= self.all();
        self.listed = [0; OWNERS];
        self.required = None;
        self.value = None;
        self.copying = None;
    }

    fn start(&mut self, id: Id, replace: bool, life: Life, placed: Option<Owner>) -> bool {
        self.write = self.live_write();
        if let Some(write) = self.write {
            if write.id == id {
                return placed == Some(write.owner);
            }
            if !replace {
                return placed.is_none();
            }
        }
        if self.live().is_some() && (!replace || self.copying.is_some()) {
            return placed.is_none();
        }
        let Some(owner) = placed else { return self.alive == 0 };
        self.write = Some(Write { id, owner, life, is_lost: false });
        self.lives = self.lives & !(3 << (2 * id)) | (life as u64) << (2 * id);
        self.alive & bit(owner) != 0
    }

    fn end(&mut self, id: Id, ok: bool) -> bool {
        if let Some(write) = self.write.filter(|write| write.id == id) {
            self.write = None;
            if write.is_lost {
                return !ok;
            }
            self.forget_all();
            self.order.push(id);
            self.seen |= set(id);
            let owners = bit(write.owner);
            self.value = Some(Value { id, owners, life: write.life, was_read: false, leased: false });
            return ok;
        }
        // A repeated end. Where the value has gone meanwhile, either answer is right.
        !ok || self.order.contains(&id)
    }

    fn revoke(&mut self, id: Id, ok: bool) -> bool {
        let was_live = self.live_write().is_some_and(|write| write.id == id);
        let was_there = self.write.is_some_and(|write| write.id == id);
        if was_there {
            self.write = None;
        }
        if was_live { ok } else { !ok || was_there }
    }

    fn remove(&mut self, force: bool, outcome: Removal) -> bool {
        self.write = self.live_write();
        let blocked = self.write.is_some() || self.live().is_some() && self.copying.is_some();
        match (self.live(), blocked) {
            (_, true) => outcome == Removal::Busy,
            // A lease that was granted long ago by the clock of its call protects nothing.
            (Some(value), false) if value.leased && !force && outcome == Removal::Busy => true,
            (found, false) => {
                self.forget_all();
                outcome == if found.is_some() { Removal::Removed } else { Removal::Absent }
            }
        }
    }

    fn remove_all(&mut self, force: bool) -> bool {
        self.listed = [0; OWNERS];
        self.required = None;
        self.write = self.live_write();
        let is_kept = self.write.is_some()
            || self.live().is_some_and(|value| self.copying.is_some() || value.leased && !force);
        if !is_kept {
            self.forget_all();
        }
        true
    }

    fn locate(&mut self, found: Option<(Id, u8)>) -> bool {
        let Some(value) = self.live() else { return found.is_none() };
        let was_read = value.life == Life::OneRead;
        if was_read {
            self.gone |= set(value.id);
            self.required = None;
        }
        self.value = Some(Value { leased: true, was_read, ..value });
        found == Some((value.id, value.owners))
    }

    fn exists(&mut self, found: bool) -> bool {
        let value = self.live();
        if let Some(value) = value {
            self.value = Some(Value { leased: true, ..value });
        }
        found == value.is_some()
    }

    fn copy_start(&mut self, copy: Copying, ok: bool) -> bool {
        self.write = self.live_write();
        if (self.made | self.revoked) & set(copy.number) != 0 {
            return !ok;
        }
        let Some(value) = self.live() else { return !ok };
        if self.copying.is_some_and(|copying| copying.number == copy.number) {
            return ok;
        }
        let to = copy.to.unwrap_or(copy.from);
        let is_possible = self.copying.is_none()
            && self.write.is_none()
            && value.owners & bit(copy.from) != 0
            && self.alive & bit(to) != 0;
        if ok {
            let to = (value.owners & bit(to) == 0).then_some(to);
            self.copying = Some(Copying { to, ..copy });
        }
        ok == is_possible
    }

    fn copy_end(&mut self, number: u8, ok: bool) -> bool {
        if self.made & set(number) != 0 {
            return ok;
        }
        let Some(copying) = self.copying.filter(|copying| copying.number == number) else { return !ok };
        self.copying = None;
        self.made |= set(number);
        if let (Some(value), Some(to)) = (&mut self.value, copying.to) {
            value.owners |= bit(to);
        }
        ok
    }

    fn copy_revoke(&mut self, number: u8, ok: bool) -> bool {
        if self.revoked & set(number) != 0 {
            return ok;
        }
        if self.made & set(number) == 0 {
            self.revoked |= set(number);
        }
        let is_in_progress = self.copying.is_some_and(|copying| copying.number == number);
        if is_in_progress {
            self.copying = None;
        }
        ok == is_in_progress
    }

    fn pass_time(&mut self) -> bool {
        if let Some(value) = &mut self.value {
            value.leased = false;
            if value.life == Life::Short {
                self.ended |= set(value.id);
                self.gone |= set(value.id);
            }
            if value.life == Life::Short || value.was_read {
                self.value = None;
                self.copying = None;
            }
        }
        // Owners hold values that no master has made readable again.
        for id in self.order.clone() {
            if self.life_of(id) == Life::Short {
                self.ended |= set(id);
            }
        }
        true
    }

    fn lose_values(&mut self, owner: Owner) -> bool {
        if let Some(value) = &mut self.value
            && value.owners & bit(owner) != 0
        {
            value.owners &= !bit(owner);
            if value.life == Life::Long {
                self.listed[owner as usize] |= set(value.id);
            }
            if value.owners == 0 {
                self.value = None;
                self.copying = None;
            }
            // A copy ends with its source.
            if self.copying.is_some_and(|copying| copying.from == owner) {
                self.copying = None;
            }
        }
        true
    }

    fn lose_writes(&mut self, owner: Owner) -> bool {
        if let Some(write) = self.write.as_mut().filter(|write| write.owner == owner) {
            write.is_lost = true;
        }
        if self.copying.is_some_and(|copying| copying.to == Some(owner)) {
            self.copying = None;
        }
        true
    }

    fn announce_expired(&mut self, owner: Owner, id: Id, ok: bool) -> bool {
        if self.alive & bit(owner) == 0 {
            return !ok;
        }
        let was_listed = self.listed[owner as usize] & set(id) != 0;
        self.listed[owner as usize] &= !set(id);
        if !was_listed || !ok && self.is_closed {
            return !ok;
        }
        if self.value.is_none() && self.live_write().is_some() {
            return !ok;
        }
        self.admit(owner, id);
        ok
    }

    fn announce(&mut self, owner: Owner, id: Id, ok: bool) -> bool {
        if self.alive & bit(owner) == 0 {
            return !ok;
        }
        let must = self.required == Some(id);
        if (self.gone | self.ended) & set(id) != 0 {
            return !ok;
        }
        let is_possible = match self.value {
            Some(value) if value.id == id => true,
            Some(value) => self.age(value.id) < self.age(id) && self.copying.is_none(),
            None => self.live_write().is_none(),
        };
        if ok && is_possible {
            self.admit(owner, id);
        }
        if ok { is_possible } else { !is_possible || !must }
    }

    fn admit(&mut self, owner: Owner, id: Id) {
        self.seen |= set(id);
        // No earlier value returns, whatever happens to this one.
        let age = self.age(id);
        self.gone |= self.order[..age].iter().fold(0, |all, earlier| all | set(*earlier));
        match &mut self.value {
            Some(value) if value.id == id => value.owners |= bit(owner),
            _ => {
                let (owners, life) = (bit(owner), self.life_of(id));
                self.value = Some(Value { id, owners, life, was_read: false, leased: false });
            }
        }
    }

    fn restart(&mut self, recalls: bool) {
        let view = self.snapshot.filter(|_| recalls).unwrap_or_default();
        let value = self.live().map(|value| value.id);
        *self = Self {
            order: std::mem::take(&mut self.order),
            gone: view.gone,
            seen: view.seen,
            ended: self.ended,
            snapshot: self.snapshot,
            required: value.filter(|id| view.unseen & set(*id) == 0),
            lives: self.lives,
            ..Self::default()
        };
    }
}
