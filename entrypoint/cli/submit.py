"""`apptrain submit` and `make submit CLUSTER=NAME NODES=N [ARGS=...]`: submits a job to a cluster as its
profile says. Begin at `main`; `plan` makes the command line of sbatch or qsub.

The command line that is printed is the one that is run.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from containers import stacks
from entrypoint.batch import login
from entrypoint.batch.login import CHECKOUT, JobRequest, Submission, Wish, share
from entrypoint.cli import follow, preview
from entrypoint.cli.main import EXIT_STATUS
from entrypoint.cli.profiles import load_checked
from entrypoint.core import spelling
from entrypoint.core.checkout import apptrain, make
from entrypoint.core.errors import BAD_INPUT, BadInput
from entrypoint.plan.commands import elsewhere, split_command, with_dashes
from entrypoint.plan.options import OPTIONS
from entrypoint.plan.profile import CLUSTERS, Profile, expanded, find, host_file, remedy
from entrypoint.plan.sources import HelpFormatter, parser_class

OF_JOB: Final = f"""options of the job, such as
  --device cpu --nproc-per-node 2 --on-failure restart --run-dir DIR
  `apptrain launch --help-all` has them all.

First: apptrain submit --cluster NAME --dry-run -- my_script.py
Then: the same with --follow.
`make submit CLUSTER=NAME ARGS='-- my_script.py'` ends with 2 where this ends
with {BAD_INPUT}.
"""


def main(arguments: Sequence[str]) -> int:
    try:
        options, job = _parse(arguments)
        if isinstance(options.follow, str):
            site = _profile(options.cluster)[0] if options.cluster else None
            return follow.follow(options.follow, site.scheduler if site else "", site)
        profile, file = _profile(options.cluster or os.environ.get("APPTRAIN_PROFILE", ""))
        wish, cwd = _wish(options, job), Path.cwd()
        _check_folder(arguments, job, cwd, os.environ.get("CALLED_FROM", ""))
        submission = plan(profile, file, wish, os.environ, cwd)
        lines = preview.preview_job(_request(profile, wish, os.environ), submission.env, cwd)
        if not options.dry_run:
            _check(profile, submission)
            if options.follow:
                follow.find(profile.scheduler)
        for line in lines:
            _say(line)
        if not profile.tested:
            _say(f"{profile.name} was never run there (tested is empty): check this:")
        print(shlex.join(submission.words), flush=True)
        if options.dry_run:
            return 0
        status, job_id = _submit(job, submission)
        if status or options.follow is None:
            return status
        return follow.follow(job_id, profile.scheduler, profile)
    except (BadInput, stacks.BuildRefused) as error:
        _say(error)
        return error.status


def _say(text: object) -> None:
    print(f"submit: {text}", file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options, and what is the job script's: all options that are not ours, and CMD behind --."""
    before, command = split_command(arguments)
    parser = parser_class()(
        prog="apptrain submit",
        usage="apptrain submit --cluster NAME [options] [job options] [-- CMD ...]",
        description="Submit a job to a cluster, as the profile of its site says. CMD is a script with its "
        "arguments, or -m MODULE; without one, the reference job.",
        epilog=f"{OF_JOB}\n{EXIT_STATUS}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--cluster",
        default="",
        metavar="NAME",
        help="a profile of clusters/, or its path; apptrain site writes one",
    )
    add("--nodes", default="2", metavar="N", help="(default: 2)")
    add("--gpus", default="", metavar="N", help="of each node (default: all that it has)")
    add("--partition", default="", metavar="NAME", help="of Slurm, or a queue of PBS")
    add("--account", default="", metavar="NAME")
    add("--time", default="", metavar="HH:MM:SS")
    add("--options", default="", metavar="WORDS", help="further ones of sbatch or qsub, quoted")
    add("--dry-run", action="store_true", help="show what would run, and submit nothing")
    add("--follow", nargs="?", const=True, metavar="JOB", help="show the job until it ends, or that JOB")
    options, job = parser.parse_known_args(before)
    known = [f"--{option.name}" for option in OPTIONS if not option.plan_only]
    own = [f"--{name.replace('_', '-')}" for name in vars(options)]
    for at, word in enumerate(job):
        if word == "-m" or word.endswith(".py"):
            break  # a script before --, and its own options
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("-") and name not in known:
            if found := elsewhere("submit", job[at:]):
                raise BadInput("option-elsewhere", found)
            meant = spelling.meant(name, [*own, *known, "--help"]) or " (see apptrain submit --help)"
            raise BadInput("submit-unknown-option", f"{word}: no option of submit, nor of a job{meant}")
    if not options.cluster and job[:1] and job[0] in _known():
        rest = [word for word in arguments if word != job[0]]
        line = shlex.join(["submit", "--cluster", job[0], *with_dashes(rest)])
        raise BadInput(
            "submit-no-cluster-option",
            f"{job[0]} stands without --cluster: did you mean `{apptrain()} {line}`?",
        )
    return options, (*job, *(["--", *command] if command else []))


