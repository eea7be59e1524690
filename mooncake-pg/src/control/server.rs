//! Coordinator of a world as a server.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{Moment, Rng, SharedClock, SystemClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, Result};
use mooncake_transport::admission::{ConnectionSlot, Connections, ListenerLimits};
use mooncake_transport::net;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::connection::{accept, carry};
use super::settings::ControlSettings;
use crate::coordinator::{CoordinatorMachine, Effect};
use crate::protocol::{ConnectionId, ToAgent, ToCoordinator, WorldId};
use crate::rank_set::RankSet;
use crate::secret::{is_refusal, refused};
use crate::view::GlobalRank;
use crate::wire::Purpose;

/// Messages that wait for one process. A connection that has more is closed; the agent connects
/// again and receives the present state.
const MAX_OUTGOING: usize = 4096;
/// Longest time between two steps of the state machine, below the step that counts as a stop.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Coordinator of a world, which serves the agents of all ranks. The drop stops it.
#[derive(Debug)]
pub struct CoordinatorServer {
    address: String,
    state: Arc<ServerState>,
    tasks: Vec<AbortHandle>,
}

#[derive(Debug)]
struct ServerState {
    settings: ControlSettings,
    clock: SharedClock,
    core: Mutex<ServerCore>,
    /// The next limit is earlier than before.
    earlier: Notify,
    /// Ranks with a connection.
    connected: watch::Sender<RankSet>,
}

#[derive(Debug)]
struct ServerCore {
    machine: CoordinatorMachine,
    outgoing: HashMap<ConnectionId, mpsc::Sender<ToAgent>>,
    last_connection: u64,
    effects: Vec<Effect>,
    /// Time until which the ticker sleeps.
    planned: Moment,
}

impl CoordinatorServer {
    /// Starts a coordinator at a free port of `host`, on the current tokio runtime.
    ///
    /// # Errors
    /// Returns an error if the host has no address, or if no port is free.
    pub async fn start(host: &str, settings: ControlSettings) -> Result<Self> {
        let (listener, address) =
            listen(host, settings.bind).await.map_err(|e| e.context("cannot start coordinator"))?;
        let clock = SystemClock::shared();
        let mut limits = settings.coordinator.clone();
        limits.window = settings.window.duration();
        let world = WorldId(Rng::from_os().next_u64());
        let machine = CoordinatorMachine::new(world, limits, clock.now());
        let state = Arc::new(ServerState {
            settings,
            clock,
            core: Mutex::new(ServerCore {
                machine,
                outgoing: HashMap::new(),
                last_connection: 0,
                effects: Vec::new(),
                planned: Moment::default(),
            }),
            earlier: Notify::new(),
            connected: watch::Sender::new(RankSet::EMPTY),
        });
        let tasks = vec![
            tokio::spawn(serve_listener(listener, state.clone())).abort_handle(),
            tokio::spawn(tick(state.clone())).abort_handle(),
        ];
        tracing::info!(address, "coordinator started");
        Ok(Self { address, state, tasks })
    }

    /// Returns host and port of the server.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Waits until no other rank than `own` has a connection, for at most `patience`, then stops
    /// the server.
    pub async fn shut_down(self, own: GlobalRank, patience: Duration) {
        let mut connected = self.state.connected.subscribe();
        let all_left = connected.wait_for(|connected| connected.without(own).is_empty());
        if timeout(patience, all_left).await.is_err() {
            let left = *self.state.connected.borrow();
            tracing::warn!(ranks = ?left.without(own), "coordinator stops before all ranks have left");
        }
    }
}

impl Drop for CoordinatorServer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Listens at a free port of a host, or of another address. Returns the listener and the address of
/// the host.
pub(super) async fn listen(host: &str, bind: Option<IpAddr>) -> Result<(ParentOnly<TcpListener>, String)> {
    let ip = match bind.map_or_else(|| host.trim_matches(['[', ']']).parse::<IpAddr>(), Ok) {
        Ok(ip) => ip,
        Err(_) => {
            let found = tokio::net::lookup_host((host, 0)).await?.next();
            found.ok_or_else(|| Error::invalid(format!("host has no address. host={host:?}")))?.ip()
        }
    };
    let listener = net::listen(ip, 0..=0, &mut Rng::from_os())?;
    let port = listener.local_addr()?.port();
    let address = mooncake_core::host_port::join(host, port);
    Ok((ParentOnly::new(TcpListener::from_std(listener)?), address))
}

