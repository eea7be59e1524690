//! Ring of messages from one process to another.
//!
//! The sender makes the file and the messages, and publishes them by its *head*, the number of
//! bytes written so far. The receiver publishes its *tail*, the number of bytes read. Each side
//! checks the number of the other, and copies bytes before it looks at them.

use std::sync::atomic::{Ordering, fence};

use bytes::Bytes;
use mooncake_core::{Error, ErrorCode, Result};

use super::file::{FileAddress, SharedFile};

/// Offsets of the two numbers, in different cache lines.
const HEAD: usize = 64;
const TAIL: usize = 128;
/// Offset of the messages.
const DATA: usize = 4096;
/// Bytes of the messages that the receiver has not read, with their heads.
const CAPACITY: usize = 128 << 10;
/// Length of the head of a message: its length, and the frames that come before it.
const ENTRY: usize = 16;

/// Largest number of messages in a ring.
pub(crate) const MAX_MESSAGES: usize = CAPACITY / ENTRY;

/// Bytes that a message of this length takes.
fn space_of(len: usize) -> usize {
    ENTRY + len.next_multiple_of(ENTRY)
}

/// End of the sender.
pub(crate) struct RingWriter {
    file: SharedFile,
    head: u64,
    /// Tail, as last seen.
    tail: u64,
}

impl RingWriter {
    /// Creates an empty ring.
    ///
    /// # Errors
    /// The errors of the allocation.
    pub(crate) fn create() -> Result<(Self, FileAddress)> {
        let (file, address) = SharedFile::create(DATA + CAPACITY)?;
        Ok((Self { file, head: 0, tail: 0 }, address))
    }

    /// Appends a message, to be read after the first `frames` frames of the connection. Returns
    /// false if there is no space.
    pub(crate) fn push(&mut self, frames: u64, message: &[u8]) -> bool {
        let needed = space_of(message.len()) as u64;
        let is_full = |tail: u64| self.head - tail + needed > CAPACITY as u64;
        if is_full(self.tail) {
            let tail = self.file.word64(TAIL).load(Ordering::Acquire);
            // A receiver that counts wrongly gets nothing more here.
            if tail < self.tail || tail > self.head || is_full(tail) {
                return false;
            }
            self.tail = tail;
        }
        let mut entry = [0; ENTRY];
        entry[..8].copy_from_slice(&(message.len() as u64).to_le_bytes());
        entry[8..].copy_from_slice(&frames.to_le_bytes());
        let at = (self.head % CAPACITY as u64) as usize;
        // The head of a message is not cut, because all lengths are multiples of its length.
        self.file.write(DATA + at, &entry);
        let at = (at + ENTRY) % CAPACITY;
        let (first, second) = message.split_at(message.len().min(CAPACITY - at));
        self.file.write(DATA + at, first);
        self.file.write(DATA, second);
        self.head += needed;
        self.file.word64(HEAD).store(self.head, Ordering::Release);
        true
    }
}

/// End of the receiver.
pub(crate) struct RingReader {
    file: SharedFile,
    /// Head, as last seen.
    head: u64,
    tail: u64,
    /// Head of the next message, if it is there: its length, and the frames before it.
    next: Option<(usize, u64)>,
}

impl RingReader {
    /// Opens the ring of another process.
    ///
    /// # Errors
    /// The errors of the file.
    pub(crate) fn open(address: FileAddress) -> Result<Self> {
        let file = SharedFile::open(address, DATA + CAPACITY)?;
        Ok(Self { file, head: 0, tail: 0, next: None })
    }

    /// Removes the next message, if one is there and comes after no more than `frames` frames of
    /// the connection.
    ///
    /// # Errors
    /// `RPC_FAIL` for a malformed ring, which cannot be used any more.
    pub(crate) fn take(&mut self, frames: u64) -> Result<Option<Bytes>> {
        let Some((len, frames_before)) = self.peek()? else { return Ok(None) };
        if frames_before > frames {
            return Ok(None);
        }
        let at = ((self.tail + ENTRY as u64) % CAPACITY as u64) as usize;
        let (first, mut message) = (len.min(CAPACITY - at), Vec::with_capacity(len));
        self.file.read(DATA + at, first, &mut message);
        self.file.read(DATA, len - first, &mut message);
        self.next = None;
        self.tail += space_of(len) as u64;
        self.file.word64(TAIL).store(self.tail, Ordering::Release);
        Ok(Some(message.into()))
    }

    /// Returns whether [`take`](Self::take) returns a message, or an error.
    pub(crate) fn has_message(&mut self, frames: u64) -> bool {
        self.peek().is_ok_and(|next| next.is_some_and(|(_, frames_before)| frames_before <= frames))
    }

