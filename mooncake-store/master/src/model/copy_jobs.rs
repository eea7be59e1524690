//! Copy jobs: copies of objects that clients are to make.
//!
//! A job has one life, whatever its policy. The policy queues the job for a client. The client
//! receives it when it asks for work. A report, a cancellation or the deadline ends it.
//!
//! | policy | key | table |
//! |---|---|---|
//! | copy or move that a caller requests, drain, hot replica | task id | one of the master |
//! | promotion | object | one for each disk |
//! | offload | object | one for each disk |
//!
//! The tables of a disk are under the lock of the disk, because a put queues an offload and a read
//! queues a promotion.

use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use mooncake_core::clock::Moment;
use mooncake_core::ids::ClientId;

/// Number of queue entries without a job that a table may always keep.
const STALE: usize = 1024;

/// State of a job that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum JobState {
    /// The client has not received the job.
    Queued,
    /// The client has received the job.
    HandedOut,
}

/// Copy that a client is to make. `W` is what the policy of the job needs.
#[derive(Debug)]
pub(crate) struct CopyJob<W> {
    pub(crate) state: JobState,
    /// End of the time that the job has in its state.
    pub(crate) deadline: Moment,
    pub(crate) work: W,
    /// Number of the last change of the state.
    changed: u64,
}

impl<W> CopyJob<W> {
    /// Returns whether the client has received the job.
    pub(crate) fn is_handed_out(&self) -> bool {
        self.state == JobState::HandedOut
    }
}

/// Table of the jobs that have not ended. `C` tells the clients of a table apart; the table of one
/// client has `()`.
#[derive(Debug)]
pub(crate) struct CopyJobs<K, W, C = ClientId> {
    jobs: HashMap<K, CopyJob<W>>,
    /// Keys of queued jobs in order, each with the number of its change. Entries of jobs that have
    /// ended are skipped.
    queues: HashMap<C, VecDeque<(K, u64)>>,
    queued: usize,
    /// Number of queue entries without a job.
    stale: usize,
    changes: u64,
}

impl<K, W, C> Default for CopyJobs<K, W, C> {
    fn default() -> Self {
        Self { jobs: HashMap::new(), queues: HashMap::new(), queued: 0, stale: 0, changes: 0 }
    }
}

impl<K: Clone + Eq + Hash, W, C: Eq + Hash> CopyJobs<K, W, C> {
    /// Returns the number of queued jobs.
    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    /// Returns the number of jobs that clients have received.
    pub(crate) fn handed_out(&self) -> usize {
        self.jobs.len() - self.queued
    }

    /// Returns the number of jobs.
    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Returns a job.
    pub(crate) fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&CopyJob<W>>
    where
        K: Borrow<Q>,
    {
        self.jobs.get(key)
    }

    /// Returns a job, to change it.
    pub(crate) fn get_mut<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&mut CopyJob<W>>
    where
        K: Borrow<Q>,
    {
        self.jobs.get_mut(key)
    }

    /// Returns all jobs: queued ones, then those that clients have received, each in the order in
    /// which they came to their state.
    pub(crate) fn in_order(&self) -> Vec<(&K, &CopyJob<W>)> {
        let mut jobs: Vec<_> = self.jobs.iter().collect();
        jobs.sort_unstable_by_key(|(_, job)| (job.state, job.changed));
        jobs
    }

    /// Adds a job in a state. Returns false if there is a job with that key.
    pub(crate) fn add(&mut self, key: K, client: C, state: JobState, deadline: Moment, work: W) -> bool {
        if self.jobs.contains_key(&key) {
            return false;
        }
        self.changes += 1;
        if state == JobState::Queued {
            self.queued += 1;
            self.queues.entry(client).or_default().push_back((key.clone(), self.changes));
        }
        self.jobs.insert(key, CopyJob { state, deadline, work, changed: self.changes });
        true
    }

