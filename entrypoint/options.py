"""Every option of the entrypoint: its name, its type, its help, and where its value came from.

The secret: the table below. The command line, the variables APPTRAIN_* and the profile are three ways
to give the same options; precedence (flag > environment > profile > default) lives here alone.
"""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from entrypoint.errors import BadInput

REFERENCE_JOB = ("-m", "train", "--config", "digits")
HOST_HALF = (
    "profile",
    "run-dir",
    "start",
    "stop-before",
    "on-failure",
    "max-restarts",
    "nnodes",
    "venv",
    "dry-run",
)
"""Options that the job script itself needs before a container exists."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value and where it came from: `flag`, `env:NAME`, `profile:FILE`, `derived:NAME` or `default`."""

    value: Any
    source: str


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def port(text: str) -> int:
    value = int(text)
    if not 1024 <= value <= 65534:
        raise ValueError("must be from 1024 to 65534: the join takes the next higher port")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 7 * 86400:
        raise ValueError("must be seconds, more than 0 and less than a week")
    return value


def seconds_or_0(text: str) -> float:
    value = float(text)
    if not 0 <= value < 7 * 86400:
        raise ValueError("must be seconds, less than a week, or 0")
    return value


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def flag(text: str) -> bool:
    if text not in ("1", "0", "true", "false"):
        raise ValueError("must be 1 or 0")
    return text in ("1", "true")


