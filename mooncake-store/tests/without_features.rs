//! Builds without RocksDB or etcd, which name the missing feature for every setting that needs it:
//! `cargo xtask features`.
#![cfg(not(feature = "metadata-rocksdb"))]

use mooncake_core::ErrorCode;
use mooncake_store::config::Settings;
use mooncake_store::server::MasterServer;

#[tokio::test]
async fn the_missing_feature_is_named() {
    let own = "rocksdb:///srv/own";
    for (flags, place) in [
        (&[("enable_snapshot", "true"), ("snapshot_local_path", own)][..], "snapshots"),
        (&[("enable_snapshot_restore", "true"), ("snapshot_local_path", own)], "snapshots"),
        (
            &[
                ("enable_multi_tenants", "true"),
                ("tenant_quota_connector_type", "rocksdb"),
                ("tenant_quota_connector_uri", own),
            ],
            "--tenant_quota_connector_uri",
        ),
        (
            &[("enable_http_metadata_server", "true"), ("http_metadata_server_kept_in", own)],
            "--http_metadata_server_kept_in",
        ),
    ] {
        let mut settings = Settings::default();
        let free = [
            ("rpc_address", "127.0.0.1"),
            ("rpc_port", "auto"),
            ("metrics_host", "127.0.0.1"),
            ("metrics_port", "0"),
            ("http_metadata_server_host", "127.0.0.1"),
            ("http_metadata_server_port", "0"),
        ];
        for (name, value) in free.iter().chain(flags) {
            settings.command_line(name, value).unwrap();
        }
        let error = MasterServer::start(settings.config().unwrap()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::NotSupported, "{error}");
        let said = error.to_string();
        for word in [place, own, "feature `metadata-rocksdb`"] {
            assert!(said.contains(word), "{flags:?}: {said}");
        }
    }
}

#[cfg(not(feature = "metadata-etcd"))]
#[tokio::test]
async fn the_missing_etcd_is_named() {
    let mut settings = Settings::default();
    for (name, value) in [
        ("enable_multi_tenants", "true"),
        ("tenant_quota_connector_type", "etcd"),
        ("tenant_quota_connector_uri", "127.0.0.1:1"),
    ] {
        settings.command_line(name, value).unwrap();
    }
    let master = MasterServer::start(settings.config().unwrap()).await.unwrap_err();
    let client = mooncake_store::client::programs::locate_master("etcd://127.0.0.1:1", "").err().unwrap();
    for (error, place) in [(master, "--tenant_quota_connector_uri"), (client, "etcd://127.0.0.1:1")] {
        assert_eq!(error.code(), ErrorCode::NotSupported, "{error}");
        let said = error.to_string();
        assert!(said.contains(place) && said.contains("feature `metadata-etcd`"), "{said}");
    }
}
