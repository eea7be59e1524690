//! [`Transport`] over TCP.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use mooncake_core::clock::{Moment, Rng, SystemClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result, SharedClock};
use mooncake_transport::config::TcpConfig;
use mooncake_transport::device::not_host_memory;
use mooncake_transport::{Access, Completion, Op, Protocol, SegmentDesc, Transport};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::frame::Framing;
use crate::hello::{INSTANCE_KEY, Instance};
use crate::pool::{self, Pool, Transfer};
use crate::server::Server;
use crate::table::{MemoryTable, Registration};

/// A node's data port, and its connections to those of others.
///
/// Its tasks run on the runtime given to [`TcpTransport::start`]; calls may come from any thread. Dropping it closes the
/// port and all connections, and fails what is under way.
pub struct TcpTransport {
    config: Arc<TcpConfig>,
    clock: SharedClock,
    runtime: Handle,
    table: Arc<MemoryTable>,
    server: Server,
    /// The identity that peers of this project expect at the data port.
    instance: Instance,
    pools: Mutex<HashMap<Address, Arc<Pool>>>,
}

/// Host and port of a data port, and the process that is expected there; none for a node that publishes no instance.
type Address = (String, u16, Option<Instance>);

/// A way to one peer. Clones share its connections.
#[derive(Clone, Debug)]
pub struct TcpPeer {
    pool: Arc<Pool>,
    framing: Framing,
    /// First and last address of each of its regions when it was looked up, sorted.
    regions: Arc<[(u64, u64)]>,
}

impl TcpTransport {
    /// Opens the data port and serves it on `runtime`. `Invalid`, with what to do about it, when the configuration cannot
    /// work or no port is free.
    pub fn start(config: TcpConfig, runtime: &Handle) -> Result<Self> {
        Self::start_with_clock(config, runtime, SystemClock::shared())
    }

    /// The same with a clock, on which the deadlines of completions are understood. Waiting is done by the runtime's
    /// timers, so it has to run at their speed.
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
        })
    }

    /// Where the data port listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local()
    }

    /// The clock of [`Completion::deadline`].
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
        let mut touched = 0;
        for (op, done) in ops {
            if op.local().location.is_device() {
                // `ThroughHost` is for such memory.
                done.finish(Err(not_host_memory(op.local())));
                continue;
            }
            let transfer = Transfer {
                op,
                framing: peer.framing,
                may_cut: op.len() >= self.config.stripe_threshold && peer.holds(op.remote(), op.len()),
                deadline,
                now,
                touched: &mut touched,
            };
            peer.pool.queue(transfer, done);
        }
        peer.pool.flush(touched);
    }

    fn pool(&self, host: &str, port: u16, instance: Option<Instance>) -> Arc<Pool> {
        let mut pools = self.pools.lock();
        let address = (host.to_owned(), port, instance);
        if let Some(pool) = pools.get(&address) {
            return pool.clone();
        }
        // Nobody holds a peer for the others, and no connection stands: they were for nodes that are gone.
        pools.retain(|_, pool| Arc::strong_count(pool) > 1);
        let pool = Arc::new(Pool::new(
            address.clone(),
            self.config.clone(),
            self.clock.clone(),
            self.runtime.clone(),
            Rng::from_os(),
        ));
        pools.insert(address, pool.clone());
        pool
    }
}

// SAFETY: remote ranges are checked at each request and touched only inside their region's gate (`table`, `server`); local
// bytes are used only by pieces in a lane, and those are finished by the lane's task when nobody is inside a system
// call with them (`lane`, `driver`).
unsafe impl Transport for TcpTransport {
    type Registration = Registration;
    type Peer = TcpPeer;

