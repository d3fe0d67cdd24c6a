"""The command `apptrain`, which a user types: its commands, and what each of them starts. Begin at `main`.

Some commands need a checkout, and say so. It runs with a login node's Python, from 3.9 on, and imports the
rest once a command is known.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from entrypoint import __version__
from entrypoint.cli import main as cli
from entrypoint.cli import no_command
from entrypoint.core import files, spelling, streams
from entrypoint.core.checkout import HOME, apptrain, make
from entrypoint.core.errors import BAD_INPUT, INTERRUPTED, BadInput, Refusal
from entrypoint.plan import commands, mistakes
from entrypoint.plan.commands import COMMANDS, split_command
from entrypoint.plan.sources import HelpFormatter, parser_class
from entrypoint.record.partition import VARIABLE, partition

AT_HAND = os.environ.pop("APPTRAIN_AT_HAND", None)
"""What tools/login-python.sh has to say of the active environment; None if this was not started by it."""
NOT_TAKEN = " is not taken: "
HELP = """usage: apptrain COMMAND [options] [-- CMD ...]

Multi-node PyTorch training: one image and one command, for Slurm, PBS and here.

on this machine
  demo     {demo}
  run      {run}:
           {us} run -- my_script.py --lr 0.1
  check    {check}

on a login node, from the checkout
  image    {image}:  {us} image build
  doctor   {doctor};
           --doctor of any job examines its nodes
  site     {site}
  submit   {submit}:
           {us} submit --cluster NAME --nodes 4 -- my_script.py --lr 0.1

afterwards
  explain  {explain}:
           {us} explain LOG|DIR|RUN|JOBSCRIPT|-
  compare  {compare}:
           {us} compare RUN RUN
  scaling  {scaling}
  rerun    {rerun}
  report   {report}

inside a job
  plan     {plan}
  launch   {launch}

options
  --help, --version

{status}

`{us} COMMAND --help` has the options.
"""
IMAGE_HELP = """usage: apptrain image build|fetch|verify|inspect [options]

Build the image that jobs run in: Apptainer, locked packages, no root.

  build     build containers/image.sif
  fetch     download what it is made from, for a node without a network
  verify    build it a second time and compare
  inspect   print what it is made of

options
  --stack NAME     which CUDA{stacks} (stacks.yaml)
  --extra FILE     further packages, a requirements file
  --offline DIR    take everything from here
  --image FILE     the image (default: containers/image.sif, image-STACK.sif;
                   built on aarch64: image-aarch64.sif)

Reads DEBIAN_MIRROR=URL (a machine that is no Debian needs it), a second mirror
DEBIAN_SNAPSHOT=URL, APPTRAIN_CACHE, APPTAINER_TMPDIR, and what pip reads:
docs/containers.md.

Then: apptrain demo --image, and apptrain submit --cluster NAME -- my_script.py

exit status: 0 done, 64 bad input, else a step failed: the last line says why
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    streams.make_usable()
    try:
        cli.check_here()
        try:
            with files.refused_if_not_reached():
                return _run(arguments)
        finally:
            sys.stdout.flush()
    except Refusal as refusal:
        print(f"apptrain: {refusal}", file=sys.stderr)
        return refusal.status
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return streams.lost(error)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and arguments[1:]:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("--help", "-h", "help", "--help-all"):
        print(HELP.format(**COMMANDS, us=apptrain(), status=cli.EXIT_STATUS) + _first_step())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("launch", "check") and AT_HAND and NOT_TAKEN in AT_HAND:
        print(f"apptrain: {AT_HAND}", file=sys.stderr)
    if name in ("plan", "launch", "check", "prepare", "conclude"):
        return cli.main(arguments)
    if name == "demo":
        return _demo(rest)
    if name == "run":
        return _embedded(name, rest)
    if name == "submit":
        _need_checkout(name)
        from entrypoint.cli import submit

        return submit.main(rest)
    if name == "doctor":
        return _doctor(rest)
    if name == "compare":
        return _compare(rest)
    if name == "rerun":
        return _rerun(rest)
    if name == "report":
        return _report(rest)
    if name == "scaling":
        from entrypoint.scaling import command

        if _is_given("--cluster", split_command(rest)[0]):
            _need_checkout(name)
        return command.main(rest, os.environ, _check_run_of_scaling)
    if name == "explain":
        return _explain(rest)
    if name == "site":
        _need_checkout(name)
        from entrypoint.cli import site

        return site.main(rest)
    if name == "image":
        return _image(rest)
    raise BadInput("no-command", no_command.remedy(arguments))


def _first_step() -> str:
    """As it works from here: make gets a torch first, where this Python has none."""
    demo = f"{apptrain()} demo"
    if not mistakes.has_torch() and (HOME / "Makefile").exists():
        demo = make("demo")
    return f"Begin with `{demo}`; on a cluster with `{apptrain()} image build`."


