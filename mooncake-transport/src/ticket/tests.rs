use super::*;
use mooncake_core::ErrorKind;
use std::sync::atomic::AtomicUsize;

struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn fail(text: &'static str) -> Result<()> {
    Err(Error::new(ErrorCode::TransferFail, text))
}

#[test]
fn a_batch_wakes_once_and_gives_the_buffer_back() {
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = Waker::from(count.clone());
    let mut cx = Context::from_waker(&waker);
    let (done, mut ticket) = ticket(vec![1u8, 2, 3], 100, None);
    assert!(Pin::new(&mut ticket).poll(&mut cx).is_pending());
    let shares: Vec<Completion> = done.each().collect();
    assert_eq!(shares.len(), 100);
    for share in shares {
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        share.finish(Ok(()));
    }
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    match Pin::new(&mut ticket).poll(&mut cx) {
        Poll::Ready((Ok(()), buffer)) => assert_eq!(buffer, [1, 2, 3]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_operation_has_its_own_result() {
    let (done, ticket) = ticket((), 5, None);
    let (first, rest) = done.split_at(2);
    first.finish(fail("both"));
    let mut shares: Vec<Completion> = rest.each().collect();
    let mut last = shares.pop().unwrap();
    let piece = last.share();
    for share in shares {
        share.finish(Ok(()));
    }
    last.finish(Ok(()));
    assert!(!ticket.is_done());
    piece.finish(fail("a piece"));
    let (results, ()) = ticket.results().wait();
    let texts: Vec<_> =
        results.iter().map(|r| r.as_ref().map_err(|e| e.message().to_owned()).err()).collect();
    assert_eq!(texts, [Some("both".into()), Some("both".into()), None, None, Some("a piece".into())]);
}

#[test]
fn single_operations_can_be_watched() {
    let (done, ticket, watch) = watched((), 4, None);
    let (mut first, rest) = done.split_at(1);
    let piece = first.share();
    first.finish(Ok(()));
    assert_eq!(watch.state(0), Some(OpState::Pending), "a piece of it is under way");
    piece.finish(Ok(()));
    assert_eq!((watch.state(0), watch.state(1)), (Some(OpState::Done), Some(OpState::Pending)));
    let (second, rest) = rest.split_at(1);
    second.finish(fail("x"));
    let (mut third, last) = rest.split_at(1);
    third.share().finish(Err(Error::new(ErrorCode::RpcTimeout, "late")));
    assert_eq!(watch.state(2), Some(OpState::Pending), "another share may still touch its bytes");
    third.finish(Ok(()));
    drop(last);
    assert_eq!(watch.state(1), Some(OpState::Failed));
    assert_eq!((watch.state(2), watch.state(3)), (Some(OpState::TimedOut), Some(OpState::Failed)));
    assert_eq!(watch.state(4), None);
    assert!(ticket.is_done());
}

#[test]
fn what_fails_may_be_tried_elsewhere() {
    let (done, ticket) = ticket((), 3, Some(Moment(5)));
    let inner = done.intercept(|failures, outer| {
        for (failure, share) in failures.into_iter().zip(outer.each()) {
            share.finish(match failure {
                Some(error) if error.message() == "elsewhere" => Ok(()),
                other => other.map_or(Ok(()), Err),
            });
        }
    });
    assert_eq!((inner.ops(), inner.deadline()), (3, Some(Moment(5))));
    let mut shares = inner.each();
    shares.next().unwrap().finish(Ok(()));
    shares.next().unwrap().finish(fail("elsewhere"));
    assert!(!ticket.is_done());
    shares.next().unwrap().finish(fail("for good"));
    let (results, ()) = ticket.results().wait();
    assert_eq!(results.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, true, false]);
    let (done, ticket) = super::ticket((), 2, None);
    done.intercept(|_, _| unreachable!()).finish(Ok(()));
    ticket.wait().0.unwrap();
    let (done, ticket) = super::ticket((), 0, None);
    done.intercept(|_, _| unreachable!()).finish(Ok(()));
    assert!(ticket.is_done());
}

#[test]
fn the_first_failure_is_that_of_the_lowest_operation() {
    let (done, ticket) = ticket((), 3, None);
    let mut shares: Vec<Completion> = done.each().collect();
    shares.pop().unwrap().finish(fail("last"));
    shares.remove(0).finish(fail("first"));
    drop(shares);
    assert_eq!(ticket.wait().0.unwrap_err().message(), "first");
}

#[test]
fn a_forgotten_share_is_an_error() {
    let (done, ticket) = ticket(7, 1, None);
    drop(done);
    let (result, buffer) = ticket.wait();
    assert_eq!((result.unwrap_err().kind(), buffer), (ErrorKind::Unavailable, 7));
    let (done, ticket) = super::ticket((), 3, None);
    done.each().next().unwrap().finish(Ok(()));
    let (results, ()) = ticket.results().wait();
    assert_eq!(results.iter().map(|r| r.is_ok()).collect::<Vec<_>>(), [true, false, false]);
}

#[test]
fn no_operations_are_done_at_once() {
    let (done, ticket) = ticket((), 0, None);
    assert_eq!(done.each().count(), 0);
    assert!(ticket.is_done());
    ticket.wait().0.unwrap();
}

#[test]
fn a_dropped_ticket_frees_nothing_early() {
    let drops = Arc::new(AtomicUsize::new(0));
    let (done, ticket) = ticket(Dropped(drops.clone()), 2, None);
    let mut shares = done.each();
    let (one, two) = (shares.next().unwrap(), shares.next().unwrap());
    drop(ticket);
    one.finish(Ok(()));
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    two.finish(Ok(()));
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn threads_finish_while_another_waits() {
    for round in 0..if cfg!(miri) { 4 } else { 200 } {
        let (done, ticket) = ticket(vec![0u8; 8], 4, Some(Moment(round)));
        assert_eq!(done.deadline(), Some(Moment(round)));
        let threads: Vec<_> =
            done.each().map(|share| std::thread::spawn(move || share.finish(Ok(())))).collect();
        ticket.wait().0.unwrap();
        for thread in threads {
            thread.join().unwrap();
        }
    }
}

#[test]
fn waiting_for_a_while_gives_the_ticket_back() {
    let (done, ticket) = ticket((), 1, None);
    let ticket = ticket.wait_timeout(Duration::from_millis(5)).unwrap_err();
    done.finish(Ok(()));
    ticket.wait_timeout(Duration::ZERO).unwrap().0.unwrap();
    Ticket::ready((), Ok(())).wait().0.unwrap();
}

#[test]
fn on_cancel_runs_callback_exactly_once() {
    let (runs, (completion, _ticket, watch)) = (Arc::new(AtomicUsize::new(0)), watched((), 1, None));
    for immediate_runs in [0, 1] {
        let other_runs = runs.clone();
        completion.on_cancel(|| move || assert!(other_runs.fetch_add(1, Ordering::SeqCst) < 2));
        assert_eq!(runs.load(Ordering::SeqCst), 2 * immediate_runs);
        (0..2).for_each(|_| watch.cancel());
        assert_eq!(runs.load(Ordering::SeqCst), 1 + immediate_runs);
    }
}

/// A part of an operation was done, or failed, and the other one had not begun. The
/// operation counts as begun.
#[test]
fn an_operation_that_was_given_up_half_way_has_failed() {
    let (completion, ticket, watch) = watched((), 3, None);
    watch.cancel();
    let end = |done: Completion, results: [Option<Result<()>>; 2]| {
        let mut rest = Some(done);
        for (i, result) in results.into_iter().enumerate() {
            let share = if i == 0 { rest.as_mut().map(Completion::share) } else { rest.take() };
            match (share.unwrap(), result) {
                (share, Some(result)) => share.finish(result),
                (share, None) => share.finish_cancelled(),
            }
        }
    };
    let failed = || Err(Error::new(ErrorCode::TransferFail, "failed"));
    // The same holds through an intercepting completion, as with a fallback transport.
    let (first, rest) = completion.split_at(1);
    let passed = rest.intercept(|failures, outer| {
        let cancelled_share: Vec<bool> = failures.iter().flatten().map(was_cancelled).collect();
        assert_eq!(cancelled_share, [false, true]);
        outer.finish(Err(Error::new(ErrorCode::TransferFail, "seen")));
    });
    for (share, results) in [first].into_iter().chain(passed.each()).zip([
        [Some(Ok(())), None],
        [None, Some(Ok(()))],
        [None, None],
    ]) {
        end(share, results);
    }
    assert_eq!([0, 1, 2].map(|op| watch.state(op).unwrap()), [OpState::Failed; 3]);
    let (results, ()) = ticket.results().wait();
    let error = results[0].as_ref().unwrap_err();
    assert!(!was_cancelled(error) && error.message() == CANCELLED_MIDWAY, "{results:?}");

    let (completion, ticket, watch) = watched((), 3, None);
    let results = [[None, Some(failed())], [None, None], [Some(Ok(())), Some(Ok(()))]];
    completion.each().zip(results).for_each(|(share, results)| end(share, results));
    let states = [0, 1, 2].map(|op| watch.state(op).unwrap());
    assert_eq!(states, [OpState::Failed, OpState::Cancelled, OpState::Done]);
    let (results, ()) = ticket.results().wait();
    assert!(was_cancelled(results[1].as_ref().unwrap_err()), "{results:?}");
}

/// A cancellation callback may inspect its completion.
#[test]
fn cancel_callback_may_inspect_completion() {
    let (completion, ticket, watch) = watched((), 1, None);
    watch.cancel();
    let passed = Arc::new(completion.intercept(|_, outer| outer.finish_cancelled()));
    let looking = passed.clone();
    passed.on_cancel(|| move || assert!(looking.is_cancelled()));
    Arc::into_inner(passed).unwrap().finish_cancelled();
    ticket.wait().0.unwrap_err();
}
