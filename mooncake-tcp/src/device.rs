//! Serving requests for device memory: between the socket and page-locked buffers, of which the device copies one while the other is on the
//! socket. A connection that finds only one buffer goes on with that.

use std::io;

use mooncake_core::Result;
use mooncake_core::memory::MemorySpan;
use mooncake_transport::device::DeviceCopy;
use mooncake_transport::stages::{Stage, StagePool};
use tokio::time::timeout;

use crate::frame::{Framing, Request, STATUS_LEN, Status};
use crate::server::{End, Session, readable};
use crate::socket::{self, IoList};
use crate::table::Range;

/// Bytes of a buffer.
const STAGE: usize = 1 << 20;
/// Buffers of a node. They are apart from those of its own transfers, or two nodes could wait for each other.
const STAGES: usize = 32;

pub(crate) type Stages = StagePool<()>;

/// Buffers for one node's data port.
pub(crate) fn stages() -> Stages {
    StagePool::new(STAGE, STAGES)
}

fn no_wire(_: MemorySpan) -> Result<()> {
    Ok(())
}

impl Session {
    /// Receives the body of a write into device memory.
    pub(crate) async fn take_body_to_device(&mut self, request: Request, range: &Range) -> Result<(), End> {
        let len = range.len();
        let mut stage = self.stage().await?;
        let (mut at, mut filled) = (0, self.take_early(request, &stage)?);
        // The copy before its buffer, as it is dropped first and waits.
        let mut flying: Option<(DeviceCopy, Stage<()>)> = None;
        loop {
            let part = STAGE.min(len - at);
            while filled < part {
                filled += self.receive_into(&stage, (filled, part), len - at == part).await?;
            }
            // One write is one copy after the other, so that the last one to fail is noticed before the next is begun.
            let free = match flying.take() {
                Some((copy, stage)) => {
                    copy.await.map_err(End::Device)?;
                    Some(stage)
                }
                None => None,
            };
            let source = stage.part(0, part).map_err(End::Device)?;
            // SAFETY: the buffer is nobody else's, and is kept until the copy is over.
            let copy = unsafe { range.copy_in(at, source) };
            let copy = self.begun(copy, request).await?;
            at += part;
            if at == len {
                return copy.await.map_err(End::Device);
            }
            filled = 0;
            match free.or_else(|| self.stages().try_take(no_wire)) {
                Some(free) => flying = Some((copy, std::mem::replace(&mut stage, free))),
                None => copy.await.map_err(End::Device)?,
            }
        }
    }

    /// Sends an answer out of device memory. Every earlier answer is sent.
    pub(crate) async fn send_from_device(&mut self, request: Request, range: &Range) -> Result<(), End> {
        let len = range.len();
        let mut stage = self.stage().await?;
        // Whether the device can is known before it is promised.
        let first = STAGE.min(len);
        self.copy_out(range, 0, &stage, first, request).await?;
        let frame = (request.framing == Framing::Acknowledged).then(|| Status::Ok.encode());
        let (mut at, mut part) = (0, first);
        loop {
            let left = STAGE.min(len - at - part);
            let spare = if left > 0 { self.stages().try_take(no_wire) } else { None };
            let ahead = match spare {
                Some(spare) => {
                    let to = spare.part(0, left).map_err(End::Device)?;
                    // SAFETY: the buffer is nobody else's, and is kept until the copy is over.
                    let copy = unsafe { range.copy_out(at + part, to) };
                    Some((copy.ok_or_else(|| cut_off(request))?.map_err(End::Broken)?, spare))
                }
                None => None,
            };
            let frame = frame.filter(|_| at == 0);
            self.send_stage(&stage, part, frame).await?;
            at += part;
            if at == len {
                return Ok(());
            }
            match ahead {
                Some((copy, spare)) => {
                    copy.await.map_err(End::Broken)?;
                    stage = spare;
                }
                None => {
                    let outcome = self.copy_out(range, at, &stage, left, request).await;
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

    /// A buffer, as soon as there is one.
    async fn stage(&self) -> Result<Stage<()>, End> {
        let taken = timeout(self.progress(), self.stages().take(no_wire)).await;
        taken.map_err(|_| End::Stalled)?.map_err(End::Device)
    }

    /// Puts what came along with the header into the buffer.
    fn take_early(&mut self, request: Request, stage: &Stage<()>) -> Result<usize, End> {
        let early = self.inbox().payload(request.len.min(STAGE as u64));
        let place = stage.part(0, early.len()).map_err(End::Device)?;
        // SAFETY: that many bytes of a buffer that is ours alone.
        unsafe { socket::place(early, place.ptr.as_ptr()) };
        Ok(early.len())
    }

    /// Receives into a buffer between two places; how much. The inbox takes what comes after the end.
    async fn receive_into(
        &mut self,
        stage: &Stage<()>,
        (from, to): (usize, usize),
        is_last: bool,
    ) -> Result<usize, End> {
        loop {
            let place = stage.part(from, to - from).map_err(End::Device)?;
            let received = {
                let mut list = IoList::<2>::new();
                list.push(place.ptr.as_ptr(), place.len);
                if is_last {
                    let space = self.inbox().space();
                    list.push(space.as_mut_ptr(), space.len());
                }
                // SAFETY: the first place is in a buffer of ours alone, the second is our own inbox.
                unsafe { socket::receive(self.stream(), &mut list) }
            };
            match received {
                Ok(n) => {
                    let body = n.min(place.len);
                    self.inbox().received(n - body);
                    return Ok(body);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // The peer may wait for earlier answers before it sends on.
                    self.flush().await?;
                    readable(self.stream(), Some(self.progress())).await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A copy that was to begin. Where the memory is gone, earlier requests are answered before the refusal.
    async fn begun(&mut self, copy: Option<Result<DeviceCopy>>, request: Request) -> Result<DeviceCopy, End> {
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
        stage: &Stage<()>,
        len: usize,
        request: Request,
    ) -> Result<(), End> {
        let to = stage.part(0, len).map_err(End::Device)?;
        // SAFETY: the buffer is nobody else's, and outlives the copy, which is waited for here.
        let copy = unsafe { range.copy_out(at, to) };
        self.begun(copy, request).await?.await.map_err(End::Device)
    }

    /// Sends the front of a buffer, after a status frame if one is given.
    async fn send_stage(
        &mut self,
        stage: &Stage<()>,
        len: usize,
        frame: Option<[u8; STATUS_LEN]>,
    ) -> Result<(), End> {
        let head = frame.as_ref().map_or(&[][..], |frame| &frame[..]);
        let mut sent = 0;
        while sent < head.len() + len {
            let skip = sent.saturating_sub(head.len());
            let place = stage.part(skip, len - skip).map_err(End::Device)?;
            let now = {
                let mut list = IoList::<2>::new();
                let rest = &head[sent.min(head.len())..];
                list.push(rest.as_ptr().cast_mut(), rest.len());
                list.push(place.ptr.as_ptr(), place.len);
                // SAFETY: the places are a status frame on our stack and a buffer that is ours alone.
                unsafe { socket::send(self.stream(), &mut list) }
            };
            match now {
                Ok(n) => sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let writable = timeout(self.progress(), self.stream().writable()).await;
                    writable.map_err(io::Error::from)??;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Half an answer is out: a status frame now would be taken for its bytes.
fn cut_off(mut request: Request) -> End {
    request.framing = Framing::Plain;
    End::Refused(request)
}
