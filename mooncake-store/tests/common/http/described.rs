//! HTTP endpoints compared with their own description, for valid and invalid requests.

use std::net::SocketAddr;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Answer, ask};

const JSON: &str = "application/json; charset=utf-8";

/// Method of a path, as `/openapi.json` describes it.
pub(crate) struct Operation {
    pub(crate) method: String,
    pub(crate) path: String,
    described: Value,
}

impl Operation {
    fn parameters(&self) -> Vec<String> {
        let list = self.described["parameters"].as_array().cloned().unwrap_or_default();
        list.iter().map(|parameter| parameter["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Checks that a response is one of those described, in status, content type and schema.
    fn check(&self, document: &Value, answer: &Answer) -> Result<(), String> {
        let Self { method, path, .. } = self;
        let response = &self.described["responses"][answer.status.to_string()];
        let Some(content) = response["content"].as_object() else {
            return Err(format!("{method} {path}: status {} is not described: {answer:?}", answer.status));
        };
        let (kind, media) = content.iter().next().unwrap();
        if !answer.content_type.starts_with(kind.as_str()) {
            return Err(format!("{method} {path}: {kind} is described: {answer:?}"));
        }
        if kind == "application/json" {
            let body: Value = serde_json::from_str(&answer.body).map_err(|error| error.to_string())?;
            let mut schema = media["schema"].clone();
            schema["components"] = document["components"].clone();
            let schema = jsonschema::validator_for(&schema).map_err(|error| error.to_string())?;
            schema.validate(&body).map_err(|error| format!("{method} {path}: {error} in {body}"))?;
        }
        Ok(())
    }
}

pub(crate) async fn description(at: SocketAddr) -> (Value, Vec<Operation>) {
    let answer = ask(at, "GET", "/openapi.json", "").await;
    assert_eq!((answer.status, &*answer.content_type), (200, JSON));
    let document: Value = serde_json::from_str(&answer.body).unwrap();
    let mut operations = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, described) in item.as_object().unwrap() {
            assert!(!described["summary"].as_str().unwrap_or_default().is_empty(), "{method} {path}");
            for (status, response) in described["responses"].as_object().unwrap() {
                let text = response["description"].as_str().unwrap_or_default();
                assert!(!text.is_empty(), "{method} {path}: status {status} has no description");
            }
            let method = method.to_uppercase();
            operations.push(Operation { method, path: path.clone(), described: described.clone() });
        }
    }
    (document, operations)
}

/// Requests every endpoint, with each of the values in place of every parameter.
pub(crate) async fn responses_are_described(
    at: SocketAddr,
    document: &Value,
    operations: &[Operation],
    values: &[&str],
) {
    for operation in operations {
        let names = operation.parameters();
        for value in values {
            let query: Vec<String> =
                names.iter().map(|name| format!("{name}={}", value.replace(' ', "%20"))).collect();
            let path = format!("{}?{}", operation.path, query.join("&"));
            for body in ["", "{}", r#"{"segments":["node1:1"],"requested_quota_bytes":1}"#] {
                let answer = ask(at, &operation.method, &path, body).await;
                operation.check(document, &answer).unwrap();
            }
        }
    }
}

/// Strategy for text that may stand in a query without ending it.
fn query_text() -> impl Strategy<Value = String> {
    proptest::collection::vec(
        prop_oneof![
            Just("%00".to_owned()),
            Just("%ff".to_owned()),
            Just("%2C".to_owned()),
            Just("%".to_owned()),
            Just("%%".to_owned()),
            Just("+".to_owned()),
            Just(",".to_owned()),
            Just("&".to_owned()),
            Just("=".to_owned()),
            Just("99999999999999999999-1".to_owned()),
            "[!$-;=?-Z_a-z~]{0,8}",
        ],
        0..12,
    )
    .prop_map(|parts| parts.concat())
}

fn body_text() -> impl Strategy<Value = String> {
    prop_oneof![
        ".{0,40}",
        Just("[".repeat(100_000)),
        Just(format!("{{\"segments\":[{}\"a\"]}}", "\"b\",".repeat(10_000))),
        "[-0-9.eE]{1,30}".prop_map(|number| format!("{{\"requested_quota_bytes\":{number}}}")),
        query_text().prop_map(|name| json!({"segments": [name], "max_concurrency": 1}).to_string()),
        Just("x".repeat((1 << 20) + 1)),
    ]
}

/// Sends random requests. Each response must be a described one.
pub(crate) fn bad_input_is_answered(
    runtime: &tokio::runtime::Runtime,
    at: SocketAddr,
    document: &Value,
    operations: &[Operation],
    cases: u32,
) {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(cases));
    let cases = (0..operations.len(), query_text(), query_text(), body_text());
    runner
        .run(&cases, |(which, value, tail, body)| {
            let operation = &operations[which];
            let names = operation.parameters();
            let query: Vec<String> = names.iter().map(|name| format!("{name}={value}")).collect();
            let path = format!("{}?{}&{tail}", operation.path, query.join("&"));
            let answer = runtime.block_on(ask(at, &operation.method, &path, &body));
            if answer.status != 413 || body.len() <= 1 << 20 {
                operation.check(document, &answer).map_err(TestCaseError::fail)?;
            }
            Ok(())
        })
        .unwrap();
}
