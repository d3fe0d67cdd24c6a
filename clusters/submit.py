"""Submit the job script to a cluster, as its profile says: `make submit CLUSTER=NAME NODES=N [ARGS=...]`.

The secret: how a request for nodes is spelled for sbatch and for qsub. The command line that `plan` returns
is what is printed and what is run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from clusters.render import Parser, host_file, load_checked, remedy
from containers import stacks
from entrypoint.errors import BadInput
from entrypoint.plan.profile import CLUSTERS, GPUS_ASKED_FOR, VARIABLE, Profile, find

CHECKOUT: Final = CLUSTERS.resolve().parent
SCRIPTS: Final = {"slurm": "slurm/multinode.sbatch", "pbs": "pbs/multinode.pbs"}
PROGRAMS: Final = {"slurm": "sbatch", "pbs": "qsub"}
CARRIED: Final = re.compile(r"""[^,"'\\\x00-\x1f\x7f]*""")
"""What a value may hold in the list of `qsub -v`, whose quoting differs from PBS to PBS."""
ARGUMENTS: Final = ("APPTRAIN_ARGS", "APPTRAIN_ARGS_FILE")
EVERYWHERE: Final = ("HOME", "USER", "LOGNAME")


@dataclass(frozen=True)
class Wish:
    """What is asked for; None and '' leave it to the profile."""

    nodes: int
    gpus: int | None = None
    """On each node."""
    partition: str = ""
    account: str = ""
    time: str = ""
    options: tuple[str, ...] = ()
    """Further words of sbatch or qsub."""
    arguments: tuple[str, ...] = ()
    """Of the job script: options, then -- and CMD."""


@dataclass(frozen=True)
class Submission:
    words: list[str]
    """The command line."""
    file: Path | None = None
    """To be written first, with the arguments that the command line cannot hold."""


