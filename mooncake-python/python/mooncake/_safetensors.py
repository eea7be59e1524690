"""Transfer of tensors between the store and safetensors files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake._layout import word

if TYPE_CHECKING:
    from mooncake._tensors import TensorCalls

_NOT_THERE = -1100
_CANNOT_READ = -1102


def save(store: TensorCalls, key: str, file_name: str | None) -> int:
    """Writes a stored tensor to a file, which is named after the key by default."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        return store._invalid("cannot save tensor: safetensors is not installed; pip install safetensors")
    tensor = store.get_tensor(key)
    if tensor is None:
        return store._note(_NOT_THERE, f"cannot save tensor: key {key!r} holds no tensor")
    try:
        save_file({word(key): tensor}, word(key) if file_name is None else file_name)
    except KeyError:
        # safetensors looks up the type of the tensor in its own table.
        return store._invalid(f"cannot save tensor: safetensors has no such type. key={key!r} dtype={tensor.dtype}")
    except (OSError, ValueError, SafetensorError) as error:
        return store._invalid(str(error))
    return 0


def load(store: TensorCalls, key: str | None, file_name: str) -> Any:
    """Stores a tensor of a file under the key and returns it.

    The tensor is the one named like the key, or else the first one of the file. Without a key, the
    name of the file is the key.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        store._invalid("cannot load tensor: safetensors is not installed; pip install safetensors")
        return None
    try:
        tensors = load_file(file_name)
    except (OSError, ValueError, SafetensorError) as error:
        store._note(_CANNOT_READ, str(error))
        return None
    name = file_name if key is None else word(key)
    tensor = tensors.get(name, next(iter(tensors.values()), None))
    return tensor if tensor is not None and store.put_tensor(name, tensor) == 0 else None
