//! The public conformance suite on the double of libcuda: memory of devices open to peers, and local memory of every kind.

use mooncake_nvlink::testkit::{OnGpu, load};

fn on_double(local: Option<u32>) -> OnGpu {
    load();
    OnGpu::new(local)
}

mod to_the_host {
    use super::*;
    mooncake_transport::transport_conformance!(on_double(None));
}

mod on_one_device {
    use super::*;
    mooncake_transport::transport_conformance!(on_double(Some(0)));
}

mod between_devices {
    use super::*;
    mooncake_transport::transport_conformance!(on_double(Some(1)));
}
