//! Interface of a journal: a receiver of every change of the set of readable objects.

use std::fmt::Debug;

use mooncake_core::ids::ObjectKey;

/// Receiver of changes. It learns when an object becomes readable and when it stops being so, in
/// that order for each key. The calls are made under a lock of the directory: they must be quick
/// and must not call the master.
pub trait Journal: Debug + Send + Sync + 'static {
    /// Records that the object can be read. `group` is empty for none; `tenant` is `default`
    /// without tenants. `session` is the name that the writer gave to its session.
    fn stored(&self, tenant: &str, key: &ObjectKey, group: &str, session: Option<&[u8]>);

    /// Records that the object cannot be read any more: it was removed, evicted, replaced, or lost
    /// with its segments.
    fn removed(&self, tenant: &str, key: &ObjectKey, group: &str);
}
