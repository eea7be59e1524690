//! Messages in flight and waiting on one connection. The module needs no device, so that it can be
//! tested without one.
//!
//! Requests of a queue pair complete in order, so one completion stands for all before it, and few
//! requests have to be signalled.

use std::collections::VecDeque;

use mooncake_core::clock::Moment;

use crate::send_credits::Credits;
use crate::verbs::Status;

/// Bits of a request id that count requests.
const SEQUENCE: u32 = (1 << 24) - 1;

/// Message to send.
pub(crate) trait Message {
    /// Returns the deadline of the message.
    fn deadline(&self) -> Option<Moment>;
    /// Returns the length of the message in bytes.
    fn bytes(&self) -> u64;
}

/// Request that is about to be posted.
pub(crate) struct Sending<'a, P> {
    pub(crate) sequence: u32,
    pub(crate) signalled: bool,
    pub(crate) message: &'a P,
}

/// Outcome of a message.
#[derive(Debug)]
pub(crate) struct Ended<P> {
    pub(crate) message: P,
    pub(crate) status: Status,
}

/// Messages of one connection. Several queue pairs share the load.
#[derive(Debug)]
pub(crate) struct Flow<P> {
    pairs: Vec<PairRequests<P>>,
    waiting: VecDeque<P>,
    max_waiting: usize,
}

/// Posted requests of one queue pair.
#[derive(Debug)]
struct PairRequests<P> {
    sent: VecDeque<P>,
    /// Sequence number of the first of them.
    first: u32,
    max_in_flight: usize,
}

impl<P: Message> Flow<P> {
    pub(crate) fn new(pairs: usize, max_in_flight: usize, max_waiting: usize) -> Self {
        let pair = || PairRequests { sent: VecDeque::with_capacity(max_in_flight), first: 0, max_in_flight };
        Self { pairs: (0..pairs).map(|_| pair()).collect(), waiting: VecDeque::new(), max_waiting }
    }

    /// Queues a message. Returns the message if too many wait.
    pub(crate) fn push(&mut self, message: P) -> Result<(), P> {
        if self.waiting.len() >= self.max_waiting {
            return Err(message);
        }
        self.waiting.push_back(message);
        Ok(())
    }

