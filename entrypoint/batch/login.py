"""What a login node knows of a scheduler: the values that pass between the commands and each scheduler's
`login` module, and what these modules share. `of` finds the module; `LoginSide` is what it offers.

`apptrain submit` makes its request, foretells what it will be granted, and follows the job, all by that
module. Runs with Python 3.9.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Final, Protocol

from entrypoint.batch.native import OptionTable
from entrypoint.core.frozen import dataclass
from entrypoint.plan.profile import CLUSTERS, Profile
from entrypoint.schedulers.known import words_of

CHECKOUT: Final = CLUSTERS.resolve().parent
ANSWER = 30.0
"""Seconds that a scheduler's command has to answer."""


@dataclass(frozen=True)
class Wish:
    """What is asked for; None and '' leave it to the profile."""

    nodes: int
    gpus: int | None = None
    """On each node."""
    partition: str = ""
    account: str = ""
    time: str = ""
    """As `seconds` takes it."""
    options: tuple[str, ...] = ()
    """Further words of sbatch or qsub, which win over ours."""
    given: tuple[str, ...] = ()
    """Those of the profile, without what the user's own replace."""
    said: tuple[str, ...] = ()
    """A line for each that was replaced."""
    typed: frozenset[str] = frozenset()
    """Which of `nodes`, `gpus`, `partition`, `account` and `time` the user has given."""
    arguments: tuple[str, ...] = ()
    """Of the job script: options, then -- and CMD."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What options here set for the job."""


@dataclass(frozen=True)
class Submission:
    """How a job is handed to its scheduler."""

    words: list[str]
    """The command line."""
    env: Mapping[str, str]
    """What the job gets of the variables here, without those that have its arguments."""
    file: Path | None = None
    """To be written first, with the arguments that the command line cannot hold."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What stands before the command line: the scheduler carries them to the job."""
    said: Sequence[str] = ()
    """A line for each word of ours that has given way to one of the user's."""


@dataclass(frozen=True)
class JobRequest:
    """What is asked of the scheduler, with the site's own where nothing was wished for."""

    profile: Profile
    nodes: int
    gpus: int
    """Of each node."""
    cpus: int | None
    time: str
    """Empty: unknown."""
    warns: int
    """Seconds before the end at which Slurm warns; 0 under PBS, whose job script has a clock."""
    words: Sequence[str]
    """Further ones of sbatch or qsub, which win."""
    arguments: Sequence[str]
    """Of the job script."""
    image: Path
    make_image: str = ""
    """What makes it."""
    tasks: int = 1


@dataclass(frozen=True)
class JobStatus:
    """A job, as its scheduler tells of it."""

    state: str
    """For people."""
    output: Sequence[Path] = ()
    """Where its output may be; the first that exists is shown."""
    late: Path | None = None
    """What to show at the end where none of those was there."""
    status: int | None = None
    """None while it is not over."""


class LoginSide(Protocol):
    """What `login` in a scheduler's package offers."""

    TABLE: OptionTable
    """The options of what submits."""

    def submission(
        self, profile: Profile, name: str, wish: Wish, env: Mapping[str, str], cwd: Path
    ) -> Submission:
        """What submits, from `cwd` and with `env`; the job finds its profile by `name`. Raises BadInput."""

    def given(self, profile: Profile, wish: Wish) -> tuple[list[str], list[str]]:
        """(the profile's further words without those that would take the place of what the user has typed, a
        line for each that gives way)."""

    def limits(self, script: str) -> tuple[str, int]:
        """(the time, the seconds from its warning to its end) that the job script's own lines ask for; empty
        and 0: they do not."""

    def granted(self, request: JobRequest) -> tuple[JobRequest, str]:
        """(the request with what its further words change, the word that leaves open what is granted)."""

    def architecture(self, words: Sequence[str]) -> str:
        """Of the nodes that this command line asks for, as `uname -m` has it; empty if nobody tells."""

    def slots(self, request: JobRequest) -> tuple[int, ...] | None:
        """Processes that the request has placed on each node without starting them; None elsewhere."""

    def submitted(self, answer: str) -> str:
        """The id of the job, in what submits it has printed; empty if that has none."""

    def ask(self, job: str, site: Profile | None) -> JobStatus | None:
        """What is told of this job; None if nothing is. `site`: its profile, if that is known."""

    def has_forgotten(self, job: str) -> bool:
        """Whether the scheduler answers that it has no such job, so that it is over."""


