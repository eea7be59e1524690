"""`RpcInterface` of two builds of the package: each receives what the other sends.

    python messages.py OUR_PYTHON PEER_PYTHON [--host 10.213.0.1]

The script starts itself with either build as a server and as a client. It prints differences and
exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zlib

# Lengths in the body of a request and behind it. Mooncake C++ takes the bytes behind an earlier
# request of a connection for those of a short one, so the short ones come first.
SIZES = (0, 1, 255, 256, 1024, 1025, 100_000, 3 << 20)
PORT = 50555


def pattern(size):
    return bytes(i * 31 % 251 for i in range(251)) * (size // 251 + 1)


class Tensor:
    """Object with what `send_tensor` takes from a tensor."""

    shape, dtype = (999,), "uint8"

    def __init__(self):
        import ctypes

        self.memory = ctypes.create_string_buffer(pattern(999)[:999], 999)
        self.data_ptr = lambda: ctypes.addressof(self.memory)

    def numel(self):
        return 999

    def element_size(self):
        return 1


def head(kind, *sizes):
    return b"".join(value.to_bytes(4, "little") for value in (kind, len(sizes))) + b"".join(
        size.to_bytes(8, "little") for size in (*sizes, 0, 0, 0, 0)[:4]
    )


def serve(at):
    from mooncake.engine import RpcInterface

    server = RpcInterface()
    server.initialize_server(at, thread_count=2)
    server.set_data_receive_callback(lambda got: print("data", len(got["data"]), zlib.crc32(got["data"]), flush=True))
    server.set_tensor_receive_callback(lambda got: print("tensor", got.dtype, len(got.get_data_as_bytes()), flush=True))
    print(server.start_server_async(), flush=True)
    sys.stdin.read()
    os._exit(0)


def send(at):
    from mooncake.engine import RpcInterface

    client = RpcInterface()
    client.initialize_client()
    codes = [client.send_data(at, pattern(size)[:size]) for size in SIZES]
    codes += [client.send_tensor(at, Tensor()), client.send_data(at, head(2, 3, 4) + bytes(2000))]
    print(codes, flush=True)
    os._exit(0)


def expected():
    lines = [f"data {size} {zlib.crc32(pattern(size)[:size])}" for size in SIZES]
    return [*lines, f"data 999 {zlib.crc32(pattern(999)[:999])}", "tensor float32 2040"]


def started(python, role, at):
    words = [python, __file__, role, at]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def run(server_python, client_python, at):
    """Returns what the server received, and the codes of the client."""
    with started(server_python, "serve", at) as server:
        assert server.stdout is not None and server.stdin is not None
        if server.stdout.readline() != "True\n":
            return ["the server did not start"], ""
        with started(client_python, "send", at) as client:
            codes = client.communicate(timeout=120)[0].strip()
        # Callbacks print before the client has its reply.
        server.stdin.close()
        return server.stdout.read().splitlines(), codes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    pythons = {"this project": options.ours, "Mooncake C++": options.peer}
    failed = 0
    for number, (of, to) in enumerate((a, b) for a in pythons for b in pythons if (a, b) != ("Mooncake C++",) * 2):
        got, codes = run(pythons[to], pythons[of], f"{options.host}:{PORT + number}")
        if got != expected() or codes != str([0] * (len(SIZES) + 2)):
            failed += 1
            print(f"messages from {of} to {to}: received {got}, codes {codes}")
    print(f"messages: {failed} of 3 pairs differ")
    return failed > 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("serve", "send"):
        {"serve": serve, "send": send}[sys.argv[1]](sys.argv[2])
    sys.exit(main())
