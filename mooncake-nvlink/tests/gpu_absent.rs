//! A missing driver is one clear error, and lookups of addresses are none.

use mooncake_core::ErrorKind;
use mooncake_core::memory::{HostMemory, Location, MemorySource, device_driver};
use mooncake_nvlink::allocator::{Backend, probe};
use mooncake_nvlink::{Cuda, CudaDriver, NvlinkConfig, NvlinkTransport};

#[test]
fn a_missing_library_is_named() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The path does not exist on any machine.
    let libcuda = Some("/nowhere/libcuda.so.1".into());
    let config = NvlinkConfig { libcuda, ..NvlinkConfig::default() };

    let driver = CudaDriver::serve(config.libcuda.clone()).unwrap();
    let memory = HostMemory::new(64).unwrap();
    assert_eq!(memory.span().located().location, Location::Any);
    assert!(device_driver().unwrap().allocation(0x7000_0000_0000).is_none());
    assert!(Cuda::present().is_none(), "the lookup has loaded the driver");

    for error in [
        NvlinkTransport::start(config, runtime.handle()).unwrap_err(),
        driver.cuda().unwrap_err(),
        device_driver().unwrap().staging(64).err().unwrap(),
    ] {
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{text}");
        assert!(text.contains("libcuda.so.1") && text.contains("install"), "{text}");
    }
    assert_eq!(probe(0), Backend::Unsupported);
}

#[test]
fn invalid_settings_are_refused_first() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = NvlinkConfig { max_served: 0, ..NvlinkConfig::default() };
    let error = NvlinkTransport::start(config, runtime.handle()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}
