#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod region;
pub mod segment;
pub mod ticket;
pub mod transport;

pub use region::{BorrowedMemory, Region, Sink, Slice, SliceMut, Source};
pub use segment::{BufferDesc, SegmentDesc};
pub use ticket::{Completion, Ticket, ticket};
pub use transport::{Access, Capabilities, Op, Opcode, Protocol, Transport};

/// In-process reference transport.
pub mod loopback {
    #[doc(hidden)]
    pub struct Loopback;
}
pub mod pool {
    #[doc(hidden)]
    pub struct PoolBuf;
}
