"""Detection of files of Mooncake C++ in the folder of this package.

Python prefers `store.so` of Mooncake C++ to a module `store.py`, but a package `store/` to both.
`mooncake.store` and `mooncake.engine` are therefore packages: they are imported whatever was
installed later, and refuse to work beside files of Mooncake C++.
"""

from __future__ import annotations

import os
import sys

_OURS = "mooncake-rs"
_OTHER = "mooncake-transfer-engine"
# Argument of pip: the folder in the sources of this project. No registry has the package, so its
# name alone would be whatever someone else registers under it.
_PLACE = "./mooncake-python"
# Set by our `mooncake/__init__.py`.
_MARK = "_MOONCAKE_RS"


def check_interpreter() -> None:
    """Raises `ImportError` on a Python for which the native half cannot be loaded."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):
        raise ImportError(f"cannot import mooncake: Python is too old. python={version} oldest=3.11")
    if "t" in sys.abiflags:
        raise ImportError(
            f"cannot import mooncake: free-threaded builds of Python are not supported. python={version}t; "
            "use the build with the global interpreter lock"
        )


def check() -> None:
    """Raises `ImportError` if files of Mooncake C++ are here, or files of this package are missing.

    The message has the command that repairs the installation.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        names = os.listdir(folder)
    except OSError:
        # An archive has no folder, and no extension modules either.
        return
    foreign = sorted(name for name in names if name.startswith(("store", "engine")) and name.endswith(".so"))
    if foreign:
        other = " ".join(_others(folder, foreign)) or _OTHER
        raise ImportError(
            f"cannot import mooncake: Mooncake C++ and {_OURS} are installed in the same folder. folder={folder!r} files={','.join(foreign)}; "
            f"to use {_OURS}, in its sources: pip uninstall -y {other} && pip install --force-reinstall --no-deps {_PLACE}; "
            f"to use Mooncake C++: pip uninstall -y {_OURS} && pip install --force-reinstall --no-deps {other}"
        )
    if not hasattr(sys.modules.get("mooncake"), _MARK):
        raise ImportError(
            f"cannot import mooncake: files of {_OURS} are missing or replaced, as after removing Mooncake C++. folder={folder!r}; "
            f"in its sources: pip install --force-reinstall --no-deps {_PLACE}"
        )


def _others(folder: str, files: list[str]) -> list[str]:
    """Returns the distributions that installed these files."""
    from importlib import metadata

    found = set()
    for distribution in metadata.distributions(path=[os.path.dirname(folder)]):
        name = distribution.metadata["Name"]
        if name and name != _OURS and any(str(path) == f"mooncake/{file}" for path in distribution.files or () for file in files):
            found.add(name)
    return sorted(found)
