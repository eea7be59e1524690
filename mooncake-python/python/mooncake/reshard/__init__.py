"""Layouts of tensors on the ranks of a cluster, and plans that move tensors from one layout to
another. Nothing here does I/O.
"""

from mooncake.reshard.contracts import PlacementManifest, ResourceKind, ResourceManifest, RuntimeBindingManifest

__all__ = ["ResourceKind", "ResourceManifest", "PlacementManifest", "RuntimeBindingManifest"]
