//! Policy that cannot be read, for a build without feature `cli`.

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_master::TenantQuota;

pub(crate) fn parse(_: &str) -> Result<Vec<TenantQuota>> {
    let text = "cannot read the tenants' policy: needs a build with feature `cli`";
    Err(Error::new(ErrorCode::NotSupported, text))
}
