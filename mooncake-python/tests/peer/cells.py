"""Interop matrix: {our master, that of Mooncake C++} x {our clients, those of Mooncake C++, both
together}, scenario by scenario.

    python cells.py OUR_PYTHON PEER_PYTHON [--host 10.213.0.1] [--only SCENARIO ..]
        [--documents FILE] [--at-a-time N] [--later]

Every scenario runs in every set-up. Master and clients of Mooncake C++ alone give the expected
results. A difference must be listed in docs/compatibility.md, and every listed difference must
occur. A violation of either rule is a failure.

With `--later`, the package of Mooncake C++ is 0.3.14. The scenarios are those of calls to a store,
and its own differences have a table of their own.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cells_admin
import cells_cluster
import cells_objects
from cluster import MIB, Master, Node, plain

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/compatibility.md"
# Heading of the table of differences.
HEADING = "## Differences in the interop matrix"
LATER_HEADING = "## Further differences from Mooncake C++ 0.3.14"
# Scenarios about pages and names of metrics, which have changed in 0.3.14.
OF_PAGES = {"pages", "metrics", "tenants", "client_pages", "directory"}
MASTERS = ["ours", "peer"]
CLIENTS = {"ours": ["ours"] * 3, "peer": ["peer"] * 3, "both": ["ours", "peer", "ours"]}
NO_ANSWER = "(no answer)"
EXPECTED = ("peer", "peer")
GROUPS = [cells_objects, cells_cluster, cells_admin]


class Run:
    """Results of one scenario in one set-up."""

    def __init__(self, cluster, name):
        self.members = cluster.members
        self.cluster = cluster
        self.name = name
        self.seen = {}

    def __call__(self, step, node, call, *args, sort=None, until=None, **kw):
        """Makes a call and records its result. With `until`, repeats the call for up to 30 s until
        that is the result.
        """
        return self.until(step, lambda answer: until is None or answer == until, node, call, *args, sort=sort, **kw)

    def until(self, step, over, node, call, *args, sort=None, **kw):
        """Repeats a call for up to 30 s until `over` accepts its result, and records it."""
        deadline = time.monotonic() + 30
        while True:
            answer = node(call, *args, **kw)
            if over(answer) or time.monotonic() > deadline:
                if sort:
                    answer = sorted(answer, key=lambda one: self.cluster.names.get(one[sort], one[sort]))
                return self.saw(step, answer)
            time.sleep(0.05)

    def pause(self, seconds):
        time.sleep(seconds)

    def saw(self, step, value):
        assert step not in self.seen, f"two steps of {self.name} are called {step!r}"
        self.seen[step] = self.cluster.plain(value)
        return value

    def copies(self, step, node, keys):
        """Records the number of replicas of each key, and the number of their clients. The master
        chooses which clients.
        """
        found = {}
        for key, copies in node("batch_get_replica_desc", keys).items():
            each = {json.dumps({**copy, "at": ""}, sort_keys=True) for copy in copies}
            found[key] = {"copies": len(copies), "members": len({copy["at"] for copy in copies}), "each": sorted(each)}
        return self.saw(step, found)

    def page(self, step, method, path, body=None, seen=lambda answer: answer, until=None):
        """Requests a page. With `until`, repeats the request for up to 30 s until the response
        satisfies it.
        """
        deadline = time.monotonic() + 30
        while True:
            answer = self.cluster.master.page(method, path, body)
            if until is None or until(answer) or time.monotonic() > deadline:
                self.saw(step, seen(answer))
                return answer
            time.sleep(0.05)


class Cluster:
    """Master and three clients, on separate ports."""

    def __init__(self, options, setup, number, group, log):
        pythons = {"ours": options.ours, "peer": options.peer}
        master, clients = setup
        self.host = options.host
        self.names = {}
        self.members = []
        # The range is below the ports that the system assigns to outgoing connections.
        port = 22000 + 20 * number
        # Port of the client that serves HTTP, if one does.
        self.client_port = port + 3
        self.master = Master(pythons[master], port, group.flags(port), log)
        try:
            self.join(pythons, CLIENTS[clients], group, port, 17000 + 10 * number, log)
        except BaseException:
            self.stop()
            raise

    def join(self, pythons, kinds, group, port, first, log):
        for index, (letter, kind) in enumerate(zip("abc", kinds)):
            node = Node(letter, pythons[kind], log, group.variables)
            self.members.append(node)
            host = f"{self.host}:{first + index}"
            settings = group.settings(letter)
            if settings.get("enable_client_http_server"):
                settings["client_http_port"] = self.client_port
            size = settings.pop("segment", 64 * MIB)
            code = self.set_up(node, host, group.directory(self.host, port), size, settings, port)
            if code != 0:
                raise RuntimeError(f"{letter} could not join: {code}")
            node.host = host
            self.names[host] = f"<{letter}>"
            if size:
                self.learn(node, host)
        for node in self.members:
            node("remove_all", True)

    def set_up(self, node, host, directory, size, settings, port):
        return node("setup", host, directory, size, 32 * MIB, "tcp", "", f"127.0.0.1:{port}", **settings)

    def learn(self, node, host):
        """Records the address of a client's memory, so that results can name the client instead."""
        key = f"learn {node.name}"
        node("put", key, {"as": "bytes", "of": "eA=="}, {"as": "config", "of": {"preferred_segment": host}})
        for copy in node("get_replica_desc", key):
            self.names[copy["at"]] = f"<{node.name}>"

    def plain(self, value):
        text = json.dumps(value)
        for name in sorted(self.names, key=len, reverse=True):
            text = re.sub(re.escape(name) + r"(?!\d)", self.names[name], text)
        return plain(json.loads(text))

    def run(self, scenario):
        run = Run(self, scenario.__name__)
        try:
            scenario(run)
        except RuntimeError as error:
            # A client that ended is a result like others.
            run.seen["ended"] = re.sub(r"-?\d+", "N", str(error))
        else:
            for node in self.members:
                node("remove_all", True)
        return run.seen

    def stop(self):
        for node in self.members:
            if node.process.poll() is None:
                try:
                    node("close")
                except (RuntimeError, OSError):
                    pass
            node.stop()
        self.master.stop()


