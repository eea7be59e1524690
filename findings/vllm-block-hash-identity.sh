#!/usr/bin/env bash
# vLLM 0.33.0 hashes the content of a block with `sha256` unless told otherwise. It hashes the
# pickled content, and pickle writes a repeated object as a reference. So two blocks with equal
# tokens and equal keys (for instance two images with one hash) have different hashes if the keys
# are one string in one process, and two equal strings in another, as after a message between
# processes. `sha256_cbor` hashes values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# The wheel has 340 MB. Its dependencies are not needed for this module.
"$folder/venv/bin/pip" install -q --disable-pip-version-check cbor2==5.7.1
"$folder/venv/bin/pip" download -q --disable-pip-version-check --no-deps -d "$folder" vllm==0.33.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import importlib.metadata
import importlib.util
import pathlib
import sys
import zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("vllm-*.whl")
module_file = zipfile.ZipFile(wheel).extract("vllm/utils/hashing.py", folder)
spec = importlib.util.spec_from_file_location("hashing", module_file)
hashing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hashing)

print(wheel.name, "cbor2", importlib.metadata.version("cbor2"))
image = "sha256 of an image"
received = "".join(list(image))
assert image == received and image is not received
parent, tokens = bytes(32), tuple(range(16))
one_object = (parent, tokens, (image, image))
two_objects = (parent, tokens, (image, received))
assert one_object == two_objects
for name, is_equal in [("sha256", False), ("sha256_cbor", True)]:
    hash_of = hashing.get_hash_fn_by_name(name)
    found = hash_of(one_object) == hash_of(two_objects)
    print(f"{name}: hashes of equal contents are {'equal' if found else 'different'}")
    assert found == is_equal, name
PYTHON
echo "as described"
