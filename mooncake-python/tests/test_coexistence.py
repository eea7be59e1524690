"""This package and Mooncake C++ in one environment, installed and removed in every order.

This package is packed from the installed one. A stand-in replaces Mooncake C++: a wheel with files
of the same names, because the real one has 100 MB. Python finds its modules like real ones, and no
test loads them.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import mooncake

SOURCE = Path(mooncake.__file__).parent
OTHER = "mooncake-transfer-engine-non-cuda"
OTHER_INIT = "MARK = 'Mooncake C++'\n"
COMMON = ("cli.py", "mooncake_config.py", "async_store.py", "http_metadata_server.py", "mooncake_store_service.py")


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], scripts: dict[str, str]) -> Path:
    """Builds a wheel with these files."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    entries = "".join(f"{script} = {target}\n" for script, target in scripts.items())
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{entries}".encode(),
    }
    record = []
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for at, content in files.items():
            archive.writestr(at, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{at},sha256={digest},{len(content)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    ours = {
        f"mooncake/{path.relative_to(SOURCE)}": path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    scripts = {"mooncake": "mooncake._tool:main", "mooncake_master": "mooncake.cli:master"}
    # The foreign extension module must not be loaded.
    extension = b"an extension module"
    theirs = {"mooncake/__init__.py": OTHER_INIT.encode()} | {f"mooncake/{name}": OTHER_INIT.encode() for name in COMMON}
    theirs |= {"mooncake/store.so": extension, "mooncake/engine.so": extension}
    return {
        "ours": wheel(folder, "mooncake-rs", mooncake.__version__, ours, scripts),
        "theirs": wheel(folder, OTHER, "0.3.13", theirs, {"mooncake_master": "mooncake.cli:MARK"}),
    }


class Environment:
    def __init__(self, folder: Path, wheels: dict[str, Path]) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python, self.wheels = folder / "bin/python", wheels
        self.bin = folder / "bin"

    def pip(self, *words: str | Path) -> None:
        # pip of this interpreter operates on the other environment.
        command = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", "-q", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr

    def install(self, which: str) -> None:
        self.pip("install", "--no-deps", "--no-index", "--force-reinstall", self.wheels[which])

    def remove(self, which: str) -> None:
        self.pip("uninstall", "-y", "mooncake-rs" if which == "ours" else OTHER)

    def run(self, code: str) -> tuple[int, str]:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, timeout=60, env=clean, check=False)
        return done.returncode, done.stdout + done.stderr

    def refuses(self, code: str, *words: str) -> None:
        status, said = self.run(code)
        assert status != 0 and "ImportError: cannot import mooncake" in said, said
        for word in words:
            assert word in said, said

    def works(self) -> None:
        status, said = self.run(
            "import mooncake, mooncake.store, mooncake.engine; mooncake.store.MooncakeDistributedStore; print(mooncake.__version__)"
        )
        assert status == 0 and said.strip() == mooncake.__version__, said


@pytest.fixture
def environment(tmp_path, wheels):
    return Environment(tmp_path / "venv", wheels)


MODULES = ("mooncake.store", "mooncake.engine")
AGAIN = ("pip install --force-reinstall --no-deps ./mooncake-python",)
MEND = ("pip uninstall -y mooncake-transfer-engine-non-cuda", *AGAIN)


def mend(environment: Environment) -> None:
    """Runs the commands of the message."""
    environment.remove("theirs")
    environment.install("ours")
    environment.works()


def test_this_package_alone(environment):
    environment.install("ours")
    environment.works()
    done = subprocess.run([environment.bin / "mooncake", "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and mooncake.__version__ in done.stdout, done.stderr


def test_mooncake_cpp_alone(environment):
    environment.install("theirs")
    status, said = environment.run("import mooncake; print(mooncake.MARK)")
    assert status == 0 and said.strip() == "Mooncake C++", said


def test_mooncake_cpp_then_this_package(environment):
    environment.install("theirs")
    environment.install("ours")
    for module in ("mooncake", *MODULES):
        environment.refuses(f"import {module}", "store.so", *MEND)
    mend(environment)


@pytest.mark.nightly
def test_this_package_then_mooncake_cpp(environment):
    environment.install("ours")
    environment.install("theirs")
    # `__init__` is that of Mooncake C++ here. Code of this package runs only once a module is
    # imported.
    status, said = environment.run("import mooncake; print(mooncake.MARK)")
    assert status == 0 and said.strip() == "Mooncake C++", said
    for module in MODULES:
        environment.refuses(f"import {module}", "store.so", *MEND)
    done = subprocess.run([environment.bin / "mooncake", "status"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and MEND[0] in done.stderr and "Traceback" not in done.stderr, done.stderr
    mend(environment)


@pytest.mark.nightly
@pytest.mark.parametrize("order", [("theirs", "ours"), ("ours", "theirs")])
def test_mooncake_cpp_is_removed(environment, order):
    for which in order:
        environment.install(which)
    environment.remove("theirs")
    for module in MODULES:
        environment.refuses(f"import {module}", "missing or replaced", *AGAIN)
    environment.install("ours")
    environment.works()


@pytest.mark.nightly
@pytest.mark.parametrize("order", [("theirs", "ours"), ("ours", "theirs")])
def test_this_package_is_removed(environment, order):
    for which in order:
        environment.install(which)
    environment.remove("ours")
    # No file of this package is left that could report the problem: the shared files are gone.
    status, said = environment.run("import mooncake; print(getattr(mooncake, 'MARK', None))")
    assert status == 0 and said.strip() == "None", said
    status, said = environment.run("import importlib.util; print(importlib.util.find_spec('mooncake.store').origin)")
    assert status == 0 and said.strip().endswith("store.so"), said
    environment.install("theirs")
    status, said = environment.run("import mooncake; print(mooncake.MARK)")
    assert status == 0 and said.strip() == "Mooncake C++", said
