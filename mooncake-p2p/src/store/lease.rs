//! Lease of this node, and the end of the entries of other nodes.
//!
//! A node changes its record regularly. A record that stays the same for a lease is marked as
//! expired by one of the nodes that see it, which removes the entries of the node and then the
//! record. A node that finds its record marked or missing enters its copies again.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::meta::Expect;

use super::inner::{Copies, Inner, NodeLease, Opened};
use crate::catalogue::{Payload, Role, Shard};
use crate::object::Object;
use crate::records::NodeRecord;

const ROLES: [Role; 2] = [Role::Gold, Role::Replica];

/// Renews the lease until the store is dropped.
pub(super) async fn renew_regularly(store: Weak<Inner>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(inner) = store.upgrade() else { return };
        if let Err(error) = inner.bounded("renew lease", inner.renew_lease()).await {
            tracing::warn!(segment = inner.segment, %error, "lease not renewed");
        }
    }
}

impl Inner {
    /// Takes the record of this node. Ends the entries of an earlier process of the same name.
    pub(super) async fn begin_lease(&self) -> Result<()> {
        let mut lease = self.lease.lock().await;
        if self.records.node(&self.segment).await?.is_some() {
            self.end_entries(&self.segment).await?;
        }
        lease.revision = self.records.put_node(&self.segment, &lease.record, Expect::Any).await?;
        Ok(())
    }

    /// Deletes the record of this node.
    pub(super) async fn end_lease(&self) -> Result<()> {
        let mut lease = self.lease.lock().await;
        match lease.revision.take() {
            Some(revision) => self.records.delete_node(&self.segment, revision).await.map(drop),
            None => Ok(()),
        }
    }

    pub(super) async fn renew_lease(self: &Arc<Self>) -> Result<()> {
        let mut lease = self.lease.lock().await;
        let has_returned = self.send_heartbeat(&mut lease).await?;
        if has_returned {
            self.enter_again().await?;
        }
        // The reads come first: the node of each read was there before the read.
        let reads = self.records.reads().await?;
        let nodes = self.records.nodes().await?;
        let known: Vec<String> = nodes.iter().map(|(segment, _)| segment.clone()).collect();
        let expired = lease.others.observe(nodes, self.engine.clock().now(), self.options.lease);
        for (segment, revision) in &expired {
            if *segment != self.segment {
                self.expire(segment, *revision).await?;
            }
        }
        let is_expired = |segment: &String| expired.iter().any(|(expired, _)| expired == segment);
        for read in reads {
            let reader = &read.read.reader;
            if !known.contains(reader) || is_expired(reader) || is_expired(&read.source) {
                self.records.free_slot(&read.source, read.slot, read.revision).await?;
            }
        }
        Ok(())
    }

    /// Sends a heartbeat. Returns whether the lease had ended and has begun again.
    async fn send_heartbeat(&self, lease: &mut NodeLease) -> Result<bool> {
        lease.record.heartbeats += 1;
        if let Some(revision) = lease.revision {
            let put = self.records.put_node(&self.segment, &lease.record, Expect::At(revision)).await?;
            lease.revision = put;
            if put.is_some() {
                return Ok(false);
            }
            tracing::warn!(segment = self.segment, "lease ended; beginning another one");
        }
        match self.records.node(&self.segment).await? {
            None => {
                lease.revision = self.records.put_node(&self.segment, &lease.record, Expect::Absent).await?;
                Ok(lease.revision.is_some())
            }
            // The put of an earlier heartbeat succeeded, and its response was lost.
            Some((Some(record), revision))
                if record.instance == lease.record.instance && !record.has_expired =>
            {
                lease.revision = Some(revision);
                Ok(false)
            }
            // Another node removes the entries. If that node has ended, too, the mark expires.
            Some(_) => Ok(false),
        }
    }

    /// Enters all objects of this node again.
    async fn enter_again(&self) -> Result<()> {
        let opened = |opened: &Opened| match opened {
            Opened::Object(object) => Some(object.clone()),
            Opened::InProgress => None,
        };
        let objects: Vec<Arc<Object>> = self.objects.lock().values().filter_map(opened).collect();
        for object in objects {
            let copies = Copies {
                role: object.role,
                locations: object.locations.iter().cloned().enumerate().collect(),
                checksums: object.checksums.lock().clone(),
            };
            let mut known = object.layout.clone();
            if let Some(entry) = self.catalogue.read(&known.name).await? {
                if !self.has_bytes_of(&object, &entry.payload).await? {
                    tracing::warn!(name = known.name, "object was replaced; its copy is not entered again");
                    continue;
                }
                known = entry.payload;
            }
            self.enter(&copies, &known).await?;
        }
        Ok(())
    }

    /// Returns whether the bytes of an object are those of the object that has its name now, by the
    /// checksums of other nodes. Returns false if no other node has checksums.
    async fn has_bytes_of(&self, object: &Object, payload: &Payload) -> Result<bool> {
        if !payload.has_layout_of(&object.layout) {
            return Ok(false);
        }
        let own = object.checksums.lock().clone();
        let locations = payload.shards.iter().flat_map(Shard::locations);
        let segments: BTreeSet<&str> =
            locations.map(|(location, _)| location.segment_name.as_str()).collect();
        for segment in segments {
            let others = self.records.checksums(&payload.name, segment).await?;
            let mut pairs = own.crc64.iter().zip(&others.crc64);
            if let Some((own, others)) = pairs.find(|(own, others)| own.is_some() && others.is_some()) {
                return Ok(own == others);
            }
        }
        Ok(false)
    }

    /// Marks a node as expired, ends its entries, and deletes its record. Does nothing if the node
    /// or another observer has changed the record meanwhile.
    async fn expire(&self, segment: &str, revision: u64) -> Result<()> {
        let mark = NodeRecord { instance: 0, heartbeats: 0, has_expired: true };
        // The mark has another number each time, so that its revision differs in every service.
        let mark = NodeRecord { heartbeats: self.rng.lock().next_u64(), ..mark };
        let Some(marked) = self.records.put_node(segment, &mark, Expect::At(revision)).await? else {
            return Ok(());
        };
        tracing::info!(segment, "lease of a node has ended; removing its entries");
        self.end_entries(segment).await?;
        self.records.delete_node(segment, marked).await.map(drop)
    }

    /// Removes all entries of a node.
    async fn end_entries(&self, segment: &str) -> Result<()> {
        for entry in self.catalogue.list("").await? {
            let is_listed = entry.payload.clone().remove_node(&ROLES, segment);
            if is_listed {
                self.remove_copies(&entry.payload.name, &ROLES, segment).await?;
            }
        }
        for read in self.records.reads().await? {
            if read.read.reader == segment || read.source == segment {
                self.records.free_slot(&read.source, read.slot, read.revision).await?;
            }
        }
        Ok(())
    }
}
