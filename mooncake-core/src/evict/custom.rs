//! [`CustomPolicy`]: a policy of the application behind [`BuiltinPolicy`](super::BuiltinPolicy).

use std::fmt;
use std::sync::Arc;

use super::{EvictionPolicy, KeySample, MergeableOrder, Place};
use crate::ids::SlotId;

/// Declares the object-safe form of a policy, and forwards it both ways.
macro_rules! object_safe {
    (
        changes { $($of:ident: $change:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?;)* }
        reads { $($of_read:ident: $read:ident($($with:ident: $with_type:ty),*) -> $read_out:ty;)* }
    ) => {
        /// Object-safe form of a policy. The built-in policies are called without it.
        trait DynPolicy: Send {
            $(fn $change(&mut self $(, $arg: $type)*) $(-> $out)?;)*
            $(fn $read(&self $(, $with: $with_type)*) -> $read_out;)*
        }

        impl<P: MergeableOrder> DynPolicy for P {
            $(fn $change(&mut self $(, $arg: $type)*) $(-> $out)? {
                $of::$change(self $(, $arg)*)
            })*

            $(fn $read(&self $(, $with: $with_type)*) -> $read_out {
                $of_read::$read(self $(, $with)*)
            })*
        }

        impl CustomOrder {
            $(pub(super) fn $change(&mut self $(, $arg: $type)*) $(-> $out)? {
                self.0.$change($($arg),*)
            })*

            $(pub(super) fn $read(&self $(, $with: $with_type)*) -> $read_out {
                self.0.$read($($with),*)
            })*
        }
    };
}

object_safe! {
    changes {
        EvictionPolicy: insert(slot: SlotId, bytes: u64);
        EvictionPolicy: touch(slot: SlotId);
        EvictionPolicy: remove(slot: SlotId);
        EvictionPolicy: evict(allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId>;
        MergeableOrder: insert_hashed(slot: SlotId, bytes: u64, key_hash: u64);
        MergeableOrder: insert_at(slot: SlotId, bytes: u64, key_hash: u64, place: &Place);
        MergeableOrder: touch_at(slot: SlotId, place: &Place);
        MergeableOrder: take_back(slot: SlotId, bytes: u64, key_hash: u64);
        MergeableOrder: change_children(slot: SlotId, more: bool);
        MergeableOrder: set_time(now: u64);
    }
    reads {
        EvictionPolicy: len() -> usize;
        MergeableOrder: remembers(key_hash: u64) -> bool;
        MergeableOrder: parent(slot: SlotId) -> u64;
        MergeableOrder: ranks_by_value() -> bool;
        MergeableOrder: victim_value() -> Option<u64>;
        MergeableOrder: value(slot: SlotId) -> Option<u64>;
        MergeableOrder: least_value_of_use(place: &Place) -> u64;
        MergeableOrder: value_since(used: u64) -> Option<u64>;
        MergeableOrder: value_if_used(key_hash: u64, place: &Place) -> Option<u64>;
        MergeableOrder: victim_since() -> Option<u64>;
        MergeableOrder: heeds_use() -> bool;
    }
}

type Open = dyn Fn(usize) -> Box<dyn DynPolicy> + Send + Sync;
type Share = dyn Fn(Option<&Arc<KeySample>>) -> Arc<Open> + Send + Sync;

/// Policy of the application with its options, for
/// [`BuiltinPolicyConfig`](super::BuiltinPolicyConfig).
#[derive(Clone)]
pub struct CustomPolicy {
    name: &'static str,
    open: Arc<Open>,
    share: Arc<Share>,
}

impl CustomPolicy {
    /// Selects the policy `P` with these options.
    pub fn new<P: MergeableOrder>(config: P::Config) -> Self {
        let open = |config: P::Config| -> Arc<Open> {
            Arc::new(move |slots| Box::new(P::new(slots, &config)) as Box<dyn DynPolicy>)
        };
        let of_each = config.clone();
        let share = move |sample: Option<&Arc<KeySample>>| match sample {
            None => open(P::for_one_cache(&config)),
            Some(sample) => open(P::for_sample(&config, sample)),
        };
        Self { name: std::any::type_name::<P>(), open: open(of_each), share: Arc::new(share) }
    }

    /// Returns the policy with options that the policies of one cache share.
    pub(super) fn for_one_cache(&self) -> Self {
        Self { open: (self.share)(None), ..self.clone() }
    }

    /// Returns the policy with options for a cache of the keys in `sample`.
    pub(super) fn for_sample(&self, sample: &Arc<KeySample>) -> Self {
        Self { open: (self.share)(Some(sample)), ..self.clone() }
    }

    pub(super) fn open(&self, slots: usize) -> CustomOrder {
        CustomOrder((self.open)(slots))
    }
}

impl fmt::Debug for CustomPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CustomPolicy").field(&self.name).finish()
    }
}

impl PartialEq for CustomPolicy {
    /// Returns whether both are clones of one value.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.open, &other.open)
    }
}

impl Eq for CustomPolicy {}

/// Policy of the application, as a [`CustomPolicy`] opened it.
pub struct CustomOrder(Box<dyn DynPolicy>);

impl fmt::Debug for CustomOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomOrder").field("len", &self.len()).finish_non_exhaustive()
    }
}
