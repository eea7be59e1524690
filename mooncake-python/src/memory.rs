//! Memory of Python objects as a source or destination of transfers. (For memory that is named by
//! its address, see `mooncake_engine::addressed`.)

use std::sync::Arc;

use mooncake_core::memory::{MemorySource, MemorySpan, copy_memory};
use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_transport::{Region, Slice, SliceMut};

use crate::args::Keep;
use crate::client::{PythonClient, StoreClient};

/// Memory of Python objects, which it keeps alive.
struct ObjectMemory {
    span: MemorySpan,
    _keep: Arc<Keep>,
}

// SAFETY: the objects in `_keep` keep their memory.
#[allow(unsafe_code)]
unsafe impl MemorySource for ObjectMemory {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

/// Returns a slice over memory of Python objects, which stay alive as long as the slice.
pub(crate) fn object_slice(
    client: &StoreClient,
    span: MemorySpan,
    keep: &Arc<Keep>,
) -> Result<Slice<TransportSet>> {
    if client.needs_registration() {
        // Such a transport moves registered memory only, and registering costs more than a copy.
        return copied_slice(client, span);
    }
    object_region(span, keep)?.slice(0..span.len)
}

/// Returns an exclusive slice over memory of a new Python object that has no other user.
#[allow(unsafe_code)]
pub(crate) fn object_slice_mut(span: MemorySpan, keep: &Arc<Keep>) -> Result<SliceMut<TransportSet>> {
    object_region(span, keep)?.exclusive().map_err(|_| Error::internal("a new region has another user"))
}

fn object_region(span: MemorySpan, keep: &Arc<Keep>) -> Result<Region<TransportSet>> {
    Region::unregistered(object_source(span, keep))
}

/// Returns memory of Python objects, which stay alive as long as it.
pub(crate) fn object_source(span: MemorySpan, keep: &Arc<Keep>) -> Arc<dyn MemorySource> {
    Arc::new(ObjectMemory { span, _keep: keep.clone() })
}

#[allow(unsafe_code)]
fn copied_slice(client: &StoreClient, span: MemorySpan) -> Result<Slice<TransportSet>> {
    let region = client.register_now(Arc::new(client.allocate(span.len)?))?;
    // SAFETY: both ranges are that long, and new memory overlaps no other.
    unsafe { copy_memory(span.located(), region.span()) }?;
    region.slice(0..span.len)
}
