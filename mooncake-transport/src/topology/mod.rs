//! Map from memory locations to near network devices: the priority matrix of Mooncake C++.

mod discover;
pub mod ports;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use mooncake_core::{Error, Result};
use serde_json::Value;

pub use discover::{Discovery, Gpu, Hardware, Nic};

/// Location of memory of unknown place. All devices are equally near.
pub const ANYWHERE: &str = "*";

/// Devices for memory at one location.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// Near devices.
    pub preferred: Vec<String>,
    /// Other devices, used if the near ones fail.
    pub others: Vec<String>,
}

impl Devices {
    fn all(&self) -> impl Iterator<Item = &String> {
        self.preferred.iter().chain(&self.others)
    }

    /// Returns the device for an attempt: a near one, chosen by `random`, for the first attempt,
    /// then all in turn. Returns `None` if there are none.
    pub fn choose(&self, attempt: usize, random: u64) -> Option<&str> {
        if attempt > 0 {
            let count = self.preferred.len() + self.others.len();
            return (attempt - 1).checked_rem(count).and_then(|at| self.all().nth(at)).map(String::as_str);
        }
        let near = if self.preferred.is_empty() { &self.others } else { &self.preferred };
        let at = usize::try_from(random.checked_rem(near.len() as u64)?).ok()?;
        near.get(at).map(String::as_str)
    }
}

/// Devices by location of memory: `cpu:<NUMA node>`, `cuda:<number>`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    places: BTreeMap<String, Devices>,
}

impl Topology {
    /// Returns the topology of this host, or that of the file at `custom`. A file that cannot be
    /// used is logged and ignored.
    pub fn of_this_host(discovery: &Discovery, custom: Option<&Path>) -> Self {
        if let Some(path) = custom {
            match Self::read(path) {
                Ok(topology) => return topology,
                Err(error) => {
                    tracing::warn!(%error, "the custom topology is not used; devices are looked for instead")
                }
            }
        }
        discovery.topology()
    }

    /// Reads a file with a matrix.
    ///
    /// # Errors
    /// Returns the errors of the system and those of [`parse`](Self::parse), with the path.
    pub fn read(path: &Path) -> Result<Self> {
        let what = || format!("topology in {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| Error::from(e).context(what()))?;
        Self::parse(&text).map_err(|e| e.context(what()))
    }

    /// Parses a matrix: `{"cpu:0": [["near", ..], ["others", ..]], ..}`.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` with the location of the first malformed entry.
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value =
            serde_json::from_str(text).map_err(|e| Error::invalid(format!("not JSON: {e}")))?;
        Self::from_json(&value)
    }

    /// Parses a matrix from a value, such as `priority_matrix` of a descriptor.
    ///
    /// # Errors
    /// Returns the errors of [`parse`](Self::parse).
    pub fn from_json(value: &Value) -> Result<Self> {
        let places = value.as_object().ok_or_else(|| Error::invalid("not an object of locations"))?;
        let entry = |(location, lists): (&String, &Value)| {
            let invalid = || {
                Error::invalid(format!(
                    "location {location:?}: expected two lists of device names, near and others"
                ))
            };
            let names = |list: &Value| -> Result<Vec<String>> {
                let names = list.as_array().ok_or_else(invalid)?;
                names.iter().map(|name| name.as_str().map(str::to_owned).ok_or_else(invalid)).collect()
            };
            match lists.as_array().map(Vec::as_slice) {
                Some([near, others]) => {
                    Ok((location.clone(), Devices { preferred: names(near)?, others: names(others)? }))
                }
                _ => Err(invalid()),
            }
        };
        Ok(Self { places: places.iter().map(entry).collect::<Result<_>>()? })
    }

    /// Converts the matrix to JSON.
    pub fn to_json(&self) -> Value {
        let lists = |devices: &Devices| serde_json::json!([devices.preferred, devices.others]);
        self.places.iter().map(|(location, devices)| (location.clone(), lists(devices))).collect()
    }

    /// Formats the matrix as Mooncake C++ prints it.
    pub fn styled(&self) -> String {
        let mut text = String::new();
        write_styled(&mut text, &self.to_json(), 0);
        text.push('\n');
        text
    }

    /// Sets the devices of a location.
    pub fn insert(&mut self, location: impl Into<String>, devices: Devices) {
        self.places.insert(location.into(), devices);
    }

    /// Returns the locations and their devices, in order of their names.
    pub fn places(&self) -> impl Iterator<Item = (&str, &Devices)> {
        self.places.iter().map(|(location, devices)| (location.as_str(), devices))
    }

