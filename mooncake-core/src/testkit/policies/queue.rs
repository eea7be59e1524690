//! [`Queue`]: items in order of arrival.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Items in order of arrival, each at most once.
#[derive(Debug)]
pub(super) struct Queue<T> {
    next: u64,
    places: HashMap<T, u64>,
    order: BTreeMap<u64, T>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { next: 0, places: HashMap::new(), order: BTreeMap::new() }
    }
}

impl<T: Copy + Eq + Hash> Queue<T> {
    /// Puts an item at the young end. An item that is present moves there.
    pub(super) fn push(&mut self, item: T) {
        self.remove(item);
        self.places.insert(item, self.next);
        self.order.insert(self.next, item);
        self.next += 1;
    }

    /// Removes an item. Returns whether it was present.
    pub(super) fn remove(&mut self, item: T) -> bool {
        let place = self.places.remove(&item);
        place.is_some_and(|place| self.order.remove(&place).is_some())
    }

    /// Removes the oldest item.
    pub(super) fn pop(&mut self) -> Option<T> {
        let (_, item) = self.order.pop_first()?;
        self.places.remove(&item);
        Some(item)
    }

    /// Puts `new`, which is not present, into the place of `old`.
    pub(super) fn replace(&mut self, old: T, new: T) {
        if let Some(place) = self.places.remove(&old) {
            self.places.insert(new, place);
            self.order.insert(place, new);
        }
    }

    pub(super) fn contains(&self, item: T) -> bool {
        self.places.contains_key(&item)
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn oldest(&self) -> Option<T> {
        self.order.values().next().copied()
    }

    /// Returns the items, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.order.values().copied()
    }

    /// Returns the next younger item.
    pub(super) fn newer(&self, item: T) -> Option<T> {
        let place = self.places.get(&item)?;
        self.order.range(place + 1..).next().map(|(_, item)| *item)
    }
}

// Miri would take long, and there is no unsafe code here to check.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn items_keep_their_order() {
        let mut queue = Queue::default();
        [1, 2, 3, 4, 2].into_iter().for_each(|item| queue.push(item));
        queue.replace(3, 7);
        assert_eq!(queue.iter().collect::<Vec<_>>(), [1, 7, 4, 2]);
        assert!(queue.remove(7) && !queue.remove(7) && !queue.contains(3));
        assert_eq!([1, 4, 2, 7].map(|item| queue.newer(item)), [Some(4), Some(2), None, None]);
        assert_eq!((queue.oldest(), queue.pop(), queue.pop(), queue.len()), (Some(1), Some(1), Some(4), 1));
    }
}