def main(arguments: Sequence[str]) -> int:
    try:
        options, rest = _parse(arguments)
        profile, file = _profile(options.cluster or os.environ.get("APPTRAIN_PROFILE", ""))
        submission = plan(profile, file, _wish(options, rest), os.environ, Path.cwd())
        if not options.dry_run:
            _check(profile, submission)
        if not profile.tested:
            print(
                f"submit: {profile.name} was never run there (tested is empty): check this:", file=sys.stderr
            )
        print(shlex.join(submission.words), flush=True)
        return 0 if options.dry_run else _submit(rest, submission)
    except (BadInput, stacks.BadInput) as error:
        print(f"submit: {error}", file=sys.stderr)
        return error.status


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options, and what stands behind the first --, which is the job script's."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = Parser(
        prog="clusters/submit.py",
        usage="clusters/submit.py --cluster NAME --nodes N [options] [-- ARGS of the job script]",
        description=__doc__.split("\n\n")[0],
    )
    parser.add_argument("--cluster", default="", metavar="NAME", help="a profile of clusters/, or its path")
    parser.add_argument("--nodes", default="2", metavar="N", help="(%(default)s)")
    parser.add_argument("--gpus", default="", metavar="N", help="of each node (all that it has)")
    parser.add_argument("--partition", default="", metavar="NAME", help="of Slurm, or a queue of PBS")
    parser.add_argument("--account", default="", metavar="NAME")
    parser.add_argument("--time", default="", metavar="HH:MM:SS")
    parser.add_argument(
        "--options", default="", metavar="WORDS", help="further ones of sbatch or qsub, quoted"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command line, and submit nothing")
    return parser.parse_args(arguments[:at]), tuple(arguments[at + 1 :])


def _profile(name: str) -> tuple[Profile, Path]:
    if not name:
        known = ", ".join(sorted(file.stem for file in CLUSTERS.glob("*.yaml")))
        raise BadInput(f"CLUSTER is missing: give one of {known}, or the path of a profile")
    file = find(name)
    if not file.exists() and file.parent == CLUSTERS:
        known = ", ".join(sorted(file.stem for file in CLUSTERS.glob("*.yaml")))
        raise BadInput(f"CLUSTER={name}: there is no {file}: give one of {known}, or the path of a profile")
    profile, text = load_checked(file, f"CLUSTER={name}")
    made = host_file(file)
    if not made.exists() or made.read_text(encoding="utf-8") != text:
        raise BadInput(f"CLUSTER={name}: {made} is not made from {file.name} as that is now: {remedy(file)}")
    return profile, file


def _wish(options: argparse.Namespace, arguments: tuple[str, ...]) -> Wish:
    if options.time and not re.fullmatch("[0-9]{1,4}:[0-5][0-9]:[0-5][0-9]", options.time):
        raise BadInput(f"TIME={options.time}: give HH:MM:SS")
    for name in ("partition", "account"):
        if re.search(r"\s", getattr(options, name)):
            raise BadInput(f"{name.upper()}={getattr(options, name)}: give one word")
    try:
        further = tuple(shlex.split(options.options))
    except ValueError as error:
        raise BadInput(f"OPTIONS={options.options}: {error}: quote it as for a shell") from None
    return Wish(
        nodes=_number("NODES", options.nodes),
        gpus=_number("GPUS", options.gpus) if options.gpus else None,
        partition=options.partition,
        account=options.account,
        time=options.time,
        options=further,
        arguments=arguments,
    )


def _number(name: str, text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise BadInput(f"{name}={text}: give a whole number from 1")
    return int(text)


def _check(profile: Profile, submission: Submission) -> None:
    """Raises BadInput where a job would wait in the queue for nothing."""
    image = Path(os.environ.get("APPTRAIN_IMAGE") or stacks.find(profile.container.stack).image)
    if not image.exists():
        stack = f" STACK={profile.container.stack}" if profile.container.stack else ""
        raise BadInput(f"there is no image {image}: make image{stack}, or give another in APPTRAIN_IMAGE")
    program = submission.words[0]
    if not shutil.which(program):
        raise BadInput(f"{program} is not in PATH: submit on a login node of that cluster")


def _submit(arguments: tuple[str, ...], submission: Submission) -> int:
    """Run the command line; returns its status."""
    try:
        if submission.file:
            submission.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(submission.file, "wb", opener=_private) as file:
                file.write(b"".join(os.fsencode(word) + b"\0" for word in arguments))
    except OSError as error:
        raise BadInput(f"{submission.file} cannot be written: {error.strerror}") from None
    return subprocess.run(submission.words, check=False).returncode


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# --- the command line ---------------------------------------------------------------------------------------


def plan(profile: Profile, file: Path, wish: Wish, env: Mapping[str, str], cwd: Path) -> Submission:
    """What submits, from `cwd` and with `env`, with the profile in `file`.

    Raises BadInput where the profile lacks what a request needs, or cannot give what is wished for.
    """
    wish = _completed(profile, wish, env)
    name = file.stem if file.resolve().parent == CLUSTERS.resolve() else str(file.resolve())
    script = CHECKOUT / SCRIPTS[profile.scheduler]
    path = SCRIPTS[profile.scheduler] if cwd.resolve() == CHECKOUT else str(script)
    if profile.scheduler == "slurm":
        job = ["--profile", name, *wish.arguments]
        if profile.request.form != "wrapped":
            return Submission(["sbatch", *_slurm(profile, wish), path, *job])
        wrap = "exec " + shlex.join(["bash", str(script), *job])
        return Submission(["sbatch", *_directives(script), *_slurm(profile, wish), f"--wrap={wrap}"])
    if not script.exists():
        raise BadInput(f"there is no {script}: use a whole checkout")
    directives = ["-C", "", *_directives(script)] if profile.request.form == "totals" else []
    arguments, arguments_file = _arguments(wish.arguments, cwd)
    needed = _needed(profile, name, env, cwd)
    if arguments:
        needed = {key: value for key, value in needed.items() if key not in ARGUMENTS}
    carried = _carried({**needed, **arguments})
    return Submission(["qsub", *directives, *_pbs(profile, wish), "-v", carried, path], arguments_file)


def _completed(profile: Profile, wish: Wish, env: Mapping[str, str]) -> Wish:
    """With the profile's own where nothing is wished for."""
    nodes, request = profile.nodes, profile.request
    if nodes.gpus is None:
        raise BadInput(f"{profile.name}: nodes gpus is missing: say how many GPUs a node has, or 0")
    gpus = nodes.gpus if wish.gpus is None else wish.gpus
    if gpus > nodes.gpus:
        raise BadInput(f"GPUS={gpus}: a node of {profile.name} has {nodes.gpus}: ask for more nodes")
    if nodes.whole and gpus < nodes.gpus:
        raise BadInput(
            f"GPUS={gpus}: nodes of {profile.name} come whole, with {nodes.gpus}: leave GPUS out "
            f"(fewer ranks: ARGS='--nproc-per-node {gpus}')"
        )
    return replace(
        wish,
        gpus=gpus,
        partition=wish.partition or _expanded(profile, "partition", request.partition, env),
        account=wish.account or _expanded(profile, "account", request.account, env),
        time=wish.time or request.time,
        options=(*(_expanded(profile, "options", word, env) for word in request.options), *wish.options),
    )


def _expanded(profile: Profile, key: str, text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not env.get(name):
            raise BadInput(f"{profile.name}: request {key} names ${name}, which is not set here: set it")
        return env[name]

    return VARIABLE.sub(value, text)


def _share(all_of_it: int | None, profile: Profile, gpus: int) -> int | None:
    """What goes with that many of a node's GPUs."""
    if all_of_it is None or not profile.nodes.gpus:
        return all_of_it
    return max(1, all_of_it * gpus // profile.nodes.gpus)


def _slurm(profile: Profile, wish: Wish) -> list[str]:
    """Options that win over each of the script's own directives that are of a site."""
    gpus = wish.gpus or 0
    cpus, memory = _share(profile.nodes.cpus, profile, gpus), _share(profile.nodes.memory_gib, profile, gpus)
    asked = (profile.request.gpus or GPUS_ASKED_FOR["slurm"]).format(gpus=gpus)
    words = [f"--nodes={wish.nodes}"]
    if wish.partition:
        words.append(f"--partition={wish.partition}")
    if wish.account:
        words.append(f"--account={wish.account}")
    given = [asked] if gpus and not profile.request.nodes_only else []
    if profile.request.form != "wrapped" and not any(word.startswith("--gpus-per-node=") for word in given):
        words.append("--gpus-per-node=0")  # in place of the script's own
    words += given
    if cpus:
        words.append(f"--cpus-per-task={cpus}")
    if memory or profile.nodes.whole:
        words.append(f"--mem={memory}G" if memory else "--mem=0")
    if wish.time:
        words.append(f"--time={wish.time}")
    if profile.request.stop_before:
        words.append(f"--signal=B:USR2@{profile.request.stop_before}")
    return [*words, *wish.options]


def _pbs(profile: Profile, wish: Wish) -> list[str]:
    request, gpus = profile.request, wish.gpus or 0
    cpus, memory = _share(profile.nodes.cpus, profile, gpus), _share(profile.nodes.memory_gib, profile, gpus)
    times = wish.nodes if request.form == "totals" else 1
    resources = []
    if cpus and not request.nodes_only:
        resources.append(f"ncpus={cpus * times}")
    if gpus and not request.nodes_only:
        resources.append((request.gpus or GPUS_ASKED_FOR["pbs"]).format(gpus=gpus * times))
    if memory and not request.nodes_only:
        resources.append(f"mem={memory * times}gb")
    if request.form == "totals":
        words = [word for resource in resources for word in ("-l", resource)]
    else:
        words = ["-l", ":".join([f"select={wish.nodes}", *resources, *request.chunk]), "-l", "place=scatter"]
    if wish.time:
        words += ["-l", f"walltime={wish.time}"]
    if wish.partition:
        words += ["-q", wish.partition]
    if wish.account:
        words += [request.account_option, wish.account]
    return [*words, *wish.options]


def _directives(script: Path) -> list[str]:
    """The script's own directives but those that name resources, for where they do not count as such: where
    -l ncpus= stands on the command line, qsub refuses a select in the script."""
    words = []
    for text in script.read_text(encoding="utf-8").splitlines():
        if text.startswith(("#PBS ", "#SBATCH ")):
            found = shlex.split(text.partition(" ")[2], comments=True)
            if found and not found[0].startswith(("-l", "--nodes=", "--gpus-per-node=")):
                words += found
    return words


# --- what crosses to a job of PBS ---------------------------------------------------------------------------


def _needed(profile: Profile, name: str, env: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """What the job has to know beside its arguments: PBS carries no more than it is told to."""
    values = {key: value for key, value in env.items() if key.startswith("APPTRAIN_")}
    if profile.request.stop_before:
        values.setdefault("APPTRAIN_STOP_BEFORE", str(profile.request.stop_before))
    for text in (profile.scratch, profile.container.program, *profile.container.binds):
        named = {match[1] or match[2] for match in VARIABLE.finditer(text)}
        values.update({key: env[key] for key in named if key in env and key not in EVERYWHERE})
    values["APPTRAIN_PROFILE"] = name
    if cwd.resolve() != CHECKOUT:
        values["APPTRAIN_HOME"] = str(CHECKOUT)
    return values


def _arguments(arguments: tuple[str, ...], cwd: Path) -> tuple[dict[str, str], Path | None]:
    """The variables that hand over the job script's arguments, and the file of those that fit no variable."""
    if not arguments:
        return {}, None
    joined = shlex.join(arguments)
    if CARRIED.fullmatch(joined):
        return {"APPTRAIN_ARGS": joined}, None
    # The same arguments have the same file: jobs that wait for it, or run again, find what they were given.
    digest = hashlib.sha256(os.fsencode("\0".join(arguments))).hexdigest()
    file = cwd / "runs" / "arguments" / digest[:16]
    return {"APPTRAIN_ARGS_FILE": str(file)}, file


def _carried(values: Mapping[str, str]) -> str:
    """The list of -v."""
    for key, value in values.items():
        if not CARRIED.fullmatch(value):
            raise BadInput(
                f"{key}={value!r}: qsub -v carries no commas, quotes, backslashes and line breaks: "
                "use a path without them, or the profile"
            )
    return ",".join(f"{key}={value}" for key, value in sorted(values.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
