"""The command line in the image and the venv: its commands, their help, and how a refusal ends. Begin at
`main`.

Errors become one line and an exit status here. Each command imports only what it needs: `plan` needs no
torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoint import __version__
from entrypoint.core import files, streams
from entrypoint.core.checkout import python_path
from entrypoint.core.errors import INTERRUPTED, BadInput, Refusal
from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from entrypoint.plan import commands, launch_plan, mistakes, secret_file, sources
from entrypoint.plan.launch_plan import LaunchPlan

PLAN = "print what launch would run, from this environment or a recorded one; runs and contacts nothing"
LAUNCH = "resolve the plan, meet the other nodes, start this node's ranks, and end with the job's status"
CHECK = (
    "print torch, CUDA, NCCL, cuDNN and the devices of this machine, and whether its driver and GPUs fit the "
    "image's stack"
)
VARIABLES = (
    "--foo-bar also reads APPTRAIN_FOO_BAR: option > variable > profile > default.\n"
    "CMD: a script with its arguments, or -m MODULE (default: reference job)."
)
NEXT = {
    "plan": "Then: apptrain launch with the same words, on each node, as the job scripts do.",
    "launch": "First: apptrain plan with the same words. From a login node: apptrain submit.",
    "check": "The last line is the verdict; the status is 1 if this machine does not fit.\n"
    "Then: apptrain run -- my_script.py",
}
HELP_ALL = "--help-all"
MOST_ENV = 1 << 23
"""Bytes of a recorded environment: a kernel passes 6 MB at most."""
FUNCTION = re.compile(r"^BASH_FUNC_[^=\n]+=\(\) \{.*\n(?:[ \t].*\n)*\}$", re.MULTILINE)
"""One that bash exports, as `env` prints it: modules do so."""
PREPARE = "for the job scripts: decide what a job's tasks are, before they start"
CONCLUDE = "for the job scripts: decide what follows an attempt of a job"
EXIT_STATUS = """exit status:
  0   done
  64  bad input: the message says what to change
  69  a port or a peer is not available: another attempt may help
  75  saved at a planned end, wants to go on
  124 a rank was stuck, and which one is said
  130 interrupted by Ctrl-C; 143: cancelled by SIGTERM
  N   otherwise the first failing rank's own status (128+N: killed by signal N)"""


def print_all_options(parser: argparse.ArgumentParser, *, job: bool = False) -> None:
    """The help of a command that hands options on to the launchers of all nodes (`job`: of a job script),
    with those options in place of examples."""
    parser.epilog = None
    known = {name[2:] for action in parser._actions for name in action.option_strings}
    sources.add_to(parser, job=job, everything=True, without=known | {"node-rank"})
    print(parser.format_help(), end="")


def exit_status(*only: str) -> str:
    """That list, with these statuses alone."""
    head, *rows = EXIT_STATUS.splitlines()
    return "\n".join([head, *(row for row in rows if row.split()[0] in only)])


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    streams.make_usable()
    try:
        check_here()
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except Refusal as refusal:
        if not _left_to_job_script(refusal, os.environ):
            print(f"apptrain: {refusal}", file=sys.stderr)
        return refusal.status
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return streams.lost(error)


def check_here() -> None:
    """Raises BadInput if the current directory was removed."""
    try:
        Path.cwd()
    except OSError as error:
        raise BadInput(
            "no-current-directory",
            f"the current directory cannot be found ({error.strerror}): cd to one that exists",
        ) from None


def _left_to_job_script(refusal: Refusal, env: Mapping[str, str]) -> bool:
    """Whether a job script will say it: one line for all nodes, from the outcome that is left here."""
    path = Path(env.get("APPTRAIN_OUTCOME", ""))
    if not path.name:
        return False
    if not path.exists():
        node = os.uname().nodename.partition(".")[0]
        try:
            outcome.write(
                path, Outcome(status=refusal.status, node=node, time=time.time(), error=str(refusal))
            )
        except OSError:
            return False
    return "APPTRAIN_ATTEMPT" in env


def _run(argv: Sequence[str]) -> int:
    before, command = commands.split_command(argv)
    everything = HELP_ALL in before
    before = ["--help" if word == HELP_ALL else word for word in before]
    asked = next((word for word in before if not word.startswith("-")), "")
    whole = parser(everything=everything, asked=asked)
    if before[:1] in (["plan"], ["launch"], ["check"]):
        whole.prog = f"apptrain {before[0]}"  # in whose name it refuses words that its commands left
    given = vars(whole.parse_args(before))
    name = given.pop("command_name")
    if name in ("prepare", "conclude"):
        from entrypoint.batch import conclude, prepare

        where = Path(given["directory"])
        try:
            return conclude.conclude(where) if name == "conclude" else prepare.prepare(where, os.environ)
        except OSError as error:
            raise BadInput(
                "directory-unreadable", f"{error.filename or given['directory']}: {error.strerror}"
            ) from None
    if name == "check":
        mistakes.check_torch(name)
        from entrypoint.node.check import check

        return check(as_json=given["json"])
    recorded = given.get("env-file") or (name == "plan" and os.environ.get("APPTRAIN_ENV_FILE"))
    env = read_env_file(Path(recorded)) if recorded else dict(os.environ)
    from entrypoint.plan.resolve import resolve

    with files.refused_if_not_reached():
        plan, settings = resolve(env, given, command, hostname=None if recorded else os.uname().nodename)
    if name == "plan":
        _check_command(plan, is_recorded=bool(recorded))
        return _print_plan(plan, as_json=settings.value("json"))
    if plan.mode == "torchrun" or sys.version_info < mistakes.OLDEST:
        mistakes.check_command(plan.command, Path.cwd(), mode=plan.mode, no_python=plan.no_python)
        mistakes.check_torch(name)
    if path := python_path(env.get("PYTHONPATH", "")):
        env["PYTHONPATH"] = path
    if plan.mode == "torchrun" or not plan.no_python:
        _read_torch_ahead()
    _import_asyncio()
    from entrypoint.run.launch import launch

    return launch(plan, settings, secret_file.added(env, settings.value("secrets")))


