//! Calls of a shared client: a request and its response on a connection that no other call uses
//! meanwhile.

use std::sync::Arc;

use mooncake_core::{Error, Result};
use mooncake_protocol::connection::body_of;
use mooncake_protocol::message::Request;
use mooncake_protocol::report::Reported;
use tokio::sync::OwnedSemaphorePermit;

use super::client::Inner;
use super::link::{DAEMON, IpcConnection, Link, Up};
use crate::deadline::Deadline;

impl Inner {
    /// Makes a call and returns its response with `held`. `held` owns the memory that the call
    /// names. If the call times out or its future is dropped, `held` stays reserved until the
    /// daemon has finished the call.
    pub(super) async fn call<R: Request + Sync, H: Send + 'static>(
        &self,
        request: &R,
        held: H,
        deadline: &Deadline,
    ) -> Result<(R::Reply, H)> {
        deadline.bound(DAEMON, self.exchange(request, held)).await
    }

    /// Makes a call that uses no memory.
    pub(super) async fn ask<R, T>(&self, request: &R) -> Result<T>
    where
        R: Request<Reply = Reported<T>> + Sync,
    {
        self.call(request, (), &self.deadline()).await?.0.outcome()
    }

    /// Makes a call whose response has a result for each of `n` objects.
    pub(super) async fn call_each<R, T, H: Send + 'static>(
        &self,
        n: usize,
        request: &R,
        held: H,
        deadline: &Deadline,
    ) -> Result<(Vec<Result<T>>, H)>
    where
        R: Request<Reply = Reported<Vec<Reported<T>>>> + Sync,
    {
        if n == 0 {
            return Ok((Vec::new(), held));
        }
        let (reply, held) = self.call(request, held, deadline).await?;
        let results = reply.outcome()?;
        if results.len() != n {
            return Err(Error::internal(format!(
                "{} responses from mooncake_client to {n} requests",
                results.len()
            )));
        }
        Ok((results.into_iter().map(Reported::outcome).collect(), held))
    }

    async fn exchange<R: Request + Sync, H: Send + 'static>(
        &self,
        request: &R,
        held: H,
    ) -> Result<(R::Reply, H)> {
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
        let (connection, mut is_reused) = up.connection().await?;
        let mut flight = Flight {
            up,
            connection: Some(connection),
            held: Some((held, permit)),
            asked: false,
            runtime: self.runtime.clone(),
        };
        let lost = || Error::internal("a call without a connection");
        let connection = flight.connection.as_mut().ok_or_else(lost)?;
        let body = body_of(request);
        loop {
            let answered = async {
                connection.send(R::FUNCTION, &body).await?;
                flight.asked = true;
                connection.receive().await
            };
            match answered.await {
                Ok(()) => break,
                // The daemon closes idle connections when its limit is reached, but none with a
                // call in progress. An error on a reused connection therefore means that the call
                // was not made.
                Err(broken) if is_reused && broken.closed_while_idle() => {
                    flight.asked = false;
                    *connection = flight.up.new_connection().await?;
                    is_reused = false;
                }
                Err(broken) => return Err(broken.into_error(&DAEMON)),
            }
        }
        let mut connection = flight.connection.take().ok_or_else(lost)?;
        let (held, _) = flight.held.take().ok_or_else(|| Error::internal("a call without its memory"))?;
        let reply = connection.reply::<R>(&DAEMON);
        connection.clear();
        flight.up.put_back(connection);
        Ok((reply?, held))
    }
}

/// Call in progress.
struct Flight<H: Send + 'static> {
    up: Arc<Up>,
    connection: Option<IpcConnection>,
    held: Option<(H, OwnedSemaphorePermit)>,
    /// True once the whole request is sent; from then on the daemon executes the call.
    asked: bool,
    runtime: tokio::runtime::Handle,
}

impl<H: Send + 'static> Drop for Flight<H> {
    fn drop(&mut self) {
        let (Some(mut connection), Some(held), true) = (self.connection.take(), self.held.take(), self.asked)
        else {
            return;
        };
        let up = self.up.clone();
        // The memory stays reserved until the daemon responds or closes the connection. The daemon
        // finishes a call before it closes the connection.
        self.runtime.spawn(async move {
            if connection.receive().await.is_ok() {
                connection.clear();
                up.put_back(connection);
            }
            drop(held);
        });
    }
}
