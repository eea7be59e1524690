//! Messages that both ends of a connection exchange at the handshake port, in the format of
//! Mooncake C++, and with the instances of the two sides, which Mooncake C++ ignores.

use std::net::Ipv6Addr;

use mooncake_core::{Error, Result};
use mooncake_transport::config::MAX_PAIRS;
use mooncake_transport::instance::Instance;
use serde_json::{Map, Value, json};

use crate::gid;

/// View of one side on a connection: a request, or the reply to one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connection {
    /// Device of the sender: `<server name>@<device>`.
    pub local_nic_path: String,
    /// Device of the receiver, in the same format.
    pub peer_nic_path: String,
    /// Local address (LID) of the sender, on InfiniBand.
    pub lid: u16,
    /// Global address (GID) of the sender.
    pub gid: Option<Ipv6Addr>,
    /// Numbers of the sender's queue pairs.
    pub pairs: Vec<u32>,
    /// Reason of a refusal; empty if the request is not refused.
    pub refusal: String,
    /// True if the sender is ready to receive. `None` for peers that do not report it; they are
    /// ready from the start.
    pub ready: Option<bool>,
    /// Instance of the sender. `None` for Mooncake C++.
    pub instance: Option<Instance>,
    /// Instance that the sender expects of the receiver. `None` if the receiver publishes none.
    pub peer_instance: Option<Instance>,
}

/// Key of this project in descriptors and in messages: the instance of the node.
pub const INSTANCE_KEY: &str = "rdma_instance";
/// Key of this project in messages: the instance that the receiver must have.
const PEER_INSTANCE_KEY: &str = "rdma_peer_instance";

impl Connection {
    /// Creates a refusal with its reason.
    pub fn refused(reason: impl Into<String>) -> Self {
        Self { refusal: reason.into(), ..Self::default() }
    }

    /// Returns the JSON form.
    pub fn encode(&self) -> Value {
        let mut value = json!({
            "local_nic_path": self.local_nic_path,
            "peer_nic_path": self.peer_nic_path,
            "local_lid": self.lid,
            "local_gid": self.gid.map(gid::text).unwrap_or_default(),
            "qp_num": self.pairs,
            "reply_msg": self.refusal,
            "payload": "",
        });
        let optional = [
            ("ready_ack", self.ready.map(Value::from)),
            (INSTANCE_KEY, self.instance.map(|instance| instance.to_string().into())),
            (PEER_INSTANCE_KEY, self.peer_instance.map(|instance| instance.to_string().into())),
        ];
        for (key, optional) in optional {
            if let Some(present) = optional {
                value[key] = present;
            }
        }
        value
    }

    /// Parses a message. Missing keys are empty, unknown ones are ignored.
    ///
    /// # Errors
    ///
    /// Returns `Invalid`, with the faulty key.
    pub fn decode(value: &Value) -> Result<Self> {
        let Value::Object(map) = value else { return Err(bad("not a JSON object")) };
        let number = |value: &Value, key: &str| {
            value.as_u64().ok_or_else(|| bad(format!("{key:?} is not a whole number: {value}")))
        };
        let lid = match map.get("local_lid") {
            None | Some(Value::Null) => 0,
            Some(value) => u16::try_from(number(value, "local_lid")?)
                .map_err(|_| bad("\"local_lid\" is out of range"))?,
        };
        let address = text(map, "local_gid")?;
        let gid = match address {
            "" => None,
            address => Some(
                gid::parse(address)
                    .ok_or_else(|| bad(format!("\"local_gid\" {address:?} is not sixteen bytes")))?,
            ),
        };
        let pairs = match map.get("qp_num") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(numbers)) if numbers.len() <= MAX_PAIRS => numbers
                .iter()
                .map(|value| {
                    let number = number(value, "qp_num")?;
                    u32::try_from(number)
                        .ok()
                        .filter(|n| *n <= MAX_PAIR_NUMBER)
                        .ok_or_else(|| bad(format!("invalid queue pair number: {number}")))
                })
                .collect::<Result<_>>()?,
            Some(Value::Array(numbers)) => {
                return Err(bad(format!("{} queue pairs; at most {MAX_PAIRS} are possible", numbers.len())));
            }
            Some(_) => return Err(bad("\"qp_num\" is not an array")),
        };
        let ready = match map.get("ready_ack") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(ready)) => Some(*ready),
            Some(_) => return Err(bad("\"ready_ack\" is not a boolean")),
        };
        let instance = |key: &str| match map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => Instance::from_json(value)
                .map(Some)
                .ok_or_else(|| bad(format!("{key:?} is not 16 hexadecimal digits"))),
        };
        Ok(Self {
            local_nic_path: text(map, "local_nic_path")?.into(),
            peer_nic_path: text(map, "peer_nic_path")?.into(),
            lid,
            gid,
            pairs,
            refusal: text(map, "reply_msg")?.into(),
            ready,
            instance: instance(INSTANCE_KEY)?,
            peer_instance: instance(PEER_INSTANCE_KEY)?,
        })
    }
}

