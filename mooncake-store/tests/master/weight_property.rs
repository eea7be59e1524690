//! Random calls about managed weights, compared with a simple model of two revisions.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::rig::{MIB, Rig};
use crate::weights::{METADATA, WEIGHT, Weights, group, id, manifest, manifest_key};
use mooncake_core::ErrorCode::{ObjectAlreadyExists, ObjectNotFound, UnavailableInCurrentStatus};
use mooncake_core::clock::Rng;
use mooncake_core::replica::DataType;
use mooncake_core::testkit::test_seed;
use mooncake_store::api::WriteMode;
use mooncake_store::protocol::wire::WeightAvailability::{self, Deleted, Deleting, Importing, Ready};
use mooncake_store::protocol::wire::WeightError::{self, *};
use mooncake_store::protocol::wire::WeightId;

const RUNS: u64 = 24;
const STEPS: u64 = 300;
/// Time without a put after which an import is aborted, in seconds.
const IDLE: u64 = 300;

/// Model of one revision.
#[derive(Debug, Default)]
struct Model {
    /// Availability and number of the last change; `None` before the import.
    state: Option<(WeightAvailability, u64)>,
    /// Time of the last step of the import in seconds.
    active: u64,
    /// Objects of the group, by number.
    objects: BTreeSet<usize>,
    /// Objects whose last write named another type.
    mistyped: BTreeSet<usize>,
    /// Number and end of the lease of each holder.
    leases: BTreeMap<u64, (u64, u64)>,
}

impl Model {
    fn is(&self, availability: WeightAvailability) -> bool {
        self.state.is_some_and(|(state, _)| state == availability)
    }

    /// Checks a call about a known revision by the number of the last change.
    fn expect(&self, generation: u64) -> Result<(WeightAvailability, u64), WeightError> {
        match self.state {
            _ if generation == 0 => Err(InvalidArgument),
            None => Err(NotFound),
            Some((_, now)) if now != generation => Err(StaleGeneration),
            Some(state) => Ok(state),
        }
    }

    /// Checks a call that may repeat the one that began the removal. `also` is a state beside
    /// `Deleting` in which it may.
    fn expect_removal(
        &self,
        generation: u64,
        also: WeightAvailability,
    ) -> Result<(WeightAvailability, u64), WeightError> {
        match self.state {
            Some((state, now))
                if generation > 0 && now == generation + 1 && (state == Deleting || state == also) =>
            {
                Ok((state, now))
            }
            _ => self.expect(generation),
        }
    }

    fn leased(&self, now: u64) -> bool {
        self.leases.values().any(|(_, until)| now < *until)
    }

    /// Passes time with the periodic work.
    fn pass(&mut self, now: u64) {
        if self.is(Importing) && self.active + IDLE <= now {
            self.state = self.state.map(|(_, generation)| (Deleting, generation + 1));
            self.objects.clear();
        }
        if self.is(Deleting) {
            self.state = self.state.map(|(_, generation)| (Deleted, generation + 1));
        }
    }
}

/// Objects of a revision: two payloads, the manifest, and one that no manifest has.
const OBJECTS: usize = 4;
const MANIFEST: usize = 2;

struct World {
    rig: Rig,
    ids: [WeightId; 2],
    models: [Model; 2],
    /// Time in seconds.
    now: u64,
    rng: Rng,
    hits: BTreeMap<&'static str, u64>,
}

impl World {
    fn key(&self, of: usize, object: usize) -> String {
        match object {
            MANIFEST => manifest_key(&self.ids[of]),
            number => format!("{of}/{number}"),
        }
    }

    fn generation(&mut self, of: usize) -> u64 {
        let now = self.models[of].state.map_or(1, |(_, generation)| generation);
        match self.rng.below(6) {
            0 => now.saturating_sub(1),
            1 => now + 1,
            _ => now,
        }
    }

    fn hit(&mut self, what: &'static str) {
        *self.hits.entry(what).or_default() += 1;
    }

    fn step(&mut self, context: &str) {
        let of = self.rng.below(2) as usize;
        let at = self.ids[of].clone();
        match self.rng.below(20) {
            0..2 => self.begin(of, &at, context),
            2..9 => self.write(of, &at, context),
            9 => self.remove(of, context),
            10..13 => self.commit(of, &at, context),
            13 => self.abort(of, &at, context),
            14..16 => self.lease(of, &at, context),
            16 => self.end_lease(of, context),
            17 => self.delete(of, &at, context),
            _ => {
                let most = if self.rng.below(8) == 0 { IDLE + 20 } else { 20 };
                for _ in 0..1 + self.rng.below(most) {
                    self.rig.alive_for(1.0);
                    self.now += 1;
                    let now = self.now;
                    self.models.iter_mut().for_each(|model| model.pass(now));
                }
            }
        }
        self.compare(context);
    }