    /// Reads the head of the next message.
    fn peek(&mut self) -> Result<Option<(usize, u64)>> {
        if self.next.is_some() {
            return Ok(self.next);
        }
        if self.head == self.tail {
            fence(Ordering::SeqCst);
            let head = self.file.word64(HEAD).load(Ordering::Acquire);
            if head == self.tail {
                return Ok(None);
            }
            if head.wrapping_sub(self.tail) > CAPACITY as u64 || !head.is_multiple_of(ENTRY as u64) {
                return Err(malformed("its head is out of range"));
            }
            self.head = head;
        }
        let at = (self.tail % CAPACITY as u64) as usize;
        let mut entry = Vec::with_capacity(ENTRY);
        self.file.read(DATA + at, ENTRY, &mut entry);
        let (Some(len), Some(frames_before)) = (entry.first_chunk::<8>(), entry.last_chunk::<8>()) else {
            return Ok(None);
        };
        let (len, frames_before) = (u64::from_le_bytes(*len), u64::from_le_bytes(*frames_before));
        if len > CAPACITY as u64 || space_of(len as usize) as u64 > self.head - self.tail {
            return Err(malformed("a message is longer than the ring"));
        }
        self.next = Some((len as usize, frames_before));
        Ok(self.next)
    }
}

fn malformed(reason: &str) -> Error {
    Error::new(ErrorCode::RpcFail, format!("cannot read messages in shared memory: {reason}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair() -> (RingWriter, RingReader) {
        let (writer, address) = RingWriter::create().unwrap();
        let reader = RingReader::open(address).unwrap();
        (writer, reader)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        /// The oracle is a queue. A message is refused only if it does not fit.
        #[test]
        fn messages_come_out_as_they_went_in(steps in prop::collection::vec((any::<bool>(), 0usize..40_000), 1..60)) {
            let (mut writer, mut reader) = pair();
            let (mut queue, mut used) = (std::collections::VecDeque::new(), 0);
            for (number, (is_push, len)) in steps.into_iter().enumerate() {
                if is_push {
                    let message = vec![number as u8; len];
                    let fits = used + space_of(len) <= CAPACITY;
                    prop_assert_eq!(writer.push(0, &message), fits);
                    if fits {
                        used += space_of(len);
                        queue.push_back(message);
                    }
                } else {
                    prop_assert_eq!(reader.has_message(0), !queue.is_empty());
                    let message = reader.take(0).unwrap();
                    used -= message.as_ref().map_or(0, |message| space_of(message.len()));
                    prop_assert_eq!(message.map(|message| message.to_vec()), queue.pop_front());
                }
            }
        }

        /// A sender that writes noise causes errors, and no panic.
        #[test]
        fn noise_is_refused(head: u64, entry in prop::collection::vec(any::<u8>(), 64)) {
            let (writer, mut reader) = pair();
            writer.file.write(DATA, &entry);
            writer.file.word64(HEAD).store(head, Ordering::Release);
            for _ in 0..10 {
                if !reader.take(u64::MAX).is_ok_and(|message| message.is_some()) {
                    break;
                }
            }
        }
    }

    #[test]
    fn a_message_waits_for_the_frames_before_it() {
        let (mut writer, mut reader) = pair();
        assert!(writer.push(2, b"later"));
        assert!(!reader.has_message(1) && reader.take(1).unwrap().is_none());
        assert!(reader.has_message(2));
        assert_eq!(reader.take(2).unwrap().unwrap(), b"later"[..]);
    }

    #[test]
    fn a_receiver_that_counts_wrongly_gets_no_more() {
        let (mut writer, reader) = pair();
        while writer.push(0, &[0; 1000]) {}
        reader.file.word64(TAIL).store(u64::MAX, Ordering::Release);
        assert!(!writer.push(0, &[0]));
    }

    #[test]
    fn another_file_is_not_a_ring() {
        let (writer, address) = RingWriter::create().unwrap();
        let refused = |address: FileAddress| assert!(RingReader::open(address).is_err());
        refused(FileAddress { secret: address.secret ^ 2, ..address });
        refused(FileAddress { descriptor: 0, ..address });
        refused(FileAddress { process: u32::MAX, ..address });
        refused(FileAddress::NONE);
        drop(writer);
        refused(address);
    }

    /// The two ends are on two threads, as in two processes.
    #[test]
    fn a_stream_of_messages_keeps_its_order() {
        const COUNT: u32 = 20_000;
        let (mut writer, mut reader) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..COUNT {
                    let message = vec![number as u8; number as usize % 3000];
                    while !writer.push(u64::from(number), &message) {
                        std::thread::yield_now();
                    }
                }
            });
            for number in 0..COUNT {
                let message = loop {
                    match reader.take(u64::from(number)).unwrap() {
                        Some(message) => break message,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(message, vec![number as u8; number as usize % 3000]);
            }
        });
    }
}
