"""Allocators of GPU memory for PyTorch. This build reaches no GPU."""

raise ImportError("mooncake.allocator needs a build with CUDA, and this one has none")
