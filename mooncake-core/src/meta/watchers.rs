//! Watchers of directories that live in one process.

use futures::StreamExt;
use futures::channel::mpsc::{UnboundedSender, unbounded};
use futures::stream::BoxStream;

use super::{MetaEvent, MetaValue};

/// Watchers of a directory. The directory notifies them under the lock of the change, so that all
/// watchers see changes in order.
#[derive(Debug, Default)]
pub struct Watchers(Vec<(String, UnboundedSender<MetaEvent>)>);

impl Watchers {
    /// Adds a watcher of later changes under this prefix.
    pub fn add(&mut self, prefix: &str) -> BoxStream<'static, MetaEvent> {
        let (sender, receiver) = unbounded();
        self.0.push((prefix.to_owned(), sender));
        receiver.boxed()
    }

    /// Notifies the watchers of a change: the new value of the key, or `None` when it was deleted.
    pub fn notify(&mut self, key: &str, value: Option<&MetaValue>) {
        // The first change that a dropped watcher misses removes it.
        self.0.retain(|(prefix, sender)| {
            !key.starts_with(prefix.as_str())
                || sender.unbounded_send(MetaEvent { key: key.to_owned(), value: value.cloned() }).is_ok()
        });
    }
}
