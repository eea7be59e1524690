//! Chains of keys: how the keys of one call depend on each other.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::{Batch, ChainEnd, MergeableOrder, Place};
use mooncake_core::hints::PutHints;
use mooncake_core::ids::{ClientId, ReplicaId};

use super::master::Master;
use crate::model::misses::CallMisses;
use crate::model::readers::Reader;

/// Keys that one call reads, in order.
pub(super) struct ReadCall {
    begun: Moment,
    /// Uses of the keys, if the policy has a use for them.
    chain: Option<Batch>,
    /// Number of keys from the front that were found.
    found: usize,
    pub(super) misses: CallMisses,
}

/// Hash and chain of a key, known from the call that contains it.
#[derive(Clone, Copy, Default)]
pub(super) struct KeyInCall<'c> {
    chain: Option<(&'c Batch, usize)>,
    /// Time at which the call began, if it is about more than this key. To ask the clock for each
    /// key takes as long as a look-up.
    begun: Option<Moment>,
    /// True if an earlier key of the call was not found.
    pub(super) is_behind_gap: bool,
    /// Number of a replica of the object, if the caller has located it before.
    pub(super) located: Option<ReplicaId>,
    /// Reader that will report the end of this read, and the number of the read.
    pub(super) read: Option<(&'c Arc<Reader>, u64)>,
    /// Misses of the call that contains the key; `None` if the call is about one key.
    pub(super) misses: Option<&'c CallMisses>,
}

impl<'c> KeyInCall<'c> {
    /// Returns what is known of a key whose reader will report the end of the read.
    pub(super) fn read_by(self, read: Option<(&'c Arc<Reader>, u64)>) -> Self {
        Self { read, ..self }
    }

    /// Returns what is known of a key of which the caller has located that replica before.
    pub(super) fn located(self, replica: Option<ReplicaId>) -> Self {
        Self { located: replica, ..self }
    }

    /// Returns the place of the use, if the policy has a use for it.
    pub(super) fn place(&self) -> Option<Place> {
        self.chain.map(|(chain, at)| chain.place(at))
    }

    /// Returns the time by which a lease on the key begins, if known.
    pub(super) fn now(&self) -> Option<Moment> {
        self.begun
    }

    /// Returns the hash of the key, if it was computed before.
    pub(super) fn hash(&self) -> Option<u64> {
        self.chain.map(|(chain, at)| chain.hash(at))
    }
}

/// Returns what is known of the key at an index of a call that stores a chain.
pub(super) fn key_in(chain: Option<&Batch>, at: usize) -> KeyInCall<'_> {
    KeyInCall { chain: chain.map(|chain| (chain, at)), ..KeyInCall::default() }
}

impl ReadCall {
    /// Returns the time at which the call began.
    pub(super) fn begun(&self) -> Moment {
        self.begun
    }

    /// Returns what is known of the key at an index. The keys before it have been looked up.
    pub(super) fn key(&self, at: usize) -> KeyInCall<'_> {
        let (misses, begun) = (Some(&self.misses), Some(self.begun));
        KeyInCall { is_behind_gap: self.found < at, misses, begun, ..key_in(self.chain.as_ref(), at) }
    }

    /// Records that the key at an index was found.
    pub(super) fn record_found(&mut self, at: usize) {
        self.found += usize::from(self.found == at);
    }

    /// Returns the number of keys from the front that were found.
    pub(super) fn found(&self) -> usize {
        self.found
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Describes a call that uses the keys which it finds.
    pub(super) fn read_call(&self, tenant: &str, keys: &[&[u8]]) -> ReadCall {
        ReadCall { chain: self.read_chain(tenant, keys), ..self.call_without_use() }
    }

    /// Describes a call whose keys are asked for, but not used.
    pub(super) fn call_without_use(&self) -> ReadCall {
        ReadCall { begun: self.space().clock.now(), chain: None, found: 0, misses: CallMisses::default() }
    }

    fn read_chain(&self, tenant: &str, keys: &[&[u8]]) -> Option<Batch> {
        let directory = &self.space().directory;
        directory.links.as_ref()?;
        let (tenant, hashes) = self.hashes(tenant, keys)?;
        directory.fetch(&hashes);
        let batch = directory.batch(tenant, hashes, ChainEnd::default(), false);
        self.space().curve.feed.note_chain(&batch);
        Some(batch)
    }

    /// Returns the chain of keys that a call of `client` stores, if the policy has a use for it.
    /// `hints` are those of the call.
    pub(super) fn put_chain(
        &self,
        client: ClientId,
        tenant: &str,
        keys: &[&[u8]],
        hints: Option<&PutHints>,
    ) -> Option<Batch> {
        let directory = &self.space().directory;
        let links = directory.links.as_ref()?;
        let (number, hashes) = self.hashes(tenant, keys)?;
        let now = self.space().clock.now();
        let mut before = links.before(client, *hashes.first()?, keys.len(), now);
        if let Some(hints) = hints {
            let is_known = |hash| directory.lock(hash).knows(number, hash);
            before = self.chain_hint(tenant, hints).end(before, is_known);
        }
        let batch = directory.batch(number, hashes, before, true);
        links.record_stored(client, keys.len(), batch.end(), now);
        self.space().curve.feed.note_chain(&batch);
        Some(batch)
    }

    /// Links what a call found to what is expected to be stored next, if the policy has a use for
    /// it.
    pub(super) fn link_missing(&self, call: &ReadCall, tenant: &str, keys: &[&[u8]]) {
        let Some(links) = &self.space().directory.links else { return };
        let missing = call.found;
        if missing == keys.len() {
            return;
        }
        let hash = |at: usize| match &call.chain {
            Some(chain) => Some(chain.hash(at)),
            None => self.scoped(tenant, keys[at]).ok().map(|key| self.space().directory.hash(&key)),
        };
        let last = if missing == 0 { Some(0) } else { hash(missing - 1) };
        if let (Some(missing), Some(last)) = (hash(missing), last) {
            links.record_found(call.found, last, missing, self.space().clock.now());
        }
    }

    /// Returns the hash of a key in the directory.
    pub(super) fn hash_of(&self, key: &[u8], call: KeyInCall<'_>) -> u64 {
        let hash = call.hash().unwrap_or_else(|| self.space().directory.hash(key));
        debug_assert_eq!(hash, self.space().directory.hash(key), "the hash is that of another key");
        hash
    }

    /// Returns the number of a tenant, and the hashes of keys in the directory.
    fn hashes(&self, tenant: &str, keys: &[&[u8]]) -> Option<(u32, Vec<u64>)> {
        let (scope, mut scratch) = (self.scope(tenant).ok()?, Vec::new());
        let first = scope.key_in(keys.first().copied().unwrap_or_default(), &mut scratch);
        let number = first.map_or(0, |key| self.space().tenants.number(key));
        let hash = |key: &&[u8]| {
            let key = scope.key_in(key, &mut scratch).ok()?;
            Some(self.space().directory.hash(key))
        };
        Some((number, keys.iter().map(hash).collect::<Option<_>>()?))
    }
}
