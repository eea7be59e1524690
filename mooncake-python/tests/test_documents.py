"""Programs in the documents run unchanged, except that `MASTER` and `OWNER` replace the addresses
of the master and of a `mooncake_client`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Owner

PROJECT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", ["../docs/python.md", "README.md"])
def test_programs_of(document, own_master, tmp_path):
    text = (PROJECT / document).read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert blocks
    master = own_master()
    owner = Owner(tmp_path, master)
    owner.start()
    # The blocks of a document form one program.
    program = "\n".join(blocks).replace('"localhost:50051"', "MASTER").replace('"localhost",', '"127.0.0.1",')
    exec(compile(program, document, "exec"), {"MASTER": master.address, "OWNER": owner.address})
    owner.stop()
