//! The public conformance suite on the fake libcuda: device memory open to peers, and local memory
//! of every kind.

use mooncake_nvlink::testkit::{OnGpu, load};

fn on_fake(local: Option<u32>) -> OnGpu {
    load();
    OnGpu::new(local)
}

mod to_the_host {
    use super::*;
    mooncake_transport::transport_conformance!(on_fake(None));
}

mod on_one_device {
    use super::*;
    mooncake_transport::transport_conformance!(on_fake(Some(0)));
}

mod between_devices {
    use super::*;
    mooncake_transport::transport_conformance!(on_fake(Some(1)));
}
