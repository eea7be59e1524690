//! The public conformance suite, between two devices and on one with itself.

use crate::support::OnDevices;

mod two_devices {
    use super::OnDevices;
    mooncake_transport::transport_conformance!(OnDevices::new(["rxe0", "rxe1"]));
}

mod one_device {
    use super::OnDevices;
    mooncake_transport::transport_conformance!(OnDevices::new(["rxe0", "rxe0"]));
}