    fn protocol(&self) -> Protocol {
        Protocol::TCP
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Registration> {
        if span.len == 0 || span.addr().checked_add(span.len as u64).is_none() {
            return Err(Error::invalid(format!("cannot register {} bytes at {:#x}", span.len, span.addr())));
        }
        match access {
            Access::Local => Ok(Registration::local(span)),
            Access::Remote => self.table.insert(span),
        }
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        if !desc.speaks(&Protocol::TCP) {
            desc.protocols.push(Protocol::TCP);
        }
        desc.tcp_data_host.clone_from(&self.config.data_host);
        desc.tcp_data_port = self.server.local().port();
        desc.tcp_proto_version = 2;
        desc.extra.insert(INSTANCE_KEY.into(), self.instance.to_string().into());
    }

    fn reaches(&self, desc: &SegmentDesc) -> bool {
        desc.speaks(&Protocol::TCP) && desc.tcp_data_port != 0
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<TcpPeer> {
        if !self.reaches(desc) {
            return Err(Error::invalid(format!("segment {:?} has no TCP data port", desc.name)));
        }
        let host = data_host(desc);
        if host.is_empty() {
            return Err(Error::invalid(format!("segment {:?} names no host for its data port", desc.name)));
        }
        let spoken = if desc.tcp_proto_version >= 2 { Framing::Acknowledged } else { Framing::Plain };
        let mut regions: Vec<_> =
            desc.buffers.iter().filter_map(|b| Some((b.addr, b.addr.checked_add(b.length)?))).collect();
        regions.sort_unstable();
        Ok(TcpPeer {
            pool: self.pool(host, desc.tcp_data_port, instance(desc)?),
            framing: spoken.min(self.config.framing),
            regions: regions.into(),
        })
    }

    fn submit<'a, I>(&self, peer: &TcpPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
    {
        let deadline = pool::deadline(&done);
        done.when_given_up(|| peer.pool.sweeper());
        self.submit_each(peer, ops.zip(done.each()), deadline);
    }

    fn submit_shares(&self, peer: &TcpPeer, ops: Vec<(Op<'_, Registration>, Completion)>) {
        let Some((_, first)) = ops.first() else { return };
        let deadline = pool::deadline(first);
        first.when_given_up(|| peer.pool.sweeper());
        self.submit_each(peer, ops.into_iter(), deadline);
    }
}

impl TcpPeer {
    /// Whether the range lies in one region, as far as we know. The peer decides at each request; this only says whether
    /// pieces of the range may be asked for one by one.
    fn holds(&self, addr: u64, len: usize) -> bool {
        let after = self.regions.partition_point(|&(first, _)| first <= addr);
        let Some(&(_, end)) = after.checked_sub(1).and_then(|i| self.regions.get(i)) else { return false };
        addr.checked_add(len as u64).is_some_and(|last| last <= end)
    }
}

/// Returns the instance that a descriptor names; none for a node without hellos, such as one of Mooncake C++.
///
/// # Errors
/// `Invalid` if the descriptor names something that is no instance.
fn instance(desc: &SegmentDesc) -> Result<Option<Instance>> {
    let Some(value) = desc.extra.get(INSTANCE_KEY).filter(|_| !is_planted("tcp-no-hello")) else {
        return Ok(None);
    };
    let instance = value.as_str().and_then(Instance::parse);
    instance.map(Some).ok_or_else(|| {
        let expected = "expected 16 hexadecimal digits; publish the segment again";
        Error::invalid(format!(
            "cannot connect to segment {:?}: invalid {INSTANCE_KEY}. value={value} {expected}",
            desc.name
        ))
    })
}

/// The data host, else the host part of the segment's name, which is an address where nothing else publishes one.
fn data_host(desc: &SegmentDesc) -> &str {
    let host = if desc.tcp_data_host.is_empty() { host_of(&desc.name) } else { &desc.tcp_data_host };
    host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host)
}

/// `host:port`, `[v6]:port`, a bare host or a bare v6 address, to its host.
fn host_of(name: &str) -> &str {
    if let Some((host, _)) = name.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return host;
    }
    match name.rsplit_once(':') {
        Some(_) if name.parse::<std::net::Ipv6Addr>().is_ok() => name,
        Some((host, _)) => host,
        None => name,
    }
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
        f.debug_struct("TcpTransport").field("local", &self.server.local()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_host_comes_first() {
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
