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
const ATTENDED: u32 = 0;
/// No operation waits for messages. Only urgent ones need a notice.
const IDLE: u32 = 1;
/// Every message needs a notice.
const NOTIFY_ALWAYS: u32 = 2;
/// A thread sleeps at the word. The other bits are the number of messages that it waits for.
const SLEEPING: u32 = 1 << 31;

/// State of a process of which no thread takes messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unattended {
    /// No operation is in progress: messages that an operation waits for may stay in the rings.
    Idle,
    /// A notice is needed for every message.
    NotifyAlways,
}

/// Way by which a process learns of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Notice {
    /// The process looks by itself.
    Unneeded,
    /// A notice has to be sent on the connection.
    OnConnection,
}

/// Doorbell of this process.
pub(crate) struct Doorbell {
    file: SharedFile,
    address: FileAddress,
}

impl Doorbell {
    /// Creates the doorbell of a process in which no thread takes messages.
    ///
    /// # Errors
    /// The errors of the allocation.
    pub(crate) fn create() -> Result<Self> {
        let (file, address) = SharedFile::create(BYTES)?;
        let doorbell = Self { file, address };
        doorbell.set_unattended(Unattended::NotifyAlways);
        Ok(doorbell)
    }

    pub(crate) fn address(&self) -> FileAddress {
        self.address
    }

    fn word(&self) -> &AtomicU32 {
        self.file.word(WORD)
    }

    /// Tells senders that a thread takes messages from now on.
    pub(crate) fn set_attended(&self) {
        self.word().store(ATTENDED, Ordering::SeqCst);
    }

    /// Tells senders that no thread takes messages. Afterwards the caller looks once more for
    /// messages that came before.
    pub(crate) fn set_unattended(&self, state: Unattended) {
        let word = if state == Unattended::Idle { IDLE } else { NOTIFY_ALWAYS };
        self.word().store(word, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Sleeps until a message comes, the thread is [woken](Self::wake_sleeper), or the time is
    /// over. With `count` above 1, only the message of that number wakes the thread, or an urgent
    /// one. The thread does not sleep if `may_sleep` returns false. It may wake early.
    pub(crate) fn sleep(&self, count: u32, limit: Duration, may_sleep: impl FnOnce() -> bool) {
        let sleeping = SLEEPING | count.clamp(1, 64);
        self.word().store(sleeping, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if may_sleep()
            && let Ok(limit) = futex::Timespec::try_from(limit)
        {
            // A changed word, a signal and a timeout end the sleep alike.
            let _ = futex::wait(self.word(), futex::Flags::empty(), sleeping, Some(&limit));
        }
        self.set_attended();
    }

    /// Wakes the thread of this process that sleeps, if there is one.
    pub(crate) fn wake_sleeper(&self) {
        fence(Ordering::SeqCst);
        let word = self.word();
        let mut current = word.load(Ordering::SeqCst);
        // Another thread may set the word meanwhile, which stays as it is.
        while current & SLEEPING != 0 {
            match word.compare_exchange(current, ATTENDED, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    let _ = futex::wake(word, futex::Flags::empty(), 1);
                    return;
                }
                Err(now) => current = now,
            }
        }
    }
}

/// Doorbell of another process.
pub(crate) struct RemoteDoorbell(SharedFile);

impl RemoteDoorbell {
    /// Opens the doorbell of another process.
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
        let mut current = word.load(Ordering::SeqCst);
        loop {
            let count = current & !SLEEPING;
            let is_asleep = current & SLEEPING != 0;
            let next = match current {
                IDLE if !is_urgent => return Notice::Unneeded,
                IDLE | NOTIFY_ALWAYS => ATTENDED,
                _ if is_asleep && !is_urgent && count > 1 => SLEEPING | (count - 1),
                _ if is_asleep => ATTENDED,
                _ => return Notice::Unneeded,
            };
            match word.compare_exchange(current, next, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) if next != ATTENDED => return Notice::Unneeded,
                Ok(_) if is_asleep => {
                    let _ = futex::wake(word, futex::Flags::empty(), 1);
                    return Notice::Unneeded;
                }
                Ok(_) => return Notice::OnConnection,
                Err(now) => current = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::clock::{Clock, SystemClock};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (Doorbell, RemoteDoorbell) {
        let doorbell = Doorbell::create().unwrap();
        let remote = RemoteDoorbell::open(doorbell.address()).unwrap();
        (doorbell, remote)
    }

    #[test]
    fn a_process_that_rests_needs_one_notice() {
        let (doorbell, remote) = pair();
        assert_eq!(remote.ring(false), Notice::OnConnection);
        assert_eq!(remote.ring(true), Notice::Unneeded);
        doorbell.set_unattended(Unattended::Idle);
        assert_eq!(remote.ring(false), Notice::Unneeded);
        assert_eq!(remote.ring(true), Notice::OnConnection);
        doorbell.set_attended();
        assert_eq!(remote.ring(true), Notice::Unneeded);
    }

    /// Returns whether the rings wake a thread that waits for `count` messages.
    fn wakes(count: u32, urgencies: &[bool]) -> bool {
        let (doorbell, remote) = pair();
        let clock = SystemClock::new();
        let began = clock.now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while doorbell.word().load(Ordering::SeqCst) & SLEEPING == 0 {
                    std::thread::yield_now();
                }
                for urgent in urgencies {
                    assert_eq!(remote.ring(*urgent), Notice::Unneeded);
                }
            });
            doorbell.sleep(count, Duration::from_secs(2), || true);
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
        let (doorbell, _) = pair();
        doorbell.sleep(1, LONG, || false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while doorbell.word().load(Ordering::SeqCst) & SLEEPING == 0 {
                    std::thread::yield_now();
                }
                doorbell.wake_sleeper();
            });
            doorbell.sleep(9, LONG, || true);
        });
    }
}
