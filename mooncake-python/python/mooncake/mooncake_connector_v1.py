"""KV connector of Mooncake C++ for vLLM 0.10 to 0.12, which this package lacks."""

from mooncake._refused import refusal

raise refusal(
    "mooncake_connector_v1",
    "vLLM has its own MooncakeConnector since 0.13, and later releases cannot load this one",
    "use kv_connector=MooncakeConnector of vLLM without kv_connector_module_path",
)
