//! Node: its devices, the rails to its peers, and the handling of failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, ErrorKind, Reason, Result};
use mooncake_transport::SegmentDesc;
use mooncake_transport::config::RdmaConfig;
use mooncake_transport::handshake::{Kind, exchange};
use mooncake_transport::instance::{Instance, OtherInstance};
use mooncake_transport::net::{DEFAULT_PORT, HostPort};
use mooncake_transport::topology::Topology;
use serde_json::Value;
use tokio::runtime::Handle;
use tracing::{debug, warn};

use crate::endpoint::{Endpoint, Nic, Peer, Phase, Piece, Rail, Rails, Setup, Teardown, deadline_error};
use crate::flow::Ended;
use crate::message::Connection;
use crate::peer::PeerDescriptor;
use crate::rails::{self, RailCandidate};
use crate::sync::{Mutex, RwLock};
use crate::verbs::{Status, device_names};

/// Number of times that a message may be flushed by the failure of another one.
const MAX_FLUSHES: u16 = 64;

pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) config: RdmaConfig,
    pub(crate) clock: SharedClock,
    pub(crate) nics: Vec<Arc<Nic>>,
    /// Identity of this node, which its peers expect.
    pub(crate) instance: Instance,
    pub(crate) runtime: Handle,
    /// Prefix of the paths of the local devices.
    server: RwLock<String>,
    pub(crate) rails: Mutex<Rails>,
    /// True while idle connections are checked.
    pub(crate) is_checking: AtomicBool,
    pub(crate) closed: AtomicBool,
    next_endpoint: AtomicU32,
    creation_lock: Mutex<()>,
}

