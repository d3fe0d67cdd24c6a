"""`apptrain explain JOBSCRIPT`: its traps with their lines, and the same job as one of ours. Begin at `main`.

The script is read, never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import plain
from entrypoint.explain import as_ours, shell, traps
from entrypoint.explain.as_ours import Converted
from entrypoint.explain.traps import Found

FOUND, NOTHING = 0, 1
NOTHING_TO_MEND = "nothing was found that must be mended"
NO_TRAINING = "no training was found in this script: only its requests were looked at"
SUFFIXES = {".sbatch", ".pbs", ".sh", ".slurm", ".qsub", ".job", ".bash", ".slm", ".sub"}
_SHEBANG = re.compile(rb"#! ?/[\w./-]*(?:/|env (?:-S )?)(?:ba|da|k|z|c|tc)?sh\b")
_DIRECTIVE = re.compile(rb"^#(?:SBATCH|PBS) +-", re.M)
_OF_LOGS = re.compile(r"\.(?:log|out|err|[oe]\d+)$")
"""How names of logs end, which may begin with the script that was run."""
HEAD = 1 << 16


def is_one(path: Path) -> bool:
    """Whether this file is a script and no log: by its name and how it begins."""
    if _OF_LOGS.search(path.name):
        return False
    try:
        with files.open_regular(path) as file:
            head = file.read(HEAD)
    except (OSError, ValueError):
        return False
    if b"\0" in head:
        return False
    if _SHEBANG.match(head.removeprefix(b"\xef\xbb\xbf").lstrip()) or _DIRECTIVE.search(head[:4096]):
        return True
    return path.suffix in SUFFIXES and bool(head.strip())


def main(path: Path, *, as_json: bool) -> int:
    """Prints what is to be said of it. Raises BadInput."""
    try:
        text = files.read(path, shell.MOST).decode("utf-8", "replace").replace("\0", "")  # as bash does
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            "explain-script-unreadable",
            f"explain: {plain(str(path))} cannot be read ({plain(why)}): give a job script",
        ) from None
    found, script = traps.find(text), traps.read(text)
    converted = as_ours.convert(script, found)
    to_mend = [one for one in found if not one.trap.is_remark]
    remarks = [one for one in found if one.trap.is_remark]
    if as_json:
        whole = {
            "schema_version": 1,
            "causes": [_row(one, path) for one in to_mend],
            "remarks": [_row(one, path) for one in remarks],
            "as_ours": {
                "lines": list(converted.lines),
                "profile": [plain(one) for one in converted.profile],
                "not_carried_over": [plain(one) for one in converted.left],
            },
        }
        print(json.dumps(whole, indent=2).replace("\x7f", "\\u007f"))
    else:
        is_understood = bool(script.trainings) or as_ours.is_ours(script)
        nothing = NOTHING_TO_MEND if is_understood else NO_TRAINING
        print("\n".join(_in_words(to_mend, nothing, remarks, converted, plain(path.name))))
    return FOUND if to_mend else NOTHING


def _row(one: Found, path: Path) -> dict[str, Any]:
    return {
        "id": one.trap.id,
        "title": one.trap.title,
        "why": one.trap.why,
        "remedy": one.trap.remedy,
        "where": {"file": plain(path.name), "line": one.line},
        "rank": None,
        "node": None,
        "text": plain(one.text),
    }


def _in_words(
    to_mend: list[Found], nothing: str, remarks: list[Found], converted: Converted, name: str
) -> Iterator[str]:
    """`nothing`: what to say if there is nothing to mend."""
    for one in to_mend:
        yield f"{name}:{one.line}: {one.trap.title} ({one.trap.id})"
        yield f"  {plain(one.text)}"
        yield f"  why: {one.trap.why}"
        yield f"  do:  {one.trap.remedy}"
    if not to_mend:
        yield nothing
    for one in remarks:
        yield f"{name}:{one.line}: a remark: {one.trap.title}: {one.trap.remedy}"
    if converted.lines:
        yield ""
        yield "the same job as one of ours:"
        for number, line in enumerate(converted.lines):
            yield f"  {'or: ' if number else ''}{line}"
    for key in converted.profile:
        yield f"  in a profile: {plain(key)}"
    for left in converted.left:
        yield f"  not carried over: {plain(left)}"
