//! [`Transport`] over TCP.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mooncake_core::clock::{Moment, Rng, SystemClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::host_port;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result, SharedClock};
use mooncake_transport::config::TcpConfig;
use mooncake_transport::device::not_host_memory;
use mooncake_transport::segment::KnownRegions;
use mooncake_transport::{Access, Completion, Op, Protocol, SegmentDesc, Transport};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::driver::Driver;
use crate::frame::Framing;
use crate::hello::{INSTANCE_KEY, Instance};
use crate::pool::{self, Pool, Transfer};
use crate::server::Server;
use crate::table::{MemoryTable, Registration};

/// Data port of a node, and its connections to the data ports of others.
///
/// The tasks run on the runtime given to [`TcpTransport::start`]; calls may come from any thread.
/// Dropping the transport closes the port and all connections, and fails transfers in progress.
pub struct TcpTransport {
    config: Arc<TcpConfig>,
    clock: SharedClock,
    runtime: Handle,
    table: Arc<MemoryTable>,
    server: Server,
    /// Identity that peers of this project expect at the data port.
    instance: Instance,
    pools: Mutex<HashMap<Address, Arc<Pool>>>,
    /// True if new pools are closed from the start.
    is_stopped: AtomicBool,
}

/// Host and port of a data port, and the process that is expected there; `None` for a node that
/// publishes no instance.
type Address = (String, u16, Option<Instance>);

/// Connections to one peer. Clones share them.
#[derive(Clone, Debug)]
pub struct TcpPeer {
    pool: Arc<Pool>,
    framing: Framing,
    /// Regions of the peer when it was looked up.
    regions: KnownRegions,
}

impl TcpTransport {
    /// Opens the data port and serves it on `runtime`.
    ///
    /// # Errors
    ///
    /// Returns `Invalid`, with what to do, when the configuration cannot work or no port is free.
    pub fn start(config: TcpConfig, runtime: &Handle) -> Result<Self> {
        Self::start_with_clock(config, runtime, SystemClock::shared())
    }

    /// Starts the transport with a clock for the deadlines of completions. The timers of the
    /// runtime do the waiting, so the clock has to run at their speed.
    pub fn start_with_clock(config: TcpConfig, runtime: &Handle, clock: SharedClock) -> Result<Self> {
        config.check()?;
        let table = Arc::new(MemoryTable::default());
        let instance = Instance::draw();
        let server = Server::start(&config, instance, table.clone(), runtime)?;
        Ok(Self {
            config: Arc::new(config),
            clock,
            runtime: runtime.clone(),
            table,
            server,
            instance,
            pools: Mutex::default(),
            is_stopped: AtomicBool::new(false),
        })
    }

    /// Returns the address of the data port.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Returns the clock of [`Completion::deadline`].
    pub fn clock(&self) -> &SharedClock {
        &self.clock
    }

    fn submit_each<'a>(
        &self,
        peer: &TcpPeer,
        ops: impl Iterator<Item = (Op<'a, Registration>, Completion)>,
        deadline: Moment,
    ) {
        let now = self.clock.now();
        let mut pending_mask = 0;
        for (op, done) in ops {
            if op.local().location.is_device() {
                // `ThroughHost` handles such memory.
                done.finish(Err(not_host_memory(op.local())));
                continue;
            }
            let transfer = Transfer {
                op,
                framing: peer.framing,
                may_stripe: op.len() >= self.config.stripe_threshold
                    && peer.regions.contains(op.remote(), op.len()),
                deadline,
                now,
                pending_mask: &mut pending_mask,
            };
            peer.pool.submit(transfer, done);
        }
        peer.pool.flush(pending_mask);
    }

    fn pool(&self, host: &str, port: u16, instance: Option<Instance>) -> Arc<Pool> {
        let mut pools = self.pools.lock();
        let address = (host.to_owned(), port, instance);
        if let Some(pool) = pools.get(&address) {
            return pool.clone();
        }
        let pool = Arc::new(Pool::new(
            address.clone(),
            self.config.clone(),
            self.clock.clone(),
            (self.runtime.clone(), Driver::spawn),
            Rng::from_os(),
        ));
        if self.is_stopped.load(Ordering::Relaxed) {
            pool.close();
        }
        pools.insert(address, pool.clone());
        pool
    }
}

