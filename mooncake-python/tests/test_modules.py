"""Modules of the wheel of Mooncake C++: each is there, or its import says what to use."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Names that programs use, by module. `None` marks a module that is refused.
MODULES: dict[str, tuple[str, ...] | None] = {
    "__init__": ("BufferPool", "RegisteredBufferPool"),
    "_fast_copy": ("concat_arrays_into",),
    "async_store": ("MooncakeDistributedStoreAsync",),
    "buffer_pool": ("BufferPool", "RegisteredBufferPool"),
    "cli": ("main",),
    "cli_bench": ("main",),
    "cli_client": ("main",),
    "dataproto_catalog": ("DataProtoCatalog", "DataProtoCatalogTransfer"),
    "engine": ("TransferEngine", "TransferOpcode", "TransferNotify"),
    "fabric_allocator_utils": None,
    "http_metadata_server": ("KVBootstrapServer", "KVPoll", "main"),
    "mooncake_config": ("DEFAULT_GLOBAL_SEGMENT_SIZE", "DEFAULT_LOCAL_BUFFER_SIZE", "MooncakeConfig", "logger"),
    "mooncake_connector_v1": None,
    "mooncake_elastic_buffer": None,
    "mooncake_ssd_register": None,
    "mooncake_ssd_unregister": None,
    "mooncake_store_service": ("MooncakeStoreService", "main", "parse_arguments", "sync_main"),
    "reshard": ("PlacementManifest", "ResourceKind", "ResourceManifest", "RuntimeBindingManifest"),
    "reshard.contracts": ("RuntimeBindingFragment", "StoredResourceManifest", "validate_resource_binding_identity"),
    "reshard.geometry": ("box_contains", "boxes_exactly_cover", "boxes_overlap", "regions_exactly_cover"),
    "reshard.weight": ("WeightManifest", "WeightPlacementManifest", "plan_placement_transfer"),
    "reshard.weight.binding": ("validate_runtime_binding", "validate_runtime_bindings"),
    "reshard.weight.manifest": ("WeightPlacementPart", "WeightRuntimeBindingManifest"),
    "reshard.weight.part": ("WeightPlacementPart",),
    "reshard.weight.placement": ("WeightPlacementManifest",),
    "reshard.weight.planner": ("LogicalTransferOperation", "plan_stored_transfer_to_target_placement"),
    "reshard.weight.runtime": ("WeightRuntimeBindingManifest",),
    "reshard.weight.serde": ("weight_placement_from_json", "weight_placement_to_json"),
    "reshard.weight.storage_manifest": ("StoredFragment", "StoredManifestIdentity", "WeightManifest"),
    "reshard.weight.topology": ("ParallelTopology", "TopologyParticipant"),
    "reshard.weight.types": ("ParallelRank", "PlacementFragment", "SplitAxis", "TensorDescriptor"),
    "shared_segment": ("create_shared_segment", "SharedSegment", "SharedSegmentError"),
    "spdk_tgt_create": None,
    "store": ("MooncakeDistributedStore", "ReplicateConfig", "BufferPool"),
    "structured_object_store": ("FieldSchema", "MooncakeBundleTransfer", "export_ref", "import_ref", "infer_structure"),
    "transfer_engine_topology_dump": ("main",),
    "vllm_v1_proxy_server": None,
}  # fmt: skip
# Helpers of other modules there, without names that programs use.
INTERNAL = ("reshard.contracts.fragments", "reshard.contracts.ids", "reshard.contracts.manifest", "reshard.weight.validation")
# Modules of the process groups of torch. The wheel of Mooncake C++ cannot import the first two.
OF_PROCESS_GROUPS = {
    "pg": ("MooncakeBackendOptions", "get_active_ranks", "join_group", "recover_ranks"),
    "ep": ("MAX_QP_COUNT", "Buffer", "EventHandle", "MooncakeBackendOptions", "get_ep_buffer_size_hint"),
    "mooncake_ep_buffer": ("Buffer", "EventOverlap"),
}


@pytest.mark.parametrize("name", [name for name, names in MODULES.items() if names is not None])
def test_a_module_with_its_names(name):
    if name in ("http_metadata_server", "mooncake_store_service"):
        pytest.importorskip("aiohttp", reason="the servers need aiohttp")
    if name == "shared_segment":
        pytest.importorskip("torch", reason="the module needs torch")
    module = importlib.import_module("mooncake" if name == "__init__" else f"mooncake.{name}")
    assert [one for one in MODULES[name] or () if not hasattr(module, one)] == []


@pytest.mark.parametrize("name", [name for name, names in MODULES.items() if names is None])
def test_a_refused_module(name):
    with pytest.raises(ImportError, match=f"cannot import mooncake.{name}: .+; .*(use|remove|store|set up)") as caught:
        importlib.import_module(f"mooncake.{name}")
    assert caught.value.name == f"mooncake.{name}" and not isinstance(caught.value, ModuleNotFoundError)
    ended = subprocess.run([sys.executable, "-m", f"mooncake.{name}"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "cannot import" in ended.stderr


@pytest.mark.parametrize("name", OF_PROCESS_GROUPS)
def test_process_groups(name):
    pytest.importorskip("torch", reason="process groups need torch")
    try:
        module = importlib.import_module(f"mooncake.{name}")
    except ImportError as error:
        assert "lacks the feature `pg`" in str(error)
        pytest.skip("this build has no process groups")
    assert [one for one in OF_PROCESS_GROUPS[name] if not hasattr(module, one)] == []


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("cli_client", ["--help"], "master_server_address"),
        ("cli_bench", ["--help"], "segment_id"),
        ("cli", ["--help"], "rpc_port"),
        ("transfer_engine_topology_dump", [], "Local topology"),
    ],
)
def test_commands_as_modules(module, arguments, words):
    ended = subprocess.run([sys.executable, "-m", f"mooncake.{module}", *arguments], capture_output=True, text=True, timeout=60)
    assert words in ended.stdout + ended.stderr


def test_the_table_is_that_of_the_wheel():
    """Compares the table with the files of the installed wheel of Mooncake C++, if there is one."""
    peer = os.environ.get("MOONCAKE_PEER_PYTHON")
    if not peer:
        pytest.skip("MOONCAKE_PEER_PYTHON names no Python with the wheel of Mooncake C++")
    script = "import importlib.util as u; print(list(u.find_spec('mooncake').submodule_search_locations)[0])"
    folder = Path(subprocess.run([peer, "-c", script], capture_output=True, text=True, check=True).stdout.strip())
    found = set()
    for file in (*folder.rglob("*.py"), *folder.glob("*.so")):
        parts = [*file.relative_to(folder).parts[:-1], file.name.partition(".")[0]]
        name = ".".join(parts).removesuffix(".__init__")
        public = not any(part.startswith("_") for part in parts if part not in ("__init__", "_fast_copy"))
        if public and not name.startswith("lib"):
            found.add(name)
    assert found == MODULES.keys() | OF_PROCESS_GROUPS.keys() | set(INTERNAL)
