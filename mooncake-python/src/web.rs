//! Requests of websites to HTTP servers in Python.

use mooncake_core::Error;
use mooncake_core::web_origin::{AllowedHosts, Guard, RequestHead};
use pyo3::prelude::*;

use crate::error::exception;

/// Rules by which an HTTP server refuses requests of websites.
#[pyclass(frozen, module = "mooncake._mooncake", name = "WebGuard")]
pub(crate) struct WebGuard(AllowedHosts);

#[pymethods]
impl WebGuard {
    /// Allows the names in a text with commas between them, and names of this server. Raises an
    /// `InvalidArgumentError` for a text with something else.
    #[new]
    fn new(py: Python<'_>, allowed: &str, own: Vec<String>) -> PyResult<Self> {
        let parsed = allowed.parse::<AllowedHosts>().map_err(|reason| {
            let text = format!(
                "cannot allow hosts: {reason}. allowed_hosts={allowed}; give names with commas between them"
            );
            exception(py, &Error::invalid(text))
        })?;
        Ok(Self(own.iter().fold(parsed, |hosts, name| hosts.with(name)).with_own_name()))
    }

    /// Returns why a request is refused, or `None` if it is served.
    ///
    /// `authority` is the host of the request line, if it has one. With `everything`, the rules
    /// hold for reads, too.
    fn refusal(
        &self,
        method: &str,
        authority: Option<&str>,
        headers: Vec<(String, Vec<u8>)>,
        everything: bool,
    ) -> Option<String> {
        let guard = if everything { Guard::Everything } else { Guard::Changes };
        let headers = headers.iter().map(|(name, value)| (name.as_str(), value.as_slice()));
        RequestHead::new(method, authority, headers).refusal(&self.0, guard)
    }
}