def _import_asyncio() -> None:
    """Without `ssl`, which it imports where there is one: nothing here speaks TLS, and each node would spend
    4 ms on it before its ranks start."""
    if "ssl" not in sys.modules:
        sys.modules["ssl"] = None  # type: ignore[assignment] # then an import of it fails
        try:
            import asyncio  # noqa: F401
        finally:
            del sys.modules["ssl"]


def _read_torch_ahead() -> None:
    """Has the kernel begin, in the image, with what an import of torch will read: the process that imports it
    is started a tenth of a second from now. In a thread, for a slow file system holds up whoever asks."""
    if imports := sys.modules.get("apptrain_imports"):
        import threading

        threading.Thread(target=imports.read_ahead, daemon=True, name="read_ahead").start()


def parser(*, everything: bool = False, asked: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; `everything`: whose help shows all options. `asked`: the command that alone has
    its options, for they take a while; None: all have."""
    parser_class = sources.parser_class()
    top = parser_class(
        prog="apptrain",
        description="apptrain's entrypoint: from a scheduler's environment to torchrun.",
        epilog=EXIT_STATUS,
        formatter_class=sources.HelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=__version__)
    subs = top.add_subparsers(
        dest="command_name", required=True, metavar="COMMAND", parser_class=parser_class
    )
    for name, text in (("plan", PLAN), ("launch", LAUNCH)):
        sub = subs.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"{VARIABLES}\n{NEXT[name]}\n\n"
            + (exit_status("0", "64") if name == "plan" else EXIT_STATUS),
            usage=f"apptrain {name} [options] [-- CMD ...]",
            formatter_class=sources.HelpFormatter,
            allow_abbrev=False,
        )
        if asked in (None, name):
            sources.add_to(sub, plan=name == "plan", everything=everything)
        if not everything:
            sub.add_argument(
                HELP_ALL, action="store_true", help="all options, also of threads, hangs and the network"
            )
    check = subs.add_parser(
        "check",
        help=CHECK,
        description=f"{CHECK[0].upper()}{CHECK[1:]}.",
        epilog=f"{NEXT['check']}\n\nexit status: 0 it fits, 1 it does not, 64 bad input",
        usage="apptrain check [--json]",
        formatter_class=sources.HelpFormatter,
        allow_abbrev=False,
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    for name, text in (("prepare", PREPARE), ("conclude", CONCLUDE)):
        sub = subs.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        sub.add_argument("directory", metavar="DIR", help="where both halves leave what they tell each other")
    return top


def read_env_file(path: Path) -> dict[str, str]:
    """A recorded environment: each NAME=VALUE with a NUL behind it, as `env -0` writes them, or one a line,
    verbatim to the line's end; there # lines and functions of bash are skipped."""
    try:
        text = files.read_text(path, MOST_ENV)
    except (OSError, ValueError) as error:
        why = "no text" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or error
        raise BadInput(
            "env-file-unreadable",
            f"--env-file {path} cannot be read ({why}): give a file as `env -0 >FILE` in a job writes it, or "
            "with one NAME=VALUE a line",
        ) from None
    if "\0" in text:
        return dict(
            _assignment(path, f"entry {i}", each) for i, each in enumerate(text.split("\0"), 1) if each
        )
    lines = FUNCTION.sub(_emptied, text).split("\n")
    return dict(
        _assignment(path, f"line {number}", line)
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    )


def _emptied(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def _assignment(path: Path, where: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name.split() != [name]:
        raise BadInput(
            "env-file-line",
            f"--env-file {path}, {where}: {text!r} is not NAME=VALUE: if a value has several lines, write "
            "the file with `env -0 >FILE`",
        )
    return name, value


def _check_command(plan: LaunchPlan, *, is_recorded: bool) -> None:
    """Refuses what `launch` would; of a CMD that is not there it only tells: a plan may be wanted first."""
    try:
        mistakes.check_command(plan.command, Path.cwd(), mode=plan.mode, no_python=plan.no_python)
    except mistakes.Missing as error:
        if commands.typed() and not is_recorded:
            print(f"apptrain: launch would refuse this here: {error}", file=sys.stderr)


def _print_plan(plan: LaunchPlan, *, as_json: bool) -> int:
    for note in plan.notes:
        print(f"apptrain: {note}", file=sys.stderr)
    if as_json:
        import json

        print(json.dumps(plan.to_json(), indent=2))
    else:
        print(launch_plan.describe(plan))
    sys.stdout.flush()
    return 0
