//! Agent of a process: one connection to the coordinator, links to all processes, and calls.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{Moment, Rng, SharedClock, SystemClock};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;

use super::connection::{Identity, carry, open};
use super::links::{open_link, serve_links, wait_until_closed};
use super::server::listen;
use super::settings::ControlSettings;
use crate::agent::{AgentEffect, AgentMachine, CallError, CallId, CallValue, GroupKey, LinkAttempt};
use crate::protocol::{ConnectionId, GroupSpec, RankInfo, SessionId, ToAgent, ToCoordinator};
use crate::secret::{Claim, is_refusal};
use crate::view::{GlobalRank, Slot, View};
use crate::wire::Purpose;

/// Messages that wait for the coordinator. A connection that has more is replaced.
const MAX_OUTGOING: usize = 4096;

/// Outcome of a call of the state machine.
pub(super) type Outcome = std::result::Result<CallValue, CallError>;

/// Agent of this process. Clones share it; the drop of the last one ends it without a message.
#[derive(Clone, Debug)]
pub struct Agent {
    pub(super) state: Arc<AgentState>,
    _tasks: Arc<AgentTasks>,
}

/// Tasks of an agent, ended by the drop.
#[derive(Debug)]
struct AgentTasks {
    state: Arc<AgentState>,
    tasks: Vec<AbortHandle>,
}

impl Drop for AgentTasks {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        let mut core = self.state.core.lock();
        core.control = None;
        for (_, link) in core.links.drain() {
            link.abort();
        }
    }
}

/// State that tasks, calls and handles share.
#[derive(Debug)]
pub(super) struct AgentState {
    pub(super) rank: GlobalRank,
    coordinator: String,
    /// Proof of the process to others, if there is a secret.
    pub(super) identity: Option<Identity>,
    pub(super) settings: Arc<ControlSettings>,
    clock: SharedClock,
    runtime: Handle,
    core: Mutex<AgentCore>,
    /// The next limit is earlier than before.
    earlier: Notify,
}

#[derive(Debug)]
struct AgentCore {
    machine: AgentMachine,
    control: Option<(ConnectionId, mpsc::Sender<ToCoordinator>)>,
    /// Task of the last connection.
    control_task: Option<JoinHandle<()>>,
    links: HashMap<LinkAttempt, AbortHandle>,
    calls: HashMap<CallId, oneshot::Sender<Outcome>>,
    views: HashMap<GroupKey, watch::Sender<Option<Arc<View>>>>,
    last_call: u64,
    planned: Moment,
}

impl Agent {
    /// Starts the agent of a rank at `host`, connects it to the coordinator, and waits for its
    /// registration. Runs on the current tokio runtime.
    ///
    /// # Errors
    /// Returns an error if `host` has no free port, if the coordinator does not respond in time, or
    /// if it refuses the rank.
    pub async fn connect(
        coordinator: &str,
        rank: GlobalRank,
        host: &str,
        settings: ControlSettings,
    ) -> Result<Self> {
        let (listener, address) =
            listen(host, settings.bind).await.map_err(|e| e.context("cannot start agent"))?;
        let clock = SystemClock::shared();
        let mut rng = Rng::from_os();
        let session = SessionId(rng.next_u64());
        let settings = Arc::new(settings);
        let limits = settings.agent.clone().for_window(settings.window.duration());
        let machine = AgentMachine::new(rank, session, address, limits, rng, clock.now());
        let state = Arc::new(AgentState {
            rank,
            coordinator: coordinator.to_owned(),
            identity: settings
                .secret
                .clone()
                .map(|secret| Identity { secret, claim: Claim { rank: rank.0, session: session.0 } }),
            settings: settings.clone(),
            clock,
            runtime: Handle::current(),
            core: Mutex::new(AgentCore {
                machine,
                control: None,
                control_task: None,
                links: HashMap::new(),
                calls: HashMap::new(),
                views: HashMap::new(),
                last_call: 0,
                planned: Moment::default(),
            }),
            earlier: Notify::new(),
        });
        let tasks = vec![
            tokio::spawn(serve_links(listener, session, settings)).abort_handle(),
            tokio::spawn(tick(state.clone())).abort_handle(),
        ];
        let agent = Self { state: state.clone(), _tasks: Arc::new(AgentTasks { state, tasks }) };
        agent.state.call("connect", |machine, call, now, fx| machine.wait_for_session(call, now, fx)).await?;
        Ok(agent)
    }

