//! Calls of a shared client: a request and its response on a connection that no other call uses
//! meanwhile.

use std::sync::Arc;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, Result};
use mooncake_protocol::connection::body_of;
use mooncake_protocol::message::Request;
use mooncake_protocol::parts::{KEY_OVERHEAD, MAX_ITEMS, OnFailure, front, shorter};
use mooncake_protocol::report::Reported;
use tokio::sync::OwnedSemaphorePermit;

use super::client::LocalInner;
use super::daemon_link::{DAEMON, DaemonLink, DaemonRegistration, IpcConnection};
use crate::deadline::Deadline;

/// Results of consecutive calls about the items of a batch.
pub(super) struct PartResults<T, H> {
    /// Results of the items of answered calls, from the front of the batch.
    pub(super) results: Vec<Result<T>>,
    /// Memory of the answered calls.
    pub(super) held: Vec<H>,
    /// Error of the call after the answered ones. It is the result of all other items.
    pub(super) failure: Option<Error>,
}

impl LocalInner {
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
    pub(super) async fn send_request<R, T>(&self, request: &R) -> Result<T>
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

    /// Makes calls like [`call_each`](Self::call_each) about all items, each about some of them.
    /// `len` is the length of an item in a request. `held` returns the memory of the next items,
    /// for one call. After a call that fails, no other call is made.
    ///
    /// # Errors
    /// Returns the error of the first call.
    pub(super) async fn call_each_in_parts<'k, I, R, T, H: Send + 'static>(
        &self,
        items: &'k [I],
        len: impl Fn(&I) -> usize,
        request: impl Fn(usize, &'k [I]) -> R,
        mut held: impl FnMut(usize) -> H,
        deadline: &Deadline,
    ) -> Result<PartResults<T, H>>
    where
        R: Request<Reply = Reported<Vec<Reported<T>>>> + Sync,
    {
        let mut answered = PartResults { results: Vec::new(), held: Vec::new(), failure: None };
        loop {
            let done = answered.results.len();
            let part = front(&items[done..], MAX_ITEMS, &len);
            match self.call_each(part.len(), &request(done, part), held(part.len()), deadline).await {
                Ok((results, held)) => {
                    answered.results.extend(results);
                    answered.held.push(held);
                }
                Err(error) if done == 0 => return Err(error),
                Err(error) => answered.failure = Some(error),
            }
            if answered.failure.is_some() || answered.results.len() >= items.len() {
                return Ok(answered);
            }
        }
    }

    /// Makes calls about keys from the front, each about some of them, until a response is about
    /// fewer objects than its request. `count` is the number of objects in a response.
    pub(super) async fn request_prefix<'k, K: AsRef<[u8]>, T, F>(
        &self,
        keys: &'k [K],
        request: impl Fn(&'k [K]) -> F,
        count: impl Fn(&T) -> usize,
    ) -> Result<Vec<T>>
    where
        F: Future<Output = Result<T>>,
    {
        let (mut rest, mut max, mut found) = (keys, MAX_ITEMS, Vec::new());
        loop {
            let part = front(rest, max, |key| key.as_ref().len() + KEY_OVERHEAD);
            match request(part).await {
                Ok(response) => {
                    rest = &rest[part.len()..];
                    let is_cut = count(&response) < part.len();
                    found.push(response);
                    if is_cut || rest.is_empty() {
                        return Ok(found);
                    }
                }
                Err(error) => max = shorter(part.len(), &error, OnFailure::KeepResults).ok_or(error)?,
            }
        }
    }

    async fn exchange<R: Request + Sync, H: Send + 'static>(
        &self,
        request: &R,
        held: H,
    ) -> Result<(R::Reply, H)> {
        let link = self.link.borrow().clone();
        let registration = match link {
            DaemonLink::Connected(registration) => registration,
            DaemonLink::Disconnected(error) => {
                // A caller that retries in a loop must let the task run that reconnects to the
                // daemon.
                tokio::task::yield_now().await;
                return Err((*error).clone());
            }
        };
        let permit = registration.calls.clone().acquire_owned().await;
        let permit = permit.map_err(|_| Error::internal("the limit on calls is gone"))?;
        let (connection, mut is_reused) = registration.connection().await?;
        let mut in_progress = CallInProgress {
            registration,
            connection: Some(connection),
            held: Some((held, permit)),
            is_sent: false,
            runtime: self.runtime.clone(),
        };
        let lost = || Error::internal("a call without a connection");
        let connection = in_progress.connection.as_mut().ok_or_else(lost)?;
        let body = body_of(request);
        loop {
            let exchange = async {
                connection.send(R::FUNCTION, &body).await?;
                in_progress.is_sent = true;
                connection.receive().await
            };
            match exchange.await {
                Ok(()) => break,
                // The daemon closes idle connections when its limit is reached, but none with a
                // call in progress. An error on a reused connection therefore means that the call
                // was not made.
                Err(broken) if is_reused && broken.closed_while_idle() => {
                    in_progress.is_sent = false;
                    (*connection, is_reused) = in_progress.registration.connection().await?;
                }
                Err(broken) => return Err(broken.into_error(&DAEMON)),
            }
        }
        let mut connection = in_progress.connection.take().ok_or_else(lost)?;
        let (held, permit) =
            in_progress.held.take().ok_or_else(|| Error::internal("a call without its memory"))?;
        let reply = connection.reply::<R>(&DAEMON);
        connection.clear();
        if is_planted("permits-end-before-calls") {
            drop(permit);
            tokio::task::yield_now().await;
            in_progress.registration.put_back(connection);
            return Ok((reply?, held));
        }
        in_progress.registration.put_back(connection);
        // The next call has to find the idle connection: the daemon may serve no more of them.
        drop(permit);
        Ok((reply?, held))
    }
}

/// Call in progress.
struct CallInProgress<H: Send + 'static> {
    registration: Arc<DaemonRegistration>,
    connection: Option<IpcConnection>,
    held: Option<(H, OwnedSemaphorePermit)>,
    /// True once the whole request is sent; from then on the daemon executes the call.
    is_sent: bool,
    runtime: tokio::runtime::Handle,
}

impl<H: Send + 'static> Drop for CallInProgress<H> {
    fn drop(&mut self) {
        let (Some(mut connection), Some(held), true) =
            (self.connection.take(), self.held.take(), self.is_sent)
        else {
            return;
        };
        let registration = self.registration.clone();
        // The memory stays reserved until the daemon responds or closes the connection. The daemon
        // finishes a call before it closes the connection.
        self.runtime.spawn(async move {
            if connection.receive().await.is_ok() {
                connection.clear();
                registration.put_back(connection);
            }
            drop(held);
        });
    }
}
