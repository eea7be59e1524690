//! A node: its devices, the ways to its peers, and what happens when one of them fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, ErrorKind, Reason, Result};
use mooncake_transport::SegmentDesc;
use mooncake_transport::config::RdmaConfig;
use mooncake_transport::handshake::{Kind, exchange};
use mooncake_transport::net::{DEFAULT_PORT, HostPort};
use mooncake_transport::topology::Topology;
use serde_json::Value;
use tokio::runtime::Handle;
use tracing::{debug, warn};

use crate::endpoint::{Apart, Endpoint, Phase, Piece, Setup, too_late};
use crate::flow::Ended;
use crate::message::Connection;
use crate::nic::Nic;
use crate::peer::{About, Peer, Rails};
use crate::rails::{self, Way};
use crate::sync::{Mutex, RwLock};
use crate::verbs::{Status, device_names};

/// How often a message may come back because its connection failed for another's sake.
const MAX_FLUSHES: u16 = 64;

pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) config: RdmaConfig,
    pub(crate) clock: SharedClock,
    pub(crate) nics: Vec<Arc<Nic>>,
    runtime: Handle,
    /// What our devices' paths begin with.
    server: RwLock<String>,
    rails: Mutex<Rails>,
    pub(crate) closed: AtomicBool,
    next_endpoint: AtomicU32,
    making: Mutex<()>,
}

/// A way from one of our devices to one of a peer's.
pub(crate) struct Rail {
    nic: usize,
    /// The peer's device.
    pub(crate) path: String,
    at: Mutex<HostPort>,
    paused: AtomicU64,
    /// Connecting failed; it is not tried again before then.
    closed_until: AtomicU64,
    current: Mutex<Option<Arc<Endpoint>>>,
}

impl Rail {
    /// Its connection, unless that is given up.
    fn standing(&self) -> Option<Arc<Endpoint>> {
        self.current.lock().clone().filter(|endpoint| !endpoint.is_retired())
    }

    fn paused(&self) -> Moment {
        Moment(self.paused.load(Ordering::Relaxed))
    }
}