impl Node {
    pub(crate) fn open(config: RdmaConfig, runtime: &Handle, clock: SharedClock) -> Result<Arc<Self>> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        config.check()?;
        let nics = open_devices(&config, clock.now())?;
        let is_used = |name: &str| nics.iter().any(|nic| nic.name == name);
        for name in config.topology.iter().flat_map(Topology::devices).filter(|name| !is_used(name)) {
            warn!(device = name, "device of the topology is not used, and not published");
        }
        Ok(Arc::new(Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            server: RwLock::new(config.server_name.clone()),
            config,
            clock,
            nics,
            instance: Instance::draw(),
            runtime: runtime.clone(),
            rails: Mutex::default(),
            is_checking: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            next_endpoint: AtomicU32::new(1),
            creation_lock: Mutex::new(()),
        }))
    }

    /// Learns the name of this node from its descriptor. Returns the name to publish, which is
    /// empty if it is the name of the segment.
    pub(crate) fn learn_name(&self, desc: &SegmentDesc) -> String {
        let configured_name = &self.config.server_name;
        let name = match configured_name.is_empty() {
            true => desc.name.clone(),
            false => {
                let port = desc.handshake.as_ref().map(|at| at.port);
                HostPort::parse(
                    configured_name,
                    port.unwrap_or_else(|| HostPort::parse(&desc.name, DEFAULT_PORT).port),
                )
                .to_string()
            }
        };
        if *self.server.read() != name {
            self.server.write().clone_from(&name);
        }
        if configured_name.is_empty() { String::new() } else { name }
    }

    pub(crate) fn own_path(&self, nic: &Nic) -> String {
        format!("{}@{}", self.server.read(), nic.name)
    }

    /// Returns the rails to a peer, from each local device to each of its devices.
    pub(crate) fn peer(&self, descriptor: PeerDescriptor) -> Peer {
        let mut rails = self.rails.lock();
        // No peer refers to the other rails any more, and they have no connection.
        rails.retain(|_, rail| Arc::strong_count(rail) > 1);
        let rails_of = |nic: &Arc<Nic>| {
            let one = |device: &String| {
                let path = format!("{}@{device}", descriptor.server);
                let rail = rail(&mut rails, nic.index, &path, descriptor.instance, &descriptor.at);
                *rail.at.lock() = descriptor.at.clone();
                rail
            };
            descriptor.devices.iter().map(one).collect()
        };
        let rails = self.nics.iter().map(rails_of).collect();
        Peer { rails, round_robin: AtomicUsize::new(0), owner: self.id, descriptor }
    }

    /// Returns the best rail to a peer now, for memory of that NUMA node.
    pub(crate) fn choose(
        &self,
        peer: &Peer,
        node: Option<u32>,
        local: Option<usize>,
        now: Moment,
        round_robin: usize,
        avoid: Option<(usize, usize)>,
    ) -> Option<RailCandidate> {
        let numa_local = |nic: &Nic| node.is_none() || nic.node.is_none() || nic.node == node;
        let candidates =
            self.nics.iter().filter(|nic| local.is_none_or(|local| nic.index == local)).flat_map(|nic| {
                let (up, numa_local) = (nic.is_up(), numa_local(nic));
                peer.rails[nic.index].iter().enumerate().map(move |(remote, rail)| RailCandidate {
                    local: nic.index,
                    remote,
                    up,
                    numa_local,
                    preferred: self.config.are_partners(&nic.name, &peer.descriptor.devices[remote]),
                    paused_until: rail.paused_until(),
                })
            });
        rails::best(candidates, now, round_robin, avoid)
    }

    /// Passes messages to the connection of a rail, and creates the connection if there is none.
    pub(crate) fn send(self: &Arc<Self>, rail: &Arc<Rail>, pieces: &mut Vec<Piece>) {
        let mut refused = Vec::new();
        for _ in 0..2 {
            let endpoint = match self.connection(rail) {
                Ok(endpoint) => endpoint,
                // The device was lost after the rail was chosen. That does not count as a retry.
                Err(error) if self.nics[rail.nic].is_lost() => {
                    return pieces.drain(..).for_each(|piece| self.resend_flushed(piece, &error));
                }
                Err(error) => {
                    return pieces.drain(..).for_each(|piece| piece.done.finish(Err(error.clone())));
                }
            };
            let earliest_deadline = pieces.iter().filter_map(|piece| piece.done.deadline()).min();
            let sent = endpoint.send(pieces, &mut refused);
            if let Some(at) = earliest_deadline {
                endpoint.nic.wake_by(at);
            }
            if let Err(error) = &sent {
                self.retire(&endpoint, error);
            }
            if !matches!(sent, Ok(false)) {
                break;
            }
        }
        for piece in pieces.drain(..) {
            let reason = Error::new(
                ErrorCode::TransferFail,
                "the peer closes every connection right after the handshake",
            );
            piece.done.finish(Err(unreachable_error(rail, &reason)));
        }
        for piece in refused {
            piece.done.finish(Err(Error::new(
                ErrorCode::NoAvailableHandle,
                format!("cannot queue message for {}: queue is full", rail.path),
            )));
        }
    }

    /// Returns the connection of a rail. A new connection is set up in the background.
    fn connection(self: &Arc<Self>, rail: &Arc<Rail>) -> Result<Arc<Endpoint>> {
        if let Some(endpoint) = rail.active_endpoint() {
            return Ok(endpoint);
        }
        if Moment(rail.closed_until.load(Ordering::Relaxed)) > self.clock.now() {
            let reason =
                Error::new(ErrorCode::TransferFail, "the last connection attempt failed a moment ago");
            return Err(unreachable_error(rail, &reason));
        }
        let (endpoint, new) = self.active_or_new_endpoint(rail)?;
        if new {
            let (node, connecting) = (self.clone(), endpoint.clone());
            self.runtime.spawn(async move {
                if let Err(error) = node.connect(&connecting).await {
                    node.handle_connect_failure(&connecting, &error);
                }
            });
        }
        Ok(endpoint)
    }

    /// Returns the connection of a rail, and whether it is new. The caller sets up a new
    /// connection.
    fn active_or_new_endpoint(&self, rail: &Arc<Rail>) -> Result<(Arc<Endpoint>, bool)> {
        if let Some(endpoint) = rail.active_endpoint() {
            return Ok((endpoint, false));
        }
        // One creation at a time, without a lock on a rail: another connection may have to be
        // closed.
        let _guard = self.creation_lock.lock();
        if let Some(endpoint) = rail.active_endpoint() {
            return Ok((endpoint, false));
        }
        let endpoint = self.create(rail)?;
        *rail.current.lock() = Some(endpoint.clone());
        // A connection that is already retired would never be detached otherwise.
        if endpoint.is_retired() {
            self.detach(&endpoint);
        }
        Ok((endpoint, true))
    }

    fn create(&self, rail: &Arc<Rail>) -> Result<Arc<Endpoint>> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed_error());
        }
        let nic = &self.nics[rail.nic];
        if nic.is_lost() {
            return Err(device_lost_error(nic));
        }
        let max_endpoints = nic.max_endpoints(&self.config);
        while nic.order.lock().len() >= max_endpoints {
            let victim = nic.order.lock().victim().ok_or_else(|| {
                Error::new(
                    ErrorCode::NoAvailableHandle,
                    format!(
                        "cannot connect: all connections of RDMA device {:?} are in use. connections={max_endpoints}",
                        nic.name
                    ),
                )
            })?;
            // A connection that has been used in this instant stays, and another one is closed.
            if victim.retire_idle(self.clock.now()) {
                debug!(?victim, "idle connection closed for a new one");
                self.detach(&victim);
            }
        }
        let id = self.next_endpoint.fetch_add(1, Ordering::Relaxed);
        let endpoint = Endpoint::new(id, nic, rail, &self.config)?;
        nic.endpoints.write().insert(id, endpoint.clone());
        // Shutdown or loss of the device may have swept the table already. Both set their flag
        // before the sweep, so this checks the flags again.
        let shutdown_error = if self.closed.load(Ordering::Acquire) { Some(closed_error()) } else { None };
        if let Some(error) = shutdown_error.or_else(|| nic.is_lost().then(|| device_lost_error(nic))) {
            nic.endpoints.write().remove(&id);
            return Err(error);
        }
        nic.order.lock().add(endpoint.clone());
        Ok(endpoint)
    }

    /// Connects from this side.
    async fn connect(self: &Arc<Self>, endpoint: &Arc<Endpoint>) -> Result<()> {
        let own = self.own_path(&endpoint.nic);
        let request = Connection {
            local_nic_path: own.clone(),
            peer_nic_path: endpoint.rail.path.clone(),
            lid: endpoint.nic.lid(),
            gid: Some(endpoint.nic.gid().addr),
            pairs: endpoint.numbers(),
            refusal: String::new(),
            ready: Some(false),
            instance: Some(self.instance),
            peer_instance: endpoint.rail.instance,
        };
        if own == endpoint.rail.path {
            // The name may be that of an earlier process. For a connection of the node to itself,
            // the pairs are connected to each other.
            check_instance(endpoint.rail.instance, Some(self.instance))?;
            self.blocking(endpoint, request, Phase::Open).await?;
            return self.opened(endpoint);
        }
        let at = endpoint.rail.at.lock().clone();
        let exchange_message = async |message: &Connection| {
            let body = message.encode().to_string();
            let response = exchange(&at, Kind::Connection, body.as_bytes(), &self.config.handshake).await?;
            let response: Value = serde_json::from_slice(&response)
                .map_err(|e| Error::invalid(format!("handshake port {at}: reply is not JSON: {e}")))?;
            let response = Connection::decode(&response)?;
            match response.refusal.is_empty() {
                true => Ok(response),
                false => {
                    Err(Error::new(ErrorCode::TransferFail, format!("{at} refuses: {}", response.refusal)))
                }
            }
        };
        let response = exchange_message(&request).await?;
        check_instance(endpoint.rail.instance, response.instance)?;
        if response.pairs.is_empty() {
            return Err(Error::new(ErrorCode::NotSupported, format!("{at} does not support rdma")));
        }
        let peer_awaits_ready = response.ready.is_some();
        // The peer may have connected to this node meanwhile. Then the pairs are the same, or one
        // side is out of date.
        if self.blocking(endpoint, response, Phase::Open).await? == Setup::Different {
            return Err(Error::new(
                ErrorCode::TransferFail,
                "both sides connected at the same time, to different queue pairs",
            ));
        }
        self.opened(endpoint)?;
        if peer_awaits_ready {
            // The peer receives messages in any case: only its sending waits for this message.
            exchange_message(&Connection { ready: Some(true), ..request }).await.map(drop)?;
        }
        Ok(())
    }

    /// Opens a connection, and retires one that cannot be opened.
    fn opened(self: &Arc<Self>, endpoint: &Arc<Endpoint>) -> Result<()> {
        endpoint.open().inspect_err(|error| self.retire(endpoint, error))
    }

    async fn blocking(
        self: &Arc<Self>,
        endpoint: &Arc<Endpoint>,
        with: Connection,
        then: Phase,
    ) -> Result<Setup> {
        let (node, endpoint) = (self.clone(), endpoint.clone());
        let set_up = move || endpoint.set_up(&node.config, &with, then);
        let outcome = self.runtime.spawn_blocking(set_up).await;
        outcome.unwrap_or_else(|_| Err(Error::new(ErrorCode::TransferFail, "the runtime is shutting down")))
    }

    fn handle_connect_failure(self: &Arc<Self>, endpoint: &Arc<Endpoint>, error: &Error) {
        if matches!(endpoint.phase(), Phase::Open | Phase::Waiting(_)) && error.kind() != ErrorKind::Invalid {
            // The peer connected to this node in the meantime.
            return;
        }
        self.record_connect_failure(endpoint, error);
    }

    fn record_connect_failure(self: &Arc<Self>, endpoint: &Arc<Endpoint>, error: &Error) {
        debug!(?endpoint, %error, "connection attempt failed");
        if error.reason() == Some(Reason::RouteLookup) && self.config.gid_retries > 0 {
            endpoint.nic.try_another_gid();
        }
        self.pause_rail(&endpoint.rail);
        if !self.config.connect_pause.is_zero() {
            let until = self.clock.now().after(self.config.connect_pause);
            endpoint.rail.closed_until.store(until.0, Ordering::Relaxed);
            endpoint.rail.paused_until.fetch_max(until.0, Ordering::Relaxed);
        }
        let Some(waiting) = self.retire_and_detach(endpoint) else { return };
        for mut piece in waiting {
            piece.attempts += 1;
            let has_other_rails = piece.peer.rails.iter().map(Vec::len).sum::<usize>() > 1;
            let has_retry = has_other_rails
                && usize::from(piece.attempts) < piece.peer.rails.iter().map(Vec::len).sum::<usize>() + 1;
            match has_retry {
                true => self.reroute(piece, Some(&endpoint.rail), error),
                false => piece.done.finish(Err(unreachable_error(&endpoint.rail, error))),
            }
        }
    }

    /// Responds to a peer that sets up a connection, at the handshake port of this node.
    pub(crate) async fn accept(self: &Arc<Self>, request: &Value) -> Value {
        let response = match Connection::decode(request) {
            Ok(request) => self.accept_connection(request).await,
            Err(error) => Err(error),
        };
        response.unwrap_or_else(|error| Connection::refused(error.to_string())).encode()
    }

    async fn accept_connection(self: &Arc<Self>, request: Connection) -> Result<Connection> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed_error());
        }
        check_instance(request.peer_instance, Some(self.instance))?;
        let nic = self.nics.iter().find(|nic| self.own_path(nic) == request.peer_nic_path);
        let nic = nic.ok_or_else(|| {
            let own_paths: Vec<String> = self.nics.iter().map(|nic| self.own_path(nic)).collect();
            Error::invalid(format!(
                "unknown device {:?}; this node has {}",
                request.peer_nic_path,
                own_paths.join(", ")
            ))
        })?;
        if nic.is_lost() {
            return Err(device_lost_error(nic));
        }
        let Some((server, _)) = request.local_nic_path.rsplit_once('@') else {
            return Err(Error::invalid(format!(
                "invalid device path {:?}: expected <server name>@<device>",
                request.local_nic_path
            )));
        };
        let at = HostPort::parse(server, DEFAULT_PORT);
        let path = &request.local_nic_path;
        let rail = rail(&mut self.rails.lock(), nic.index, path, request.instance, &at);
        if request.ready == Some(true) {
            let current = rail.current.lock().clone();
            let endpoint = current.filter(|endpoint| endpoint.is_connected_to(&request.pairs));
            let endpoint = endpoint.ok_or_else(|| {
                Error::invalid("no connection to those queue pairs waits for a ready message")
            })?;
            self.opened(&endpoint)?;
            return Ok(Connection::default());
        }
        let then = match request.ready {
            Some(_) => Phase::Waiting(self.clock.now().after(self.config.ready_timeout)),
            None => Phase::Open,
        };
        for _ in 0..2 {
            let (endpoint, _) = self.active_or_new_endpoint(&rail)?;
            match self.blocking(&endpoint, request.clone(), then).await {
                Ok(Setup::Connected | Setup::AlreadyConnected) => {
                    if then == Phase::Open {
                        self.opened(&endpoint)?;
                    }
                    // After the set-up, so that a faulty request costs no connection.
                    self.retire_earlier_processes(&request.local_nic_path, request.instance);
                    return Ok(Connection {
                        local_nic_path: request.peer_nic_path,
                        peer_nic_path: request.local_nic_path,
                        lid: nic.lid(),
                        gid: Some(nic.gid().addr),
                        pairs: endpoint.numbers(),
                        refusal: String::new(),
                        ready: request.ready,
                        instance: Some(self.instance),
                        peer_instance: request.instance,
                    });
                }
                // The peer has restarted, or given up the old connection.
                Ok(Setup::Different) => {
                    let error = Error::new(ErrorCode::TransferFail, "the peer has set up a new connection");
                    self.retire(&endpoint, &error);
                }
                Err(error) => {
                    self.handle_connect_failure(&endpoint, &error);
                    return Err(error);
                }
            }
        }
        Err(Error::new(ErrorCode::ObjectReplicaBusy, "the connection changes too fast; try again"))
    }

    /// Retires the connections to earlier processes with this device path: a path has one process
    /// at a time.
    fn retire_earlier_processes(self: &Arc<Self>, path: &str, now: Option<Instance>) {
        let is_earlier = |rail: &Rail| {
            rail.path == path && now.is_some() && rail.instance.is_some() && rail.instance != now
        };
        let earlier: Vec<_> = {
            let rails = self.rails.lock();
            rails.values().filter(|rail| is_earlier(rail)).filter_map(|rail| rail.active_endpoint()).collect()
        };
        for endpoint in earlier {
            self.retire(&endpoint, &Error::new(ErrorCode::TransferFail, "the peer has restarted"));
        }
    }

    /// Retires a connection. Unposted messages take another rail; posted ones follow when the queue
    /// returns them.
    pub(crate) fn retire(self: &Arc<Self>, endpoint: &Arc<Endpoint>, reason: &Error) {
        let Some(waiting) = self.retire_and_detach(endpoint) else { return };
        debug!(?endpoint, %reason, "connection retired");
        for piece in waiting {
            self.resend_flushed(piece, reason);
        }
    }

    fn retire_and_detach(&self, endpoint: &Arc<Endpoint>) -> Option<Vec<Piece>> {
        let waiting = endpoint.retire(self.clock.now())?;
        self.detach(endpoint);
        Some(waiting)
    }

    /// Removes a retired connection from the rail and from the list of its device.
    fn detach(&self, endpoint: &Arc<Endpoint>) {
        let mut current = endpoint.rail.current.lock();
        if current.as_ref().is_some_and(|current| current.id == endpoint.id) {
            *current = None;
        }
        drop(current);
        endpoint.nic.order.lock().remove(endpoint.id);
        endpoint.nic.wake();
    }

    /// Destroys a retired connection. Returns true when it is gone.
    pub(crate) fn destroy(self: &Arc<Self>, endpoint: &Arc<Endpoint>) -> bool {
        let Teardown::Destroyed(in_flight) = endpoint.destroy() else { return false };
        endpoint.nic.endpoints.write().remove(&endpoint.id);
        let error = Error::new(ErrorCode::TransferFail, "the device did not return the request");
        for mut piece in in_flight {
            piece.begun = true;
            self.reroute(piece, Some(&endpoint.rail), &error);
        }
        true
    }

    /// Destroys a retired connection for the last time, and leaks it if the device refuses. Returns
    /// false if another thread is using it.
    pub(crate) fn destroy_or_leak(self: &Arc<Self>, endpoint: &Arc<Endpoint>) -> bool {
        if self.destroy(endpoint) {
            return true;
        }
        if !matches!(endpoint.destroy(), Teardown::Refused) {
            return false;
        }
        let pieces = endpoint.leak();
        warn!(
            ?endpoint,
            pieces, "cannot destroy connection; its memory is never freed, because the device may use it"
        );
        endpoint.nic.endpoints.write().remove(&endpoint.id);
        true
    }

    /// Ends cancelled messages to this peer that wait for credit.
    pub(crate) fn finish_cancelled(&self, peer: &Peer) {
        for rail in peer.rails.iter().flatten() {
            let endpoint = rail.current.lock().clone();
            for piece in endpoint.iter().flat_map(|endpoint| endpoint.take_cancelled()) {
                piece.finish_cancelled();
            }
        }
    }

    /// Completes a message, or sends it again.
    pub(crate) fn ended(self: &Arc<Self>, ended: Ended<Piece>, rail: &Arc<Rail>) {
        let Ended { message: mut piece, status } = ended;
        piece.begun = true;
        let error = match status {
            Status::Done => return piece.done.finish(Ok(())),
            Status::Refused => {
                let what = format!(
                    "{} refused a transfer. address={:#x} len={}",
                    rail.path, piece.remote, piece.len
                );
                return piece.done.finish(Err(Error::invalid(what)));
            }
            Status::Flushed => {
                let reason = Error::new(ErrorCode::TransferFail, "RDMA connection failed (request flushed)");
                return self.resend_flushed(piece, &reason);
            }
            Status::Unanswered => Error::new(ErrorCode::TransferFail, "the peer does not answer"),
            Status::Local(n) => {
                Error::new(ErrorCode::TransferFail, format!("local work completion error {n}"))
            }
            Status::Failed(n) => Error::new(ErrorCode::TransferFail, format!("work completion error {n}")),
        };
        self.pause_rail(rail);
        piece.attempts += 1;
        if u32::from(piece.attempts) > self.config.attempts {
            return piece.done.finish(Err(unreachable_error(rail, &error)));
        }
        self.reroute(piece, Some(rail), &error);
    }

    /// Sends a message again that was flushed by the failure of another one, or not posted.
    fn resend_flushed(self: &Arc<Self>, mut piece: Piece, reason: &Error) {
        piece.flushes += 1;
        if piece.flushes > MAX_FLUSHES {
            let text = format!("RDMA connection failed repeatedly; last error: {reason}");
            return piece.done.finish(Err(Error::new(ErrorCode::TransferFail, text)));
        }
        self.reroute(piece, None, reason);
    }

    fn pause_rail(&self, rail: &Rail) {
        let until = self.clock.now().after(self.config.rail_pause);
        rail.paused_until.store(until.0, Ordering::Relaxed);
    }

    /// Sends a message on another rail than the failed one, if there is one and the deadline has
    /// not passed.
    fn reroute(self: &Arc<Self>, mut piece: Piece, failed: Option<&Arc<Rail>>, reason: &Error) {
        let now = self.clock.now();
        if self.closed.load(Ordering::Acquire) {
            return piece.done.finish(Err(closed_error()));
        }
        if piece.done.is_cancelled() {
            return piece.finish_cancelled();
        }
        if piece.done.deadline().is_some_and(|at| now >= at) {
            return piece.done.finish(Err(deadline_error()));
        }
        let peer = piece.peer.clone();
        let avoid = failed.and_then(|failed| {
            let is = |rail: &Arc<Rail>| Arc::ptr_eq(rail, failed);
            Some((failed.nic, peer.rails.get(failed.nic)?.iter().position(is)?))
        });
        let round_robin = peer.round_robin.fetch_add(1, Ordering::Relaxed);
        let candidate = self.choose(&peer, None, None, now, round_robin, avoid);
        let keys = candidate.and_then(|candidate| {
            Some((
                piece.key_on(candidate.local)?,
                peer.descriptor.key(piece.region as usize, candidate.remote)?,
                candidate,
            ))
        });
        match keys {
            Some((local_key, remote_key, candidate)) => {
                (piece.local_key, piece.remote_key) = (local_key, remote_key);
                self.send(&peer.rails[candidate.local][candidate.remote], &mut vec![piece]);
            }
            None => piece.done.finish(Err(Error::new(
                ErrorCode::TransferFail,
                format!("no local RDMA device is up; last error: {reason}"),
            ))),
        }
    }

    /// Retires every connection of a device.
    pub(crate) fn retire_all(self: &Arc<Self>, nic: &Nic, reason: &Error) {
        let all: Vec<Arc<Endpoint>> = nic.endpoints.read().values().cloned().collect();
        for endpoint in all {
            self.retire(&endpoint, reason);
        }
    }

    /// Closes the node: it refuses handshakes and sends nothing any more.
    pub(crate) fn close(self: &Arc<Self>) {
        self.closed.store(true, Ordering::Release);
        for nic in &self.nics {
            self.retire_all(nic, &closed_error());
            nic.wake();
        }
    }
}

