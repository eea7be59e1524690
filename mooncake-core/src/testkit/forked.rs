//! Forked child processes.

use std::io::{self, Read};
use std::os::fd::AsRawFd;

/// Longest life of a child in seconds, unless it is ended earlier.
const LIFE: u32 = 180;

/// Forks a child that does nothing and lives on when its parent dies. Returns its process id once
/// the fork handlers of the child have run.
///
/// # Errors
/// Returns the error of the system.
pub fn fork_child() -> io::Result<u32> {
    let (mut ready, writer) = io::pipe()?;
    // SAFETY: the child makes only calls that are allowed there.
    let child = match unsafe { libc::fork() } {
        // SAFETY: all calls are allowed in a child, and the byte is a constant of the program.
        0 => unsafe {
            libc::write(writer.as_raw_fd(), b"!".as_ptr().cast(), 1);
            libc::close(writer.as_raw_fd());
            libc::alarm(LIFE);
            loop {
                libc::pause();
            }
        },
        child => u32::try_from(child).map_err(|_| io::Error::last_os_error())?,
    };
    drop(writer);
    ready.read_exact(&mut [0])?;
    Ok(child)
}

/// Forked process, killed when dropped. It need not be a child of this process.
#[derive(Debug)]
pub struct ForkedChild(pub u32);

impl ForkedChild {
    /// Forks a child of this process.
    ///
    /// # Errors
    /// Returns the errors of [`fork_child`].
    pub fn fork() -> io::Result<Self> {
        fork_child().map(Self)
    }
}

impl Drop for ForkedChild {
    fn drop(&mut self) {
        let Ok(number) = libc::pid_t::try_from(self.0) else { return };
        // SAFETY: the calls access no memory. `waitpid` ignores a child of another process.
        unsafe {
            libc::kill(number, libc::SIGKILL);
            libc::waitpid(number, std::ptr::null_mut(), 0);
        }
    }
}
