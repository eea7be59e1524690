//! State of the check of the address that this client advertises.

use mooncake_core::clock::Moment;

/// State of the check.
#[derive(Debug, Default)]
pub(crate) struct AddressState {
    pub(crate) next: NextStep,
    /// Last finding that was logged.
    pub(crate) finding: Option<String>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum NextStep {
    /// The master is asked to check the address.
    #[default]
    Request,
    /// The master is asked for the outcome.
    Fetch,
    /// The address leads to this client, or this master does not check addresses.
    None,
    /// The address is checked again at that time, because it does not lead to this client.
    RepeatAt(Moment),
}

impl AddressState {
    /// Makes the next heartbeat check the address.
    pub(crate) fn renew(&mut self) {
        self.next = NextStep::Request;
    }
}