def of(scheduler: str) -> LoginSide:
    module: LoginSide = importlib.import_module(f"entrypoint.batch.{scheduler}.login")
    return module


def script(profile: Profile) -> Path:
    """The job script."""
    return CHECKOUT / words_of(profile.scheduler).job_script


def script_word(profile: Profile, cwd: Path) -> str:
    """The same on a command line in `cwd`."""
    name = words_of(profile.scheduler).job_script
    return name if cwd.resolve() == CHECKOUT else str(CHECKOUT / name)


def gpus_word(profile: Profile, gpus: int) -> str:
    """The word that asks for that many."""
    return (profile.request.gpus or words_of(profile.scheduler).gpus).replace("{gpus}", str(gpus))


def share(all_of_it: int | None, profile: Profile, gpus: int) -> int | None:
    """What goes with that many of a node's GPUs."""
    if all_of_it is None or not profile.nodes.gpus:
        return all_of_it
    return max(1, all_of_it * gpus // profile.nodes.gpus)


TIMES: Final = (
    r"(?P<minutes>\d{1,7})",
    r"(?P<minutes>\d{1,7}):(?P<seconds>[0-5]?\d)",
    r"(?P<hours>\d{1,5}):(?P<minutes>[0-5]?\d):(?P<seconds>[0-5]?\d)",
    r"(?P<days>\d{1,4})-(?P<hours>\d{1,4})(:(?P<minutes>[0-5]?\d)(:(?P<seconds>[0-5]?\d))?)?",
)
"""Forms of a time, as Slurm has them."""
UNITS: Final = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def seconds(time: str) -> int | None:
    """Of a time in one of Slurm's forms; None for 0 and for any other text."""
    for form in TIMES:
        if found := re.fullmatch(form, time, re.ASCII):
            return sum(int(count or 0) * UNITS[unit] for unit, count in found.groupdict().items()) or None
    return None


def clock(seconds: int) -> str:
    """HH:MM:SS."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Options with their values, whether they stand in one word or in two."""
    pairs = []
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if word.startswith("--") and "=" in word:
            name, _, value = word.partition("=")
        elif re.fullmatch("-[A-Za-z].+", word):
            name, value = word[:2], word[2:]
        else:
            name, value = word, following
        if name.startswith("-"):
            pairs.append((name, value))
    return pairs


def is_asked_by_hand(scheduler: str, what: str, wish: Wish, env: Mapping[str, str]) -> bool:
    """Whether the further words, or a variable that the submitting program reads, ask for an account,
    partition or time."""
    given = {
        name
        for pair, value in pairs((*wish.given, *wish.options))
        for name in (pair, f"{pair} {value.partition('=')[0]}")
    }
    asks = words_of(scheduler).asks.get(what, ())
    return any(word in given or bool(env.get(word)) for word in asks)


def directives(script: Path, mark: str, *left_out: str) -> list[str]:
    """The words of the script's own lines that begin with `mark`, without those that begin as one of
    `left_out`."""
    words = []
    for text in script.read_text(encoding="utf-8").splitlines():
        if text.startswith(mark):
            found = shlex.split(text.partition(" ")[2], comments=True)
            if found and not found[0].startswith(left_out):
                words += found
    return words


def run(*command: str) -> str:
    """What it prints; empty where it fails or does not answer."""
    status, out, _ = _answer(command)
    return "" if status else out


def refusal(*command: str) -> str:
    """Why it fails, in its own words; empty where it does not fail, or does not answer."""
    status, _, errors = _answer(command)
    return errors if status else ""


def _answer(command: Sequence[str]) -> tuple[int, str, str]:
    """(status, what it prints, its messages)."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1, "", ""
    return done.returncode, done.stdout, done.stderr


def on_cluster(job: str) -> tuple[list[str], str]:
    """(the words with which Slurm's programs ask the cluster of JOB;CLUSTER, JOB)."""
    number, _, cluster = job.partition(";")
    return (["-M", cluster] if cluster else []), number