    fn begin(&mut self, of: usize, at: &WeightId, context: &str) {
        let model = &mut self.models[of];
        let payloads = if self.rng.below(8) == 0 { 3 } else { 2 };
        let expected = match model.state {
            None => Ok(1),
            Some((Importing | Ready, generation)) if payloads == 2 => Ok(generation),
            Some(_) => Err(Conflict),
        };
        // A first import has the right number, so that a commit may succeed.
        if model.state.is_none() && payloads != 2 {
            return;
        }
        if expected.is_ok() {
            model.active = self.now;
            model.state.get_or_insert((Importing, 1));
        }
        let begun = self.rig.begin(at, payloads).map(|revision| revision.metadata_generation);
        assert_eq!(begun, expected, "{context}: begin");
    }

    fn write(&mut self, of: usize, at: &WeightId, context: &str) {
        let most = if self.rng.below(6) == 0 { OBJECTS as u64 } else { 3 };
        let object = self.rng.below(most) as usize;
        let (key, name) = (self.key(of, object), group(at));
        let right = if object == MANIFEST { METADATA } else { WEIGHT };
        let data_type = if self.rng.below(10) == 0 { DataType(2) } else { right };
        let mode = if self.rng.below(3) == 0 { WriteMode::Upsert } else { WriteMode::Put };
        let model = &mut self.models[of];
        let exists = model.objects.contains(&object);
        let expected = match model.state {
            Some((Ready | Deleting | Deleted, _)) => Err(UnavailableInCurrentStatus),
            _ if exists && mode == WriteMode::Put => Err(ObjectAlreadyExists),
            _ => Ok(()),
        };
        if model.is(Importing) {
            model.active = self.now;
            if data_type == right {
                model.mistyped.remove(&object)
            } else {
                model.mistyped.insert(object)
            };
        }
        if expected.is_ok() {
            model.objects.insert(object);
        }
        let written = self.rig.write(mode, Some(&name), &key, data_type);
        assert_eq!(written, expected, "{context}: write {key} {mode:?} {data_type:?}");
    }

    fn remove(&mut self, of: usize, context: &str) {
        let object = self.rng.below(OBJECTS as u64) as usize;
        let key = self.key(of, object);
        let model = &mut self.models[of];
        let expected = match model.state {
            _ if !model.objects.contains(&object) => Err(ObjectNotFound),
            Some(_) => Err(UnavailableInCurrentStatus),
            None => Ok(()),
        };
        if expected.is_ok() {
            model.objects.remove(&object);
        } else {
            self.hit("refused removal");
        }
        assert_eq!(self.rig.remove(&key, true), expected, "{context}: remove {key}");
        if self.rng.below(4) == 0 {
            self.rig.master.remove_all(true);
            let free = self.models.iter_mut().filter(|model| model.state.is_none());
            free.for_each(|model| model.objects.clear());
        }
    }

    fn commit(&mut self, of: usize, at: &WeightId, context: &str) {
        let generation = self.generation(of);
        let keys = [0, 1].map(|object| self.key(of, object));
        let good = manifest(at, &keys.each_ref().map(String::as_str));
        let model = &mut self.models[of];
        let is_whole = model.objects == BTreeSet::from([0, 1, MANIFEST]);
        let expected = match model.state {
            Some((Ready, now)) if generation > 0 && generation + 1 == now => Ok(now),
            _ => match model.expect(generation) {
                Ok((Importing, _)) if model.objects.is_empty() => Err(NotFound),
                Ok((Importing, now)) if is_whole && model.mistyped.is_disjoint(&model.objects) => Ok(now + 1),
                Ok((Ready, now)) => Ok(now),
                Ok(_) => Err(Conflict),
                Err(error) => Err(error),
            },
        };
        // An inspection is a step of the import, whatever it finds.
        if model.is(Importing) && model.expect(generation).is_ok() {
            model.active = self.now;
        }
        if let Ok(now) = expected {
            model.state = Some((Ready, now));
            self.hit("commit");
        }
        let committed = self.rig.commit(at, generation, good).map(|revision| revision.metadata_generation);
        assert_eq!(committed, expected, "{context}: commit {generation}");
    }

    fn abort(&mut self, of: usize, at: &WeightId, context: &str) {
        let generation = self.generation(of);
        let model = &mut self.models[of];
        let expected = match model.expect_removal(generation, Deleting) {
            Ok((Importing, now)) => Ok(now + 1),
            Ok((Deleting, now)) => Ok(now),
            Ok(_) => Err(Conflict),
            Err(error) => Err(error),
        };
        if let Ok(now) = expected {
            model.state = Some((Deleting, now));
            model.objects.clear();
            self.hit("abort");
        }
        let aborted = self.rig.abort(at, generation).map(|revision| revision.metadata_generation);
        assert_eq!(aborted, expected, "{context}: abort {generation}");
    }

