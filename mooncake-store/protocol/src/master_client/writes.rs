//! Calls that write objects. Those of this project have numbers: a late or repeated call of one
//! write has no effect on another.

use std::borrow::Cow;
use std::slice::from_ref;
use std::sync::atomic::AtomicBool;

use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::hints::{KeepPart, PutHints};
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig};

use super::{Location, MasterCall, MasterClient, Relaxed};
use crate::api::{Caller, EndItem, PutItem, WriteMode};
use crate::call::Reply;
use crate::message::*;
use crate::pack::Pack;

/// True once this process has warned that a master ignores hints.
static WARNED_OF_HINTS: AtomicBool = AtomicBool::new(false);

impl MasterClient {
    /// Makes a call of a numbered write. Returns `None` if the write has no number or the master is
    /// known to lack these calls.
    ///
    /// The discovery that the master lacks them is the error `NOT_SUPPORTED`. The caller must then
    /// check whether an end or a revoke without a number is still safe.
    ///
    /// The call is counted as the corresponding call of Mooncake C++: one of `calls`, for one item
    /// or for several.
    async fn numbered<R, T>(
        &self,
        attempt: u64,
        calls: [u32; 2],
        request: R,
        items: usize,
    ) -> Option<Result<Vec<Result<T>>>>
    where
        R: MasterCall,
        R::Reply: Reply<Outcome = Vec<Result<T>>>,
    {
        if attempt == 0 || !self.fences_writes() {
            return None;
        }
        let outcomes = self.call_each_as(calls[usize::from(items > 1)], request, items).await;
        if outcomes.as_ref().is_err_and(|error| error.code() == ErrorCode::NotSupported) {
            self.missing.numbered_writes.store(true, Relaxed);
        }
        Some(outcomes)
    }

    /// Grants space for each object of one request. An earlier version of this system refuses a
    /// message with compatible fields, so they are left out for it.
    pub(super) async fn put_start_part(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        if !config.has_members() || matches!(self.master, Location::Embedded(_)) {
            return self.start_writes(caller, mode, items, &[config]).await;
        }
        let shorter = without_members(config);
        let forms = [config, &shorter];
        let forms = if self.missing.members.load(Relaxed) { &forms[1..] } else { &forms[..] };
        self.start_writes(caller, mode, items, forms).await
    }

    /// Makes the first call that the master has, with the first form of the options that it takes.
    async fn start_writes(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        forms: &[&ReplicateConfig],
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        let Caller { client, tenant, attempt } = caller;
        let (keys, sizes): (Cow<'_, [&[u8]]>, Cow<'_, [u64]>) = match items {
            [item] => (from_ref(&item.key).into(), from_ref(&item.len).into()),
            items => {
                (items.iter().map(|item| item.key).collect(), items.iter().map(|item| item.len).collect())
            }
        };
        let (keys, sizes) = (Cow::Borrowed(&keys[..]), Cow::Borrowed(&sizes[..]));
        let calls = match mode {
            WriteMode::Put => [PutStart::FUNCTION, BatchPutStart::FUNCTION],
            WriteMode::Upsert => [UpsertStart::FUNCTION, BatchUpsertStart::FUNCTION],
        };
        let counted = calls[usize::from(items.len() > 1)];
        let replace = mode == WriteMode::Upsert;
        let hints = forms[0].hints.as_deref();
        if let Some(hints) = hints.filter(|_| !self.missing.hints.load(Relaxed)) {
            for (at, config) in forms.iter().enumerate() {
                let (keys, sizes) = (keys.clone(), sizes.clone());
                let (config, hints) = (Cow::Borrowed(*config), Cow::Borrowed(hints));
                let request =
                    StartHintedWrites { client, attempt, replace, keys, sizes, config, hints, tenant };
                match self.call_each_as(counted, request, items.len()).await {
                    Err(error) if error.code() == ErrorCode::NotSupported => {}
                    outcomes => return self.with_form(at, outcomes),
                }
            }
            self.missing.hints.store(true, Relaxed);
            warn_of_hints(hints);
        }
        if attempt != 0 && self.fences_writes() {
            for (at, config) in forms.iter().enumerate() {
                let (keys, sizes, config) = (keys.clone(), sizes.clone(), Cow::Borrowed(*config));
                let request = StartWrites { client, attempt, replace, keys, sizes, config, tenant };
                match self.call_each_as(counted, request, items.len()).await {
                    // A start needs no number to be correct.
                    Err(error) if error.code() == ErrorCode::NotSupported => {}
                    outcomes => return self.with_form(at, outcomes),
                }
            }
            self.missing.numbered_writes.store(true, Relaxed);
        }
        for (at, config) in forms.iter().enumerate() {
            match self.start_unnumbered(caller, mode, items, (&keys, &sizes), config).await {
                Err(error) if error.code() == ErrorCode::InvalidVersion && at + 1 < forms.len() => {}
                outcomes => return self.with_form(at, outcomes),
            }
        }
        Err(Error::internal("the options of a write have no form"))
    }

    /// Records that the master takes the options in the form with index `at`, and refused them with
    /// their compatible fields before.
    fn with_form<T>(&self, at: usize, outcomes: Result<T>) -> Result<T> {
        if at > 0 && outcomes.is_ok() && !self.missing.members.swap(true, Relaxed) {
            tracing::warn!("this master ignores session ids and preferred devices: it is an older one");
        }
        outcomes
    }