impl Node {
    pub(crate) fn open(config: RdmaConfig, runtime: &Handle, clock: SharedClock) -> Result<Arc<Self>> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        config.check()?;
        let nics = open_devices(&config)?;
        let is_used = |name: &str| nics.iter().any(|nic| nic.name == name);
        for name in config.topology.iter().flat_map(Topology::devices).filter(|name| !is_used(name)) {
            warn!(device = name, "is in the topology and is not used; peers are not told of it");
        }
        Ok(Arc::new(Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            server: RwLock::new(config.server_name.clone()),
            config,
            clock,
            nics,
            runtime: runtime.clone(),
            rails: Mutex::default(),
            closed: AtomicBool::new(false),
            next_endpoint: AtomicU32::new(1),
            making: Mutex::new(()),
        }))
    }

    /// Learns the name that peers know us by from a descriptor of ours. What that has to say of it: nothing when it is the segment's.
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

    /// The ways to a peer, from each of our devices to each of its.
    pub(crate) fn peer(&self, about: About) -> Peer {
        let mut rails = self.rails.lock();
        // Nobody knows those peers any more, and no connection stands.
        rails.retain(|_, rail| Arc::strong_count(rail) > 1);
        let ways = |nic: &Arc<Nic>| {
            let one = |device: &String| {
                let rail = rail(&mut rails, nic.index, &format!("{}@{device}", about.server), &about.at);
                *rail.at.lock() = about.at.clone();
                rail
            };
            about.devices.iter().map(one).collect()
        };
        let rails = self.nics.iter().map(ways).collect();
        Peer { rails, turn: AtomicUsize::new(0), owner: self.id, about }
    }

    /// The best way to a peer now, for memory of that NUMA node.
    pub(crate) fn choose(
        &self,
        peer: &Peer,
        node: Option<u32>,
        local: Option<usize>,
        now: Moment,
        turn: usize,
        avoid: Option<(usize, usize)>,
    ) -> Option<Way> {
        let near = |nic: &Nic| node.is_none() || nic.node.is_none() || nic.node == node;
        let ways =
            self.nics.iter().filter(|nic| local.is_none_or(|local| nic.index == local)).flat_map(|nic| {
                let (up, near) = (nic.is_up(), near(nic));
                peer.rails[nic.index].iter().enumerate().map(move |(remote, rail)| Way {
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

    /// Hands messages for one way over to its connection, making one if there is none.
    pub(crate) fn send(self: &Arc<Self>, rail: &Arc<Rail>, pieces: &mut Vec<Piece>) {
        let mut refused = Vec::new();
        for _ in 0..2 {
            let endpoint = match self.connection(rail) {
                Ok(endpoint) => endpoint,
                // Lost since the way was chosen, which a retry is not.
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
            let why = Error::new(ErrorCode::TransferFail, "connections end as soon as they are made");
            piece.done.finish(Err(unreachable(rail, &why)));
        }
        for piece in refused {
            piece.done.finish(Err(Error::new(
                ErrorCode::NoAvailableHandle,
                format!("the queue to {} is full", rail.path),
            )));
        }
    }

    /// The connection of a way; connecting starts at once and nobody waits for it here.
    fn connection(self: &Arc<Self>, rail: &Arc<Rail>) -> Result<Arc<Endpoint>> {
        if let Some(endpoint) = rail.standing() {
            return Ok(endpoint);
        }
        if Moment(rail.closed_until.load(Ordering::Relaxed)) > self.clock.now() {
            let why = Error::new(ErrorCode::TransferFail, "connecting failed a moment ago");
            return Err(unreachable(rail, &why));
        }
        let (endpoint, new) = self.standing_or_new(rail)?;
        if new {
            let (node, connecting) = (self.clone(), endpoint.clone());
            self.runtime.spawn(async move {
                if let Err(error) = node.connect(&connecting).await {
                    node.could_not_connect(&connecting, &error);
                }
            });
        }
        Ok(endpoint)
    }

    /// The connection of a way, made if there is none; whether it was made now. Connecting is up to whoever asked.
    fn standing_or_new(&self, rail: &Arc<Rail>) -> Result<(Arc<Endpoint>, bool)> {
        if let Some(endpoint) = rail.standing() {
            return Ok((endpoint, false));
        }
        // One at a time, and no way locked meanwhile: another's connection may have to give way.
        let _alone = self.making.lock();
        if let Some(endpoint) = rail.standing() {
            return Ok((endpoint, false));
        }
        let endpoint = self.make(rail)?;
        *rail.current.lock() = Some(endpoint.clone());
        // Given up in between, nobody would take it off any more.
        if endpoint.is_retired() {
            self.taken_off(&endpoint);
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
                    format!("RDMA device {:?} has {most} connections, all in use", nic.name),
                )
            })?;
            // Something may have come this instant; then it stays, and another goes.
            if victim.retire_idle(self.clock.now()) {
                debug!(?victim, "gives way to a new connection");
                self.taken_off(&victim);
            }
        }
        let id = self.next_endpoint.fetch_add(1, Ordering::Relaxed);
        let endpoint = Endpoint::new(id, nic, rail, &self.config)?;
        nic.endpoints.write().insert(id, endpoint.clone());
        // Nobody would take it apart any more; who gives up all there are looks after having said why.
        let over = if self.closed.load(Ordering::Acquire) { Some(closed()) } else { None };
        if let Some(error) = over.or_else(|| nic.is_lost().then(|| lost(nic))) {
            nic.endpoints.write().remove(&id);
            return Err(error);
        }
        nic.order.lock().add(endpoint.clone());
        Ok(endpoint)
    }

    /// Sets up a connection from our side.
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
        };
        if own == endpoint.rail.path {
            // To ourselves: the pairs are their own other ends.
            self.blocking(endpoint, mine, Phase::Open).await?;
            return self.opened(endpoint);
        }
        let at = endpoint.rail.at.lock().clone();
        let ask = async |message: &Connection| {
            let body = message.encode().to_string();
            let reply = exchange(&at, Kind::Connection, body.as_bytes(), &self.config.handshake).await?;
            let reply: Value = serde_json::from_slice(&reply)
                .map_err(|e| Error::invalid(format!("handshake port {at}: the reply is not JSON: {e}")))?;
            let reply = Connection::decode(&reply)?;
            match reply.refusal.is_empty() {
                true => Ok(reply),
                false => Err(Error::new(ErrorCode::TransferFail, format!("{at} refuses: {}", reply.refusal))),
            }
        };
        let reply = ask(&mine).await?;
        if reply.pairs.is_empty() {
            return Err(Error::new(ErrorCode::NotSupported, format!("{at} speaks no rdma")));
        }
        let wants_word = reply.ready.is_some();
        // It may have connected to us meanwhile; then the pairs are the same, or one of us is out of date.
        if self.blocking(endpoint, reply, Phase::Open).await? == Setup::Different {
            return Err(Error::new(
                ErrorCode::TransferFail,
                "both sides connected, to different queue pairs",
            ));
        }
        self.opened(endpoint)?;
        if wants_word {
            // What we send is received in any case: it is their sending that waits for this.
            ask(&Connection { ready: Some(true), ..mine }).await.map(drop)?;
        }
        Ok(())
    }

    /// Lets a connection send. One that cannot is over.
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

    fn could_not_connect(self: &Arc<Self>, endpoint: &Arc<Endpoint>, error: &Error) {
        if matches!(endpoint.phase(), Phase::Open | Phase::Waiting(_)) && error.kind() != ErrorKind::Invalid {
            // The peer connected to us in the meantime.
            return;
        }
        self.connection_failed(endpoint, error);
    }

    fn connection_failed(self: &Arc<Self>, endpoint: &Arc<Endpoint>, error: &Error) {
        debug!(?endpoint, %error, "could not connect");
        if error.reason() == Some(Reason::RouteLookup) && self.config.gid_retries > 0 {
            endpoint.nic.try_another_gid();
        }
        self.blame(&endpoint.rail);
        if !self.config.connect_pause.is_zero() {
            let until = self.clock.now().after(self.config.connect_pause);
            endpoint.rail.closed_until.store(until.0, Ordering::Relaxed);
            endpoint.rail.paused.fetch_max(until.0, Ordering::Relaxed);
        }
        let Some(waiting) = self.give_up(endpoint) else { return };
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

    /// Answers a peer that sets up a connection, at our handshake port.
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
        let nic = self.nics.iter().find(|nic| self.own_path(nic) == request.peer_nic_path);
        let nic = nic.ok_or_else(|| {
            let ours: Vec<String> = self.nics.iter().map(|nic| self.own_path(nic)).collect();
            Error::invalid(format!("{:?} is none of our devices: {}", request.peer_nic_path, ours.join(", ")))
        })?;
        if nic.is_lost() {
            return Err(lost(nic));
        }
        let Some((server, _)) = request.local_nic_path.rsplit_once('@') else {
            return Err(Error::invalid(format!("{:?} names no device", request.local_nic_path)));
        };
        let at = HostPort::parse(server, DEFAULT_PORT);
        let rail = rail(&mut self.rails.lock(), nic.index, &request.local_nic_path, &at);
        if request.ready == Some(true) {
            let current = rail.current.lock().clone();
            let endpoint = current.filter(|endpoint| endpoint.knows(&request.pairs));
            let endpoint = endpoint
                .ok_or_else(|| Error::invalid("no connection to those queue pairs is waiting for a word"))?;
            self.opened(&endpoint)?;
            return Ok(Connection::default());
        }
        let then = match request.ready {
            Some(_) => Phase::Waiting(self.clock.now().after(self.config.ready_timeout)),
            None => Phase::Open,
        };
        for _ in 0..2 {
            let (endpoint, _) = self.standing_or_new(&rail)?;
            match self.blocking(&endpoint, request.clone(), then).await {
                Ok(Setup::Connected | Setup::Known) => {
                    if then == Phase::Open {
                        self.opened(&endpoint)?;
                    }
                    return Ok(Connection {
                        local_nic_path: request.peer_nic_path,
                        peer_nic_path: request.local_nic_path,
                        lid: nic.lid(),
                        gid: Some(nic.gid().addr),
                        pairs: endpoint.numbers(),
                        refusal: String::new(),
                        ready: request.ready,
                    });
                }
                // The peer has started anew, or given up what we still had.
                Ok(Setup::Different) => {
                    let error = Error::new(ErrorCode::TransferFail, "the peer has connected anew");
                    self.retire(&endpoint, &error);
                }
                Err(error) => {
                    self.could_not_connect(&endpoint, &error);
                    return Err(error);
                }
            }
        }
        Err(Error::new(ErrorCode::ObjectReplicaBusy, "the connection changes too fast; try again"))
    }

    /// Gives up a connection; what had not been posted goes another way, what had follows when it is handed back.
    pub(crate) fn retire(self: &Arc<Self>, endpoint: &Arc<Endpoint>, why: &Error) {
        let Some(waiting) = self.give_up(endpoint) else { return };
        debug!(?endpoint, %why, "given up");
        for piece in waiting {
            self.moved(piece, why);
        }
    }

    fn give_up(&self, endpoint: &Arc<Endpoint>) -> Option<Vec<Piece>> {
        let waiting = endpoint.retire(self.clock.now())?;
        self.taken_off(endpoint);
        Some(waiting)
    }

    /// Nobody finds a connection any more that was retired.
    fn taken_off(&self, endpoint: &Arc<Endpoint>) {
        let mut current = endpoint.rail.current.lock();
        if current.as_ref().is_some_and(|current| current.id == endpoint.id) {
            *current = None;
        }
        drop(current);
        endpoint.nic.order.lock().remove(endpoint.id);
        endpoint.nic.wake();
    }

    /// Takes a retired connection apart. True when it is gone.
    pub(crate) fn bury(self: &Arc<Self>, endpoint: &Arc<Endpoint>) -> bool {
        let Apart::Gone(left) = endpoint.destroy() else { return false };
        endpoint.nic.endpoints.write().remove(&endpoint.id);
        let error = Error::new(ErrorCode::TransferFail, "the device did not hand it back");
        for mut piece in left {
            piece.begun = true;
            self.reroute(piece, Some(&endpoint.rail), &error);
        }
        true
    }

    /// The same for the last time: what cannot be taken apart is left as it is. False when somebody is busy with it just now.
    pub(crate) fn bury_or_forget(self: &Arc<Self>, endpoint: &Arc<Endpoint>) -> bool {
        if self.bury(endpoint) {
            return true;
        }
        if !matches!(endpoint.destroy(), Apart::Stuck) {
            return false;
        }
        let pieces = endpoint.forget();
        warn!(
            ?endpoint,
            pieces, "cannot be taken apart; its memory is never freed, since the device may use it"
        );
        endpoint.nic.endpoints.write().remove(&endpoint.id);
        true
    }

    /// Gives back what waits for its turn to this peer and nobody waits for any more.
    pub(crate) fn sweep(&self, peer: &Peer) {
        for rail in peer.rails.iter().flatten() {
            let endpoint = rail.current.lock().clone();
            for piece in endpoint.iter().flat_map(|endpoint| endpoint.given_up()) {
                piece.give_back();
            }
        }
    }

    /// Finishes a message, or sends it again.
    pub(crate) fn ended(self: &Arc<Self>, ended: Ended<Piece>, rail: &Arc<Rail>) {
        let Ended { message: mut piece, status } = ended;
        piece.begun = true;
        let error = match status {
            Status::Done => return piece.done.finish(Ok(())),
            Status::Refused => {
                let what = format!("{} bytes at {:#x} are refused by {}", piece.len, piece.remote, rail.path);
                return piece.done.finish(Err(Error::invalid(what)));
            }
            Status::Flushed => {
                let why = Error::new(ErrorCode::TransferFail, "its connection failed");
                return self.moved(piece, &why);
            }
            Status::Unanswered => Error::new(ErrorCode::TransferFail, "the peer does not answer"),
            Status::Local(n) => Error::new(ErrorCode::TransferFail, format!("local fault {n}")),
            Status::Failed(n) => Error::new(ErrorCode::TransferFail, format!("fault {n}")),
        };
        self.blame(rail);
        piece.attempts += 1;
        if u32::from(piece.attempts) > self.config.attempts {
            return piece.done.finish(Err(unreachable(rail, &error)));
        }
        self.reroute(piece, Some(rail), &error);
    }

    /// Sends a message again whose connection failed for another's sake, or before it was its turn.
    fn moved(self: &Arc<Self>, mut piece: Piece, why: &Error) {
        piece.flushes += 1;
        if piece.flushes > MAX_FLUSHES {
            let again = format!("its connection failed again and again; last: {why}");
            return piece.done.finish(Err(Error::new(ErrorCode::TransferFail, again)));
        }
        self.reroute(piece, None, why);
    }

    fn blame(&self, rail: &Rail) {
        let until = self.clock.now().after(self.config.rail_pause);
        rail.paused.store(until.0, Ordering::Relaxed);
    }

    /// Sends a message another way than the one that failed, if there is one and still time.
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
                format!("no RDMA device of ours works; last: {why}"),
            ))),
        }
    }

    /// Gives up every connection of a device.
    pub(crate) fn give_up_all(self: &Arc<Self>, nic: &Nic, why: &Error) {
        let all: Vec<Arc<Endpoint>> = nic.endpoints.read().values().cloned().collect();
        for endpoint in all {
            self.retire(&endpoint, why);
        }
    }

    /// Answers nobody and sends nothing any more.
    pub(crate) fn close(self: &Arc<Self>) {
        self.closed.store(true, Ordering::Release);
        for nic in &self.nics {
            self.give_up_all(nic, &closed());
            nic.wake();
        }
    }
}

