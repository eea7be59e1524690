//! Process in its world of process groups: engine, data links, agent, and on rank 0 the
//! coordinator.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::{Error, Result};
use mooncake_engine::{TransferEngine, TransferEngineBuilder};
use mooncake_pg::control::{Agent, ControlSettings, CoordinatorServer, is_refusal};
use mooncake_pg::link::DataPlane;
use mooncake_pg::protocol::{AttachMode, GroupSpec};
use mooncake_pg::secret::Secret;
use mooncake_pg::view::{GlobalRank, MAX_RANKS};
use mooncake_transport::net::HostPort;
use parking_lot::Mutex;
use pyo3::prelude::*;

use super::arguments::slot_of;
use super::communicator::{GroupCommunicator, GroupParts, GroupSettings};
use crate::engine::{InnerTransferEngine, builder};
use crate::error::exception;
use crate::runtime::{not_forked, wait};

/// Longest time that the coordinator waits for the other ranks to leave.
const LEAVE_WITHIN: Duration = Duration::from_secs(30);

/// Sets the length of the reconciliation windows of this process, in microseconds.
#[pyfunction]
pub(super) fn set_fault_reconciliation_window(microseconds: u64) {
    mooncake_pg::control::set_fault_reconciliation_window(Duration::from_micros(microseconds));
}

/// Process in its world.
#[pyclass(frozen, module = "mooncake._mooncake", name = "GroupContext")]
pub(crate) struct GroupContext {
    rank: GlobalRank,
    host: String,
    plane: DataPlane,
    secret: Option<Secret>,
    server: Mutex<Option<CoordinatorServer>>,
    agent: Mutex<Option<Agent>>,
}

/// Returns the builder of an engine of process groups: with RDMA if this host has devices for it.
fn own_engine(host: &str, devices: &[String]) -> Result<TransferEngineBuilder> {
    let (discovery, _) = TransferEngine::builder().environment().topology_source();
    let protocol = if discovery.hardware().nics.is_empty() { "tcp" } else { "rdma" };
    builder(host, "P2PHANDSHAKE", protocol, &devices.join(","))
}

impl GroupContext {
    fn settings(&self) -> ControlSettings {
        let (secret, bind) = (self.secret.clone(), self.plane.bound_address());
        ControlSettings { secret, bind, ..ControlSettings::default() }
    }

    fn agent(&self) -> Result<Agent> {
        let agent = self.agent.lock().clone();
        agent.ok_or_else(|| Error::invalid("cannot create group: the process has no coordinator"))
    }
}

#[pymethods]
impl GroupContext {
    /// Starts the data plane of this process at `host`, with its own engine or the given one. The
    /// host of a given engine replaces `host`.
    #[new]
    #[pyo3(signature = (rank, host, devices, engine=None))]
    fn new(
        py: Python<'_>,
        rank: i64,
        host: String,
        devices: Vec<String>,
        engine: Option<PyRef<'_, InnerTransferEngine>>,
    ) -> PyResult<Self> {
        not_forked()?;
        let shared = engine.map(|engine| engine.engine().clone());
        let host = match &shared {
            Some(engine) => HostPort::parse(engine.name(), 0).host.to_owned(),
            None => host,
        };
        // The environment is read while no other thread can change it.
        let secret = Secret::from_environment().map_err(|error| exception(py, &error))?;
        let own = match shared {
            Some(_) => None,
            None => Some(own_engine(&host, &devices)),
        };
        let started = wait(py, async {
            let engine = match (shared, own) {
                (Some(engine), _) => engine,
                (None, Some(builder)) => builder?.start().await?,
                (None, None) => return Err(Error::internal("no engine")),
            };
            DataPlane::start_with_secret(engine, &host, secret.clone())
        });
        let plane = started.map_err(|error| exception(py, &error))?;
        let rank = slot_of(rank).map_err(|error| exception(py, &error))?;
        let (server, agent) = Default::default();
        Ok(Self { rank: GlobalRank(rank.0), host, plane, secret, server, agent })
    }