def _check_folder(arguments: Sequence[str], job: Sequence[str], cwd: Path, called_from: str) -> None:
    """Raises BadInput if make, which submits from the checkout, was called in another folder, and CMD is a
    script there. The line that is shown submits from that folder, where a user expects the run to be."""
    _, command = split_command(job)
    script = command[0] if command else next((word for word in job if word.endswith(".py")), "")
    if not script or not called_from or (cwd / script).exists() or not Path(called_from, script).is_file():
        return
    given = [
        word
        for at, word in enumerate(arguments)
        if word not in ("", "--options=") and arguments[at + 1 : at + 2] != [""]
    ]
    raise BadInput(
        "submit-other-folder",
        f"CMD {script} is in {called_from} and not in {cwd}, where make submits from: there, "
        f"`{shlex.join([str(CHECKOUT / 'apptrain'), 'submit', *given])}`",
    )


def _known() -> list[str]:
    return sorted(file.stem for file in CLUSTERS.glob("*.yaml"))


def _profile(name: str) -> tuple[Profile, Path]:
    known = _known()
    choice = f"give one of {', '.join(known)}, or the path of a profile"
    if not name:
        raise BadInput(
            "cluster-missing", f"--cluster is missing: {choice}, {_or_write(CLUSTERS / 'mine.yaml')}"
        )
    file = find(name)
    if not file.exists() and file.parent == CLUSTERS:
        raise BadInput(
            "cluster-unknown",
            f"--cluster {name}: there is no {file}{spelling.meant(name, known) or f': {choice}'}",
        )
    if not file.exists():
        raise BadInput(
            "cluster-no-file", f"--cluster {name}: there is no {file}: check the path, {_or_write(file)}"
        )
    profile, text = load_checked(file, f"--cluster {name}")
    made = host_file(file)
    if not made.exists() or made.read_text(encoding="utf-8") != text:
        raise BadInput(
            "host-file-outdated",
            f"--cluster {name}: {made} is not made from {file.name} as that is now: {remedy(file)}",
        )
    return profile, file


def _or_write(file: Path) -> str:
    shown = os.path.relpath(file) if file.is_absolute() and Path.cwd() in file.parents else file
    line = f"{apptrain()} site -o {shlex.quote(str(shown))}"
    return f"or run `{line}` on your cluster's login node, which writes one"


def _wish(options: argparse.Namespace, arguments: tuple[str, ...]) -> Wish:
    if options.time and not re.fullmatch("[0-9]{1,4}:[0-5][0-9]:[0-5][0-9]", options.time):
        raise BadInput("time-format", f"--time {options.time}: give HH:MM:SS")
    for name in ("partition", "account"):
        if re.search(r"\s", getattr(options, name)):
            raise BadInput("option-one-word", f"--{name} {getattr(options, name)}: give one word")
    try:
        further = tuple(shlex.split(options.options))
    except ValueError as error:
        raise BadInput(
            "options-not-quoted", f"--options {options.options}: {error}: quote it as for a shell"
        ) from None
    return Wish(
        nodes=_number("--nodes", options.nodes),
        gpus=_number("--gpus", options.gpus) if options.gpus else None,
        partition=options.partition,
        account=options.account,
        time=options.time,
        options=further,
        arguments=arguments,
    )


