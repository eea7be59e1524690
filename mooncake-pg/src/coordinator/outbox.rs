//! Effects of a coordinator: messages and closed connections.

use crate::protocol::{ConnectionId, ToAgent};

/// Action that the owner of a coordinator carries out, in order.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// Sends a message.
    Send {
        /// Connection of the message.
        connection: ConnectionId,
        /// Content of the message.
        message: ToAgent,
    },
    /// Closes a connection after the messages before.
    Close(ConnectionId),
}

/// Effects that are not carried out yet.
#[derive(Debug, Default)]
pub(super) struct Outbox(Vec<Effect>);

impl Outbox {
    pub(super) fn send(&mut self, connection: Option<ConnectionId>, message: ToAgent) {
        if let Some(connection) = connection {
            self.0.push(Effect::Send { connection, message });
        }
    }

    pub(super) fn close(&mut self, connection: ConnectionId) {
        self.0.push(Effect::Close(connection));
    }

    pub(super) fn drain_into(&mut self, effects: &mut Vec<Effect>) {
        effects.append(&mut self.0);
    }
}
