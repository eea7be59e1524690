//! Word of a process by which other processes of the host wake it.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use mooncake_core::Result;
use rustix::thread::futex;

use super::file::{FileAddress, SharedFile};

/// Length of the file.
const BYTES: usize = 4096;
/// Offset of the word.
const WORD: usize = 64;

/// A thread takes messages. No sender needs to wake it.
const AWAKE: u32 = 0;
/// No operation waits for messages. Only urgent ones need a notice.
const IDLE: u32 = 1;
/// Every message needs a notice.
const RESTING: u32 = 2;
/// A thread sleeps at the word. The other bits are the number of messages that it waits for.
const SLEEPING: u32 = 1 << 31;

/// State of a process of which no thread takes messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rest {
    /// No operation is in progress: messages that an operation waits for may stay in the rings.
    Idle,
    /// A notice is needed for every message.
    Alert,
}

/// Way by which a process learns of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Notice {
    /// The process looks by itself.
    Unneeded,
    /// A notice has to be sent on the connection.
    OnConnection,
}

/// Bell of this process.
pub(crate) struct Bell {
    file: SharedFile,
    address: FileAddress,
}

impl Bell {
    /// Creates the bell of a process that rests.
    ///
    /// # Errors
    /// The errors of the allocation.
    pub(crate) fn create() -> Result<Self> {
        let (file, address) = SharedFile::create(BYTES)?;
        let bell = Self { file, address };
        bell.rest(Rest::Alert);
        Ok(bell)
    }

    pub(crate) fn address(&self) -> FileAddress {
        self.address
    }

    fn word(&self) -> &AtomicU32 {
        self.file.word(WORD)
    }

    /// Tells senders that a thread takes messages from now on.
    pub(crate) fn wake_up(&self) {
        self.word().store(AWAKE, Ordering::SeqCst);
    }

    /// Tells senders that no thread takes messages. Afterwards the caller looks once more for
    /// messages that came before.
    pub(crate) fn rest(&self, rest: Rest) {
        let word = if rest == Rest::Idle { IDLE } else { RESTING };
        self.word().store(word, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Sleeps until a message comes, the thread is [called](Self::call), or the time is over. With
    /// `count` above 1, only the message of that number wakes the thread, or an urgent one. The
    /// thread does not sleep if `is_quiet` returns false. It may wake early.
    pub(crate) fn sleep(&self, count: u32, limit: Duration, is_quiet: impl FnOnce() -> bool) {
        let asleep = SLEEPING | count.clamp(1, 64);
        self.word().store(asleep, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if is_quiet()
            && let Ok(limit) = futex::Timespec::try_from(limit)
        {
            // A changed word, a signal and a timeout end the sleep alike.
            let _ = futex::wait(self.word(), futex::Flags::empty(), asleep, Some(&limit));
        }
        self.wake_up();
    }

    /// Wakes the thread of this process that sleeps, if there is one.
    pub(crate) fn call(&self) {
        fence(Ordering::SeqCst);
        let word = self.word();
        let mut seen = word.load(Ordering::SeqCst);
        // The thread may rest meanwhile, which stays as it is.
        while seen & SLEEPING != 0 {
            match word.compare_exchange(seen, AWAKE, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    let _ = futex::wake(word, futex::Flags::empty(), 1);
                    return;
                }
                Err(now) => seen = now,
            }
        }
    }
}

/// Bell of another process.
pub(crate) struct RemoteBell(SharedFile);

impl RemoteBell {
    /// Opens the bell of another process.
    ///
    /// # Errors
    /// The errors of the file.
    pub(crate) fn open(address: FileAddress) -> Result<Self> {
        SharedFile::open(address, BYTES).map(Self)
    }

    /// Announces a message that was written before.
    pub(crate) fn ring(&self, is_urgent: bool) -> Notice {
        let word = self.0.word(WORD);
        fence(Ordering::SeqCst);
        let mut seen = word.load(Ordering::SeqCst);
        loop {
            let count = seen & !SLEEPING;
            let is_asleep = seen & SLEEPING != 0;
            let next = match seen {
                IDLE if !is_urgent => return Notice::Unneeded,
                IDLE | RESTING => AWAKE,
                _ if is_asleep && !is_urgent && count > 1 => SLEEPING | (count - 1),
                _ if is_asleep => AWAKE,
                _ => return Notice::Unneeded,
            };
            match word.compare_exchange(seen, next, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) if next != AWAKE => return Notice::Unneeded,
                Ok(_) if is_asleep => {
                    let _ = futex::wake(word, futex::Flags::empty(), 1);
                    return Notice::Unneeded;
                }
                Ok(_) => return Notice::OnConnection,
                Err(now) => seen = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::clock::{Clock, SystemClock};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (Bell, RemoteBell) {
        let bell = Bell::create().unwrap();
        let remote = RemoteBell::open(bell.address()).unwrap();
        (bell, remote)
    }

    #[test]
    fn a_process_that_rests_needs_one_notice() {
        let (bell, remote) = pair();
        assert_eq!(remote.ring(false), Notice::OnConnection);
        assert_eq!(remote.ring(true), Notice::Unneeded);
        bell.rest(Rest::Idle);
        assert_eq!(remote.ring(false), Notice::Unneeded);
        assert_eq!(remote.ring(true), Notice::OnConnection);
        bell.wake_up();
        assert_eq!(remote.ring(true), Notice::Unneeded);
    }

    /// Returns whether the rings wake a thread that waits for `count` messages.
    fn wakes(count: u32, rings: &[bool]) -> bool {
        let (bell, remote) = pair();
        let clock = SystemClock::new();
        let began = clock.now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while bell.word().load(Ordering::SeqCst) & SLEEPING == 0 {
                    std::thread::yield_now();
                }
                for urgent in rings {
                    assert_eq!(remote.ring(*urgent), Notice::Unneeded);
                }
            });
            bell.sleep(count, Duration::from_secs(2), || true);
        });
        clock.now().since(began) < Duration::from_secs(2)
    }

    #[test]
    fn a_thread_sleeps_until_enough_messages_have_come() {
        assert!(wakes(1, &[false]) && wakes(3, &[false; 3]) && wakes(7, &[false, true]));
        assert!(!wakes(3, &[false; 2]));
    }

    #[test]
    fn a_message_before_the_sleep_is_seen() {
        let (bell, _) = pair();
        bell.sleep(1, LONG, || false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while bell.word().load(Ordering::SeqCst) & SLEEPING == 0 {
                    std::thread::yield_now();
                }
                bell.call();
            });
            bell.sleep(9, LONG, || true);
        });
    }
}
