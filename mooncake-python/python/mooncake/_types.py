"""Plain values of the store's interface: enumerations and descriptions of tensor layouts."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from enum import Enum, unique
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def also_named(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Adds argument names of the documentation of Mooncake C++ to a call, besides those of its
    package.
    """

    def add(call: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(call)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in names.keys() & kwargs.keys():
                if names[name] in kwargs:
                    raise TypeError(f"{call.__name__}() got both {name!r} and {names[name]!r}, which are one argument")
                kwargs[names[name]] = kwargs.pop(name)
            return call(*args, **kwargs)

        called.also_named = names  # type: ignore[attr-defined]
        return called

    return add


class _Number(Enum):
    """Enumeration whose values convert to their numbers, but equal only themselves."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


@unique
class ObjectDataType(_Number):
    """Kind of a value, for the master's statistics."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


@unique
class ReplicaStatus(_Number):
    """State of a replica."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@unique
class TaskStatus(_Number):
    """State of a copy or move task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


@unique
class TaskType(_Number):
    """Kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


@unique
class SoftPinAction(_Number):
    """Effect of a put on an object's soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


def number_of(name: str, value: object) -> int:
    """Returns a 32-bit number of a layout."""
    try:
        number = int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"incompatible function arguments: {name} must be an int, not {type(value).__name__}") from None
    if not -(1 << 31) <= number < 1 << 31:
        raise TypeError(f"incompatible function arguments: {name} {number} has more than 32 bits")
    return number


def word_of(name: str, value: object) -> str:
    """Returns a string. Mooncake C++ accepts bytes wherever it takes strings."""
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"invalid UTF-8 in bytes: {error}") from None
    if not isinstance(value, str):
        raise TypeError(f"incompatible function arguments: {name} must be a str, not {type(value).__name__}")
    return value


class ParallelAxis:
    """Axis along which a tensor is divided among workers."""

    __slots__ = ("kind", "rank", "size", "split_dim", "expert_id", "stage_id", "__weakref__")

    def __init__(self) -> None:
        self.kind: str = ""
        self.rank: int = 0
        self.size: int = 1
        self.split_dim: int | None = None
        self.expert_id: int | None = None
        self.stage_id: int | None = None

    def __setattr__(self, name: str, value: object) -> None:
        if name == "kind":
            value = word_of("kind", value)
        elif value is not None or name in ("rank", "size"):
            value = number_of(name, value)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__[:-1])
        return f"ParallelAxis({fields})"


class TensorParallelism:
    """Axes that identify a shard, in the caller's order."""

    __slots__ = ("_axes", "__weakref__")

    def __init__(self) -> None:
        self._axes: list[ParallelAxis] = []

    @property
    def axes(self) -> list[ParallelAxis]:
        """Copy of the axes. Assign a list to change them."""
        return list(self._axes)

    @axes.setter
    def axes(self, axes: list[ParallelAxis]) -> None:
        given = list(axes)
        if not all(hasattr(axis, "kind") for axis in given):
            raise TypeError("incompatible function arguments: axes must be a list of ParallelAxis")
        # The caller may reuse the assigned axes for the next shard.
        self._axes = [copy.copy(axis) for axis in given]

    def __repr__(self) -> str:
        return f"TensorParallelism(axes={self._axes!r})"


class ReadTarget:
    """Form in which a tensor is read: `as_stored`, `shard` or `full`."""

    __slots__ = ("_mode", "_parallelism", "__weakref__")

    _MODES = ("as_stored", "shard", "full")

    def __init__(self) -> None:
        self._mode = "as_stored"
        self._parallelism: TensorParallelism | None = None

    @property
    def parallelism(self) -> TensorParallelism | None:
        """Copy of the parallelism of the shard, or of the shards that are joined."""
        return self._parallelism

    @parallelism.setter
    def parallelism(self, parallelism: TensorParallelism | None) -> None:
        if parallelism is not None and not hasattr(parallelism, "axes"):
            kind = type(parallelism).__name__
            raise TypeError(f"incompatible function arguments: parallelism must be a TensorParallelism, not {kind}")
        self._parallelism = copy.deepcopy(parallelism)

    @property
    def mode(self) -> str:
        """Mode in lower case."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        lower = word_of("mode", mode).lower()
        if lower not in self._MODES:
            raise RuntimeError(f"Unsupported ReadTarget mode: {mode}")
        self._mode = lower

    def __repr__(self) -> str:
        return f"ReadTarget(mode={self._mode!r}, parallelism={self.parallelism!r})"
