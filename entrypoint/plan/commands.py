"""The names of `apptrain`'s commands, which of them take a CMD, and which options belong to which.
`split_command` cuts a line in two; `refusal` says what was meant by a word that a command does not take.

make asks here for words that are none of its targets. Runs with Python 3.9.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

from entrypoint.core import files, spelling
from entrypoint.core.checkout import apptrain
from entrypoint.plan.options import OPTIONS, flag

COMMANDS = {
    "demo": "train the reference job on two nodes of this machine",
    "run": "run your own script on nodes of this machine",
    "submit": "submit a job to a cluster, as the site's profile says",
    "site": "write a first profile of the cluster that this login node belongs to",
    "image": "build the image that jobs run in",
    "plan": "print what launch would run on this node, and why",
    "launch": "run this node's part of a job: one such task on each node",
    "check": "print torch, CUDA, NCCL and the devices here, and whether they fit",
    "doctor": "say what would keep jobs from working",
    "rerun": "print the command that does a run again here, and what cannot be had",
    "report": "write one page about a run, or an archive for a support desk",
    "explain": "say what a log means, or what a job script will run into",
    "scaling": "say where more nodes stop paying, and what holds a program back",
    "compare": "say what differs between runs, and whether it explains their numbers",
}
TAKE_CMD = ("demo", "run", "submit", "scaling", "plan", "launch")
OF_SUBMIT = (
    *("--cluster", "--gpus", "--partition", "--queue", "--account", "--project", "--time", "--walltime"),
    *("--bind", "--pass", "--options", "--dry-run", "--follow"),
)
"""Options of `submit` alone."""
FLAGS = ("--dry-run", "--follow", *(f"--{option.name}" for option in OPTIONS if option.parse is flag))
"""Those that take no value."""
OF_LAUNCH = tuple(f"--{option.name}" for option in OPTIONS if not option.plan_only and not option.job_only)
OF_JOBS = ("--nodes", "--run-dir", *OF_LAUNCH)
"""Options of `run` and of `submit`."""
OWNERS = {
    "run": (*OF_JOBS, "--tasks-per-node", "--gpus-per-node", "--image"),
    "submit": (
        *OF_JOBS,
        *OF_SUBMIT,
        "--gpus-per-node",
        *(f"--{option.name}" for option in OPTIONS if option.job_only),
    ),
    "scaling": (*OF_JOBS, "--cluster", "--gpus-per-node", "--image"),
    "launch": OF_LAUNCH,
    "plan": (*OF_LAUNCH, *(f"--{option.name}" for option in OPTIONS if option.plan_only)),
}
OURS = ("train", "entrypoint")
"""Packages of ours that a CMD may name: nothing in the user's folder stands in for them then."""
MEANT = {
    "train": "demo",
    "start": "run",
    "exec": "run",
    **dict.fromkeys(("build", "image-build", "build-image", "install-image"), "image build"),
}
"""Words that mean one of our commands."""
SCRIPTS = (".py", ".sh", ".ipynb")
DATA = (".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt", ".csv")
"""Endings of files that no Python runs."""
_LOGS = "each rank's output is shown, and kept in RUN/logs (--run-dir); --show-ranks 0 shows rank 0's alone"
_STORE = "apptrain brings the nodes together; --master-addr and --master-port say where"
_NODES = "which network the nodes use is found, or given with --interface"
_OWN = "nothing here needs it"
OF_TORCHRUN = {
    "--standalone": "apptrain run --nodes 1 starts one node, and brings its ranks together",
    **dict.fromkeys(("--rdzv-endpoint", "--rdzv-id"), _STORE),
    "--rdzv-conf": "the time to wait for the nodes is --join-timeout",
    "--local-addr": _NODES,
    "--local-ranks-filter": "--show-ranks 0 shows rank 0's output alone",
    **dict.fromkeys(("--tee", "--redirects", "--log-dir"), _LOGS),
    **dict.fromkeys(("--duplicate-stdout-filters", "--duplicate-stderr-filters"), _LOGS),
    "--log-line-prefix-template": _LOGS,
    "--monitor-interval": "the end of a rank is seen at once",
    "--start-method": "how ranks start is --start-ranks",
    "--signals-to-handle": "ranks get SIGTERM, SIGINT and SIGHUP; the planned end is --stop-signal",
    "--shutdown-timeout": "the time to save after SIGTERM is --term-grace",
    "--module": "a module is given as CMD: -- -m NAME",
    "--run-path": "a script is given as CMD: -- my_script.py",
    **dict.fromkeys(("--role", "--event-log-handler", "--logs-specs"), _OWN),
    **dict.fromkeys(("--virtual-local-rank", "--print-completion"), _OWN),
}
"""Options of torchrun that we have not, and what does the same here."""


