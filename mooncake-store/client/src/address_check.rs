//! Check of the address that this client advertises. The master connects to it, because other nodes
//! do, too: this host may reach an address that others do not.

use std::time::Duration;

use mooncake_core::{Error, Result};
use mooncake_protocol::master_client::is_missing_call;
use mooncake_protocol::message::CheckAddress;
use mooncake_protocol::wire::AddressCheck;
use mooncake_transport::Transport;

use crate::address_state::NextStep;
use crate::config::AddressPolicy;
use crate::deadline::Deadline;
use crate::state::{Client, Inner};

/// Time between two checks of an address that does not lead to this client.
const REPEAT_AFTER: Duration = Duration::from_secs(30);
/// Time between two requests of a client that waits for the outcome.
const POLL: Duration = Duration::from_millis(20);

impl<T: Transport> Inner<T> {
    /// Asks the master whether the address of this client leads to it, until that is known.
    pub(crate) async fn check_address(&self, deadline: &Deadline) -> Result<()> {
        let Some(endpoint) = self.engine.handshake_addr().map(ToString::to_string) else { return Ok(()) };
        let now = self.config.clock.now();
        let again = match self.address_state.lock().next {
            NextStep::None => return Ok(()),
            NextStep::RepeatAt(at) if now < at => return Ok(()),
            NextStep::Request | NextStep::RepeatAt(_) => true,
            NextStep::Fetch => false,
        };
        if self.config.address_check == AddressPolicy::Off || !self.has_segments() {
            return Ok(());
        }
        let instance = self.engine.instance();
        let call = self.master.call(CheckAddress { client: self.id, endpoint: &endpoint, instance, again });
        let check = match deadline.bound("checking the address", call).await {
            Err(error) if is_missing_call(&error) => AddressCheck { is_over: true, finding: None },
            check => check?,
        };
        let mut state = self.address_state.lock();
        if !check.is_over {
            state.next = NextStep::Fetch;
            return Ok(());
        }
        state.next = match check.finding {
            None => NextStep::None,
            Some(_) => NextStep::RepeatAt(now.after(REPEAT_AFTER)),
        };
        match &check.finding {
            Some(finding) if state.finding != check.finding => tracing::warn!(
                client = %self.id, advertised = endpoint, listens_at = self.listens_at(), finding,
                "other nodes do not reach this client at its address; set local_hostname"
            ),
            None if state.finding.is_some() => {
                tracing::info!(client = %self.id, advertised = endpoint, "the address leads to this client");
            }
            Some(_) | None => {}
        }
        state.finding = check.finding;
        Ok(())
    }

    /// Returns the address at which the ports of this client listen, for messages.
    fn listens_at(&self) -> String {
        self.bound.map_or_else(|| mooncake_transport::net::default_host().to_string(), |ip| ip.to_string())
    }
}

impl<T: Transport> Client<T> {
    /// Waits until the master has checked the address of this client.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the address does not lead to this client; errors of the calls.
    pub(crate) async fn require_own_address(&self, deadline: &Deadline) -> Result<()> {
        if self.inner.config.address_check != AddressPolicy::Refuse {
            return Ok(());
        }
        loop {
            self.inner.check_address(deadline).await?;
            let (next, finding) = {
                let state = self.inner.address_state.lock();
                (state.next, state.finding.clone())
            };
            if let (NextStep::RepeatAt(_), Some(finding)) = (next, finding) {
                let advertised =
                    self.inner.engine.handshake_addr().map_or_else(String::new, ToString::to_string);
                let own = self.inner.listens_at();
                return Err(Error::invalid(format!(
                    "cannot join: the own address does not lead to this client: {finding}. \
                     advertised={advertised} listens_at={own}; \
                     give an address of this process (local_hostname)"
                )));
            }
            if !matches!(next, NextStep::Fetch) || deadline.is_over() {
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
    }
}
