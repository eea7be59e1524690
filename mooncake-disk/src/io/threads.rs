//! I/O engine of threads that call pread and pwrite.

use std::io;
use std::sync::Arc;

use super::worker::spawn;
use crate::config::DiskConfig;
use crate::queue::Queue;
use crate::run::{BouncePool, Io, Run};

pub(super) fn start(config: &DiskConfig, queue: &Arc<Queue>) -> io::Result<()> {
    for _ in 0..config.threads {
        let own_queue = queue.clone();
        let mut bounces = BouncePool::new(config.piece_bytes, 1, config.zero_copy);
        let body = move || {
            while let Some(job) = own_queue.wait() {
                if let Some(run) = Run::begin(job, &mut bounces) {
                    run_job(run, &mut bounces);
                }
            }
        };
        spawn("disk-io", body).inspect_err(|_| queue.close())?;
    }
    Ok(())
}

fn run_job(mut run: Run, bounces: &mut BouncePool) {
    loop {
        let mut io = run.io();
        let outcome = match run.inject(&mut io) {
            Ok(()) => call(io),
            Err(Some(error)) => Err(error),
            // The thread would hang with the request; only the memory of the run is leaked here.
            Err(None) => return std::mem::forget(run),
        };
        if let Some(result) = run.handle_result(outcome) {
            return run.end(result, bounces);
        }
    }
}

fn call(io: Io) -> io::Result<usize> {
    let offset = libc::off_t::try_from(io.offset)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "offset exceeds the file size limit"))?;
    let (ptr, len) = (io.ptr.as_ptr().cast::<libc::c_void>(), io.len);
    let transferred = match io.write {
        // SAFETY: the run keeps the file open and the bytes allocated until it gets the result.
        true => unsafe { libc::pwrite(io.fd, ptr.cast_const(), len, offset) },
        // SAFETY: as above, and the bytes have no other user.
        false => unsafe { libc::pread(io.fd, ptr, len, offset) },
    };
    usize::try_from(transferred).map_err(|_| io::Error::last_os_error())
}
