//! Where there is no library or no such device, that is one clear error.

use mooncake_core::ErrorKind;
use mooncake_rdma::{RdmaConfig, RdmaTransport};

#[test]
fn a_device_that_is_not_there_is_named() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = RdmaConfig { devices: vec!["no-such-device".into()], ..RdmaConfig::default() };
    let error = RdmaTransport::start(config, runtime.handle()).unwrap_err();
    let text = error.to_string();
    match error.kind() {
        ErrorKind::Unsupported => {
            assert!(text.contains("libibverbs.so.1") && text.contains("install"), "{text}")
        }
        _ => assert!(text.contains("\"no-such-device\"") && text.contains("there is"), "{text}"),
    }
}

#[test]
fn settings_that_cannot_work_are_refused_first() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = RdmaConfig { retries: 7, ..RdmaConfig::default() };
    let error = RdmaTransport::start(config, runtime.handle()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("for ever"), "{error}");
}
