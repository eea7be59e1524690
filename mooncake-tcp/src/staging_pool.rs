//! Page-locked buffers of the data port, through which device memory is served.

use mooncake_transport::staging_pool::StagingPool;

/// Length of a buffer in bytes.
pub(crate) const STAGING_BYTES: usize = 1 << 20;
/// Number of buffers of a node. They are separate from those of its own transfers, or two nodes
/// could wait for each other.
const MAX_STAGING_BUFFERS: usize = 32;

/// Buffers of a data port.
pub(crate) type PortStagingPool = StagingPool<()>;

/// Creates the buffers of the data port of a node.
pub(crate) fn staging_pool() -> PortStagingPool {
    StagingPool::new(STAGING_BYTES, MAX_STAGING_BUFFERS)
}
