//! Transfers through an engine: grouped by target, copied if the memory is in this process, and
//! repeated once if the target has moved.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};

use super::metrics::Sums;
use super::request::{Direction, Request, Requests};
use super::target::{Route, Target};
use super::{Engine, Inner};
use crate::exposed::ExposedMemory;
use crate::region::{Sink, Source};
use crate::segment::HeldRanges;
use crate::ticket::{Completion, Failures, Tally, Ticket, Watch, ticket, watched};
use crate::transfer::post_some;
use crate::transport::{Opcode, Transport};

/// Control over the repetition of a batch's requests.
pub(super) trait Repeats: Sync {
    /// Returns whether failed requests are to be repeated.
    fn may_repeat(&self) -> bool;

    /// Receives the numbers of the requests that were posted again.
    fn posted(&self, watch: Watch, numbers: Vec<usize>);
}

/// Control that repeats every request that may be repeated.
struct Always;

impl Repeats for Always {
    fn may_repeat(&self) -> bool {
        true
    }

    fn posted(&self, _: Watch, _: Vec<usize>) {}
}

/// Results of a batch in the caller's order, and the requests with their buffers.
pub type Outcome<T, B> = (Vec<Result<()>>, Vec<Request<T, B>>);

impl<T: Transport> Engine<T> {
    /// Reads from an absolute remote address until `into` is full. The read is repeated once if the
    /// target has moved.
    pub async fn read<B: Sink<T>>(
        &self,
        target: &Target<T>,
        remote: u64,
        into: B,
        deadline: Option<Moment>,
    ) -> (Result<()>, B) {
        self.inner.run_one(Direction::All(Opcode::Read), Request::new(target, remote, into), deadline).await
    }

    /// Writes all of `from` to an absolute remote address. The write is repeated once if the target
    /// has moved, but never after the deadline.
    pub async fn write<B: Source<T>>(
        &self,
        target: &Target<T>,
        remote: u64,
        from: B,
        deadline: Option<Moment>,
    ) -> (Result<()>, B) {
        self.inner.run_one(Direction::All(Opcode::Write), Request::new(target, remote, from), deadline).await
    }

    /// Reads from any number of targets in parallel: one posting per target, one wake-up, and one
    /// result per request.
    pub async fn read_batch<B: Sink<T>>(
        &self,
        requests: Vec<Request<T, B>>,
        deadline: Option<Moment>,
    ) -> Outcome<T, B> {
        self.inner.run_batch(Direction::All(Opcode::Read), requests, deadline).await
    }

    /// Writes to any number of targets in parallel.
    pub async fn write_batch<B: Source<T>>(
        &self,
        requests: Vec<Request<T, B>>,
        deadline: Option<Moment>,
    ) -> Outcome<T, B> {
        self.inner.run_batch(Direction::All(Opcode::Write), requests, deadline).await
    }

    /// Posts reads and returns at once. No request is repeated. For callers without a runtime, and
    /// for callers that overlap other work with the transfer. Each run of requests with the same
    /// target is one posting.
    pub fn post_read<B, C>(&self, requests: C, deadline: Option<Moment>) -> Ticket<C>
    where
        B: Sink<T>,
        C: Requests<T, B>,
    {
        self.inner
            .post(Direction::All(Opcode::Read), requests, deadline)
            .tallied(self.inner.tally(count_reads))
    }

    /// Posts writes and returns at once. No request is repeated.
    pub fn post_write<B, C>(&self, requests: C, deadline: Option<Moment>) -> Ticket<C>
    where
        B: Source<T>,
        C: Requests<T, B>,
    {
        self.inner
            .post(Direction::All(Opcode::Write), requests, deadline)
            .tallied(self.inner.tally(count_writes))
    }
}

fn count_reads<T: Transport, B: Source<T>, C: Requests<T, B>>(
    requests: &C,
    failures: &Failures,
    elapsed: Duration,
) {
    count_posted(Opcode::Read, requests.as_ref(), failures, elapsed);
}

