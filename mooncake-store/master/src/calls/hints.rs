//! Hints of a put: the chain of its keys, and the group of a chain that is of use only as a whole.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::hints::{KeepPart, PutHints};
use mooncake_core::replica::ReplicateConfig;

use super::master::Master;
use crate::directory::ChainHint;
use crate::sync::atomic::Ordering::Relaxed;

/// Beginning of the names of groups that the master gives to chains.
const CHAIN_GROUP: &str = "chain:";

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the settings of the objects of a call with hints.
    pub(super) fn hinted(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        config: &ReplicateConfig,
        hints: &PutHints,
    ) -> ReplicateConfig {
        let mut config = ReplicateConfig { hints: Some(Box::new(hints.clone())), ..config.clone() };
        match hints.keep {
            KeepPart::Any => {}
            KeepPart::Front => self.keeps_fronts.store(true, Relaxed),
            KeepPart::Whole => {
                let groups = || self.chain_groups(tenant, keys, hints);
                config.group_ids = Some(config.group_ids.unwrap_or_else(groups));
            }
        }
        config
    }

    /// Returns a group for each key of a chain that is of use only as a whole. Objects that exist
    /// stay in their groups, because a group cannot change.
    fn chain_groups(&self, tenant: &str, keys: &[&[u8]], hints: &PutHints) -> Vec<String> {
        let of_chain = |name: &String| name.starts_with(CHAIN_GROUP);
        let parent = hints.parent.as_deref().and_then(|key| self.group_of(tenant, key, true));
        let mut chain = parent.filter(of_chain);
        let group = |key: &&[u8]| match self.group_of(tenant, key, false) {
            Some(name) => {
                chain = Some(name.clone()).filter(of_chain).or(chain.take());
                name
            }
            None => chain.get_or_insert_with(|| self.new_chain_group()).clone(),
        };
        keys.iter().map(group).collect()
    }

    /// Returns a name that no other group has.
    fn new_chain_group(&self) -> String {
        let (epoch, number) = (self.space().epoch, self.space().directory.next_use_number());
        format!("{CHAIN_GROUP}{epoch:016x}{number:016x}")
    }

    /// Returns the group of an object with a value, or of one that is being written, too; empty for
    /// none.
    fn group_of(&self, tenant: &str, key: &[u8], with_writes: bool) -> Option<String> {
        let key = self.scoped(tenant, key).ok()?;
        let hash = self.space().directory.hash(&key);
        let shard = self.space().directory.lock(hash);
        let object = &shard[shard.find(hash, &key)?];
        let name = object.group_name();
        let name =
            if object.tenant() == 0 { name } else { name.split_once('\0').map_or(name, |(_, name)| name) };
        (with_writes || object.value().is_some()).then(|| name.to_owned())
    }

    /// Returns the hints about the chain of a put, with the hash of the parent.
    pub(super) fn chain_hint(&self, tenant: &str, hints: &PutHints) -> ChainHint {
        let parent = hints.parent.as_deref().and_then(|key| self.scoped(tenant, key).ok());
        ChainHint {
            parent: parent.map(|key| self.space().directory.hash(&key)),
            position: hints.position.map(|position| u32::try_from(position).unwrap_or(u32::MAX)),
        }
    }

    /// Returns whether the write of a key was started with the hint that its front stays.
    pub(super) fn write_keeps_front(&self, tenant: &str, key: &[u8]) -> bool {
        if !self.keeps_fronts.load(Relaxed) {
            return false;
        }
        let Ok(key) = self.scoped_if_known(tenant, key) else { return false };
        let hash = self.space().directory.hash(&key);
        let shard = self.space().directory.lock(hash);
        let write = shard.find(hash, &key).and_then(|slot| shard[slot].write());
        write.and_then(|write| write.hints.as_ref()).is_some_and(|hints| hints.keep == KeepPart::Front)
    }
}
