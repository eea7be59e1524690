//! Who is told of changes, for directories that live in one process.

use futures::StreamExt;
use futures::channel::mpsc::{UnboundedSender, unbounded};
use futures::stream::BoxStream;

use super::{MetaEvent, MetaValue};

/// Those who watch a directory. Whoever changes it tells them under the lock that the change is made under, so that all see changes in their order.
#[derive(Debug, Default)]
pub struct Watchers(Vec<(String, UnboundedSender<MetaEvent>)>);

impl Watchers {
    /// One more, who is told of changes under this prefix from now on.
    pub fn add(&mut self, prefix: &str) -> BoxStream<'static, MetaEvent> {
        let (sender, receiver) = unbounded();
        self.0.push((prefix.to_owned(), sender));
        receiver.boxed()
    }

    /// Tells of a change: the key's new value, `None` when it was deleted.
    pub fn tell(&mut self, key: &str, value: Option<&MetaValue>) {
        // A watcher that went away is dropped at the first change it misses.
        self.0.retain(|(prefix, sender)| {
            !key.starts_with(prefix.as_str())
                || sender.unbounded_send(MetaEvent { key: key.to_owned(), value: value.cloned() }).is_ok()
        });
    }
}
