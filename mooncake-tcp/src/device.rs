//! Serving of requests for device memory, through page-locked buffers. The device copies one buffer
//! while the other is on the socket. A connection that gets only one buffer works with that one.

use std::io;

use mooncake_core::Result;
use mooncake_core::memory::MemorySpan;
use mooncake_transport::device::DeviceCopy;
use mooncake_transport::staging_pool::StagingBuffer;
use tokio::time::timeout;

use crate::frame::{Framing, Request, STATUS_LEN, Status};
use crate::session::{End, Session, readable};
use crate::socket::{self, IoList};
use crate::staging_pool::STAGING_BYTES;
use crate::table::Range;

fn no_registration(_: MemorySpan) -> Result<()> {
    Ok(())
}

impl Session {
    /// Receives the body of a write into device memory.
    pub(crate) async fn receive_body_to_device(
        &mut self,
        request: Request,
        range: &Range,
    ) -> Result<(), End> {
        let len = range.len();
        let mut staging = self.staging().await?;
        let (mut at, mut filled) = (0, self.copy_buffered(request, &staging)?);
        // The copy is in front of its buffer, so that it is dropped first. Its drop waits.
        let mut in_flight: Option<(DeviceCopy, StagingBuffer<()>)> = None;
        loop {
            let part = STAGING_BYTES.min(len - at);
            while filled < part {
                filled += self.receive_into(&staging, (filled, part), len - at == part).await?;
            }
            // The copies of one write run one after the other, so that a failed copy is noticed
            // before the next one begins.
            let free = match in_flight.take() {
                Some((copy, staging)) => {
                    copy.await.map_err(End::Device)?;
                    Some(staging)
                }
                None => None,
            };
            let source = staging.part(0, part).map_err(End::Device)?;
            // SAFETY: the buffer has no other user, and is kept until the copy is complete.
            let copy = unsafe { range.copy_in(at, source) };
            let copy = self.check_begun(copy, request).await?;
            at += part;
            if at == len {
                return copy.await.map_err(End::Device);
            }
            filled = 0;
            match free.or_else(|| self.staging_pool().try_take(no_registration)) {
                Some(free) => in_flight = Some((copy, std::mem::replace(&mut staging, free))),
                None => copy.await.map_err(End::Device)?,
            }
        }
    }

    /// Sends a response from device memory. Every earlier response has been sent.
    pub(crate) async fn send_from_device(&mut self, request: Request, range: &Range) -> Result<(), End> {
        let len = range.len();
        let mut staging = self.staging().await?;
        // The first copy shows whether the device works, before the status frame promises the
        // bytes.
        let first = STAGING_BYTES.min(len);
        self.copy_out(range, 0, &staging, first, request).await?;
        let frame = (request.framing == Framing::Acknowledged).then(|| Status::Ok.encode());
        let (mut at, mut part) = (0, first);
        loop {
            let left = STAGING_BYTES.min(len - at - part);
            let next_stage = if left > 0 { self.staging_pool().try_take(no_registration) } else { None };
            let next_copy = match next_stage {
                Some(next_stage) => {
                    let to = next_stage.part(0, left).map_err(End::Device)?;
                    // SAFETY: the buffer has no other user, and is kept until the copy is complete.
                    let copy = unsafe { range.copy_out(at + part, to) };
                    Some((copy.ok_or_else(|| cut_off(request))?.map_err(End::Broken)?, next_stage))
                }
                None => None,
            };
            let frame = frame.filter(|_| at == 0);
            self.send_staged(&staging, part, frame).await?;
            at += part;
            if at == len {
                return Ok(());
            }
            match next_copy {
                Some((copy, next_stage)) => {
                    copy.await.map_err(End::Broken)?;
                    staging = next_stage;
                }
                None => {
                    let outcome = self.copy_out(range, at, &staging, left, request).await;
                    outcome.map_err(|end| match end {
                        End::Device(error) => End::Broken(error),
                        End::Refused(request) => cut_off(request),
                        end => end,
                    })?;
                }
            }
            part = left;
        }
    }