def node_count(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`, as (MIN, MAX)."""
    least, colon, most = text.partition(":")
    span = (positive_int(least), positive_int(most if colon else least))
    if span[0] > span[1]:
        raise ValueError("MIN is more than MAX")
    return span


def stop_signal(text: str) -> str:
    import signal

    name = text.upper().removeprefix("SIG")
    if not hasattr(signal, "SIG" + name):
        raise ValueError("must be a signal's name, such as USR2")
    return name


@dataclass(frozen=True, kw_only=True)
class Option:
    name: str
    parse: Callable[[str], Any] = str
    metavar: str
    help: str
    default: Any = None
    in_profile: bool = False
    plan_only: bool = False

    @property
    def variable(self) -> str:
        return "APPTRAIN_" + self.name.upper().replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option(
        name="scheduler",
        parse=one_of("auto", "slurm", "pbs", "embedded", "manual"),
        metavar="NAME",
        default="auto",
        help="auto, slurm, pbs, embedded or manual (default: auto, from the environment)",
    ),
    Option(
        name="mode",
        parse=one_of("auto", "torchrun", "rank", "exec"),
        metavar="MODE",
        default="auto",
        help="torchrun: one torchrun a node; rank: this task is one rank; exec: CMD once a node, for scripts "
        "that start their own workers (default: auto, torchrun or rank from the tasks per node)",
    ),
    Option(
        name="device",
        parse=one_of("auto", "cpu", "cuda"),
        metavar="DEVICE",
        default="auto",
        help="auto, cpu or cuda (default: auto, cuda where GPUs were granted)",
    ),
    Option(
        name="nproc-per-node",
        parse=positive_int,
        metavar="N",
        in_profile=True,
        help="ranks on each node (default: the GPUs granted to this node; on cpu 1)",
    ),
    Option(
        name="nnodes",
        parse=node_count,
        metavar="N",
        help="nodes that take part, N or MIN:MAX; with --on-failure restart further nodes are spares, and "
        "MIN are enough to go on with (default: all granted)",
    ),
    Option(
        name="nodes",
        metavar="LIST",
        help="without a scheduler: the nodes in rank order, such as a,b or gpu-[01-04]",
    ),
    Option(
        name="node-rank",
        parse=count,
        metavar="I",
        help="without a scheduler: which of --nodes this node is, from 0",
    ),
    Option(
        name="rdzv-backend",
        parse=one_of("static", "c10d"),
        metavar="NAME",
        default="static",
        in_profile=True,
        help="static or c10d (default: static; c10d runs what it unpickles from an open port)",
    ),
    Option(name="master-addr", metavar="HOST", help="address of torch's store (default: the first node)"),
    Option(
        name="master-port",
        parse=port,
        metavar="PORT",
        help="port of torch's store (default: from the job id)",
    ),
    Option(
        name="interface",
        metavar="NAME",
        in_profile=True,
        help="network interface for gloo and NCCL (default: the one that has this node's address)",
    ),
    Option(
        name="join-timeout",
        parse=seconds,
        metavar="S",
        default=300.0,
        in_profile=True,
        help="seconds to wait for all nodes before any rank starts (default: 300)",
    ),
    Option(
        name="peer-timeout",
        parse=seconds,
        metavar="S",
        default=60.0,
        in_profile=True,
        help="seconds of silence after which a node counts as lost (default: 60)",
    ),
    Option(
        name="hang-timeout",
        parse=seconds_or_0,
        metavar="S",
        default=300.0,
        help="seconds without a step after which a job whose ranks tell their steps, or any where this is "
        "given, is ended as hung; else where the ranks are is said once; 0: never (default: 300)",
    ),
    Option(
        name="silence-timeout",
        parse=seconds_or_0,
        metavar="S",
        default=0.0,
        help="seconds in which no rank writes anything, after which the job is ended as hung; 0: never "
        "(default: 0)",
    ),
    Option(
        name="join-key-file",
        parse=Path,
        metavar="FILE",
        help="secret that the nodes share (default: RUN/join.key)",
    ),
    Option(
        name="max-restarts",
        parse=count,
        metavar="N",
        help="with --on-failure requeue or restart how often the run starts again after failures, in all "
        "(default: until 3 times in a row bring no new checkpoint); with stop torchrun's own restarts of its "
        "ranks (default: 0)",
    ),
    Option(
        name="omp-num-threads",
        parse=positive_int,
        metavar="N",
        in_profile=True,
        help="OMP_NUM_THREADS of each rank (default: as set, else CPUs of this node over its ranks)",
    ),
    Option(
        name="no-python", parse=flag, metavar="", default=False, help="CMD is a program, not a Python script"
    ),
    Option(name="profile", metavar="NAME", help="site profile: a name under clusters/ or a YAML file"),
    Option(
        name="run-dir", parse=Path, metavar="DIR", help="run directory (default: SUBMIT_DIR/runs/NAME-ID)"
    ),
    Option(
        name="venv",
        metavar="DIR",
        help="venv made inside the image (make venv DIR=...), whose bin/ is first in PATH (default: none)",
    ),
    Option(
        name="show-ranks",
        parse=one_of("all", "0"),
        metavar="WHICH",
        default="all",
        help="whose output is shown: all or 0 (default: all; the logs have everything)",
    ),
    Option(
        name="on-failure",
        parse=one_of("stop", "requeue", "restart"),
        metavar="WHAT",
        default="stop",
        help="what follows a failure: stop, requeue (by the job script), or restart in the same job with the "
        "nodes that are left (default: stop)",
    ),
    Option(
        name="stop-signal",
        parse=stop_signal,
        metavar="NAME",
        default="USR2",
        help="signal that asks ranks for a planned end (default: USR2)",
    ),
    Option(
        name="term-grace",
        parse=seconds,
        metavar="S",
        default=25.0,
        help="seconds that ranks have to save after SIGTERM (default: 25, which is 5 below Slurm's KillWait; "
        "pbs/multinode.pbs sets it by the queue's kill_delay)",
    ),
    Option(
        name="env-file",
        parse=Path,
        metavar="FILE",
        plan_only=True,
        help="a recorded environment, one NAME=VALUE a line",
    ),
    Option(name="nodefile", parse=Path, metavar="FILE", plan_only=True, help="stands for PBS_NODEFILE"),
    Option(
        name="hostname",
        metavar="NAME",
        plan_only=True,
        help="this node's host name (default: under PBS from PBS_NODENUM)",
    ),
    Option(name="json", parse=flag, metavar="", default=False, plan_only=True, help="print one JSON object"),
)
BY_NAME = {option.name: option for option in OPTIONS}


class Settings:
    """The options of one call; `settings["join-timeout"]` is a Setting."""

    def __init__(self, settings: Mapping[str, Setting], command: Sequence[str]):
        self._settings = dict(settings)
        self.command = tuple(command) or REFERENCE_JOB

    def __getitem__(self, name: str) -> Setting:
        return self._settings[name]

    def value(self, name: str) -> Any:
        return self._settings[name].value

    def given(self, name: str) -> bool:
        return self._settings[name].source != "default"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message and not unknown.startswith("-"):
            message += " (CMD comes behind --)"
        raise BadInput(f"{message}: see `{self.prog} --help`")


def add_to(parser: argparse.ArgumentParser, *, plan: bool) -> None:
    """Adds the table's options to a parser, each also with underscores, as torchrun takes them."""
    for option in OPTIONS:
        if option.plan_only and not plan:
            continue
        names = [f"--{option.name}"]
        kind: dict[str, Any] = {
            "dest": option.name,
            "default": None,
            "help": f"{option.help} [{option.variable}]",
        }
        if option.parse is flag:
            kind |= {"action": "store_const", "const": "1"}
        else:
            kind |= {"metavar": option.metavar}
        parser.add_argument(*names, **kind)
        if "-" in option.name:
            parser.add_argument("--" + option.name.replace("-", "_"), **(kind | {"help": argparse.SUPPRESS}))


def parser_class() -> type[argparse.ArgumentParser]:
    return _Parser


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options before the first `--`, CMD behind it."""
    if "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def inherited_arguments(env: Mapping[str, str]) -> list[str]:
    """Arguments from APPTRAIN_ARGS_FILE (one per NUL) or APPTRAIN_ARGS (shell-quoted), for schedulers whose
    scripts get none. Raises BadInput where one cannot be read, or holds the job script's own options."""
    if path := env.get("APPTRAIN_ARGS_FILE"):
        name = "APPTRAIN_ARGS_FILE"
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeError) as error:
            raise BadInput(f"APPTRAIN_ARGS_FILE={path} cannot be read: {error}") from None
        arguments = text.removesuffix("\0").split("\0") if text else []
    else:
        name = "APPTRAIN_ARGS"
        try:
            arguments = shlex.split(env.get("APPTRAIN_ARGS", ""))
        except ValueError as error:
            raise BadInput(f"APPTRAIN_ARGS is not a shell-quoted string: {error}") from None
    if name == "APPTRAIN_ARGS":
        for argument in split_command(arguments)[0]:
            option = argument.partition("=")[0].removeprefix("--").replace("_", "-")
            if argument.startswith("--") and option in HOST_HALF:
                variable = "APPTRAIN_" + option.upper().replace("-", "_")
                raise BadInput(
                    f"--{option} in APPTRAIN_ARGS comes too late for the job script: set {variable} instead"
                )
    return arguments


def resolve(
    given: Mapping[str, str | None],
    env: Mapping[str, str],
    profile: Mapping[str, Any],
    profile_name: str,
    command: Sequence[str],
) -> Settings:
    """Each option's value by precedence. `given` holds the flags' texts, None where absent.

    Raises BadInput naming the flag or variable, the value, and what it must be.
    """
    settings = {}
    for option in OPTIONS:
        if (text := given.get(option.name)) is not None:
            settings[option.name] = Setting(value=_parse(option, f"--{option.name}", text), source="flag")
        elif option.variable in env:
            value = _parse(option, option.variable, env[option.variable])
            settings[option.name] = Setting(value=value, source=f"env:{option.variable}")
        elif option.in_profile and option.name in profile:
            text = str(profile[option.name])
            value = _parse(option, f"{option.name} in {profile_name}", text)
            settings[option.name] = Setting(value=value, source=f"profile:{profile_name}")
        else:
            settings[option.name] = Setting(value=option.default, source="default")
    return Settings(settings, command)


def _parse(option: Option, name: str, text: str) -> Any:
    if not text:
        raise BadInput(f"{name} is empty: give {option.metavar or '1'} or leave it out")
    try:
        return option.parse(text)
    except ValueError as error:
        why = str(error) if str(error).startswith(("must", "MIN")) else f"must be {option.metavar}, a number"
        raise BadInput(f"{name}={text}: {why}") from None
