"""Reads a run directory for its report: whatever is left of it, without its secrets. Begin at `read`.

Nothing here is believed: each file is a regular one of bounded size and no link, and each value may be of
any kind. What cannot be read is named in `RunFacts.missing`. Runs with the Python of a login node, from 3.9
on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from entrypoint.core import files
from entrypoint.core.errors import DONE, SAVED
from entrypoint.core.files import Unfit
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import file_part, plain
from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from entrypoint.record import reading, tokens, traces
from entrypoint.record.traces import Trace

RATES = {"images_per_s": "images/s", "samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
"""What a line of the metrics may say of the speed of its step, over all ranks, and the unit."""
SERIES = (*traces.SERIES, *RATES)
MOST_FILES = 20_000
"""Names of a folder that are looked at."""
MOST_OUTCOMES = 4_000
MOST_LOG = 1 << 20
"""Bytes of a log's beginning and of its end."""
MOST_LINES = 150
"""Lines of what the launcher said, at its beginning and at its end."""
LONGEST_PART = 1e7
"""Seconds of a part of a start; what is longer is none."""
LATE = 60.0
"""Seconds within which a manifest is written after the last moment that it tells; a later one is a copy."""
TAIL = 40
"""Last lines of the log of a rank that failed."""
LONGEST = 400
"""Characters of a line of a log."""
SAID = re.compile(r"(?:apptrain|entrypoint|train): ")
SAVE = re.compile(r"step-(\d{8,18})")
OUTCOME = re.compile(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?")


@dataclass
class AttemptFacts:
    """One attempt, by the manifest and by what its tasks left."""

    number: int
    known: Mapping[str, Any] = field(default_factory=dict)
    """As the manifest has it; empty if its ranks never started."""
    tasks: list[tuple[str, Outcome]] = field(default_factory=list)
    """Each task's node and outcome."""
    has_logs: bool = False
    """Whether a rank of it has a log."""
    last_sign: float | None = None
    """When its files were last written, in Unix seconds; of the last attempt if no end of it is known. None
    of a copy."""

    @property
    def outcome(self) -> Outcome | None:
        """The job's, by the tasks whose outcome is there."""
        return outcome.of_job(self.tasks) if self.tasks else None

    @property
    def has_started(self) -> bool:
        """Whether its ranks did, also if the manifest is lost."""
        return bool(self.known) or self.has_logs or any(one.rank is not None for _, one in self.tasks)

    @property
    def status(self) -> int | None:
        status = self.known.get("status")
        found = self.outcome
        return status if status is not None else found.status if found else None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the start, by the names of its parts."""
        found = {name: number(self.known.get("start"), name) for name in self.known.get("start") or {}}
        return {
            str(plain(name)): value
            for name, value in found.items()
            if value is not None and 0 <= value < LONGEST_PART
        }

    @property
    def recorded(self) -> float | None:
        """When the nodes had met and torch was there, in Unix seconds."""
        return moment(self.known.get("began"))

    @property
    def began(self) -> float | None:
        """When it began: the parts of the start before that."""
        if self.recorded is None:
            return None
        return self.recorded - sum(value for name, value in self.parts.items() if name != "ranks")

    @property
    def started(self) -> float | None:
        """When its ranks had started, in Unix seconds."""
        return None if self.recorded is None else self.recorded + self.parts.get("ranks", 0.0)

    @property
    def queued(self) -> float:
        """Seconds that its job waited before; 0 where that is unknown."""
        found = number(self.known, "queued_s") or 0.0
        return found if 0 <= found < LONGEST_PART else 0.0

    @property
    def ended(self) -> float | None:
        """When it ended, by the manifest, else by the last task."""
        times = [one.time for _, one in self.tasks if math.isfinite(one.time) and one.time > 0]
        return moment(self.known.get("ended")) or max(times, default=None)

    @property
    def seconds(self) -> float | None:
        """That it has taken, without the queue; None if begin or end is not known."""
        if self.began is None or self.ended is None or self.ended < self.began:
            return None
        return self.ended - self.began


@dataclass
class RunFacts:
    path: Path
    manifest: dict[str, Any] = field(default_factory=lambda: reading.in_todays_shape({"attempts": []}))
    plan: dict[str, Any] = field(default_factory=dict)
    """Of the first node; empty if there is none."""
    result: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    attempts: list[AttemptFacts] = field(default_factory=list)
    trace: Trace = field(default_factory=lambda: traces.empty(SERIES))
    saves: list[tuple[int, float]] = field(default_factory=list)
    """Step and Unix seconds of each checkpoint that is still there; empty of a copy."""
    said: list[str] = field(default_factory=list)
    """Lines of the launcher and of the reference program."""
    doctor: list[str] = field(default_factory=list)
    tail: tuple[str, list[str]] = ("", [])
    """The log of the rank that failed first, and its last lines."""
    stacks: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(plain(self.path.resolve().name or str(self.path)))

    @property
    def command(self) -> list[str]:
        """As it was given; of a run that failed before its ranks started, the end of the plan's argv."""
        return self.manifest["command"] or texts(self.plan.get("argv"))

    @property
    def node_names(self) -> list[str]:
        named = [str(node.get("name", "")) for node in self.manifest["nodes"]]
        return named or texts(self.plan.get("nodes"))

    @property
    def is_reference(self) -> bool:
        """Whether the reference program ran."""
        return bool(self.config)


def read(path: Path, env: Mapping[str, str], seconds: float = math.inf) -> RunFacts:
    """The facts of a run directory. `env`: values of its secrets are hidden; `seconds`: for the metrics.
    Raises BadInput if there is no such directory."""
    reading.check_folder(path)
    return _Reader(path, known_secrets(path, env)).read(seconds)


def known_secrets(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The environment, and the key of the run's own join."""
    found = dict(env)
    with contextlib.suppress(OSError, ValueError):
        found["JOIN_KEY"] = files.read_text(within(path, "join.key"), 4096).strip()
    return found


def within(run: Path, name: str) -> Path:
    """The path of a file of a run directory. Raises Unfit if a part of it is a link: it could be any file of
    whoever makes the report."""
    at = run
    for part in Path(name).parts:
        at = at / part
        if at.is_symlink():
            raise Unfit("it is a link")
    return at


def ends_of(file: BinaryIO, most: int) -> str:
    """The first and the last bytes of a file, `most` of each, as text, with a line between them if some are
    left out."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size <= 2 * most:
        return file.read(2 * most).decode("utf-8", "replace")
    head = file.read(most).rpartition(b"\n")[0]
    file.seek(size - most)
    tail = file.read(most).partition(b"\n")[2]
    left_out = f"\n... {size - len(head) - len(tail)} bytes are left out ...\n"
    return head.decode("utf-8", "replace") + left_out + tail.decode("utf-8", "replace")


def listed(folder: Path) -> list[str]:
    """The names in a folder, in order, as far as MOST_FILES; none if it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return sorted(entry.name for entry in islice(found, MOST_FILES))
    return []


def lines(text: str) -> Iterator[str]:
    """Printable lines of a log. A progress bar draws over its line: what it drew last counts."""
    for line in text.split("\n"):
        last = line.rstrip("\r").rpartition("\r")[2][: 4 * LONGEST].expandtabs(4).rstrip()
        shown = "".join(letter if letter.isprintable() else "?" for letter in last)
        yield shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


def number(found: object, name: str) -> float | None:
    """A finite number of an object; None for anything else."""
    value = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(float(value)) else None
    return None


def text(found: object, name: str) -> str:
    """A text, or a number as one, of an object; empty for anything else."""
    value = found.get(name) if isinstance(found, Mapping) else None
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


def texts(found: object) -> list[str]:
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def moment(value: object) -> float | None:
    """A time of the manifest in Unix seconds; None if it is none."""
    if not isinstance(value, str):
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.fromisoformat(value).timestamp()
    return None


class _Reader:
    def __init__(self, path: Path, env: Mapping[str, str]):
        self._path, self._env = path, env
        self._found = RunFacts(path)

    def read(self, seconds: float) -> RunFacts:
        found = self._found
        has_manifest = self._read_manifest()
        found.plan = self._json("plan.0.json", "plan.0.0.json")
        config = self._json("config.json", optional=True)
        found.config = _mapping(config.get("config")) or _mapping(found.manifest["config"])
        found.result = self._json("result.json", optional=True) or _mapping(found.manifest["results"])
        self._read_outcomes()
        if not has_manifest:
            has_started = any(one.has_started for one in found.attempts)
            why = "" if has_started else ": no attempt has started its ranks"
            found.missing.insert(0, f"{reading.NAME}: not there{why}")
        found.result = reading.of_last_attempt(found.manifest, found.result)
        if found.is_reference and found.attempts and found.attempts[-1].status == 0 and not found.result:
            found.missing.append("result.json: not there, though the run is done")
        self._read_metrics(seconds)
        self._read_saves()
        self._read_log()
        found.stacks = [f"stacks/{name}" for name in self._in_folders("stacks")][:200]
        self._read_tail()
        if found.attempts and found.attempts[-1].ended is None and not self._is_copy():
            found.attempts[-1].last_sign = self._last_written(found.attempts[-1].number)
        return found

    def _miss(self, name: str, error: Exception) -> None:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self._found.missing.append(f"{name}: {plain(why)}")

    def _hide(self, text: str) -> str:
        """Of a whole log, before its lines are cut: a private key has several, half a token has no shape."""
        return tokens.hide(text, self._env)

    def _json(self, *names: str, optional: bool = False) -> dict[str, Any]:
        """The object in the first of these files that is there."""
        for name in names:
            try:
                value = files.read_json(within(self._path, name), reading.MOST)
                if not isinstance(value, dict):
                    raise Unfit("it is no object")
                return _mapping(tokens.hide_values(value, self._env))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                self._miss(name, error)
                return {}
        if not optional:
            self._found.missing.append(f"{names[0]}: not there")
        return {}

    def _read_manifest(self) -> bool:
        """Whether it is there."""
        try:
            path = within(self._path, reading.NAME)
            hidden = tokens.hide_values(files.read_json(path, reading.MOST), self._env)
            manifest = reading.in_todays_shape(hidden)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            self._miss(reading.NAME, error)
            return True
        manifest["command"] = tokens.hide_words(manifest["command"], self._env)
        self._found.manifest = manifest
        return True

    def _read_outcomes(self) -> None:
        found: dict[int, AttemptFacts] = {}
        for one in self._found.manifest["attempts"]:
            if type(one.get("attempt")) is int:
                found[one["attempt"]] = AttemptFacts(one["attempt"], one)
        damaged = 0
        places = [match for name in listed(self._path / "outcome") if (match := OUTCOME.fullmatch(name))]
        places.sort(key=lambda match: (-int(match[1]), int(match[2])))
        for match in places[:MOST_OUTCOMES]:
            one = self._outcome(f"outcome/{match[0]}")
            if one is None:
                damaged += 1
                continue
            attempt, place = int(match[1]), int(match[2])
            facts = found.setdefault(attempt, AttemptFacts(attempt))
            facts.tasks.append((self._node(facts, place), one))
        if damaged:
            self._found.missing.append(f"outcome: {damaged} of {len(places)} files cannot be read")
        self._found.attempts = [found[at] for at in sorted(found)]
        for facts in self._found.attempts:
            facts.has_logs = any(".rank" in name for name in listed(self._path / f"logs/{facts.number}"))

    def _outcome(self, name: str) -> Outcome | None:
        with contextlib.suppress(Unfit):
            found = outcome.read(within(self._path, name))
            return found and Outcome(**{**vars(found), "error": self._hide(found.error)})
        return None

    def _node(self, attempt: AttemptFacts, place: int) -> str:
        names = texts(attempt.known.get("nodes")) or texts(self._found.plan.get("nodes"))
        return names[place] if place < len(names) else f"node {place}"

    def _read_metrics(self, seconds: float) -> None:
        found = self._found
        try:
            path = within(self._path, traces.NAME)
            if not traces.fill(found.trace, path, seconds):
                last = max(series.last for series in found.trace.values())
                found.missing.append(f"{traces.NAME}: read up to step {last} only, in {seconds:.0f} s")
        except FileNotFoundError:
            why = "not there, so no curves" if found.is_reference else ""
            found.missing += [f"{traces.NAME}: {why}"] * bool(why)
        except (OSError, ValueError) as error:
            self._miss(traces.NAME, error)

    def _read_saves(self) -> None:
        found, folder = self._found, self._path / "checkpoints"
        for name in listed(folder):
            if match := SAVE.fullmatch(name):
                with contextlib.suppress(OSError):
                    found.saves.append((int(match[1]), (folder / name).lstat().st_mtime))
        if found.saves and self._is_copy():
            found.saves = []
            found.missing.append("checkpoints: when each was saved, because this is a copy with other times")

    def _read_log(self) -> None:
        try:
            with files.open_regular(within(self._path, "job.log")) as file:
                all_lines = list(lines(self._hide(ends_of(file, MOST_LOG))))
        except FileNotFoundError:
            return  # under Slurm it lies where --output says
        except (OSError, ValueError) as error:
            self._miss("job.log", error)
            return
        said = [line for line in all_lines if SAID.match(line)]
        if len(said) > 2 * MOST_LINES:
            said[MOST_LINES:-MOST_LINES] = [f"... {len(said) - 2 * MOST_LINES} lines are left out ..."]
        self._found.said = said
        self._found.doctor = _doctors(all_lines)

    def _in_folders(self, name: str) -> Iterator[str]:
        """FOLDER/FILE of each file one folder below this one."""
        for folder in listed(self._path / name):
            if not (self._path / name / folder).is_symlink():
                yield from (f"{folder}/{one}" for one in listed(self._path / name / folder))

    def _last_written(self, attempt: int) -> float | None:
        logs = f"logs/{attempt}"
        names = ["job.log", traces.NAME, *(f"{logs}/{name}" for name in listed(self._path / logs))]
        times = [self._written(name) for name in names]
        return max((when for when in times if when is not None), default=None)

    def _is_copy(self) -> bool:
        """Whether the times of its files are not those of the run, as after `cp -r` or `touch`: the manifest
        too is later than all that it tells."""
        moments = [when for one in self._found.attempts for when in (one.started, one.ended)]
        last = max((when for when in moments if when is not None), default=math.inf)
        return (self._written(reading.NAME) or 0.0) > last + LATE

    def _written(self, name: str) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            return within(self._path, name).lstat().st_mtime
        return None

    def _read_tail(self) -> None:
        """Of the last attempt that failed."""
        found = self._found
        last = found.attempts[-1] if found.attempts else AttemptFacts(0)
        ended = last.outcome
        if ended is None or ended.rank is None or ended.status in (DONE, SAVED):
            return
        name = f"logs/{last.number}/{file_part(ended.node)}.rank{ended.rank}.err"
        try:
            with files.open_regular(within(self._path, name)) as file:
                tail = list(lines(self._hide(ends_of(file, 1 << 16)).rstrip()))[-TAIL:]
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._miss(name, error)
            return
        found.tail = (name, [line for line in tail if line])


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _doctors(all_lines: Sequence[str]) -> list[str]:
    """The last report of the doctor in a log, from its head to its verdict; empty if there is none."""
    plain_lines = [re.sub(r"^(?:apptrain|entrypoint): ", "", line) for line in all_lines]
    heads = [at for at, line in enumerate(plain_lines) if re.match(r"doctor: \d+ nodes?\b", line)]
    if not heads:
        return []
    rest = plain_lines[heads[-1] : heads[-1] + 100]
    ends = [at for at, line in enumerate(rest) if re.match(r"(?:not )?healthy\b", line)]
    return rest[: ends[0] + 1] if ends else []


def config_of(path: Path) -> dict[str, Any]:
    """What the reference program wrote at its start; empty if that is no object. Raises OSError or
    ValueError."""
    return _mapping(files.read_json(within(path, "config.json"), reading.MOST))