    /// Hands queued jobs of a client out, `most` at most. Returns their keys in order.
    pub(crate) fn hand_out(&mut self, client: C, most: usize, deadline: Moment) -> Vec<K> {
        let Some(queue) = self.queues.get_mut(&client) else { return Vec::new() };
        let mut keys = Vec::new();
        while keys.len() < most
            && let Some((key, changed)) = queue.pop_front()
        {
            let Some(job) = self.jobs.get_mut(&key).filter(|job| job.changed == changed) else {
                self.stale -= 1;
                continue;
            };
            self.changes += 1;
            self.queued -= 1;
            (job.state, job.deadline, job.changed) = (JobState::HandedOut, deadline, self.changes);
            keys.push(key);
        }
        if queue.is_empty() {
            self.queues.remove(&client);
        }
        keys
    }

    /// Ends a job and returns it.
    pub(crate) fn end<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<CopyJob<W>>
    where
        K: Borrow<Q>,
    {
        let job = self.jobs.remove(key)?;
        if job.state == JobState::Queued {
            self.queued -= 1;
            self.stale += 1;
            self.drop_stale();
        }
        Some(job)
    }

    /// Ends the jobs of a state whose deadlines have passed. Returns them in the order in which
    /// they came to that state.
    pub(crate) fn expire(&mut self, state: JobState, now: Moment) -> Vec<(K, CopyJob<W>)> {
        let due = |job: &CopyJob<W>| job.state == state && job.deadline <= now;
        let mut expired: Vec<_> = self.jobs.extract_if(|_, job| due(job)).collect();
        if state == JobState::Queued {
            self.queued -= expired.len();
            self.stale += expired.len();
            self.drop_stale();
        }
        expired.sort_unstable_by_key(|(_, job)| job.changed);
        expired
    }

