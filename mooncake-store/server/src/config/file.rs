//! Configuration files: a flat map from flag names to values, in YAML, JSON or TOML by the file
//! name's extension.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mooncake_core::{Error, Result};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::document::read;
use super::settings::Settings;

impl Settings {
    /// Reads the values of a configuration file.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the file name: the file is unreadable, has an unknown extension, is
    /// not a flat map, or has an unknown key.
    pub fn read_file(&mut self, path: &Path) -> Result<()> {
        let refuse =
            |why: &dyn fmt::Display| Error::invalid(format!("--config_path={}: {why}", path.display()));
        let text = read(path).map_err(|error| refuse(&error))?;
        let extension = path.extension().and_then(|extension| extension.to_str());
        let Entries(entries) = match extension.map(str::to_ascii_lowercase).as_deref() {
            Some("yaml" | "yml") if text.trim().is_empty() => Entries(Vec::new()),
            Some("yaml" | "yml") => yaml_serde::from_str(&text).map_err(|error| refuse(&error))?,
            Some("json") => serde_json::from_str(&text).map_err(|error| refuse(&error))?,
            Some("toml") => toml::from_str(&text).map_err(|error| refuse(&error))?,
            _ => return Err(refuse(&"the name must end in .yaml, .yml, .json or .toml")),
        };
        let path = Arc::new(PathBuf::from(path));
        for (key, value) in entries {
            let value = match value {
                Value::String(text) => Some(text),
                Value::Number(number) => Some(number.to_string()),
                Value::Bool(on) => Some(on.to_string()),
                Value::Null => None,
                Value::Array(_) | Value::Object(_) => {
                    return Err(refuse(&format!("{key} must be a text, a number, true or false")));
                }
            };
            self.file(&path, &key, value.as_deref())?;
        }
        Ok(())
    }
}

