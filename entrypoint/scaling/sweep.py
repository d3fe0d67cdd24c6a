"""What is measured, and how far it has come: the sizes and repeats of one program, in one directory. Begin at
`Sweep`; `open_folder` makes or finds its directory.

    DIR/scaling.json        what is measured: what a later call must agree with
    DIR/done/N.R.json       one for each finished run: repeat R on N nodes
    DIR/runs/nN-rR/         its run directory; a run that was broken off begins anew in another
    DIR/jobs/N.R.json       the job that was last submitted for it

Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.core.private import write_private
from entrypoint.record import reading

PLAN = "scaling.json"
MOST_SIZES, MOST_REPEATS, MOST_NODES = 20, 50, 100_000
REFERENCE = ("-m", "train")
PLACE = re.compile(r"\{(?:(\d{1,12})([*/]))?nodes\}")
"""{nodes}, {64*nodes} or {256/nodes} in a word of CMD."""
RUN = re.compile(r"n(\d{1,6})-r(\d{1,6})(?:\.(\d{1,6}))?")
"""The name of a run directory."""
MOST_NAMES = 10_000
"""In the folder of the run directories that are looked at: each has a log beside it."""


class NoSuchSize(Exception):
    """CMD cannot be made for this number of nodes. The text says why."""


@dataclass(frozen=True)
class Sweep:
    """What is to be measured. Secrets of the command are hidden."""

    kind: str
    """strong or weak."""
    nodes: tuple[int, ...]
    repeats: int
    command: tuple[str, ...]
    options: tuple[str, ...]
    """Of each run."""
    cluster: str
    """The site's profile; empty for this machine."""

    def order(self) -> Iterator[tuple[int, int]]:
        """(nodes, repeat from 1): the sizes take turns, so that what changes in time meets all of them."""
        for repeat in range(1, self.repeats + 1):
            for nodes in self.nodes:
                yield nodes, repeat


def sizes(text: str) -> tuple[int, ...]:
    """The numbers in `1,2,4`, in ascending order. Raises BadInput."""
    words = text.split(",")
    are_numbers = all(re.fullmatch("[0-9]{1,6}", word) for word in words)
    found = sorted(set(map(int, words))) if are_numbers else []
    if not found or found[0] < 1 or found[-1] > MOST_NODES:
        raise BadInput("scaling-nodes", f"--nodes {plain(text)}: give numbers of nodes, such as 1,2,4")
    if not 2 <= len(found) <= MOST_SIZES:
        raise BadInput(
            "scaling-sizes-count",
            f"--nodes {plain(text)}: give 2 to {MOST_SIZES} different sizes, such as 1,2,4",
        )
    return tuple(found)


