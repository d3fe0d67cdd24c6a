"""`apptrain rerun RUN`: makes the one command that does the same again here, and says what cannot be had for
it. Begin at `main`.

A manifest becomes a line of `apptrain submit` if a site's profile is named and a scheduler is at hand, else
of `apptrain run`. Runs on a login node, with Python 3.9 and nothing else.
"""

from __future__ import annotations

import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain, shell_word
from entrypoint.plan import passed
from entrypoint.plan.commands import our_package
from entrypoint.record import causes, reading, shape, source, tokens
from entrypoint.record.partition import partition
from entrypoint.schedulers.known import KNOWN

PLACEHOLDER = re.compile(re.escape(tokens.HIDDEN[:-1]) + r"(?: (\w+))?>")
SUBMIT = tuple(known.submits for known in KNOWN)


@dataclass(frozen=True)
class Again:
    """What starts it, and in which way it is not the same: a line each."""

    words: list[str]
    lacks: list[str]
    secrets: list[str]
    """Names of variables that the run had, that hold secrets, and that are not set here."""


def main(
    run: Path, home: Path, cluster: str, env: Mapping[str, str], start: Callable[[list[str]], int] | None
) -> int:
    """Prints the command, and what cannot be had; `start`: starts it then. Raises BadInput."""
    again = plan(run, home, cluster, env)
    line = " ".join(map(shell_word, again.words))
    print(line, flush=True)  # what it starts prints too, or takes this process over
    for lack in again.lacks:
        print(f"apptrain: not the same: {plain(lack)}", file=sys.stderr)
    for name in again.secrets:
        print(f"apptrain: {plain(name)} is not set here: the run had it", file=sys.stderr)
    if start is None:
        return 0
    if missing := [name for name in again.secrets if placeholder_in(again.words, name)]:
        raise BadInput("rerun-variable-unset", f"the command needs {plain(missing[0])}: set it here")
    return start(with_secrets(again.words, env)[1:])


def placeholder_in(words: Sequence[str], name: str) -> bool:
    return any(tokens.placeholder(name) in word for word in words)


def plan(run: Path, home: Path, cluster: str, env: Mapping[str, str]) -> Again:
    """`home`: the checkout. `cluster`: a site's profile; empty for this machine. Raises BadInput for what is
    no run, or cannot be started again at all."""
    manifest = reading.of_run(run, "run again")
    if not manifest["attempts"] or not manifest["command"]:
        raise _cannot(run, "its manifest has no attempt with a command")
    begun = _beginning(manifest["attempts"])
    _check(run, begun)
    command, asked = _command(list(manifest["command"]))
    image, lacks = _image(manifest, home, env)
    named = [name for name in manifest["environment"].get("names", []) if tokens.names_secret(name)]
    secrets = [name for name in dict.fromkeys([*asked, *named]) if not env.get(name)]
    nodes, nproc = str(len(begun["nodes"])), str(begun["nproc_per_node"])
    words = ["apptrain", *_where(cluster, nodes), *([] if cluster else image)]
    words += ["--nproc-per-node", nproc, "--device", begun["device"]]
    words += ["--gpus-per-node", nproc] if begun["device"] == "cuda" and not cluster else []
    for option, key in (("--omp-num-threads", "threads"), ("--venv", "venv")):
        words += [option, begun[key]] if begun.get(key) else []
    words += ["--mode", "exec"] if begun.get("mode") == "exec" else []
    words += ["--no-python"] if begun.get("no_python") else []
    lacks += [*_code(manifest, Path.cwd(), home), *_data(manifest), *_checkpoint(manifest)]
    lacks += [*_venv(begun), *_environment(manifest, env), *_world(manifest, begun)]
    words += ["--", *command]
    for word in words:
        try:
            shell_word(word)
        except ValueError:
            why = f'no command line can have the word "{plain(word)[:40]}" of its manifest'
            raise _cannot(run, why) from None
    return Again(words, lacks, secrets)


def _cannot(run: Path, why: str) -> BadInput:
    return BadInput("rerun-not-possible", f"{plain(str(run))} cannot be run again: {why}")


def _check(run: Path, begun: Mapping[str, Any]) -> None:
    """Raises BadInput for an attempt that does not say on what it ran: the first versions did not."""
    for name in ("nodes", "nproc_per_node", "device"):
        if not begun.get(name):
            raise _cannot(run, f"its manifest does not say {name} of the attempt")
    if begun["device"] not in ("cpu", "cuda"):
        raise _cannot(run, f"device is {shape.shown(begun['device'])}, not cpu or cuda")


