//! The CUDA driver: its library, loaded at run time, and owned objects over it. All of the crate's foreign calls are here.

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
pub(crate) use memory::{Allocation, Imported, Kind, dma_buf};
pub use order::{Flags, Hold, StreamRef};
pub use stream::Stream;
