//! Connection of the tool to one cluster.

use std::sync::OnceLock;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Reason, Result};
use tokio::runtime::Runtime;

use super::admin::Admin;
use super::args::To;
use super::connects::listens;
use mooncake_client::Client;
use mooncake_protocol::client::RpcOptions;
use mooncake_protocol::master_client::MasterClient;

/// Effect of a command on objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Reads,
    Writes,
    RemovesMany,
}

/// A cluster, and the connection of this process to it.
pub(super) struct Session {
    pub(super) to: To,
    pub(super) runtime: Runtime,
    /// RPC address of the master, once it is known.
    leader: OnceLock<String>,
}

impl Session {
    pub(super) fn new(to: To, runtime: Runtime) -> Self {
        Self { to, runtime, leader: OnceLock::new() }
    }

    pub(super) fn admin(&self) -> Result<Admin> {
        // A given admin address needs no leader.
        let master = if self.to.admin.is_some() { "" } else { self.leader()? };
        Admin::new(&self.to, master)
    }

    /// Returns the RPC address of the master: `--master`, or the leader that etcd names.
    pub(super) fn leader(&self) -> Result<&str> {
        if let Some(known) = self.leader.get() {
            return Ok(known);
        }
        if !self.to.cluster.is_empty() && !self.to.master.contains("://") {
            return Err(Error::invalid(format!(
                "cannot use --cluster: --master is a fixed address, and only an etcd has several \
                 clusters. cluster={:?} master={:?}; leave --cluster out, or give \
                 --master etcd://HOST:PORT",
                self.to.cluster, self.to.master
            )));
        }
        let found = self.runtime.block_on(async {
            let master = mooncake_client::programs::locate_master(&self.to.master, &self.to.cluster)?;
            master.now(self.to.timeout).await.map_err(|error| {
                let hint = format!(
                    "{} names no leader: check that address (--master) and --cluster",
                    self.to.master
                );
                error.context(hint)
            })
        })?;
        Ok(self.leader.get_or_init(|| found.to_string()))
    }

    pub(super) fn remote(&self) -> Result<MasterClient> {
        let options = RpcOptions {
            connect_timeout: self.to.timeout,
            call_timeout: self.to.timeout,
            ..RpcOptions::default()
        };
        Ok(MasterClient::remote(self.leader()?, options))
    }

    /// Returns the master's version. An error contains the likely cause.
    pub(super) fn master_version(&self) -> Result<String> {
        self.unexplained_version().map_err(|error| self.explained(error))
    }

    /// Returns the master's version.
    pub(super) fn unexplained_version(&self) -> Result<String> {
        let remote = self.remote()?;
        self.runtime.block_on(remote.version())
    }

    /// Joins the cluster as a client that offers `segment` bytes.
    pub(super) fn join(&self, segment: u64) -> Result<Client> {
        // Fail at once with a cause; joining would retry until its timeout.
        let version = self.master_version()?;
        mooncake_client::programs::check_version(&version)?;
        let joined = self.runtime.block_on(
            Client::builder()
                .master(self.to.master.as_str())
                .cluster_id(self.to.cluster.clone())
                .metadata(self.to.metadata.clone())
                .local_hostname(self.to.hostname.clone())
                .tenant(self.to.tenant.clone())
                .segment(segment)
                .timeout(self.to.timeout)
                .connect_timeout(self.to.timeout)
                .connect(),
        );
        joined.map_err(|error| match error.code() {
            // The master has just responded.
            ErrorCode::RpcFail | ErrorCode::RpcTimeout => {
                error.context(format!("cannot join the cluster of the master at {}", self.to.master))
            }
            _ => self.explained(error),
        })
    }

    /// Prints a warning if a tenant is given and the master has none, because commands then affect
    /// all objects.
    ///
    /// # Errors
    /// `INVALID_PARAMS` instead of the warning, for a command that changes objects.
    pub(super) fn check_tenant(&self, command: Use) -> Result<()> {
        let tenant = &self.to.tenant;
        if tenant == mooncake_protocol::api::DEFAULT_TENANT || is_planted("silent-tenant") {
            return Ok(());
        }
        let Ok(Some(false)) = self.admin().map(|admin| admin.has_tenants()) else { return Ok(()) };
        let text =
            format!("this master has no tenants (--enable_multi_tenants): --tenant {tenant} selects nothing");
        let effect = match command {
            Use::Reads => "",
            Use::Writes => "the object would belong to all",
            Use::RemovesMany => "every object would be removed",
        };
        if !effect.is_empty() {
            return Err(Error::invalid(format!("{text}, and {effect}; leave --tenant out")));
        }
        eprintln!("mooncake: {text}; using all objects");
        Ok(())
    }

    /// Adds the likely cause and a remedy to an error.
    pub(super) fn explained(&self, error: Error) -> Error {
        let master = self.leader.get().unwrap_or(&self.to.master);
        let hint = match error.code() {
            ErrorCode::RpcFail | ErrorCode::RpcTimeout if Admin::answers(master) => {
                format!(
                    "{master} speaks HTTP: give the RPC port of the master (--master, usually 50051), not the admin port"
                )
            }
            ErrorCode::RpcFail | ErrorCode::RpcTimeout
                if error.reason() == Some(Reason::ConnectionBroken) =>
            {
                format!("{master} is not a master: another program listens there (--master)")
            }
            ErrorCode::RpcTimeout if listens(master) => {
                format!(
                    "no master answers at {master}, although a process listens there: it is stopped or overloaded"
                )
            }
            ErrorCode::RpcFail | ErrorCode::RpcTimeout => {
                format!(
                    "no master answers at {master}: check the address (--master, MOONCAKE_MASTER), or run `mooncake doctor`"
                )
            }
            ErrorCode::TenantNotRegistered => {
                format!(
                    "the master knows no tenant {:?}: give another one (--tenant), or register it",
                    self.to.tenant
                )
            }
            _ => return error,
        };
        error.context(hint)
    }
}
