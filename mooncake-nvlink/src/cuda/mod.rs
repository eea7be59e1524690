//! CUDA driver: its library, loaded at run time, and objects that own its resources. All foreign
//! calls of the crate are here.

mod device;
mod ffi;
mod library;
mod memory;
mod order;
mod stream;

pub use device::Device;
pub(crate) use device::Event;
pub(crate) use ffi::HANDLE_BYTES;
pub use library::Cuda;
pub use memory::DeviceMemory;
pub(crate) use memory::Pinned;
pub(crate) use memory::{Allocation, HandleKind, Imported, dma_buf};
pub use order::{Flags, Hold, StreamRef};
pub use stream::Stream;
