"""Check site profiles and write the host files that the job scripts read: `make profiles`.

`render` is the entry. A host file has lines NAME=VALUE, of which a repeated name makes a list: what must be
known before there is an image, and last the whole profile as JSON, for an image without PyYAML. The job
scripts read it without Python and run nothing; host/job.sh compares the YAML's digest with the one there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from containers import stacks
from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.plan.profile import (
    CLUSTERS,
    CONTENT,
    LARGEST,
    Profile,
    checked,
    host_file,
    is_in_clusters,
    read,
    remedy,
)
from entrypoint.plan.sources import parser_class

HEADER: Final = "# Made from {name} by `make profiles`: change that file, not this one.\n"


def main(arguments: Sequence[str]) -> int:
    parser = parser_class()(prog="entrypoint/cli/profiles.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("file", nargs="*", help="profiles (all of clusters/)")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a host file would change"
    )
    try:
        options = parser.parse_args(arguments)
        given = [Path(name) for name in options.file] or sorted(CLUSTERS.glob("*.yaml"))
        for file in given:
            print(_line(file, *render(file, write=not options.check)))
        if any(map(is_in_clusters, given)):
            _warn_of_ambiguous()
    except (BadInput, stacks.BuildRefused) as error:
        print(f"apptrain: {error}", file=sys.stderr)
        return error.status
    return 0


def render(file: Path, *, write: bool) -> tuple[Profile, bool]:
    """Make the host file of a profile what it has to be; returns the profile, and whether that changed it.

    Raises BadInput where the profile is wrong, or the file cannot be written, or may not and would change.
    """
    profile, text = load_checked(file)
    target = host_file(file)
    try:
        if is_made(target, text):
            return profile, False
        if write:
            _write(target, text)
    except (OSError, UnicodeError) as error:
        raise BadInput("host-file-unwritable", f"{target} cannot be written: {error}") from None
    if not write:
        state = "is missing" if not files.exists(target) else f"is not made from {file} as that is now"
        raise BadInput("host-file-state", f"{target} {state}: {remedy(file)}")
    return profile, True


def is_made(target: Path, text: str) -> bool:
    """Whether a host file has this text. One that is missing, or cannot be read, has not."""
    try:
        return files.read(target, LARGEST) == text.encode()
    except (OSError, ValueError):
        return False


def load_checked(file: Path, asked: str = "") -> tuple[Profile, str]:
    """A profile that job scripts can use, and its host file's text. Raises BadInput."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.yaml", file.name):
        raise BadInput(
            "profile-file-name",
            f"{file}: a profile is named NAME.yaml, of letters, digits, _ . and -: rename it",
        )
    content = read(file, asked or f"PROFILE={file}")
    profile = checked(content, file)
    if not profile.scheduler:
        raise BadInput("profile-no-scheduler", f"{file}: scheduler is missing: give slurm or pbs")
    known = stacks.read()
    if profile.container.stack and profile.container.stack not in known:
        raise BadInput(
            "profile-unknown-stack",
            f"{file}: container stack is {profile.container.stack!r}: give one of {', '.join(known)}",
        )
    architecture, stack = profile.nodes.architecture, profile.container.stack
    if stack and architecture and not known[stack].fits("", architecture):
        fitting = [one.name for one in known.values() if one.fits("", architecture)]
        raise BadInput(
            "profile-stack-processor",
            f"{file}: container stack is {stack}, which has no builds for {architecture}: give "
            f"{' or '.join(fitting)}, or leave it out",
        )
    return profile, lines(profile, content, hashlib.sha256(file.read_bytes()).hexdigest())


def lines(profile: Profile, content: Any, digest: str) -> str:
    """The host file of a profile with this content, whose YAML has this digest. No value of a profile holds a
    line break, and JSON has none."""
    container, nodes = profile.container, profile.nodes
    values: dict[str, str | Iterable[str]] = {
        "digest": digest,
        "cluster": profile.clusters,
        "module_path": container.module_paths,
        "module": container.modules,
        "apptainer": container.program,
        "option": container.options,
        "image": stacks.image_of(stacks.of_site(container.stack, nodes.driver, nodes.architecture)).name,
        CONTENT: json.dumps(_named(content)),
    }
    found = [HEADER.format(name=profile.name)]
    for name, value in values.items():
        several = [value] if isinstance(value, str) else value
        found += [f"{name}={one}\n" for one in several if one != ""]
    return "".join(found)


def _named(value: Any) -> Any:
    """With texts as keys, as the profile's readers take them."""
    if isinstance(value, dict):
        return {str(name): _named(one) for name, one in value.items()}
    return [_named(one) for one in value] if isinstance(value, list) else value


def by_cluster() -> dict[str, list[str]]:
    """The profiles of clusters/ that a job of a cluster may take by itself: their files' names by the
    cluster's. From the host files, which find_profile_of_cluster in host/job.sh searches."""
    found: dict[str, list[str]] = {}
    for made in sorted(CLUSTERS.glob("*.host")):
        try:
            text = files.read_text(made, LARGEST)
        except (OSError, ValueError):
            continue
        for name in re.findall(r"(?m)^cluster=(.+)$", text):
            found.setdefault(name, []).append(f"{made.stem}.yaml")
    return found


def _warn_of_ambiguous() -> None:
    for name, several in by_cluster().items():
        if len(several) > 1:
            print(
                f"apptrain: {' '.join(several)} are all for the cluster {name}: a job there without "
                "--profile is refused: leave the name in one of them",
                file=sys.stderr,
            )


def _line(file: Path, profile: Profile, changed: bool) -> str:
    state = f"{host_file(file).name} written" if changed else "unchanged"
    return f"apptrain: {file.stem}: {profile.title} ({profile.tested or 'never run there'}): {state}"


def _write(file: Path, text: str) -> None:
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
