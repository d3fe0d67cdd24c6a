"""`apptrain scaling`: whether more nodes help a program, and what holds it back. `main` is the command.

Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from entrypoint.batch import native
from entrypoint.core import files
from entrypoint.core.checkout import apptrain
from entrypoint.core.errors import BAD_INPUT, BadInput
from entrypoint.core.plain import counted, plain
from entrypoint.core.private import write_output, write_private
from entrypoint.plan import profile
from entrypoint.plan.commands import FLAGS, is_script, split_command
from entrypoint.plan.sources import HelpFormatter, parser_class
from entrypoint.record import reading, tokens
from entrypoint.scaling import jobs, measured, page, picture, result, sweep
from entrypoint.scaling.measured import Measured, NotMeasured
from entrypoint.scaling.result import Scaling
from entrypoint.scaling.sweep import REFERENCE, NoSuchSize, Sweep, SweepFolder
from entrypoint.schedulers import choice
from entrypoint.schedulers.known import KNOWN, words_of
from entrypoint.schedulers.request import PlacementRequest

MOST_RUNS = 1_000
REPEATS, MINUTES = 3, 30.0
OWN_JOB = [*REFERENCE, "--config", "digits-short"]
"""What is measured without a CMD."""
RESULT, PICTURE = "result.json", "scaling.svg"


def main(
    arguments: Sequence[str], env: Mapping[str, str], check_run: Callable[[list[str]], None] = lambda _: None
) -> int:
    """Returns the exit status. `check_run` raises BadInput if `apptrain run` with such arguments would be
    refused here. Raises BadInput."""
    before, command = split_command(arguments)
    parser = _parser()
    if "--" in arguments:
        given, options = _with_values(parser, before)
        if given.runs:
            raise BadInput(
                "scaling-run-and-cmd",
                f"scaling: give RUNs or a CMD, not both: {plain(given.runs[0])} is before --",
            )
    else:
        given, options = parser.parse_args(before), []
        if wrong := next(filter(is_script, given.runs), None):
            line = shlex.join(["scaling", "--", *given.runs[given.runs.index(wrong) :]])
            raise BadInput(
                "scaling-no-dashes", f"{wrong} stands before --: did you mean `{apptrain()} {line}`?"
            )
    if given.runs:
        return _read(given, env)
    return _measure(given, options, command or OWN_JOB, env, check_run)


def _parser() -> argparse.ArgumentParser:
    parser = parser_class()(
        prog="apptrain scaling",
        usage="apptrain scaling [options] [options of run or submit] [-- CMD ...]\n"
        "       apptrain scaling RUN RUN ... [options]",
        description="Say how a program's speed grows with its nodes, where more of them stop paying, and "
        "what holds it back: run CMD on 1, 2, 4 ... nodes of this machine, or read runs that exist. "
        "Without CMD it is the reference job.",
        epilog="{nodes}, {64*nodes} and {256/nodes} in CMD become numbers. The same line with\n"
        "the same --dir goes on where it was broken off; apptrain scaling DIR reads it.\n\n"
        "Then: apptrain report DIR, a page with the picture\nMore: docs/scaling.md\n\n"
        f"exit status: 0 measured, 1 fewer than two sizes could be, {BAD_INPUT} bad input",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="a run directory, or that of a scaling")
    add("--nodes", default="", metavar="LIST", help="(default: 1,2,4 ..., as many as there are cores)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--strong", action="store_true", help="a step has the same work on all sizes (default of -m train)"
    )
    kinds.add_argument(
        "--weak", action="store_true", help="each rank has the same work in a step (default of other CMD)"
    )
    add("--repeats", default="", metavar="N", help=f"runs of each size (default: {REPEATS})")
    add(
        "--minutes",
        default="",
        metavar="M",
        help=f"end a run after so long; its steps until then count (default: {MINUTES:.0f})",
    )
    add("--dir", default="", metavar="DIR", help="where all runs go (default: runs/scaling-TIME)")
    add("--cluster", default="", metavar="NAME", help="submit a job for each run, one after the other")
    add("--json", action="store_true", help="print one JSON object")
    add("-o", dest="image", default="", metavar="FILE.svg", help="draw it")
    return parser


def _with_values(
    parser: argparse.ArgumentParser, before: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """(our options, those of `run` with their values)."""
    own = {name for action in parser._actions for name in action.option_strings}
    flags = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    mine: list[str] = []
    others: list[str] = []
    words = list(before)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        place = mine if name in own or not word.startswith("-") else others
        place.append(word)
        takes = not equals and name not in flags and name not in FLAGS and word.startswith("-")
        if takes and words and not native.is_option(words[0]):
            place.append(words.pop(0))
    return parser.parse_args(mine), others


def _read(given: argparse.Namespace, env: Mapping[str, str]) -> int:
    _refuse_of_measuring(given)
    paths: list[Path] = []
    waiting: list[str] = []
    kinds: dict[str, Path] = {}
    for path in map(Path, given.runs):
        if not sweep.is_one(path):
            paths.append(path)
            continue
        there, kind, missing = in_folder(path, env)
        paths, waiting = [*paths, *there], [*waiting, *missing]
        if kind:
            kinds.setdefault(kind, path)
    asked = _kind(given)
    if not asked and len(kinds) > 1:
        raise BadInput(
            "scaling-kinds-differ",
            f"{' and '.join(f'{plain(str(path))} is of {kind} scaling' for kind, path in kinds.items())}: "
            "give sweeps of one kind",
        )
    runs, left_out = read_all(paths, env)
    scaling = result.of(runs, asked or "".join(kinds), [*left_out, *waiting])
    show(scaling, as_json=given.json, image=given.image)
    return 0


def report(path: Path, out: str, env: Mapping[str, str]) -> int:
    """Writes the page about a sweep's directory, and prints its name. Raises BadInput."""
    there, kind, waiting = in_folder(path, env)
    runs, left_out = read_all(there, env)
    scaling = result.of(runs, kind, [*left_out, *waiting])
    target = Path(out) if out else path / "report.html"
    write_output(target, page.html(path.resolve().name, scaling), "scaling", follow=bool(out))
    print(target)
    return 0


