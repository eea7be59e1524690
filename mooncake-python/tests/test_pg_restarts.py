"""Restarts of a job by `torchrun` after a rank was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="process groups need torch")

# Seconds for one job: on two busy cores, importing torch twice in three processes takes most of it.
LIMIT = 240

PROGRAM = """
import os, signal, time
import torch, torch.distributed as dist
from mooncake import pg

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt and rank == 0:
    # The other rank looks for the coordinator before this one has begun.
    other = os.path.join(os.environ["FOLDER"], "looks")
    while not os.path.exists(other):
        time.sleep(0.05)
    time.sleep(0.5)
if attempt and rank == 1:
    open(os.path.join(os.environ["FOLDER"], "looks"), "w").close()
dist.init_process_group("mooncake-cpu")
tensor = torch.full((4,), rank + 1.0)
dist.all_reduce(tensor)
assert tensor.tolist() == [3.0] * 4
if attempt == 0:
    if rank == int(os.environ["VICTIM"]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
open(os.path.join(os.environ["FOLDER"], f"done{rank}"), "w").write(str(attempt))
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_job_goes_on_after_a_killed_rank(tmp_path: Path, victim: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone", str(program)]
    done = subprocess.run(
        [sys.executable, *launcher],
        env={**os.environ, "FOLDER": str(tmp_path), "VICTIM": str(victim), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"done{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
