"""Shared memory divided among the processes of one host. Not built in yet."""

raise ImportError("mooncake.shared_segment is not built in; processes of one host share a store instead")
