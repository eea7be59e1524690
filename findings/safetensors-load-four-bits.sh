#!/usr/bin/env bash
# safetensors 0.8.0 with torch 2.15.0: `save` and `load_file` know the types of MXFP4 and NVFP4
# caches, `load` of the same bytes raises a KeyError. The header counts four-bit values, so a shape
# in it is twice the shape of the tensor along the last dimension; `load_file` halves it again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# With its dependencies torch takes 5 GB.
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.15.0 numpy==2.4.6 safetensors==0.8.0
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import json
import pathlib
import sys

import safetensors
import safetensors.torch
import torch

path = pathlib.Path(sys.argv[1]) / "tensors"
print("safetensors", safetensors.__version__, "torch", torch.__version__)
for kind, shape_in_header, loads in [
    (torch.float8_e4m3fn, [2, 8], True),
    (torch.float8_e8m0fnu, [2, 8], False),
    (torch.float4_e2m1fn_x2, [2, 16], False),
]:
    tensor = torch.arange(16, dtype=torch.uint8).reshape(2, 8).view(kind)
    saved = safetensors.torch.save({"tensor": tensor})
    header = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])["tensor"]
    path.write_bytes(saved)
    from_file = safetensors.torch.load_file(path)["tensor"]
    assert from_file.dtype == kind and from_file.shape == tensor.shape
    assert torch.equal(from_file.view(torch.uint8), tensor.view(torch.uint8))
    try:
        outcome = str(tuple(safetensors.torch.load(saved)["tensor"].shape))
    except KeyError as error:
        outcome = f"KeyError({error})"
    print(kind, tuple(tensor.shape), "header", header["dtype"], header["shape"], "load", outcome)
    assert header["shape"] == shape_in_header, header
    assert outcome.startswith("KeyError") != loads, outcome
PYTHON
echo "as described"
