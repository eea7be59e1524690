//! Links between the batches of a chain of keys.
//!
//! A request usually asks for all keys of its chain, and then stores those that were missing. The
//! batch of the missing keys goes on from the last key that was found, or begins a chain if none
//! was. Long chains are stored by several calls, which go on from each other.
//!
//! A wrong link costs hits: a popular key would keep all keys before it in memory. So a key that is
//! stored alone goes on from nothing but what was found.

use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::evict::{ChainEnd, ChainEnds};
use mooncake_core::ids::ClientId;

/// Time within which missing keys are stored after they were asked for.
const MISSING_FOR: Duration = Duration::from_secs(60);

/// Time between two calls that store parts of one chain.
const BETWEEN_CALLS: Duration = Duration::from_millis(100);

/// Ends of chains that a later batch may go on from.
pub(crate) struct ChainLinks {
    /// By the hash of the first missing key.
    missing: ChainEnds,
    /// By the client that stored the last key.
    clients: ChainEnds,
}

impl Default for ChainLinks {
    fn default() -> Self {
        Self { missing: ChainEnds::new(MISSING_FOR), clients: ChainEnds::new(BETWEEN_CALLS) }
    }
}

impl ChainLinks {
    /// Records that of a chain `found` keys were found, and then `missing` was not. `last` is the
    /// last one that was found, 0 for none.
    pub(crate) fn record_found(&self, found: usize, last: u64, missing: u64, now: Moment) {
        let known = u32::try_from(found).unwrap_or(u32::MAX);
        self.missing.remember(missing, ChainEnd { last, known, is_known: true }, now);
    }

    /// Records that a client has stored `count` keys of a chain, up to `end`.
    pub(crate) fn record_stored(&self, client: ClientId, count: usize, end: ChainEnd, now: Moment) {
        if count > 1 {
            self.clients.remember(hash_of(client), end, now);
        }
    }

    /// Returns the end that a batch of `count` keys seems to go on from. A client stores the batch,
    /// and `first` is its first key.
    pub(crate) fn before(&self, client: ClientId, first: u64, count: usize, now: Moment) -> ChainEnd {
        let of_client = || if count > 1 { self.clients.get(hash_of(client), now) } else { None };
        self.missing.get(first, now).or_else(of_client).unwrap_or_default()
    }
}

/// Hint of a client about the chain of its batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChainHint {
    /// Hash of the key before the first one.
    pub(crate) parent: Option<u64>,
    /// Number of keys before the first one.
    pub(crate) position: Option<u32>,
}

impl ChainHint {
    /// Returns the end that the batch goes on from. `guess` is the end that it seems to go on from,
    /// and `is_known` tells whether the cache holds or remembers the key with a hash.
    pub(crate) fn end(self, guess: ChainEnd, is_known: impl FnOnce(u64) -> bool) -> ChainEnd {
        match (self.parent, self.position) {
            (None, None) => guess,
            (_, Some(0)) => ChainEnd::default(),
            (Some(parent), _) if parent == guess.last => guess,
            // A known key is not evicted before those that follow it, so those before it are known.
            (Some(last), position) => {
                let is_known = is_known(last);
                let known = if is_known { position.unwrap_or(1) } else { 0 };
                ChainEnd { last, known, is_known }
            }
            (None, Some(position)) if guess.last != 0 => {
                ChainEnd { known: guess.known.min(position), ..guess }
            }
            // A client stores what it did not find, so it has found the keys before.
            (None, Some(known)) => ChainEnd { last: 0, known, is_known: true },
        }
    }
}

fn hash_of(client: ClientId) -> u64 {
    client.0.first ^ client.0.second.rotate_left(32)
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::Uuid;

    use super::*;

    #[test]
    fn a_hint_replaces_a_guess() {
        let guess = ChainEnd { last: 7, known: 3, is_known: true };
        let hint = |parent, position| ChainHint { parent, position };
        assert_eq!(ChainHint::default().end(guess, |_| true), guess);
        assert_eq!(hint(None, Some(0)).end(guess, |_| true), ChainEnd::default(), "the batch is a root");
        assert_eq!(hint(Some(7), Some(9)).end(guess, |_| false), guess, "the guess was right");
        let other = ChainEnd { last: 8, known: 5, is_known: true };
        assert_eq!(hint(Some(8), Some(5)).end(guess, |hash| hash == 8), other);
        assert_eq!(hint(Some(8), None).end(guess, |_| true), ChainEnd { known: 1, ..other });
        let unknown = ChainEnd { last: 8, known: 0, is_known: false };
        assert_eq!(hint(Some(8), Some(5)).end(guess, |_| false), unknown);
        assert_eq!(hint(None, Some(2)).end(guess, |_| true), ChainEnd { known: 2, ..guess });
        let by_position = ChainEnd { last: 0, known: 4, is_known: true };
        assert_eq!(hint(None, Some(4)).end(ChainEnd::default(), |_| true), by_position);
    }

    #[test]
    fn a_batch_goes_on_from_what_was_found_or_stored_before() {
        let (links, client) = (ChainLinks::default(), ClientId(Uuid::new(3, 4)));
        let now = Moment(0).after(Duration::from_secs(5));
        assert_eq!(links.before(client, 9, 2, now), ChainEnd::default());
        links.record_found(2, 8, 9, now);
        let found = ChainEnd { last: 8, known: 2, is_known: true };
        assert_eq!(links.before(client, 9, 2, now.after(Duration::from_secs(59))), found);
        let stored = ChainEnd { last: 11, known: 2, is_known: false };
        links.record_stored(client, 2, stored, now);
        assert_eq!((links.before(client, 12, 2, now), links.before(client, 9, 2, now)), (stored, found));
        assert_eq!(links.before(ClientId(Uuid::new(4, 3)), 12, 2, now), ChainEnd::default());
        assert_eq!(links.before(client, 12, 2, now.after(BETWEEN_CALLS)), ChainEnd::default());
    }

    #[test]
    fn a_chain_begins_where_nothing_was_found_or_a_key_is_stored_alone() {
        let (links, client, now) = (ChainLinks::default(), ClientId(Uuid::new(3, 4)), Moment(0));
        let stored = ChainEnd { last: 11, known: 2, is_known: false };
        links.record_stored(client, 2, stored, now);
        links.record_found(0, 0, 12, now);
        assert_eq!(links.before(client, 12, 2, now), ChainEnd { is_known: true, ..ChainEnd::default() });
        assert_eq!(links.before(client, 13, 1, now), ChainEnd::default());
        links.record_stored(client, 1, ChainEnd { last: 14, ..stored }, now);
        assert_eq!(links.before(client, 15, 2, now), stored, "a single key says nothing of the batches");
    }
}