def in_folder(path: Path, env: Mapping[str, str]) -> tuple[list[Path], str, list[str]]:
    """(the runs of a sweep's directory, strong or weak, a line for each job that has left nothing yet and
    each run that does not count). Raises BadInput."""
    folder = SweepFolder(path)
    kind = folder.plan().get("kind")
    done, jobs = folder.noted("done"), folder.noted("jobs")
    found = {**jobs, **done}
    waiting = [
        f"{plain(str(run))}: its job has not begun"
        for run in found.values()
        if not files.is_regular(run / reading.NAME)
    ]
    there = [run for run in found.values() if files.is_regular(run / reading.NAME)]
    waiting += [_why_left_out(run, env) for run in folder.not_noted()]
    return there, kind if kind in ("strong", "weak") else "", waiting


def _why_left_out(run: Path, env: Mapping[str, str]) -> str:
    """A line about a run that the sweep has not taken."""
    if not files.is_regular(run / reading.NAME):
        return f"{plain(str(run))}: no attempt has started its ranks ({plain(run.name)}.log beside it)"
    try:
        _, why = read_all([run], env)
    except BadInput as error:
        return str(error)
    return why[0] if why else f"{plain(str(run))}: it was broken off"


def _measure(
    given: argparse.Namespace,
    options: Sequence[str],
    command: Sequence[str],
    env: Mapping[str, str],
    check_run: Callable[[list[str]], None],
) -> int:
    kind = _kind(given) or ("strong" if tuple(command[:2]) == REFERENCE else "weak")
    nodes = sweep.sizes(given.nodes) if given.nodes else _default_sizes(given.cluster)
    repeats, minutes = (
        _number("--repeats", given.repeats or str(REPEATS)),
        _number("--minutes", given.minutes or str(MINUTES)),
    )
    if repeats != int(repeats) or repeats > sweep.MOST_REPEATS:
        raise BadInput("scaling-repeats", f"--repeats {given.repeats}: give 1 to {sweep.MOST_REPEATS}")
    first = _first_size(nodes, command)
    if given.cluster:
        _refuse_of_this_machine(given)
        known = words_of(profile.load(given.cluster, asked=f"--cluster {given.cluster}").scheduler)
    else:
        _refuse_in_job(env)
        check_run(["--nodes", str(first), *options, "--", *sweep.of_size(command, first, batch=0)])
        options = [*options, *_threads(options, nodes[-1], env)]
    batch = _batch(command) if kind == "weak" and tuple(command[:2]) == REFERENCE else 0
    asked = Sweep(
        kind=kind,
        nodes=nodes,
        repeats=int(repeats),
        command=tuple(tokens.hide_words(command, env)),
        options=tuple(tokens.hide_words(options, env)),
        cluster=given.cluster,
    )
    path = Path(given.dir or f"runs/scaling-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    folder = sweep.open_folder(path, asked)
    _say(_intention(asked, command))
    _say(
        f"directory {plain(str(path))}; broken off, the same line with --dir {shlex.quote(str(path))} goes on"
    )
    if given.cluster:
        return jobs.submit(folder, asked, command, options, known, batch=batch, say=_say, env=env)
    from entrypoint.scaling import local

    runner = local.LocalRuns(folder, asked, command, options, batch=batch, minutes=minutes, say=_say, env=env)
    try:
        failed = runner.run()
    except local.BrokenOff as stopped:
        _say(f"broken off; the same line with --dir {shlex.quote(str(path))} goes on")
        return stopped.status
    except OSError as error:
        _say(f"{error.strerror}: {error.filename or path}")
        return 1
    return _conclude(given, folder, kind, [f"{counted(one.nodes, 'node')}: {one.why}" for one in failed], env)


def _conclude(
    given: argparse.Namespace, folder: SweepFolder, kind: str, failed: Sequence[str], env: Mapping[str, str]
) -> int:
    runs, left_out = read_all(list(folder.noted("done").values()), env)
    try:
        scaling = result.of(runs, kind, [*failed, *left_out])
    except BadInput as error:
        if error.id not in ("scaling-one-size", "scaling-nothing"):
            raise
        _say(error)
        return 1
    write_private(folder.path / RESULT, json.dumps(result.to_json(scaling), indent=2) + "\n")
    draw(scaling, folder.path / PICTURE, follow=False)
    show(scaling, as_json=given.json, image=given.image)
    _say(f"{folder.path / RESULT} and {PICTURE} beside it have it; a page: {apptrain()} report {folder.path}")
    return 0


def _intention(asked: Sweep, command: Sequence[str]) -> str:
    sizes = ", ".join(map(str, asked.nodes))
    begin = f"{asked.kind} scaling on {sizes} nodes, {counted(asked.repeats, 'run')} of each size"
    if asked.kind == "strong":
        taken = (
            ""
            if tuple(command[:2]) == REFERENCE
            else ": taken at your word that a step has the same work on all"
        )
        return f"{begin}{taken}"
    if tuple(command[:2]) == REFERENCE:
        return f"{begin}: batch_size grows with the nodes"
    return f"{begin}: each rank has the same work in a step (--strong if your script divides its batch)"


def _default_sizes(cluster: str) -> tuple[int, ...]:
    """1, 2, 4 ...: as many nodes as this machine has cores, at most 8; at least 2."""
    cores = 4 if cluster else len(os.sched_getaffinity(0))
    return tuple(one for one in (1, 2, 4, 8) if one <= max(2, cores))


def _first_size(nodes: Sequence[int], command: Sequence[str]) -> int:
    """The first of these that CMD can have. Raises BadInput unless there are two."""
    found, why = [], ""
    for size in nodes:
        try:
            sweep.of_size(command, size, batch=0)
        except NoSuchSize as error:
            why = why or str(error)
        else:
            found.append(size)
    if len(found) < 2:
        raise BadInput("scaling-division", f"{why}, and two sizes are needed: give --nodes that divide it")
    return found[0]


def _threads(options: Sequence[str], most: int, env: Mapping[str, str]) -> list[str]:
    """The option that gives the ranks of all sizes as many threads; none if somebody has said how many. Each
    size of its own would share this machine's cores in another way."""
    names = {word.partition("=")[0].replace("_", "-") for word in options}
    if names & {"--omp-num-threads", "--nproc-per-node", "--gpus-per-node", "--tasks-per-node"}:
        return []
    if env.get("OMP_NUM_THREADS") or env.get("APPTRAIN_OMP_NUM_THREADS"):
        return []
    return ["--omp-num-threads", str(max(1, len(os.sched_getaffinity(0)) // most))]


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100_000:
        raise BadInput("scaling-number", f"{name} {plain(text)}: give a number above 0")
    return value


def _batch(command: Sequence[str]) -> int:
    """Of the reference program on one node. Raises BadInput for a command that it refuses."""
    from train import arguments
    from train.status import TrainingRefused

    try:
        return arguments.read(command[2:], 1).config.batch_size
    except TrainingRefused as refused:
        raise BadInput(refused.id, f"train: {refused}") from None


def _refuse_of_measuring(given: argparse.Namespace) -> None:
    """Raises BadInput for an option that does nothing while runs are read."""
    for name in ("nodes", "repeats", "minutes", "dir", "cluster"):
        if getattr(given, name):
            raise BadInput(
                "scaling-run-option",
                f"scaling: --{name} is of runs that it starts, and {plain(given.runs[0])} is one to be read: "
                f"leave --{name} out, or give CMD behind --",
            )


def _refuse_of_this_machine(given: argparse.Namespace) -> None:
    """Raises BadInput for an option that does nothing while jobs are submitted."""
    if given.minutes:
        raise BadInput(
            "scaling-cluster-minutes", "--minutes is of runs on this machine: with --cluster give --time"
        )
    if given.json or given.image:
        raise BadInput(
            "scaling-cluster-result",
            "--json and -o have nothing to show before the jobs have ended: give them to "
            f"{apptrain()} scaling DIR then",
        )


def _refuse_in_job(env: Mapping[str, str]) -> None:
    """Raises BadInput inside a scheduler's job: its other nodes are out of reach from here."""
    for known in KNOWN:
        if choice.find(env, known.name, PlacementRequest()).present(env):
            raise BadInput(
                "scaling-in-job",
                f"scaling: this is inside a job of {known.title}, whose nodes it does not use: on a login "
                f"node, {apptrain()} scaling --cluster NAME -- CMD; or start jobs of several sizes, then "
                f"{apptrain()} scaling RUN RUN",
            )


def _say(text: object) -> None:
    print(f"apptrain: {text}", file=sys.stderr, flush=True)


def _kind(given: argparse.Namespace) -> str:
    return "strong" if given.strong else "weak" if given.weak else ""


def read_all(paths: Sequence[Path], env: Mapping[str, str]) -> tuple[list[Measured], list[str]]:
    """(the runs that tell a rate, a line for each other one). Raises BadInput for what is no run."""
    if len(paths) > MOST_RUNS:
        raise BadInput("scaling-too-many", f"scaling: {len(paths)} runs were given: {MOST_RUNS} at most")
    runs, left_out = [], []
    for path in dict.fromkeys(paths):
        try:
            runs.append(measured.read(path, env))
        except NotMeasured as why:
            left_out.append(f"{plain(str(path))}: {why}")
    return runs, left_out


def show(scaling: Scaling, *, as_json: bool, image: str) -> None:
    """Prints the result, and draws it into the file `image`."""
    if as_json:
        print(json.dumps(result.to_json(scaling), indent=2).replace("\x7f", "\\u007f"))
    else:
        print("\n".join(result.in_words(scaling)))
    if image:
        draw(scaling, Path(image))
        print(f"apptrain: {plain(image)} is drawn", file=sys.stderr)


def draw(scaling: Scaling, path: Path, *, follow: bool = True) -> None:
    """Writes the picture, as `write_output`. Raises BadInput where that cannot be."""
    if path.suffix != ".svg":
        raise BadInput(
            "scaling-picture-kind",
            f"scaling -o {plain(str(path))}: the picture is SVG: give a name with .svg",
        )
    write_output(path, picture.svg(scaling), "scaling", follow=follow)
