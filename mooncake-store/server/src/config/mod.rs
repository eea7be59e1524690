//! Configuration of a master process: the table of flags with their defaults, effects and sources.

mod document;
#[cfg(feature = "cli")]
mod file;
mod flags;
mod master;
mod parts;
mod settings;
pub(crate) mod tenants;
mod values;

pub use self::flags::{Flag, GROUPS, Group, flag_by_name, flags, variable_of};
pub use self::master::{
    CleanUpConfig, EventsConfig, MasterConfig, MastersConfig, MetadataServerConfig, SnapshotConfig,
};
pub use self::settings::{FlagValue, Origin, Settings};
pub use self::tenants::TenantPolicy;
pub use mooncake_client::ClientEnvironment;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mooncake_core::settings::{Effect, Environment};

    use super::*;

    fn error(name: &str, value: &str) -> String {
        MasterConfig::from_flags([(name, value)]).unwrap_err().message().to_owned()
    }

    #[test]
    fn every_default_in_the_table_is_the_default() {
        let all = flags().map(|flag| (flag.name, flag.default));
        assert_eq!(MasterConfig::from_flags(all).unwrap(), MasterConfig::default());
        assert_eq!(MasterConfig::from_flags([]).unwrap(), MasterConfig::default());
    }

    #[test]
    fn durations_have_units() {
        let ttl =
            |text| MasterConfig::from_flags([("default_kv_lease_ttl", text)]).unwrap().options.lease_ttl;
        assert_eq!(ttl("5000"), Duration::from_secs(5));
        assert_eq!(ttl("250ms"), Duration::from_millis(250));
        assert_eq!(ttl("5s"), Duration::from_secs(5));
        assert_eq!(ttl("3m"), Duration::from_secs(180));
        assert_eq!(ttl("1h"), Duration::from_secs(3600));
        let silence = MasterConfig::from_flags([("client_ttl", "4")]).unwrap().options.client_ttl;
        assert_eq!(silence, Duration::from_secs(4));
        assert_eq!(ttl("5 S"), Duration::from_secs(5));
        for bad in ["", "s", "1.5s", "-1", "5 d", "5d", "99999999999999999999", "9999999999999999h"] {
            assert!(error("default_kv_lease_ttl", bad).contains("--default_kv_lease_ttl"), "{bad}");
        }
    }

    #[test]
    fn a_lease_too_short_to_read_under_is_noted() {
        for (given, lease, unprotected, notes) in
            [("0", 1000, 1000, 1), ("1ms", 1000, 999, 1), ("49", 1000, 951, 1), ("50", 50, 0, 0)]
        {
            let mut settings = Settings::default();
            settings.command_line("default_kv_lease_ttl", given).unwrap();
            let options = settings.config().unwrap().options;
            let millis = (options.lease_ttl.as_millis(), options.unprotected_lease.as_millis());
            assert_eq!(millis, (lease, unprotected), "{given}");
            assert_eq!(settings.notes().len(), notes, "{given}: {:?}", settings.notes());
        }
    }

    /// Every flag with a number refuses values that no number of its kind has.
    #[test]
    fn numbers_that_make_no_sense_are_refused_by_name() {
        let is_number = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        for flag in flags().filter(|flag| is_number(flag.default) && !flag.default.contains("0.0.0.0")) {
            // An idle flag of glog may be negative.
            let negative =
                ["-1", "-9223372036854775808", "-0.5"].iter().filter(|_| flag.name != "logbuflevel");
            let huge = ["18446744073709551616", "99999999999999999999999999", "1e400", "nan", "inf"];
            let idle = matches!(flag.effect, Effect::Idle(..));
            let large = ["18446744073709551615", "9223372036854775808"].iter().filter(|_| !idle);
            for value in negative.chain(&huge).chain(large) {
                let error = error(flag.name, value);
                assert!(error.contains(flag.name) && error.contains(value), "{}={value}: {error}", flag.name);
            }
        }
    }

    #[test]
    fn an_older_allocator_is_taken_as_another_and_said_to_be() {
        let mut settings = Settings::default();
        settings.command_line("memory_allocator", "cachelib").unwrap();
        assert_eq!(
            settings.config().unwrap(),
            MasterConfig::from_flags([("memory_allocator", "offset")]).unwrap()
        );
        let notes = settings.notes();
        assert!(notes.len() == 1 && notes[0].contains("using offset"), "{notes:?}");
    }

    #[test]
    fn space_of_a_grant_rests_for_as_long_as_clients_may_write() {
        for (given, notes, taken) in [("6", 1, 30), ("29", 1, 30), ("30", 0, 30), ("31", 0, 31)] {
            let mut settings = Settings::default();
            settings.command_line("put_start_discard_timeout_sec", "5").unwrap();
            settings.command_line("put_start_release_timeout_sec", given).unwrap();
            let options = settings.config().unwrap().options;
            assert_eq!(options.put_release, Duration::from_secs(taken), "{given}");
            assert_eq!(settings.notes().len(), notes, "{given}: {:?}", settings.notes());
        }
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        for (name, value, says) in [
            ("eviction_ratio", "1.5", "between 0 and 1"),
            ("eviction_high_watermark_ratio", "nan", "between 0 and 1"),
            ("allocation_strategy", "Random", "unknown placement"),
            ("memory_allocator", "slab", "unknown allocator"),
            ("eviction_policy", "arc", "unknown"),
            ("put_start_release_timeout_sec", "30", "put_start_discard_timeout_sec"),
            ("default_kv_soft_pin_ttl", "169h", "max_kv_soft_pin_ttl"),
            ("rpc_port", "65536", "too large"),
            ("rpc_enable_tcp_no_delay", "false", "leave it out"),
            ("rpc_interface", "no-such-if0", "no-such-if0"),
            ("enable_ha", "true", "--enable_ha needs --etcd_endpoints"),
            ("enable_oplog", "true", "standbys need no oplog"),
            ("enable_oplog_snapshot", "true", "standbys need no oplog"),
            ("weight_import_idle_timeout_ms", "0", "must not be 0"),
            ("weight_management_oplog_capability_confirmed", "true", "a snapshot keeps the records"),
            ("tenant_eviction_high_watermark_ratio", "1.1", "between 0 and 1"),
            ("handler_worker_thread_num", "-1", "must not be negative"),
            ("snapshot_chunk_object_count", "many", "invalid digit"),
            ("max_threads", "0", "is not from 1 to"),
            ("offload_cap_ratio", "much", "must be a number"),
            ("cluster_id", "a b", "A-Z"),
            ("metrics_host", "", "empty"),
            ("enable_metric_reporting", "maybe", "true or false"),
            ("enable_metadata_cleanup_on_timeout", "true", "enable_http_metadata_server"),
            ("enable_kv_events", "true", "--kv_events_bind_endpoint"),
            ("kv_events_bind_endpoint", "ipc:///tmp/x", "only tcp is supported: must be tcp://host:port"),
            ("kv_events_bind_endpoint", "inproc://x", "only tcp is supported"),
            ("kv_events_bind_endpoint", "5557", "only tcp is supported"),
            ("kv_events_bind_endpoint", "tcp://:5557", "has no host"),
            ("kv_events_bind_endpoint", "tcp://*:!", "the port is neither a number nor *"),
            ("kv_events_bind_endpoint", "tcp://*:65536", "the port is neither a number nor *"),
            ("kv_events_bind_endpoint", "tcp://10.0.0.1;10.0.0.2:5557", "source address"),
            ("kv_events_bind_endpoint", "tcp://*", "tcp://host:port"),
            ("kv_events_bind_endpoint", "tcp://*:x", "tcp://host:port"),
        ] {
            assert!(error(name, value).contains(says), "{name}: {}", error(name, value));
        }
    }

    #[test]
    fn unknown_flags_come_with_a_suggestion() {
        assert_eq!(error("rpc_prot", "1"), "unknown flag --rpc_prot; did you mean --rpc_port?");
        assert_eq!(
            error("evict_policy", "lru"),
            "unknown flag --evict_policy; did you mean --eviction_policy?"
        );
        assert_eq!(error("xyzzy", "1"), "unknown flag --xyzzy; --help lists all");
    }

    #[test]
    fn no_time_limit_is_written_as_zero() {
        let flags = [("pending_task_timeout_sec", "0"), ("max_total_pending_tasks", "7")];
        let tasks = MasterConfig::from_flags(flags).unwrap().options.tasks;
        assert_eq!((tasks.pending_timeout, tasks.max_pending), (Duration::MAX, 7));
        assert_eq!(tasks.processing_timeout, Duration::from_secs(300));
    }

    #[test]
    fn events_need_a_place_and_a_name() {
        let on = ("enable_kv_events", "true");
        let with = |flags: &[(&'static str, &'static str)]| {
            MasterConfig::from_flags(flags.iter().copied().chain([on])).map(|config| config.events)
        };
        let at = ("kv_events_bind_endpoint", "tcp://*:5557");
        assert!(with(&[at]).unwrap_err().message().contains("--kv_events_backend_id"));
        let events = with(&[at, ("kv_events_backend_id", "a")]).unwrap();
        let wanted = EventsConfig { backend_id: "a".into(), ..EventsConfig::default() };
        assert_eq!(events, Some(wanted.clone()));
        let v6 = with(&[("kv_events_bind_endpoint", "tcp://[::1]:*"), ("kv_events_backend_id", "a")]);
        assert_eq!(v6.unwrap(), Some(EventsConfig { host: "[::1]".into(), port: 0, ..wanted }));
        assert_eq!(MasterConfig::from_flags([at]).unwrap().events, None);
        for (endpoint, host, port) in [
            ("tcp://lo:5557", "127.0.0.1", 5557),
            ("tcp://lo:*", "127.0.0.1", 0),
            ("tcp://*:0", "0.0.0.0", 0),
            ("tcp://localhost:5557", "localhost", 5557),
            ("tcp://[::]:5557", "[::]", 5557),
            ("tcp://::1:5557", "::1", 5557),
            (" tcp://10.0.0.1:5557 ", "10.0.0.1", 5557),
        ] {
            let events = with(&[("kv_events_bind_endpoint", endpoint), ("kv_events_backend_id", "a")]);
            let events = events.unwrap().unwrap();
            assert_eq!((&*events.host, events.port), (host, port), "{endpoint}");
        }
        let fields = with(&[
            at,
            ("kv_events_backend_id", "a"),
            ("kv_events_model_name", "m"),
            ("kv_events_additional_salt", "s"),
            ("kv_events_lora_name", "l"),
            ("kv_events_block_size", "64"),
            ("kv_events_dp_rank", "0"),
        ]);
        let wanted = EventsConfig {
            backend_id: "a".into(),
            model_name: "m".into(),
            additional_salt: "s".into(),
            lora_name: "l".into(),
            block_size: 64,
            dp_rank: Some(0),
            ..EventsConfig::default()
        };
        assert_eq!(fields.unwrap(), Some(wanted));
    }

    #[test]
    fn a_token_is_not_printed() {
        let mut settings = Settings::default();
        let on = "enable_http_metadata_server";
        settings.command_line(on, "true").unwrap();
        assert!(settings.config().unwrap().metadata.unwrap().token.is_empty());
        settings.environment(&Environment::from_iter([("MC_METADATA_HTTP_TOKEN", "secret")]));
        assert_eq!(settings.config().unwrap().metadata.unwrap().token, "secret".into());
        let printed = settings.to_string();
        assert!(!printed.contains("secret") && printed.contains("\n# metadata_http_token: "), "{printed}");
        settings.command_line("metadata_http_token", "a b").unwrap();
        let error = settings.config().unwrap_err();
        assert!(
            error.message().contains("MC_METADATA_HTTP_TOKEN") && !error.message().contains("a b"),
            "{error}"
        );
    }

    #[test]
    fn a_suspicion_is_opt_in() {
        let liveness = |flags: &[(&'static str, &'static str)]| {
            let options = MasterConfig::from_flags(flags.iter().copied()).unwrap().options;
            (options.client_ttl.as_secs(), options.client_suspicion.as_secs())
        };
        let (old, active, suspicion) = ("client_ttl", "client_active_ttl_sec", "client_suspicion_ttl_sec");
        assert_eq!(liveness(&[]), (10, 0));
        assert_eq!(liveness(&[(old, "4")]), (4, 0));
        assert_eq!(liveness(&[(active, "3")]), (3, 3));
        assert_eq!(liveness(&[(old, "4"), (active, "3")]), (3, 3));
        assert_eq!(liveness(&[(suspicion, "20")]), (10, 20));
        assert_eq!(liveness(&[(old, "4"), (suspicion, "20")]), (4, 20));
        assert_eq!(liveness(&[(active, "3"), (suspicion, "4")]), (3, 4));
        for name in [active, suspicion] {
            assert!(error(name, "0").contains("must be more than 0"), "{}", error(name, "0"));
        }
        let mut settings = Settings::default();
        settings.command_line(old, "4").unwrap();
        settings.command_line(active, "4").unwrap();
        assert!(settings.notes().is_empty(), "{:?}", settings.notes());
        settings.command_line(active, "3").unwrap();
        let notes = settings.notes();
        assert!(
            notes.len() == 1 && notes[0].starts_with("client_ttl=4 (command line) has no effect"),
            "{notes:?}"
        );
    }

    #[test]
    fn leases_of_leaders_have_limits() {
        let lease = |text: &'static str| {
            let several = [("enable_ha", "true"), ("etcd_endpoints", "127.0.0.1:1")];
            let config =
                MasterConfig::from_flags(several.into_iter().chain([("ha_leader_lease_ttl_sec", text)]));
            config.map(|config| config.masters.unwrap().lease)
        };
        for seconds in ["2", "5", "60"] {
            assert_eq!(lease(seconds).unwrap(), Duration::from_secs(seconds.parse().unwrap()));
        }
        for wrong in ["1", "61", "0", "x"] {
            let error = lease(wrong).unwrap_err();
            assert!(error.message().contains("--ha_leader_lease_ttl_sec"), "{error}");
        }
    }

    #[test]
    fn several_masters_need_what_several_can_open() {
        let own = "rocksdb:///srv/own";
        for flags in [
            &[("ha_backend_connstring", own)][..],
            &[("enable_snapshot", "true"), ("snapshot_local_path", own)],
            &[
                ("enable_multi_tenants", "true"),
                ("tenant_quota_connector_type", "rocksdb"),
                ("tenant_quota_connector_uri", own),
            ],
            &[("enable_http_metadata_server", "true"), ("http_metadata_server_kept_in", own)],
        ] {
            let several = [("enable_ha", "true"), ("etcd_endpoints", "127.0.0.1:1")];
            let error = MasterConfig::from_flags(flags.iter().copied().chain(several)).unwrap_err();
            assert!(error.message().contains("one process at a time"), "{error}");
            if flags[0].0 != "ha_backend_connstring" {
                MasterConfig::from_flags(flags.iter().copied()).unwrap();
            }
        }
        let several = [("enable_ha", "true"), ("ha_backend_type", "rocksdb")];
        assert!(MasterConfig::from_flags(several).unwrap_err().message().contains("supports etcd only"));
    }

    #[test]
    fn snapshots_need_a_folder_and_a_number_to_keep() {
        let with = |more: &[(&'static str, &'static str)]| {
            let on = [("enable_snapshot", "true"), ("snapshot_local_path", "/srv/s")];
            MasterConfig::from_flags(on.iter().chain(more).copied())
        };
        let taken = with(&[("snapshot_backup_dir", "/b"), ("snapshot_object_store_type", "local")]).unwrap();
        let expected = SnapshotConfig {
            write: true,
            folder: "/srv/s".into(),
            backup: Some("/b".into()),
            ..SnapshotConfig::default()
        };
        assert_eq!(taken.snapshots, Some(expected));
        assert!(error("enable_snapshot_restore", "true").contains("MOONCAKE_SNAPSHOT_LOCAL_PATH"));
        for (name, value, said) in [
            ("snapshot_retention_count", "0", "--snapshot_retention_count=0"),
            ("snapshot_interval_seconds", "0", "--snapshot_interval_seconds=0"),
            ("snapshot_payload_store_type", "s3", "a folder only"),
            ("snapshot_catalog_backend_type", "redis", "their folder"),
            ("cluster_id", "..", "valid folder name"),
        ] {
            let error = with(&[(name, value)]).unwrap_err();
            assert!(error.message().contains(said), "{error}");
        }
        // Settings of a disabled feature are not checked.
        let off = MasterConfig::from_flags([("snapshot_object_store_type", "s3")]).unwrap();
        assert_eq!(off.snapshots, None);
    }

    #[test]
    fn log_levels() {
        let level = |flags: &[(&'static str, &'static str)]| {
            MasterConfig::from_flags(flags.iter().copied()).unwrap().log_level
        };
        assert_eq!(level(&[]), "info");
        assert_eq!(level(&[("minloglevel", "1")]), "warn");
        assert_eq!(level(&[("v", "1"), ("minloglevel", "1")]), "debug");
    }

    #[test]
    fn the_old_port_yields_to_the_new() {
        let port = |flags: &[(&str, &str)]| MasterConfig::from_flags(flags.iter().copied()).unwrap().rpc_port;
        assert_eq!(port(&[("port", "1")]), 1);
        assert_eq!(port(&[("rpc_port", "2"), ("port", "1")]), 2);
        assert_eq!(port(&[("rpc_port", "0")]), 50051);
        assert_eq!(port(&[("rpc_port", "auto")]), 0);
    }

    fn from_environment(variables: &[(&str, &str)]) -> Settings {
        let mut settings = Settings::default();
        settings.environment(&Environment::from_iter(variables.iter().copied()));
        settings
    }

    #[test]
    fn every_flag_has_a_variable() {
        let set = from_environment(&[("MC_MASTER_RPC_PORT", "7"), ("MC_MASTER_EVICTION_RATIO", "")]);
        let config = set.config().unwrap();
        assert_eq!(config.rpc_port, 7);
        assert_eq!(config.options.eviction_ratio, 0.05, "empty is not set");
        assert_eq!(set.value("rpc_port").unwrap().origin, Origin::Environment("MC_MASTER_RPC_PORT".into()));
        let error = from_environment(&[("MC_MASTER_RPC_PORT", "x")]).config().unwrap_err();
        assert!(error.message().contains("MC_MASTER_RPC_PORT=x"), "{error}");
    }

    #[test]
    fn variables_of_the_existing_system_count_after_ours() {
        let cluster = |variables: &[(&str, &str)]| from_environment(variables).config().unwrap().cluster_id;
        assert_eq!(cluster(&[("MC_STORE_CLUSTER_ID", "a")]), "a");
        assert_eq!(cluster(&[("MC_MASTER_CLUSTER_ID", "b"), ("MC_STORE_CLUSTER_ID", "a")]), "b");
        assert_eq!(from_environment(&[("RUST_LOG", "debug")]).config().unwrap().log_filter(), "debug");
        let clean_up = from_environment(&[
            ("MC_MASTER_ENABLE_METADATA_CLEANUP_ON_TIMEOUT", "1"),
            ("MC_METADATA_CLUSTER_ID", "c"),
            ("MOONCAKE_TE_META_DATA_SERVER", "http://h:1/metadata"),
        ]);
        let clean_up = clean_up.config().unwrap().clean_up.unwrap();
        assert_eq!(clean_up.cluster_id, "c");
        assert_eq!(clean_up.server.as_deref(), Some("http://h:1/metadata"));
    }

    #[test]
    fn what_sets_nothing_is_said() {
        // As Kubernetes sets them for a service called mc-master.
        let set =
            from_environment(&[("MC_MASTER_PORT", "tcp://10.0.0.1:50051"), ("MC_MASTER_RPC_PROT", "7")]);
        assert_eq!(set.config().unwrap(), Default::default());
        let notes = set.notes();
        assert!(notes[0].contains("MC_MASTER_PORT in the environment sets nothing"), "{notes:?}");
        assert!(notes[1].ends_with("did you mean MC_MASTER_RPC_PORT?"), "{notes:?}");
    }

    #[test]
    fn flags_that_set_no_field_are_read() {
        let code = include_str!("parts.rs");
        for flag in flags().filter(|flag| matches!(flag.effect, Effect::Read)) {
            let read = code.contains(&format!("(\"{}\"", flag.name)) || flag.name == "config_path";
            assert!(read, "--{} has no effect", flag.name);
        }
    }
}
