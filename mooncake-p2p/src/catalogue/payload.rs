//! Entry of the catalogue: the shards of an object, and the locations of their copies.

use mooncake_core::{Error, ErrorCode, Result};
use serde::{Deserialize, Deserializer};

use super::go_json::{push_list, push_string};

/// Length that every maximum length of a shard divides.
const SHARD_UNIT: u64 = 4 << 30;

/// Object in the catalogue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Payload {
    /// Name of the object.
    #[serde(default, deserialize_with = "null_as_default")]
    pub name: String,
    /// Length in bytes.
    #[serde(default, deserialize_with = "null_as_default")]
    pub size: u64,
    /// Lengths of the ranges of memory that the object consists of, in bytes.
    #[serde(default, deserialize_with = "null_as_default")]
    pub size_list: Vec<u64>,
    /// Maximum length of a shard in bytes.
    #[serde(default, deserialize_with = "null_as_default")]
    pub max_shard_size: u64,
    /// Shards of all ranges in order.
    #[serde(default, deserialize_with = "null_as_default")]
    pub shards: Vec<Shard>,
}

/// Part of an object that is read as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Shard {
    /// Length in bytes.
    #[serde(default, deserialize_with = "null_as_default")]
    pub size: u64,
    /// Copies at nodes that registered the object.
    #[serde(default, deserialize_with = "null_as_default")]
    pub gold: Vec<Location>,
    /// Copies at nodes that read the object.
    #[serde(default, deserialize_with = "null_as_default")]
    pub replica_list: Vec<Location>,
}

/// Copy of a shard in the memory of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
pub struct Location {
    /// Name of the segment.
    #[serde(default, deserialize_with = "null_as_default")]
    pub segment_name: String,
    /// Address of the first byte in the process of the node.
    #[serde(default, deserialize_with = "null_as_default")]
    pub offset: u64,
}

/// Role of the node that holds a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The node registered the object.
    Gold,
    /// The node read the object.
    Replica,
}

fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    value: D,
) -> std::result::Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

/// Returns the lengths of the shards of ranges with these lengths. Each range is cut from its own
/// start, and the last shard of a range may be short. `max_shard_size` is not 0.
pub fn shard_sizes(size_list: &[u64], max_shard_size: u64) -> impl Iterator<Item = u64> {
    size_list.iter().flat_map(move |size| {
        let count = size.div_ceil(max_shard_size);
        (0..count).map(move |index| max_shard_size.min(size - index * max_shard_size))
    })
}

impl Payload {
    /// Creates an object without copies.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an empty name, without ranges, for a range without bytes, and
    /// for a maximum length of shards that does not divide 4 GiB.
    pub fn new(name: &str, size_list: &[u64], max_shard_size: u64) -> Result<Self> {
        let refuse = |what: String| Err(Error::invalid(format!("cannot cut object: {what}. name={name:?}")));
        if name.is_empty() {
            return refuse("its name is empty".into());
        }
        if max_shard_size == 0 || !SHARD_UNIT.is_multiple_of(max_shard_size) {
            return refuse(format!("the shard size does not divide 4 GiB. max_shard_size={max_shard_size}"));
        }
        let size = size_list.iter().try_fold(0u64, |sum, size| sum.checked_add(*size));
        let Some(size) = size.filter(|_| !size_list.is_empty() && !size_list.contains(&0)) else {
            return refuse(format!("a range has no bytes, or there is none. sizes={size_list:?}"));
        };
        let shards = shard_sizes(size_list, max_shard_size);
        let shards = shards.map(|size| Shard { size, ..Shard::default() }).collect();
        Ok(Self { name: name.into(), size, size_list: size_list.to_vec(), max_shard_size, shards })
    }

