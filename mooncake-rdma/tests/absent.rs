//! A missing library or device is one clear error.

use mooncake_core::ErrorKind;
use mooncake_rdma::{RdmaConfig, RdmaTransport};

#[test]
fn missing_device_error_states_name() {
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
fn invalid_settings_are_refused_first() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = RdmaConfig { retries: 7, ..RdmaConfig::default() };
    let error = RdmaTransport::start(config, runtime.handle()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("for ever"), "{error}");
}
