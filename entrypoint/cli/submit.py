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
from entrypoint.batch import native as native_options
from entrypoint.batch.login import CHECKOUT, JobRequest, Submission, Wish, share
from entrypoint.batch.native import NativeOption
from entrypoint.cli import follow, preview
from entrypoint.cli.main import HELP_ALL, exit_status, print_all_options
from entrypoint.cli.profiles import is_made, load_checked
from entrypoint.core import files, image_header, spelling
from entrypoint.core.checkout import apptrain, make
from entrypoint.core.errors import BAD_INPUT, BadInput
from entrypoint.plan import passed
from entrypoint.plan.commands import elsewhere, split_command, with_dashes
from entrypoint.plan.options import OPTIONS, flag
from entrypoint.plan.profile import BIND_FORM, CLUSTERS, Profile, expanded, find, host_file, remedy
from entrypoint.plan.sources import HelpFormatter, parser_class
from entrypoint.schedulers.known import KNOWN, words_of

NODES: Final = "2"
"""Of a job for which nobody says how many."""
OF_JOB: Final = f"""options of sbatch or qsub go to them as they are, and win over the profile's:
  --qos debug --array 0-19 -J my_job, or under PBS -l storage=gdata/x -J 0-19
options of the job, such as
  --device cpu --nproc-per-node 2 --on-failure restart --secrets FILE
  `apptrain submit --help-all` has them all.

First: apptrain submit --cluster NAME --dry-run -- my_script.py
Then: the same with --follow. If it fails: apptrain explain RUN
`make submit CLUSTER=NAME ARGS='-- my_script.py'` ends with 2 where this ends
with {BAD_INPUT}.
"""
STATUS: Final = """  N   otherwise that of sbatch or qsub, or with --follow that of the job
      (`apptrain launch --help`); 69: its end is not known; 130: Ctrl-C"""


def main(arguments: Sequence[str]) -> int:
    try:
        options, job = _parse(arguments)
        if isinstance(options.follow, str):
            site = _profile(options.cluster)[0] if options.cluster else None
            return follow.follow(options.follow, site.scheduler if site else "", site)
        profile, file = _profile(options.cluster or os.environ.get("APPTRAIN_PROFILE", ""))
        cwd = Path.cwd()
        wish = _wish(options, job, cwd)
        env = {**os.environ, **wish.variables}
        _check_folder(arguments, job, cwd, env.get("CALLED_FROM", ""))
        submission = plan(profile, file, wish, env, cwd)
        if files.is_there(_image(profile, env)):
            image_header.check(_image(profile, env))
        lines = preview.preview_job(_request(profile, wish, env), submission.env, cwd)
        if not options.dry_run:
            _check(profile, submission, env)
            if options.follow:
                follow.find(profile.scheduler)
        for line in (*submission.said, *lines):
            _say(line)
        if not profile.tested:
            _say(f"{profile.name} was never run there (tested is empty): check this:")
        set_for_it = [f"{name}={shlex.quote(value)}" for name, value in submission.variables.items()]
        print(" ".join([*set_for_it, shlex.join(submission.words)]), flush=True)
        if options.dry_run:
            return 0
        status, answer = _submit(job, submission, env)
        if status or options.follow is None:
            return status
        return follow.follow_submitted(answer, profile)
    except (BadInput, stacks.BuildRefused) as error:
        _say(error)
        return error.status