    /// Posts as many messages as credit allows, spread over the queue pairs, with one call of
    /// `post` for each. A failed call returns how many were accepted; the rest waits again. Returns
    /// true if more messages wait for credit of the completion queue only.
    pub(crate) fn fill<E>(
        &mut self,
        credits: &Credits,
        mut post: impl FnMut(usize, &mut dyn Iterator<Item = Sending<'_, P>>) -> Result<(), (usize, E)>,
    ) -> Result<bool, E> {
        let pairs = self.pairs.len();
        for index in 0..pairs {
            let pair = &mut self.pairs[index];
            let share = self.waiting.len().div_ceil(pairs - index);
            let to_send = share.min(pair.max_in_flight - pair.sent.len());
            if to_send == 0 {
                continue;
            }
            let n = credits.take(to_send);
            if n == 0 {
                return Ok(true);
            }
            let before = pair.sent.len();
            pair.sent.extend(self.waiting.drain(..n));
            let quarter = u32::try_from(pair.max_in_flight / 4).unwrap_or(1).max(1);
            let first = pair.first;
            let mut requests = pair.sent.range(before..).enumerate().map(|(i, message)| {
                let sequence = first.wrapping_add((before + i) as u32) & SEQUENCE;
                // The last request is signalled for all. In a long row some more are, so that free
                // slots become known.
                let signalled = i + 1 == n || sequence.is_multiple_of(quarter);
                Sending { sequence, signalled, message }
            });
            let posted = post(index, &mut requests);
            drop(requests);
            if let Err((accepted, error)) = posted {
                let pair = &mut self.pairs[index];
                for message in pair.sent.drain(before + accepted.min(n)..).rev() {
                    self.waiting.push_front(message);
                }
                credits.release(n - accepted.min(n));
                return Err(error);
            }
        }
        Ok(false)
    }

    /// Removes the messages that a completion stands for: the request itself, and all before it,
    /// which are done.
    pub(crate) fn completed(
        &mut self,
        pair: usize,
        sequence: u32,
        status: Status,
        credits: &Credits,
        into: &mut Vec<Ended<P>>,
    ) {
        let Some(pair) = self.pairs.get_mut(pair) else { return };
        let position = (sequence.wrapping_sub(pair.first) & SEQUENCE) as usize;
        // Completion of an earlier use, or a duplicate: it stands for nothing.
        if position >= pair.sent.len() {
            return;
        }
        let n = position + 1;
        pair.first = pair.first.wrapping_add(n as u32) & SEQUENCE;
        into.extend(pair.sent.drain(..n).enumerate().map(|(i, message)| Ended {
            message,
            status: if i == position { status } else { Status::Done },
        }));
        credits.release(n);
    }

    /// Removes waiting messages that are late. Returns the next deadline, and whether a message in
    /// flight is late already.
    pub(crate) fn expire(&mut self, now: Moment, expired: &mut Vec<P>) -> (Option<Moment>, bool) {
        let is_expired = |message: &P| message.deadline().is_some_and(|at| now >= at);
        self.take_if(is_expired, expired);
        let sent = || self.pairs.iter().flat_map(|pair| &pair.sent);
        let next =
            self.waiting.iter().chain(sent()).filter_map(Message::deadline).filter(|at| *at > now).min();
        (next, sent().any(is_expired))
    }

    /// Removes the waiting messages for which `is` returns true. The rest stays in order.
    pub(crate) fn take_if(&mut self, is: impl Fn(&P) -> bool, into: &mut Vec<P>) {
        if !self.waiting.iter().any(&is) {
            return;
        }
        for _ in 0..self.waiting.len() {
            let Some(message) = self.waiting.pop_front() else { break };
            if is(&message) { into.push(message) } else { self.waiting.push_back(message) }
        }
    }

    /// Removes all waiting messages.
    pub(crate) fn take_waiting(&mut self) -> VecDeque<P> {
        std::mem::take(&mut self.waiting)
    }

    /// Removes all messages in flight. Only for destroyed queue pairs.
    pub(crate) fn take_sent(&mut self, credits: &Credits) -> Vec<P> {
        let sent: Vec<P> = self.pairs.iter_mut().flat_map(|pair| pair.sent.drain(..)).collect();
        credits.release(sent.len());
        sent
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.pairs.iter().map(|pair| pair.sent.len()).sum()
    }

    /// Returns the bytes of all messages, in flight and waiting.
    pub(crate) fn bytes(&self) -> u64 {
        self.pairs.iter().flat_map(|pair| &pair.sent).chain(&self.waiting).map(Message::bytes).sum()
    }

    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(crate) fn is_idle(&self) -> bool {
        !self.has_waiting() && self.in_flight() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::clock::Rng;
    use proptest::prelude::*;
    use std::time::Duration;

    #[derive(Debug, PartialEq)]
    struct Item(u64, Option<Moment>);

    impl Message for Item {
        fn deadline(&self) -> Option<Moment> {
            self.1
        }

        fn bytes(&self) -> u64 {
            self.0
        }
    }

    /// Queue pair and its completion queue, as a device keeps them.
    #[derive(Default)]
    struct Device {
        /// Posted and pending requests per queue pair: number and whether they are signalled.
        queues: Vec<VecDeque<(u32, bool)>>,
        failed: Vec<bool>,
        completions: VecDeque<(usize, u32, Status)>,
    }

    impl Device {
        fn new(pairs: usize) -> Self {
            Self { queues: vec![VecDeque::new(); pairs], failed: vec![false; pairs], ..Self::default() }
        }

        fn post(
            &mut self,
            pair: usize,
            requests: &mut dyn Iterator<Item = Sending<'_, Item>>,
            refuse_after: usize,
        ) -> Result<(), (usize, ())> {
            for (i, request) in requests.enumerate() {
                if i == refuse_after {
                    return Err((i, ()));
                }
                self.queues[pair].push_back((request.sequence, request.signalled));
            }
            Ok(())
        }

        /// Completes the first request of a queue pair. Once one failed, all that follow are
        /// flushed; a failed request always reports.
        fn step(&mut self, pair: usize, fail: bool) {
            let Some((sequence, signalled)) = self.queues[pair].pop_front() else { return };
            let status = match (self.failed[pair], fail) {
                (true, _) => Status::Flushed,
                (false, true) => Status::Unanswered,
                (false, false) => Status::Done,
            };
            self.failed[pair] |= fail;
            if signalled || status != Status::Done {
                self.completions.push_back((pair, sequence, status));
            }
        }
    }

    fn items(flow: &mut Flow<Item>, range: std::ops::Range<u64>) {
        for i in range {
            flow.push(Item(i, None)).unwrap();
        }
    }

    #[test]
    fn one_completion_stands_for_all_before_it() {
        let (credits, mut device) = (Credits::new(100), Device::new(1));
        let mut flow = Flow::new(1, 40, 100);
        items(&mut flow, 0..25);
        assert!(!flow.fill(&credits, |pair, requests| device.post(pair, requests, 99)).unwrap());
        let reporting = device.queues[0].iter().filter(|(_, signalled)| *signalled).count();
        assert!(reporting <= 4, "{reporting} of 25 requests are signalled");
        assert_eq!((flow.in_flight(), credits.free()), (25, 75));
        let mut ended = Vec::new();
        flow.completed(0, 24, Status::Done, &credits, &mut ended);
        assert!(ended.len() == 25 && ended.iter().all(|e| e.status == Status::Done));
        flow.completed(0, 24, Status::Done, &credits, &mut ended);
        flow.completed(7, 0, Status::Done, &credits, &mut ended);
        assert_eq!((ended.len(), flow.is_idle(), credits.free()), (25, true, 100));
    }

    #[test]
    fn the_load_is_shared_and_bounded() {
        let (credits, mut device) = (Credits::new(12), Device::new(2));
        let mut flow = Flow::new(2, 8, 16);
        items(&mut flow, 0..16);
        assert_eq!(flow.push(Item(16, None)), Err(Item(16, None)));
        let starved = flow.fill(&credits, |pair, requests| device.post(pair, requests, 99)).unwrap();
        assert_eq!((device.queues[0].len(), device.queues[1].len(), credits.free()), (8, 4, 0));
        assert!(!starved, "the rest waits for the queue pairs as well");
        assert!(flow.fill(&credits, |pair, requests| device.post(pair, requests, 99)).unwrap());
    }

    #[test]
    fn refused_messages_wait_in_order() {
        let (credits, mut device) = (Credits::new(100), Device::new(1));
        let mut flow = Flow::new(1, 50, 100);
        items(&mut flow, 0..10);
        flow.fill(&credits, |pair, requests| device.post(pair, requests, 3)).unwrap_err();
        assert_eq!((flow.in_flight(), credits.free()), (3, 97));
        let waiting: Vec<u64> = flow.take_waiting().iter().map(|item| item.0).collect();
        assert_eq!(waiting, (3..10).collect::<Vec<_>>());
        assert_eq!((flow.take_sent(&credits).len(), credits.free()), (3, 100));
    }

    #[test]
    fn late_messages_are_not_posted() {
        let mut flow = Flow::new(1, 1, 100);
        let at = |s| Moment(0).after(Duration::from_secs(s));
        for (i, deadline) in [Some(at(5)), None, Some(at(3)), Some(at(9))].into_iter().enumerate() {
            flow.push(Item(i as u64, deadline)).unwrap();
        }
        let mut expired = Vec::new();
        assert_eq!(flow.expire(at(1), &mut expired), (Some(at(3)), false));
        let credits = Credits::new(9);
        flow.fill(&credits, |_, requests| {
            requests.count();
            Ok::<(), (usize, ())>(())
        })
        .unwrap();
        assert_eq!(flow.expire(at(6), &mut expired), (Some(at(9)), true), "the first is in flight, and late");
        assert_eq!(expired, [Item(2, Some(at(3)))]);
        let order: Vec<u64> = flow.take_waiting().iter().map(|item| item.0).collect();
        assert_eq!(order, [1, 3]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() })]

        /// In any sequence of posts, refusals, completions and failures, each message ends once, in
        /// the order of its queue pair, with the status of the device, and every credit comes back.
        #[test]
        fn nothing_is_lost_or_doubled(seed: u64, pairs in 1usize..4, max_in_flight in 1usize..20, total in 1usize..40) {
            let mut rng = Rng::seeded(seed);
            let credits = Credits::new(total);
            let mut device = Device::new(pairs);
            let mut flow = Flow::new(pairs, max_in_flight, 50);
            let (mut next, mut refused, mut ended) = (0u64, false, Vec::new());
            // Begins near the end of the sequence, so that numbers wrap.
            for pair in &mut flow.pairs {
                pair.first = SEQUENCE - 5;
            }
            for _ in 0..400 {
                match rng.below(6) {
                    0 | 1 => match flow.push(Item(next, None)) {
                        Ok(()) => next += 1,
                        Err(item) => prop_assert_eq!(item.0, next),
                    },
                    2 => {
                        let refuse = if rng.below(10) == 0 { rng.below(3) as usize } else { usize::MAX };
                        refused |= flow.fill(&credits, |pair, requests| device.post(pair, requests, refuse)).is_err();
                    }
                    3 | 4 => device.step(rng.below(pairs as u64) as usize, rng.below(50) == 0),
                    _ => if let Some((pair, sequence, status)) = device.completions.pop_front() {
                        flow.completed(pair, sequence, status, &credits, &mut ended);
                    }
                }
                prop_assert!(flow.pairs.iter().all(|pair| pair.sent.len() <= max_in_flight));
                prop_assert_eq!(credits.free() + flow.in_flight(), total);
                prop_assert!(device.completions.len() <= total, "the completion queue would overflow");
            }
            // At the end, the connection is closed, which flushes all requests.
            for pair in 0..pairs {
                device.step(pair, true);
                while !device.queues[pair].is_empty() { device.step(pair, false); }
            }
            while let Some((pair, sequence, status)) = device.completions.pop_front() {
                flow.completed(pair, sequence, status, &credits, &mut ended);
            }
            // Only requests without a completion after a refused posting stay, until the pair is
            // destroyed.
            let silent = flow.take_sent(&credits);
            prop_assert!(refused || silent.is_empty());
            let mut seen: Vec<u64> = ended.iter().map(|e| e.message.0).chain(flow.take_waiting().iter().map(|i| i.0)).collect();
            seen.extend(silent.iter().map(|item| item.0));
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..next).collect::<Vec<_>>());
            prop_assert_eq!(credits.free(), total);
        }
    }
}
