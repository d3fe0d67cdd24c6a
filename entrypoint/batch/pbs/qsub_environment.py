"""Chooses the variables that a PBS job gets from whoever submits it, for PBS carries none that is not named.
`needed` chooses them, `arguments` hands over the job script's arguments, `listed` spells the list of `qsub
-v`, which cannot hold every value.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from entrypoint.batch import secrets
from entrypoint.core.errors import BadInput
from entrypoint.plan import passed
from entrypoint.plan.profile import CLUSTERS, VARIABLE, Profile

CHECKOUT: Final = CLUSTERS.resolve().parent
CARRIED: Final = re.compile(r"""[^,"'\\\x00-\x1f\x7f]*""")
"""What a value may hold in the list of `qsub -v`, whose quoting differs from PBS to PBS."""
VARIABLE_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")
ARGUMENTS: Final = ("APPTRAIN_ARGS", "APPTRAIN_ARGS_FILE")
EVERYWHERE: Final = ("HOME", "USER", "LOGNAME")
OF_LOGIN: Final = ("USER", "LOGNAME", "TERM", "TZ", "COLUMNS", "LINES", "CUDA_VISIBLE_DEVICES")
"""What a login has, and is meant for no job."""


def needed(profile: Profile, name: str, env: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """What the job has to know beside its arguments: PBS carries no more than it is told to."""
    values = {key: value for key, value in env.items() if key.startswith("APPTRAIN_")}
    if profile.request.stop_before:
        values.setdefault("APPTRAIN_STOP_BEFORE", str(profile.request.stop_before))
    container = profile.container
    paths = (*container.module_paths, container.program, *container.binds)
    for text in (profile.scratch, profile.stage.to, *paths):
        named = {match[1] or match[2] for match in VARIABLE.finditer(text)}
        values.update({key: env[key] for key in named if key in env and key not in EVERYWHERE})
    values.update(asked_for(env))
    values["APPTRAIN_PROFILE"] = name
    if cwd.resolve() != CHECKOUT:
        values["APPTRAIN_HOME"] = str(CHECKOUT)
    return values


def arguments(words: tuple[str, ...], cwd: Path) -> tuple[dict[str, str], Path | None]:
    """The variables that hand over the job script's arguments, and the file of those that fit no variable."""
    if not words:
        return {}, None
    joined = shlex.join(words)
    if CARRIED.fullmatch(joined):
        return {"APPTRAIN_ARGS": joined}, None
    # The same arguments have the same file: jobs that wait for it, or run again, find what they were given.
    digest = hashlib.sha256(os.fsencode("\0".join(words))).hexdigest()
    file = cwd / "runs" / "arguments" / digest[:16]
    return {"APPTRAIN_ARGS_FILE": str(file)}, file


def asked_for(env: Mapping[str, str]) -> dict[str, str]:
    """What APPTRAIN_PASS names, without the secrets that a PREFIX_* has among others. Raises BadInput for a
    secret that is named."""
    names = env.get("APPTRAIN_PASS", "").split()
    secrets.check("--pass", {name: env[name] for name in names if name in env}, "qstat -f")
    found = {name: value for name, value in env.items() if passed.matches(name, names)}
    return {name: value for name, value in found.items() if not secrets.is_secret(name, value)}


def not_carried(env: Mapping[str, str], carried: Mapping[str, str]) -> list[str]:
    """A line about variables that reach ranks elsewhere, and that no option here hands to PBS."""
    rest = passed.reaches(set(env) - set(carried), env) - {*passed.OF_SHELL, *OF_LOGIN}
    names = sorted(name for name in rest if not name.startswith("APPTRAIN_"))
    kept = [name for name in names if secrets.is_secret(name, env[name])]
    plain = [name for name in names if name not in kept]
    lines = []
    if plain:
        more = f" and {len(plain) - 3} more" if len(plain) > 3 else ""
        lines.append(f"qsub does not carry {', '.join(plain[:3])}{more}: --pass 'NAME PREFIX_*' does")
    if kept:
        lines.append(f"qsub does not carry {', '.join(kept[:3])}: {secrets.REMEDY}")
    return lines


def given(lists: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables of the user's own `-v`. Raises BadInput for one that cannot be carried, or must not be
    seen."""
    values = {}
    for item in (item for text in lists for item in text.split(",")):
        name, equals, value = item.partition("=")
        if not VARIABLE_NAME.fullmatch(name):
            raise BadInput(
                "qsub-variable-name",
                f"-v {item}: give NAME or NAME=VALUE, and no quotes and commas in a VALUE",
            )
        if name in ARGUMENTS:
            raise BadInput(
                "qsub-variable-arguments", f"-v {name}: give its words to submit: options, -- and CMD"
            )
        if not equals and name not in env:
            raise BadInput("qsub-variable-unset", f"-v {name}: {name} is not set here: give {name}=VALUE")
        values[name] = value if equals else env[name]
    secrets.check("-v", values, "qstat -f")
    return values


def listed(values: Mapping[str, str]) -> str:
    """The list of -v. Each line of APPTRAIN_BIND has a variable of its own there: APPTRAIN_BIND,
    APPTRAIN_BIND_2 and so on, which pbs/host.sh puts together again."""
    first, *further = [line for line in values.get("APPTRAIN_BIND", "").split("\n") if line] or [""]
    values = {**values, **{f"APPTRAIN_BIND_{number}": line for number, line in enumerate(further, 2)}}
    if "APPTRAIN_BIND" in values:
        values["APPTRAIN_BIND"] = first
    for key, value in values.items():
        if not CARRIED.fullmatch(value):
            raise BadInput(
                "qsub-variable-value",
                f"{key}={value!r}: qsub -v carries no commas, quotes, backslashes and line breaks: "
                "use a path without them, or the profile",
            )
    return ",".join(f"{key}={value}" for key, value in sorted(values.items()))