def measured(options, log):
    """Returns the results of every step in each set-up: `{setup: {"scenario: step": value}}`."""
    seen = {setup: {} for setup in itertools.product(MASTERS, CLIENTS)}
    numbers = itertools.count()

    def see(group, scenarios, setup):
        cluster = Cluster(options, setup, next(numbers), group, log)
        try:
            for scenario in scenarios:
                for step, value in cluster.run(scenario).items():
                    seen[setup][f"{scenario.__name__}: {step}"] = value
                if any(node.process.poll() is not None for node in cluster.members):
                    cluster.stop()
                    cluster = Cluster(options, setup, next(numbers), group, log)
        finally:
            cluster.stop()

    # Scenarios mostly wait for leases and for clients, so several run at a time.
    with ThreadPoolExecutor(options.at_a_time) as pool:
        runs = []
        for group in (group for module in GROUPS for group in module.GROUPS):
            scenarios = [one for one in group.scenarios if one.__name__ in options.only or not options.only]
            if options.later:
                scenarios = [one for one in scenarios if one.__name__ not in OF_PAGES]
            runs += [pool.submit(see, group, scenarios, setup) for setup in seen if scenarios]
        try:
            for run in runs:
                run.result()
        finally:
            # After a failure, scenarios that have not begun are cancelled.
            pool.shutdown(wait=False, cancel_futures=True)
    return seen


def differences(seen):
    """Returns `{(step, setup): (expected, found)}` of the results that differ from Mooncake C++
    alone.
    """
    expected = seen[EXPECTED]
    found = {}
    for setup, steps in seen.items():
        for step in sorted(expected.keys() | steps.keys()):
            one, other = expected.get(step, NO_ANSWER), steps.get(step, NO_ANSWER)
            # A step that only requires presence accepts additional results.
            if one != other and not (one == NO_ANSWER and ": has " in step):
                found[step, setup] = (one, other)
    return found


def listed(document, heading=HEADING):
    """Returns the rows of the table in the document: patterns of steps, masters and clients they
    apply to, and the reason.
    """
    text = document.read_text(encoding="utf-8")
    if heading not in text:
        return []
    section = text.split(heading, 1)[1].split("\n## ", 1)[0]
    rows = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            rows += [(pattern, cells[1], line) for pattern in re.findall(r"`([^`]+)`", cells[0])]
    return rows


def concerns(whom, setup):
    """Returns whether a row about our master, our clients, or both applies to this set-up."""
    master, clients = setup
    return ("master" in whom and master == "ours") or ("client" in whom and clients != "peer")


def judged(found, rows):
    """Returns differences that no row lists, and rows that no difference matches."""
    used = set()
    open_ones = {}
    for (step, setup), values in found.items():
        match = [row for row in rows if fnmatch.fnmatchcase(step, row[0]) and concerns(row[1], setup)]
        used.update(match)
        if not match:
            open_ones[step, setup] = values
    return open_ones, [row for row in rows if row not in used]


def table(seen, found):
    """Formats a line per scenario and a column per set-up: the numbers of equal and of different
    results.
    """
    setups = list(seen)
    names = list(dict.fromkeys(step.split(": ")[0] for steps in seen.values() for step in steps))
    head = [f"{master} master, {'both' if clients == 'both' else clients}" for master, clients in setups]
    lines = [["scenario", *head]]
    for name in names:
        line = [name]
        for setup in setups:
            total = sum(1 for step in seen[EXPECTED] if step.split(": ")[0] == name)
            differ = sum(1 for step, where in found if where == setup and step.split(": ")[0] == name)
            line.append(f"{total - differ}" + (f" + {differ} other" if differ else ""))
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def short(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 260 else text[:250] + f".. ({len(text)})"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--only", nargs="*", default=[], metavar="SCENARIO")
    parser.add_argument("--documents", type=Path, default=DOCUMENT)
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("--at-a-time", type=int, default=3)
    parser.add_argument("--later", action="store_true")
    options = parser.parse_args()
    with open(options.log, "ab") as log:
        seen = measured(options, log)
    found = differences(seen)
    rows, later_rows = listed(options.documents), listed(options.documents, LATER_HEADING) if options.later else []
    unlisted, unneeded = judged(found, rows + later_rows)
    if options.later:
        # Only the run with 0.3.13 has all scenarios.
        unneeded = [row for row in unneeded if row in later_rows]
    print(table(seen, found))
    for step, group in itertools.groupby(sorted(unlisted), key=lambda where: where[0]):
        print(f"UNLISTED  {step}\n    expected {short(seen[EXPECTED].get(step, NO_ANSWER))}")
        for setup in (where[1] for where in group):
            print(f"    {setup[0]} master, clients: {setup[1]}: {short(unlisted[step, setup][1])}")
    if not options.only:
        for row in unneeded:
            print(f"LISTED, BUT NO LONGER DIFFERENT  {row[0]} ({row[1]})")
    steps, setups = len(seen[EXPECTED]), len(seen)
    print(f"{steps} steps in {setups} set-ups: {len(found)} answers differ, {len(unlisted)} of them unlisted")
    return 1 if unlisted or not steps or (unneeded and not options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
