//! Busy polling of a socket for a few microseconds before sleeping.
//!
//! The next request of a sequential client often arrives sooner than a sleeping thread wakes up;
//! the same holds for a response. A connection therefore polls its socket a few more times as long
//! as that succeeds. After failures it polls only now and then. A thread without other work
//! ([`wait_inline`](mooncake_transport::wait_inline)) sleeps at the socket instead.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::Duration;

use mooncake_transport::inline_wait::{is_inline, readable_soon};
use socket2::SockRef;

/// Maximum number of polls per wait. Each takes a fraction of a microsecond.
const POLLS: u32 = 48;
/// Maximum number of bytes per poll. A regular read takes the rest of a longer message.
const CHUNK: usize = 1024;
/// Maximum number of consecutive messages that polling finds before the connection yields to
/// others. One call in as many waits for that: with longer runs the 99th percentile would be the
/// sum of the runs of all other connections.
const RUN: u32 = 4;
/// Minimum and maximum number of messages that are awaited without polling after polls without
/// success. The number doubles with each failure.
const REST: (u32, u32) = (8, 1024);

/// Success of polling on one connection.
#[derive(Debug, Default)]
pub(super) struct BusyPoll {
    /// Number of messages to await without polling.
    rest: u32,
    /// Previous value of `rest` at its start.
    rested: u32,
    /// Consecutive messages found by polling.
    run: u32,
    /// Longest sleep at the socket, if the thread always sleeps there.
    sleep: Option<Duration>,
}

impl BusyPoll {
    /// Sleeps at the socket for up to `limit` in every wait, instead of polling.
    pub(super) fn sleeping(limit: Duration) -> Self {
        Self { sleep: Some(limit), ..Self::default() }
    }

    /// Appends bytes that arrive within a few microseconds, like a read. Returns `None` if none
    /// arrive or the connection does not poll.
    pub(super) fn read(&mut self, stream: &impl AsFd, inbox: &mut Vec<u8>) -> Option<io::Result<usize>> {
        if self.sleep.is_none() && (self.rest > 0 || self.run == RUN) {
            self.rest = self.rest.saturating_sub(1);
            self.run = 0;
            return None;
        }
        let socket = SockRef::from(stream);
        let mut chunk = [0; CHUNK];
        let alone = is_inline() || self.sleep.is_some();
        let limit = self.sleep.unwrap_or_default();
        let polls = if alone { u32::from(readable_soon(stream, limit)) } else { POLLS };
        for poll in 0..polls {
            match (&*socket).read(&mut chunk) {
                Ok(count) => {
                    inbox.extend_from_slice(&chunk[..count]);
                    // Polling here delays no other task, but a regular read is faster for a long
                    // message.
                    self.run = match alone {
                        false => self.run + 1,
                        true => RUN * u32::from(count == CHUNK),
                    };
                    if poll > 0 || alone {
                        self.rested /= 2;
                    }
                    return Some(Ok(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Some(Err(error)),
            }
        }
        self.rested = (self.rested * 2).clamp(REST.0, REST.1);
        (self.rest, self.run) = (self.rested, 0);
        None
    }
}

#[cfg(test)]
mod tests {
    use mooncake_transport::wait_inline;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        near.set_nodelay(true).unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    /// Reads as a connection does, and returns whether polling found the message.
    async fn read(busy_poll: &mut BusyPoll, stream: &mut TcpStream, inbox: &mut Vec<u8>) -> bool {
        use tokio::io::AsyncReadExt;
        match busy_poll.read(stream, inbox) {
            Some(count) => {
                count.unwrap();
                true
            }
            None => {
                stream.read_buf(inbox).await.unwrap();
                false
            }
        }
    }

    #[tokio::test]
    async fn every_byte_comes_in_order_whichever_way_it_is_read() {
        let (mut near, mut far) = pair().await;
        let sent: Vec<u8> = (0..200_000_u32).map(|i| (i % 251) as u8).collect();
        let expected = sent.clone();
        let sending = tokio::spawn(async move {
            for part in sent.chunks(700) {
                near.write_all(part).await.unwrap();
                tokio::task::yield_now().await;
            }
            near
        });
        let (mut busy_poll, mut inbox, mut ways) = (BusyPoll::default(), Vec::new(), [0; 2]);
        while inbox.len() < expected.len() {
            inbox.reserve(1 << 10);
            ways[usize::from(read(&mut busy_poll, &mut far, &mut inbox).await)] += 1;
        }
        assert!(inbox == expected);
        assert!(ways[0] > 0, "{ways:?}");
        drop(sending.await.unwrap());
        let end = loop {
            match busy_poll.read(&far, &mut inbox) {
                Some(count) => break count.unwrap(),
                None => far.readable().await.unwrap(),
            }
        };
        assert_eq!(end, 0, "the end is an end");
    }

    #[tokio::test]
    async fn alone_it_sleeps_at_the_socket() {
        let (near, far) = pair().await;
        let (mut busy_poll, mut inbox) = (BusyPoll::default(), Vec::new());
        let later = std::thread::spawn(move || {
            let sent = near.try_write(&[7; 10]).unwrap();
            (near, sent)
        });
        // A busy machine may need more time.
        let read = wait_inline(async {
            (0..10_000).find_map(|_| {
                busy_poll.rest = 0;
                busy_poll.read(&far, &mut inbox)
            })
        });
        assert_eq!(read.await.unwrap().unwrap(), 10);
        assert_eq!(inbox, [7; 10]);
        let (mut near, _) = later.join().unwrap();
        near.write_all(&[8; CHUNK + 1]).await.unwrap();
        far.readable().await.unwrap();
        let mut busy_poll = BusyPoll::default();
        let mut read = || busy_poll.read(&far, &mut inbox);
        let reads = wait_inline(async { [read().is_some(), read().is_some(), read().is_some()] }).await;
        assert_eq!(reads, [true, false, true], "the second is left to who reads all of it");
        assert!(wait_inline(async { busy_poll.read(&far, &mut inbox) }).await.is_none());
        assert_eq!(busy_poll.rest, REST.0, "as after polls that find nothing");
    }

    #[tokio::test]
    async fn polling_in_vain_becomes_rare_and_a_full_socket_has_its_runs() {
        let (mut near, far) = pair().await;
        let (mut busy_poll, mut inbox) = (BusyPoll::default(), Vec::new());
        let polls = |busy_poll: &mut BusyPoll, times: u32| {
            let before = busy_poll.rested;
            (0..times).for_each(|_| assert!(busy_poll.read(&far, &mut Vec::new()).is_none()));
            (before, busy_poll.rested)
        };
        assert_eq!(polls(&mut busy_poll, 1), (0, REST.0));
        assert_eq!(polls(&mut busy_poll, REST.0), (REST.0, REST.0), "not polled");
        assert_eq!(polls(&mut busy_poll, 1), (REST.0, 2 * REST.0));
        polls(&mut busy_poll, 100_000);
        assert_eq!(busy_poll.rested, REST.1);

        near.write_all(&vec![7; CHUNK * (RUN as usize + 2)]).await.unwrap();
        far.readable().await.unwrap();
        let mut busy_poll = BusyPoll::default();
        for _ in 0..RUN {
            assert_eq!(busy_poll.read(&far, &mut inbox).unwrap().unwrap(), CHUNK);
        }
        assert!(busy_poll.read(&far, &mut inbox).is_none(), "others have their turn");
        assert_eq!(busy_poll.read(&far, &mut inbox).unwrap().unwrap(), CHUNK);
    }
}
