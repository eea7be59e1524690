//! Interface of a journal: a receiver of every change of the set of readable objects.

use std::fmt::Debug;

use mooncake_core::ids::ObjectKey;

/// Is told when an object becomes readable and when it ceases to be, in that order for each key. Called under a lock of the
/// directory: it must be quick and must not call the master.
pub trait Journal: Debug + Send + Sync + 'static {
    /// The object can be read; `group` is empty for none, `tenant` is `default` where there are no tenants.
    fn stored(&self, tenant: &str, key: &ObjectKey, group: &str);

    /// It cannot be read any more: removed, evicted, replaced, or lost with its segments.
    fn removed(&self, tenant: &str, key: &ObjectKey, group: &str);
}
