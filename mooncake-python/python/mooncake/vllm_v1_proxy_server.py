"""Proxy server of Mooncake C++ for demonstrations, which this package lacks."""

from mooncake._refused import refusal

raise refusal(
    "vllm_v1_proxy_server",
    "it is a copy of a test program of vLLM, and no client imports it",
    "use a router of vLLM, such as vllm-router, in front of prefill and decode servers",
)
