//! Policy of the tenants as YAML.

use std::fmt::Write;

use mooncake_master::TenantInfo;
#[cfg(feature = "cli")]
use mooncake_master::TenantQuota;

#[cfg(feature = "cli")]
pub(super) fn parse(text: &str) -> Result<Vec<TenantQuota>, String> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Policy {
        version: u64,
        tenants: Vec<Entry>,
    }
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Entry {
        name: String,
        quota: serde_json::Value,
    }
    let policy: Policy = yaml_serde::from_str(text).map_err(|error| error.to_string())?;
    if policy.version != 1 {
        return Err(format!("unsupported version {}: expected 1", policy.version));
    }
    let quota = |entry: Entry| {
        let written = match &entry.quota {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let bytes = bytes(&written).ok_or_else(|| {
            format!("tenant {}: quota {written:?} must be a number of bytes, KB, MB, GB or TB", entry.name)
        })?;
        let quota = TenantQuota { name: entry.name, bytes };
        quota.check().map_err(|error| error.message().to_owned())?;
        Ok(quota)
    };
    policy.tenants.into_iter().map(quota).collect()
}

/// Parses a size with a unit.
#[cfg(feature = "cli")]
fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = text.split_at(digits);
    let shift = match unit.trim_start().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return None,
    };
    count.parse::<u64>().ok()?.checked_mul(1 << shift)
}

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

#[cfg(all(test, feature = "cli"))]
mod tests {
    use super::*;

    #[test]
    fn policies() {
        let policy = |tenants: &str| parse(&format!("version: 1\ntenants:\n{tenants}"));
        let read = policy("  - name: a\n    quota: 2GB\n  - {name: 'b c', quota: 12345}\n").unwrap();
        let expected = [("a", 2 << 30), ("b c", 12345)];
        assert_eq!(read, expected.map(|(name, bytes)| TenantQuota { name: name.into(), bytes }));
        assert_eq!(policy("  []").unwrap(), []);
        for (bad, says) in [
            ("version: 2\ntenants: []", "version 2"),
            ("version: 1", "tenants"),
            ("version: 1\ntenants: [{name: a, quota: 1GB, x: 1}]", "x"),
            ("version: 1\ntenants: [{name: a, quota: 1.5GB}]", "1.5GB"),
            ("version: 1\ntenants: [{name: a, quota: 5 miles}]", "5 miles"),
            ("version: 1\ntenants: [{name: a, quota: 0}]", "not 0"),
            ("version: 1\ntenants: [{name: a, quota: 99999999TB}]", "99999999TB"),
            ("version: 1\ntenants: [{name: _a, quota: 1}]", "_a"),
        ] {
            let why = parse(bad).unwrap_err();
            assert!(why.contains(says), "{bad}: {why}");
        }
    }
}