    /// Returns the rank of this process in its world.
    #[getter]
    fn rank(&self) -> u8 {
        self.rank.0
    }

    /// Starts the coordinator of the world, and returns its address.
    fn serve(&self, py: Python<'_>) -> PyResult<String> {
        not_forked()?;
        let started = wait(py, CoordinatorServer::start(&self.host, self.settings()));
        let server = started.map_err(|error| exception(py, &error))?;
        let address = server.address().to_owned();
        *self.server.lock() = Some(server);
        Ok(address)
    }

    /// Connects this process to the coordinator, and waits for its registration.
    fn connect(&self, py: Python<'_>, coordinator: String) -> PyResult<()> {
        not_forked()?;
        let connected = wait(py, Agent::connect(&coordinator, self.rank, &self.host, self.settings()));
        *self.agent.lock() = Some(connected.map_err(|error| exception(py, &error))?);
        Ok(())
    }

    /// Sets the times, in microseconds, after which collective and point-to-point operations
    /// examine the ranks that they wait for.
    fn set_timeouts(&self, collective: u64, p2p: u64) {
        self.plane.timeouts().set_collective(Duration::from_micros(collective));
        self.plane.timeouts().set_p2p(Duration::from_micros(p2p));
    }

    /// Registers a group, and waits until it is ready. If the coordinator refuses the group, the
    /// communicator is local. `mirror` has an integer of 32 bits per slot, and `owner` keeps it.
    #[allow(clippy::too_many_arguments, reason = "one call makes a group")]
    fn communicator(
        &self,
        py: Python<'_>,
        name: String,
        order: Vec<u8>,
        slot: i64,
        capacity: usize,
        is_extension: bool,
        deactivates: bool,
        syncs: bool,
        mirror: usize,
        owner: Py<PyAny>,
    ) -> PyResult<GroupCommunicator> {
        not_forked()?;
        let settings = GroupSettings {
            slot: slot_of(slot).map_err(|error| exception(py, &error))?,
            size: order.len(),
            capacity,
            syncs,
            mirror,
            owner,
        };
        if capacity < order.len() || capacity > MAX_RANKS {
            let (size, max) = (order.len(), MAX_RANKS);
            return Err(exception(
                py,
                &Error::invalid(format!(
                    "cannot create group: capacity is out of range. capacity={capacity} size={size} max={max}"
                )),
            ));
        }
        let spec = GroupSpec {
            name,
            order: order.into_iter().map(GlobalRank).collect(),
            capacity,
            mode: if is_extension { AttachMode::AttachOrExtend } else { AttachMode::CreateOrAttach },
            auto_deactivate: deactivates,
        };
        let made = self.agent().and_then(|agent| {
            wait(py, async move {
                let group = match agent.register_group(spec).await {
                    Ok(group) => Some(Arc::new(group)),
                    Err(error) if is_refusal(&error) => {
                        tracing::warn!(%error, "group is local: the coordinator refuses it");
                        None
                    }
                    Err(error) => return Err(error),
                };
                let parts = GroupParts::new(&self.plane, group, settings)?;
                parts.wait_until_ready().await?;
                Ok(parts)
            })
        });
        made.map(GroupCommunicator::new).map_err(|error| exception(py, &error))
    }

    /// Leaves the world. The coordinator waits for the other ranks to leave, for at most 30 s.
    fn shut_down(&self, py: Python<'_>) -> PyResult<()> {
        not_forked()?;
        let (server, agent) = (self.server.lock().take(), self.agent.lock().take());
        let ended = wait(py, async {
            if let Some(server) = server {
                server.shut_down(self.rank, LEAVE_WITHIN).await;
            }
            if let Some(agent) = agent {
                agent.shut_down().await;
            }
            Ok(())
        });
        ended.map_err(|error| exception(py, &error))
    }
}
