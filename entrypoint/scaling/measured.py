"""Reads what runs have measured: how fast each was, on how many nodes, and what its steps went to. Begin at
`read`; `together` makes the sizes of runs that belong together.

Of the reference program it takes samples per second and the parts of a step, of any other the optimizer steps
that its ranks have counted. Nothing here is believed: files are regular ones of bounded size. Runs with the
Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import DONE, SAVED, BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted, plain
from entrypoint.job.outcome import ALONE
from entrypoint.plan.mistakes import program
from entrypoint.record import reading, tokens, traces
from entrypoint.report.facts import number, text, texts, within
from entrypoint.scaling.finding import Parts, Size

FEWEST = 5
"""Timed steps of a run, without the first one."""
NEAR = 1.05
"""Batch sizes of strong scaling differ by no more: a shipped config makes them multiples of the ranks."""
SECONDS = 60.0
"""For the metrics of a run."""
ENDED_EARLY = (SAVED, 130, 143)
"""Statuses of a run that somebody has ended, or that goes on later: what it did until then counts."""
LARGEST = 1e12
"""Of a rate, a batch and a count: what is larger, or not above 0, is none."""
STRAGGLES = 1.1
"""A rank is the slowest if its own work takes that many times the median of all."""
TIMES = ("train_s", "input_wait_s", "sync_wait_s")
"""Of a rank in result.json."""
SAMPLES, STEPS = "samples/s", "steps/s"


class NotMeasured(Exception):
    """This run tells no rate. The text says why."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    path: Path
    nodes: int
    ranks: int
    program: str
    command: tuple[str, ...]
    rate: float
    unit: str
    timed: int
    """Steps that the rate is made of."""
    batch: int
    """Samples of a step, of all ranks; 0: not known."""
    parts: Parts | None
    device: str
    threads: int
    """Of a rank; 0: not known."""
    epoch: int
    """Samples of an epoch; 0: not known."""
    cores: int
    """Of the one machine that all nodes are, if its ranks take them all; else 0."""
    alike: Mapping[str, str]
    """What should not differ between sizes, by its name."""

    @property
    def name(self) -> str:
        return str(plain(str(self.path)))


def read(path: Path, env: Mapping[str, str]) -> Measured:
    """The figures of a run directory. `env`: values of its secrets are hidden. Raises BadInput if it is none,
    NotMeasured if it tells no rate."""
    manifest = reading.of_run(path, "measured")
    if not manifest["attempts"] or not manifest["command"]:
        raise NotMeasured("no attempt has started its ranks")
    last = manifest["attempts"][-1]
    worlds = {len(texts(one.get("nodes"))) for one in manifest["attempts"]}
    if len(worlds) > 1:
        raise NotMeasured(f"its attempts ran on {' and '.join(map(str, sorted(worlds)))} nodes")
    status = last.get("status")
    if status is None:
        raise NotMeasured("it has not ended")
    if status not in (DONE, *ENDED_EARLY):
        raise NotMeasured(f"it failed with status {status}")
    nodes = len(texts(last.get("nodes")))
    ranks = int(number(last, "world_size") or nodes * (number(last, "nproc_per_node") or 1))
    if not 0 < nodes <= ranks < LARGEST:
        raise NotMeasured("its manifest does not say on how many nodes it ran")
    if reading.trained_alone(last):
        raise NotMeasured(ALONE.format(ranks))
    config = manifest["config"] or {}
    result = reading.of_last_attempt(manifest, _json(path, "result.json"))
    rate, unit, timed = _rate(path, manifest, config)
    command = tuple(map(str, tokens.hide_words(manifest["command"], env)))
    told = text(last, "threads")
    threads = int(told) if told.isdecimal() and len(told) < 6 else 0
    batch = int(_positive(config, "batch_size") or 0)
    return Measured(
        path=path,
        nodes=nodes,
        ranks=ranks,
        program=str(plain(program(command))),
        command=command,
        rate=rate,
        unit=unit,
        timed=timed,
        batch=batch,
        parts=_parts(result),
        device=text(last, "device"),
        threads=threads,
        epoch=int(_positive(result, "train_samples") or 0),
        cores=_crowded(manifest, last, ranks * max(1, threads)),
        alike=_alike(manifest, last, config),
    )


def _json(path: Path, name: str) -> dict[str, Any]:
    """An object of the run directory; empty if there is none."""
    try:
        found = files.read_json(within(path, name), reading.MOST)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _positive(found: object, name: str) -> float | None:
    value = number(found, name)
    return value if value is not None and 0 < value < LARGEST else None


