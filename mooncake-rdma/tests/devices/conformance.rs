//! The public conformance suite: between two devices and on one with itself, in one process and between two.

use crate::support::{Apart, OnDevices};

mod two_devices {
    use super::OnDevices;
    mooncake_transport::transport_conformance!(OnDevices::new(["rxe0", "rxe1"]));
}

mod one_device {
    use super::OnDevices;
    mooncake_transport::transport_conformance!(OnDevices::new(["rxe0", "rxe0"]));
}

mod two_devices_two_processes {
    use super::Apart;
    mooncake_transport::transport_conformance!(Apart::new(["rxe0", "rxe1"]));
}

mod one_device_two_processes {
    use super::Apart;
    mooncake_transport::transport_conformance!(Apart::new(["rxe0", "rxe0"]));
}