    /// Takes a buffer, as soon as one is free.
    async fn staging(&self) -> Result<StagingBuffer<()>, End> {
        let staging = timeout(self.progress_timeout(), self.staging_pool().take(no_registration)).await;
        staging.map_err(|_| End::Stalled)?.map_err(End::Device)
    }

    /// Copies the bytes that came along with the header into the buffer.
    fn copy_buffered(&mut self, request: Request, staging: &StagingBuffer<()>) -> Result<usize, End> {
        let buffered = self.inbox().payload(request.len.min(STAGING_BYTES as u64));
        let target = staging.part(0, buffered.len()).map_err(End::Device)?;
        // SAFETY: the buffer has that many bytes and no other user.
        unsafe { socket::copy_to(buffered, target.ptr.as_ptr()) };
        Ok(buffered.len())
    }

    /// Receives into the part of a buffer between two offsets. Returns the received length. The
    /// inbox gets the bytes behind the end.
    async fn receive_into(
        &mut self,
        staging: &StagingBuffer<()>,
        (from, to): (usize, usize),
        is_last: bool,
    ) -> Result<usize, End> {
        loop {
            let target = staging.part(from, to - from).map_err(End::Device)?;
            let received = {
                let mut list = IoList::<2>::new();
                list.push(target.ptr.as_ptr(), target.len);
                if is_last {
                    let space = self.inbox().space();
                    list.push(space.as_mut_ptr(), space.len());
                }
                // SAFETY: the first part lies in a buffer without another user, the second in the
                // inbox of this session.
                unsafe { socket::receive(self.stream(), &mut list) }
            };
            match received {
                Ok(n) => {
                    let body = n.min(target.len);
                    self.inbox().received(n - body);
                    return Ok(body);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // The peer may wait for earlier responses before it sends more.
                    self.flush().await?;
                    readable(self.stream(), Some(self.progress_timeout())).await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns a copy, or the error of one that could not begin. If the memory is deregistered,
    /// earlier requests get their responses before the refusal.
    async fn check_begun(
        &mut self,
        copy: Option<Result<DeviceCopy>>,
        request: Request,
    ) -> Result<DeviceCopy, End> {
        match copy {
            Some(copy) => copy.map_err(End::Device),
            None => {
                self.flush().await?;
                Err(End::Refused(request))
            }
        }
    }

    async fn copy_out(
        &mut self,
        range: &Range,
        at: usize,
        staging: &StagingBuffer<()>,
        len: usize,
        request: Request,
    ) -> Result<(), End> {
        let to = staging.part(0, len).map_err(End::Device)?;
        // SAFETY: the buffer has no other user, and outlives the copy, which ends here.
        let copy = unsafe { range.copy_out(at, to) };
        self.check_begun(copy, request).await?.await.map_err(End::Device)
    }

    /// Sends the front of a buffer, after a status frame if there is one.
    async fn send_staged(
        &mut self,
        staging: &StagingBuffer<()>,
        len: usize,
        frame: Option<[u8; STATUS_LEN]>,
    ) -> Result<(), End> {
        let head = frame.as_ref().map_or(&[][..], |frame| &frame[..]);
        let mut sent = 0;
        while sent < head.len() + len {
            let skip = sent.saturating_sub(head.len());
            let target = staging.part(skip, len - skip).map_err(End::Device)?;
            let result = {
                let mut list = IoList::<2>::new();
                let rest = &head[sent.min(head.len())..];
                list.push(rest.as_ptr().cast_mut(), rest.len());
                list.push(target.ptr.as_ptr(), target.len);
                // SAFETY: the parts are a status frame on this stack and a buffer without another
                // user.
                unsafe { socket::send(self.stream(), &mut list) }
            };
            match result {
                Ok(n) => sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let writable = timeout(self.progress_timeout(), self.stream().writable()).await;
                    writable.map_err(io::Error::from)??;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Ends a response that was partly sent. A status frame now would be taken for its bytes.
fn cut_off(mut request: Request) -> End {
    request.framing = Framing::Plain;
    End::Refused(request)
}
