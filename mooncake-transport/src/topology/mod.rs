//! Which network devices are near which memory: the existing system's priority matrix.

mod discover;
pub mod ports;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use mooncake_core::{Error, Result};
use serde_json::Value;

pub use discover::{Discovery, Gpu, Hardware, Nic};

/// The location of memory of which nothing is known: all devices are alike for it.
pub const ANYWHERE: &str = "*";

/// Devices for memory at one location.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// The near ones.
    pub preferred: Vec<String>,
    /// The rest, for when those fail.
    pub others: Vec<String>,
}

impl Devices {
    fn all(&self) -> impl Iterator<Item = &String> {
        self.preferred.iter().chain(&self.others)
    }

    /// The device for an attempt: one of the near ones (by `random`) for the first, then all of them in turn. `None` when there are none.
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
    /// What this host has, or what the file at `custom` says instead; one that cannot be used is warned of and passed over.
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
    /// The system's, and those of [`parse`](Self::parse), with the path.
    pub fn read(path: &Path) -> Result<Self> {
        let what = || format!("topology in {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| Error::from(e).context(what()))?;
        Self::parse(&text).map_err(|e| e.context(what()))
    }

    /// Reads a matrix: `{"cpu:0": [["near", ..], ["others", ..]], ..}`.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the location that is not like that.
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value =
            serde_json::from_str(text).map_err(|e| Error::invalid(format!("not JSON: {e}")))?;
        Self::from_json(&value)
    }

    /// The same from a value, such as `priority_matrix` of a descriptor.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn from_json(value: &Value) -> Result<Self> {
        let places = value.as_object().ok_or_else(|| Error::invalid("not an object of locations"))?;
        let place = |(location, lists): (&String, &Value)| {
            let bad = || {
                Error::invalid(format!(
                    "location {location:?}: expected two lists of device names, near and others"
                ))
            };
            let names = |list: &Value| -> Result<Vec<String>> {
                let names = list.as_array().ok_or_else(bad)?;
                names.iter().map(|name| name.as_str().map(str::to_owned).ok_or_else(bad)).collect()
            };
            match lists.as_array().map(Vec::as_slice) {
                Some([near, others]) => {
                    Ok((location.clone(), Devices { preferred: names(near)?, others: names(others)? }))
                }
                _ => Err(bad()),
            }
        };
        Ok(Self { places: places.iter().map(place).collect::<Result<_>>()? })
    }

    /// The matrix as JSON.
    pub fn to_json(&self) -> Value {
        let lists = |devices: &Devices| serde_json::json!([devices.preferred, devices.others]);
        self.places.iter().map(|(location, devices)| (location.clone(), lists(devices))).collect()
    }

    /// The matrix as the text that the existing system prints.
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

    /// Locations and their devices, in order of their names.
    pub fn places(&self) -> impl Iterator<Item = (&str, &Devices)> {
        self.places.iter().map(|(location, devices)| (location.as_str(), devices))
    }

    /// All devices, each once, in the order in which they first appear.
    pub fn devices(&self) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        self.places
            .values()
            .flat_map(Devices::all)
            .map(String::as_str)
            .filter(|name| seen.insert(*name))
            .collect()
    }

    /// Devices for memory at a location. All are near where nothing is known of it.
    pub fn near(&self, location: &str) -> Devices {
        self.places.get(location).cloned().unwrap_or_else(|| Devices {
            preferred: self.devices().into_iter().map(str::to_owned).collect(),
            others: Vec::new(),
        })
    }
}

/// One element a line, tabs, and a space on both sides of colons.
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
    fn what_is_no_matrix_is_named() {
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
