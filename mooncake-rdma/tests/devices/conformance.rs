//! The public conformance suite: between two devices and on one device alone, within one process
//! and between two.

use crate::support::{OnDevices, OnDevicesInTwoProcesses};

mod two_devices {
    use super::OnDevices;
    mooncake_transport::transport_conformance!(OnDevices::new(["rxe0", "rxe1"]));
}

mod one_device {
    use super::OnDevices;
    mooncake_transport::transport_conformance!(OnDevices::new(["rxe0", "rxe0"]));
}

mod two_devices_two_processes {
    use super::OnDevicesInTwoProcesses;
    mooncake_transport::transport_conformance!(OnDevicesInTwoProcesses::new(["rxe0", "rxe1"]));
}

mod one_device_two_processes {
    use super::OnDevicesInTwoProcesses;
    mooncake_transport::transport_conformance!(OnDevicesInTwoProcesses::new(["rxe0", "rxe0"]));
}
