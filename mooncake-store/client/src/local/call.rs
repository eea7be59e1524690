//! Calls of a shared client: a request and its response on a connection that no other call uses
//! meanwhile.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::inline_wait::readable_soon;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

use super::client::Inner;
use super::link::{Link, Up};
use super::message::{self, HEAD_LEN, Item, Items, Status, Verb};
use crate::deadline::Deadline;
use mooncake_protocol::pack::Pack;

/// Longest time for which the thread itself waits for a response. Suspending and waking the task
/// costs two more context switches.
const SOON: Duration = Duration::from_micros(100);

impl Inner {
    /// Makes a call and returns the body of its response with `held`. `held` owns the memory that
    /// the call names. If the call times out or its future is dropped, `held` stays reserved until
    /// the daemon has finished the call.
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

    /// Makes a call whose response has an [`Item`] for each of `n` objects.
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
                "{} responses from mooncake_client to {n} requests",
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
                // A caller that retries in a loop must let the task run that reconnects to the
                // daemon.
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
                // Short responses arrive sooner than the task could be suspended and woken.
                readable_soon(stream, SOON);
                let mut head = [0; HEAD_LEN];
                stream.read_exact(&mut head[..1]).await?;
                Ok(head)
            };
            match outcome.await {
                Ok(head) => break receive_rest(stream, head).await?,
                // The daemon closes idle connections when its limit is reached, but none with a
                // call in progress. An error on a reused connection therefore means that the call
                // was not made.
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

/// Call in progress.
struct Flight<H: Send + 'static> {
    up: Arc<Up>,
    stream: Option<ParentOnly<UnixStream>>,
    held: Option<(H, OwnedSemaphorePermit)>,
    /// True once the whole request is sent; from then on the daemon executes the call.
    asked: bool,
    runtime: tokio::runtime::Handle,
}

impl<H: Send + 'static> Drop for Flight<H> {
    fn drop(&mut self) {
        let (Some(mut stream), Some(held), true) = (self.stream.take(), self.held.take(), self.asked) else {
            return;
        };
        let up = self.up.clone();
        // The memory stays reserved until the daemon responds or closes the connection. The daemon
        // finishes a call before it closes the connection.
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

/// Receives the rest of a response whose first byte is in `head`.
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
