//! Policy of tenants in a real etcd (Debian: `etcd-server`). Without etcd a test prints so and
//! passes, except in CI.

use crate::common::http::{config, http};
use crate::servers::{Server, etcd, ready, start};
use mooncake_core::ErrorCode;
use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_metadata::etcd::EtcdMetadata;
use mooncake_store::config::{MasterConfig, TenantPolicy};
use mooncake_store::server::MasterServer;

const KEY: &str = "mooncake-store/lab/tenant_quota_policy";

async fn running() -> Option<(Server, EtcdMetadata)> {
    let server = start(etcd)?;
    let etcd = EtcdMetadata::new(&server.at()).unwrap();
    ready(&etcd).await;
    Some((server, etcd))
}

/// Returns the configuration that the flags make.
fn settings(at: &str) -> MasterConfig {
    let mut settings = mooncake_store::config::Settings::default();
    for (name, value) in [
        ("enable_multi_tenants", "true"),
        ("tenant_quota_connector_type", "etcd"),
        ("tenant_quota_connector_uri", at),
        ("cluster_id", "lab"),
    ] {
        settings.command_line(name, value).unwrap();
    }
    let tenant_policy = settings.config().unwrap().tenant_policy;
    let expected = TenantPolicy::Etcd { endpoints: at.into(), key: KEY.into() };
    assert_eq!(tenant_policy, Some(expected));
    MasterConfig { tenant_policy, ..config() }
}

#[tokio::test]
async fn tenants_are_read_from_etcd_and_kept_there() {
    let Some((server, etcd)) = running().await else { return };
    let policy = "version: 1\ntenants:\n  - name: a\n    quota: 4MB\n";
    etcd.put(KEY, policy.into(), Expect::Absent).await.unwrap();
    let master = MasterServer::start(settings(&server.at())).await.unwrap();
    let at = master.addresses().admin.unwrap();
    let quotas = "/api/v1/tenant_quotas";
    let (status, body) = http(at, "GET", quotas, "").await;
    assert!(status == 200 && body.contains(r#""tenant_id":"a","requested_quota_bytes":4194304"#), "{body}");
    let set = async |name: &str, bytes: u64| {
        let body = format!(r#"{{"requested_quota_bytes":{bytes}}}"#);
        http(at, "PUT", &format!("{quotas}?tenant_id={name}"), &body).await.0
    };
    assert_eq!((set("b", 1000).await, set("b", 2000).await), (200, 200));
    assert_eq!(http(at, "DELETE", &format!("{quotas}?tenant_id=a"), "").await.0, 200);
    let kept = etcd.get(KEY).await.unwrap().unwrap();
    assert_eq!(kept.value, "version: 1\ntenants:\n  - name: \"b\"\n    quota: 2000\n");

    // The master does not overwrite a foreign version, and refuses a change that it cannot store.
    let other = "version: 1\ntenants: [{name: c, quota: 1GB}]\n";
    etcd.put(KEY, other.into(), Expect::At(kept.revision)).await.unwrap();
    assert_eq!(set("d", 5).await, 500);
    let (_, body) = http(at, "GET", quotas, "").await;
    assert!(body.contains(r#""tenant_id":"b""#) && !body.contains(r#""tenant_id":"d""#), "{body}");
    assert_eq!(etcd.get(KEY).await.unwrap().unwrap().value, other);
    master.stop().await;

    let master = MasterServer::start(settings(&format!("etcd://{}", server.at()))).await.unwrap();
    let (_, body) = http(master.addresses().admin.unwrap(), "GET", quotas, "").await;
    assert!(body.contains(r#""tenant_id":"c","requested_quota_bytes":1073741824"#), "{body}");
    master.stop().await;
}

#[tokio::test]
async fn what_is_wrong_with_a_policy_in_etcd_is_named() {
    let Some((server, etcd)) = running().await else { return };
    let refused = async |at: &str| MasterServer::start(settings(at)).await.unwrap_err();
    let error = refused(&server.at()).await;
    assert!(error.code() == ErrorCode::InvalidParams && error.to_string().contains("etcdctl put"), "{error}");
    for (value, says) in [("version: 2\ntenants: []", "version 2"), ("nonsense", KEY), ("\u{0}", KEY)] {
        etcd.put(KEY, value.to_owned().into(), Expect::Any).await.unwrap();
        let error = refused(&server.at()).await;
        assert!(error.code() == ErrorCode::InvalidParams && error.to_string().contains(says), "{error}");
    }
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr()).unwrap();
    let error = refused(&nobody.to_string()).await;
    assert!(error.to_string().contains(&nobody.to_string()) && error.to_string().contains(KEY), "{error}");
}
