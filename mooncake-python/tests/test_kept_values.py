"""Values of structured objects: they come back equal in value and in type, or are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_columns import identical, objects
from test_structured import Fake

from mooncake.structured_object_store import FieldSchema, MooncakeBundleTransfer


def transfer() -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(Fake(), "kept", default_chunk_bytes=20)


# Rows of a column whose schema names a type.


@pytest.mark.parametrize("form", ["dataproto", "dict"])
@pytest.mark.parametrize(
    "rows",
    [
        objects([[1, 2], [3, 4], [5, 6]]),
        np.arange(6).reshape(3, 2),
        objects([np.arange(2), np.arange(2, 4), np.arange(4, 6)]),
        np.arange(24).reshape(3, 2, 4),
        np.zeros((3, 0), np.int64),
        objects([7, 8, 9]),
    ],
    ids=["lists", "array", "arrays", "cubes", "no elements", "numbers"],
)
def test_rows_with_dimensions_are_read(form, rows):
    schemas = {"field": FieldSchema("ndarray", metadata={"dtype": "int64", "section": "non_tensor_batch"})}
    given = {"field": rows} if form == "dict" else {"non_tensor_batch": {"field": rows}}
    store = transfer()
    ref = store.put(given, type=form, field_schemas=schemas)
    for picked in (None, [1], [2, 0, 2], slice(1, 3), []):
        got = store.get(ref, type=form, rows=picked)
        got = got["field"] if form == "dict" else got["non_tensor_batch"]["field"]
        expected = rows if picked is None else rows[picked]
        assert [np.asarray(one).tolist() for one in got] == [np.asarray(one).tolist() for one in expected]


@pytest.mark.parametrize("rows", [np.array([0.5, 300.0]), objects([0.5, 300.0]), [0.5, 300.0], np.array([[0.5]])])
def test_a_flat_dictionary_is_never_truncated(rows):
    schemas = {"field": FieldSchema("ndarray", metadata={"dtype": "int16", "section": "non_tensor_batch"})}
    with pytest.raises(ValueError, match="field"):
        transfer().put({"field": rows}, type="dict", field_schemas=schemas)


@pytest.mark.parametrize("shape", [[], [2, -1], [2, 1.0], "22", None, [2, 1 << 62], [2, 3]])
def test_an_invalid_shape_of_rows(shape):
    store = transfer()
    schemas = {"field": FieldSchema("ndarray", metadata={"dtype": "int64"})}
    ref = store.put({"non_tensor_batch": {"field": np.arange(4).reshape(2, 2)}}, field_schemas=schemas)
    ref.encoded_non_tensor["field"]["metadata"]["shape"] = shape
    with pytest.raises(ValueError):
        store.get(ref, rows=[1])
