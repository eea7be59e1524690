//! Inline wait for a response, on the thread of the caller.
//!
//! Normally the thread that waits for all sockets of the runtime wakes the thread that blocks on a
//! future. That takes two task switches per response, longer than most responses. Work inside
//! [`wait_inline`] lets its thread sleep at a socket itself, for a moment.

use std::cell::Cell;
use std::future::poll_fn;
use std::os::fd::AsFd;
use std::pin::pin;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Maximum sleep at one socket. Most responses of a server on this network arrive sooner, and other
/// work of the thread can wait as long.
const MOMENT: Duration = Duration::from_millis(1);

thread_local! {
    static INLINE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a future for a thread that blocks on it and has no other work:
/// `runtime.block_on(wait_inline(client.get(key)))`. Needs a runtime of several threads, because
/// the tasks that produce the response run on the others.
pub async fn wait_inline<F: Future>(work: F) -> F::Output {
    let mut work = pin!(work);
    poll_fn(|context| {
        let _before = Before(INLINE.replace(true));
        work.as_mut().poll(context)
    })
    .await
}

/// Returns whether the thread runs inside [`wait_inline`].
pub fn is_inline() -> bool {
    INLINE.get()
}

/// Waits on this thread until a socket is readable or closed. Inside [`wait_inline`] the wait takes
/// at most a millisecond. Elsewhere it takes at most `limit`, which suits responses that arrive
/// sooner than a task switch takes. Returns whether the socket is ready. A signal ends the wait.
pub fn readable_soon(socket: &impl AsFd, limit: Duration) -> bool {
    let limit = if is_inline() { limit.max(MOMENT) } else { limit };
    let Ok(limit) = Timespec::try_from(limit) else { return false };
    let mut ends = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut ends, Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// Guard that restores the previous state, also on a panic.
struct Before(bool);

impl Drop for Before {
    fn drop(&mut self) {
        INLINE.set(self.0);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use mooncake_core::clock::{Clock, SystemClock};

    use super::*;

    #[tokio::test]
    async fn only_a_future_inside_waits_inline() {
        assert!(!is_inline());
        let (inside, task, between) = wait_inline(async {
            let task = tokio::spawn(async { is_inline() });
            let inside = is_inline();
            let task = task.await.unwrap();
            let between = wait_inline(async { is_inline() }).await && is_inline();
            (inside, task, between)
        })
        .await;
        assert_eq!((inside, task, between), (true, false, true));
        assert!(!is_inline());
        let panics = tokio::spawn(wait_inline(async { std::panic::resume_unwind(Box::new(())) }));
        let _: tokio::task::JoinError = panics.await.unwrap_err();
        assert!(!is_inline());
    }

    #[tokio::test]
    async fn a_wait_for_a_socket_is_longer_inline() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let clock = SystemClock::new();
        let began = clock.now();
        assert!(!wait_inline(async { readable_soon(&near, Duration::ZERO) }).await);
        assert!(clock.now().since(began) >= MOMENT);
        assert!(!readable_soon(&near, Duration::ZERO));
        far.write_all(&[1]).unwrap();
        assert!(readable_soon(&near, Duration::ZERO));
        drop(far);
        assert!(readable_soon(&near, Duration::ZERO), "an end is to be read, too");
    }
}
