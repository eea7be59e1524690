use super::super::Origin;
use super::*;

fn settings(variables: &[(&str, &str)]) -> Settings {
    let owned: Vec<_> =
        variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let mut settings = Settings::default();
    settings.read_environment_of(&owned);
    settings
}

#[test]
fn what_a_client_reads_is_read_and_listed() {
    let of = |variables: &[(&str, &str)]| {
        let owned: Vec<_> = variables.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        ClientEnvironment::of(&owned)
    };
    let nothing = of(&[]);
    assert_eq!((nothing.huge_pages, nothing.ports, nothing.checksum), (HugePages::Off, 12300..=14300, false));
    let large = of(&[("MC_STORE_USE_HUGEPAGE", "1"), ("MC_STORE_HUGEPAGE_SIZE", "1GB")]);
    assert_eq!(large.huge_pages, HugePages::Size1G);
    let set = of(&[
        ("MC_STORE_CLIENT_MIN_PORT", "2000"),
        ("MC_STORE_CLIENT_MAX_PORT", "2001"),
        ("MOONCAKE_STORE_CHECKSUM", "yes"),
        ("MC_FORCE_TCP", "no"),
        ("MC_STORE_USE_HUGEPAGE", "on"),
    ]);
    assert_eq!((set.ports, set.checksum, set.force_tcp), (2000..=2001, true, false));
    assert_eq!(set.huge_pages, HugePages::Size2M);
    for (first, last, drawn) in [
        ("61000", "61010", 61000..=61010),
        ("1024", "32767", 1024..=32767),
        ("40000", "40010", 12300..=14300),
        ("32000", "33000", 12300..=14300),
        ("60999", "61010", 12300..=14300),
        ("1000", "2000", 12300..=14300),
        ("2001", "2000", 12300..=14300),
        ("70000", "soon", 12300..=14300),
    ] {
        let set = of(&[("MC_STORE_CLIENT_MIN_PORT", first), ("MC_STORE_CLIENT_MAX_PORT", last)]);
        assert_eq!(set.ports, drawn, "{first} to {last}");
    }
    assert!(nothing.metrics && nothing.metrics_interval.is_zero() && nothing.cluster_id.is_empty());
    assert_eq!((nothing.copy_in_process, nothing.numa_node, nothing.timeout), (true, None, None));
    let tuned = of(&[
        ("MC_STORE_MEMCPY", "0"),
        ("MC_STORE_NUMA_SOCKET_ID", "1"),
        ("MC_STORE_REPLICA_SCORING", "1"),
        ("MC_RPC_TIMEOUT_MS", "30000"),
        ("MC_RPC_CONNECT_TIMEOUT_MS", "1500"),
    ]);
    let mut config = ClientConfig::default();
    tuned.apply(&mut config);
    config.validate().unwrap();
    assert_eq!(
        (config.copy_in_process, config.memory.numa_node, config.score_replicas),
        (false, Some(1), true)
    );
    assert_eq!((config.timeout.as_secs(), config.connect_timeout.as_millis()), (25, 1500));
    of(&[("MC_RPC_TIMEOUT_MS", "0"), ("MC_RPC_CONNECT_TIMEOUT_MS", "soon")]).apply(&mut config);
    assert_eq!(config.timeout.as_secs(), 25, "what makes no sense is not heard");
    let keeping = of(&[
        ("MC_STORE_LOCAL_HOT_CACHE_SIZE", "64MB"),
        ("MC_STORE_LOCAL_HOT_BLOCK_SIZE", "1048576"),
        ("MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD", "3"),
    ]);
    keeping.apply(&mut config);
    let HotCacheConfig { bytes, longest, admission } = config.hot_cache;
    assert_eq!((bytes, longest, admission), (64 << 20, 1 << 20, 3));
    assert_eq!(nothing.hot_cache, HotCacheConfig::default());
    assert_eq!(of(&[]).offload("/x"), OffloadConfig::new("/x"));
    let disk = of(&[
        ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "/ssd"),
        ("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", "4096000"),
        ("MOONCAKE_BUCKET_MAX_TOTAL_SIZE", "2048000"),
        ("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1"),
        ("MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO", "0.5"),
        ("MOONCAKE_USE_URING", "false"),
        ("MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT", "none"),
    ]);
    let said = OffloadConfig {
        capacity: 2_048_000,
        interval: Duration::from_secs(1),
        watermarks: Some((0.9, 0.5)),
        threads: true,
        ..OffloadConfig::new("/ssd")
    };
    assert_eq!((disk.offload(""), disk.offload("/y").path), (said, "/y".into()));
    let untrimmed = of(&[("MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION", "false")]);
    assert_eq!(untrimmed.offload("").watermarks, None);
    let counted = of(&[
        ("MC_STORE_CLIENT_METRIC", "0"),
        ("MC_STORE_CLIENT_METRIC_INTERVAL", "7"),
        ("MC_STORE_CLUSTER_ID", "c"),
    ]);
    assert_eq!((counted.metrics, counted.metrics_interval.as_secs(), &*counted.cluster_id), (false, 7, "c"));
    let listed = |name: &&str| {
        PYTHON.iter().any(|(known, ..)| known == name)
            || VARIABLES.iter().any(|known| known.names.contains(name))
    };
    assert!(CLIENT.iter().all(listed));
}

