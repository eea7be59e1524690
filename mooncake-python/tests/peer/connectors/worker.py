"""Processes of a connector. Importing an engine takes long, so one process imports it and forks
another for each line that it reads: a socket, the folder of a package, and arguments of
`Connector`.

    python worker.py vllm|sglang|lmcache

A forked process reads commands from the socket as JSON lines, and writes their results.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import sys
import traceback


def value_of(key, size):
    return random.Random(key).randbytes(size)


def serve(module, link, arguments):
    made = module.Connector(*arguments)

    def values(pages):
        return [value_of(key, size) for key, size in zip(made.keys(pages), made.sizes(pages))]

    def objects(pages):
        """Returns the header of each object, and the length of the rest."""
        return {key: [made.header().hex(), size] for key, size in zip(made.keys(pages), made.sizes(pages))}

    def load(pages):
        """Returns the number of objects that have their bytes, and of those that are missing."""
        read, expected = made.load(pages), values(pages)
        wrong = [key for key, got, value in zip(made.keys(pages), read, expected) if got not in (None, value)]
        assert not wrong, f"{len(wrong)} of {len(read)} objects have other bytes: {wrong[:3]}"
        return [len(read) - read.count(None), read.count(None)]

    calls = {
        "objects": objects,
        "store": lambda pages: made.store(pages, values(pages)),
        "found": made.found,
        "load": load,
        "remove": made.remove,
    }
    yield None
    for line in link:
        call, *pages = json.loads(line)
        yield calls[call](made.pages(*pages)) if pages else made.close()


def run(module, request):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(request["socket"])
        link = connection.makefile("rw", encoding="utf-8")
        sys.path.insert(0, request["package"])
        try:
            for result in serve(module, link, request["arguments"]):
                print(json.dumps({"returned": result}), file=link, flush=True)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"raised": f"{type(error).__name__}: {error}"}), file=link, flush=True)


def main():
    module = importlib.import_module(f"{sys.argv[1]}_store")
    assert "mooncake" not in sys.modules, "the package is chosen later"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(json.dumps(module.VARIANTS), flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            run(module, json.loads(line))
            # Threads of the engine may run for ever.
            os._exit(0)


if __name__ == "__main__":
    main()
