//! Token of HTTP metadata servers.

use std::fmt;

use mooncake_core::{Error, Result};

/// Maximum length of a token in bytes.
const MAX: usize = 4096;

/// Secret that a server and its clients share. An empty token is none.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct HttpToken(String);

impl HttpToken {
    /// Returns whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks that a header can carry the token.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for more than 4096 bytes, and for spaces and other characters than visible
    /// ASCII. The error does not contain the token.
    pub fn check(&self) -> Result<()> {
        let fits = self.0.len() <= MAX && self.0.bytes().all(|byte| byte.is_ascii_graphic());
        if fits {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "cannot use the token of the metadata server: a token has at most {MAX} visible ASCII \
             characters. len={}; set another one in MC_METADATA_HTTP_TOKEN",
            self.0.len()
        )))
    }

    /// Returns the value of the header `Authorization`, if there is a token.
    pub fn authorization(&self) -> Option<String> {
        (!self.is_empty()).then(|| format!("Bearer {}", self.0))
    }

    /// Returns whether the value of a header `Authorization` contains this token. The time does not
    /// depend on the position of the first wrong byte.
    pub fn accepts(&self, authorization: Option<&[u8]>) -> bool {
        const SCHEME: &[u8] = b"bearer ";
        let Some((scheme, token)) = authorization.and_then(|value| value.split_at_checked(SCHEME.len()))
        else {
            return self.is_empty();
        };
        let own = self.0.as_bytes();
        let differences = own.iter().zip(token).fold(0, |all, (own, given)| all | (own ^ given));
        self.is_empty() || scheme.eq_ignore_ascii_case(SCHEME) && own.len() == token.len() && differences == 0
    }
}

impl From<&str> for HttpToken {
    fn from(token: &str) -> Self {
        Self(token.to_owned())
    }
}

impl fmt::Debug for HttpToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "no token" } else { "a token" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_token_is_accepted() {
        let token = HttpToken::from("secret");
        assert_eq!(token.authorization().as_deref(), Some("Bearer secret"));
        for right in ["Bearer secret", "bearer secret", "BEARER secret"] {
            assert!(token.accepts(Some(right.as_bytes())), "{right}");
        }
        for wrong in [
            "",
            "secret",
            "Bearer",
            "Bearer ",
            "Bearer secre",
            "Bearer secrets",
            "Bearer Secret",
            "Basic secret",
            "Bearer  secret",
        ] {
            assert!(!token.accepts(Some(wrong.as_bytes())), "{wrong}");
        }
        assert!(!token.accepts(None));
        let none = HttpToken::default();
        assert!(none.accepts(None) && none.accepts(Some(b"x")) && none.accepts(Some(b"Bearer x")));
        assert_eq!(none.authorization(), None);
    }

    #[test]
    fn a_token_is_not_printed() {
        assert_eq!(format!("{:?} {:?}", HttpToken::from("secret"), HttpToken::default()), "a token no token");
        for wrong in ["a b", "a\n", "\u{fc}", &"x".repeat(4097)] {
            let error = HttpToken::from(wrong).check().unwrap_err().to_string();
            assert!(error.contains("MC_METADATA_HTTP_TOKEN") && !error.contains(wrong), "{error}");
        }
        HttpToken::from("x".repeat(4096).as_str()).check().unwrap();
        HttpToken::default().check().unwrap();
    }
}
