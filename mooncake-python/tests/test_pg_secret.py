"""`MOONCAKE_PG_SECRET`: ranks with the same secret, another one, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from conftest import free_port

NAME = "MOONCAKE_PG_SECRET"
# Seconds for a rank, whose refusal takes far less than the 300 s that a founder waits for others.
PROMPTLY = 100

# Rank without torch: it meets the coordinator at the address in a file.
RANK = """
import os, sys, time
from mooncake import _log, _mooncake
rank, path = int(sys.argv[1]), sys.argv[2]
_log.start()
try:
    context = _mooncake.GroupContext(rank, "127.0.0.1", [])
    if rank == 0:
        with open(path + ".new", "w") as file:
            file.write(context.serve())
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    context.connect(open(path).read())
    print("connected", flush=True)
    if rank == 0:
        sys.stdin.read()
except Exception as error:
    print("refused", error, flush=True)
"""


def start(rank: int, path: str, secret: str | None) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != NAME}
    if secret is not None:
        environment[NAME] = secret
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def meet(tmp_path, founder: str | None, other: str | None) -> tuple[str, str, str]:
    """Returns the outputs of both ranks, and the log of the founder."""
    path = str(tmp_path / "coordinator")
    first = start(0, path, founder)
    second = start(1, path, other)
    try:
        said, _ = second.communicate(timeout=PROMPTLY)
        first_said, log = first.communicate(timeout=PROMPTLY)
    finally:
        first.kill()
        second.kill()
    return first_said.strip(), said.strip(), log


@pytest.mark.parametrize("secret", [None, "a secret", "letters beyond ASCII: äöü"])
def test_ranks_with_one_secret_meet(tmp_path, secret):
    assert meet(tmp_path, secret, secret)[:2] == ("connected", "connected")


@pytest.mark.parametrize(
    ("founder", "other", "says", "founder_says"),
    [
        ("a", "b", "the other process has another secret", "the other process has another secret"),
        ("a", None, "this process has none", "the other process has none"),
        (None, "a", "the other process has none", "this process has none"),
    ],
)
def test_ranks_with_another_secret_or_none_are_refused(tmp_path, founder, other, says, founder_says):
    first, second, log = meet(tmp_path, founder, other)
    assert first == "connected"
    assert second.startswith("refused") and says in second and NAME in second
    # The rank that refuses says so in its log.
    assert founder_says in log and NAME in log


def test_an_empty_secret_is_refused(tmp_path):
    first, _, _ = meet_alone(tmp_path, "")
    assert "empty" in first and NAME in first


def meet_alone(tmp_path, secret: str) -> Sequence[str]:
    rank = start(0, str(tmp_path / "coordinator"), secret)
    said, log = rank.communicate(timeout=PROMPTLY)
    return said.strip(), log, ""


TRAIN = """
import torch, torch.distributed as dist
from mooncake import pg
dist.init_process_group("mooncake-cpu")
tensor = torch.ones(300_000) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
assert tensor.eq(3).all()
found = [None, None]
dist.all_gather_object(found, dist.get_rank())
assert found == [0, 1]
dist.destroy_process_group()
print("trained", flush=True)
"""


def torchrun(secrets: Sequence[str | None]) -> list[tuple[int, str]]:
    """Runs two ranks with the environment that torchrun sets, and a secret each."""
    port, ranks = free_port(), []
    for rank, secret in enumerate(secrets):
        environment = {name: value for name, value in os.environ.items() if name != NAME}
        environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if secret is not None:
            environment[NAME] = secret
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", TRAIN], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        )
    try:
        # The refused rank ends by itself. The other one waits for it, as for any rank that is late.
        said = [(1, "")] * 2
        for rank in (1, 0) if secrets[0] == secrets[1] else (1,):
            text, _ = ranks[rank].communicate(timeout=240)
            said[rank] = (ranks[rank].returncode, text)
        return said
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def test_training_with_a_secret():
    pytest.importorskip("torch", reason="process groups need torch")
    for code, text in torchrun(["a secret", "a secret"]):
        assert (code, text.splitlines()[-1]) == (0, "trained")


@pytest.mark.parametrize(
    "secrets",
    [("a", "b"), pytest.param(("a", None), marks=pytest.mark.nightly), pytest.param((None, "a"), marks=pytest.mark.nightly)],
)
def test_init_process_group_names_the_secret(secrets):
    pytest.importorskip("torch", reason="process groups need torch")
    code, text = torchrun(secrets)[1]
    assert code != 0 and NAME in text