    fn delete(&mut self, of: usize, at: &WeightId, context: &str) {
        let generation = self.generation(of);
        let now = self.now;
        let model = &mut self.models[of];
        let expected = match model.expect_removal(generation, Deleted) {
            Ok((Importing, _)) => Err(NotReady),
            Ok((Deleting, change)) => Ok(change + 1),
            Ok((Deleted, change)) => Ok(change),
            Ok(_) if model.leased(now) => Err(Busy),
            Ok((_, change)) => Ok(change + 2),
            Err(error) => Err(error),
        };
        match expected {
            Ok(change) => {
                model.state = Some((Deleted, change));
                model.objects.clear();
                self.hit("delete");
            }
            Err(Busy) => self.hit("leased"),
            Err(_) => {}
        }
        let deleted = self.rig.delete(at, generation).map(|revision| revision.metadata_generation);
        assert_eq!(deleted, expected, "{context}: delete {generation}");
    }

    fn lease(&mut self, of: usize, at: &WeightId, context: &str) {
        let (generation, holder, ttl) = (self.generation(of), self.rng.below(3), 1 + self.rng.below(60));
        let now = self.now;
        let model = &mut self.models[of];
        let expected = model.expect(generation).and_then(|(state, _)| match state {
            Ready => Ok(()),
            _ => Err(NotReady),
        });
        let lease = self.rig.lease(at, generation, &holder.to_string(), ttl * 1000);
        assert_eq!(lease.clone().map(drop), expected, "{context}: lease {generation}");
        let Ok(lease) = lease else { return };
        let held = model.leases.get(&holder).filter(|(_, until)| now < *until);
        let expected = *held.unwrap_or(&(lease.id, now + ttl));
        assert_eq!((lease.id, lease.expires_ms), (expected.0, expected.1 * 1000), "{context}: lease");
        model.leases.insert(holder, expected);
    }

    fn end_lease(&mut self, of: usize, context: &str) {
        let holder = self.rng.below(3);
        let Some((number, until)) = self.models[of].leases.get(&holder).copied() else { return };
        if self.rng.below(2) == 0 {
            assert_eq!(self.rig.release(number), Ok(()), "{context}: release");
            self.models[of].leases.remove(&holder);
            return;
        }
        let ttl = 1 + self.rng.below(60);
        let renewed = self.rig.renew(number, ttl * 1000).map(|lease| lease.expires_ms / 1000);
        // An expired lease is forgotten after a while.
        let expected = match self.now < until {
            true => Ok(until.max(self.now + ttl)),
            false if renewed == Err(NotFound) => Err(NotFound),
            false => Err(LeaseExpired),
        };
        assert_eq!(renewed, expected, "{context}: renew");
        if let Ok(until) = renewed {
            self.models[of].leases.insert(holder, (number, until));
        }
    }

    fn compare(&self, context: &str) {
        for (of, model) in self.models.iter().enumerate() {
            let there: BTreeSet<usize> =
                (0..OBJECTS).filter(|object| self.rig.has(&self.key(of, *object))).collect();
            assert_eq!(there, model.objects, "{context}: objects of {of}");
            if let Some((availability, generation)) = model.state {
                let found = self.rig.state(&self.ids[of]);
                assert_eq!((found.0, found.2), (availability, generation), "{context}: state of {of}");
                let leases = model.leases.values().filter(|(_, until)| self.now < *until).count();
                assert_eq!(found.3, leases as u64, "{context}: leases of {of}");
            }
        }
    }
}

#[test]
fn random_calls_agree_with_the_model() {
    let mut hits = BTreeMap::<&str, u64>::new();
    for run in 0..RUNS {
        let seed = test_seed() + run;
        let rig = Rig::without_watermark();
        rig.mount(1, MIB);
        let (ids, models) = ([id("one"), id("two")], [Model::default(), Model::default()]);
        let rng = Rng::seeded(seed);
        let now = rig.master.clock().wall_ms() / 1000;
        let mut world = World { rig, ids, models, now, rng, hits: BTreeMap::new() };
        for step in 0..STEPS {
            world.step(&format!("seed {seed}, run {run}, step {step}"));
            // Both revisions are over: others follow.
            if world.models.iter().all(|model| model.is(Deleted)) {
                world.ids.iter_mut().for_each(|id| id.generation += 1);
                world.models = [Model::default(), Model::default()];
            }
        }
        world.hits.into_iter().for_each(|(what, count)| *hits.entry(what).or_default() += count);
    }
    for what in ["commit", "abort", "delete", "leased", "refused removal"] {
        assert!(hits.get(what).is_some_and(|count| *count > 10), "{what}: {hits:?}");
    }
}
