//! Parameters of a query string.

pub(super) use mooncake_transport::http_server::{decoded, raw};

/// Returns a parameter, percent-decoded, with a space for each `+`. Returns `None` if the parameter
/// is absent, empty or not UTF-8.
pub(super) fn form_text(query: Option<&str>, name: &str) -> Option<String> {
    let value = form_bytes(raw(query, name)?);
    String::from_utf8(value).ok().filter(|text| !text.is_empty())
}

/// Decodes bytes like [`form_text`].
pub(super) fn form_bytes(value: &str) -> Vec<u8> {
    decoded(&value.replace('+', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_decoded() {
        assert_eq!(form_text(Some("t=a+b%2B"), "t").as_deref(), Some("a b+"));
        assert_eq!(form_text(Some("t=%ff"), "t"), None);
        assert_eq!(form_text(Some("t="), "t"), None);
    }
}