// SAFETY: remote ranges are checked at each request and accessed only inside the gate of their
// region (`table`, `server`). Only pieces in a connection queue use local bytes, and the task of
// the queue completes a piece when no system call uses it (`connection_queue`, `driver`).
unsafe impl Transport for TcpTransport {
    type Registration = Registration;
    type Peer = TcpPeer;

    fn protocol(&self) -> Protocol {
        Protocol::TCP
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Registration> {
        span.check()?;
        match access {
            Access::Local => Ok(Registration::local(span)),
            Access::Remote => self.table.insert(span),
        }
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        if !desc.supports(&Protocol::TCP) {
            desc.protocols.push(Protocol::TCP);
        }
        desc.tcp_data_host.clone_from(&self.config.data_host);
        desc.tcp_data_port = self.server.local_addr().port();
        desc.tcp_proto_version = 2;
        desc.extra.insert(INSTANCE_KEY.into(), self.instance.to_string().into());
    }

    fn reaches(&self, desc: &SegmentDesc) -> bool {
        desc.supports(&Protocol::TCP) && desc.tcp_data_port != 0
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<TcpPeer> {
        if !self.reaches(desc) {
            return Err(Error::invalid(format!(
                "cannot connect to segment {:?}: it has no TCP data port",
                desc.name
            )));
        }
        let host = data_host(desc);
        if host.is_empty() {
            return Err(Error::invalid(format!(
                "cannot connect to segment {:?}: its descriptor has no host for the data port",
                desc.name
            )));
        }
        let spoken = if desc.tcp_proto_version >= 2 { Framing::Acknowledged } else { Framing::Plain };
        Ok(TcpPeer {
            pool: self.pool(host, desc.tcp_data_port, instance(desc)?),
            framing: spoken.min(self.config.framing),
            regions: KnownRegions::of(desc),
        })
    }

    fn is_connected(&self, peer: &TcpPeer) -> bool {
        peer.pool.is_connected()
    }

    fn release_departed(&self) {
        // No peer refers to these pools, and they have no connection.
        self.pools.lock().retain(|_, pool| Arc::strong_count(pool) > 1);
    }

    fn stop_transfers(&self) {
        let mut pools = self.pools.lock();
        self.is_stopped.store(true, Ordering::Relaxed);
        for pool in pools.values() {
            pool.close();
        }
        pools.clear();
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    fn submit<'a, I>(&self, peer: &TcpPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
    {
        let deadline = pool::deadline(&done);
        done.on_cancel(|| peer.pool.cancellation_callback());
        self.submit_each(peer, ops.zip(done.each()), deadline);
    }

    fn submit_shares(&self, peer: &TcpPeer, ops: Vec<(Op<'_, Registration>, Completion)>) {
        let Some((_, first)) = ops.first() else { return };
        let deadline = pool::deadline(first);
        first.on_cancel(|| peer.pool.cancellation_callback());
        self.submit_each(peer, ops.into_iter(), deadline);
    }
}

/// Returns the instance that a descriptor names. Returns `None` for a node without hellos, such as
/// one of Mooncake C++.
///
/// # Errors
/// Returns `Invalid` if the value in the descriptor is not an instance.
fn instance(desc: &SegmentDesc) -> Result<Option<Instance>> {
    if is_planted("tcp-no-hello") { Ok(None) } else { Instance::of_segment(desc, INSTANCE_KEY) }
}

/// Returns the data host, or the host part of the segment name, which is an address unless
/// something else is published.
fn data_host(desc: &SegmentDesc) -> &str {
    host_port::split(if desc.tcp_data_host.is_empty() { &desc.name } else { &desc.tcp_data_host }).0
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        for pool in self.pools.lock().values() {
            pool.close();
        }
    }
}

impl fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpTransport").field("local", &self.server.local_addr()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_host_takes_precedence() {
        for (name, data_host, expected) in [
            ("10.0.0.1:12345", "", "10.0.0.1"),
            ("10.0.0.1:12345", "10.0.0.2", "10.0.0.2"),
            ("[::1]:15918", "", "::1"),
            ("x:1", "[fe80::1]", "fe80::1"),
            ("::1", "", "::1"),
            ("node", "", "node"),
            ("fe80::1%eth0:77", "", "fe80::1%eth0"),
        ] {
            let mut desc = SegmentDesc::new(name);
            desc.tcp_data_host = data_host.into();
            assert_eq!(super::data_host(&desc), expected);
        }
    }
}
