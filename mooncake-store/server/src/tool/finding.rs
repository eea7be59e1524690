//! Findings of `mooncake doctor`.

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grade {
    Good,
    /// Possible problem.
    Hint,
    /// Not observable from here.
    Unknown,
    Bad,
}

/// Result of one check.
#[derive(Clone, Debug)]
pub(super) struct Finding {
    pub(super) subject: String,
    pub(super) grade: Grade,
    pub(super) found: String,
    pub(super) fix: String,
}

impl Finding {
    fn new(subject: &str, grade: Grade, found: impl Into<String>, fix: &str) -> Self {
        Self { subject: subject.into(), grade, found: found.into(), fix: fix.into() }
    }

    pub(super) fn good(subject: &str, found: impl Into<String>) -> Self {
        Self::new(subject, Grade::Good, found, "")
    }

    pub(super) fn hint(subject: &str, found: impl Into<String>, fix: &str) -> Self {
        Self::new(subject, Grade::Hint, found, fix)
    }

    pub(super) fn unknown(subject: &str, found: impl Into<String>) -> Self {
        Self::new(subject, Grade::Unknown, found, "")
    }

    pub(super) fn bad(subject: &str, found: impl Into<String>, fix: &str) -> Self {
        Self::new(subject, Grade::Bad, found, fix)
    }

    pub(super) fn word(&self) -> &'static str {
        match self.grade {
            Grade::Good => "ok",
            Grade::Hint => "note",
            Grade::Unknown => "?",
            Grade::Bad => "FAIL",
        }
    }
}
