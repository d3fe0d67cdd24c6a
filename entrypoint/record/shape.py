"""What a manifest may hold, field by field. `check` is the entry.

Every field may be missing, as an older version may not have written it, and what is not named here may be
anything. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from entrypoint.core.plain import plain

Check = Callable[[Any, str], None]
"""Takes a value and the name of its field. Raises ValueError if the value does not fit."""
LARGEST = 2**53
"""Of whole numbers, so that each is a float too."""


def check(manifest: Any) -> None:
    """Raises ValueError, which names the field, if a manifest does not have this shape."""
    MANIFEST(manifest, "")


def shown(value: object) -> str:
    """A value as an error names it."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f'"{plain(value)[:40]}"'
    return json.dumps(value)[:40]


def _wrong(value: object, field: str, wanted: str) -> ValueError:
    return ValueError(f"{field or 'it'} is {shown(value)}, not {wanted}")


def anything(value: Any, field: str) -> None:
    """No check."""


def text(value: Any, field: str) -> None:
    if not isinstance(value, str):
        raise _wrong(value, field, "a text")


def whole(value: Any, field: str) -> None:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise _wrong(value, field, f"a whole number from 0 to {LARGEST}")


def scalar(value: Any, field: str) -> None:
    if isinstance(value, (dict, list)):
        raise _wrong(value, field, "a text or a number")


def or_null(kind: Check) -> Check:
    def checked(value: Any, field: str) -> None:
        if value is not None:
            kind(value, field)

    return checked


def list_of(kind: Check) -> Check:
    def checked(value: Any, field: str) -> None:
        if not isinstance(value, list):
            raise _wrong(value, field, "a list")
        for at, item in enumerate(value):
            kind(item, f"{field}[{at}]")

    return checked


def object_of(kind: Check) -> Check:
    """Of any names, all with values of one kind."""

    def checked(value: Any, field: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, field, "an object")
        for name, item in value.items():
            kind(item, f"{field}.{plain(name)[:40]}")

    return checked


def fields(kinds: Mapping[str, Check]) -> Check:
    """An object with these names, and others."""

    def checked(value: Any, field: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, field, "an object")
        for name, kind in kinds.items():
            if name in value:
                kind(value[name], f"{field}.{name}" if field else name)

    return checked


IMAGE = or_null(fields({"id": text, "partition_sha256": or_null(text), "lock_sha256": or_null(text)}))
REPOSITORY = or_null(
    fields(
        {
            "commit": or_null(text),
            "state": text,
            "remote": or_null(text),
            "changed": whole,
            "untracked": whole,
            "diff_sha256": or_null(text),
            "diff": or_null(text),
        }
    )
)
ATTEMPT = fields(
    {
        "attempt": whole,
        "scheduler": text,
        "job_id": text,
        "nodes": list_of(text),
        "nproc_per_node": whole,
        "world_size": or_null(whole),
        "mode": text,
        "device": text,
        "began": text,
        "ended": or_null(text),
        "status": or_null(whole),
        "start": object_of(scalar),
        "queued_s": or_null(scalar),
        "command": list_of(text),
        "image": IMAGE,
        "checkpoint": or_null(fields({"path": text})),
        "identity": or_null(object_of(scalar)),
        "transport": or_null(text),
        "threads": or_null(text),
        "venv": or_null(text),
        "versions": or_null(object_of(scalar)),
        "steps": or_null(fields({"timed": whole, "seconds": scalar})),
    }
)
MANIFEST = fields(
    {
        "schema_version": whole,
        "image": IMAGE,
        "code": or_null(
            fields(
                {
                    "program": or_null(fields({"name": text, "sha256": or_null(text)})),
                    "repository": REPOSITORY,
                    "apptrain": or_null(fields({"version": text, "repository": REPOSITORY})),
                }
            )
        ),
        "command": list_of(text),
        "config": or_null(object_of(anything)),
        "nodes": list_of(fields({"name": text, "plan": or_null(text)})),
        "environment": fields({"values": object_of(text), "names": list_of(text), "passed": list_of(text)}),
        "hardware": list_of(
            fields(
                {
                    "nodes": list_of(text),
                    "cpu": fields({"model": text, "flags": list_of(text)}),
                    "gpus": list_of(text),
                    "driver": or_null(text),
                }
            )
        ),
        "seeds": object_of(scalar),
        "attempts": list_of(ATTEMPT),
        "results": anything,
    }
)