fn count_writes<T: Transport, B: Source<T>, C: Requests<T, B>>(
    requests: &C,
    failures: &Failures,
    elapsed: Duration,
) {
    count_posted(Opcode::Write, requests.as_ref(), failures, elapsed);
}

fn count_posted<T: Transport, B: Source<T>>(
    opcode: Opcode,
    requests: &[Request<T, B>],
    failures: &Failures,
    elapsed: Duration,
) {
    let mut ranges: Vec<_> = failures.iter().map(|(range, _)| range.clone()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    // A range of a whole submission may contain the others.
    let mut end = 0;
    for range in &mut ranges {
        end = range.end.max(end);
        range.end = end;
    }
    let failed = |index| {
        let after = ranges.partition_point(|range| range.start <= index);
        after.checked_sub(1).is_some_and(|last| ranges[last].contains(&index))
    };
    count(Direction::All(opcode), requests, failed, elapsed);
}

/// Adds finished requests to the metrics of their peers. `failed` maps an index to the outcome.
fn count<T: Transport, B: Source<T>>(
    direction: Direction,
    requests: &[Request<T, B>],
    failed: impl Fn(usize) -> bool,
    elapsed: Duration,
) {
    let mut index = 0;
    for run in requests.chunk_by(|a, b| a.target.id() == b.target.id()) {
        let mut sums = Sums::default();
        for request in run {
            sums.add(
                direction.of_request(request),
                request.transfer.buffer.local().span.len as u64,
                failed(index),
            );
            index += 1;
        }
        run[0].target.route().meter.add(&sums, elapsed);
    }
}

impl<T: Transport> Inner<T> {
    /// Returns a tally that starts now.
    fn tally<C>(&self, count: fn(&C, &Failures, Duration)) -> Tally<C> {
        Tally { clock: self.clock.clone(), began: self.clock.now(), count }
    }

    fn post<B, C>(&self, direction: Direction, requests: C, deadline: Option<Moment>) -> Ticket<C>
    where
        B: Source<T>,
        C: Requests<T, B>,
    {
        let count = requests.as_ref().len();
        let (done, ticket) = ticket(requests, count, deadline);
        self.post_runs(direction, (*ticket.buffer()).as_ref(), done);
        ticket
    }

    pub(super) fn post_runs<B: Source<T>>(
        &self,
        direction: Direction,
        requests: &[Request<T, B>],
        done: Completion,
    ) {
        let mut rest = done;
        for run in requests.chunk_by(|a, b| a.target.id() == b.target.id()) {
            if run.len() == rest.ops() {
                return self.post_run(direction, run, rest);
            }
            let (share, remaining) = rest.split_at(run.len());
            self.post_run(direction, run, share);
            rest = remaining;
        }
        rest.finish(Ok(()));
    }

    /// Posts requests that have one target.
    fn post_run<B: Source<T>>(&self, direction: Direction, run: &[Request<T, B>], share: Completion) {
        let Some(first) = run.first() else { return share.finish(Ok(())) };
        let route = first.target.route();
        if let Some(memory) = &route.local
            && run.iter().all(|request| request.lies_in(memory))
        {
            let now = self.clock.now();
            for (request, share) in run.iter().zip(share.each()) {
                let is_expired = share.deadline().is_some_and(|at| now >= at);
                share.finish(if is_expired {
                    Err(deadline_error())
                } else {
                    request.copy(direction.of_request(request), memory)
                });
            }
            return;
        }
        let transfers = run.iter().map(|request| (direction.of_request(request), &request.transfer));
        // SAFETY: the ticket keeps the requests in place until the share is finished. The buffers
        // of reads are sinks that were handed over.
        unsafe { post_some(&*self.transport, &route.peer, transfers, share) };
    }

    async fn run_one<B: Source<T>>(
        &self,
        direction: Direction,
        request: Request<T, B>,
        deadline: Option<Moment>,
    ) -> (Result<()>, B) {
        let (stale, began) = (request.target.route(), self.clock.now());
        let (mut result, [mut request]) = self.post(direction, [request], deadline).await;
        if is_repeatable(&request, &result)
            && !self.transport.is_stopped()
            && let Some(route) = self.refresh(&request.target, &stale, deadline).await
            && RouteChange::between(&stale, &route).allows(&request)
            && deadline.is_none_or(|at| self.clock.now() < at)
        {
            (result, [request]) = self.post(direction, [request], deadline).await;
        }
        let elapsed = self.clock.now().since(began);
        count(direction, std::slice::from_ref(&request), |_| result.is_err(), elapsed);
        (result, request.transfer.buffer)
    }

    async fn run_batch<B: Source<T>>(
        &self,
        direction: Direction,
        mut requests: Vec<Request<T, B>>,
        deadline: Option<Moment>,
    ) -> Outcome<T, B> {
        group(&mut requests);
        let (routes, began) = (routes(&requests), self.clock.now());
        let (results, requests) = self.post(direction, requests, deadline).results().await;
        self.finish_batch((direction, deadline, began), results, requests, &routes, &Always).await
    }

    /// Finishes a batch after its first posting: repeats the requests that may be repeated, and
    /// restores the caller's order.
    pub(super) async fn finish_batch<B: Source<T>>(
        &self,
        (direction, deadline, began): (Direction, Option<Moment>, Moment),
        results: Vec<Result<()>>,
        mut requests: Vec<Request<T, B>>,
        routes: &[(usize, Arc<Route<T>>)],
        repeats: &dyn Repeats,
    ) -> Outcome<T, B> {
        if results.iter().all(Result::is_ok) {
            count(direction, &requests, |_| false, self.clock.now().since(began));
            if !requests.is_sorted_by_key(|request| request.index) {
                requests.sort_unstable_by_key(|request| request.index);
            }
            return (results, requests);
        }
        let (results, requests) = match repeats.may_repeat() && !self.transport.is_stopped() {
            true => self.repeat_failed((direction, deadline), results, requests, routes, repeats).await,
            false => restore(results.into_iter().zip(requests).collect()),
        };
        count(direction, &requests, |index| results[index].is_err(), self.clock.now().since(began));
        (results, requests)
    }

    /// Repeats the requests of a batch that may be repeated, and restores the caller's order.
    async fn repeat_failed<B: Source<T>>(
        &self,
        (direction, deadline): (Direction, Option<Moment>),
        results: Vec<Result<()>>,
        requests: Vec<Request<T, B>>,
        routes: &[(usize, Arc<Route<T>>)],
        repeats: &dyn Repeats,
    ) -> Outcome<T, B> {
        // All targets are looked up in parallel, so that a dead target does not delay one that has
        // moved.
        let mut rest = &*results;
        let runs = requests.chunk_by(|a, b| a.target.id() == b.target.id());
        let new_routes = runs.zip(routes).map(|(run, (_, stale))| {
            let (results, remaining) = rest.split_at(run.len());
            rest = remaining;
            async move {
                let mut failed = results.iter().zip(run);
                let (_, request) = failed.find(|(result, request)| is_repeatable(request, result))?;
                self.refresh(&request.target, stale, deadline).await
            }
        });
        let new_routes = futures::future::join_all(new_routes).await;
        let may_repeat = repeats.may_repeat() && deadline.is_none_or(|at| self.clock.now() < at);
        let mut finished = Vec::with_capacity(requests.len());
        let mut repeated = Vec::new();
        // Once for each target: a descriptor may have very many buffers, and a batch very many
        // requests.
        let changes = RouteChange::of_targets(routes, &new_routes);
        let mut changes = changes.iter().peekable();
        for (result, request) in results.into_iter().zip(requests) {
            // Routes and requests are in the same order.
            while changes.next_if(|(id, _)| *id != request.target.id()).is_some() {}
            match changes.peek() {
                Some((_, Some(change)))
                    if may_repeat && is_repeatable(&request, &result) && change.allows(&request) =>
                {
                    repeated.push(request);
                }
                _ => finished.push((result, request)),
            }
        }
        if !repeated.is_empty() {
            let numbers: Vec<usize> = repeated.iter().map(|request| request.index).collect();
            let (done, ticket, watch) = watched(repeated, numbers.len(), deadline);
            repeats.posted(watch, numbers);
            self.post_runs(direction, &ticket.buffer(), done);
            let (results, requests) = ticket.results().await;
            finished.extend(results.into_iter().zip(requests));
        }
        restore(finished)
    }
}

/// Restores the caller's order of results and requests.
fn restore<T: Transport, B>(mut finished: Vec<(Result<()>, Request<T, B>)>) -> Outcome<T, B> {
    finished.sort_unstable_by_key(|(_, request)| request.index);
    finished.into_iter().unzip()
}

/// Returns whether a request failed with an error that a moved target may cause. `Invalid` may be
/// the response of another process that has the old port now.
fn is_repeatable<T: Transport, B: Source<T>>(request: &Request<T, B>, result: &Result<()>) -> bool {
    let Err(error) = result else { return false };
    request.transfer.buffer.local().span.len > 0
        && matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Invalid)
}

