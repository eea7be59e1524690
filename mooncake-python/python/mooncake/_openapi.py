"""OpenAPI document of the REST server."""

from __future__ import annotations

from typing import Any


def _body(required: list[str], **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": required,
        "properties": {name: {"type": kind} for name, kind in properties.items()},
    }
    return {"required": True, "content": {"application/json": {"schema": schema}}}


_IDS = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_SEGMENTS = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["segment_ids"],
                "properties": {"segment_ids": _IDS, "grace_period_seconds": {"type": "integer"}},
            }
        }
    },
}
_KEY = [{"name": "key", "in": "path", "required": True, "schema": {"type": "string"}}]


def _does(summary: str, *errors: int, **more: Any) -> dict[str, Any]:
    if "requestBody" in more:
        errors = (*errors, 413, 415)
    responses: dict[str, Any] = {"200": {"description": "done"}}
    responses.update({str(status): {"description": '`{"error": ..}`'} for status in errors})
    return {"summary": summary, "responses": responses, **more}


DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Mooncake store", "version": "1"},
    "paths": {
        "/api/put": {
            "put": _does("Stores a text value", 400, 500, requestBody=_body(["key", "value"], key="string", value="string"))
        },
        "/api/get/{key}": {"get": _does("Returns the value of a key", 404, 500, parameters=_KEY)},
        "/api/exist/{key}": {"get": _does("Returns whether a key exists", 500, parameters=_KEY)},
        "/api/remove/{key}": {"delete": _does("Removes a key", 500, parameters=_KEY)},
        "/api/remove_all": {"delete": _does("Removes every key that has no lease", 500)},
        "/api/mount": {
            "post": _does(
                "Mounts a segment in new memory",
                400,
                500,
                requestBody=_body(["size"], size="integer", protocol="string", location="string"),
            )
        },
        "/api/unmount": {"post": _does("Unmounts segments", 400, 500, requestBody=_SEGMENTS)},
        "/api/mount_shm": {
            "post": _does(
                "Mounts a segment in shared memory",
                400,
                500,
                requestBody=_body(
                    ["name", "size"],
                    name="string",
                    size="integer",
                    offset="integer",
                    protocol="string",
                    location="string",
                ),
            )
        },
        "/api/unmount_shm": {"post": _does("Unmounts segments in shared memory", 400, 500, requestBody=_SEGMENTS)},
        "/api/unmount_local_disk": {
            "post": _does("Unmounts the disk segment", 400, 500, requestBody=_body([], grace_period_seconds="integer"))
        },
        "/api/reconfigure": {
            "post": _does(
                "Mounts or unmounts segments",
                400,
                403,
                500,
                requestBody=_body(["mode"], mode="string", path="string", size="integer", offset="integer"),
            )
        },
        "/health": {"get": _does("Returns whether the master responds", 503)},
        "/openapi.json": {"get": _does("Returns this document")},
        "/metrics": {"get": _does("Returns connection metrics in Prometheus text format")},
    },
}
