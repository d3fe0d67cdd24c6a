"""Writes `manifest.json` of the run directory: what each attempt that started its ranks ran, and how it
ended. Begin at `Manifest`; reading.py reads the file.

The start comes from the plan that all nodes agreed on, the code, and each node's hardware; the end from what
the reference program leaves. Of the environment, values are written for a list of harmless variables, and
only the names of all others, so that no secret is in it.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.private import write_private
from entrypoint.core.threads import run_in_thread
from entrypoint.node.gpu import ImageStack
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.record import hardware, reading, source, tokens
from entrypoint.record.partition import VARIABLE

RECORD = 10.0
"""Seconds for the file system to take it."""
CODE = 30.0
"""Seconds for what the code is, beside everything else."""
NOT_PROMISED = (
    "the image's packages are locked",
    "driver and GPUs were checked against the image",
    "the image has the libraries that NCCL needs for InfiniBand",
)
"""What does not hold in an image that was not made here: it has no description of its stack."""
HARMLESS = (
    *("OMP_*", "MKL_NUM_THREADS", "MKL_CBWR", "OPENBLAS_NUM_THREADS", "ATEN_CPU_CAPABILITY", "KMP_AFFINITY"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "NCCL_*", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_PROVIDER"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_*", "PYTHONHASHSEED", "TZ"),
)
"""Variables whose values are written down: numbers, devices and switches, on which results may depend."""


class Manifest:
    """Of one attempt. Where the file system does not take it in time, or what is there is no manifest, that
    is said, the file stays as it is, and the run goes on."""

    def __init__(
        self, folder: Path, env: Mapping[str, str], say: Callable[[str], None], wished: Collection[str] = ()
    ):
        """`folder`: the run directory. `wished`: names of variables that somebody has set for the ranks."""
        self._folder = folder
        self._path = folder / reading.NAME
        self._env = env
        self._say = say
        self._wished = wished
        self._code: asyncio.Task[Any] | None = None
        """What the code is; it is looked at while the ranks start."""

    async def tell_node(self, plan: LaunchPlan) -> None:
        """Leaves this node's hardware where the first node finds it."""
        with contextlib.suppress(OSError):
            text = json.dumps(hardware.look()) + "\n"
            path = self._folder / f"hardware.{plan.place}.json"
            await run_in_thread(write_private, path, text, seconds=RECORD)

    async def record(
        self, plan: LaunchPlan, stack: ImageStack | None, *, image_id: str, versions: Mapping[str, str]
    ) -> None:
        """Adds this attempt. `stack`: of the image; None outside one."""
        self._code = asyncio.create_task(self._look_at_code(plan))
        entry = _entry(plan, stack, image_id, versions) | {
            "command": tokens.hide_words(plan.command, self._env)
        }
        if entry["image"] and (partition := self._env.get(VARIABLE)):
            entry["image"]["partition_sha256"] = partition

        def add(manifest: dict[str, Any]) -> dict[str, Any]:
            return manifest | {
                "image": entry["image"],
                "command": entry["command"],
                "environment": _environment({**self._env, **plan.env}, self._wished),
                "nodes": [
                    {"name": plan.allocation.nodes[place], "plan": _plan_file(plan, place)}
                    for place in plan.members
                ],
                "attempts": [*manifest["attempts"], entry],
            }

        await self._change(add)

    async def note(self, plan: LaunchPlan, **found: object) -> None:
        """Says of this attempt what is known once its ranks are there: `start`, seconds by the names of
        watch/start.py, and with it code and hardware."""
        if self._code is None:
            return
        code = await self._code
        await self._change(
            lambda manifest: (
                _noted(manifest, found) | {"code": code or manifest["code"], "hardware": self._hardware(plan)}
            )
        )

    async def end(
        self,
        plan: LaunchPlan,
        status: int,
        *,
        alone: bool,
        network: str = "",
        pace: tuple[int, float] | None = None,
    ) -> None:
        """Says how this attempt ended, and what the program left; `alone`: no rank joined a process group;
        `network`: that NCCL has taken by its own log, in its words; empty where nobody has looked;
        `pace`: optimizer steps beyond the first, and their seconds."""
        found: dict[str, object] = {"ended": reading.now(), "status": status}
        if pace:
            found["steps"] = {"timed": pace[0], "seconds": pace[1]}
        if network:
            found["transport"] = f"nccl over {network}"
        if alone:
            found["process_group"] = None
        if self._code is None:
            return
        code = self._code.result() if self._code.done() else None

        def conclude(manifest: dict[str, Any]) -> dict[str, Any]:
            left = self._left(plan.attempt)
            said = found | {name: left[name] for name in ("identity", "checkpoint") if name in left}
            manifest = _noted(manifest, said) | {"code": code or manifest["code"]}
            if not left:  # what earlier attempts left is still that of the numbers
                return manifest
            config = tokens.hide_values(left.get("config"), self._env)
            results = self._json("result.json") if not status else None
            return manifest | {
                "config": config,
                "seeds": {"seed": config["seed"]} if isinstance(config, dict) and "seed" in config else {},
                "results": tokens.hide_values(results, self._env),
            }

        await self._change(conclude)

    def _left(self, attempt: int) -> dict[str, Any]:
        """What the reference program wrote at its start, if it was in this attempt."""
        found = self._json("config.json")
        return found if isinstance(found, dict) and found.get("attempt") == attempt else {}

    async def _look_at_code(self, plan: LaunchPlan) -> dict[str, Any] | None:
        def look() -> dict[str, Any]:
            code, diffs = source.look(plan.command, Path.cwd(), self._env)
            for name in (source.DIFF, source.OUR_DIFF):
                if name in diffs:
                    write_private(self._folder / name, diffs[name])
                else:  # that of an earlier attempt
                    (self._folder / name).unlink(missing_ok=True)
            return code

        try:
            return await run_in_thread(look, seconds=CODE)
        except (OSError, ValueError) as error:
            self._say(f"{self._path} does not tell of the code: {error}")
            return None

    async def _change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        def rewrite() -> None:
            write_private(self._path, json.dumps(change(self._earlier()), indent=2) + "\n")

        try:
            await run_in_thread(rewrite, seconds=RECORD)
        except (OSError, ValueError) as error:
            self._say(f"{self._path} does not tell of this attempt: {error}: going on")

    def _earlier(self) -> dict[str, Any]:
        try:
            return reading.read(self._path)
        except FileNotFoundError:
            return reading.in_todays_shape({"attempts": []})

    def _hardware(self, plan: LaunchPlan) -> list[dict[str, Any]]:
        """Each kind with its nodes; those that have not told, or whose word the file system does not show
        yet, are in none."""
        kinds: dict[str, dict[str, Any]] = {}
        for place in plan.members:
            found = self._json(f"hardware.{place}.json")
            if isinstance(found, dict):
                kind = kinds.setdefault(json.dumps(found), {"nodes": [], **found})
                kind["nodes"].append(plan.allocation.nodes[place])
        return list(kinds.values())

    def _json(self, name: str) -> Any:
        with contextlib.suppress(OSError, ValueError):
            return files.read_json(self._folder / name, reading.MOST)
        return None


