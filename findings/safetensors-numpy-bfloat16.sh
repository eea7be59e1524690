#!/usr/bin/env bash
# safetensors 0.8.0 with numpy 2.4.6 and ml_dtypes 0.6.0: safetensors.numpy.save accepts arrays of
# bfloat16 and of float8 types, and safetensors.numpy.load raises KeyError for the bytes of save.
# Arrays of float16 come back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy
import safetensors
from safetensors.numpy import load, save

print("safetensors", safetensors.__version__, "numpy", numpy.__version__, "ml_dtypes", ml_dtypes.__version__)
for kind, code in [(ml_dtypes.bfloat16, "BF16"), (ml_dtypes.float8_e4m3fn, "F8_E4M3"), (numpy.float16, None)]:
    saved = save({"values": numpy.ones((2, 4), dtype=kind)})
    try:
        outcome = load(saved)["values"].dtype.name
    except KeyError as error:
        outcome = f"KeyError {error}"
    print(f"{numpy.dtype(kind).name}: {len(saved)} bytes saved, load gives {outcome}")
    assert outcome == (f"KeyError '{code}'" if code else "float16"), outcome
PYTHON
echo "as described"
