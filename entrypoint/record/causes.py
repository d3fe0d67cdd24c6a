"""In what two runs may differ, in order of weight for their numbers, and which of it explains other numbers.

The rules are those that docs/training.md states, one row each. What no rule names explains nothing. Runs with
the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from entrypoint.core.frozen import dataclass
from entrypoint.record.reading import trained_alone

Manifest = Mapping[str, Any]
WITHOUT_NUMBERS = ("run_dir", "stop_at", "data.workers", "checkpoint.")
"""Beginnings of config keys on which no number depends."""
OF_KEYS = {
    "data.path": "another path may hold other data",
    "evaluate.split": "accuracy on other images is another one",
    "evaluate.every": "",
    "evaluate.batch_size": "",
}
"""Rules of config keys that do not make another training by themselves; empty if they explain no number."""
OF_ACCURACY = ("evaluate.split",)
"""Config keys that explain another accuracy alone."""
OF_PLACES = (
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG*"),
    *("NCCL_IB_*", "UCX_NET_DEVICES", "FI_PROVIDER", "TZ"),
)
"""Variables of the environment that say where a run is, or that another row tells."""
NOT_KEPT = "set, value not kept"
"""Of a variable of which the manifest has only the name."""
ROWS_OF_THEIR_OWN = ("seed", "batch_size", "threads", "device")


@dataclass(frozen=True)
class Row:
    name: str
    value: Callable[[Manifest], object]
    rule: str = ""
    """Why other numbers follow from another value; empty where they do not."""
    on: str = "any"
    """The device on which the rule holds: cpu, cuda or any."""


@dataclass(frozen=True)
class Difference:
    name: str
    values: tuple[object, object]
    rule: str = ""
    """Empty where this explains no other numbers."""

    def explains(self, series: str) -> bool:
        """Whether it explains that the runs part in this one of `traces.SERIES`."""
        return bool(self.rule) and (series == "accuracy" or self.name not in OF_ACCURACY)


def _attempts(manifest: Manifest, *names: str) -> object:
    """What the attempts say, from outside inwards; a list where they do not all say the same."""
    found: dict[str, object] = {}
    for attempt in manifest["attempts"]:
        value = _at(attempt, *names)
        if value is not None:
            found.setdefault(json.dumps(value, sort_keys=True), value)
    values = list(found.values())
    return values[0] if len(values) == 1 else values or None


def _at(manifest: Manifest, *names: str) -> Any:
    value: Any = manifest
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _config(manifest: Manifest) -> object:
    config = manifest["config"] or {}
    return {
        key: value
        for key, value in config.items()
        if key not in ROWS_OF_THEIR_OWN and not key.startswith(WITHOUT_NUMBERS)
    }


def _arguments(manifest: Manifest) -> object:
    """Of a program whose config is not known, its arguments; else nothing, for the config says it."""
    return None if manifest["config"] else list(manifest["command"][1:])


def _threads(manifest: Manifest) -> object:
    return _attempts(manifest, "identity", "threads") or _attempts(manifest, "threads")


def _world_size(manifest: Manifest) -> object:
    """The number of ranks; a text if they did not train together."""
    found = _attempts(manifest, "world_size")
    alone = any(trained_alone(attempt) for attempt in manifest["attempts"])
    return f"{found}, each for itself" if found and alone else found


def _kinds(manifest: Manifest, *names: str) -> object:
    """Of each kind of node that says it, the distinct values in a fixed order."""
    values = [_at(kind, *names) for kind in manifest["hardware"]]
    found = {", ".join(one) or "none" if isinstance(one, list) else one for one in values if one is not None}
    return sorted(found) or None


def switches(manifest: Manifest) -> Mapping[str, str]:
    """The values of its environment that are not those of the place."""
    values: Mapping[str, str] = _at(manifest, "environment", "values") or {}
    return {
        name: value
        for name, value in values.items()
        if not any(fnmatchcase(name, pattern) for pattern in OF_PLACES)
    }


def unrecorded(manifest: Manifest) -> list[str]:
    """The variables that somebody has set for its ranks, and whose values are not kept."""
    return list(_at(manifest, "environment", "passed") or [])


def _environment(manifest: Manifest) -> Mapping[str, str]:
    return {**switches(manifest), **dict.fromkeys(unrecorded(manifest), NOT_KEPT)}


def _parent(manifest: Manifest) -> object:
    """The checkpoint from another run that the first attempt began from: to go on from one's own is no
    difference."""
    first = manifest["attempts"][0] if manifest["attempts"] else {}
    if first.get("attempt", 0) or not manifest["config"]:
        return None
    return _at(first, "checkpoint", "path") or "the start"


ROWS = (
    Row("image", lambda m: _at(m, "image", "id")),
    Row("partition", lambda m: _at(m, "image", "partition_sha256")),
    Row("lock", lambda m: _at(m, "image", "lock_sha256"), "bits are claimed for equal software alone"),
    Row("torch", lambda m: _attempts(m, "versions", "torch"), "another version of torch rounds otherwise"),
    Row("python", lambda m: _attempts(m, "versions", "python"), "bits are claimed for equal software alone"),
    Row("code", lambda m: _at(m, "code", "program", "sha256"), "another program computes something else"),
    Row(
        "commit", lambda m: _at(m, "code", "repository", "commit"), "another program computes something else"
    ),
    Row(
        "changes",
        lambda m: _at(m, "code", "repository", "diff_sha256"),
        "another program computes something else",
    ),
    Row("arguments", _arguments, "another request is another training"),
    Row("config", _config, "another config is another training"),
    Row("seed", lambda m: _at(m, "seeds", "seed"), "everything random is a function of the seed"),
    Row(
        "world size",
        _world_size,
        "another number of ranks rounds otherwise, BatchNorm sees other parts of the batch, and ranks that "
        "never met train each for itself",
    ),
    Row("batch per step", lambda m: _at(m, "config", "batch_size"), "another batch is another step"),
    Row("threads", _threads, "the same bits need the same number of threads", on="cpu"),
    Row("device", lambda m: _attempts(m, "device"), "bit equality is not claimed between kinds of devices"),
    Row("GPUs", lambda m: _kinds(m, "gpus"), "on GPUs bit equality is not claimed", on="cuda"),
    Row(
        "instruction set",
        lambda m: _attempts(m, "identity", "processor"),
        "bits are claimed for equal instruction sets alone",
    ),
    Row("CPU", lambda m: _kinds(m, "cpu", "model"), "another type of CPU rounds otherwise"),
    Row("driver", lambda m: _kinds(m, "driver"), "on GPUs bit equality is not claimed", on="cuda"),
    Row("transport", lambda m: _attempts(m, "transport"), "on GPUs bit equality is not claimed", on="cuda"),
    Row("checkpoint", _parent, "another beginning is another training"),
    Row("environment", _environment),
    Row("scheduler", lambda m: _attempts(m, "scheduler")),
    Row("nodes", lambda m: [node.get("name") for node in m["nodes"]]),
    Row("began", lambda m: _attempts(m, "began")),
)


def sort(one: Manifest, other: Manifest) -> tuple[list[str], list[Difference]]:
    """The names of what is equal and known, and what differs, in order of weight."""
    equal: list[str] = []
    differ: list[Difference] = []
    device = _attempts(one, "device")
    for row in ROWS:
        pair = (row.value(one), row.value(other))
        if pair[0] != pair[1]:
            rule = row.rule if None not in pair and row.on in ("any", device) else ""
            by_key = row.name in ("config", "environment")
            differ += _keys(row, pair, rule) if by_key else [Difference(row.name, pair, rule)]
        elif pair[0] not in (None, {}, []) and not (row.name == "environment" and unrecorded(one)):
            equal.append(row.name)
    return equal, differ


def _keys(row: Row, pair: tuple[Any, Any], rule: str) -> Iterable[Difference]:
    """Key by key; without a config of one of them, as a whole."""
    one, other = pair
    if row.name == "config" and not (one and other):
        yield Difference(row.name, ("known" if one else None, "known" if other else None))
        return
    for key in [*one, *(key for key in other if key not in one)]:
        if one.get(key) != other.get(key):
            yield Difference(key, (one.get(key), other.get(key)), rule and OF_KEYS.get(key, rule))
