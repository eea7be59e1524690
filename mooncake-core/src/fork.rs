//! Descriptors that children of a fork do not inherit.
//!
//! A forked child inherits every descriptor. A listening socket or a file lock is free only after
//! the last copy is closed, so a child that lives on, such as a worker of Python's
//! `multiprocessing`, would keep ports and files of its dead parent. In a child of `fork`, each
//! descriptor of a [`ParentOnly`] refers to `/dev/null` instead. Its number stays taken, so that a
//! destructor which runs in the child closes nothing else. A child that becomes another program
//! closes its copies then (`O_CLOEXEC`), as before.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
#[cfg(not(miri))]
use std::os::fd::{IntoRawFd, RawFd};
#[cfg(not(miri))]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// Number of descriptors that can be registered at a time. Children inherit any more.
const SLOTS: usize = 32 << 10;
const FREE: i32 = -1;

/// Registered descriptors. A table of fixed size, because a child of `fork` may neither allocate
/// nor lock.
static DESCRIPTORS: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];
/// Slot where the next search begins: mostly a free one.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// Descriptor of `/dev/null`.
static NULL: AtomicI32 = AtomicI32::new(FREE);

/// Listener, locked file or another owner of one descriptor that children of a fork do not inherit.
#[derive(Debug)]
pub struct ParentOnly<T> {
    // Dropped first: the number may belong to another descriptor as soon as the owner is gone.
    _slot: Option<Slot>,
    owner: T,
}

impl<T: AsFd> ParentOnly<T> {
    /// Registers the descriptor of `owner`. The owner must keep this descriptor for its life.
    pub fn new(owner: T) -> Self {
        Self { _slot: Slot::take(owner.as_fd().as_raw_fd()), owner }
    }

    /// Passes the descriptor to another owner, which must keep it for its life.
    ///
    /// # Errors
    /// The error of `pass_on`.
    pub fn try_map<R: AsFd, E>(self, pass_on: impl FnOnce(T) -> Result<R, E>) -> Result<ParentOnly<R>, E> {
        let Self { _slot, owner } = self;
        Ok(ParentOnly { _slot, owner: pass_on(owner)? })
    }
}

impl<T> Deref for ParentOnly<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.owner
    }
}

impl<T> DerefMut for ParentOnly<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.owner
    }
}

impl<T: AsFd> AsFd for ParentOnly<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.owner.as_fd()
    }
}

#[derive(Debug)]
struct Slot(usize);

impl Slot {
    fn take(descriptor: i32) -> Option<Self> {
        if !is_prepared() || crate::fault_injection::is_planted("fork-inherits") {
            return None;
        }
        let take = |slot: &AtomicI32| {
            slot.compare_exchange(FREE, descriptor, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let first = NEXT.load(Ordering::Relaxed);
        let slot = (first..first + SLOTS).map(|slot| slot % SLOTS).find(|slot| take(&DESCRIPTORS[*slot]))?;
        NEXT.store((slot + 1) % SLOTS, Ordering::Relaxed);
        Some(Self(slot))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        DESCRIPTORS[self.0].store(FREE, Ordering::Release);
    }
}

/// Returns whether children of a fork close the registered descriptors. The first call installs the
/// handler.
#[cfg(not(miri))]
fn is_prepared() -> bool {
    static PREPARED: OnceLock<bool> = OnceLock::new();
    *PREPARED.get_or_init(|| {
        let Ok(null) = std::fs::File::options().read(true).write(true).open("/dev/null") else {
            return false;
        };
        // Stays open for the life of the process.
        NULL.store(null.into_raw_fd(), Ordering::Release);
        // SAFETY: the handler makes only calls that are allowed in a child of `fork`.
        unsafe { libc::pthread_atfork(None, None, Some(release_in_child)) == 0 }
    })
}

#[cfg(miri)]
fn is_prepared() -> bool {
    false
}

/// Redirects the registered descriptors of a child, on its only thread, before `fork` returns
/// there.
#[cfg(not(miri))]
extern "C" fn release_in_child() {
    let null: RawFd = NULL.load(Ordering::Acquire);
    for slot in &DESCRIPTORS {
        let descriptor = slot.load(Ordering::Acquire);
        if descriptor != FREE {
            // SAFETY: `dup3` is async-signal-safe, and both numbers are open descriptors. A failure
            // could not be reported.
            unsafe { libc::dup3(null, descriptor, libc::O_CLOEXEC) };
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::memory::{HostMemory, lock_alone};
    use crate::testkit::ForkedChild;

    /// Lock held by each test: the child of another test inherits a descriptor that is open and not
    /// registered yet.
    static ALONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

    /// Returns the target of a descriptor of a child.
    fn descriptor(child: &ForkedChild, number: i32) -> String {
        let link = std::fs::read_link(format!("/proc/{}/fd/{number}", child.0));
        link.map(|to| to.display().to_string()).unwrap_or_default()
    }

    #[test]
    fn a_port_is_free_while_a_child_lives_on() {
        let _alone = ALONE.lock();
        let listener = ParentOnly::new(TcpListener::bind("127.0.0.1:0").unwrap());
        let at = listener.local_addr().unwrap();
        let child = ForkedChild::fork().unwrap();
        assert_eq!(descriptor(&child, listener.as_raw_fd()), "/dev/null");
        // The parent still accepts connections.
        let mut caller = TcpStream::connect(at).unwrap();
        drop(listener.accept().unwrap());
        assert_eq!(caller.read(&mut [0]).unwrap(), 0);
        drop(listener);
        TcpListener::bind(at).unwrap();
    }

    #[test]
    fn a_lock_is_free_while_a_child_lives_on() {
        let _alone = ALONE.lock();
        let path = std::env::temp_dir().join(format!("mooncake-fork-{}", std::process::id()));
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let memory = HostMemory::map_alone(open().unwrap(), 4096, None).unwrap();
        let child = ForkedChild::fork().unwrap();
        assert!(lock_alone(&open().unwrap()).is_err(), "the parent holds the lock");
        drop(memory);
        lock_alone(&open().unwrap()).unwrap();
        drop(child);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_dropped_owner_is_not_redirected() {
        let _alone = ALONE.lock();
        let first = ParentOnly::new(TcpListener::bind("127.0.0.1:0").unwrap());
        let number = first.as_raw_fd();
        drop(first);
        // Most likely the same number, now of a file that children may inherit.
        let file = File::open("/dev/zero").unwrap();
        let child = ForkedChild::fork().unwrap();
        if file.as_raw_fd() == number {
            assert_eq!(descriptor(&child, number), "/dev/zero");
        }
    }
}