def _need_checkout(name: str) -> None:
    if not (HOME / "Makefile").exists():
        raise BadInput(
            "no-checkout",
            f"apptrain {name} is for a login node: run the apptrain of a checkout there; this one has none",
        )


# --- on this machine ----------------------------------------------------------------------------------------


def _demo(arguments: list[str]) -> int:
    before, behind = split_command(arguments)
    parser = parser_class()(
        prog="apptrain demo",
        usage="apptrain demo [options] [key=value ...] [-- arguments of the training]",
        description="Train ResNet-18 on handwritten digits, on nodes of this machine. No GPU is needed.",
        epilog="Options of `apptrain run` may be given too. `key=value` changes the training:\n"
        "epochs=2; `-- --help` lists the keys. `--image` trains in the image.\n"
        "Python: as of `apptrain run`; the demo also needs torchvision and some more.\n\n"
        f"Then: apptrain run -- my_script.py\n\n{cli.EXIT_STATUS}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", default="2", metavar="N", help="nodes to start (default: 2)")
    parser.add_argument("--config", default="digits", metavar="NAME", help="what to train (default: digits)")
    given, others = parser.parse_known_args(before)
    changes = [word for word in others if "=" in word and not word.startswith("-")]
    options = [word for word in others if word not in changes]
    if {"--help", "-h"} & set(behind):
        mistakes.check_torch("demo")
        from train.__main__ import main as train

        return train(["--help"])
    words = ["-m", "train", "--config", given.config, *changes, *behind]
    return _embedded("demo", ["--nodes", given.nodes, *options, "--", *words])


def _is_given(option: str, words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == option for word in words)


def _embedded(name: str, arguments: list[str]) -> int:
    before, command = split_command(arguments)
    if cli.HELP_ALL not in before and _is_given("--image", before):
        _in_image(before, command, is_demo=name == "demo")
    if sys.version_info < mistakes.OLDEST:
        mistakes.check_torch(name)
    from entrypoint.cli import embedded

    return embedded.main(arguments, lambda note: _check_python(name, note))


def _check_run_of_scaling(arguments: list[str]) -> None:
    """Raises BadInput for what `apptrain run` would refuse of these arguments, or of this Python."""
    if sys.version_info >= mistakes.OLDEST:
        from entrypoint.cli import embedded

        embedded.check(arguments)
    _check_python("scaling")


def _check_python(name: str, note: str = "") -> None:
    """Says which Python this is, if an environment was active. One without torch is left for the checkout's
    venv, which is made if it is missing, after `note` was said. Raises BadInput where that must not be."""
    if AT_HAND:
        print(f"apptrain: {AT_HAND}", file=sys.stderr)
    if not mistakes.has_torch() and (venv := _missing_venv()):
        if name == "run" and AT_HAND and "pip install" in AT_HAND:  # what it lacks is smaller than torch
            raise BadInput(
                "python-lacks-packages", f"run: nothing else here has torch: add them, or {make('venv')}"
            )
        why = "no Python here has torch: making a venv that has (VENV=DIR takes another)"
        if os.environ.get("VENV"):
            why = f"VENV={venv} is not there: making a venv with torch there"
        os.environ["VENV"] = str(venv)
        print(f"{note}apptrain: {why}", file=sys.stderr, flush=True)
        _make_venv(venv, "run")
        _become([str(HOME / "apptrain"), *sys.argv[1:]])
    mistakes.check_torch(name)


def _missing_venv() -> Path | None:
    """The venv that `make venv` would make, where that is all that is missing: it is not there, nor is an
    image, and this was started by `apptrain` of a checkout."""
    venv = HOME / (os.environ.get("VENV") or ".venv")
    is_ours = AT_HAND is not None and (HOME / "tools" / "venv.sh").exists()
    if not is_ours or files.is_there(venv) or list(HOME.glob("containers/image*.sif")):
        return None
    return venv


def _in_image(before: list[str], command: list[str], *, is_demo: bool) -> NoReturn:
    """The same inside an image, by default the checkout's."""
    _need_checkout("run --image")
    at = next(i for i, word in enumerate(before) if word.partition("=")[0] == "--image")
    image, rest = before[at].partition("=")[2], [*before[:at], *before[at + 1 :]]
    is_apart = not image and at < len(rest) and not rest[at].startswith("-")
    if is_apart:
        image = rest[at]
    if commands.is_script(image) and not files.is_directory(Path(image, ".singularity.d")):
        words = rest if is_apart else [*rest, image]
        raise BadInput(
            "image-not-an-image",
            f"{image} is no image: {_behind_image(words, '', [] if is_demo else command)}",
        )
    if is_apart:
        del rest[at]
    _, others = commands.sorted_out(rest, "run")
    if others and commands.is_script(others[0]):
        said = _behind_image(rest, image, [] if is_demo else command)
        raise BadInput("image-command-order", f"{others[0]} stands before --: {said}")
    image = image or os.environ.get("APPTRAIN_IMAGE") or _default_image()
    os.environ[VARIABLE] = partition(Path(image))
    start = [str(HOME / "containers" / "run.sh"), image]
    inside = ["python", "-P", "-m", "entrypoint.cli.embedded", *rest, *(["--", *command] if command else [])]
    _become([*start, *inside])


