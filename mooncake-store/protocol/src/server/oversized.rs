//! Calls whose request or response exceeds the maximum length: a refusal by name instead of a
//! closed connection.

use std::io;
use std::sync::LazyLock;
use std::time::Duration;

use mooncake_core::clock::{Clock, Moment, SystemClock};
use mooncake_core::fault_injection::is_planted;
use parking_lot::Mutex;

use super::{Connection, End, MAX_IDLE_BUFFER, Next};
use crate::frame::{self, DEFAULT_MAX_BODY, FrameError, OversizedRequest, Status};
use crate::message::{ADDED, DISK_ADDED, DISK_TABLE, TABLE};

/// Maximum length of a refused request that is read to its end, in bytes. The connection of a
/// longer one is closed.
const MAX_DISCARD: u64 = 2 << 30;
/// Least time between two log lines about calls that are too long.
const LOG_PAUSE: Duration = Duration::from_secs(10);

impl Connection {
    /// Refuses the request at the beginning of the buffer for its length. The rest of it is
    /// discarded, so that the client reads the refusal.
    pub(super) fn refuse_oversized(&mut self, error: FrameError) -> Result<Next, FrameError> {
        let Some(request) = OversizedRequest::read(&self.inbox[self.done..]) else { return Err(error) };
        if request.len > MAX_DISCARD || is_planted("oversized-requests-close") {
            return Err(error);
        }
        self.log_too_large("request", request.function);
        frame::write_reply(&mut self.outbox, request.seq, |_| {
            Err((Status::TooLarge, format!("cannot handle call: {error}; ask about less at a time")))
        });
        let arrived = self.inbox.len() - self.done;
        let used = usize::try_from(request.len).map_or(arrived, |len| len.min(arrived));
        self.done += used;
        Ok(Next::Discard(request.len - used as u64))
    }

    /// Reads and drops bytes of the client. Returns whether the connection may continue.
    pub(super) async fn discard(&mut self, mut left: u64) -> Result<bool, End> {
        let len = left;
        self.reserve_space(0);
        let mut scratch = Vec::with_capacity(MAX_IDLE_BUFFER);
        while left > 0 {
            self.slot.wait_in_transfer(len);
            self.slot.hold(self.buffered() + scratch.capacity());
            self.stream.readable().await.map_err(End::Io)?;
            if !self.slot.work() {
                return Ok(false);
            }
            let most = usize::try_from(left).map_or(MAX_IDLE_BUFFER, |left| left.min(MAX_IDLE_BUFFER));
            scratch.resize(most, 0);
            match self.stream.try_read(&mut scratch) {
                Ok(0) => return Err(End::Torn(usize::try_from(left).unwrap_or(usize::MAX))),
                Ok(count) => left -= count as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(End::Io(error)),
            }
        }
        self.slot.end_transfer();
        Ok(true)
    }

    /// Logs a call that is refused for the length of its request or response.
    pub(super) fn log_too_large(&self, part: &'static str, function: u32) {
        static CLOCK: LazyLock<SystemClock> = LazyLock::new(SystemClock::new);
        static LOGGED: Mutex<Option<Moment>> = Mutex::new(None);
        let now = CLOCK.now();
        let mut logged = LOGGED.lock();
        if logged.is_some_and(|logged| now.since(logged) < LOG_PAUSE) {
            return;
        }
        *logged = Some(now);
        drop(logged);
        let all = TABLE.iter().chain(ADDED).chain(DISK_TABLE).chain(DISK_ADDED);
        let call = all.clone().find(|shape| shape.function == function).map_or("unknown", |shape| shape.name);
        tracing::warn!(call, peer = %self.peer, max = DEFAULT_MAX_BODY, "call refused: its {part} exceeds the maximum length");
    }
}
