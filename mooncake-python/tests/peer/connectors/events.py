"""Decodes events of a master with the classes of vLLM, as a subscriber of vLLM's events does.

    OUR_PYTHON events.py FOLDER

FOLDER is that of `connectors.py`. A store puts and removes objects with keys of each connector; the
script exits with 1 if vLLM's decoder refuses a message, or if a field is not as expected.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(sys.argv[1]).resolve()
sys.path[:0] = [str(FOLDER / "needs"), str(HERE), str(HERE.parent)]

import fakes

fakes.replace("vllm.config", "vllm.logger", "vllm.utils", "vllm.v1")
for package in ("vllm", "vllm.distributed"):
    fakes.skip_init(package, FOLDER / package.replace(".", "/"))

import msgspec
import vllm.v1.core.kv_cache_utils as hashes
import zmq

# The type of hashes decides what the decoder takes; vLLM has the same union.
hashes.ExternalBlockHash = bytes | int

from cluster import MIB, Master
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from mooncake.store import MooncakeDistributedStore

HASH = "00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210"
LOW, FIRST = 0xFEDCBA9876543210 - 2**64, 0x0011223344556677
RPC, EVENTS = 50151, 50157
# A key, its hash in events, and its group of layers.
KEYS = [
    (f"org/m@tp_rank:1@pcp0@dcp0@pp_rank:0@group:2@{HASH}", LOW, 2),
    (f"org-m_{HASH}_0_k", FIRST, None),
    (f"org/m@8@5@{HASH}@bfloat16", LOW, None),
    (f"org/m@08050401@1@{HASH}", LOW, 1),
    ("12345", 12345, None),
    ("a key without a hash", None, None),
]


def main() -> int:
    flags = ["--enable_kv_events=true", f"--kv_events_bind_endpoint=tcp://127.0.0.1:{EVENTS}", "--kv_events_backend_id=pool"]
    master = Master(sys.executable, RPC, flags, None)
    try:
        context = zmq.Context()
        reader = context.socket(zmq.SUB)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = reader.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        reader.connect(f"tcp://127.0.0.1:{EVENTS}")
        monitor.recv_multipart()
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", f"127.0.0.1:{RPC}") == 0
        decoder, events = msgspec.msgpack.Decoder(type=KVEventBatch), []

        def read():
            assert reader.poll(10_000), f"events do not arrive: {events[-2:]}"
            events.extend(decoder.decode(reader.recv_multipart()[-1]).events)

        # The first subscription reaches the publisher after the connection.
        for number in range(1000):
            store.put(str(number), b"x")
            if reader.poll(10):
                break
        while not events or events[-1].block_hashes != [number]:
            read()
        events.clear()
        for key, _, _ in KEYS:
            assert store.put(key, b"value") == 0
            assert store.remove(key, True) == 0
        while len(events) < 2 * len(KEYS):
            read()
        for (key, number, group), stored, removed in zip(KEYS, events[::2], events[1::2], strict=True):
            wanted = [] if number is None else [number]
            assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved), key
            assert stored.block_hashes == removed.block_hashes == wanted, f"{key}: {stored}"
            assert stored.group_idx == removed.group_idx == group, f"{key}: {stored}"
            print(f"{stored}")
        store.close()
    finally:
        master.stop()
    print(f"vLLM's decoder reads {2 * len(KEYS)} events")
    return 0


if __name__ == "__main__":
    sys.exit(main())
