//! Metrics in the dashboard and the alert rules of `deploy/`, each of which must be in the scrape
//! of a running master or client.

use std::path::PathBuf;

use crate::common::http::used::{scraped, used_client};
use crate::common::http::{ask, config};
use crate::common::rig::{MIB, client, segment};
use mooncake_store::client::ClientConfig;
use mooncake_store::master::TenantQuota;
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::server::MasterServer;
use promql_parser::parser::{Expr, VectorSelector, parse};
use serde_json::Value;

fn deployed(file: &str) -> String {
    std::fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file)).unwrap()
}

/// Collects the names of metrics in an expression.
fn selectors(expr: &Expr, found: &mut Vec<String>) {
    let mut name = |selector: &VectorSelector| found.extend(selector.name.clone());
    match expr {
        Expr::VectorSelector(selector) => name(selector),
        Expr::MatrixSelector(selector) => name(&selector.vs),
        Expr::Aggregate(aggregate) => selectors(&aggregate.expr, found),
        Expr::Unary(unary) => selectors(&unary.expr, found),
        Expr::Binary(binary) => {
            selectors(&binary.lhs, found);
            selectors(&binary.rhs, found);
        }
        Expr::Paren(paren) => selectors(&paren.expr, found),
        Expr::Subquery(subquery) => selectors(&subquery.expr, found),
        Expr::Call(call) => call.args.args.iter().for_each(|argument| selectors(argument, found)),
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) | Expr::Extension(_) => {}
    }
}

/// Collects every `expr` in a document.
fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match (key.as_str(), value) {
                    ("expr", Value::String(expr)) => found.push(expr.clone()),
                    // Variables of a dashboard: `label_values(metric, label)`.
                    ("query", Value::String(query)) => {
                        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.split_once(','));
                        found.extend(inner.map(|(metric, _)| metric.to_owned()));
                    }
                    (_, value) => expressions(value, found),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

async fn scrape() -> String {
    let mut config = config();
    config.options.tenants = Some(vec![TenantQuota { name: "default".into(), bytes: MIB }]);
    let server = MasterServer::start(config).await.unwrap();
    let at = server.addresses();
    let master = MasterClient::remote(at.rpc.to_string(), Default::default());
    master.mount(client(1), &segment(1, MIB)).await.unwrap();
    let answer = ask(at.admin.unwrap(), "GET", "/metrics", "").await;
    assert_eq!((answer.status, &*answer.content_type), (200, "text/plain; version=0.0.4"));
    server.stop().await;
    answer.body
}

#[tokio::test]
async fn every_query_finds_its_metrics() {
    let (mut names, _) = scraped(&scrape().await);
    let (server, _client, pages) = used_client(ClientConfig::default()).await;
    names.extend(scraped(&ask(pages.address(), "GET", "/metrics", "").await.body).0);
    server.stop().await;
    let dashboard: Value = serde_json::from_str(&deployed("grafana/mooncake-master.json")).unwrap();
    let alerts: Value = yaml_serde::from_str(&deployed("prometheus/alerts.yml")).unwrap();
    for (document, at_least) in [(dashboard, 57), (alerts, 11)] {
        let mut queries = Vec::new();
        expressions(&document, &mut queries);
        assert!(queries.len() >= at_least, "only {} queries were found", queries.len());
        for query in queries {
            // Grafana fills in the variables.
            let query = query.replace("$__rate_interval", "1m");
            let parsed = parse(&query).unwrap_or_else(|error| panic!("{query}: {error}"));
            let mut wanted = Vec::new();
            selectors(&parsed, &mut wanted);
            assert!(!wanted.is_empty(), "{query} asks for nothing");
            for metric in wanted {
                // Prometheus itself defines `up`.
                assert!(metric == "up" || names.contains(&metric), "{metric} is not there: {query}");
            }
        }
    }
}