    /// Makes the call of Mooncake C++ about these keys and sizes.
    async fn start_unnumbered(
        &self,
        Caller { client, tenant, .. }: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        (keys, sizes): (&[&[u8]], &[u64]),
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        let (keys, sizes, config) = (keys.into(), sizes.into(), Cow::Borrowed(config));
        match (mode, items) {
            (WriteMode::Put, &[PutItem { key, len: size }]) => {
                self.call_one(PutStart { client, key, size, config, tenant }).await
            }
            (WriteMode::Upsert, &[PutItem { key, len: size }]) => {
                self.call_one(UpsertStart { client, key, size, config, tenant }).await
            }
            (WriteMode::Put, items) => {
                self.call_each(BatchPutStart { client, keys, sizes, config, tenant }, items.len()).await
            }
            (WriteMode::Upsert, items) => {
                self.call_each(BatchUpsertStart { client, keys, sizes, config, tenant }, items.len()).await
            }
        }
    }

    pub(super) async fn put_end_part(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[EndItem<'_>],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let Caller { client, tenant, attempt } = caller;
        let replace = mode == WriteMode::Upsert;
        let request = EndWrites { client, attempt, replace, items: items.into(), replicas, tenant };
        let calls = match mode {
            WriteMode::Put => [PutEnd::FUNCTION, BatchPutEnd::FUNCTION],
            WriteMode::Upsert => [UpsertEnd::FUNCTION, BatchUpsertEnd::FUNCTION],
        };
        if let Some(outcomes) = self.numbered(attempt, calls, request, items.len()).await {
            return outcomes;
        }
        match (mode, items) {
            (WriteMode::Put, &[item]) => self.call_one(PutEnd { client, item, replicas, tenant }).await,
            (WriteMode::Upsert, &[item]) => self.call_one(UpsertEnd { client, item, replicas, tenant }).await,
            (WriteMode::Put, items) => {
                let request = BatchPutEnd { client, items: items.into(), replicas, tenant };
                self.call_each(request, items.len()).await
            }
            (WriteMode::Upsert, items) if replicas == ReplicaType::All => {
                let request = BatchUpsertEnd { client, items: items.into(), tenant };
                self.call_each(request, items.len()).await
            }
            // The batch call lacks a field for the type of replicas.
            (WriteMode::Upsert, items) => {
                let mut outcomes = Vec::with_capacity(items.len());
                for &item in items {
                    outcomes.extend(self.call_one(UpsertEnd { client, item, replicas, tenant }).await?);
                }
                Ok(outcomes)
            }
        }
    }

    pub(super) async fn put_revoke_part(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        keys: &[&[u8]],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let Caller { client, tenant, attempt } = caller;
        let replace = mode == WriteMode::Upsert;
        let request = RevokeWrites { client, attempt, replace, keys: keys.into(), replicas, tenant };
        let calls = match mode {
            WriteMode::Put => [PutRevoke::FUNCTION, BatchPutRevoke::FUNCTION],
            WriteMode::Upsert => [UpsertRevoke::FUNCTION, BatchUpsertRevoke::FUNCTION],
        };
        if let Some(outcomes) = self.numbered(attempt, calls, request, keys.len()).await {
            return outcomes;
        }
        match (mode, keys) {
            (WriteMode::Put, &[key]) => self.call_one(PutRevoke { client, key, replicas, tenant }).await,
            (WriteMode::Upsert, &[key]) => {
                self.call_one(UpsertRevoke { client, key, replicas, tenant }).await
            }
            (WriteMode::Put, keys) => {
                let request = BatchPutRevoke { client, keys: keys.into(), replicas, tenant };
                self.call_each(request, keys.len()).await
            }
            (WriteMode::Upsert, keys) if replicas == ReplicaType::All => {
                self.call_each(BatchUpsertRevoke { client, keys: keys.into(), tenant }, keys.len()).await
            }
            (WriteMode::Upsert, keys) => {
                let mut outcomes = Vec::with_capacity(keys.len());
                for &key in keys {
                    outcomes.extend(self.call_one(UpsertRevoke { client, key, replicas, tenant }).await?);
                }
                Ok(outcomes)
            }
        }
    }
}

/// Returns the options without compatible fields.
fn without_members(config: &ReplicateConfig) -> ReplicateConfig {
    ReplicateConfig {
        session_ids: None,
        preferred_hca_names: None,
        per_key_preferred_hca_names: None,
        residency_affinity_ids: None,
        ..config.clone()
    }
}

/// Warns once in this process that the master ignores hints, with those of the first put.
fn warn_of_hints(hints: &PutHints) {
    if WARNED_OF_HINTS.swap(true, Relaxed) {
        return;
    }
    let fields = [
        ("parent_key", hints.parent.is_some()),
        ("position", hints.position.is_some()),
        ("keep", hints.keep != KeepPart::Any),
        ("ttl_ms", hints.ttl_ms.is_some()),
        ("delete_after_read", hints.delete_after_read),
    ];
    let names: Vec<&str> = fields.into_iter().filter_map(|(name, is_set)| is_set.then_some(name)).collect();
    tracing::warn!("this master ignores hints of puts: it is an older one, or Mooncake C++. hints={names:?}");
}
