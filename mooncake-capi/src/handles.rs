//! Objects of this process that C programs refer to by numbers.

use std::collections::BTreeMap;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::RwLock;

/// Number of the next object of any kind. No address is that small, so that no address is taken for
/// an object.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Objects of one kind, by number.
pub(crate) struct Handles<T> {
    kind: &'static str,
    objects: RwLock<BTreeMap<usize, Object<T>>>,
}

struct Object<T> {
    value: Arc<T>,
    /// Process that created the object. The threads of the object are in this process only.
    process: u32,
}

impl<T> Handles<T> {
    /// Creates a table without objects. Messages name the kind.
    pub(crate) const fn new(kind: &'static str) -> Self {
        Self { kind, objects: RwLock::new(BTreeMap::new()) }
    }

    /// Adds an object and returns its number.
    pub(crate) fn add(&self, value: T) -> usize {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let object = Object { value: Arc::new(value), process: process::id() };
        self.objects.write().insert(number, object);
        number
    }

    /// Returns the object of a number.
    pub(crate) fn find(&self, number: usize) -> Result<Arc<T>> {
        let objects = self.objects.read();
        let object = objects.get(&number).ok_or_else(|| self.unknown(number))?;
        self.usable(number, object)?;
        Ok(object.value.clone())
    }

    /// Removes an object and returns it.
    pub(crate) fn take(&self, number: usize) -> Result<Arc<T>> {
        let mut objects = self.objects.write();
        let object = objects.get(&number).ok_or_else(|| self.unknown(number))?;
        self.usable(number, object)?;
        objects.remove(&number).map(|object| object.value).ok_or_else(|| self.unknown(number))
    }

    /// Returns all objects of this process.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        let objects = self.objects.read();
        let own = objects.values().filter(|object| object.process == process::id());
        own.map(|object| object.value.clone()).collect()
    }

    /// Refuses an object of the parent process.
    fn usable(&self, number: usize, object: &Object<T>) -> Result<()> {
        if object.process == process::id() {
            return Ok(());
        }
        let kind = self.kind;
        let text = format!(
            "cannot use {kind} {number:#x}: it belongs to the process that forked this one; create another {kind} in this process"
        );
        Err(Error::new(ErrorCode::NotSupported, text))
    }

    #[cold]
    fn unknown(&self, number: usize) -> Error {
        Error::invalid(format!("unknown {} {number:#x}: it was destroyed, or never created", self.kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_found_by_number() {
        let (cups, plates) = (Handles::new("cup"), Handles::new("plate"));
        let (cup, plate) = (cups.add(1), plates.add(2));
        assert_eq!((*cups.find(cup).unwrap(), *plates.find(plate).unwrap()), (1, 2));
        // A number of another kind is unknown.
        assert!(cups.find(plate).is_err() && plates.find(cup).is_err() && cups.find(0).is_err());
        assert_eq!(*cups.take(cup).unwrap(), 1);
        assert!(cups.find(cup).is_err() && cups.take(cup).is_err());
    }

    #[test]
    fn objects_of_the_parent_are_refused() {
        let cups = Handles::new("cup");
        let cup = cups.add(1);
        cups.objects.write().get_mut(&cup).unwrap().process += 1;
        assert_eq!(cups.find(cup).unwrap_err().code(), ErrorCode::NotSupported);
        assert_eq!(cups.take(cup).unwrap_err().code(), ErrorCode::NotSupported);
    }
}