    /// Returns all devices, each once, in the order of their first appearance.
    pub fn devices(&self) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        self.places
            .values()
            .flat_map(Devices::all)
            .map(String::as_str)
            .filter(|name| seen.insert(*name))
            .collect()
    }

    /// Returns the devices for memory at a location. All are near if the location is unknown.
    pub fn near(&self, location: &str) -> Devices {
        self.places.get(location).cloned().unwrap_or_else(|| Devices {
            preferred: self.devices().into_iter().map(str::to_owned).collect(),
            others: Vec::new(),
        })
    }
}

/// Writes one element per line, with tabs, and a space on both sides of colons.
fn write_styled(text: &mut String, value: &Value, depth: usize) {
    let indent = |text: &mut String, depth: usize| {
        text.push('\n');
        text.extend(std::iter::repeat_n('\t', depth));
    };
    match value {
        Value::Array(items) if !items.is_empty() => {
            if depth > 0 && !text.ends_with('\t') {
                indent(text, depth);
            }
            text.push('[');
            for (at, item) in items.iter().enumerate() {
                indent(text, depth + 1);
                write_styled(text, item, depth + 1);
                text.push_str(if at + 1 < items.len() { "," } else { "" });
            }
            indent(text, depth);
            text.push(']');
        }
        Value::Object(entries) if !entries.is_empty() => {
            text.push('{');
            for (at, (key, item)) in entries.iter().enumerate() {
                indent(text, depth + 1);
                let _ = write!(text, "{} : ", Value::from(key.as_str()));
                write_styled(text, item, depth + 1);
                text.push_str(if at + 1 < entries.len() { "," } else { "" });
            }
            indent(text, depth);
            text.push('}');
        }
        other => {
            let _ = write!(text, "{other}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MATRIX: &str =
        r#"{"cpu:0":[["m0","m1"],["m2"]],"cpu:1":[["m2"],["m0","m1"]],"cuda:0":[["m1"],["m0","m2"]]}"#;

    #[test]
    fn a_matrix_is_read_and_written() {
        let topology = Topology::parse(MATRIX).unwrap();
        assert_eq!(topology.to_json().to_string(), MATRIX);
        assert_eq!(topology.devices(), ["m0", "m1", "m2"]);
        assert_eq!(topology.near("cuda:0").preferred, ["m1"]);
        assert_eq!(topology.near("cuda:9").preferred, ["m0", "m1", "m2"], "nothing is known: all are near");
        assert_eq!(topology.near(ANYWHERE).others.len(), 0);
    }

    #[test]
    fn malformed_matrix_error_states_cause() {
        for (text, word) in [
            ("{", "not JSON"),
            ("[]", "object of locations"),
            (r#"{"cpu:0":[["a"]]}"#, "cpu:0"),
            (r#"{"cpu:0":[["a"],[1]]}"#, "cpu:0"),
            (r#"{"cpu:0":[["a"],["b"],[]]}"#, "two lists"),
        ] {
            assert!(Topology::parse(text).unwrap_err().message().contains(word), "{text}");
        }
        let error = Topology::read(Path::new("/no/such/file")).unwrap_err();
        assert!(error.to_string().contains("/no/such/file"), "{error}");
    }

    #[test]
    fn the_text_is_that_of_the_existing_system() {
        let mut topology = Topology::default();
        topology.insert("cpu:0", Devices::default());
        assert_eq!(topology.styled(), "{\n\t\"cpu:0\" : \n\t[\n\t\t[],\n\t\t[]\n\t]\n}\n");
        topology.insert("cpu:0", Devices { preferred: vec!["a".into(), "b".into()], others: Vec::new() });
        assert_eq!(
            topology.styled(),
            "{\n\t\"cpu:0\" : \n\t[\n\t\t[\n\t\t\t\"a\",\n\t\t\t\"b\"\n\t\t],\n\t\t[]\n\t]\n}\n"
        );
        assert_eq!(Topology::parse(&topology.styled()).unwrap(), topology);
    }

    #[test]
    fn attempts_walk_over_all_devices() {
        let devices = Devices { preferred: vec!["a".into(), "b".into()], others: vec!["c".into()] };
        assert_eq!(devices.choose(0, 3), Some("b"));
        let walk: Vec<_> = (1..5).filter_map(|attempt| devices.choose(attempt, 0)).collect();
        assert_eq!(walk, ["a", "b", "c", "a"]);
        let far = Devices { preferred: Vec::new(), others: vec!["c".into(), "d".into()] };
        assert_eq!(far.choose(0, 1), Some("d"));
        assert_eq!(Devices::default().choose(0, 7), None);
        assert_eq!(Devices::default().choose(2, 7), None);
    }
}
