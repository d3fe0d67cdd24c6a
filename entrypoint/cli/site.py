"""`apptrain site -o NAME.yaml`: writes a first profile of the site that this machine belongs to. Begin at
`survey`, which says who is asked in which order.

It changes nothing on the machine but the file it is told to write. Runs with Python 3.9.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from containers import stacks
from entrypoint.batch.survey import answer, draft, host
from entrypoint.batch.survey.answer import SiteSurvey
from entrypoint.batch.survey.ask import LoginNode
from entrypoint.batch.survey.draft import QUESTION, Line
from entrypoint.cli import submit
from entrypoint.cli.main import exit_status
from entrypoint.cli.profiles import by_cluster, load_checked, render
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import counted
from entrypoint.plan.profile import host_file, is_in_clusters
from entrypoint.plan.sources import HelpFormatter, parser_class
from entrypoint.schedulers.known import KNOWN

NEXT = """Looks at this machine alone: sinfo, scontrol, qstat, pbsnodes, ip, module avail,
/sys, $SCRATCH.
Each command has 20 s. What it could not know is a `# question:` there.

Then: answer the questions in FILE, make profiles PROFILE=FILE, and
apptrain submit --cluster FILE --dry-run -- my_script.py
"""
TAKEN = (
    "jobs without --profile take {} here. Are they to take this one? Then leave the cluster out there, and "
    "write `clusters: [{}]`"
)


def main(arguments: Sequence[str], machine: LoginNode | None = None) -> int:
    """`machine`: another than this one."""
    try:
        return _main(arguments, machine or LoginNode(os.environ))
    except (BadInput, stacks.BuildRefused) as error:
        _say(str(error))
        return error.status


def _main(arguments: Sequence[str], machine: LoginNode) -> int:
    options = _parse(arguments)
    file = Path(options.output) if options.output else None
    if file:
        _check_free(file)
    text, has_gpus = survey(machine, by_cluster() if file and is_in_clusters(file) else {})
    for line in machine.told:
        _say(line)
    further = () if has_gpus else ("--device", "cpu")
    asked = f"{counted(text.count(QUESTION), 'question')} to answer"
    if file is None:
        status, said = _tried(text, further)
        print(text, end="", flush=True)
        _say(f"{asked}; {said}" if not status else said)
        return status
    _write(file, text)
    _say(f"{file} and {host_file(file).name} written, with {asked}: grep -n question {file}")
    return submit.main(["--cluster", _named(file), "--dry-run", *further])


def _say(text: str) -> None:
    print(f"apptrain: {text}", file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_class()(
        prog="apptrain site",
        usage="apptrain site [-o FILE]",
        description="Write a first profile of this cluster, on its login node, and check it by a dry run.",
        epilog=f"{NEXT}\n{exit_status('0', '64')}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    text = "NAME.yaml, which must not be there yet (default: print it)"
    parser.add_argument("-o", "--output", default="", metavar="FILE", help=text)
    options, others = parser.parse_known_args(arguments)
    if others and others[0].endswith((".yaml", ".yml")) and not options.output:
        raise BadInput(
            "site-output-place",
            f"unrecognized arguments: {others[0]}: did you mean -o {shlex.quote(others[0])}?",
        )
    return parser.parse_args(arguments)


# --- the profile --------------------------------------------------------------------------------------------


def survey(machine: LoginNode, others: Mapping[str, Sequence[str]]) -> tuple[str, bool]:
    """(the profile's text, whether its nodes have GPUs). `others`: the profiles beside it, by their cluster.
    Raises BadInput where there is no scheduler."""
    found = _of_scheduler(machine)
    host_name = os.uname().nodename.partition(".")[0]
    name = found.name or host_name
    nodes = f"nodes of {found.gpus} {found.models or 'GPUs'}" if found.gpus else "no GPUs found"
    lines = [
        Line("title", f"{name}, {nodes}"),
        Line("documented", (), "the pages of the site that you checked this against"),
        Line("tested", "", "when it ran there, and with what"),
        *(_asked_if_taken(line, others) for line in found.lines),
        *host.network(machine, found.node, found.switch),
        *host.program(machine),
        *host.scratch(machine),
    ]
    if any(line.key == "env.NCCL_SOCKET_IFNAME" for line in lines):
        lines += found.of_network
    head = [
        f"A first profile of {name}, by `apptrain site` on {host_name}, {time.strftime('%Y-%m-%d')}.",
        "Each value says where it comes from. Answer the questions, then delete them. All keys: generic.yaml",
    ]
    return draft.text(head, lines), found.gpus > 0


def _asked_if_taken(line: Line, others: Mapping[str, Sequence[str]]) -> Line:
    """`clusters` as a question if another profile is for that cluster: a job without --profile would be
    refused. Any other line as it is."""
    names = line.value if line.key == "clusters" and isinstance(line.value, tuple) else ()
    taken = sorted({file for name in names for file in others.get(name, ())})
    if not taken:
        return line
    return Line(line.key, questions=(TAKEN.format(", ".join(taken), ", ".join(names)),))


def _of_scheduler(machine: LoginNode) -> SiteSurvey:
    """What the scheduler says that is here. Raises BadInput if there is none."""
    surveyed = [known for known in KNOWN if known.surveyed_with]
    for known in surveyed:
        if any(machine.find(program) for program in known.surveyed_with):
            return answer.of(known.name).survey(machine)
    first = " nor ".join(known.surveyed_with[0] for known in surveyed)
    titles = " or ".join(known.title for known in surveyed)
    raise BadInput(
        "site-no-scheduler",
        f"neither {first} is in PATH: run it on a login node of a {titles} cluster. Without a "
        "scheduler no profile is needed: apptrain run -- my_script.py, or apptrain launch --nodes a,b",
    )


# --- the file -----------------------------------------------------------------------------------------------


def _check_free(file: Path) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.yaml", file.name):
        raise BadInput(
            "profile-file-name", f"-o {file}: a profile is named NAME.yaml, of letters, digits, _ . and -"
        )
    for each in (file, host_file(file)):
        if os.path.lexists(each):
            raise BadInput(
                "site-output-exists",
                f"-o {file}: {each} exists, and nothing is overwritten: give another name, or remove it",
            )
    if not file.parent.is_dir():
        raise BadInput(
            "site-output-no-directory",
            f"-o {file}: there is no directory {file.parent}: make it, or give another",
        )


def _write(file: Path, text: str) -> None:
    """The profile and its host file, or neither."""
    with contextlib.ExitStack() as undo:
        try:
            with file.open("x", encoding="utf-8") as opened:
                undo.callback(file.unlink)
                opened.write(text)
        except OSError as error:
            raise BadInput(
                "site-output-unwritable", f"-o {file} cannot be written: {error.strerror}"
            ) from None
        render(file, write=True)
        undo.pop_all()


def _named(file: Path) -> str:
    """As --cluster takes it."""
    return str(file) if "/" in str(file) else f"./{file}"


def _tried(text: str, further: Sequence[str]) -> tuple[int, str]:
    """(status, what is said) of a dry run with a profile that is no file yet."""
    out, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "site.yaml")
        _write(file, text)
        load_checked(file)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = submit.main(["--cluster", str(file), "--dry-run", *further])
    if not status:
        return 0, "it passes a dry run: -o NAME.yaml writes it"
    return status, f"it does not pass a dry run: {errors.getvalue().strip().splitlines()[-1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
