"""Registration of NVMe-oF namespaces in Mooncake C++, which this package lacks."""

from mooncake._refused import refusal

raise refusal(
    "mooncake_ssd_register",
    "the master has no NVMe-oF segments",
    "store objects on disks of clients with enable_ssd_offload",
)