#[test]
fn every_flag_has_a_variable() {
    let set = settings(&[("MC_MASTER_RPC_PORT", "7"), ("MC_MASTER_EVICTION_RATIO", "")]);
    let config = set.config().unwrap();
    assert_eq!(config.rpc_port, 7);
    assert_eq!(config.options.eviction_ratio, 0.05, "empty is not set");
    assert_eq!(set.value("rpc_port").unwrap().origin, Origin::Environment("MC_MASTER_RPC_PORT".into()));
    let error = settings(&[("MC_MASTER_RPC_PORT", "x")]).config().unwrap_err();
    assert!(error.message().contains("MC_MASTER_RPC_PORT=x"), "{error}");
}

#[test]
fn variables_of_the_existing_system_count_after_ours() {
    let cluster = |variables: &[(&str, &str)]| settings(variables).config().unwrap().cluster_id;
    assert_eq!(cluster(&[("MC_STORE_CLUSTER_ID", "a")]), "a");
    assert_eq!(cluster(&[("MC_MASTER_CLUSTER_ID", "b"), ("MC_STORE_CLUSTER_ID", "a")]), "b");
    assert_eq!(settings(&[("RUST_LOG", "debug")]).config().unwrap().log_filter(), "debug");
    let clean_up = settings(&[
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
    let set = settings(&[("MC_MASTER_PORT", "tcp://10.0.0.1:50051"), ("MC_MASTER_RPC_PROT", "7")]);
    assert_eq!(set.config().unwrap(), Default::default());
    let notes = set.notes();
    assert!(notes[0].contains("MC_MASTER_PORT in the environment sets nothing"), "{notes:?}");
    assert!(notes[1].ends_with("did you mean MC_MASTER_RPC_PORT?"), "{notes:?}");
}

#[test]
fn no_variable_is_listed_twice() {
    let mut names: Vec<String> =
        LATER.iter().chain(NEVER).flat_map(|unread| unread.names).map(|name| (*name).into()).collect();
    // The metadata server concerns both.
    let of_flag = |name: &str| flags().any(|flag| flag.variables.contains(&name));
    names.extend(PYTHON.iter().map(|(name, ..)| *name).filter(|name| !of_flag(name)).map(Into::into));
    let of_engine = VARIABLES.iter().flat_map(|variable| variable.names).copied();
    names.extend(of_engine.filter(|name| !of_flag(name)).map(Into::into));
    for flag in flags() {
        names.push(flag.variable());
        names.extend(flag.variables.iter().map(|name| (*name).to_owned()));
    }
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}