    /// Returns the rank of the process.
    pub fn rank(&self) -> GlobalRank {
        self.state.rank
    }

    /// Returns the address of the coordinator.
    pub fn coordinator(&self) -> &str {
        &self.state.coordinator
    }

    /// Returns whether the process has a session with the coordinator.
    pub fn is_online(&self) -> bool {
        self.state.core.lock().machine.is_registered()
    }

    /// Registers a group with the state machine. The caller owns the registration.
    pub(super) async fn register(&self, spec: GroupSpec) -> Result<(GroupKey, Slot)> {
        let value = self
            .state
            .call("register group", |machine, call, now, fx| machine.register_group(call, spec, now, fx))
            .await?;
        match value {
            CallValue::Registered { group, slot } => Ok((group, slot)),
            other => Err(Error::internal(format!("cannot register group: outcome is {other:?}"))),
        }
    }

    /// Ends the session of the process. Calls fail from now on.
    pub async fn shut_down(&self) {
        self.state.step(|machine, _, effects| machine.leave(effects));
        // The task of the connection ends when the message is on its way.
        let task = self.state.core.lock().control_task.take();
        if let Some(task) = task {
            let _ = timeout(self.state.settings.hello, task).await;
        }
    }
}

/// Call whose caller waits. The drop cancels it.
struct WaitingCall<'a> {
    state: &'a Arc<AgentState>,
    call: CallId,
    outcome: oneshot::Receiver<Outcome>,
}

impl Drop for WaitingCall<'_> {
    fn drop(&mut self) {
        {
            let mut core = self.state.core.lock();
            if core.calls.remove(&self.call).is_some() {
                core.machine.cancel(self.call);
            }
        }
        // The outcome has arrived, and the caller has not seen it.
        if let Ok(Ok(CallValue::Registered { group, .. })) = self.outcome.try_recv() {
            self.state.abandon(group);
        }
    }
}

impl AgentState {
    /// Makes a call of the state machine and waits for its outcome.
    pub(super) async fn outcome(
        self: &Arc<Self>,
        begin: impl FnOnce(&mut AgentMachine, CallId, Moment, &mut Vec<AgentEffect>),
    ) -> Outcome {
        let (sender, outcome) = oneshot::channel();
        let call = {
            let mut core = self.core.lock();
            core.last_call += 1;
            let call = CallId(core.last_call);
            core.calls.insert(call, sender);
            call
        };
        let mut waiting = WaitingCall { state: self, call, outcome };
        self.step(|machine, now, effects| begin(machine, call, now, effects));
        let outcome = (&mut waiting.outcome).await;
        outcome.unwrap_or_else(|_| Err(CallError::Unavailable("the agent has ended".to_owned())))
    }

    /// Makes a call and names it in its error.
    pub(super) async fn call(
        self: &Arc<Self>,
        action: &str,
        begin: impl FnOnce(&mut AgentMachine, CallId, Moment, &mut Vec<AgentEffect>),
    ) -> Result<CallValue> {
        self.outcome(begin).await.map_err(|error| self.error(action, error))
    }

