//! Handlers of the RPCs that start writes.

use std::slice::from_ref;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::evict::{Batch, MergeableOrder};
use mooncake_core::replica::{MAX_SESSION_ID, Replica, ReplicateConfig};

use mooncake_protocol::api::{Caller, WriteMode};
use mooncake_protocol::call::Response;
use mooncake_protocol::frame::{MAX_REPLY, Refusal, too_large};
use mooncake_protocol::message::*;
use mooncake_protocol::pack;

use super::chains::key_in;
use super::handlers::caller;
use super::master::Master;
use super::matching::{MAX_UNCHECKED, REPLICA_LEN};
use super::put::Put;
use crate::space::mount::MAX_LOCALITY;

/// Writes that one call starts.
struct Starts<'r> {
    caller: Caller<'r>,
    mode: WriteMode,
    keys: &'r [&'r [u8]],
    sizes: &'r [u64],
    config: &'r ReplicateConfig,
    /// True if the call is about one object, and not a batch of one.
    is_single: bool,
}

impl Starts<'_> {
    /// Starts the write of the object at this index by `start`.
    fn start<A: SegmentAllocator, E: MergeableOrder, R>(
        &self,
        master: &Master<A, E>,
        at: usize,
        start: impl FnOnce(&Put<'_>) -> Result<R>,
    ) -> Result<R> {
        if self.keys.len() != self.sizes.len() {
            return Err(Error::invalid(format!(
                "cannot start writes: {} lengths for {} objects",
                self.sizes.len(),
                self.keys.len()
            )));
        }
        let (tenant, len) = (self.caller.tenant, self.sizes[at]);
        let (key, group) = (master.scoped(tenant, self.keys[at])?, self.group(at)?);
        let group = master.scoped_group(tenant, group);
        let session = self.session(at)?;
        let (writer, mode, config) = (self.caller.into(), self.mode, self.config);
        let put = Put { writer, mode, key: &key, len, config, group: &group, session };
        start(&put).map_err(|error| self.refusal(master, len, error))
    }

    /// Refuses starts whose response may exceed the maximum length, before any of them is granted.
    fn check_reply(&self, with_localities: bool) -> Result<(), Refusal> {
        let count = self.keys.len();
        let replica = REPLICA_LEN + if with_localities { MAX_LOCALITY } else { 0 };
        let each = replica.saturating_mul(usize::try_from(self.config.replicas).unwrap_or(usize::MAX));
        if count < MAX_UNCHECKED || count.saturating_mul(each) <= MAX_REPLY {
            return Ok(());
        }
        let fields = format_args!("keys={count} replicas={}", self.config.replicas);
        Err(too_large("the start of writes", fields, "start fewer writes at a time"))
    }

    /// Returns the chain of the keys, if the policy has a use for it.
    fn chain<A: SegmentAllocator, E: MergeableOrder>(&self, master: &Master<A, E>) -> Option<Batch> {
        let Caller { client, tenant, .. } = self.caller;
        master.put_chain(client, tenant, self.keys, self.config.hints.as_deref())
    }

    /// Returns the group of the object at this index; empty for none.
    fn group(&self, at: usize) -> Result<&str> {
        match &self.config.group_ids {
            None => Ok(""),
            Some(groups) if groups.len() == self.keys.len() => Ok(&groups[at]),
            Some(groups) => Err(Error::invalid(format!(
                "cannot start writes: {} group ids for {} objects",
                groups.len(),
                self.keys.len()
            ))),
        }
    }

    /// Returns the session of the object at this index, after a check of the lists that have an
    /// item for each key.
    fn session(&self, at: usize) -> Result<Option<&[u8]>> {
        let config = self.config;
        for (what, len) in [
            ("session ids", config.session_ids.as_ref().map(Vec::len)),
            ("residency affinity ids", config.residency_affinity_ids.as_ref().map(Vec::len)),
            ("lists of preferred devices", self.lists_of_devices()),
        ] {
            if let Some(len) = len.filter(|len| *len != self.keys.len()) {
                return Err(Error::invalid(format!(
                    "cannot start writes: {len} {what} for {} objects",
                    self.keys.len()
                )));
            }
        }
        let session = config.session_ids.as_ref().map(|sessions| &sessions[at][..]);
        match session.map_or(0, <[u8]>::len) {
            0..=MAX_SESSION_ID => Ok(session),
            len => Err(Error::invalid(format!(
                "cannot start writes: a session id has at most {MAX_SESSION_ID} bytes. len={len}"
            ))),
        }
    }

    /// Returns the number of lists of devices, if it must be that of the keys. The call for one
    /// object takes any number, and an empty list is none.
    fn lists_of_devices(&self) -> Option<usize> {
        let lists = self.config.per_key_preferred_hca_names.as_ref().map(Vec::len);
        lists.filter(|len| *len > 0 && !self.is_single)
    }

    /// Returns the error that the caller of a refused put receives.
    fn refusal<A: SegmentAllocator, E: MergeableOrder>(
        &self,
        master: &Master<A, E>,
        len: u64,
        error: Error,
    ) -> Error {
        if error.code() == ErrorCode::ObjectAlreadyExists {
            master.space().counters.existed(!self.is_single);
        }
        // Mooncake C++ does not number writes, so it does not receive this error: no client need
        // wait for free space that cannot exist.
        if self.caller.attempt != 0
            && error.code() == ErrorCode::NoAvailableHandle
            && master.space().is_too_large(len)
        {
            return Error::new(ErrorCode::BufferOverflow, "no segment is large enough").with_source(error);
        }
        error
    }
}