def _default_image() -> str:
    from containers import stacks  # which no image has

    return str(stacks.image_on(HOME / "containers" / "image.sif", os.uname().machine))


def _behind_image(words: Sequence[str], image: str, command: Sequence[str]) -> str:
    ours, others = commands.sorted_out(words, "run")
    given = f"--image={image}" if image else "--image"
    return f"did you mean `{apptrain()} {shlex.join(['run', *ours, given, '--', *others, *command])}`?"


def _doctor(arguments: list[str]) -> int:
    parser = parser_class()(
        prog="apptrain doctor",
        usage="apptrain doctor [--profile NAME] [--json]",
        description="Say what would keep jobs that are submitted here from working.",
        epilog="On the nodes of a job: --doctor behind a job script, submit or run.\n\n"
        "Then: apptrain submit --cluster NAME --dry-run -- my_script.py\n\n"
        f"exit status: 0 healthy, 1 not, {BAD_INPUT} bad input",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--profile", default=os.environ.get("APPTRAIN_PROFILE", ""), metavar="NAME", help="the site's profile"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    _need_checkout("doctor")
    from entrypoint.doctor import login

    return login.main(HOME, given.profile, os.environ, as_json=given.json)


def _compare(arguments: list[str]) -> int:
    parser = parser_class()(
        prog="apptrain compare",
        usage="apptrain compare RUN RUN... [--json] [-o FILE.png]",
        description="Say what is equal and what differs between run directories, at which step their numbers "
        "part, and what explains that. The first is compared with each of the others.",
        epilog=f"exit status: 0 identical numbers, 1 other numbers, {BAD_INPUT} not comparable\n\n"
        "Then: apptrain rerun RUN, the same run again\nMore: docs/compare.md",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-o", dest="image", default="", metavar="FILE.png", help="draw it (needs matplotlib)")
    given = parser.parse_args(arguments)
    if len(given.runs) < 2:
        raise BadInput(
            "compare-one-run", "compare: give two run directories or more: apptrain compare RUN RUN"
        )
    from entrypoint.record import compare

    return compare.main(given.runs, as_json=given.json, image=given.image)


def _rerun(arguments: list[str]) -> int:
    parser = parser_class()(
        prog="apptrain rerun",
        usage="apptrain rerun RUN [--cluster NAME] [--go]",
        description="Print the command that does this run again here: its image, code, config, world size "
        "and threads. What cannot be had, and each secret that is not set, is a line on stderr.",
        epilog="Then: the same with --go, and apptrain compare RUN NEW_RUN\nMore: docs/compare.md\n\n"
        f"exit status: 0 printed, {BAD_INPUT} cannot be run again; with --go that of what it starts",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--cluster", default="", metavar="NAME", help="submit it, as this site's profile says"
    )
    parser.add_argument("--go", action="store_true", help="start it")
    given = parser.parse_args(arguments)
    from entrypoint.record import rerun

    return rerun.main(Path(given.run), HOME, given.cluster, os.environ, _run if given.go else None)


def _report(arguments: list[str]) -> int:
    parser = parser_class()(
        prog="apptrain report",
        usage="apptrain report RUN [-o FILE] [--compare OTHER] [--bundle]",
        description="Write one HTML page about a run directory: how it ended, its time line, curves, steps, "
        "ranks, nodes and settings. It needs no network and no other file. Secrets are replaced.",
        epilog=f"exit status: 0 written, {BAD_INPUT} not a run directory, or FILE cannot be written\n\n"
        "More: docs/compare.md",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or that of apptrain scaling")
    parser.add_argument(
        "-o",
        dest="out",
        default="",
        metavar="FILE",
        help="what to write (default: RUN/report.html, with --bundle RUN-support.tar.gz)",
    )
    parser.add_argument("--compare", default="", metavar="OTHER", help="also say what differs from this run")
    parser.add_argument(
        "--bundle",
        action="store_true",
        help="write an archive for a support desk instead: report, manifest, plans, logs, stacks; "
        "no key, no secrets, no checkpoints",
    )
    given = parser.parse_args(arguments)
    from entrypoint.report import command
    from entrypoint.scaling import command as scaling
    from entrypoint.scaling import sweep

    if sweep.is_one(Path(given.run)):
        if given.bundle or given.compare:
            raise BadInput(
                "report-of-scaling",
                f"report: {given.run} is that of a scaling: leave --bundle and --compare out",
            )
        return scaling.report(Path(given.run), given.out, os.environ)
    return command.main(Path(given.run), given.out, bundled=given.bundle, other=given.compare, env=os.environ)


def _explain(arguments: list[str]) -> int:
    parser = parser_class()(
        prog="apptrain explain",
        usage="apptrain explain LOG|DIR|RUN|JOBSCRIPT|- [--json]",
        description="Say what a log means: the first cause, where it stands, what to do. Or what a job "
        "script will run into, line by line. Of any program; nothing of it is run, and nothing sent.",
        epilog="LOG: a file, also gzip; DIR: a folder of logs; RUN: a run directory of ours;\n"
        "JOBSCRIPT: for sbatch or qsub, or a shell script; -: a log that is piped in.\n\n"
        "Then: correct the cause, and the same job again.\nMore: docs/explain.md\n\n"
        "exit status: 0 the cause is known, or the script has something to mend;\n"
        f"1 not known, or nothing to mend; {BAD_INPUT} nothing to read",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", nargs="?", default="", metavar="WHAT", help="what to read")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    if not given.what:
        raise BadInput(
            "explain-what", "explain: give a log, a folder of logs, a run directory, a job script, or -"
        )
    from entrypoint.explain import command

    return command.main(given.what, as_json=given.json)


# --- the image ----------------------------------------------------------------------------------------------


def _image(arguments: list[str]) -> int:
    if arguments and not {"--help", "-h", "--help-all"} & set(arguments):
        _build(arguments[0], arguments[1:])
    names = ""
    if (HOME / "Makefile").exists():
        from containers import stacks

        first, *others = stacks.names()
        names = f": {', '.join([f'{first} (default)', *others])}"
    print(IMAGE_HELP.format(stacks=names), end="")
    return 0


def _build(what: str, arguments: list[str]) -> NoReturn:
    _need_checkout("image")
    known = ("build", "fetch", "verify", "inspect")
    if what == "pull":
        source = next((word for word in arguments if "://" in word), "URL")
        raise BadInput(
            "image-pull",
            "image pull: apptainer does it: "
            f"apptainer pull image.sif {shlex.quote(source)} && export APPTRAIN_IMAGE=$PWD/image.sif",
        )
    if what not in known:
        meant = spelling.meant(what, [*known, "--help"])
        raise BadInput("image-unknown-action", f"image {what}: give one of {', '.join(known)}{meant}")
    parser = parser_class()(prog="apptrain image", allow_abbrev=False)
    parser.takes_empty = True  # type: ignore[attr-defined]
    for name in ("stack", "extra", "offline", "image"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("file", nargs="?", default="")
    given = vars(parser.parse_args(arguments))
    if file := given.pop("file"):
        others = [word for word in arguments if word != file]
        line = shlex.join(["image", what, *others, "--image", file])
        raise BadInput(
            "image-file-without-option",
            f"image {what}: {file} stands without --image: did you mean `{apptrain()} {line}`?",
        )
    from containers import description, stacks

    try:
        stacks.check_name(given["stack"])
        if given["extra"]:
            stacks.check_extra(Path(given["extra"]))
        if what in stacks.WRITES:
            stacks.check_target(given["image"])
        if what != "fetch":
            _need_apptainer(what)
        if what in ("verify", "inspect"):
            description.read(stacks.image_here(given["stack"], given["image"]))
    except stacks.BuildRefused as error:
        raise BadInput(error.id, f"image {what}: {error}") from None
    venv = HOME / (os.environ.get("IMAGE_VENV") or ".venv-image")
    _make_venv(venv, "image")
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    _become([str(venv / "bin" / "python"), str(HOME / "containers" / "build.py"), *options, what])


def _need_apptainer(what: str) -> None:
    if not (shutil.which("apptainer") or shutil.which("singularity")):
        raise BadInput(
            "apptainer-missing",
            f"image {what}: neither apptainer nor singularity is on PATH: load it (module avail apptainer), "
            "or build on a node that has it",
        )


def _make_venv(venv: Path, level: str) -> None:
    """Ends the command if it cannot be made. Ctrl-C reaches tools/venv.sh too, and it is waited for: it
    removes what is unfinished."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as behind `&` in a script; the child would not ignore it any more
        signal.signal(signal.SIGINT, lambda _signum, _frame: None)
    status = subprocess.run([str(HOME / "tools" / "venv.sh"), str(venv), level], check=False).returncode
    signal.signal(signal.SIGINT, before)
    if status:
        sys.exit(status)


def _become(words: Sequence[str]) -> NoReturn:
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        raise BadInput(
            "checkout-incomplete", f"{words[0]} cannot be started ({error.strerror}): use a whole checkout"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
