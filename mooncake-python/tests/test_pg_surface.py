"""Names, options and refusals of `mooncake.pg`, without other processes than one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest


def run(code: str, **environment: str) -> str:
    """Runs a program in a process of its own, and returns its output."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_without_torch_the_import_says_so() -> None:
    for name in ("pg", "ep"):
        code = f"""
import sys
sys.modules["torch"] = None
try:
    import mooncake.{name}
except ImportError as error:
    print(error)
"""
        assert "torch is not installed" in run(code)


torch = pytest.importorskip("torch", reason="process groups need torch")

import torch.distributed as dist

from mooncake import pg
from mooncake.pg import MooncakeBackendOptions, ProposalStatus, SyncAfterFailureStatus


def fields(options: MooncakeBackendOptions) -> tuple[Any, ...]:
    return (
        options.active_ranks,
        options.is_extension,
        options.max_group_size,
        options.auto_deactivate_on_failure,
        options.auto_sync_on_failure,
    )


def test_options() -> None:
    mask = torch.zeros(1, dtype=torch.int32)
    assert fields(MooncakeBackendOptions(mask)) == (mask, False, 0, True, True)
    assert fields(MooncakeBackendOptions(mask, True)) == (mask, True, 0, True, True)
    assert fields(MooncakeBackendOptions(mask, True, 8)) == (mask, True, 8, True, True)
    assert fields(MooncakeBackendOptions(active_ranks=mask, max_world_size=8)) == (mask, False, 8, True, True)
    assert fields(MooncakeBackendOptions(8)) == (None, False, 8, True, True)
    assert fields(MooncakeBackendOptions(8, True)) == (None, True, 8, True, True)
    assert fields(MooncakeBackendOptions(8, False, True, False)) == (None, False, 8, True, False)
    assert fields(MooncakeBackendOptions(max_group_size=8, auto_sync_on_failure=False))[2:] == (8, True, False)
    for wrong in ((mask, True, 8, True), (8, True, True, True, True)):
        with pytest.raises(TypeError):
            MooncakeBackendOptions(*wrong)
    with pytest.raises(TypeError):
        MooncakeBackendOptions(8, max_group_size=8)
    with pytest.raises(TypeError):
        MooncakeBackendOptions(size=8)


def test_enumerations() -> None:
    assert [(one.name, int(one)) for one in SyncAfterFailureStatus] == [("Reconciled", 0), ("NoPending", 1), ("Rejected", 2)]
    assert [(one.name, int(one)) for one in ProposalStatus] == [
        ("Rejected", 0),
        ("Applied", 1),
        ("AppliedWithDroppedRanks", 2),
    ]
    assert pg.ViewUpdateStatus is ProposalStatus


def test_the_names_are_those_of_ep() -> None:
    import mooncake.ep as ep

    assert all(getattr(ep, name) is getattr(pg, name) for name in pg.__all__)
    assert pg.recover_ranks is pg.activate_ranks


def test_works_and_groups_of_other_backends() -> None:
    assert pg.get_failed_ranks_hint(object()) is None and pg.get_local_success(object()) is False
    with pytest.raises(RuntimeError):
        pg.get_active_ranks(object())
    with pytest.warns(UserWarning):
        pg.extend_group_size_to(object(), 8)


ALONE = """
import torch, torch.distributed as dist
from mooncake import pg
store = dist.HashStore()
def init(**given):
    dist.init_process_group("mooncake-cpu", store=store, rank=0, world_size=1, **given)
"""