    /// Drops the queue entries without a job once there are many.
    fn drop_stale(&mut self) {
        if self.stale <= self.queued + STALE {
            return;
        }
        self.stale = 0;
        let jobs = &self.jobs;
        self.queues.retain(|_, queue| {
            queue.retain(|(key, changed)| jobs.get(key).is_some_and(|job| job.changed == *changed));
            !queue.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::JobState::{HandedOut, Queued};
    use super::*;

    /// Table with the clients 0 to 2. The work is the client and the number of the step.
    type Tried = CopyJobs<u8, (u8, u32), u8>;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// Adds a job. The key may be that of another job, or of one that has ended.
        Add {
            key: u8,
            client: u8,
            handed_out: bool,
            time: u64,
        },
        HandOut {
            client: u8,
            most: usize,
            time: u64,
        },
        /// Ends a job by a report or a cancellation.
        End {
            key: u8,
        },
        Expire {
            handed_out: bool,
            pass: u64,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        let add = (0..24u8, 0..3u8, any::<bool>(), 0..20u64);
        let hand_out = (0..3u8, 0..5usize, 0..20u64);
        prop_oneof![
            4 => add.prop_map(|(key, client, handed_out, time)| Step::Add { key, client, handed_out, time }),
            2 => hand_out.prop_map(|(client, most, time)| Step::HandOut { client, most, time }),
            2 => (0..24u8).prop_map(|key| Step::End { key }),
            1 => (any::<bool>(), 0..15u64).prop_map(|(handed_out, pass)| Step::Expire { handed_out, pass }),
        ]
    }

    /// Job of the model. The model is a list in the order of the last changes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Known {
        key: u8,
        client: u8,
        state: JobState,
        deadline: Moment,
        step: u32,
    }

    fn state(handed_out: bool) -> JobState {
        if handed_out { HandedOut } else { Queued }
    }

    fn known(key: u8, job: &CopyJob<(u8, u32)>) -> Known {
        let CopyJob { state, deadline, work: (client, step), .. } = *job;
        Known { key, client, state, deadline, step }
    }

    /// Checks the table against the model.
    fn check(jobs: &Tried, model: &[Known]) {
        let of = |state| model.iter().filter(move |job| job.state == state);
        let expected: Vec<_> = of(Queued).chain(of(HandedOut)).copied().collect();
        let found: Vec<_> = jobs.in_order().into_iter().map(|(key, job)| known(*key, job)).collect();
        assert_eq!(found, expected);
        assert_eq!((jobs.queued(), jobs.handed_out()), (of(Queued).count(), of(HandedOut).count()));
        let entries: usize = jobs.queues.values().map(VecDeque::len).sum();
        assert_eq!(entries, jobs.queued + jobs.stale, "every queue entry is counted");
    }

    proptest! {
        /// Every job is handed out at most once, in order, to its client only, and ends exactly
        /// once, whatever the order of calls.
        #[test]
        fn a_table_agrees_with_a_plain_list(steps in prop::collection::vec(step(), 1..200)) {
            let (mut jobs, mut model, mut now) = (Tried::default(), Vec::<Known>::new(), Moment(0));
            for (number, step) in (0u32..).zip(steps) {
                match step {
                    Step::Add { key, client, handed_out, time } => {
                        let (state, deadline) = (state(handed_out), Moment(now.0 + time));
                        let is_new = model.iter().all(|job| job.key != key);
                        prop_assert_eq!(jobs.add(key, client, state, deadline, (client, number)), is_new);
                        if is_new {
                            model.push(Known { key, client, state, deadline, step: number });
                        }
                    }
                    Step::HandOut { client, most, time } => {
                        let deadline = Moment(now.0 + time);
                        let is_next = |job: &Known| job.client == client && job.state == Queued;
                        let next: Vec<_> = model.iter().copied().filter(is_next).take(most).collect();
                        let keys: Vec<_> = next.iter().map(|job| job.key).collect();
                        prop_assert_eq!(&jobs.hand_out(client, most, deadline), &keys);
                        model.retain(|job| !keys.contains(&job.key));
                        model.extend(next.iter().map(|job| Known { state: HandedOut, deadline, ..*job }));
                    }
                    Step::End { key } => {
                        let at = model.iter().position(|job| job.key == key);
                        let ended = jobs.end(&key).map(|job| known(key, &job));
                        prop_assert_eq!(ended, at.map(|at| model.remove(at)));
                    }
                    Step::Expire { handed_out, pass } => {
                        now = Moment(now.0 + pass);
                        let state = state(handed_out);
                        let due = |job: &Known| job.state == state && job.deadline <= now;
                        let expected: Vec<_> = model.iter().copied().filter(due).collect();
                        model.retain(|job| !due(job));
                        let expired = jobs.expire(state, now);
                        let expired: Vec<_> = expired.iter().map(|(key, job)| known(*key, job)).collect();
                        prop_assert_eq!(expired, expected);
                    }
                }
                check(&jobs, &model);
            }
        }
    }

    #[test]
    fn jobs_of_a_client_that_never_returns_expire_in_either_state() {
        let mut jobs = Tried::default();
        for key in 0..4 {
            assert!(jobs.add(key, 1, Queued, Moment(10), (1, 0)));
        }
        assert_eq!(jobs.hand_out(1, 2, Moment(30)), [0, 1]);
        assert!(jobs.expire(Queued, Moment(9)).is_empty());
        assert!(jobs.expire(HandedOut, Moment(29)).is_empty());
        let keys = |expired: Vec<(u8, CopyJob<_>)>| expired.iter().map(|(key, _)| *key).collect::<Vec<_>>();
        assert_eq!(keys(jobs.expire(Queued, Moment(10))), [2, 3]);
        assert!(jobs.hand_out(1, 9, Moment(99)).is_empty(), "an expired job is not handed out");
        assert_eq!(keys(jobs.expire(HandedOut, Moment(30))), [0, 1]);
        assert!(jobs.end(&0).is_none(), "a late report finds nothing");
        check(&jobs, &[]);
    }

    #[test]
    fn jobs_that_end_unfetched_leave_no_queue_behind() {
        let mut jobs = CopyJobs::<u32, (), u32>::default();
        for key in 0..50_000 {
            jobs.add(key, key % 7, Queued, Moment(0), ());
            // Every tenth job stays for a while.
            if key >= 100 {
                jobs.end(&(key - if key % 10 == 0 { 100 } else { 0 }));
            }
            let entries: usize = jobs.queues.values().map(VecDeque::len).sum();
            assert_eq!(entries, jobs.queued + jobs.stale);
            assert!(jobs.stale <= jobs.queued + STALE, "{} {}", jobs.stale, jobs.queued);
        }
        assert!(jobs.len() < 200);
    }
}
