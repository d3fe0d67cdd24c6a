"""The table of every option of the entrypoint and of a job: its name, type, help and default. Begin at
`OPTIONS`; sources.py decides where a value comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from entrypoint.core import spelling
from entrypoint.core.frozen import dataclass
from entrypoint.plan.cores import BINDINGS
from entrypoint.plan.failure_policy import FailurePolicy
from entrypoint.schedulers import choice

COMMON = (
    *("device", "nproc-per-node", "nnodes", "nodes", "node-rank", "mode", "no-python", "profile", "run-dir"),
    *("on-failure", "doctor", "env-file", "json"),
)
"""What `--help` shows; `--help-all` shows all."""

GROUPS = {
    "what runs": (
        *("device", "nproc-per-node", "nnodes", "nodes", "node-rank", "mode", "no-python", "profile"),
        *("run-dir", "venv", "omp-num-threads", "secrets", "scheduler", "dry-run"),
    ),
    "failures, hangs, and the end": (
        *("on-failure", "max-restarts", "hang-timeout", "silence-timeout", "peer-timeout"),
        *("stop-signal", "stop-before", "term-grace"),
    ),
    "looking": ("doctor", "no-preflight", "show-ranks", "env-file", "nodefile", "hostname", "json"),
    "how ranks start": ("start-ranks", "preload", "numa-binding", "stage", "start"),
    "the network": (
        *("interface", "fabric", "master-addr", "master-port", "rdzv-backend", "join-timeout"),
        *("join-key-file",),
    ),
}
"""Title to the names of its options, in the order of the help: what people use first comes first."""

RDMA = ("infiniband", "slingshot", "efa")
"""Fabrics that NCCL uses without sockets."""
FABRICS = (*RDMA, "ethernet")
NO_REQUEST = {
    **dict.fromkeys(("KILL", "STOP"), "cannot be caught"),
    **dict.fromkeys(
        ("CHLD", "CLD", "CONT", "URG", "WINCH"), "comes for other reasons, and is ignored by default"
    ),
    **dict.fromkeys(("ABRT", "BUS", "FPE", "ILL", "SEGV", "TRAP", "SYS"), "is for crashes"),
}
"""Signals that ask for nothing, and why."""


def word(text: str) -> str:
    if not text.isprintable() or len(text.split()) != 1:
        raise ValueError("must be one word, without blanks")
    return text


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def on_one_node(text: str) -> int:
    """How many ranks, or threads of a rank. With a bound: a typing error must not start 80,000 processes on a
    machine that others use. The largest nodes have some 1,000 hardware threads."""
    value = int(text)
    if not 1 <= value <= 4096:
        raise ValueError("must be from 1 to 4096")
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
            raise ValueError(f"must be one of {', '.join(choices)}{spelling.meant(text, choices)}")
        return text

    return parse


def numa_binding(text: str) -> str:
    if text == "core-complex":
        raise ValueError(
            f"must be one of {', '.join(BINDINGS)}; the closest to torchrun's {text} is exclusive"
        )
    return one_of(*BINDINGS)(text)


def failure_policy(text: str) -> FailurePolicy:
    return FailurePolicy(one_of(*map(str, FailurePolicy))(text))


def flag(text: str) -> bool:
    if text not in ("1", "0", "true", "false"):
        raise ValueError("must be 1 or 0")
    return text in ("1", "true")


def node_count(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`, as (MIN, MAX)."""
    least, colon, most = text.partition(":")
    try:
        span = (positive_int(least), positive_int(most if colon else least))
    except ValueError:
        raise ValueError("must be N or MIN:MAX, whole numbers from 1") from None
    if span[0] > span[1]:
        raise ValueError("MIN is more than MAX")
    return span


def seconds_before(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7):
        raise ValueError("must be seconds; 0 leaves it out")
    return int(text)


def stage(text: str) -> str:
    if text not in ("auto", "off") and not text.startswith("/"):
        raise ValueError("must be auto, off, or a directory of each node's own, a path from /")
    return text


def module_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("must be names of modules with commas between them")
    return names


def stop_signal(text: str) -> str:
    import signal

    name = text.upper().removeprefix("SIG")
    if "SIG" + name not in signal.Signals.__members__:
        raise ValueError("must be a signal's name, such as USR2")
    if name in NO_REQUEST:
        raise ValueError(
            f"must be one that can ask a program to save, such as USR2: {name} {NO_REQUEST[name]}"
        )
    return name