fn rail(rails: &mut Rails, nic: usize, path: &str, at: &HostPort) -> Arc<Rail> {
    let make = || Rail {
        nic,
        path: path.into(),
        at: Mutex::new(at.clone()),
        paused: AtomicU64::new(0),
        closed_until: AtomicU64::new(0),
        current: Mutex::new(None),
    };
    if let Some(known) = rails.get(&(nic, path.to_owned())) {
        return known.clone();
    }
    // Those of peers that nobody knows any more, and that have no connection: peers that restart come with new names.
    if rails.len() >= FEW_RAILS && rails.len().is_power_of_two() {
        rails.retain(|_, rail| Arc::strong_count(rail) > 1);
    }
    let rail = Arc::new(make());
    rails.insert((nic, path.into()), rail.clone());
    rail
}

/// Ways that are kept without a look at who uses them.
const FEW_RAILS: usize = 64;

/// Opens the devices of the configuration, all of which must work, or whatever works of those there are.
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
                warn!(device = name, %error, "is not used");
                faults.push(error.to_string());
            }
        }
    }
    if nics.is_empty() {
        let why = if faults.is_empty() { "there is none".into() } else { faults.join("; ") };
        return Err(Error::new(ErrorCode::NotSupported, format!("no RDMA device can be used: {why}")));
    }
    Ok(nics)
}

fn unreachable(rail: &Rail, why: &Error) -> Error {
    Error::new(ErrorCode::TransferFail, format!("{} cannot be reached: {why}", rail.path))
}

fn lost(nic: &Nic) -> Error {
    Error::new(ErrorCode::TransferFail, format!("RDMA device {:?} is lost", nic.name))
}

fn closed() -> Error {
    Error::new(ErrorCode::TransferFail, "the RDMA transport is closed")
}

/// Pieces by our device, while a submission is cut up.
pub(crate) type ByDevice = Vec<(usize, Vec<Piece>)>;
