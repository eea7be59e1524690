//! Parts that the engines have in common.

use std::io;

/// Starts a named thread.
pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
}

/// Returns the fault that a test injects into a request, if any.
#[cfg(feature = "testkit")]
pub(super) fn injected(run: &crate::run::Run, io: &mut crate::run::Io) -> Option<crate::fault::IoFault> {
    use crate::fault::{IoFault, IoRequest};
    let faults = run.queue().faults.as_ref()?;
    match faults.fault(IoRequest { write: io.write, offset: io.offset, len: io.len }) {
        IoFault::None => None,
        IoFault::Short(len) => {
            let align = run.align();
            io.len = io.len.min((len - len % align).max(align));
            None
        }
        fault => Some(fault),
    }
}