def _noted(manifest: dict[str, Any], found: Mapping[str, object]) -> dict[str, Any]:
    if not manifest["attempts"]:
        raise ValueError("it has no attempts")
    *before, last = manifest["attempts"]
    return manifest | {"attempts": [*before, last | found]}


def _environment(env: Mapping[str, str], wished: Collection[str]) -> dict[str, Any]:
    values = {
        name: value
        for name, value in sorted(env.items())
        if any(fnmatchcase(name, pattern) for pattern in HARMLESS) and not _is_secret(name, value, env)
    }
    names = sorted(env.keys() - values.keys())
    passed = [name for name in names if name in wished and not tokens.names_secret(name)]
    return {"values": values, "names": names, "passed": passed}


def _is_secret(name: str, value: str, env: Mapping[str, str]) -> bool:
    return tokens.names_secret(name) or tokens.found_in(value, env) or tokens.hide(value, env) != value


def kept_plan(plan: LaunchPlan, env: Mapping[str, str]) -> dict[str, Any]:
    """The plan as it is written down: without its secrets, as the manifest. What runs keeps them."""
    fields = plan.to_json()
    before = fields["argv"][: len(fields["argv"]) - len(plan.command)]
    fields["argv"] = [*before, *tokens.hide_words(plan.command, env)]
    fields["env"] = tokens.hide_values(fields["env"], env)
    return fields


def _entry(
    plan: LaunchPlan, stack: ImageStack | None, image_id: str, versions: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "attempt": plan.attempt,
        "began": reading.now(),
        "ended": None,
        "status": None,
        "scheduler": plan.allocation.scheduler,
        "job_id": plan.allocation.job_id,
        "nodes": list(plan.nodes),
        "nproc_per_node": plan.nproc_per_node,
        "world_size": plan.world_size,
        "mode": plan.mode,
        "device": plan.device,
        "no_python": plan.no_python,
        "threads": plan.env.get("OMP_NUM_THREADS"),
        "transport": _transport(plan),
        "venv": plan.venv,
        "image": _image(stack, image_id),
        "versions": dict(versions),
    }


def _transport(plan: LaunchPlan) -> str:
    """As far as the plan tells: NCCL takes what it finds, whatever interface it is given for sockets."""
    if plan.device == "cuda":
        return "nccl"
    return " over ".join(filter(None, ["gloo", plan.env.get("GLOO_SOCKET_IFNAME", "")]))


def _plan_file(plan: LaunchPlan, place: int) -> str:
    return f"plan.{place}.json" if plan.local_rank is None else f"plan.{place}.0.json"


def _image(stack: ImageStack | None, image_id: str) -> dict[str, Any] | None:
    if stack:
        return {"id": image_id, "stack": stack.name, "cuda": stack.cuda, "lock_sha256": stack.lock}
    return {"id": image_id, "not_promised": list(NOT_PROMISED)} if image_id else None
