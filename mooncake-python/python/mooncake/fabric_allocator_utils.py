"""Search for allocator libraries in Mooncake C++, which this package lacks."""

from mooncake._refused import refusal

raise refusal(
    "fabric_allocator_utils",
    "its allocators are inside the native module, not in libraries of their own",
    "use mooncake.allocator.NVLinkAllocator.get_allocator(device)",
)