/// Names and types of metrics that dashboards for Mooncake C++ use, as a running master of Mooncake
/// C++ shows them.
#[tokio::test]
async fn names_and_types_of_a_mooncake_cpp_master() {
    let (_, types) = scraped(&scrape().await);
    for (kind, names) in [("gauge", GAUGES), ("counter", COUNTERS)] {
        for name in names.split_whitespace() {
            assert_eq!(types.get(name).map(String::as_str), Some(kind), "{name}");
        }
    }
    for operation in OPERATIONS.split_whitespace() {
        for what in ["requests", "failures"] {
            let name = format!("master_{operation}_{what}_total");
            assert_eq!(types.get(&name).map(String::as_str), Some("counter"), "{name}");
        }
    }
    for operation in BATCHES.split_whitespace() {
        for what in ["requests", "failures", "partial_successes", "items", "failed_items"] {
            let name = format!("master_batch_{operation}_{what}_total");
            assert_eq!(types.get(&name).map(String::as_str), Some("counter"), "{name}");
        }
    }
    assert_eq!(types["master_value_size_bytes"], "histogram");
    assert_eq!(types["master_snapshot_duration_ms"], "histogram");
    assert_eq!(types["master_nof_heartbeat_probe_latency_ms"], "histogram");
    assert_eq!(types["master_rpc_latency_seconds"], "histogram", "ours");
}

const GAUGES: &str = "
    ha_oplog_applied_sequence_id ha_oplog_last_sequence_id ha_oplog_pending_entries ha_oplog_standby_lag
    ha_pending_mutation_queue_size ha_standby_state
    file_cache_nums_ mem_cache_nums_ master_active_clients master_allocated_bytes master_allocated_file_size_bytes
    master_key_count master_nof_allocated_bytes master_promotion_in_flight master_put_start_discarded_staging_size
    master_soft_pin_key_count master_total_capacity_bytes master_total_file_capacity_bytes master_total_nof_capacity_bytes
    segment_allocated_bytes segment_total_capacity_bytes";

const COUNTERS: &str = "
    file_cache_hit_bytes_total file_cache_hit_nums_ mem_cache_hit_bytes_total mem_cache_hit_nums_ total_get_nums_
    valid_get_nums_ master_attempted_evictions_total master_successful_evictions_total master_evicted_key_count
    master_evicted_size_bytes master_successful_evictions_mem master_attempted_evictions_mem master_evicted_key_count_mem
    master_evicted_size_bytes_mem master_put_start_alloc_failures_total master_put_start_partial_allocations_total
    master_put_start_discard_cnt master_put_start_release_cnt master_promotion_admitted_total master_promotion_cancelled_total
    master_promotion_candidate_admission_rejected_total master_promotion_candidate_admitted_total
    master_promotion_candidate_dropped_limit_total master_promotion_candidate_expired_evaluated_total
    master_promotion_candidate_expired_unevaluated_total master_promotion_candidate_recorded_total
    master_promotion_completed_bytes_total master_promotion_completed_total master_promotion_expired_total
    master_promotion_failed_total master_promotion_rejected_cap_total master_promotion_rejected_frequency_total
    master_promotion_rejected_watermark_total master_snapshot_success master_snapshot_fail
    master_attempted_evictions_nof master_evicted_key_count_nof master_evicted_size_bytes_nof master_successful_evictions_nof
    master_nof_heartbeat_failure_total master_nof_heartbeat_success_total master_nof_heartbeat_timeout_total
    master_nof_segments_unmounted_by_heartbeat_total";

const OPERATIONS: &str = "
    put_start put_end put_revoke get_replica_list get_replica_list_by_regex exist_key remove remove_by_regex remove_all
    mount_segment unmount_segment remount_segment ping copy_start copy_end copy_revoke move_start move_end move_revoke
    evict_disk_replica create_copy_task create_move_task query_task fetch_tasks update_task";

const BATCHES: &str = "exist_key query_ip replica_clear get_replica_list put_start put_end put_revoke";
