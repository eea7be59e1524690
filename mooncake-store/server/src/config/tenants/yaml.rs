//! Policy of the tenants as YAML.

#[cfg_attr(not(feature = "cli"), path = "yaml/absent.rs")]
mod parse;

use std::fmt::Write;

use mooncake_master::TenantInfo;

pub(super) use self::parse::parse;

/// Formats the tenants as YAML.
pub(super) fn text(tenants: &[TenantInfo]) -> String {
    let mut text = "version: 1\ntenants:".to_owned();
    if tenants.is_empty() {
        text.push_str(" []");
    }
    text.push('\n');
    for tenant in tenants {
        // A JSON string is a YAML string. Writing to a string does not fail.
        let name = serde_json::Value::from(tenant.name.as_str());
        let _ = write!(text, "  - name: {name}\n    quota: {}\n", tenant.requested);
    }
    text
}
