"""Refuses what people try first and cannot have meant, before anything starts, and says what they probably
meant. `check_command` is where to begin.

Such as a launcher's name in front of a script, or a run directory that belongs to another program. `launch`,
`prepare` (in a job script's first second) and `submit` all ask here. Runs with Python 3.9.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePath

from entrypoint.core import files, spelling
from entrypoint.core.checkout import HOME, apptrain, make
from entrypoint.core.errors import BadInput
from entrypoint.plan.commands import DATA, our_package, sorted_out, typed
from entrypoint.plan.sources import Settings
from entrypoint.schedulers.known import KNOWN, words_of

LAUNCHERS = (
    *("torchrun", "accelerate", "deepspeed", "lightning", "fabric", "composer", "tune", "yolo", "horovodrun"),
    *("colossalai", "mpirun", "mpiexec", "aprun", "jsrun"),
    *(program for known in KNOWN for program in known.launchers),
)
"""Programs that start ranks or jobs themselves."""
LAUNCHER_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
    *("accelerate.commands.accelerate_cli", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    *("lightning.fabric.cli", "lightning_fabric.cli", "composer.cli.launcher", "torchtune._cli.tune"),
    *("horovod.runner.launch", "colossalai.cli"),
)
"""The same behind -m."""
SHELLS = ("sh", "bash", "zsh", "dash", "ksh")
_PYTHON = re.compile(r"python[0-9.]*|pypy3?|ipython3?")
_PYTHON_TAKES_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_DESCRIPTOR = re.compile(r"/dev/(?:stdin|fd/\d+)|/proc/[^/]+/fd/\d+")
OLDEST = (3, 11)
"""The Python of what trains."""
NEEDED = ("torch", "psutil")
"""Packages without which no image can train."""


class Missing(BadInput):
    """CMD is not there."""


def own_module_left_out(command: Sequence[str], folder: Path) -> str:
    """Says so if the user has a module of the name that CMD takes of ours; else empty."""
    if our_package(command) != "train":
        return ""
    own = next((name for name in ("train.py", "train") if files.exists(folder / name)), "")
    words = shlex.join(["python", *command[:2]])
    return own and f"-m {command[1]} is apptrain's own, not {own} here: for yours: --no-python -- {words}"


def check_command(
    command: Sequence[str], folder: Path, *, mode: str, no_python: bool, here: bool = True
) -> None:
    """Raises BadInput where the ranks, started in this folder, could not run this CMD; Missing where it is
    not there.

    `here`: whether they see the files that we see; else what is out of sight is left to them.
    """
    program, name = command[0], PurePath(command[0]).name
    if not program:
        raise BadInput(
            "cmd-empty-word", "CMD begins with an empty word: give a script with its arguments, or -m NAME"
        )
    if not files.is_regular(folder / program) or "/" in program:
        _check_launchers(command, name, mode, no_python=no_python)
    if no_python:
        if here and not shutil.which(program, path=search_path(os.environ)):
            raise Missing(
                "cmd-not-in-path",
                f"CMD {program} is no program in PATH: check the spelling, or give its path",
            )
        return
    if name.endswith((".sh", ".bash", ".sbatch", ".pbs")):
        raise _shell(program, command)
    if name.endswith(".ipynb"):
        raise BadInput(
            "cmd-notebook",
            f"CMD {program} is a notebook: jupyter nbconvert --to script {shlex.quote(program)}, and give "
            f"the script that this makes: -- {shlex.quote(program.removesuffix('.ipynb') + '.py')}",
        )
    if name.endswith(DATA):
        raise BadInput(
            "cmd-not-python",
            f"CMD {program} is no Python script: give the script that reads it, as its argument",
        )
    if program.startswith("-"):
        _check_module(command)
        return
    path = folder / program
    found = files.mode_at(path)
    if kind := _unshared(path, found):
        raise BadInput(
            "cmd-no-file",
            f"CMD {program} is {kind}, and each rank opens CMD for itself: write the script to a file, and "
            "give that",
        )
    if stat.S_ISDIR(found) and not files.exists(path / "__main__.py"):
        raise BadInput(
            "cmd-directory", f"CMD {program} is a directory: give a script in it, with its arguments"
        )
    if not found and (here or stat.S_ISDIR(files.mode_at(path.parent))):
        raise _missing(program, folder)


def check_run_dir(path: Path, command: Sequence[str]) -> None:
    """Raises BadInput where another program has run in this run directory."""
    try:
        attempts = files.read_json(path / "manifest.json", 8 << 20)["attempts"]
        before = [str(word) for word in attempts[-1]["command"]]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if before and program(before) != program(command):
        raise BadInput(
            "run-dir-other-program",
            f"the run directory {path} is that of {program(before)}, not of {program(command)}: give "
            f"another with --run-dir, or, where that is its new name, remove {path}/manifest.json",
        )


def check_job(settings: Settings, scheduler: str) -> None:
    """Raises BadInput for options of a job that this scheduler does not have."""
    start, stop_before = settings.value("start"), settings.value("stop-before")
    known = words_of(scheduler)
    if start is not None and start not in known.starters:
        if len(known.starters) == 1:
            raise BadInput(
                "start-needless",
                f"--start {start}: under {known.title} tasks start with {known.starters[0]}: leave it out",
            )
        raise BadInput("start-unknown", f"--start {start}: must be one of {', '.join(known.starters)}")
    if stop_before is not None and known.warning:
        raise BadInput(
            "stop-before-needless",
            f"--stop-before {stop_before}: under {known.title} it is {known.warning}",
        )


def check_training(command: Sequence[str], ranks: int, folder: Path) -> None:
    """Raises BadInput where the reference training, started in this folder, would refuse its arguments."""
    if list(command[:2]) != ["-m", "train"] or {"-h", "--help"} & set(command):
        return
    try:
        from train.arguments import check
        from train.status import TrainingRefused as Refused
    except ImportError as error:
        if error.name != "yaml":
            raise
        return  # no PyYAML here: the ranks will say it
    try:
        check(command[2:], ranks, folder)
    except Refused as refused:
        raise BadInput(refused.id, f"train: {refused}") from None


def search_path(env: Mapping[str, str]) -> str:
    """The ranks' PATH: the directory of this Python stands first, unless its names are found there anyway.
    So `python`, and what else a venv holds, are those of the venv that was chosen."""
    path = env.get("PATH", os.defpath)
    python = Path(sys.executable)
    names = [name for name in ("python", "python3", python.name) if python.with_name(name).exists()]
    found = {Path(shutil.which(name, path=path) or "").parent for name in names}
    return path if found == {python.parent} else os.pathsep.join([str(python.parent), path])


def has_torch() -> bool:
    return sys.version_info >= OLDEST and find_spec("torch") is not None


def check_torch(what: str) -> None:
    """Raises BadInput where this Python cannot train, naming one that can."""
    if has_torch():
        return
    is_new = sys.version_info >= OLDEST
    image = HOME / "containers" / "image.sif"
    inside = f"in the image ({make('image')})"
    if what in ("demo", "run"):
        begin = "" if image.exists() else f"{make('image')}, then "
        inside = f"in the image: {begin}{apptrain()} {shlex.join([what, '--image', *typed()[1:]])}"
    elif image.exists():
        inside = f"{HOME}/containers/run.sh {image} apptrain {what}"
    found = f"this Python ({sys.executable}, {sys.version.split()[0]})"
    lack = "has none" if is_new else "is too old (3.11 is the oldest)"
    raise BadInput(
        "python-no-torch",
        f"{what} needs torch, and {found} {lack}: {make('venv')}, which gets it, or run it {inside}",
    )


def check_image(image: str) -> None:
    """Raises BadInput where this Python, of an image that was not made here, cannot train."""
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise BadInput(
            "image-lacks-packages",
            f"the image {image} is not apptrain's and lacks {', '.join(lacking)} (its Python is "
            f"{sys.executable}): make one that has them, or a venv on top of it (make venv DIR=DIR), and set "
            "APPTRAIN_VENV=DIR",
        )


# --- words in front of a script -----------------------------------------------------------------------------


def is_launcher(name: str) -> bool:
    """Whether it starts a script, and is no script itself."""
    return name in LAUNCHERS or bool(_PYTHON.fullmatch(name))


def launcher_of(command: Sequence[str]) -> str:
    """The launcher with which CMD begins, also as a module; else empty."""
    return _launcher(command)[0] if command else ""


def instead(words: Sequence[str], command: str) -> tuple[str, str]:
    """For a line that begins with a launcher: what to give to our command instead, which is the options that
    both have, -- and the script; and what to say of the other options. A guess, for a message."""
    begin, *rest = (word for word in words if word != "--")
    launcher, behind = _launcher([begin, *rest])
    is_of_python = _PYTHON.fullmatch(begin) and not launcher and behind[:1] not in ([], ["-c"])
    script = behind if is_of_python else _script(behind)
    if rest[-len(script) :] == script:
        del rest[-len(script) :]
    # Behind a launcher that is no scheduler's, short options are read as those of the first, Slurm.
    short = next((known for known in KNOWN if begin in known.of_cluster), KNOWN[0]).short_options
    kept, others = sorted_out([short.get(word, word) for word in rest], command)
    left = [word.partition("=")[0] for word in others if word.startswith("-") and word not in ("-m", "-c")]
    said = f" (left out: {', '.join(dict.fromkeys(left))})" if left else ""
    return shlex.join([*kept, "--", *script]), said


def _launcher(command: Sequence[str]) -> tuple[str, list[str]]:
    """(the launcher that a line begins with, also as a module, else empty; what stands behind that, or behind
    Python and its options)."""
    begin, rest = command[0], list(command[1:])
    if PurePath(begin).name in LAUNCHERS:
        return begin, rest
    if begin == "-m":
        rest = list(command)
    elif _PYTHON.fullmatch(PurePath(begin).name):
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            del rest[: 2 if rest[0] in _PYTHON_TAKES_VALUE else 1]
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in LAUNCHER_MODULES:
        return f"-m {rest[1]}" if begin == "-m" else rest[1], rest[2:]
    return "", rest


def _check_launchers(command: Sequence[str], name: str, mode: str, *, no_python: bool) -> None:
    launcher, rest = _launcher(command)
    if launcher:
        if mode == "exec" and (no_python or command[0] == "-m"):
            return
        script = _script(rest)
        before = rest[: len(rest) - len(script)] if rest[-len(script) :] == script else rest
        words = [*_kept(before), "--", *script]
        raise BadInput(
            "cmd-launcher",
            f"CMD begins with {launcher}: leave it and its options out, apptrain starts the ranks: "
            f"{shlex.join(words)}",
        )
    if no_python:
        return
    if _PYTHON.fullmatch(name):
        if rest[:1] == ["-c"]:
            raise BadInput(
                "cmd-python-c", "CMD is python -c: put the code in a file, and give that: -- my_script.py"
            )
        given = shlex.join(rest or ["my_script.py"])
        raise BadInput(
            "cmd-python", f"CMD begins with {command[0]}: leave it out, Python runs CMD anyway: -- {given}"
        )
    if name in SHELLS:
        raise _shell(command[0], command)


def _kept(options: Sequence[str]) -> list[str]:
    """torchrun's --numa-binding, which is ours too, and for `run` its number of ranks; in a job the scheduler
    knows better."""
    found = []
    for at, word in enumerate(options):
        name, equals, value = word.replace("_", "-").partition("=")
        given = value if equals else "".join(options[at + 1 : at + 2])
        is_count = name == "--nproc-per-node" and given.isdecimal() and typed()[:1] == ["run"]
        if name == "--numa-binding" or is_count:
            found.append(f"{name}={given}")
    return found


def _script(words: Sequence[str]) -> list[str]:
    """The script with its arguments among the words of a launcher; a guess, for a message."""
    for at, word in enumerate(words):
        if word.endswith(".py") or (word == "-m" and at + 1 < len(words)):
            return list(words[at:])
    return ["my_script.py"]


def _shell(program: str, command: Sequence[str]) -> BadInput:
    whole = shlex.join(command if PurePath(program).name in SHELLS else ["bash", *command])
    return BadInput(
        "cmd-shell",
        f"CMD begins with {program}, which is a shell's: give the Python script that it starts, or have each "
        f"rank run it as it is: --no-python -- {whole}",
    )


def _check_module(command: Sequence[str]) -> None:
    if command[0] != "-m" or len(command) < 2:
        raise BadInput(
            "cmd-no-script",
            f"CMD begins with {command[0]}: give a script with its arguments, or -m NAME; options come "
            "before --",
        )
    if command[1].endswith(".py") or "/" in command[1]:
        raise BadInput(
            "cmd-module-is-file", f"-m {command[1]}: -m takes a module's name: leave -m out for a file"
        )


def _unshared(path: Path, mode: int) -> str:
    """What is at the path if several processes cannot each read it as a whole; else empty."""
    if _DESCRIPTOR.fullmatch(os.path.normpath(path)):
        return "what this process alone has open"  # also where that is a regular file
    is_file = stat.S_ISREG(mode) or stat.S_ISDIR(mode) or not mode
    return "" if is_file else files.kind(mode)


def _missing(program: str, folder: Path) -> Missing:
    if shutil.which(program, path=search_path(os.environ)):
        return Missing(
            "cmd-program",
            f"CMD {program} is a program, no Python script: put --no-python before -- if each rank is to "
            "run it",
        )
    words = program.split()
    if words[1:] and PurePath(words[0]).name in ("python", "python3"):
        del words[0]  # Python runs CMD anyway
    if words and words != [program] and files.is_regular(folder / words[0]):
        line = " ".join(words)
        return Missing("cmd-quoted", f"CMD {program} is one word: leave its quotes out: -- {line}")
    path = folder / program
    try:
        beside = [file.name for file in path.parent.iterdir() if file.suffix == ".py"]
    except (FileNotFoundError, NotADirectoryError):
        return Missing(
            "cmd-no-directory",
            f"CMD {program} does not exist: there is no directory {path.parent}: check the path",
        )
    except OSError:
        beside = []
    near = spelling.near(path.name, beside)
    if near:
        meant = " or ".join(str(PurePath(program).with_name(name)) for name in near)
        return Missing("cmd-missing", f"CMD {program} does not exist in {path.parent}: did you mean {meant}?")
    return Missing(
        "cmd-missing",
        f"CMD {program} does not exist in {path.parent}: check the spelling; a module is given as -m NAME, a "
        "program that is no Python script needs --no-python",
    )


def program(command: Sequence[str]) -> str:
    return f"-m {command[1]}" if command[0] == "-m" and len(command) > 1 else PurePath(command[0]).name
