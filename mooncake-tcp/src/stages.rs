//! Page-locked buffers of the data port, through which device memory is served.

use mooncake_transport::stages::StagePool;

/// Length of a buffer in bytes.
pub(crate) const STAGE: usize = 1 << 20;
/// Number of buffers of a node. They are separate from those of its own transfers, or two nodes
/// could wait for each other.
const STAGES: usize = 32;

/// Buffers of a data port.
pub(crate) type Stages = StagePool<()>;

/// Creates the buffers of the data port of a node.
pub(crate) fn stages() -> Stages {
    StagePool::new(STAGE, STAGES)
}