    /// Returns the error of a call.
    pub(super) fn error(&self, action: &str, error: CallError) -> Error {
        let (code, reason) = match error {
            // The coordinator names the call itself.
            CallError::Refused(reason) if reason.starts_with("cannot ") => {
                return Error::new(ErrorCode::UnavailableInCurrentStatus, reason);
            }
            CallError::Refused(reason) => (ErrorCode::UnavailableInCurrentStatus, reason),
            CallError::TimedOut(reason) => (ErrorCode::RpcTimeout, reason),
            CallError::Unavailable(reason) => (ErrorCode::RpcFail, reason),
        };
        let (rank, coordinator) = (self.rank, &self.coordinator);
        Error::new(code, format!("cannot {action}: {reason}. rank={rank} coordinator={coordinator}"))
    }

    /// Returns a part of the state.
    pub(super) fn read<T>(&self, part: impl FnOnce(&AgentMachine) -> T) -> T {
        part(&self.core.lock().machine)
    }

    /// Returns the views of a group for the data plane.
    pub(super) fn views(&self, group: GroupKey) -> watch::Receiver<Option<Arc<View>>> {
        self.core.lock().views.entry(group).or_insert_with(|| watch::Sender::new(None)).subscribe()
    }

    /// Ends a registration without waiting for the coordinator.
    pub(super) fn abandon(self: &Arc<Self>, group: GroupKey) {
        let call = {
            let mut core = self.core.lock();
            core.views.remove(&group);
            core.last_call += 1;
            CallId(core.last_call)
        };
        self.step(|machine, now, effects| machine.unregister(call, group, now, effects));
    }

    /// Advances the state machine and carries out the effects.
    pub(super) fn step(
        self: &Arc<Self>,
        call: impl FnOnce(&mut AgentMachine, Moment, &mut Vec<AgentEffect>),
    ) {
        let mut core = self.core.lock();
        let now = self.clock.now();
        let limits = self.settings.agent.clone().for_window(self.settings.window.duration());
        core.machine.set_limits(limits);
        let mut effects = Vec::new();
        call(&mut core.machine, now, &mut effects);
        while !effects.is_empty() {
            for effect in std::mem::take(&mut effects) {
                self.carry_out(&mut core, effect, now, &mut effects);
            }
        }
        if core.machine.next_deadline().is_some_and(|next| next < core.planned) {
            self.earlier.notify_one();
        }
    }

    fn carry_out(
        self: &Arc<Self>,
        core: &mut AgentCore,
        effect: AgentEffect,
        now: Moment,
        more: &mut Vec<AgentEffect>,
    ) {
        match effect {
            AgentEffect::Connect(connection) => {
                let (sender, outgoing) = mpsc::channel(MAX_OUTGOING);
                core.control = Some((connection, sender));
                let task = self.runtime.spawn(control(self.clone(), connection, outgoing));
                core.control_task = Some(task);
            }
            AgentEffect::Send { connection, message } => {
                let control = core.control.as_ref().filter(|(current, _)| *current == connection);
                if control.is_none_or(|(_, sender)| sender.try_send(message).is_err()) {
                    core.control = None;
                    core.machine.connection_lost(connection, now);
                }
            }
            AgentEffect::Close(connection) => {
                core.control.take_if(|(current, _)| *current == connection);
            }
            AgentEffect::OpenLink(attempt, info) => {
                let task = self.runtime.spawn(link(self.clone(), attempt, info));
                core.links.insert(attempt, task.abort_handle());
            }
            AgentEffect::CloseLink(attempt) => {
                if let Some(task) = core.links.remove(&attempt) {
                    task.abort();
                }
            }
            AgentEffect::Probe(info) => {
                let state = self.clone();
                self.runtime.spawn(async move {
                    let is_alive =
                        open_link(&info, state.settings.agent.probe, state.identity.as_ref()).await.is_some();
                    state.step(|machine, now, effects| {
                        machine.probed(info.rank, info.incarnation, is_alive, now, effects);
                    });
                });
            }
            AgentEffect::ViewChanged { group, view } => {
                let views = core.views.entry(group).or_insert_with(|| watch::Sender::new(None));
                views.send_replace(Some(view));
            }
            AgentEffect::Finished { call, outcome } => finish(core, call, outcome, now, more),
        }
    }
}

