//! Absence of planted bugs: this build has none.

/// Planted bug, without a way to select it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bug {
    StaleEvidence,
    WindowNeverClosesEarly,
    OldAcknowledgement,
    EqualEpochApplied,
    AmbiguousExtension,
    ReplacedSessionKeepsSlots,
    PauseCountsAsSilence,
    GenerationsMixed,
    RequestsRunTwice,
    OtherCoordinator,
    EndpointKeepsEpoch,
    EvidenceLost,
}

/// Bug of one state machine: none.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Planted(());

impl Planted {
    #[inline(always)]
    pub(crate) const fn has(self, _bug: Bug) -> bool {
        false
    }
}
