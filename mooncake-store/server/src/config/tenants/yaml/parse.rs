//! Reading of the policy.

use mooncake_core::{Error, Result};
use mooncake_master::TenantQuota;

use mooncake_core::settings::values::bytes;

/// Parses the policy of the tenants.
///
/// # Errors
/// `INVALID_PARAMS` with the reason.
pub(crate) fn parse(text: &str) -> Result<Vec<TenantQuota>> {
    tenants(text).map_err(Error::invalid)
}

fn tenants(text: &str) -> std::result::Result<Vec<TenantQuota>, String> {
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
        let whole = Some(&written).filter(|written| !written.contains('.'));
        let bytes = whole.and_then(|whole| bytes(whole).ok()).ok_or_else(|| {
            format!("tenant {}: quota {written:?} must be a number of bytes, KB, MB, GB or TB", entry.name)
        })?;
        let quota = TenantQuota { name: entry.name, bytes };
        quota.check().map_err(|error| error.message().to_owned())?;
        Ok(quota)
    };
    policy.tenants.into_iter().map(quota).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::{read_policy, write_policy};
    use super::*;
    use mooncake_core::ErrorCode;
    use mooncake_master::TenantInfo;

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
            assert!(why.message().contains(says), "{bad}: {why}");
        }
    }

    #[test]
    fn what_is_written_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tenants.yaml");
        let info = |name: &str, requested| TenantInfo {
            name: name.into(),
            requested,
            effective: 0,
            charged: 0,
            evicted: 0,
            rejected: 0,
            misses: Default::default(),
        };
        for tenants in [vec![], vec![info("a", 1), info("\"é: - #", i64::MAX as u64), info("yes", 7)]] {
            write_policy(&path, &tenants).unwrap();
            let read = read_policy(&path).unwrap();
            let names: Vec<_> = read.iter().map(|quota| (&*quota.name, quota.bytes)).collect();
            assert_eq!(names, tenants.iter().map(|t| (&*t.name, t.requested)).collect::<Vec<_>>());
        }
        let nowhere = folder.path().join("none").join("tenants.yaml");
        assert_eq!(write_policy(&nowhere, &[]).unwrap_err().code(), ErrorCode::PersistentFail);
        assert!(read_policy(&nowhere).unwrap_err().message().contains("tenants.yaml"));
    }
}
