//! What other engines have said and nobody has taken yet.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::handshake::{HandshakeConfig, Notification};

/// Messages in their order, as many as a peer may leave here.
#[derive(Default)]
pub(super) struct Inbox {
    waiting: Mutex<Waiting>,
    arrived: tokio::sync::Notify,
    closed: AtomicBool,
}

#[derive(Default)]
struct Waiting {
    queue: VecDeque<Notification>,
    bytes: usize,
}

impl Waiting {
    fn pop(&mut self) -> Option<Notification> {
        let next = self.queue.pop_front()?;
        self.bytes -= next.len();
        Some(next)
    }
}

impl Inbox {
    /// Takes a message, unless too many wait already, or too long ones.
    pub(super) fn push(&self, notification: Notification, limits: &HandshakeConfig) -> bool {
        let mut waiting = self.waiting.lock();
        let bytes = waiting.bytes.saturating_add(notification.len());
        // One that is longer than all together may be waits alone.
        let room = waiting.queue.is_empty() || bytes <= limits.max_notification_bytes;
        if !room || waiting.queue.len() >= limits.max_notifications {
            return false;
        }
        waiting.bytes = bytes;
        waiting.queue.push_back(notification);
        self.arrived.notify_one();
        true
    }

    /// All that wait.
    pub(super) fn take(&self) -> Vec<Notification> {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        waiting.queue.into()
    }

    /// The next one; `None` once the engine is closed and all have been taken.
    pub(super) async fn next(&self) -> Option<Notification> {
        loop {
            let arrived = self.arrived.notified();
            {
                let mut waiting = self.waiting.lock();
                if let Some(next) = waiting.pop() {
                    if !waiting.queue.is_empty() {
                        // One call may stand for many messages: another taker has its turn.
                        self.arrived.notify_one();
                    }
                    return Some(next);
                }
            }
            if self.closed.load(Ordering::SeqCst) {
                // For the other takers.
                self.arrived.notify_one();
                return None;
            }
            arrived.await;
        }
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.arrived.notify_one();
    }
}
