//! Messages between processes of one host, in shared memory.
//!
//! A sender writes its messages into a ring of its own, which the receiver maps. The
//! receiver has a doorbell, a word that tells senders how to wake it.

mod doorbell;
#[allow(unsafe_code)]
mod file;
mod ring;

pub(crate) use doorbell::{Doorbell, Notice, RemoteDoorbell, Unattended};
pub(crate) use file::FileAddress;
pub(crate) use ring::{MAX_MESSAGES, RingReader, RingWriter};