/// Passes an outcome to its caller. A registration whose caller is gone ends at once, so that the
/// next one of the same group follows its end.
fn finish(core: &mut AgentCore, call: CallId, outcome: Outcome, now: Moment, more: &mut Vec<AgentEffect>) {
    let sender = core.calls.remove(&call);
    let unwanted = match sender {
        Some(sender) => sender.send(outcome).err(),
        None => Some(outcome),
    };
    if let Some(Ok(CallValue::Registered { group, .. })) = unwanted {
        core.views.remove(&group);
        core.last_call += 1;
        core.machine.unregister(CallId(core.last_call), group, now, more);
    }
}

async fn tick(state: Arc<AgentState>) {
    loop {
        state.step(|machine, now, effects| machine.tick(now, effects));
        let pause = {
            let mut core = state.core.lock();
            let now = state.clock.now();
            core.planned = core.machine.next_deadline().unwrap_or(now.after(Duration::from_secs(1)));
            core.planned.since(now)
        };
        // One more millisecond: timers of tokio have this resolution, and may end early by less.
        tokio::select! {
            () = tokio::time::sleep(pause + Duration::from_millis(1)) => {}
            () = state.earlier.notified() => {}
        }
    }
}

/// Connects to the coordinator, and carries messages until the connection ends.
async fn control(
    state: Arc<AgentState>,
    connection: ConnectionId,
    mut outgoing: mpsc::Receiver<ToCoordinator>,
) {
    let limit = state.settings.agent.connect;
    let opened = open(&state.coordinator, Purpose::Control, SessionId(0), state.identity.as_ref());
    let connected = tokio::select! {
        connected = timeout(limit, opened) => connected,
        // No message is sent before the connection is open: the sender is gone.
        _ = outgoing.recv() => return,
    };
    match connected {
        Ok(Ok(stream)) => {
            state.step(|machine, now, effects| machine.connected(connection, now, effects));
            let write_limit = state.settings.write;
            let ended = carry(stream, outgoing, write_limit, |message: ToAgent| {
                state.step(|machine, now, effects| machine.receive(connection, message, now, effects));
                Ok(())
            });
            if let Err(error) = ended.await {
                tracing::debug!(rank = %state.rank, %error, "connection to coordinator ended");
            }
        }
        Ok(Err(error)) if is_refusal(&error) => {
            tracing::warn!(rank = %state.rank, coordinator = state.coordinator, %error, "rank refused");
            let reason = error.to_string();
            state.step(|machine, now, effects| machine.connection_refused(connection, reason, now, effects));
        }
        Ok(Err(error)) => {
            tracing::debug!(rank = %state.rank, coordinator = state.coordinator, %error, "cannot connect");
            let reason = error.to_string();
            state.step(|machine, now, _| machine.connection_failed(connection, reason, now));
        }
        Err(_) => {
            tracing::debug!(rank = %state.rank, coordinator = state.coordinator, "no response to hello");
        }
    }
    state.step(|machine, now, _| machine.connection_lost(connection, now));
}

/// Opens a link, and keeps it until it ends.
async fn link(state: Arc<AgentState>, attempt: LinkAttempt, info: RankInfo) {
    match open_link(&info, state.settings.agent.probe, state.identity.as_ref()).await {
        Some(mut stream) => {
            state.step(|machine, _, effects| machine.link_opened(attempt, effects));
            wait_until_closed(&mut stream).await;
            state.core.lock().links.remove(&attempt);
            state.step(|machine, now, effects| machine.link_broken(attempt, now, effects));
        }
        None => {
            state.core.lock().links.remove(&attempt);
            state.step(|machine, now, effects| machine.link_failed(attempt, now, effects));
        }
    }
}