/// A map in the order of the file. A repeated key is an error.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a flat map from flag names to values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries: Vec<(String, Value)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    if entries.iter().any(|(known, _)| *known == key) {
                        return Err(serde::de::Error::custom(format!("{key} is set twice")));
                    }
                    entries.push((key, value));
                }
                Ok(Entries(entries))
            }
        }
        input.deserialize_map(Map)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MasterConfig, Origin};
    use super::*;

    fn load(name: &str, text: &str) -> Result<Settings> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut settings = Settings::default();
        settings.read_file(&path).map(|()| settings)
    }

    fn config(name: &str, text: &str) -> MasterConfig {
        load(name, text).and_then(|settings| settings.config()).unwrap()
    }

    fn error(name: &str, text: &str) -> String {
        let outcome = load(name, text).and_then(|settings| settings.config());
        outcome.unwrap_err().message().to_owned()
    }

    #[test]
    fn three_languages_say_the_same() {
        let yaml = config(
            "m.yaml",
            "rpc_port: 7\neviction_ratio: 0.1\ndefault_kv_lease_ttl: 5s\nenable_http_metadata_server: true\n",
        );
        let yml = config(
            "m.yml",
            "{rpc_port: '7', eviction_ratio: 1.0e-1, default_kv_lease_ttl: 5000, enable_http_metadata_server: true}",
        );
        let json = config(
            "m.json",
            r#"{"rpc_port": 7, "eviction_ratio": 0.1, "default_kv_lease_ttl": "5000ms", "enable_http_metadata_server": "on"}"#,
        );
        let toml = config(
            "m.toml",
            "rpc_port = 7\neviction_ratio = 0.1\ndefault_kv_lease_ttl = '5s'\nenable_http_metadata_server = true\n",
        );
        assert_eq!(yaml.rpc_port, 7);
        assert!(yaml.metadata.is_some());
        for other in [yml, json, toml] {
            assert_eq!(yaml, other);
        }
        assert_eq!(config("m.yaml", "# nothing\n\n"), MasterConfig::default());
        // Editors write byte order marks, and templates leave values out.
        assert_eq!(config("m.YAML", "\u{feff}rpc_port: 7\nroot_fs_dir:\n").rpc_port, 7);
        assert_eq!(config("m.Json", "\u{feff}{\"rpc_port\": 7, \"root_fs_dir\": null}").rpc_port, 7);
        assert_eq!(config("m.yaml", "client_live_ttl_sec: 60\n").options.client_ttl.as_secs(), 60);
    }

    /// The names are those of the sample file of Mooncake C++.
    #[test]
    fn a_file_for_the_existing_master_is_read() {
        let settings = load(
            "master.yaml",
            "enable_metric_reporting: true\nmetrics_port: 9003\nrpc_port: 50051\nrpc_thread_num: 16\nrpc_address: \"0.0.0.0\"\n\
             rpc_interface: \"\"\nrpc_enable_tcp_no_delay: true\neviction_high_watermark_ratio: 1.0\nenable_ha: false\n\
             etcd_endpoints: \"http://localhost:2379\"\nroot_fs_dir: \"\"\ncluster_id: \"mooncake_cluster\"\n\
             memory_allocator: \"offset\"\nclient_live_ttl_sec: 60\nenable_oplog: false\n",
        )
        .unwrap();
        let config = settings.config().unwrap();
        assert_eq!((config.rpc_threads, config.options.high_watermark), (16, 1.0));
        let notes = settings.notes();
        assert!(notes.is_empty(), "{notes:?}");
    }

    #[test]
    fn invalid_file_error_states_cause() {
        for (name, text, says) in [
            ("m.yaml", "rpc_prot: 7", "unknown key \"rpc_prot\" in"),
            ("m.yaml", "rpc_prot: 7", "did you mean rpc_port?"),
            ("m.yaml", "config_path: x.yaml", "unknown key"),
            ("m.yaml", "rpc_port: seven", "m.yaml: rpc_port: seven"),
            ("m.yaml", "rpc_port: [7]", "rpc_port must be a text"),
            ("m.yaml", "rpc_prot:", "unknown key \"rpc_prot\" in"),
            ("m.yaml", "rpc_port: 7\nrpc_port: 8", "rpc_port"),
            ("m.yaml", "- rpc_port", "flat map"),
            ("m.yaml", "a: &a [*a]", "m.yaml"),
            ("m.json", "{\"rpc_port\": 7, \"rpc_port\": 8}", "rpc_port is set twice"),
            ("m.json", "{\"rpc_port\": 7", "m.json"),
            ("m.json", "", "m.json"),
            ("m.toml", "[master]\nrpc_port = 7", "master"),
            ("m.toml", "v = 1979-05-27", "v must be"),
            ("m.ini", "rpc_port=7", "must end in .yaml"),
            ("m", "", "must end in .yaml"),
            ("m.yaml", "enable_ha: true", "--enable_ha needs --etcd_endpoints"),
        ] {
            let error = error(name, text);
            assert!(error.contains(says), "{text:?}: {error}");
        }
        assert!(error("m.yaml", &"#".repeat(2 << 20)).contains("at most"));
        let absent = Settings::default().read_file(Path::new("/nonexistent/m.yaml")).unwrap_err();
        assert!(absent.message().contains("/nonexistent/m.yaml"), "{absent}");
    }

    #[test]
    fn what_is_printed_can_be_read_again() {
        let mut settings =
            load("m.yaml", "rpc_port: 7\ncluster_id: \"12\"\nkv_events_backend_id: \"a: #b\"\n").unwrap();
        settings.command_line("metrics_port", "8").unwrap();
        let again = load("again.yaml", &settings.to_string()).unwrap();
        for (one, two) in settings.all().iter().zip(again.all()) {
            assert_eq!(one.value, two.value, "{}", one.flag.name);
        }
        assert!(matches!(again.value("rpc_port").unwrap().origin, Origin::File(_)));
        assert!(settings.to_string().contains("metrics_port: 8  # command line\n"));
        assert!(settings.to_string().contains("metrics_host: \"0.0.0.0\"  # default\n"));
    }
}
