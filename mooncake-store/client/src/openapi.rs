//! Documents about HTTP endpoints.

use axum::http::StatusCode;
use serde_json::Value;

/// Returns the OpenAPI document as JSON. A response without a description has that of its status,
/// because every response must have one.
pub fn openapi_document(api: &utoipa::openapi::OpenApi) -> String {
    let mut document = serde_json::to_value(api).unwrap_or_default();
    let paths = document["paths"].as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
    let operations = paths.filter_map(Value::as_object_mut).flat_map(|item| item.values_mut());
    for operation in operations {
        for (status, response) in operation["responses"].as_object_mut().into_iter().flatten() {
            if response["description"].as_str().is_none_or(str::is_empty) {
                response["description"] = meaning_of(status).into();
            }
        }
    }
    document.to_string()
}

fn meaning_of(status: &str) -> &'static str {
    let status = status.parse().ok().and_then(|status| StatusCode::from_u16(status).ok());
    status.and_then(|status| status.canonical_reason()).unwrap_or("Response")
}
