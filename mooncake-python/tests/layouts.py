"""Short constructors of tensor layouts and read targets."""

from __future__ import annotations

from mooncake.store import ParallelAxis, ReadTarget, TensorParallelism


def axis(
    kind: str,
    rank: int = 0,
    size: int = 1,
    split_dim: int | None = None,
    expert_id: int | None = None,
    stage_id: int | None = None,
) -> ParallelAxis:
    made = ParallelAxis()
    made.kind, made.rank, made.size, made.split_dim = kind, rank, size, split_dim
    made.expert_id, made.stage_id = expert_id, stage_id
    return made


def layout(*axes: ParallelAxis) -> TensorParallelism:
    made = TensorParallelism()
    made.axes = list(axes)
    return made


def tp(rank: int, size: int, split_dim: int = 0) -> TensorParallelism:
    return layout(axis("tp", rank, size, split_dim=split_dim))


def target(mode: str, parallelism: TensorParallelism | None = None) -> ReadTarget:
    made = ReadTarget()
    made.mode, made.parallelism = mode, parallelism
    return made
