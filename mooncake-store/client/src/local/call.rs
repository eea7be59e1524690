//! One call of a light client: a request and its answer on a connection that nobody else uses
//! meanwhile.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::here::readable_soon;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

use super::client::Inner;
use super::link::{Link, Up};
use super::message::{self, HEAD_LEN, Item, Items, Status, Verb};
use crate::deadline::Deadline;
use mooncake_protocol::pack::Pack;

/// Longest wait of a task for an answer: waking it costs two switches more.
const SOON: Duration = Duration::from_micros(100);

impl Inner {
    /// Makes a call. `held` is memory that it names: it comes back with the answer. When the call
    /// is given up before that, because its time is over or its future is dropped, `held` stays set
    /// aside until the owner has ended it.
    pub(super) async fn call<H: Send + 'static>(
        &self,
        verb: Verb,
        body: &(impl Pack + Sync),
        held: H,
        deadline: &Deadline,
    ) -> Result<(Vec<u8>, H)> {
        let mut request = Vec::with_capacity(256);
        message::append(&mut request, verb as u8, body)?;
        deadline.bound("mooncake_client", self.exchange(&request, held)).await
    }

    /// A call whose answer is an [`Item`] for each of `n`.
    pub(super) async fn call_items<H: Send + 'static>(
        &self,
        verb: Verb,
        body: &(impl Pack + Sync),
        n: usize,
        held: H,
        deadline: &Deadline,
    ) -> Result<(Vec<Item>, H)> {
        let (answer, held) = self.call(verb, body, held, deadline).await?;
        let Items { items } = message::body(&answer)?;
        if items.len() != n {
            return Err(Error::internal(format!(
                "{} answers from mooncake_client to {n} questions",
                items.len()
            )));
        }
        Ok((items, held))
    }

    async fn exchange<H: Send + 'static>(&self, request: &[u8], held: H) -> Result<(Vec<u8>, H)> {
        let link = self.link.borrow().clone();
        let up = match link {
            Link::Up(up) => up,
            Link::Down(error) => {
                // Who tries again and again must let the task run that looks for the owner.
                tokio::task::yield_now().await;
                return Err((*error).clone());
            }
        };
        let permit = up.calls.clone().acquire_owned().await;
        let permit = permit.map_err(|_| Error::internal("the limit on calls is gone"))?;
        let (stream, mut is_reused) = up.connection().await?;
        let mut flight = Flight {
            up,
            stream: Some(stream),
            held: Some((held, permit)),
            asked: false,
            runtime: self.runtime.clone(),
        };
        let stream = flight.stream.as_mut().ok_or_else(|| Error::internal("a call without a connection"))?;
        let (status, answer) = loop {
            let outcome = async {
                stream.write_all(request).await?;
                flight.asked = true;
                // Short answers are there before a task could be put away and woken.
                readable_soon(stream, SOON);
                let mut head = [0; HEAD_LEN];
                stream.read_exact(&mut head[..1]).await?;
                Ok(head)
            };
            match outcome.await {
                Ok(head) => break receive_rest(stream, head).await?,
                // The owner closes idle connections to make room for others. It closes none that it
                // serves, so the call is not made.
                Err(error) if is_reused && is_closed(&error) => {
                    flight.asked = false;
                    *stream = flight.up.new_connection().await?;
                    is_reused = false;
                }
                Err(error) => return Err(gone(error)),
            }
        };
        let (stream, held) = (flight.stream.take(), flight.held.take());
        if let Some(stream) = stream {
            flight.up.put_back(stream);
        }
        let Some((held, _)) = held else { return Err(Error::internal("a call without its memory")) };
        match status {
            Status::Answer => Ok((answer, held)),
            Status::Failure => {
                let failed: Item = message::body(&answer)?;
                Err(failed.result().err().unwrap_or_else(|| Error::internal("a failure without an error")))
            }
        }
    }
}

/// A call under way.
struct Flight<H: Send + 'static> {
    up: Arc<Up>,
    stream: Option<ParentOnly<UnixStream>>,
    held: Option<(H, OwnedSemaphorePermit)>,
    /// The request is on its way, all of it: the owner will make the call.
    asked: bool,
    runtime: tokio::runtime::Handle,
}

impl<H: Send + 'static> Drop for Flight<H> {
    fn drop(&mut self) {
        let (Some(mut stream), Some(held), true) = (self.stream.take(), self.held.take(), self.asked) else {
            return;
        };
        let up = self.up.clone();
        // Until the owner answers, or its end of the connection is closed: it makes calls to their
        // end before it closes one.
        self.runtime.spawn(async move {
            if receive(&mut stream).await.is_ok() {
                up.put_back(stream);
            }
            drop(held);
        });
    }
}

async fn receive(stream: &mut UnixStream) -> Result<(Status, Vec<u8>)> {
    let mut head = [0; HEAD_LEN];
    stream.read_exact(&mut head[..1]).await.map_err(gone)?;
    receive_rest(stream, head).await
}

/// Receives an answer of which the first byte has come.
async fn receive_rest(stream: &mut UnixStream, mut head: [u8; HEAD_LEN]) -> Result<(Status, Vec<u8>)> {
    stream.read_exact(&mut head[1..]).await.map_err(gone)?;
    let (status, len) = message::parse_answer(head)?;
    let mut body = Vec::new();
    let got = stream.take(u64::from(len)).read_to_end(&mut body).await.map_err(gone)?;
    if got == len as usize { Ok((status, body)) } else { Err(gone(std::io::ErrorKind::UnexpectedEof.into())) }
}

fn is_closed(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof)
}

fn gone(error: std::io::Error) -> Error {
    Error::new(ErrorCode::RpcFail, format!("mooncake_client went away in the middle of a call: {error}"))
        .with_source(error)
}