/// Change of the route of a target during a batch.
struct RouteChange {
    is_same_process: bool,
    old: HeldRanges,
    /// Memories on the new route; `None` if it lists none.
    new: Option<HeldRanges>,
}

impl RouteChange {
    /// Returns the number of each target and the change of its route, if there is one.
    fn of_targets<T: Transport>(
        routes: &[(usize, Arc<Route<T>>)],
        new: &[Option<Arc<Route<T>>>],
    ) -> Vec<(usize, Option<Self>)> {
        let pairs = routes.iter().zip(new);
        pairs.map(|((id, old), new)| (*id, new.as_ref().map(|new| Self::between(old, new)))).collect()
    }

    fn between<T: Transport>(old: &Route<T>, new: &Route<T>) -> Self {
        Self {
            is_same_process: new.instance() == old.instance(),
            old: HeldRanges::of(&old.desc),
            new: Some(&new.desc).filter(|desc| !desc.buffers.is_empty()).map(HeldRanges::of),
        }
    }

    /// Returns whether a request that failed on the old route may run on the new one. The range
    /// must be registered there. It must not be memory of an earlier process, whose addresses have
    /// another meaning now.
    fn allows<T: Transport, B: Source<T>>(&self, request: &Request<T, B>) -> bool {
        let (addr, len) = (request.transfer.remote, request.transfer.buffer.local().span.len as u64);
        self.new.as_ref().is_none_or(|new| new.hold(addr, len))
            && (self.is_same_process || !self.old.hold(addr, len))
    }
}

