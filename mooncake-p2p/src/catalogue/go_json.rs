//! Text of JSON strings as the encoder of Go writes it (`encoding/json`, Go 1.22 and later).

/// Appends a string in quotation marks. Characters that HTML gives a meaning, and the two line
/// separators of Unicode, are escaped.
pub(super) fn push_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            _ => out.push(c),
        }
    }
    out.push('"');
}

/// Appends a list, or `null` if it has no items, as Go writes a slice without an array.
pub(super) fn push_list<T>(out: &mut String, items: &[T], mut push: impl FnMut(&mut String, &T)) {
    if items.is_empty() {
        return out.push_str("null");
    }
    for (index, item) in items.iter().enumerate() {
        out.push(if index == 0 { '[' } else { ',' });
        push(out, item);
    }
    out.push(']');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_of_go() {
        let of = |text: &str| {
            let mut out = String::new();
            push_string(&mut out, text);
            out
        };
        // Output of `json.Marshal` of Go 1.22.
        assert_eq!(of("a/b:é\u{7f}"), "\"a/b:é\u{7f}\"");
        assert_eq!(of("\"\\\n\r\t\u{8}\u{c}\u{1}\u{1f}"), r#""\"\\\n\r\t\b\f\u0001\u001f""#);
        assert_eq!(of("<a&b>\u{2028}\u{2029}"), r#""\u003ca\u0026b\u003e\u2028\u2029""#);
    }
}
