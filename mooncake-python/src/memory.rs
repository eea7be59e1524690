//! Memory of Python objects, as transfers use it. (What is named by its address is `mooncake_engine::addressed`.)

use std::sync::Arc;

use mooncake_core::memory::{MemorySource, MemorySpan, copy_memory};
use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_transport::{Region, Slice, SliceMut};

use crate::args::Keep;
use crate::member::Member;

/// The wires of a Python client.
pub(crate) type Wire = TransportSet;

/// Memory of Python objects.
struct Foreign {
    span: MemorySpan,
    _keep: Arc<Keep>,
}

// SAFETY: the objects keep their memory.
#[allow(unsafe_code)]
unsafe impl MemorySource for Foreign {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

/// A slice over memory of Python objects, kept for as long as the slice lives.
pub(crate) fn lent(client: &Member, span: MemorySpan, keep: &Arc<Keep>) -> Result<Slice<Wire>> {
    if client.needs_registration() {
        // Such a wire moves registered memory only, and registering costs more than a copy.
        return copied(client, span);
    }
    whole(span, keep)?.slice(0..span.len)
}

/// An exclusive slice over memory of a Python object that nobody else has yet.
#[allow(unsafe_code)]
pub(crate) fn lent_mut(span: MemorySpan, keep: &Arc<Keep>) -> Result<SliceMut<Wire>> {
    whole(span, keep)?.exclusive().map_err(|_| Error::internal("a new region has another user"))
}

fn whole(span: MemorySpan, keep: &Arc<Keep>) -> Result<Region<Wire>> {
    Region::unregistered(Arc::new(Foreign { span, _keep: keep.clone() }))
}

#[allow(unsafe_code)]
fn copied(client: &Member, span: MemorySpan) -> Result<Slice<Wire>> {
    let region = client.register(Arc::new(client.memory(span.len)?))?;
    // SAFETY: both ranges are that long, and new memory overlaps no other.
    unsafe { copy_memory(span.located(), region.span()) }?;
    region.slice(0..span.len)
}
