#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: an array of int4 or float4_e2m1fn has one byte for each value,
# in the low four bits. torch packs two values into a byte. numpy.save writes the width only, so
# numpy.load returns a void type (V1, V2) without the name, also for bfloat16.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import io

import ml_dtypes
import numpy

print("numpy", numpy.__version__, "ml_dtypes", ml_dtypes.__version__)
for name, width in [("int4", 1), ("float4_e2m1fn", 1), ("bfloat16", 2)]:
    array = numpy.arange(6).astype(getattr(ml_dtypes, name))
    file = io.BytesIO()
    numpy.save(file, array)
    file.seek(0)
    loaded = numpy.load(file)
    print(f"{name}: 6 values in {array.nbytes} bytes, loaded as {loaded.dtype.str}")
    assert array.nbytes == 6 * width, array.nbytes
    assert loaded.dtype.kind == "V" and loaded.dtype.itemsize == width, loaded.dtype
PYTHON
echo "as described"