    /// Encodes the object as the Go library does, byte by byte.
    pub fn encode(&self) -> String {
        let mut out = String::from("{\"name\":");
        push_string(&mut out, &self.name);
        out.push_str(&format!(",\"size\":{},\"size_list\":", self.size));
        push_list(&mut out, &self.size_list, |out, size| out.push_str(&size.to_string()));
        out.push_str(&format!(",\"max_shard_size\":{},\"shards\":", self.max_shard_size));
        push_list(&mut out, &self.shards, |out, shard| {
            out.push_str(&format!("{{\"size\":{},\"gold\":", shard.size));
            push_list(out, &shard.gold, push_location);
            out.push_str(",\"replica_list\":");
            push_list(out, &shard.replica_list, push_location);
            out.push('}');
        });
        out.push('}');
        out
    }

    /// Parses the output of [`encode`](Self::encode) or of the Go library.
    ///
    /// # Errors
    /// Returns `DESERIALIZE_FAIL` for text that is not such JSON, and for shards that do not have
    /// the lengths that the ranges imply.
    pub fn decode(text: &[u8]) -> Result<Self> {
        let refuse = |what: String| {
            let text = format!("cannot read object in the catalogue: {what}; remove the entry");
            Error::new(ErrorCode::DeserializeFail, text)
        };
        let payload: Self = serde_json::from_slice(text).map_err(|error| refuse(error.to_string()))?;
        let size = payload.size_list.iter().try_fold(0u64, |sum, size| sum.checked_add(*size));
        let sizes = payload.shards.iter().map(|shard| shard.size);
        if payload.max_shard_size == 0
            || size != Some(payload.size)
            || !shard_sizes(&payload.size_list, payload.max_shard_size).eq(sizes)
        {
            return Err(refuse(format!(
                "its shards do not have the lengths of its ranges. name={:?} size={} max_shard_size={}",
                payload.name, payload.size, payload.max_shard_size
            )));
        }
        Ok(payload)
    }

    /// Returns whether the other object is cut into the same shards.
    pub fn has_layout_of(&self, other: &Payload) -> bool {
        self.max_shard_size == other.max_shard_size && self.size_list == other.size_list
    }

    /// Returns whether a copy in `self` is one of `other`, too. Objects without a common copy may
    /// have different bytes.
    pub fn shares_copy_with(&self, other: &Payload) -> bool {
        self.shards.iter().zip(&other.shards).any(|(own, others)| {
            own.locations().any(|(location, _)| others.locations().any(|(other, _)| other == location))
        })
    }

    /// Returns whether any shard has a copy.
    pub fn has_copies(&self) -> bool {
        self.shards.iter().any(|shard| shard.locations().next().is_some())
    }

    /// Removes all copies.
    pub fn remove_all_copies(&mut self) {
        for shard in &mut self.shards {
            shard.gold.clear();
            shard.replica_list.clear();
        }
    }

    /// Adds a copy of a shard, unless it is listed. Returns whether the object changed.
    pub fn add(&mut self, role: Role, shard: usize, location: &Location) -> bool {
        let Some(shard) = self.shards.get_mut(shard) else { return false };
        let list = shard.list_mut(role);
        let is_new = !list.contains(location);
        if is_new {
            list.push(location.clone());
        }
        is_new
    }

    /// Removes the copies of a node in these roles. Returns whether the object changed.
    pub fn remove_node(&mut self, roles: &[Role], segment_name: &str) -> bool {
        let mut is_changed = false;
        for shard in &mut self.shards {
            for role in roles {
                let list = shard.list_mut(*role);
                let before = list.len();
                list.retain(|location| location.segment_name != segment_name);
                is_changed |= list.len() != before;
            }
        }
        is_changed
    }
}

impl Shard {
    /// Returns all copies with their roles.
    pub fn locations(&self) -> impl Iterator<Item = (&Location, Role)> {
        let replicas = self.replica_list.iter().map(|location| (location, Role::Replica));
        self.gold.iter().map(|location| (location, Role::Gold)).chain(replicas)
    }

    fn list_mut(&mut self, role: Role) -> &mut Vec<Location> {
        match role {
            Role::Gold => &mut self.gold,
            Role::Replica => &mut self.replica_list,
        }
    }
}

fn push_location(out: &mut String, location: &Location) {
    out.push_str("{\"segment_name\":");
    push_string(out, &location.segment_name);
    out.push_str(&format!(",\"offset\":{}}}", location.offset));
}