/// Checks that the process at the other end is the expected one.
///
/// # Errors
/// Returns `TransferFail` if another process has the port now.
fn check_instance(expected: Option<Instance>, found: Option<Instance>) -> Result<()> {
    match expected {
        Some(expected) if found != Some(expected) => {
            Err(Error::new(ErrorCode::TransferFail, OtherInstance { expected, found }.to_string()))
        }
        _ => Ok(()),
    }
}

fn rail(rails: &mut Rails, nic: usize, path: &str, instance: Option<Instance>, at: &HostPort) -> Arc<Rail> {
    let create = || Rail {
        nic,
        path: path.into(),
        instance,
        at: Mutex::new(at.clone()),
        paused_until: AtomicU64::new(0),
        closed_until: AtomicU64::new(0),
        current: Mutex::new(None),
    };
    if let Some(existing) = rails.get(&(nic, path.to_owned(), instance)) {
        return existing.clone();
    }
    // Removes the rails of peers without users and without a connection: restarted peers come with
    // new names.
    if rails.len() >= PRUNE_THRESHOLD && rails.len().is_power_of_two() {
        rails.retain(|_, rail| Arc::strong_count(rail) > 1);
    }
    let rail = Arc::new(create());
    rails.insert((nic, path.into(), instance), rail.clone());
    rail
}

