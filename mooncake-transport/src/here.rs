//! Waiting for an answer on the thread that asked for it.
//!
//! A thread that blocks on a future is woken by the thread that waits for all sockets of the runtime: two switches of tasks for
//! every answer, which take longer than most answers do. What is done [`here`] may let its thread sleep at a socket itself, for a moment.

use std::cell::Cell;
use std::future::poll_fn;
use std::os::fd::AsFd;
use std::pin::pin;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longest sleep at one socket: most answers of a server of this network come sooner, and what else the thread has to do can wait as long.
const MOMENT: Duration = Duration::from_millis(1);

thread_local! {
    static HERE: Cell<bool> = const { Cell::new(false) };
}

/// Does the work for a thread that blocks on it and has nothing else to do: `runtime.block_on(here(client.get(key)))`. On a runtime of several
/// threads; one that has no other would wait in vain for what its own tasks are to answer.
pub async fn here<F: Future>(work: F) -> F::Output {
    let mut work = pin!(work);
    poll_fn(|context| {
        let _before = Before(HERE.replace(true));
        work.as_mut().poll(context)
    })
    .await
}

/// Whether the thread works [`here`] at this moment.
pub fn is_here() -> bool {
    HERE.get()
}

/// Waits on this very thread until there is something to read, or an end, at most a millisecond where work is done [`here`], and elsewhere `limit`, which is for
/// answers that are due in less time than it takes to put a task away and to wake it. Whether there is; a signal ends the wait.
pub fn readable_soon(socket: &impl AsFd, limit: Duration) -> bool {
    let limit = if is_here() { limit.max(MOMENT) } else { limit };
    let Ok(limit) = Timespec::try_from(limit) else { return false };
    let mut ends = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut ends, Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// Makes it again as it was, also when the work panics.
struct Before(bool);

impl Drop for Before {
    fn drop(&mut self) {
        HERE.set(self.0);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use mooncake_core::clock::{Clock, SystemClock};

    use super::*;

    #[tokio::test]
    async fn only_what_is_polled_here_is_here() {
        assert!(!is_here());
        let (inside, task, between) = here(async {
            let task = tokio::spawn(async { is_here() });
            let inside = is_here();
            let task = task.await.unwrap();
            let between = here(async { is_here() }).await && is_here();
            (inside, task, between)
        })
        .await;
        assert_eq!((inside, task, between), (true, false, true));
        assert!(!is_here());
        let panics = tokio::spawn(here(async { std::panic::resume_unwind(Box::new(())) }));
        let _: tokio::task::JoinError = panics.await.unwrap_err();
        assert!(!is_here());
    }

    #[tokio::test]
    async fn a_socket_is_waited_for_longer_here() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let clock = SystemClock::new();
        let began = clock.now();
        assert!(!here(async { readable_soon(&near, Duration::ZERO) }).await);
        assert!(clock.now().since(began) >= MOMENT);
        assert!(!readable_soon(&near, Duration::ZERO));
        far.write_all(&[1]).unwrap();
        assert!(readable_soon(&near, Duration::ZERO));
        drop(far);
        assert!(readable_soon(&near, Duration::ZERO), "an end is to be read, too");
    }
}