def test_a_world_of_one() -> None:
    out = run(
        ALONE
        + """
assert pg.set_host_ip("127.0.0.1") is None
mask = torch.full((4,), 9, dtype=torch.int32)
init(pg_options=pg.MooncakeBackendOptions(mask, max_group_size=4))
group = dist.group.WORLD
assert mask.tolist() == [1, 0, 0, 0] and pg.get_active_ranks(group) is mask
assert pg.get_active_ranks(group._get_backend(torch.device("cpu"))) is mask
assert pg.get_num_synced_ranks(group) == 1 and pg.get_peer_state(group, [0, 1]) == [True, False]
assert dist.get_world_size() == 1 and dist.get_backend() == "mooncake-cpu" and group.getBackendName() == "mooncake"
tensor = torch.arange(5)
work = dist.all_reduce(tensor, async_op=True)
assert work.wait() and tensor.tolist() == [0, 1, 2, 3, 4] and work.result()[0] is tensor
assert pg.get_failed_ranks_hint(work).tolist() == [0, 0, 0, 0] and pg.get_local_success(work)
dist.barrier()
outputs = [torch.zeros(5, dtype=torch.int64)]
dist.all_gather(outputs, tensor)
assert outputs[0].equal(tensor)
rejected = pg.activate_ranks(group, [3])
assert rejected.status == pg.ProposalStatus.Rejected and rejected.reject_reason
applied = pg.activate_ranks(group, [0])
assert applied.status == pg.ProposalStatus.Applied and applied.dropped_ranks == []
assert pg.sync_after_failure(group).status == pg.SyncAfterFailureStatus.NoPending
for call, value in ((pg.set_host_ip, "127.0.0.2"), (pg.set_device_filter, ["x"])):
    try:
        call(value)
        raise SystemExit(f"{call} raises nothing")
    except RuntimeError:
        pass
pg.set_host_ip("127.0.0.1")
pg.set_device_filter([])
pg.set_transfer_engine(None)
if hasattr(store, "list_keys"):
    keys = [key for key in store.list_keys() if "coordinator_addr" in key]
    assert len(keys) == 1, keys
dist.destroy_process_group()
try:
    group.allreduce([tensor])
    raise SystemExit("a closed group works")
except RuntimeError:
    pass
init()
dist.all_reduce(tensor)
dist.destroy_process_group()
print("done")
"""
    )
    assert out == "done"


def test_leaving_without_destroy() -> None:
    assert run(ALONE + "init(); dist.all_reduce(torch.ones(100_000)); print('done')") == "done"


def test_options_that_do_not_fit() -> None:
    code = """
for options in (
    pg.MooncakeBackendOptions(65),
    pg.MooncakeBackendOptions(torch.zeros(1, dtype=torch.int64)),
    pg.MooncakeBackendOptions(torch.zeros(1, dtype=torch.int32), False, 2),
    pg.MooncakeBackendOptions(torch.zeros(4, dtype=torch.int32)[::2]),
    pg.MooncakeBackendOptions(1, False, False, True),
    "options",
):
    try:
        init(pg_options=options)
        raise SystemExit(f"{options} raises nothing")
    except RuntimeError as error:
        assert str(error).startswith("cannot create group"), error
init()
print("done")
"""
    assert run(ALONE + code) == "done"


@pytest.mark.nightly
def test_settings_from_the_environment() -> None:
    code = """
from mooncake._pg_options import _check
checked = _check(None, 0, 1, "cpu")
print(checked.deactivates, checked.syncs)
"""
    assert run(ALONE + code) == "True True"
    assert run(ALONE + code, MOONCAKE_PG_AUTO_SYNC_ON_FAILURE="false") == "True False"
    off = {"MOONCAKE_PG_AUTO_SYNC_ON_FAILURE": "0", "MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE": "0"}
    assert run(ALONE + code, **off) == "False False"


def test_the_engine_of_the_program() -> None:
    code = """
from mooncake.engine import TransferEngine
engine = TransferEngine()
try:
    pg.set_transfer_engine(engine)
    raise SystemExit("an engine without initialize is accepted")
except RuntimeError:
    pass
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
pg.set_transfer_engine(engine)
init()
pg.set_transfer_engine(engine)
tensor = torch.ones(100_000)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(int(tensor.sum()))
"""
    assert run(ALONE + code) == "100000"


@pytest.mark.nightly
def test_with_the_debug_level_detail() -> None:
    code = "init(); tensor = torch.ones(4); dist.all_reduce(tensor); dist.barrier(); print(int(tensor.sum()))"
    assert run(ALONE + code, TORCH_DISTRIBUTED_DEBUG="DETAIL") == "4"


def test_both_backends_in_one_group() -> None:
    code = """
dist.init_process_group("cpu:mooncake-cpu,cuda:mooncake", store=store, rank=0, world_size=1)
tensor = torch.ones(4)
dist.all_reduce(tensor)
print(int(tensor.sum()), dist.group.WORLD.getBackendName())
"""
    assert run(ALONE + code) == "4 mooncake"