async fn serve_listener(listener: ParentOnly<TcpListener>, state: Arc<ServerState>) {
    let mut connections = Connections::new(ListenerLimits {
        request: Some(state.settings.hello),
        idle: Some(state.settings.hello),
        ..ListenerLimits::new("group-coordinator", state.settings.connections, 8)
    });
    loop {
        let (stream, peer) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let state = state.clone();
        connections.admit(|slot| async move {
            match serve(ParentOnly::new(stream), &state, &slot).await {
                Err(error) if is_refusal(&error) => tracing::warn!(%peer, %error, "rank refused"),
                Err(error) => tracing::debug!(%peer, %error, "connection to coordinator ended"),
                Ok(()) => {}
            }
        });
    }
}

async fn serve(
    mut stream: ParentOnly<TcpStream>,
    state: &ServerState,
    slot: &ConnectionSlot,
) -> std::io::Result<()> {
    let secret = state.settings.secret.as_ref();
    let accepted = accept(&mut stream, secret, |hello| hello.purpose == Purpose::Control);
    let claim = timeout(state.settings.hello, accepted).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
    let (sender, outgoing) = mpsc::channel(MAX_OUTGOING);
    let connection = OpenConnection::new(state, sender);
    carry(stream, outgoing, state.settings.write, |message: ToCoordinator| {
        if let (Some(claim), ToCoordinator::Register { rank, session, .. }) = (claim, &message)
            && (claim.rank, claim.session) != (rank.0, session.0)
            && !is_planted("pg-rank-is-not-proved")
        {
            return Err(refused("the process registers as another rank than it has proved to be"));
        }
        // A connection is replaced by a new one only until its process has registered.
        if slot.work() {
            let id = connection.id;
            state.step(|machine, now, effects| machine.receive(id, message, now, effects));
        }
        Ok(())
    })
    .await
}

/// Connection that the state machine knows until the drop, however its task ends.
struct OpenConnection<'a> {
    id: ConnectionId,
    state: &'a ServerState,
}

impl<'a> OpenConnection<'a> {
    fn new(state: &'a ServerState, sender: mpsc::Sender<ToAgent>) -> Self {
        let mut core = state.core.lock();
        core.last_connection += 1;
        let id = ConnectionId(core.last_connection);
        core.outgoing.insert(id, sender);
        Self { id, state }
    }
}

impl Drop for OpenConnection<'_> {
    fn drop(&mut self) {
        let id = self.id;
        self.state.core.lock().outgoing.remove(&id);
        self.state.step(|machine, now, effects| machine.connection_lost(id, now, effects));
    }
}

async fn tick(state: Arc<ServerState>) {
    loop {
        state.step(|machine, now, effects| machine.tick(now, effects));
        let pause = {
            let mut core = state.core.lock();
            let now = state.clock.now();
            let latest = now.after(LONGEST_PAUSE);
            core.planned = core.machine.next_deadline().map_or(latest, |next| next.min(latest));
            core.planned.since(now)
        };
        // One more millisecond: timers of tokio have this resolution, and may end early by less.
        tokio::select! {
            () = tokio::time::sleep(pause + Duration::from_millis(1)) => {}
            () = state.earlier.notified() => {}
        }
    }
}

impl ServerState {
    /// Advances the state machine and carries out the effects.
    fn step(&self, call: impl FnOnce(&mut CoordinatorMachine, Moment, &mut Vec<Effect>)) {
        let mut core = self.core.lock();
        let ServerCore { machine, outgoing, effects, planned, .. } = &mut *core;
        let now = self.clock.now();
        machine.set_window(self.settings.window.duration());
        call(machine, now, effects);
        while !effects.is_empty() {
            let mut lost = Vec::new();
            for effect in effects.drain(..) {
                match effect {
                    Effect::Send { connection, message } => {
                        let sender = outgoing.get(&connection);
                        if sender.is_some_and(|sender| sender.try_send(message).is_err()) {
                            outgoing.remove(&connection);
                            lost.push(connection);
                        }
                    }
                    Effect::Close(connection) => {
                        outgoing.remove(&connection);
                    }
                }
            }
            for connection in lost {
                machine.connection_lost(connection, now, effects);
            }
        }
        let connected = machine.connected();
        if machine.next_deadline().is_some_and(|next| next < *planned) {
            self.earlier.notify_one();
        }
        drop(core);
        self.connected.send_if_modified(|known| std::mem::replace(known, connected) != connected);
    }
}
