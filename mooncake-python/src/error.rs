//! Errors: the integer codes that calls return, the last error of each object, and the exceptions.

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::{Error, ErrorCode, ErrorKind};
use parking_lot::Mutex;
use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(mooncake, MooncakeError, PyRuntimeError, "Base class of mooncake's exceptions.");
create_exception!(mooncake, InvalidArgumentError, MooncakeError, "Invalid argument or call.");
create_exception!(mooncake, NotFoundError, MooncakeError, "No such object, segment, client or task.");
create_exception!(mooncake, NoSpaceError, MooncakeError, "Not enough free space.");
create_exception!(mooncake, BusyError, MooncakeError, "Object is in use, being written, or already exists.");
create_exception!(
    mooncake,
    UnavailableError,
    MooncakeError,
    "Master or client is unreachable, or a call timed out."
);
create_exception!(mooncake, CorruptError, MooncakeError, "Bytes differ from those written.");
create_exception!(
    mooncake,
    UnsupportedError,
    MooncakeError,
    "Feature is not built, not enabled, or not possible on this host."
);
create_exception!(mooncake, ForkedError, MooncakeError, "Use of mooncake in the child of a fork.");

/// Adds the exceptions to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    for (name, class) in [
        ("MooncakeError", py.get_type::<MooncakeError>()),
        ("InvalidArgumentError", py.get_type::<InvalidArgumentError>()),
        ("NotFoundError", py.get_type::<NotFoundError>()),
        ("NoSpaceError", py.get_type::<NoSpaceError>()),
        ("BusyError", py.get_type::<BusyError>()),
        ("UnavailableError", py.get_type::<UnavailableError>()),
        ("CorruptError", py.get_type::<CorruptError>()),
        ("UnsupportedError", py.get_type::<UnsupportedError>()),
        ("ForkedError", py.get_type::<ForkedError>()),
    ] {
        module.add(name, class)?;
    }
    Ok(())
}

/// Returns the exception of an error, with its number as `code`.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    exception_of(py, error, error.to_string())
}

/// Returns the exception that every call raises in the child of a fork.
pub(crate) fn forked(py: Python<'_>) -> PyErr {
    let raised = ForkedError::new_err(
        "cannot use mooncake: this process was forked after mooncake was used in it, and its \
         connections belong to the parent; start workers with the `spawn` method, or use mooncake \
         only after the fork",
    );
    let _ = raised.value(py).setattr("code", ErrorCode::NotSupported.number());
    raised
}

fn exception_of(py: Python<'_>, error: &Error, text: String) -> PyErr {
    let raised = match error.kind() {
        ErrorKind::NotFound => NotFoundError::new_err(text),
        ErrorKind::NoSpace => NoSpaceError::new_err(text),
        ErrorKind::Busy | ErrorKind::AlreadyExists => BusyError::new_err(text),
        ErrorKind::Invalid | ErrorKind::VersionMismatch => InvalidArgumentError::new_err(text),
        ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::Expired => UnavailableError::new_err(text),
        ErrorKind::Corrupt => CorruptError::new_err(text),
        ErrorKind::Unsupported => UnsupportedError::new_err(text),
        _ => MooncakeError::new_err(text),
    };
    // If `code` cannot be set, the exception is raised without it.
    let _ = raised.value(py).setattr("code", error.code().number());
    raised
}

/// Returns the error of a response that has fewer results than the request has items.
pub(crate) fn missing_result<T>() -> mooncake_core::Result<T> {
    Err(Error::internal("the response has fewer results than the request has items"))
}

/// Last error of a store or engine.
#[pyclass(frozen, get_all, module = "mooncake", name = "LastError")]
#[derive(Clone)]
pub(crate) struct LastError {
    /// Number that the call returned.
    code: i32,
    /// Name of the code in Mooncake C++.
    name: &'static str,
    /// Description of the error and, where known, how to fix it.
    message: String,
    /// Client or master that the error concerns. Empty if there is none.
    peer: String,
    /// Time of day of the error, in seconds since 1970 UTC. A later call that succeeds does not
    /// change it.
    time: f64,
}

#[pymethods]
impl LastError {
    fn __repr__(&self) -> String {
        format!(
            "LastError(code={}, name='{}', message={:?}, peer={:?}, time={:.3})",
            self.code, self.name, self.message, self.peer, self.time
        )
    }

    fn __str__(&self) -> String {
        self.message.clone()
    }
}

impl LastError {
    pub(crate) fn exception(&self, py: Python<'_>) -> PyErr {
        // The message already contains the name of the code.
        let error = Error::new(ErrorCode::from_number(self.code), String::new());
        exception_of(py, &error, self.message.clone())
    }
}

impl From<&Error> for LastError {
    fn from(error: &Error) -> Self {
        let message = error.to_string();
        let after = ["peer ", "target "].iter().find_map(|word| message.split_once(word));
        let peer = after.map_or("", |(_, rest)| {
            rest.split(|c: char| c.is_whitespace() || c == ',').next().unwrap_or("").trim_end_matches(':')
        });
        let time = SystemClock::new().wall_ms() as f64 / 1e3;
        Self { code: error.code().number(), name: error.code().name(), peer: peer.to_owned(), message, time }
    }
}

/// Last error of one store or engine.
#[derive(Default)]
pub(crate) struct Errors(Mutex<Option<LastError>>);

impl Errors {
    /// Records an error and returns its number.
    pub(crate) fn record(&self, error: &Error) -> i32 {
        tracing::debug!("{error}");
        *self.0.lock() = Some(error.into());
        error.code().number()
    }

    /// Returns 0, or records the error and returns its number.
    pub(crate) fn code<T>(&self, outcome: mooncake_core::Result<T>) -> i32 {
        outcome.map_or_else(|error| self.record(&error), |_| 0)
    }

    /// Clears the last error.
    pub(crate) fn clear(&self) {
        *self.0.lock() = None;
    }

    /// Returns the last error.
    pub(crate) fn last(&self) -> Option<LastError> {
        self.0.lock().clone()
    }
}