def _rate(path: Path, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, str, int]:
    """(work per second, its unit, the steps that it is made of), without the first step of each attempt,
    which warms up."""
    last = manifest["attempts"][-1]
    if config:
        batch = _positive(config, "batch_size")
        begun_behind = [number(one.get("checkpoint"), "step") for one in manifest["attempts"]]
        times = _step_times(path, batch, {int(step) + 1 for step in begun_behind if step}) if batch else []
        if batch and len(times) >= FEWEST:
            return batch * len(times) / math.fsum(times), SAMPLES, len(times)
        raise NotMeasured(f"it has {counted(len(times), 'timed step')}, and {FEWEST} are needed")
    made, seconds = number(last.get("steps"), "timed"), _positive(last.get("steps"), "seconds")
    if made is None or seconds is None:
        raise NotMeasured(
            "its ranks have told no optimizer steps (an older apptrain, or no optimizer of torch)"
        )
    if not FEWEST <= made < LARGEST:
        raise NotMeasured(f"it has {counted(int(made), 'timed step')}, and {FEWEST} are needed")
    return made / seconds, STEPS, int(made)


def _step_times(path: Path, batch: float, left_out: Collection[int]) -> list[float]:
    """Seconds of each step but the first and these."""
    trace = traces.empty(["images_per_s"])
    try:
        traces.fill(trace, within(path, traces.NAME), SECONDS)
    except (OSError, ValueError) as error:
        raise NotMeasured(f"{traces.NAME}: {plain(str(error))}") from None
    told = trace["images_per_s"]
    rates = [told.floats[at] for at in range(1, len(told)) if told.steps[at] not in left_out]
    return [batch / rate for rate in rates if math.isfinite(rate) and 0 < rate < LARGEST]


@dataclass(frozen=True)
class _RankTimes:
    """Seconds of a rank beyond its first step."""

    who: str
    train: float
    data: float
    sync: float

    @property
    def own(self) -> float:
        return max(0.0, self.train - self.data - self.sync)


def _parts(result: Mapping[str, Any]) -> Parts | None:
    """What the ranks' time went to, as the reference program tells it; None if that is not known."""
    rows = result.get("ranks")
    ranks = [_rank_times(one) for one in rows if isinstance(one, dict)] if isinstance(rows, list) else []
    known = [one for one in ranks if one is not None]
    if not known or len(known) < len(ranks):
        return None
    waits = [one.sync / one.train for one in known]
    communication = min(1.0, min(waits))
    slow = max(known, key=_own)
    straggles = len(known) > 1 and slow.own > STRAGGLES * statistics.median(map(_own, known))
    return Parts(
        communication=communication,
        data=min(1.0, statistics.fmean(one.data / one.train for one in known)),
        imbalance=min(1.0, statistics.fmean(waits) - communication),
        slowest=slow.who if straggles else "",
    )


def _own(rank: _RankTimes) -> float:
    return rank.own


def _rank_times(rank: Mapping[str, Any]) -> _RankTimes | None:
    train, data, sync = (_without_first(rank, name) for name in TIMES)
    if train is None or train <= 0 or data is None or sync is None:
        return None
    return _RankTimes(f"rank {text(rank, 'rank')} on {text(rank, 'node')}", train, data, sync)


def _without_first(rank: Mapping[str, Any], name: str) -> float | None:
    """Seconds of a rank beyond its first step."""
    value, first = number(rank, name), number(rank.get("first_step"), name)
    return max(0.0, value - first) if value is not None and first is not None else None


def _crowded(manifest: Mapping[str, Any], last: Mapping[str, Any], threads: int) -> int:
    """The cores of this one machine, if these threads of all ranks take them all; else 0."""
    if text(last, "scheduler") != "embedded" or text(last, "device") != "cpu":
        return 0
    usable = [_positive(one.get("cpu"), "usable") for one in manifest["hardware"]]
    cores = int(min((one for one in usable if one), default=0))
    return cores if threads >= cores else 0