/// Numbers the requests of a batch and sorts them by target.
pub(super) fn group<T: Transport, B>(requests: &mut [Request<T, B>]) {
    for (index, request) in requests.iter_mut().enumerate() {
        request.index = index;
    }
    if !requests.is_sorted_by_key(|request| request.target.id()) {
        requests.sort_by_key(|request| request.target.id());
    }
}

/// Returns the route of each target of a batch that is grouped by target.
pub(super) fn routes<T: Transport, B>(requests: &[Request<T, B>]) -> Vec<(usize, Arc<Route<T>>)> {
    requests
        .chunk_by(|a, b| a.target.id() == b.target.id())
        .map(|run| (run[0].target.id(), run[0].target.route()))
        .collect()
}

impl<T: Transport, B: Source<T>> Request<T, B> {
    fn lies_in(&self, memory: &ExposedMemory) -> bool {
        memory.check(self.transfer.remote, self.transfer.buffer.local().span.len as u64).is_ok()
    }

    fn copy(&self, opcode: Opcode, memory: &ExposedMemory) -> Result<()> {
        let span = self.transfer.buffer.local().span;
        match opcode {
            // SAFETY: the buffer is a sink that was handed over. The ranges may overlap if the
            // caller transfers from memory to itself.
            Opcode::Read => unsafe { memory.copy_out(self.transfer.remote, span) },
            // SAFETY: as above, and no code writes the buffer.
            Opcode::Write => unsafe { memory.copy_in(self.transfer.remote, span) },
        }
    }
}

fn deadline_error() -> Error {
    Error::new(ErrorCode::RpcTimeout, "cannot begin transfer: its deadline has passed")
}