/// Number of rails below which unused ones are not removed.
const PRUNE_THRESHOLD: usize = 64;

/// Opens the configured devices, all of which must work, or all usable devices if none is
/// configured.
fn open_devices(config: &RdmaConfig, now: Moment) -> Result<Vec<Arc<Nic>>> {
    let mut nics = Vec::new();
    if !config.devices.is_empty() {
        for name in &config.devices {
            nics.push(Nic::open(nics.len(), name, config, now)?);
        }
        return Ok(nics);
    }
    let mut faults = Vec::new();
    for name in device_names()?.into_iter().filter(|name| config.selects(name)) {
        match Nic::open(nics.len(), &name, config, now) {
            Ok(nic) => nics.push(nic),
            Err(error) => {
                warn!(device = name, %error, "device is not used");
                faults.push(error.to_string());
            }
        }
    }
    if nics.is_empty() {
        let reason = if faults.is_empty() { "none found".into() } else { faults.join("; ") };
        return Err(Error::new(ErrorCode::NotSupported, format!("no RDMA device can be used: {reason}")));
    }
    Ok(nics)
}

fn unreachable_error(rail: &Rail, reason: &Error) -> Error {
    Error::new(ErrorCode::TransferFail, format!("cannot reach {}: {reason}", rail.path))
}

fn device_lost_error(nic: &Nic) -> Error {
    Error::new(ErrorCode::TransferFail, format!("RDMA device {:?} is lost", nic.name))
}

fn closed_error() -> Error {
    Error::new(ErrorCode::TransferFail, "the RDMA transport is closed")
}

/// Pieces by local device, while a submission is split.
pub(crate) type PiecesByRail = Vec<(usize, Vec<Piece>)>;
