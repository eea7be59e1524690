//! Parameters of a query, raw and percent-decoded.

/// Returns a parameter as it was sent.
pub fn raw<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    query?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then_some(value)
    })
}

/// Returns a parameter of a query, percent-decoded. A `+` stays a `+`, because keys are not forms.
/// An invalid escape stays unchanged.
pub fn parameter(query: Option<&str>, name: &str) -> Option<Vec<u8>> {
    raw(query, name).map(decoded)
}

/// Decodes percent escapes. An invalid escape stays unchanged.
pub fn decoded(value: &str) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [byte, tail @ ..] = rest {
        let hex = |at: usize| tail.get(at).and_then(|digit| (*digit as char).to_digit(16));
        if *byte == b'%'
            && let (Some(high), Some(low)) = (hex(0), hex(1))
        {
            decoded.push((high * 16 + low) as u8);
            rest = &tail[2..];
        } else {
            decoded.push(*byte);
            rest = tail;
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_once() {
        let key = |query| parameter(Some(query), "key");
        assert_eq!(key("a=1&key=mooncake%2Fram%2fn%3A1").as_deref(), Some(&b"mooncake/ram/n:1"[..]));
        assert_eq!(key("key=a+b%25%2").as_deref(), Some(&b"a+b%%2"[..]));
        assert_eq!(key("key=%00%ff").as_deref(), Some(&[0, 0xff][..]));
        assert_eq!(key("key=").as_deref(), Some(&b""[..]));
        assert_eq!(key("keys=1&x"), None);
        assert_eq!(parameter(None, "key"), None);
    }
}
