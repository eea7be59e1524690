"""Removal of NVMe-oF namespaces in Mooncake C++, which this package lacks."""

from mooncake._refused import refusal

raise refusal(
    "mooncake_ssd_unregister",
    "the master has no NVMe-oF segments",
    "remove disk segments with unmount_local_disk_segment",
)