def _say(text: object) -> None:
    print(f"apptrain: {text}", file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options, and what is the job script's: its options, and CMD behind --. What is sbatch's or qsub's
    is `options.native`."""
    before, command = split_command(arguments)
    parser = _parser()
    if HELP_ALL in before:
        print_all_options(parser, job=True)
        sys.exit(0)
    own, native = _sorted(before, is_cmd_given=bool(command), parser=parser)
    options, job = parser.parse_known_args(own)
    options.native = native
    if not options.cluster and job[:1] and job[0] in _known():
        rest = [word for word in arguments if word != job[0]]
        line = shlex.join(["submit", "--cluster", job[0], *with_dashes(rest)])
        raise BadInput(
            "submit-no-cluster-option",
            f"{job[0]} stands without --cluster: did you mean `{apptrain()} {line}`?",
        )
    return options, (*job, *(["--", *command] if command else []))


def _parser() -> argparse.ArgumentParser:
    parser = parser_class()(
        prog="apptrain submit",
        usage="apptrain submit --cluster NAME [options] [job options] [-- CMD ...]",
        description="Submit a job to a cluster, as the profile of its site says. CMD is a script with its "
        "arguments, or -m MODULE; without one, the reference job.",
        epilog=f"{OF_JOB}\n{exit_status('0', '64')}\n{STATUS}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.takes_empty = True  # type: ignore[attr-defined]
    add = parser.add_argument
    add(
        "--cluster",
        default="",
        metavar="NAME",
        help="a profile of clusters/, or its path; apptrain site writes one",
    )
    add("--nodes", metavar="N", help=f"nodes of the job (default: {NODES})")
    add("--gpus-per-node", default="", metavar="N", help="GPUs of each node (default: all)")
    add("--gpus", default="", metavar="N", help=argparse.SUPPRESS)
    add("--partition", "--queue", default="", metavar="NAME", help="of Slurm, or a queue of PBS")
    add("--account", "--project", default="", metavar="NAME", help="who pays")
    add(
        "--time",
        default="",
        metavar="TIME",
        help="minutes, [[HH:]MM:]SS, or D-HH[:MM[:SS]]; also --walltime HH:MM:SS",
    )
    add("--walltime", default="", metavar="TIME", help=argparse.SUPPRESS)
    add("--image", default="", metavar="FILE", help="the image (default: APPTRAIN_IMAGE, or the profile's)")
    add(
        "--bind",
        action="append",
        default=[],
        metavar="SRC[:DST[:ro]]",
        help="show a folder in the image; may be given several times (default: APPTRAIN_BIND)",
    )
    add(
        "--pass",
        dest="passed",
        action="append",
        default=[],
        metavar="NAME",
        help="pass a variable, or PREFIX_*, to the ranks (default: APPTRAIN_PASS)",
    )
    add("--options", action="append", default=[], metavar="WORDS", help="further words for sbatch or qsub")
    add("--dry-run", action="store_true", help="show what would run, and submit nothing")
    add("--follow", nargs="?", const=True, metavar="JOB", help="show the job until it ends, or that JOB")
    return parser


def _sorted(
    before: Sequence[str], *, is_cmd_given: bool, parser: argparse.ArgumentParser
) -> tuple[list[str], list[NativeOption]]:
    """(the words for the parser and the job script, the options of sbatch or qsub). Raises BadInput for an
    option that nobody knows."""
    valued, flags = _own_names(parser)
    scheduler = _scheduler(before)
    tables = {name: login.of(name).TABLE for name in ([scheduler] if scheduler else _schedulers())}
    own: list[str] = []
    native: list[NativeOption] = []
    at = 0
    while at < len(before):
        word = before[at]
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")
        is_script = word.endswith(".py") or (word == "-m" and not is_cmd_given and not _is_mail(before[at:]))
        if is_script:  # before --, and its own options
            own += before[at:]
            break
        following = before[at + 1 : at + 2]
        if name == "--gpus-per-node" and scheduler == "slurm" and (typed := _typed_gpus(before[at:])):
            native.append(typed)
            own.append(f"--gpus-per-node={typed.value.rpartition(':')[2]}")
            at += len(typed.words)
            continue
        if name in (*valued, *flags) or not word.startswith("-") or word in ("-h", "--help"):
            own.append(word)
            if name in valued and not equals and following:
                # A value may begin with a dash; argparse takes such a one in the same word only.
                own[-1:] = [f"{word}={following[0]}"] if name == "--options" else [word, *following]
                at += 1
            at += 1
            continue
        option = next(
            filter(None, (native_options.read(before[at:], table) for table in tables.values())), None
        )
        if option is None:
            raise BadInput("submit-unknown-option", _unknown(before[at:], scheduler, [*valued, *flags]))
        at += len(option.words)
        ours = words_of(scheduler).short_options.get(option.words[0][:2], "") if scheduler else ""
        if ours and not option.words[0].startswith("--"):
            own.append(f"{ours}={option.value}")
        elif scheduler and option.name in tables[scheduler].refused:
            raise BadInput(
                "native-refused",
                f"{option} cannot be handed to {tables[scheduler].program}: "
                f"{tables[scheduler].refused[option.name]}",
            )
        else:
            native.append(option)
    return own, native


def _own_names(parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """(our options with a value, those without): of submit and of a job."""
    actions = [action for action in parser._actions if action.nargs is None]
    valued = [name for action in actions for name in action.option_strings]
    flags = ["--dry-run", "--follow"]
    for option in OPTIONS:
        if not option.plan_only:
            (flags if option.parse is flag else valued).append(f"--{option.name}")
    return valued, flags


def _typed_gpus(words: Sequence[str]) -> NativeOption | None:
    """Of `--gpus-per-node=TYPE:N`, which is sbatch's as it stands; None for a bare number."""
    option = native_options.read(words, login.of("slurm").TABLE)
    return option if option and ":" in option.value else None


def _is_mail(words: Sequence[str]) -> bool:
    """Whether `-m` with these is qsub's, for mail, and no module."""
    return re.fullmatch("[abejn]{1,4}", "".join(words[1:2])) is not None


def _schedulers() -> list[str]:
    return [known.name for known in KNOWN]


def _scheduler(before: Sequence[str]) -> str:
    """Of the profile that these words name; empty if that is not known."""
    name = os.environ.get("APPTRAIN_PROFILE", "")
    for at, word in enumerate(before):
        if word == "--cluster":
            name = "".join(before[at + 1 : at + 2])
        elif word.startswith("--cluster="):
            name = word.partition("=")[2]
    try:
        return _profile(name)[0].scheduler
    except BadInput:
        return ""  # which is said later


def _unknown(words: Sequence[str], scheduler: str, own: Sequence[str]) -> str:
    """What to say of an option that is neither ours nor the scheduler's."""
    word, name = words[0], words[0].partition("=")[0]
    if found := elsewhere("submit", words):
        return found
    short = name if name.startswith("--") else name[:2]
    tables = {other: login.of(other).TABLE for other in _schedulers()}
    others = [table for other, table in tables.items() if other != scheduler and short in table.names]
    here = tables[scheduler] if scheduler else None
    instead = f"give {here.called[short]}" if here and short in here.called else "leave it out"
    if here and short in here.called and not others:
        return f"{word}: {here.program} has no such option: {instead}"
    if here and others:
        return f"{word} is {others[0].program}'s, and this cluster has {words_of(scheduler).title}: {instead}"
    programs = " or ".join(table.program for other, table in tables.items() if scheduler in ("", other))
    known = [*own, "--help", *(here.names if here else ())]
    known = [each for each in known if each != "--gpus"]  # an old name, and another thing to sbatch
    meant = spelling.meant(name.replace("_", "-"), known)
    meant = meant or f" (see apptrain submit --help; {programs} gets it with --options={shlex.quote(word)})"
    return f"{word}: no option of submit, of a job or of {programs}{meant}"


def _check_folder(arguments: Sequence[str], job: Sequence[str], cwd: Path, called_from: str) -> None:
    """Raises BadInput if make, which submits from the checkout, was called in another folder, and CMD is a
    script there. The line that is shown submits from that folder, where a user expects the run to be."""
    _, command = split_command(job)
    script = command[0] if command else next((word for word in job if word.endswith(".py")), "")
    if not script or not called_from or files.is_there(cwd / script):
        return
    if not files.is_regular(Path(called_from, script)):
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
            "cluster-missing",
            f"--cluster is missing: {choice}, {_or_write(CLUSTERS / 'mine.yaml')}; without a profile: "
            "sbatch slurm/multinode.sbatch -- CMD, qsub pbs/multinode.pbs",
        )
    file = find(name)
    is_there = files.is_there(file)
    if not is_there and file.parent == CLUSTERS:
        meant = spelling.meant(name, known) or f": {choice}, {_or_write(file)}"
        raise BadInput("cluster-unknown", f"--cluster {name}: there is no {file}{meant}")
    if not is_there:
        raise BadInput(
            "cluster-no-file", f"--cluster {name}: there is no {file}: check the path, {_or_write(file)}"
        )
    profile, text = load_checked(file, f"--cluster {name}")
    made = host_file(file)
    if not is_made(made, text):
        raise BadInput(
            "host-file-outdated",
            f"--cluster {name}: {made} is not made from {file.name} as that is now: {remedy(file)}",
        )
    return profile, file


