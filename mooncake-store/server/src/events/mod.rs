//! Events about stored and removed objects, published over ZeroMQ in the format of Mooncake C++.
//! Routers use them to send requests to nodes with cached data.

mod payload;
mod subscribers;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_core::clock::SharedClock;
use mooncake_core::fork::ParentOnly;
use mooncake_core::host_port;
use mooncake_core::ids::ObjectKey;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use self::payload::{Event, message};
use self::subscribers::Subscribers;
use super::event_stats::EventStats;
use crate::block_key::hash_of;
use crate::config::EventsConfig;
use mooncake_master::Journal;
use mooncake_protocol::api::DEFAULT_TENANT;

/// Maximum number of events in one message.
const BATCH: usize = 64;

/// Queue of unpublished events.
#[derive(Debug)]
pub(super) struct Feed {
    config: EventsConfig,
    clock: SharedClock,
    queue: Mutex<Queue>,
    filled: Notify,
    subscribers: Subscribers,
    counts: Counts,
}

#[derive(Debug)]
struct Queue {
    events: VecDeque<Event>,
    next_event: u64,
    /// Number of the next message. Each lost event skips a number, so that subscribers notice the
    /// loss.
    next_message: u64,
}

#[derive(Debug, Default)]
struct Counts {
    batches: AtomicU64,
    events: AtomicU64,
    dropped: AtomicU64,
    without_hash: AtomicU64,
}

/// Tasks of a feed. They end on drop.
#[derive(Debug)]
pub(super) struct Publisher {
    tasks: [tokio::task::JoinHandle<()>; 2],
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Binds the port and starts to publish.
pub(super) async fn start(
    config: &EventsConfig,
    clock: SharedClock,
) -> Result<(Arc<Feed>, Publisher, SocketAddr)> {
    let address = host_port::join(&config.host, config.port);
    let refused = |error: std::io::Error| {
        let text = format!("cannot publish events at {address} (--kv_events_bind_endpoint): {error}");
        Error::new(ErrorCode::RpcFail, text).with_source(error)
    };
    let listener = ParentOnly::new(TcpListener::bind(&address).await.map_err(refused)?);
    let at = listener.local_addr().map_err(refused)?;
    let feed = Arc::new(Feed {
        config: config.clone(),
        clock,
        queue: Mutex::new(Queue { events: VecDeque::new(), next_event: 1, next_message: 1 }),
        filled: Notify::new(),
        subscribers: Subscribers::default(),
        counts: Counts::default(),
    });
    let tasks = [
        tokio::spawn(feed.clone().publish()),
        tokio::spawn(subscribers::accept(listener, feed.subscribers.clone(), subscribers::MAX_SUBSCRIBERS)),
    ];
    Ok((feed, Publisher { tasks }, at))
}

impl Feed {
    fn push(&self, stored: bool, tenant: &str, key: &ObjectKey, group: &str, session: Option<&[u8]>) {
        let tenant = if tenant == DEFAULT_TENANT { DEFAULT_TENANT.into() } else { tenant.to_owned().into() };
        let (group, session) = (group.to_owned(), session.map(Box::from));
        let event = Event { stored, tenant, key: key.clone(), group, session };
        let mut queue = self.queue.lock();
        if self.config.capacity != 0 && queue.events.len() >= self.config.capacity {
            queue.events.pop_front();
            queue.next_message += 1;
            self.counts.dropped.fetch_add(1, Relaxed);
        }
        queue.events.push_back(event);
        drop(queue);
        self.filled.notify_one();
    }

    async fn publish(self: Arc<Self>) {
        loop {
            match self.next_message() {
                Some(message) => {
                    self.subscribers.send(&message);
                    // Yield, in case events never end.
                    tokio::task::yield_now().await;
                }
                None => self.filled.notified().await,
            }
        }
    }

    /// Returns the next message, if there are events.
    fn next_message(&self) -> Option<bytes::Bytes> {
        let mut queue = self.queue.lock();
        loop {
            let count = queue.events.len().min(BATCH);
            if count == 0 {
                return None;
            }
            let taken: Vec<Event> = queue.events.drain(..count).collect();
            let mut events = Vec::with_capacity(count);
            for event in taken {
                if hash_of(event.key.as_bytes()).is_none() {
                    self.counts.without_hash.fetch_add(1, Relaxed);
                    if !self.config.object_key {
                        continue;
                    }
                }
                events.push((queue.next_event, event));
                queue.next_event += 1;
            }
            if events.is_empty() {
                continue;
            }
            let number = queue.next_message;
            queue.next_message += 1;
            drop(queue);
            self.counts.batches.fetch_add(1, Relaxed);
            self.counts.events.fetch_add(events.len() as u64, Relaxed);
            return Some(message(&self.config, number, self.clock.wall_ms(), &events));
        }
    }

    pub(super) fn stats(&self) -> EventStats {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        EventStats {
            batches: read(&self.counts.batches),
            events: read(&self.counts.events),
            dropped: read(&self.counts.dropped),
            without_hash: read(&self.counts.without_hash),
        }
    }
}

impl Journal for Feed {
    fn stored(&self, tenant: &str, key: &ObjectKey, group: &str, session: Option<&[u8]>) {
        self.push(true, tenant, key, group, session);
    }

    fn removed(&self, tenant: &str, key: &ObjectKey, group: &str) {
        self.push(false, tenant, key, group, None);
    }
}
