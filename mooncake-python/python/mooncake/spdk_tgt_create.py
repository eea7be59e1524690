"""Setup of NVMe-oF targets in Mooncake C++, which this package lacks."""

from mooncake._refused import refusal

raise refusal(
    "spdk_tgt_create",
    "this package has no NVMe-oF segments",
    "store objects on disks of clients with enable_ssd_offload, or set up targets with rpc.py of SPDK",
)
