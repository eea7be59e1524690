//! Queue of received notifications.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::handshake::{HandshakeConfig, Notification};

/// Queue of notifications in order, with a limit on their number and bytes.
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
    /// Adds a notification, unless the queue is full.
    pub(super) fn push(&self, notification: Notification, limits: &HandshakeConfig) -> bool {
        let mut waiting = self.waiting.lock();
        let bytes = waiting.bytes.saturating_add(notification.len());
        // A notification longer than the limit is accepted only into an empty queue.
        let has_space = waiting.queue.is_empty() || bytes <= limits.max_notification_bytes;
        if !has_space || waiting.queue.len() >= limits.max_notifications {
            return false;
        }
        waiting.bytes = bytes;
        waiting.queue.push_back(notification);
        self.arrived.notify_one();
        true
    }

    /// Takes all notifications.
    pub(super) fn take(&self) -> Vec<Notification> {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        waiting.queue.into()
    }

    /// Waits for the next notification. Returns `None` once the engine is closed and the queue is
    /// empty.
    pub(super) async fn next(&self) -> Option<Notification> {
        loop {
            let arrived = self.arrived.notified();
            {
                let mut waiting = self.waiting.lock();
                if let Some(next) = waiting.pop() {
                    if !waiting.queue.is_empty() {
                        // One wake-up may stand for several notifications, so the next consumer is
                        // woken too.
                        self.arrived.notify_one();
                    }
                    return Some(next);
                }
            }
            if self.closed.load(Ordering::SeqCst) {
                // Wakes the other consumers.
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
