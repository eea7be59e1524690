//! Parameters of a query, as forms send them.

pub(super) use mooncake_transport::http_server::{decoded, raw};

/// A parameter, percent-decoded, with a `+` for a space; `None` too when it is empty or no text.
pub(super) fn form_text(query: Option<&str>, name: &str) -> Option<String> {
    let value = form_bytes(raw(query, name)?);
    String::from_utf8(value).ok().filter(|text| !text.is_empty())
}

/// As [`form_text`] for bytes.
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