/// Queue pair numbers have 24 bits.
const MAX_PAIR_NUMBER: u32 = (1 << 24) - 1;

fn text<'a>(map: &'a Map<String, Value>, key: &str) -> Result<&'a str> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(""),
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(bad(format!("{key:?} is not a string"))),
    }
}

fn bad(what: impl Into<String>) -> Error {
    Error::invalid(what.into()).context("connection handshake")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_message_of_mooncake_cpp_is_parsed() {
        let text = r#"{"local_gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01","local_lid":0,
            "local_nic_path":"10.77.0.1:15001@mlx5_0","payload":"","peer_nic_path":"10.77.0.2:15002@mlx5_1",
            "qp_num":[17,18],"ready_ack":false,"reply_msg":"","later":{}}"#;
        let message = Connection::decode(&serde_json::from_str(text).unwrap()).unwrap();
        assert_eq!(message.gid, Some("::ffff:10.77.0.1".parse().unwrap()));
        assert_eq!((message.pairs.as_slice(), message.ready), (&[17, 18][..], Some(false)));
        assert_eq!(Connection::decode(&json!({})).unwrap(), Connection::default());
        assert!(Connection::default().encode().get("ready_ack").is_none());
    }

    #[test]
    fn malformed_connection_error_states_cause() {
        for (value, word) in [
            (json!([]), "object"),
            (json!({"local_lid": 65536}), "range"),
            (json!({"local_lid": -1}), "whole"),
            (json!({"local_gid": "00:11"}), "sixteen"),
            (json!({"qp_num": 1}), "array"),
            (json!({"qp_num": [16_777_216]}), "invalid queue pair"),
            (json!({"qp_num": vec![1; 256]}), "at most"),
            (json!({"ready_ack": 1}), "boolean"),
            (json!({"reply_msg": 1}), "string"),
        ] {
            let error = Connection::decode(&value).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("handshake"), "{value}: {error}");
        }
    }

    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,60}".prop_map(Value::from),
            "([0-9a-f]{2}:){15}[0-9a-f]{2}".prop_map(Value::from),
        ];
        leaf.prop_recursive(2, 12, 4, |inner| prop::collection::vec(inner, 0..4).prop_map(Value::from))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

        #[test]
        fn messages_round_trip(paths in (".{0,20}", ".{0,20}"), lid: u16, gid: Option<u128>, pairs in prop::collection::vec(0..1u32 << 24, 0..9), refusal in ".{0,20}", ready: Option<bool>, instances: (Option<u64>, Option<u64>)) {
            let message = Connection {
                local_nic_path: paths.0, peer_nic_path: paths.1, lid, gid: gid.map(Ipv6Addr::from), pairs, refusal, ready,
                instance: instances.0.map(Instance), peer_instance: instances.1.map(Instance),
            };
            prop_assert_eq!(Connection::decode(&message.encode()).unwrap(), message);
        }

        #[test]
        fn malformed_messages_are_refused_as_a_whole(values in prop::collection::vec(anything(), 9)) {
            let keys = ["local_nic_path", "peer_nic_path", "local_lid", "local_gid", "qp_num", "reply_msg", "ready_ack", INSTANCE_KEY, PEER_INSTANCE_KEY];
            let map: Map<String, Value> = keys.iter().map(|k| (*k).to_owned()).zip(values).collect();
            if let Ok(message) = Connection::decode(&Value::Object(map)) {
                prop_assert_eq!(Connection::decode(&message.encode()).unwrap(), message);
            }
        }
    }
}