def _or_write(file: Path) -> str:
    shown = os.path.relpath(file) if file.is_absolute() and Path.cwd() in file.parents else file
    line = f"{apptrain()} site -o {shlex.quote(str(shown))}"
    return f"or run `{line}` on your cluster's login node, which writes one"


def _variables(options: argparse.Namespace, cwd: Path) -> dict[str, str]:
    """What the job reads from variables, and is given by options here. Raises BadInput."""
    binds = []
    for spec in options.bind:
        bind = spec if spec.startswith("/") else f"{cwd}/{spec}"
        is_bind = re.fullmatch(BIND_FORM, bind) or Path(bind).exists()  # a name may have a colon
        if "\n" in spec or not spec or spec.startswith((":", "~")) or not is_bind:
            raise BadInput("submit-bind-malformed", f"--bind {spec}: give SRC[:DST[:ro]] with paths from /")
        binds.append(bind)
    names = " ".join(options.passed).split()
    for name in names:
        if not passed.FORM.fullmatch(name):
            raise BadInput("submit-pass-malformed", f"--pass {name}: give NAME or PREFIX_*, in quotes")
        if passed.matches(name, passed.table("never")):
            raise BadInput("submit-pass-never", f"--pass {name}: it never reaches a rank: leave it out")
    image = options.image if "://" in options.image else str(cwd / options.image)
    given = {
        "APPTRAIN_IMAGE": image if options.image else "",
        "APPTRAIN_BIND": "\n".join(binds),
        "APPTRAIN_PASS": " ".join(names),
    }
    return {name: value for name, value in given.items() if value}


