"""Every option of the entrypoint and of a job: its name, its type, its help, and where its value came from.

The secret: the table below. The command line, APPTRAIN_ARGS and its file, the variables APPTRAIN_* and the
profile are ways to give the same options; precedence (in that order, then the default) lives here alone.
"""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from entrypoint.errors import BadInput

REFERENCE_JOB = ("-m", "train", "--config", "digits")


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


def seconds_before(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7):
        raise ValueError("must be seconds; 0 leaves it out")
    return int(text)


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
    job_only: bool = False
    """Of a job as a whole: `launch` has nothing to do with it."""

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
    Option(
        name="start",
        metavar="HOW",
        job_only=True,
        help="what starts the tasks (under PBS the profile's, else pbsdsh; under Slurm srun)",
    ),
    Option(
        name="stop-before",
        parse=seconds_before,
        metavar="S",
        job_only=True,
        help="under PBS, seconds before the walltime is over at which ranks are asked to save (default: 300, "
        "or a tenth of it if less)",
    ),
    Option(
        name="dry-run",
        parse=flag,
        metavar="",
        default=False,
        job_only=True,
        help="print the launch line and the plan of every node; start no rank",
    ),
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


def add_to(parser: argparse.ArgumentParser, *, plan: bool = False, job: bool = False) -> None:
    """Adds the table's options to a parser, each also with underscores, as torchrun takes them."""
    for option in OPTIONS:
        if (option.plan_only and not plan) or (option.job_only and not job):
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


def inherited(env: Mapping[str, str], *, job: bool = False) -> tuple[dict[str, str], list[str]]:
    """(the options' texts, CMD) from APPTRAIN_ARGS_FILE (one argument per NUL) or APPTRAIN_ARGS
    (shell-quoted), for schedulers whose scripts get no arguments. Raises BadInput where one cannot be
    read."""
    if path := env.get("APPTRAIN_ARGS_FILE"):
        name = "APPTRAIN_ARGS_FILE"
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise BadInput(f"{name}={path} cannot be read ({why}): give a path that exists") from None
        arguments = text.removesuffix("\0").split("\0") if text else []
    else:
        name = "APPTRAIN_ARGS"
        try:
            arguments = shlex.split(env.get(name, ""))
        except ValueError as error:
            raise BadInput(f"{name} is not a shell-quoted string: {error}") from None
    try:
        return texts(arguments, job=job)
    except BadInput as error:
        raise BadInput(f"in {name}: {error}") from None


def texts(arguments: Sequence[str], *, job: bool = False) -> tuple[dict[str, str], list[str]]:
    """(the options' texts, CMD) of a command line."""
    before, command = split_command(arguments)
    parser = _Parser(prog="python -m entrypoint launch", allow_abbrev=False, add_help=False)
    add_to(parser, job=job)
    given = vars(parser.parse_args(before))
    return {name: text for name, text in given.items() if text is not None}, command


def merged(
    given: Mapping[str, str | None], command: Sequence[str], env: Mapping[str, str], *, job: bool = False
) -> tuple[dict[str, str], list[str]]:
    """The same with what the command line inherits, of which its own options are worth more. Raises BadInput
    where CMD stands in both."""
    more, inherited_command = inherited(env, job=job)
    if command and inherited_command:
        name = "APPTRAIN_ARGS_FILE" if env.get("APPTRAIN_ARGS_FILE") else "APPTRAIN_ARGS"
        raise BadInput(f"CMD stands both on the command line and in {name}: give it once")
    own = {name: text for name, text in given.items() if text is not None}
    return {**more, **own}, list(command or inherited_command)


def words(flags: Mapping[str, str], command: Sequence[str], *, job: bool = False) -> list[str]:
    """The command line that says this again: of `launch` or `plan`, or of a whole `job`."""
    found = []
    for name, text in flags.items():
        if job or not BY_NAME[name].job_only:
            found.append(f"--{name}" if BY_NAME[name].parse is flag else f"--{name}={text}")
    return [*found, "--", *command] if command else found


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
