"""MooncakestoreConnector of LMCache, from LMCache's factory, with its own CPU allocator; and its
lookup client.
"""

from __future__ import annotations

import asyncio
import random
import threading

import fakes

fakes.replace("numba", "cryptography")

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.lookup_client.mooncake_lookup_client import MooncakeLookupClient
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.token_database import ChunkedTokenDatabase

CHUNK, LAYERS, HEADS, WIDTH = 16, 4, 2, 64
SIZE = LAYERS * 2 * CHUNK * HEADS * WIDTH * 2
VARIANTS = ["chunks with headers", "chunks"]


class Connector:
    """A page is a key of LMCache, made from the tokens of a chunk."""

    def __init__(self, host, master, memory, preferred, variant):
        extra = {
            "local_hostname": host, "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "device_name": "",
            "master_server_address": master, "global_segment_size": memory, "local_buffer_size": 64 << 20,
            # The name that Mooncake C++ knows.
            "mooncake_master_server_addr": master, "mooncake_prefer_local_alloc": bool(memory),
            "save_chunk_meta": variant == VARIANTS[0], "transfer_timeout": 30,
        }  # fmt: skip
        url = f"mooncakestore://{master}/"
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.25, remote_url=url, remote_serde="naive", extra_config=extra
        )
        self.metadata = LMCacheMetadata(
            model_name="org/model-7B", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.float16, kv_shape=(LAYERS, 2, CHUNK, HEADS, WIDTH), chunk_size=CHUNK,
        )  # fmt: skip
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.backend = LocalCPUBackend(self.config, self.metadata, "cpu")
        self.connector = CreateConnector(url, self.loop, self.backend, self.config, self.metadata)
        self.inner = self.connector._connector
        self.database = ChunkedTokenDatabase(self.config, self.metadata)
        self.texts = {}

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def pages(self, name, count):
        first = random.Random(name).randrange(1 << 30)
        text = list(range(first, first + count * CHUNK))
        keys = [key for _, _, key in self.database.process_tokens(text)]
        self.texts[keys[0]] = text
        return keys

    def keys(self, pages):
        return [page.to_string() for page in pages]

    def sizes(self, pages):
        return [SIZE] * len(pages)

    def header(self):
        if not self.inner.save_chunk_meta:
            return b""
        return RemoteMetadata(SIZE, self.metadata.get_shapes(), self.metadata.get_dtypes(), self.inner.meta_fmt).serialize()

    def store(self, pages, values):
        chunks = []
        for value in values:
            chunk = self.backend.allocate(self.metadata.get_shapes(), self.metadata.get_dtypes(), self.inner.meta_fmt)
            chunk.raw_tensor.view(torch.uint8).flatten().copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
            chunks.append(chunk)
        self.run(self.connector.put(pages[0], chunks[0]))
        self.run(self.connector.batched_put(pages[1:], chunks[1:]))

    def found(self, pages):
        count = self.run(self.connector.batched_async_contains("lookup", pages))
        assert [self.connector.exists_sync(page) for page in pages[: count + 1]] == ([1] * count + [0])[: len(pages)]
        client = MooncakeLookupClient(self.config, self.metadata, self.inner.config.master_server_address)
        assert client.lookup(self.texts[pages[0]], "lookup") == count * CHUNK
        assert client.store.close() == 0
        return count

    def load(self, pages):
        chunks = self.run(self.connector.batched_get(pages))
        values = [chunk and bytes(chunk.byte_array) for chunk in chunks]
        for chunk in filter(None, chunks):
            chunk.ref_count_down()
        return values

    def remove(self, pages):
        """Removes by the store, because the connector does not remove."""
        assert self.inner.store.batch_remove(self.keys(pages), True) == [0] * len(pages)

    def close(self):
        self.run(self.connector.close())