def _alike(manifest: Mapping[str, Any], last: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    versions, code = last.get("versions") or {}, manifest["code"] or {}
    kinds = {
        text(one.get("cpu"), "model") + "".join(f", {gpu}" for gpu in dict.fromkeys(texts(one.get("gpus"))))
        for one in manifest["hardware"]
    }
    found = {
        "program": text(code.get("program"), "sha256")[:12],
        "image": text(manifest["image"], "id"),
        "torch": text(versions, "torch"),
        "device": text(last, "device"),
        "ranks a node": text(last, "nproc_per_node"),
        "threads a rank": text(last, "threads"),
        "transport": text(last, "transport"),
        "hardware": " and ".join(sorted(filter(None, kinds))),
        **{name: text(config, name) for name in ("model.name", "precision", "data.name", "data.image_size")},
    }
    return {name: str(plain(value)) for name, value in found.items() if value}


# --- together -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeRuns:
    """Runs of one number of nodes."""

    runs: tuple[Measured, ...]
    size: Size

    @property
    def first(self) -> Measured:
        return self.runs[0]


def is_strong(runs: Sequence[Measured], asked: str) -> bool:
    """Whether a step has the same work on each size (strong), or each rank has (weak). `asked`: strong,
    weak, or empty. Raises BadInput if these runs are of another kind, or of none."""
    first = runs[0]
    if any(run.program != first.program for run in runs):
        other = next(run for run in runs if run.program != first.program)
        raise BadInput(
            "scaling-other-program",
            f"{first.name} ran {first.program} and {other.name} ran {other.program}: "
            "give runs of one program",
        )
    if not first.batch:
        if not asked and any(run.command != first.command for run in runs):
            raise BadInput(
                "scaling-commands-differ",
                f"the commands of these runs of {first.program} differ: say what that means with --strong (a "
                "step has the same work on all sizes) or --weak (each rank has)",
            )
        return asked == "strong"
    shares = {run.batch * first.ranks == first.batch * run.ranks for run in runs if run.ranks != first.ranks}
    batches = [run.batch for run in runs]
    kind = "strong" if max(batches) <= NEAR * min(batches) else "weak" if shares == {True} else ""
    if not kind or (asked and asked != kind and shares):
        sizes = ", ".join(f"{run.batch} on {counted(run.ranks, 'rank')}" for run in runs[:8])
        which = f"those of {kind} scaling" if kind else "neither equal nor in proportion to the ranks"
        raise BadInput(
            "scaling-batches",
            f"the batch sizes ({sizes}) are {which}: --strong needs the same batch on all sizes, "
            "--weak the same batch a rank",
        )
    return kind == "strong"


def together(runs: Sequence[Measured], *, strong: bool) -> list[SizeRuns]:
    """The runs by their number of nodes, in ascending order, which is that of their ranks too. Raises
    BadInput if they have no such order."""
    groups: list[SizeRuns] = []
    for nodes in sorted({run.nodes for run in runs}):
        same = tuple(run for run in runs if run.nodes == nodes)
        if len({run.ranks for run in same}) > 1:
            ranks = " and ".join(str(one) for one in sorted({run.ranks for run in same}))
            raise BadInput(
                "scaling-ranks-differ",
                f"runs on {counted(nodes, 'node')} have {ranks} ranks: give runs with as many ranks a node",
            )
        if groups and same[0].ranks <= groups[-1].size.ranks:
            before = groups[-1].size
            raise BadInput(
                "scaling-ranks-no-more",
                f"runs on {counted(nodes, 'node')} have {counted(same[0].ranks, 'rank')}, and those on "
                f"{before.nodes} have {before.ranks}: give sizes whose ranks grow with their nodes",
            )
        work = same[0].ranks if same[0].unit == STEPS and not strong else 1
        size = Size(nodes, same[0].ranks, tuple(run.rate * work for run in same), _mean(same), same[0].cores)
        groups.append(SizeRuns(same, size))
    return groups


def _mean(runs: Sequence[Measured]) -> Parts | None:
    """The medians of each part; None if a run does not tell them."""
    known = [run.parts for run in runs if run.parts is not None]
    if len(known) < len(runs):
        return None
    named = [one.slowest for one in known]
    return Parts(
        communication=statistics.median(one.communication for one in known),
        data=statistics.median(one.data for one in known),
        imbalance=statistics.median(one.imbalance for one in known),
        slowest=named[0] if len(set(named)) == 1 else "",
    )


def differing(runs: Sequence[Measured]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """(what all runs have in common, what differs between them though it should not), by names."""
    names = dict.fromkeys(name for run in runs for name in run.alike)
    same, other = {}, {}
    for name in names:
        values = list(dict.fromkeys(run.alike.get(name, "unknown") for run in runs))
        if len(values) == 1:
            same[name] = values[0]
        else:
            other[name] = values
    return same, other
