//! Events about stored and removed objects, published over ZeroMQ in the format of Mooncake C++.
//! Routers use them to send requests to nodes with cached data. Events about look-ups, which
//! Mooncake C++ lacks, make traces.

mod payload;
mod subscribers;

use std::borrow::Cow;
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

use self::payload::{Event, LookUp, ObjectEvent, message};
use self::subscribers::Subscribers;
use super::event_stats::EventStats;
use crate::config::EventsConfig;
use mooncake_master::Journal;
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::message::{BatchExistKey, BatchProbeKey, ExistKey, LocatePrefix, ProbeKey, Request};
use mooncake_protocol::pack::decode;

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
    /// Sum of the weights of the events.
    weight: usize,
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
        queue: Mutex::new(Queue { events: VecDeque::new(), weight: 0, next_event: 1, next_message: 1 }),
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
    fn push_object(&self, stored: bool, tenant: &str, key: &ObjectKey, group: &str, session: Option<&[u8]>) {
        let (group, session) = (group.to_owned(), session.map(Box::from));
        let event = ObjectEvent { stored, tenant: shared(tenant), key: key.clone(), group, session };
        self.push(Event::Object(event));
    }

    fn push(&self, event: Event) {
        let mut queue = self.queue.lock();
        let is_full = |weight| self.config.capacity != 0 && weight > self.config.capacity;
        if matches!(event, Event::LookUp(_)) && is_full(queue.weight + event.weight()) {
            // Routers need the events about objects more.
            queue.next_message += 1;
            self.counts.dropped.fetch_add(1, Relaxed);
            return;
        }
        queue.weight += event.weight();
        queue.events.push_back(event);
        while is_full(queue.weight) {
            let Some(oldest) = queue.events.pop_front() else { break };
            queue.weight -= oldest.weight();
            queue.next_message += 1;
            self.counts.dropped.fetch_add(1, Relaxed);
        }
        drop(queue);
        self.filled.notify_one();
    }

    /// Publishes the keys of a call that looks objects up, if the settings want it. Other calls
    /// have no effect.
    pub(super) fn observe(&self, function: u32, body: &[u8]) {
        if !self.config.look_ups {
            return;
        }
        let looked_up = match function {
            ExistKey::FUNCTION => decode::<ExistKey<'_>>(body).map(|call| (vec![call.key], call.tenant)),
            ProbeKey::FUNCTION => decode::<ProbeKey<'_>>(body).map(|call| (vec![call.key], call.tenant)),
            BatchExistKey::FUNCTION => {
                decode::<BatchExistKey<'_>>(body).map(|call| (call.keys.into_owned(), call.tenant))
            }
            BatchProbeKey::FUNCTION => {
                decode::<BatchProbeKey<'_>>(body).map(|call| (call.keys.into_owned(), call.tenant))
            }
            LocatePrefix::FUNCTION => {
                decode::<LocatePrefix<'_>>(body).map(|call| (call.keys.into_owned(), call.tenant))
            }
            _ => return,
        };
        // The master has refused a call that cannot be decoded.
        let Ok((keys, tenant)) = looked_up else { return };
        if !keys.is_empty() {
            let tenant = if tenant.is_empty() { DEFAULT_TENANT } else { tenant };
            self.push(Event::LookUp(LookUp::new(shared(tenant), &keys)));
        }
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
            // A subscriber that decodes only objects refuses a message with a look-up.
            let kind = queue.events.front().map(std::mem::discriminant)?;
            let alike =
                queue.events.iter().take(BATCH).take_while(|one| std::mem::discriminant(*one) == kind);
            let count = alike.count();
            let taken: Vec<Event> = queue.events.drain(..count).collect();
            let mut events = Vec::with_capacity(count);
            for event in taken {
                queue.weight -= event.weight();
                if !event.has_hash() {
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

/// Returns the name of a tenant, without an allocation for the usual one.
fn shared(tenant: &str) -> Cow<'static, str> {
    if tenant == DEFAULT_TENANT { DEFAULT_TENANT.into() } else { tenant.to_owned().into() }
}

impl Journal for Feed {
    fn stored(&self, tenant: &str, key: &ObjectKey, group: &str, session: Option<&[u8]>) {
        self.push_object(true, tenant, key, group, session);
    }

    fn removed(&self, tenant: &str, key: &ObjectKey, group: &str) {
        self.push_object(false, tenant, key, group, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::clock::ManualClock;
    use mooncake_protocol::pack::encode;

    /// Routers need each change of an object; a trace may lack a look-up.
    #[tokio::test]
    async fn a_full_queue_drops_look_ups_and_keeps_objects() {
        let config = EventsConfig {
            host: "127.0.0.1".into(),
            port: 0,
            capacity: 3,
            look_ups: true,
            ..EventsConfig::default()
        };
        let (feed, _publisher, _) = start(&config, Arc::new(ManualClock::new())).await.unwrap();
        let look_up = |keys: &[&[u8]]| {
            let mut body = Vec::new();
            encode(&BatchExistKey { keys: keys.into(), tenant: "" }, &mut body);
            feed.observe(BatchExistKey::FUNCTION, &body);
        };
        let key = ObjectKey::new("a").unwrap();
        // The publisher does not run before the next wait.
        feed.stored(DEFAULT_TENANT, &key, "", None);
        feed.removed(DEFAULT_TENANT, &key, "");
        look_up(&[b"a", b"b"]);
        assert_eq!((feed.queue.lock().events.len(), feed.stats().dropped), (2, 1));
        look_up(&[b"a", b"a"]);
        assert_eq!((feed.queue.lock().weight, feed.stats().dropped), (3, 1));
        feed.stored(DEFAULT_TENANT, &key, "", None);
        let queue = feed.queue.lock();
        let kinds: Vec<_> = queue.events.iter().map(|event| matches!(event, Event::Object(_))).collect();
        assert_eq!((kinds, queue.weight, queue.next_message), (vec![true, false, true], 3, 3));
    }
}