def typed() -> list[str]:
    """The words behind `apptrain` where a user has typed them, from one that takes a CMD; else none."""
    is_ours = PurePath(sys.argv[0]).name == "apptrain" and sys.argv[1:2]
    return sys.argv[1:] if is_ours and sys.argv[1] in TAKE_CMD else []


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options before the first `--`, CMD behind it."""
    if "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def program(command: Sequence[str], *, mode: str, no_python: bool) -> list[str]:
    """CMD as it is started. torchrun's parser takes a first `--` behind the script or module as its own; so
    the program does not get it, in mode `rank` neither. In mode `exec` no torchrun is meant."""
    words = list(command)
    behind = 2 if words[0] == "-m" and not no_python else 1
    if mode != "exec" and words[behind : behind + 1] == ["--"]:
        del words[behind]
    return words


def our_package(command: Sequence[str]) -> str:
    """The package of ours that CMD runs a module of; empty if it is another program."""
    package = command[1].partition(".")[0] if command[0] == "-m" and len(command) > 1 else ""
    return package if package in OURS else ""


def with_dashes(words: Sequence[str]) -> list[str]:
    """The same with -- in front of the script, where there is none; a guess, for a message."""
    found = list(words)
    script = [at for at, word in enumerate(found) if word == "-m" or word.endswith(".py")]
    if script and "--" not in found:
        found.insert(script[0], "--")
    return found


def sorted_out(words: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """(options that this command has, the script and its own arguments); a guess, for a message."""
    ours, others, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.replace("_", "-").partition("=")
        if name not in OWNERS[command]:
            others.append(word)
            continue
        ours.append(word)
        if not equals and name not in FLAGS and rest:
            ours.append(rest.pop(0))
    return ours, others


def is_script(word: str) -> bool:
    """Whether a word looks like the beginning of a CMD."""
    return word == "-m" or word.endswith(SCRIPTS)


def refusal(unknown: Sequence[str], known: Sequence[str], prog: str) -> str:
    """What to say of words that a command does not take. `known`: its own options."""
    command = typed()[0] if typed() else prog.rpartition(" ")[2]
    found = f"unrecognized arguments: {' '.join(unknown)}"
    page = f"see `{f'apptrain {command}' if typed() else prog} --help`"
    if unknown[0].startswith("-") and unknown[0] != "-m":
        name = unknown[0].partition("=")[0]
        meant = elsewhere(command, unknown)
        return meant or found + (spelling.meant(name, known) or f": {page}")
    if command in TAKE_CMD:
        return _behind_dashes(unknown) or f"{found} (CMD comes behind --): {page}"
    if is_script(unknown[0]):
        return f"{command} takes no script: did you mean `{apptrain()} run -- {shlex.join(unknown)}`?"
    return f"{found}: {page}"


def elsewhere(command: str, unknown: Sequence[str]) -> str:
    """What to say of an option of another command; empty if it is none, or one here may be meant."""
    given = unknown[0].partition("=")[0]
    name = given.replace("_", "-")
    if name in OF_TORCHRUN and command in TAKE_CMD:
        return f"{given} is torchrun's: leave it out: {OF_TORCHRUN[name]}"
    owners = [owner for owner, names in OWNERS.items() if name in names and owner not in (command, "plan")]
    if owners != ["scaling"]:
        owners = [owner for owner in owners if owner != "scaling"]  # which has many of `run` and `submit`
    if not owners or (name in spelling.MEANT and (name != "--cluster" or command not in ("run", "demo"))):
        return ""
    if owners == ["submit"] and command in ("run", "demo") and typed():
        cluster = [] if name == "--cluster" else ["--cluster", "NAME"]
        line = shlex.join(["submit", *cluster, *with_dashes(typed()[1:])])
        return f"{name} is of submit: did you mean `{apptrain()} {line}`?"
    listed = " and ".join([", ".join(owners[:-1]), owners[-1]] if owners[1:] else owners)
    return f"{name} is an option of {listed}, not of {command}: see `apptrain {command} --help`"


def _behind_dashes(unknown: Sequence[str]) -> str:
    """What to say of a script before --: the line with it behind; empty if these words are none, or
    nobody has typed them: make gives empty values."""
    name = unknown[0]
    is_cmd = is_script(name) or (files.is_regular(Path(name)) and not name.endswith(DATA))
    if not is_cmd or not typed() or "" in typed():
        return ""
    command = "run" if typed()[0] == "demo" else typed()[0]
    before, behind = split_command(typed()[1:])
    ours, others = sorted_out(before, command)
    line = shlex.join([command, *ours, "--", *others, *behind])
    return f"{name} stands before --: did you mean `{apptrain()} {line}`?"


def _of_make(word: str, targets: Sequence[str]) -> str:
    """What to say of a word that is none of make's targets; empty if nothing is like it."""
    if word == "install":
        return f": did you mean make venv, or {apptrain()} image build?"
    if word in COMMANDS or word in MEANT:
        return f": did you mean {apptrain()} {MEANT.get(word, word)}?"
    return spelling.meant(word, targets)


if __name__ == "__main__":
    print(_of_make(sys.argv[1], sys.argv[2:]))