@dataclass(frozen=True)
class Option:
    """One of the launcher's, on the command line, in the environment and in a profile."""

    name: str
    metavar: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    in_profile: bool = False
    plan_only: bool = False
    job_only: bool = False
    """Of a job as a whole: `launch` has nothing to do with it."""

    def wants(self, error: ValueError) -> str:
        """What a value must be, after an error of `parse`."""
        if str(error).startswith(("must", "MIN")):
            return str(error)
        return (
            "must be seconds, a number" if self.metavar == "S" else f"must be {self.metavar}, a whole number"
        )

    @property
    def variable(self) -> str:
        return "APPTRAIN_" + self.name.upper().replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option(
        name="scheduler",
        parse=one_of("auto", *choice.NAMES),
        metavar="NAME",
        default="auto",
        help=f"one of auto, {', '.join(choice.NAMES)} (default: auto, from the environment)",
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
        parse=on_one_node,
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
        help="without a scheduler: this node's place in --nodes, from 0",
    ),
    Option(
        name="rdzv-backend",
        parse=one_of("static", "c10d"),
        metavar="NAME",
        default="static",
        in_profile=True,
        help="static or c10d (default: static; c10d runs what it unpickles from an open port)",
    ),
    Option(
        name="master-addr",
        parse=word,
        metavar="HOST",
        help="address of torch's store (default: the first node)",
    ),
    Option(
        name="master-port",
        parse=port,
        metavar="PORT",
        help="port of torch's store (default: from the job id)",
    ),
    Option(
        name="interface",
        parse=word,
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
        help="end the job if a rank that reports steps makes none for S seconds; for other scripts, print "
        "once where the ranks are, and end them too if S is given; 0: never (default: 300)",
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
        name="secrets",
        parse=Path,
        metavar="FILE",
        help="variables for the ranks, one NAME=VALUE a line, in a file that only you can read (mode 600); "
        "no scheduler, log or plan gets them",
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
        parse=on_one_node,
        metavar="N",
        in_profile=True,
        help="OMP_NUM_THREADS of each rank (default: as set, else CPUs of this node over its ranks)",
    ),
    Option(
        name="start-ranks",
        parse=one_of("auto", "fork", "spawn"),
        metavar="HOW",
        default="auto",
        in_profile=True,
        help="fork: torch is imported once a node, and the ranks are forks of that process; spawn: each rank "
        "imports it itself (default: auto, fork wherever that changes nothing for CMD)",
    ),
    Option(
        name="preload",
        parse=module_names,
        metavar="NAMES",
        default=(),
        in_profile=True,
        help="modules that are imported with torch before the ranks are forked, with commas between them "
        "(default: none)",
    ),
    Option(
        name="numa-binding",
        parse=numa_binding,
        metavar="HOW",
        default="none",
        in_profile=True,
        help="cores of each rank, as torchrun means it: node: those of its GPU's NUMA node; socket: of its "
        "socket; exclusive: its share of the node's; auto: node or socket, if no core is left without a "
        "rank; on CPUs ranks are spread over the NUMA nodes (default: none)",
    ),
    Option(
        name="fabric",
        parse=one_of(*FABRICS),
        metavar="NAME",
        in_profile=True,
        help=f"what NCCL is to use between nodes: {', '.join(FABRICS)}. With {' or '.join(RDMA)} a job of "
        "several nodes ends where NCCL uses sockets (default: unknown)",
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
        name="doctor",
        parse=flag,
        metavar="",
        default=False,
        help="train nothing: examine the nodes, and print what is wrong with them; -- --json prints JSON",
    ),
    Option(
        name="no-preflight",
        parse=flag,
        metavar="",
        default=False,
        help="start without a look at disks, limits and fabric, and whatever network NCCL takes",
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
        parse=failure_policy,
        metavar="WHAT",
        default=FailurePolicy.STOP,
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
        help="a recorded environment, of env -0, or one NAME=VALUE a line",
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
        name="stage",
        parse=stage,
        metavar="auto|off|DIR",
        default="auto",
        job_only=True,
        help="copy the image to DIR on each node before its container starts; auto: to its temporary "
        "directory, from so many nodes on that this saves time (default: the profile's, else auto)",
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