def _wish(options: argparse.Namespace, arguments: tuple[str, ...], cwd: Path) -> Wish:
    time = options.time
    if options.walltime:
        time = options.walltime
        if time.isdecimal() or login.seconds(time) is None:
            raise BadInput(
                "walltime-format",
                f"--walltime {time}: give MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; "
                "a number alone could be seconds or minutes",
            )
    elif time and login.seconds(time) is None:
        raise BadInput(
            "time-format", f"--time {time}: give minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
        )
    for name in ("partition", "account"):
        if re.search(r"\s", getattr(options, name)):
            raise BadInput("option-one-word", f"--{name} {getattr(options, name)}: give one word")
    further: list[str] = []
    for words in options.options:
        try:
            further += shlex.split(words)
        except ValueError as error:
            raise BadInput(
                "options-not-quoted", f"--options {words}: {error}: quote it as for a shell"
            ) from None
    if options.gpus:
        _say("--gpus is taken for --gpus-per-node")
    gpus = options.gpus_per_node or options.gpus
    name = "--gpus-per-node" if options.gpus_per_node else "--gpus"
    given = {
        "nodes": options.nodes,
        "gpus": gpus,
        "partition": options.partition,
        "account": options.account,
        "time": time,
    }
    return Wish(
        nodes=_number("--nodes", NODES if options.nodes is None else options.nodes),
        gpus=_number(name, gpus) if gpus else None,
        partition=options.partition,
        account=options.account,
        time=time,
        options=(*further, *(word for option in options.native for word in option.words)),
        arguments=arguments,
        variables=_variables(options, cwd),
        typed=frozenset(name for name, text in given.items() if text),
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
            f"{given}: an image is a file: apptainer pull image.sif {given}, then --image image.sif",
        )
    if given:
        return Path(given)
    return stacks.image_on(_stack(profile, env).image, profile.nodes.architecture or os.uname().machine)


def _stack(profile: Profile, env: Mapping[str, str]) -> stacks.Stack:
    """Whose image the job takes. Raises BadInput or BuildRefused if none runs with the site's driver."""
    nodes = profile.nodes
    found = stacks.choose(profile.container.stack, nodes.driver, nodes.architecture)
    if not found.fits(nodes.driver, nodes.architecture) and not env.get("APPTRAIN_CUDA_COMPAT"):
        other = stacks.choose("", nodes.driver, nodes.architecture)
        raise BadInput(
            "submit-driver",
            f"{profile.name}: container stack {found.name} needs NVIDIA driver {found.driver}, and nodes "
            f"driver is {nodes.driver}: give stack {other.name} or leave it out, or name CUDA's forward "
            "compatibility in APPTRAIN_CUDA_COMPAT",
        )
    return found


