"""Transfer engine of Mooncake C++ that executes commands.

Reads one JSON command per line on standard input and writes one JSON response per line:
["init", host, metadata], ["write", name, at, peer address, length], ... The memory is the file
named first on the command line, so that the driver can compare bytes by itself.
"""

import ctypes
import json
import mmap
import os
import sys
import threading

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

PATH, SIZE = sys.argv[1], int(sys.argv[2])
handle = os.open(PATH, os.O_RDWR)
memory = mmap.mmap(handle, SIZE)
BASE = ctypes.addressof(ctypes.c_char.from_buffer(memory))
engine = TransferEngine()
background = {}


def init(host, metadata):
    code = engine.initialize(host, metadata, "tcp", "")
    if code == 0:
        code = engine.register_memory(BASE, SIZE)
    return [code, engine.get_rpc_port(), BASE]


def batch(write, name, at, remote, length, count):
    """Returns `count` requests of `length` bytes each, one behind the other."""
    call = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read
    steps = [i * length for i in range(count)]
    return call(name, [BASE + at + s for s in steps], [remote + s for s in steps], [length] * count)


def write_with_message(name, at, remote, length, about, text):
    notify = TransferNotify(about, text)
    return engine.transfer_sync(name, BASE + at, remote, length, TransferOpcode.Write, notify)


def start_writing(name, at, remote, length):
    """Writes repeatedly in a thread, until a write fails."""
    outcome = []

    def run():
        while (code := engine.transfer_sync_write(name, BASE + at, remote, length)) == 0:
            pass
        outcome.append(code)

    thread = threading.Thread(target=run)
    thread.start()
    background["writer"] = (thread, outcome)
    return 0


def end_of_writing(seconds):
    thread, outcome = background.pop("writer")
    thread.join(seconds)
    return outcome[0] if outcome else None


COMMANDS = {
    "init": init,
    "write": lambda name, at, remote, length: engine.transfer_sync_write(name, BASE + at, remote, length),
    "read": lambda name, at, remote, length: engine.transfer_sync_read(name, BASE + at, remote, length),
    "batch": batch,
    "write_with_message": write_with_message,
    "messages": lambda: [[n.name, n.msg] for n in engine.get_notifies()],
    "probe": lambda name: engine.send_probe(name),
    "first": lambda name: engine.get_first_buffer_address(name),
    "start_writing": start_writing,
    "end_of_writing": end_of_writing,
    "unregister": lambda: engine.unregister_memory(BASE),
    "register": lambda: engine.register_memory(BASE, SIZE),
}


def main():
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"ok": COMMANDS[name](*arguments)}
        except Exception as error:  # the driver decides what an exception means
            answer = {"error": f"{type(error).__name__}: {error}"}
        # The library logs to standard output, too; the mark distinguishes a response from a log.
        print("\x01" + json.dumps(answer), flush=True)
    # Destroyed before the interpreter ends, so that the engine removes its metadata.
    global engine
    engine = None


main()
