//! Bugs that test builds contain on request, so that a test can prove that it detects them.

/// Planted bug. Each one reverts one rule of the control plane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Evidence about an earlier incarnation counts for the present one.
    StaleEvidence,
    /// A window stays open until its deadline.
    WindowNeverClosesEarly,
    /// The acknowledgement of an older view counts for a proposal.
    OldAcknowledgement,
    /// An agent takes a view of an epoch that it has with other content.
    EqualEpochApplied,
    /// A registration that extends a group takes the first of several matches.
    AmbiguousExtension,
    /// A replaced session keeps its endpoints and its active slots.
    ReplacedSessionKeepsSlots,
    /// The time of a stopped coordinator counts against all sessions.
    PauseCountsAsSilence,
    /// A registration attaches to an instance that the process has already left.
    GenerationsMixed,
    /// A request that arrives again is executed again.
    RequestsRunTwice,
    /// An agent registers with another coordinator.
    OtherCoordinator,
    /// A view changes without a new epoch when an endpoint is published.
    EndpointKeepsEpoch,
    /// An agent does not send unacknowledged evidence again.
    EvidenceLost,
    /// A deactivation waits for a failed rank as long as for a healthy one.
    FailedRankIsAwaited,
}

impl Bug {
    /// All bugs.
    pub const ALL: [Self; 13] = [
        Self::StaleEvidence,
        Self::WindowNeverClosesEarly,
        Self::OldAcknowledgement,
        Self::EqualEpochApplied,
        Self::AmbiguousExtension,
        Self::ReplacedSessionKeepsSlots,
        Self::PauseCountsAsSilence,
        Self::GenerationsMixed,
        Self::RequestsRunTwice,
        Self::OtherCoordinator,
        Self::EndpointKeepsEpoch,
        Self::EvidenceLost,
        Self::FailedRankIsAwaited,
    ];
}

/// Bug of one state machine, if it has one.
#[derive(Clone, Copy, Default, Debug)]
pub struct Planted(Option<Bug>);

impl Planted {
    /// Selects a bug.
    pub fn new(bug: Option<Bug>) -> Self {
        Self(bug)
    }

    /// Returns whether the state machine has this bug. A build without the feature `testkit` has
    /// none.
    #[inline]
    pub fn has(self, bug: Bug) -> bool {
        cfg!(any(test, feature = "testkit")) && self.0 == Some(bug)
    }
}
