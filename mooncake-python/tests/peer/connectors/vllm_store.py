"""MooncakeStoreConnector of vLLM: the worker with its threads, and the server and the client of
lookups. The KV cache is CPU memory, and one rank has all layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from types import SimpleNamespace

import fakes

fakes.replace("llguidance", "lmformatenforcer", "openai_harmony", "outlines_core", "xgrammar")
FOLDER = tempfile.mkdtemp()
# vLLM reads these variables when it is imported.
os.environ |= {"VLLM_RPC_BASE_PATH": FOLDER, "VLLM_MOONCAKE_STORE_TIER_LOG": "1", "MOONCAKE_CONFIG_PATH": f"{FOLDER}/mooncake.json"}

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, worker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK, HEADS, WIDTH, LAYERS, BLOCKS = 16, 2, 64, 4, 512
VARIANTS = ["blocks"]


class Event:
    def record(self):
        pass

    synchronize = record


torch.cuda.Event = Event
worker.get_tensor_model_parallel_rank = lambda: 0
worker.get_tensor_model_parallel_world_size = lambda: 1
worker.get_pcp_group = worker.get_dcp_group = lambda: SimpleNamespace(world_size=1, rank_in_group=0)


class Connector:
    """A page is a hash of a block. The store keeps the block of all layers under one key."""

    def __init__(self, host, master, memory, preferred, variant):
        os.environ["VLLM_HOST_IP"] = host
        mode = {"mode": "embedded" if memory else "standalone-store", "global_segment_size": memory}
        settings = {"metadata_server": "P2PHANDSHAKE", "master_server_address": master, "protocol": "tcp", **mode, "local_buffer_size": "32MB"}
        with open(os.environ["MOONCAKE_CONFIG_PATH"], "w", encoding="utf-8") as file:
            json.dump(settings, file)
        extra = {"enable_group_semantics": str(bool(memory))} | ({} if memory else {"preferred_segment": preferred})
        config = SimpleNamespace(
            model_config=SimpleNamespace(model="org/model-7B", get_num_layers=lambda _: LAYERS, get_total_num_kv_heads=lambda: HEADS),
            parallel_config=SimpleNamespace(data_parallel_index=0, pipeline_parallel_size=1, rank=0, decode_context_parallel_size=1),
            kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_connector_extra_config=extra),
            cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True, prefix_match_unit=None, num_gpu_blocks=BLOCKS),
            kv_events_config=None,
            speculative_config=None,
        )
        layers = [f"model.layers.{number}.attn" for number in range(LAYERS)]
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float16)
        groups = [KVCacheGroupSpec(layers, spec)]
        caches = {name: torch.zeros((BLOCKS, HEADS, BLOCK, 2 * WIDTH), dtype=torch.float16) for name in layers}
        self.layers = [cache.view(torch.uint8).reshape(BLOCKS, -1) for cache in caches.values()]
        self.worker = worker.MooncakeStoreWorker(config, KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups))
        self.worker.register_kv_caches(caches)
        self.client = worker.LookupKeyClient(config)
        self.jobs = 0

    def pages(self, name, count):
        return [hashlib.sha256(f"{name}-{number}".encode()).digest() for number in range(count)]

    def keys(self, pages):
        return [self.worker.token_dbs[0].key_for(page) for page in pages]

    def sizes(self, pages):
        return [sum(layer.shape[1] for layer in self.layers)] * len(pages)

    def header(self):
        return b""

    def request(self, pages, first, **more):
        self.jobs += 1
        tokens, blocks = len(pages) * BLOCK, list(range(first, first + len(pages)))
        made = data.MooncakeStoreConnectorMetadata(set(), set())
        made.add_request(data.ReqMeta(f"request-{self.jobs}", tokens, (blocks,), list(pages), **more))
        return made

    def results(self):
        return self.worker.get_transfer_results(set(), data.MooncakeStoreConnectorMetadata(set(), set()))

    def store(self, pages, values):
        for block, value in enumerate(values, 1):
            content = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            for layer, part in zip(self.layers, content.chunk(LAYERS)):
                layer[block] = part
        tokens = len(pages) * BLOCK
        more = {"can_save": True, "store_job_id": self.jobs, "prefill_end_tokens": tokens}
        self.worker.wait_for_save(self.request(pages, 1, **more))
        until(self.worker.build_connector_worker_meta)
        assert self.worker.kv_send_thread._saved_offset[f"request-{self.jobs}"] == tokens

    def found(self, pages):
        self.jobs += 1
        # A hit of all tokens would be shortened, because the last token is always computed.
        return self.client.lookup(f"lookup-{self.jobs}", len(pages) * BLOCK + 1, list(pages)).hit_length // BLOCK

    def load(self, pages):
        first = BLOCKS - len(pages)
        more = {"can_save": False, "load_spec": data.LoadSpec(0, len(pages) * BLOCK, True)}
        self.worker.start_load_kv(self.request(pages, first, **more))
        until(lambda: self.results().finished_recving)
        missing = self.worker.get_block_ids_with_load_errors()
        read = [b"".join(layer[block].numpy().tobytes() for layer in self.layers) for block in range(first, BLOCKS)]
        return [None if block in missing else value for block, value in enumerate(read, first)]

    def remove(self, pages):
        """Removes everything, as vLLM does between steps of training."""
        assert self.client.reset()

    def close(self):
        self.client.close()
        self.worker.close()
        assert self.worker.store is None


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "a transfer of vLLM has not ended"
        time.sleep(0.005)