def _number(name: str, text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise BadInput("option-not-positive", f"{name} {text}: give a whole number from 1")
    return int(text)


def _image(profile: Profile, env: Mapping[str, str]) -> Path:
    given = env.get("APPTRAIN_IMAGE", "")
    if "://" in given:
        raise BadInput(
            "image-not-a-file",
            f"APPTRAIN_IMAGE={given}: an image is a file: apptainer pull image.sif {given}, then "
            "APPTRAIN_IMAGE=$PWD/image.sif",
        )
    return Path(given or stacks.find(profile.container.stack).image)


def _check(profile: Profile, submission: Submission) -> None:
    """Raises BadInput where a job would wait in the queue for nothing."""
    image = _image(profile, os.environ)
    if not image.exists():
        stack = f" STACK={profile.container.stack}" if profile.container.stack else ""
        raise BadInput(
            "image-missing",
            f"there is no image {image}: {make(f'image{stack}')}, or give another in APPTRAIN_IMAGE",
        )
    program = submission.words[0]
    if not shutil.which(program):
        raise BadInput(
            "submit-no-scheduler", f"{program} is not in PATH: submit on a login node of that cluster"
        )


def _submit(arguments: tuple[str, ...], submission: Submission) -> tuple[int, str]:
    """Run the command line; returns its status, and the job's id in its last line."""
    try:
        if submission.file:
            submission.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(submission.file, "wb", opener=_private) as file:
                file.write(b"".join(os.fsencode(word) + b"\0" for word in arguments))
    except OSError as error:
        raise BadInput(
            "submit-record-unwritable", f"{submission.file} cannot be written: {error.strerror}"
        ) from None
    done = subprocess.run(submission.words, check=False, stdout=subprocess.PIPE)
    print(done.stdout.decode(errors="replace"), end="", flush=True)
    words = done.stdout.decode(errors="replace").split()
    return done.returncode, words[-1] if words else ""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# --- the command line ---------------------------------------------------------------------------------------


def plan(profile: Profile, file: Path, wish: Wish, env: Mapping[str, str], cwd: Path) -> Submission:
    """What submits, from `cwd` and with `env`, with the profile in `file`.

    Raises BadInput where the profile lacks what a request needs, or cannot give what is wished for.
    """
    wish = _completed(profile, wish, env)
    name = file.stem if file.resolve().parent == CLUSTERS.resolve() else str(file.resolve())
    return login.of(profile.scheduler).submission(profile, name, wish, env, cwd)


def _completed(profile: Profile, wish: Wish, env: Mapping[str, str]) -> Wish:
    """With the profile's own where nothing is wished for."""
    nodes, request = profile.nodes, profile.request
    if nodes.gpus is None:
        raise BadInput(
            "profile-no-gpus", f"{profile.name}: nodes gpus is missing: say how many GPUs a node has, or 0"
        )
    gpus = nodes.gpus if wish.gpus is None else wish.gpus
    if gpus > nodes.gpus:
        raise BadInput(
            "gpus-above-node", f"--gpus {gpus}: a node of {profile.name} has {nodes.gpus}: ask for more nodes"
        )
    if nodes.whole and gpus < nodes.gpus:
        raise BadInput(
            "gpus-whole-nodes",
            f"--gpus {gpus}: nodes of {profile.name} come whole, with {nodes.gpus}: leave --gpus out "
            f"(fewer ranks: --nproc-per-node {gpus})",
        )
    return replace(
        wish,
        gpus=gpus,
        partition=wish.partition or expanded(request.partition, env, profile.path),
        account=wish.account or expanded(request.account, env, profile.path),
        time=wish.time or request.time,
        options=(*(expanded(word, env, profile.path) for word in request.options), *wish.options),
    )


def _request(profile: Profile, wish: Wish, env: Mapping[str, str]) -> JobRequest:
    """What the scheduler is asked for; what the site leaves open, the job script's own lines say."""
    wish = _completed(profile, wish, env)
    script = login.script(profile).read_text(encoding="utf-8")
    time, warns = login.of(profile.scheduler).limits(script)
    return JobRequest(
        profile=profile,
        nodes=wish.nodes,
        gpus=wish.gpus or 0,
        cpus=share(profile.nodes.cpus, profile, wish.gpus or 0),
        time=wish.time or time,
        warns=profile.request.stop_before or warns,
        words=wish.options,
        arguments=wish.arguments,
        image=_image(profile, env),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
