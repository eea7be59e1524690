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

use crate::endpoint::{Endpoint, Nic, Peer, Phase, Piece, Rail, Rails, Setup, Teardown, too_late};
use crate::flow::Ended;
use crate::message::Connection;
use crate::peer::About;
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
    runtime: Handle,
    /// Prefix of the paths of the local devices.
    server: RwLock<String>,
    rails: Mutex<Rails>,
    pub(crate) closed: AtomicBool,
    next_endpoint: AtomicU32,
    making: Mutex<()>,
}

impl Node {
    pub(crate) fn open(config: RdmaConfig, runtime: &Handle, clock: SharedClock) -> Result<Arc<Self>> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        config.check()?;
        let nics = open_devices(&config)?;
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
            closed: AtomicBool::new(false),
            next_endpoint: AtomicU32::new(1),
            making: Mutex::new(()),
        }))
    }

    /// Learns the name of this node from its descriptor. Returns the name to publish, which is
    /// empty if it is the name of the segment.
    pub(crate) fn learn_name(&self, desc: &SegmentDesc) -> String {
        let own = &self.config.server_name;
        let known = match own.is_empty() {
            true => desc.name.clone(),
            false => {
                let port = desc.handshake.as_ref().map(|at| at.port);
                HostPort::parse(own, port.unwrap_or_else(|| HostPort::parse(&desc.name, DEFAULT_PORT).port))
                    .to_string()
            }
        };
        if *self.server.read() != known {
            self.server.write().clone_from(&known);
        }
        if own.is_empty() { String::new() } else { known }
    }

    fn own_path(&self, nic: &Nic) -> String {
        format!("{}@{}", self.server.read(), nic.name)
    }

    /// Returns the rails to a peer, from each local device to each of its devices.
    pub(crate) fn peer(&self, about: About) -> Peer {
        let mut rails = self.rails.lock();
        // No peer refers to the other rails any more, and they have no connection.
        rails.retain(|_, rail| Arc::strong_count(rail) > 1);
        let ways = |nic: &Arc<Nic>| {
            let one = |device: &String| {
                let path = format!("{}@{device}", about.server);
                let rail = rail(&mut rails, nic.index, &path, about.instance, &about.at);
                *rail.at.lock() = about.at.clone();
                rail
            };
            about.devices.iter().map(one).collect()
        };
        let rails = self.nics.iter().map(ways).collect();
        Peer { rails, turn: AtomicUsize::new(0), owner: self.id, about }
    }

    /// Returns the best rail to a peer now, for memory of that NUMA node.
    pub(crate) fn choose(
        &self,
        peer: &Peer,
        node: Option<u32>,
        local: Option<usize>,
        now: Moment,
        turn: usize,
        avoid: Option<(usize, usize)>,
    ) -> Option<RailCandidate> {
        let near = |nic: &Nic| node.is_none() || nic.node.is_none() || nic.node == node;
        let ways =
            self.nics.iter().filter(|nic| local.is_none_or(|local| nic.index == local)).flat_map(|nic| {
                let (up, near) = (nic.is_up(), near(nic));
                peer.rails[nic.index].iter().enumerate().map(move |(remote, rail)| RailCandidate {
                    local: nic.index,
                    remote,
                    up,
                    near,
                    twin: self.config.are_partners(&nic.name, &peer.about.devices[remote]),
                    paused: rail.paused(),
                })
            });
        rails::best(ways, now, turn, avoid)
    }

    /// Passes messages to the connection of a rail, and creates the connection if there is none.
    pub(crate) fn send(self: &Arc<Self>, rail: &Arc<Rail>, pieces: &mut Vec<Piece>) {
        let mut refused = Vec::new();
        for _ in 0..2 {
            let endpoint = match self.connection(rail) {
                Ok(endpoint) => endpoint,
                // The device was lost after the rail was chosen. That does not count as a retry.
                Err(error) if self.nics[rail.nic].is_lost() => {
                    return pieces.drain(..).for_each(|piece| self.moved(piece, &error));
                }
                Err(error) => {
                    return pieces.drain(..).for_each(|piece| piece.done.finish(Err(error.clone())));
                }
            };
            let soonest = pieces.iter().filter_map(|piece| piece.done.deadline()).min();
            let sent = endpoint.send(pieces, &mut refused);
            if let Some(at) = soonest {
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
            let why = Error::new(
                ErrorCode::TransferFail,
                "the peer closes every connection right after the handshake",
            );
            piece.done.finish(Err(unreachable(rail, &why)));
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
            let why = Error::new(ErrorCode::TransferFail, "the last connection attempt failed a moment ago");
            return Err(unreachable(rail, &why));
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
        let _alone = self.making.lock();
        if let Some(endpoint) = rail.active_endpoint() {
            return Ok((endpoint, false));
        }
        let endpoint = self.make(rail)?;
        *rail.current.lock() = Some(endpoint.clone());
        // A connection that is already retired would never be detached otherwise.
        if endpoint.is_retired() {
            self.detach(&endpoint);
        }
        Ok((endpoint, true))
    }

    fn make(&self, rail: &Arc<Rail>) -> Result<Arc<Endpoint>> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        let nic = &self.nics[rail.nic];
        if nic.is_lost() {
            return Err(lost(nic));
        }
        let most = nic.max_endpoints(&self.config);
        while nic.order.lock().len() >= most {
            let victim = nic.order.lock().victim().ok_or_else(|| {
                Error::new(
                    ErrorCode::NoAvailableHandle,
                    format!(
                        "cannot connect: all connections of RDMA device {:?} are in use. connections={most}",
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
        let over = if self.closed.load(Ordering::Acquire) { Some(closed()) } else { None };
        if let Some(error) = over.or_else(|| nic.is_lost().then(|| lost(nic))) {
            nic.endpoints.write().remove(&id);
            return Err(error);
        }
        nic.order.lock().add(endpoint.clone());
        Ok(endpoint)
    }

    /// Connects from this side.
    async fn connect(self: &Arc<Self>, endpoint: &Arc<Endpoint>) -> Result<()> {
        let own = self.own_path(&endpoint.nic);
        let mine = Connection {
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
            self.blocking(endpoint, mine, Phase::Open).await?;
            return self.opened(endpoint);
        }
        let at = endpoint.rail.at.lock().clone();
        let ask = async |message: &Connection| {
            let body = message.encode().to_string();
            let reply = exchange(&at, Kind::Connection, body.as_bytes(), &self.config.handshake).await?;
            let reply: Value = serde_json::from_slice(&reply)
                .map_err(|e| Error::invalid(format!("handshake port {at}: reply is not JSON: {e}")))?;
            let reply = Connection::decode(&reply)?;
            match reply.refusal.is_empty() {
                true => Ok(reply),
                false => Err(Error::new(ErrorCode::TransferFail, format!("{at} refuses: {}", reply.refusal))),
            }
        };
        let reply = ask(&mine).await?;
        check_instance(endpoint.rail.instance, reply.instance)?;
        if reply.pairs.is_empty() {
            return Err(Error::new(ErrorCode::NotSupported, format!("{at} does not support rdma")));
        }
        let wants_word = reply.ready.is_some();
        // The peer may have connected to this node meanwhile. Then the pairs are the same, or one
        // side is out of date.
        if self.blocking(endpoint, reply, Phase::Open).await? == Setup::Different {
            return Err(Error::new(
                ErrorCode::TransferFail,
                "both sides connected at the same time, to different queue pairs",
            ));
        }
        self.opened(endpoint)?;
        if wants_word {
            // The peer receives messages in any case: only its sending waits for this message.
            ask(&Connection { ready: Some(true), ..mine }).await.map(drop)?;
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
        let (node, ours) = (self.clone(), endpoint.clone());
        let set_up = move || ours.set_up(&node.config, &with, then);
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
            endpoint.rail.paused.fetch_max(until.0, Ordering::Relaxed);
        }
        let Some(waiting) = self.retire_and_detach(endpoint) else { return };
        for mut piece in waiting {
            piece.attempts += 1;
            let others = piece.peer.rails.iter().map(Vec::len).sum::<usize>() > 1;
            let again = others
                && usize::from(piece.attempts) < piece.peer.rails.iter().map(Vec::len).sum::<usize>() + 1;
            match again {
                true => self.reroute(piece, Some(&endpoint.rail), error),
                false => piece.done.finish(Err(unreachable(&endpoint.rail, error))),
            }
        }
    }

    /// Responds to a peer that sets up a connection, at the handshake port of this node.
    pub(crate) async fn accept(self: &Arc<Self>, request: &Value) -> Value {
        let reply = match Connection::decode(request) {
            Ok(request) => self.answer(request).await,
            Err(error) => Err(error),
        };
        reply.unwrap_or_else(|error| Connection::refused(error.to_string())).encode()
    }

    async fn answer(self: &Arc<Self>, request: Connection) -> Result<Connection> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        check_instance(request.peer_instance, Some(self.instance))?;
        let nic = self.nics.iter().find(|nic| self.own_path(nic) == request.peer_nic_path);
        let nic = nic.ok_or_else(|| {
            let ours: Vec<String> = self.nics.iter().map(|nic| self.own_path(nic)).collect();
            Error::invalid(format!(
                "unknown device {:?}; this node has {}",
                request.peer_nic_path,
                ours.join(", ")
            ))
        })?;
        if nic.is_lost() {
            return Err(lost(nic));
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
                Ok(Setup::Connected | Setup::Known) => {
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
    pub(crate) fn retire(self: &Arc<Self>, endpoint: &Arc<Endpoint>, why: &Error) {
        let Some(waiting) = self.retire_and_detach(endpoint) else { return };
        debug!(?endpoint, %why, "connection retired");
        for piece in waiting {
            self.moved(piece, why);
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
        let Teardown::Gone(left) = endpoint.destroy() else { return false };
        endpoint.nic.endpoints.write().remove(&endpoint.id);
        let error = Error::new(ErrorCode::TransferFail, "the device did not return the request");
        for mut piece in left {
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
    pub(crate) fn sweep(&self, peer: &Peer) {
        for rail in peer.rails.iter().flatten() {
            let endpoint = rail.current.lock().clone();
            for piece in endpoint.iter().flat_map(|endpoint| endpoint.take_cancelled()) {
                piece.give_back();
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
                let why = Error::new(ErrorCode::TransferFail, "RDMA connection failed (request flushed)");
                return self.moved(piece, &why);
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
            return piece.done.finish(Err(unreachable(rail, &error)));
        }
        self.reroute(piece, Some(rail), &error);
    }

    /// Sends a message again that was flushed by the failure of another one, or not posted.
    fn moved(self: &Arc<Self>, mut piece: Piece, why: &Error) {
        piece.flushes += 1;
        if piece.flushes > MAX_FLUSHES {
            let again = format!("RDMA connection failed repeatedly; last error: {why}");
            return piece.done.finish(Err(Error::new(ErrorCode::TransferFail, again)));
        }
        self.reroute(piece, None, why);
    }

    fn pause_rail(&self, rail: &Rail) {
        let until = self.clock.now().after(self.config.rail_pause);
        rail.paused.store(until.0, Ordering::Relaxed);
    }

    /// Sends a message on another rail than the failed one, if there is one and the deadline has
    /// not passed.
    fn reroute(self: &Arc<Self>, mut piece: Piece, failed: Option<&Arc<Rail>>, why: &Error) {
        let now = self.clock.now();
        if self.closed.load(Ordering::Acquire) {
            return piece.done.finish(Err(closed()));
        }
        if piece.done.is_given_up() {
            return piece.give_back();
        }
        if piece.done.deadline().is_some_and(|at| now >= at) {
            return piece.done.finish(Err(too_late()));
        }
        let peer = piece.peer.clone();
        let avoid = failed.and_then(|failed| {
            let is = |rail: &Arc<Rail>| Arc::ptr_eq(rail, failed);
            Some((failed.nic, peer.rails.get(failed.nic)?.iter().position(is)?))
        });
        let turn = peer.turn.fetch_add(1, Ordering::Relaxed);
        let way = self.choose(&peer, None, None, now, turn, avoid);
        let keys = way.and_then(|way| {
            Some((piece.key_on(way.local)?, peer.about.key(piece.region as usize, way.remote)?, way))
        });
        match keys {
            Some((local_key, remote_key, way)) => {
                (piece.local_key, piece.remote_key) = (local_key, remote_key);
                self.send(&peer.rails[way.local][way.remote], &mut vec![piece]);
            }
            None => piece.done.finish(Err(Error::new(
                ErrorCode::TransferFail,
                format!("no local RDMA device is up; last error: {why}"),
            ))),
        }
    }

    /// Retires every connection of a device.
    pub(crate) fn retire_all(self: &Arc<Self>, nic: &Nic, why: &Error) {
        let all: Vec<Arc<Endpoint>> = nic.endpoints.read().values().cloned().collect();
        for endpoint in all {
            self.retire(&endpoint, why);
        }
    }

    /// Closes the node: it refuses handshakes and sends nothing any more.
    pub(crate) fn close(self: &Arc<Self>) {
        self.closed.store(true, Ordering::Release);
        for nic in &self.nics {
            self.retire_all(nic, &closed());
            nic.wake();
        }
    }
}

/// Checks that the process at the other end is the expected one.
///
/// # Errors
/// Returns `TransferFail` if another process has the port now.
fn check_instance(wanted: Option<Instance>, found: Option<Instance>) -> Result<()> {
    match wanted {
        Some(wanted) if found != Some(wanted) => {
            Err(Error::new(ErrorCode::TransferFail, OtherInstance { wanted, found }.to_string()))
        }
        _ => Ok(()),
    }
}

fn rail(rails: &mut Rails, nic: usize, path: &str, instance: Option<Instance>, at: &HostPort) -> Arc<Rail> {
    let make = || Rail {
        nic,
        path: path.into(),
        instance,
        at: Mutex::new(at.clone()),
        paused: AtomicU64::new(0),
        closed_until: AtomicU64::new(0),
        current: Mutex::new(None),
    };
    if let Some(known) = rails.get(&(nic, path.to_owned(), instance)) {
        return known.clone();
    }
    // Removes the rails of peers without users and without a connection: restarted peers come with
    // new names.
    if rails.len() >= FEW_RAILS && rails.len().is_power_of_two() {
        rails.retain(|_, rail| Arc::strong_count(rail) > 1);
    }
    let rail = Arc::new(make());
    rails.insert((nic, path.into(), instance), rail.clone());
    rail
}

/// Number of rails below which unused ones are not removed.
const FEW_RAILS: usize = 64;

/// Opens the configured devices, all of which must work, or all usable devices if none is
/// configured.
fn open_devices(config: &RdmaConfig) -> Result<Vec<Arc<Nic>>> {
    let mut nics = Vec::new();
    if !config.devices.is_empty() {
        for name in &config.devices {
            nics.push(Nic::open(nics.len(), name, config)?);
        }
        return Ok(nics);
    }
    let mut faults = Vec::new();
    for name in device_names()?.into_iter().filter(|name| config.selects(name)) {
        match Nic::open(nics.len(), &name, config) {
            Ok(nic) => nics.push(nic),
            Err(error) => {
                warn!(device = name, %error, "device is not used");
                faults.push(error.to_string());
            }
        }
    }
    if nics.is_empty() {
        let why = if faults.is_empty() { "none found".into() } else { faults.join("; ") };
        return Err(Error::new(ErrorCode::NotSupported, format!("no RDMA device can be used: {why}")));
    }
    Ok(nics)
}

fn unreachable(rail: &Rail, why: &Error) -> Error {
    Error::new(ErrorCode::TransferFail, format!("cannot reach {}: {why}", rail.path))
}

fn lost(nic: &Nic) -> Error {
    Error::new(ErrorCode::TransferFail, format!("RDMA device {:?} is lost", nic.name))
}

fn closed() -> Error {
    Error::new(ErrorCode::TransferFail, "the RDMA transport is closed")
}

/// Pieces by local device, while a submission is split.
pub(crate) type ByDevice = Vec<(usize, Vec<Piece>)>;