/// Implements [`Handle`] for the starts of writes.
macro_rules! starts {
    ($($how:ident $call:ident: |$master:ident, $r:ident| $starts:expr;)*) => {$(
        impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<$call<'a>> for Master<A, E> {
            fn handle(&self, $r: $call<'a>) -> Outcome<$call<'a>> {
                let $master = self;
                let starts = $starts;
                let chain = starts.chain($master);
                let start = |at| starts.start(self, at, |put| self.put_start_in(put, key_in(chain.as_ref(), at)));
                starts!(@handle $how starts start)
            }

            fn respond(&self, $r: $call<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
                let $master = self;
                let with_localities = response.may_have_members() && $master.has_localities();
                let starts = $starts;
                starts.check_reply(with_localities)?;
                if with_localities {
                    response.set::<$call<'a>>(self.handle($r));
                    return Ok(());
                }
                let chain = starts.chain($master);
                let start = |at, out: &mut pack::Writer<'_>| {
                    starts.start(self, at, |put| self.put_start_to(put, key_in(chain.as_ref(), at), out))
                };
                starts!(@respond $how $call starts start response)
            }
        }
    )*};
    (@handle one $starts:ident $start:ident) => { $start(0) };
    (@handle many $starts:ident $start:ident) => { (0..$starts.keys.len()).map($start).collect() };
    (@respond one $call:ident $starts:ident $start:ident $response:ident) => {
        $response.write_one::<$call<'a>, Vec<Replica>>(|out| $start(0, out))
    };
    (@respond many $call:ident $starts:ident $start:ident $response:ident) => {
        $response.write_each::<$call<'a>, Vec<Replica>>($starts.keys.len(), $start)
    };
}

starts! {
    one PutStart: |_master, r| Starts {
        caller: caller(r.client, r.tenant),
        mode: WriteMode::Put,
        keys: from_ref(&r.key),
        sizes: from_ref(&r.size),
        config: &r.config,
        is_single: true,
    };
    one UpsertStart: |_master, r| Starts {
        caller: caller(r.client, r.tenant),
        mode: WriteMode::Upsert,
        keys: from_ref(&r.key),
        sizes: from_ref(&r.size),
        config: &r.config,
        is_single: true,
    };
    many BatchPutStart: |_master, r| Starts {
        caller: caller(r.client, r.tenant),
        mode: WriteMode::Put,
        keys: &r.keys,
        sizes: &r.sizes,
        config: &r.config,
        is_single: false,
    };
    many BatchUpsertStart: |_master, r| Starts {
        caller: caller(r.client, r.tenant),
        mode: WriteMode::Upsert,
        keys: &r.keys,
        sizes: &r.sizes,
        config: &r.config,
        is_single: false,
    };
    many StartHintedWrites: |master, r| Starts {
        caller: Caller { client: r.client, tenant: r.tenant, attempt: r.attempt },
        mode: if r.replace { WriteMode::Upsert } else { WriteMode::Put },
        keys: &r.keys,
        sizes: &r.sizes,
        config: &master.hinted(r.tenant, &r.keys, &r.config, &r.hints),
        is_single: r.keys.len() == 1,
    };
    many StartWrites: |_master, r| Starts {
        caller: Caller { client: r.client, tenant: r.tenant, attempt: r.attempt },
        mode: if r.replace { WriteMode::Upsert } else { WriteMode::Put },
        keys: &r.keys,
        sizes: &r.sizes,
        config: &r.config,
        is_single: r.keys.len() == 1,
    };
}