def _make_image(profile: Profile, env: Mapping[str, str]) -> str:
    """The command that makes the image which a job would take."""
    stack = None if env.get("APPTRAIN_IMAGE") else _stack(profile, env)
    choice = f" STACK={stack.name}" if stack and not stack.is_default else ""
    there = profile.nodes.architecture
    where = f" on a node with {there}" if there and there != os.uname().machine else ""
    return make(f"image{choice}") + where


def _check(profile: Profile, submission: Submission, env: Mapping[str, str]) -> None:
    """Raises BadInput where a job would wait in the queue for nothing."""
    image = _image(profile, env)
    if not files.is_there(image):
        text = f"there is no image {image}: "
        if env.get("APPTRAIN_IMAGE"):
            text += f"correct the path, or leave it out: `{_make_image(profile, {})}` builds one of ours"
        else:
            text += f"{_make_image(profile, env)}, or give another with --image"
        raise BadInput("image-missing", text)
    architecture = image_header.check(image)
    theirs = profile.nodes.architecture or login.of(profile.scheduler).architecture(submission.words)
    if architecture and theirs and architecture != theirs:
        raise BadInput(
            "image-architecture",
            f"the image {image} is for {architecture}, and the nodes have {theirs}: build it on such a node, "
            "or give another with --image",
        )
    program = submission.words[0]
    if not shutil.which(program):
        raise BadInput(
            "submit-no-scheduler", f"{program} is not in PATH: submit on a login node of that cluster"
        )


def _submit(arguments: tuple[str, ...], submission: Submission, env: Mapping[str, str]) -> tuple[int, str]:
    """Run the command line; returns its status, and what it has printed."""
    try:
        if submission.file:
            submission.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(submission.file, "wb", opener=_private) as file:
                file.write(b"".join(os.fsencode(word) + b"\0" for word in arguments))
    except OSError as error:
        raise BadInput(
            "submit-record-unwritable", f"{submission.file} cannot be written: {error.strerror}"
        ) from None
    done = subprocess.run(submission.words, env=env, check=False, stdout=subprocess.PIPE)
    answer = done.stdout.decode(errors="replace")
    print(answer, end="", flush=True)
    return done.returncode, answer


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# --- the command line ---------------------------------------------------------------------------------------


def plan(profile: Profile, file: Path, wish: Wish, env: Mapping[str, str], cwd: Path) -> Submission:
    """What submits, from `cwd` and with `env`, with the profile in `file`.

    Raises BadInput where the profile lacks what a request needs, or cannot give what is wished for.
    """
    wish = _completed(profile, wish, env)
    file = file.parent.resolve() / file.name  # a link's own name: its host file is beside it
    name = file.stem if file.parent == CLUSTERS.resolve() else str(file)
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
            "gpus-above-node",
            f"--gpus-per-node {gpus}: a node of {profile.name} has {nodes.gpus}: ask for more nodes",
        )
    if nodes.whole and gpus < nodes.gpus:
        raise BadInput(
            "gpus-whole-nodes",
            f"--gpus-per-node {gpus}: nodes of {profile.name} come whole, with {nodes.gpus}: leave it out "
            f"(fewer ranks: --nproc-per-node {gpus})",
        )
    whole = replace(
        wish,
        gpus=gpus,
        partition=wish.partition or expanded(request.partition, env, profile.path),
        account=wish.account or expanded(request.account, env, profile.path),
        time=wish.time or request.time,
        given=tuple(expanded(word, env, profile.path) for word in request.options),
    )
    for name in request.needs:
        if not getattr(whole, name) and not login.is_asked_by_hand(profile.scheduler, name, whole, env):
            raise BadInput(
                "submit-needs",
                f"--{name} is missing: {profile.name} says that a job there needs it: give --{name} "
                f"{'HH:MM:SS' if name == 'time' else 'NAME'}",
            )
    given, said = login.of(profile.scheduler).given(profile, whole)
    return replace(whole, given=tuple(given), said=tuple(said))


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
        words=(*wish.given, *wish.options),
        arguments=wish.arguments,
        image=_image(profile, env),
        make_image=_make_image(profile, env),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