def _beginning(attempts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The attempt with which the numbers begin: the last that had no checkpoint. Of programs that do not say
    what they began from, the last."""
    fresh = [one for one in attempts if one.get("identity") and not one.get("checkpoint")]
    return (fresh or attempts)[-1]


def _where(cluster: str, nodes: str) -> list[str]:
    if not cluster:
        return ["run", "--nodes", nodes]
    if not any(map(shutil.which, SUBMIT)):
        raise BadInput(
            "rerun-no-scheduler",
            f"--cluster {cluster}: neither {' nor '.join(SUBMIT)} is in PATH: leave --cluster out",
        )
    return ["submit", "--cluster", cluster, "--nodes", nodes]


def _command(words: list[str]) -> tuple[list[str], list[str]]:
    """The command, and the names of the secrets in it. Raises BadInput for one that has no name."""
    names = []
    for word in words:
        for found in PLACEHOLDER.finditer(word):
            if not found[1]:
                raise BadInput(
                    "rerun-secret",
                    f"the command holds a secret that no variable had: {plain(word)}: start it by hand, and "
                    "give secrets in variables",
                )
            names.append(found[1])
    return words, names


def with_secrets(words: list[str], env: Mapping[str, str]) -> list[str]:
    """The command as it is started, never as it is shown."""
    return [PLACEHOLDER.sub(lambda found: env.get(found[1] or "", found[0]), word) for word in words]


# --- what cannot be had -------------------------------------------------------------------------------------


def _image(manifest: Mapping[str, Any], home: Path, env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The option that takes the image here, and in which way it is another."""
    image = manifest["image"]
    if not image:
        return [], []
    path = Path(env.get("APPTRAIN_IMAGE") or home / "containers" / "image.sif")
    here = {
        one: _image_id(one) for one in [path, *sorted(home.glob("containers/*.sif"))] if files.exists(one)
    }
    wanted, had = image.get("partition_sha256"), image.get("id", "unknown")
    same = [one for one, number in here.items() if number == had]
    if same := same or [one for one in here if wanted and wanted == partition(one)]:
        return ["--image", str(same[0])], []
    if path not in here:
        return [], [
            f"image: there is none at {path}: the run had {had}; apptrain image build, or APPTRAIN_IMAGE=FILE"
        ]
    number = here[path] or "no SIF"
    return ["--image", str(path)], [f"image: {path} is {number}, the run had {had}: built anew since"]


def _image_id(path: Path) -> str:
    """Of the SIF's header; empty for what is none."""
    try:
        with files.open_regular(path) as file:
            return str(uuid.UUID(bytes=file.read(64)[48:64]))
    except (OSError, ValueError):
        return ""


def _code(manifest: Mapping[str, Any], here: Path, home: Path) -> list[str]:
    code = manifest["code"] or {}
    ours = (code.get("apptrain") or {}).get("repository")
    parts = [("apptrain", home, ours)]
    if not our_package(manifest["command"]):
        parts = [("code", source.folder(manifest["command"], here), code.get("repository")), *parts]
    lines = [line for name, folder, state in parts if state for line in _repository(name, folder, state)]
    return lines + _program(manifest, code.get("program"), here)


def _program(manifest: Mapping[str, Any], ran: Mapping[str, Any] | None, here: Path) -> list[str]:
    """Of a module in an image the image tells."""
    if not ran or "name" not in ran or (manifest["image"] and manifest["command"][0] == "-m"):
        return []
    found = source.program(manifest["command"], here)
    if not found:
        return [f"code: {ran['name']} is not here: go to the folder in which it lies"]
    return [f"code: {ran['name']} is not as it was"] if found["sha256"] != ran.get("sha256") else []


def _repository(name: str, folder: Path, state: Mapping[str, Any]) -> list[str]:
    """git itself is never started: the manifest names the folder, and its repository may name programs."""
    commit, here = state.get("commit"), source.commit_of(folder)
    lines = []
    if commit and here != commit:
        nothing = "tells no commit in its .git" if source.root_of(folder) else "is in no git repository"
        found = f"is at commit {here}" if here else nothing
        had = f"{commit} of {state['remote']}" if state.get("remote") else commit
        lines.append(f"{name}: {folder} {found}, the run had {had}: fetch it and check it out")
    if state.get("diff"):
        lines.append(f"{name}: the run had changes that no commit has: {state['diff']}")
    if state.get("state"):
        lines.append(f"{name}: whether the run had changes that no commit has is {state['state']}")
    return lines


def _data(manifest: Mapping[str, Any]) -> list[str]:
    path = (manifest["config"] or {}).get("data.path")
    if not isinstance(path, str):
        return []
    if not path or files.exists(Path(path)):
        return []
    return [f"data: {path} is not here: add data.path=DIR, where it is now"]


def _checkpoint(manifest: Mapping[str, Any]) -> list[str]:
    found = manifest["attempts"][0].get("checkpoint")
    if not found or files.exists(Path(found.get("path", ""))):
        return []
    return [f"checkpoint: {found.get('path')}, from which the run began, is not here"]


def _venv(begun: Mapping[str, Any]) -> list[str]:
    venv = begun.get("venv")
    return [f"venv: {venv} is not here"] if venv and not files.exists(Path(venv)) else []


def _environment(manifest: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """What is set here and does not reach the ranks is as good as not set."""
    here = {name: env[name] for name in passed.reaches(env, env)}
    lines = [
        f"environment: the run had {name}={value}: set it here, with APPTRAIN_PASS={name}"
        for name, value in causes.switches(manifest).items()
        if here.get(name) != value
    ]
    for name in manifest["environment"].get("passed", []):
        if name not in here:
            how = "" if passed.reaches([name], {}) else f", with APPTRAIN_PASS={name}"
            lines.append(f"environment: the run had {name}, whose value is not kept: set it here{how}")
    added = [
        name
        for name in sorted(here.keys() & set(passed.wished(env)))
        if not passed.matches(name, causes.OF_PLACES) and not tokens.names_secret(name)
    ]
    had = {*manifest["environment"].get("values", {}), *manifest["environment"].get("names", [])}
    if had:  # else it is not recorded
        lines += [
            f"environment: {name} is set here, the run did not have it: unset it"
            for name in added
            if name not in had
        ]
    return lines


def _world(manifest: Mapping[str, Any], begun: Mapping[str, Any]) -> list[str]:
    attempts = manifest["attempts"]
    later = {one.get("world_size") for one in attempts[attempts.index(begun) :]} - {begun.get("world_size")}
    ranks = ", ".join(str(number) for number in sorted(filter(None, later)))
    return [f"world size: the run went on with {ranks} ranks: this has all the same number"] if ranks else []
