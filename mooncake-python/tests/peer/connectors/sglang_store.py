"""MooncakeStore of SGLang's HiCache, with host memory of Mooncake's allocator. The host pools of
models are fakes, as in SGLang's own test of the store.
"""

from __future__ import annotations

import importlib.util
import time

import fakes

FOLDER = importlib.util.find_spec("sglang").submodule_search_locations[0]
fakes.replace(
    "sglang.kernels", "sglang.srt.mem_cache.memory_pool", "sglang.srt.mem_cache.pool_host.mla", "sglang.srt.observability.metrics_collector"
)
fakes.skip_init("sglang", FOLDER)

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeHostTensorAllocator, MooncakeStore

PAGES, SIZE = 512, 4096
# Seconds, longer than a lease of the master.
LEASE = 6
VARIANTS = ["keys and values", "latent and side pool"]


class Pool:
    """Host pool whose pages have one token, of one or two entries."""

    page_size, layout = 1, "page_first"

    def __init__(self, entries):
        self.allocator = MooncakeHostTensorAllocator()
        self.kv_buffer = self.allocator.allocate((PAGES, entries, SIZE), torch.uint8)
        self.entries = entries

    def get_page_buffer_meta(self, indices):
        rows = [self.kv_buffer[page][entry] for page in indices.tolist() for entry in range(self.entries)]
        return [row.data_ptr() for row in rows], [SIZE] * len(rows)

    def get_ksize_per_token(self):
        return self.entries * SIZE


class Connector:
    """A page has a key for each entry, and one for that of the side pool, stored for a session."""

    def __init__(self, host, master, memory, preferred, variant):
        is_latent = variant == VARIANTS[1]
        extra = {
            "master_server_address": master, "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "local_hostname": host,
            "global_segment_size": memory, "enable_group_semantics": bool(memory), "check_server": True,
            "master_metrics_port": int(master.rpartition(":")[2]) + 1, "extra_backend_tag": "tag",
        }  # fmt: skip
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=is_latent,
            enable_storage_metrics=True, is_page_first_layout=True, model_name="org/model-7B", extra_config=extra,
        )  # fmt: skip
        self.pool = Pool(1 if is_latent else 2)
        self.side = Pool(1) if is_latent else None
        self.connector = MooncakeStore(config, self.pool)
        self.connector.register_mem_pool_host(self.pool)
        if self.side:
            self.connector.register_mem_host_pool_v2(self.side, PoolName.INDEXER)

    def pages(self, name, count):
        return [f"{name}-{number}" for number in range(count)]

    def transfer(self, pages, first):
        return PoolTransfer(name=PoolName.INDEXER, keys=pages, host_indices=torch.arange(first, first + len(pages)))

    def keys(self, pages):
        keys, _, _ = self.connector._batch_preprocess(self.connector._tag_keys(pages), torch.arange(len(pages)))
        if self.side:
            keys += self.connector._tag_keys(self.connector._get_hybrid_page_component_keys(pages, self.transfer(pages, 0))[0])
        return keys

    def sizes(self, pages):
        return [SIZE] * len(self.keys(pages))

    def header(self):
        return b""

    def rows(self, pages, first):
        rows = self.pool.kv_buffer[first : first + len(pages)].flatten(0, 1)
        return [*rows, *self.side.kv_buffer[first : first + len(pages)].flatten(0, 1)] if self.side else [*rows]

    def store(self, pages, values):
        for row, value in zip(self.rows(pages, 0), values):
            row.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        assert all(self.connector.batch_set_v1(pages, torch.arange(len(pages))))
        if self.side:
            session = HiCacheStorageExtraInfo(extra_info={"session_id": "session"})
            assert self.connector._supports_session_ids
            assert all(self.connector.batch_set_v2([self.transfer(pages, 0)], session)[PoolName.INDEXER])

    def found(self, pages):
        if not self.side:
            return self.connector.batch_exists(pages)
        return self.connector.batch_exists_v2(pages, [self.transfer(pages, 0)]).kv_hit_pages

    def load(self, pages):
        first = PAGES - len(pages)
        good = self.connector.batch_get_v1(pages, torch.arange(first, PAGES))
        good = [one for one in good for _ in range(self.pool.entries)]
        if self.side:
            good += self.connector.batch_get_v2([self.transfer(pages, first)])[PoolName.INDEXER]
        rows = self.rows(pages, first)
        return [row.numpy().tobytes() if one else None for row, one in zip(rows, good)]

    def remove(self, pages):
        """Removes everything without a lease. The leases of the last reads end first."""
        time.sleep(LEASE)
        self.connector.clear()

    def close(self):
        self.connector.close()
        assert self.connector.store.close() == 0
