"""Elastic expert-parallel buffer of Mooncake C++, which this package lacks."""

from mooncake._refused import refusal

raise refusal(
    "mooncake_elastic_buffer",
    "its kernels need CUDA and the expert-parallel extension, which the wheel of Mooncake C++ lacks, too",
    "use DeepEP for elastic expert parallelism",
)