def of_size(command: Sequence[str], nodes: int, *, batch: int) -> list[str]:
    """CMD for so many nodes: {nodes}, {64*nodes} and {256/nodes} in it are replaced. `batch`: of the
    reference program on one node, which grows with the nodes; 0: it stays as it is. Raises NoSuchSize if a
    division leaves a rest."""

    def number(found: re.Match[str]) -> str:
        if not found[1]:
            return str(nodes)
        given = int(found[1])
        if found[2] == "*":
            return str(given * nodes)
        if given % nodes:
            raise NoSuchSize(f"{given} is no multiple of {nodes} nodes")
        return str(given // nodes)

    words = [PLACE.sub(number, word) for word in command]
    if batch:
        words = [word for word in words if not word.startswith("batch_size=")]
        words.append(f"batch_size={batch * nodes}")
    return words


class SweepFolder:
    """The directory of a sweep."""

    def __init__(self, path: Path):
        self.path = path

    def plan(self) -> dict[str, Any]:
        """What is measured here. Raises BadInput where that cannot be read."""
        try:
            found = files.read_json(self.path / PLAN, reading.MOST)
            if not isinstance(found, dict) or found.get("schema_version") != 1:
                raise files.Unfit("it is of no format that this apptrain reads")
            return found
        except (OSError, ValueError) as error:
            raise BadInput(
                "scaling-dir-damaged",
                f"{plain(str(self.path))}/{PLAN} is damaged: {plain(str(error))}: give another directory, or "
                "the run directories in its runs/",
            ) from None

    def new_run(self, nodes: int, repeat: int) -> Path:
        """Makes a run directory. Raises OSError."""
        for at in count():
            path = self.path / "runs" / f"n{nodes}-r{repeat}{f'.{at}' if at else ''}"
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                return path
        raise AssertionError

    def note(self, what: str, nodes: int, repeat: int, found: Mapping[str, Any]) -> None:
        """Writes into `done` or `jobs`."""
        folder = self.path / what
        folder.mkdir(mode=0o700, exist_ok=True)
        write_private(folder / f"{nodes}.{repeat}.json", json.dumps(dict(found), indent=2) + "\n")

    def job(self, nodes: int, repeat: int) -> str:
        """The id of the job that was submitted last; empty if that is not known."""
        try:
            found = files.read_json(self.path / "jobs" / f"{nodes}.{repeat}.json", reading.MOST)
        except (OSError, ValueError):
            return ""
        job = found.get("job") if isinstance(found, dict) else None
        return job if isinstance(job, str) else ""

    def noted(self, what: str) -> dict[tuple[int, int], Path]:
        """The run directories that are noted there, by (nodes, repeat)."""
        found = {}
        for path in sorted((self.path / what).glob("*.json"))[: MOST_SIZES * MOST_REPEATS]:
            place = re.fullmatch(r"(\d{1,6})\.(\d{1,6})\.json", path.name)
            name = _run_of(path) if place else None
            if place and name:
                found[int(place[1]), int(place[2])] = self.path / "runs" / name
        return found

    def not_noted(self) -> list[Path]:
        """The newest run directory of each size and repeat that is noted nowhere: it tells no rate, was
        broken off, or goes on."""
        noted = {*self.noted("done"), *self.noted("jobs")}
        found: dict[tuple[int, int], tuple[int, Path]] = {}
        for path in islice((self.path / "runs").glob("n*-r*"), MOST_NAMES):
            name = RUN.fullmatch(path.name)
            if name and path.is_dir():
                place, at = (int(name[1]), int(name[2])), int(name[3] or 0)
                if place not in noted and at >= found.get(place, (0, path))[0]:
                    found[place] = at, path
        return [found[place][1] for place in sorted(found)]


def _run_of(path: Path) -> str | None:
    try:
        found = files.read_json(path, reading.MOST)
    except (OSError, ValueError):
        return None
    name = found.get("run") if isinstance(found, dict) else None
    return name if isinstance(name, str) and RUN.fullmatch(name) else None


def is_one(path: Path) -> bool:
    """Whether a directory is that of a sweep, and no run directory."""
    return files.is_regular(path / PLAN)


def open_folder(path: Path, sweep: Sweep) -> SweepFolder:
    """Makes the directory, or takes the one in which the same sweep was broken off. Raises BadInput."""
    name, folder = plain(str(path)), SweepFolder(path)
    mine = json.loads(json.dumps({"schema_version": 1, **asdict(sweep)}))
    try:
        if not is_one(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise BadInput(
                    "scaling-dir-not-empty",
                    f"--dir {name} holds something else: give a directory that is new, or one of a scaling",
                )
            path.chmod(0o700)
            (path / "runs").mkdir(mode=0o700)
            write_private(path / PLAN, json.dumps(mine, indent=2) + "\n")
            return folder
        theirs = folder.plan()
    except OSError as error:
        raise BadInput("scaling-dir", f"--dir {name}: {error.strerror}: give another") from None
    if odd := [one for one in mine if mine[one] != theirs.get(one)]:
        raise BadInput(
            "scaling-dir-other",
            f"--dir {name} measures something else: {odd[0]} is {_short(theirs.get(odd[0]))} there and "
            f"{_short(mine[odd[0]])} here: give another",
        )
    return folder


def _short(value: object) -> str:
    return str(plain(json.dumps(value)))[:200]
