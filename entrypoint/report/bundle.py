"""Packs what a support desk needs of a run into one archive: `pack` is the entry.

What goes in is listed in RULES; all else stays out: the key, checkpoints, code, and whatever a program wrote.
Secrets are replaced in every file, as in the manifest. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from entrypoint.core import files
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted, file_part, plain
from entrypoint.record import reading, tokens
from entrypoint.report import facts
from entrypoint.report.facts import ends_of, known_secrets, listed, within

MOST_FILES = 1_000
"""In an archive; the logs of the rank that failed first are taken first, then those of the last attempts."""
MOST_BYTES = 64 << 20
"""Of all files together, before they are packed."""
REPORT, CONTENTS = "report.html", "CONTENTS.txt"
FOLDERS = ("outcome", "logs", "stacks")
"""Folders that are looked into; of any other the name alone is told."""


@dataclass(frozen=True)
class Rule:
    pattern: str
    ends: int
    """Bytes of the beginning and of the end that are taken; 0: the whole file, which is JSON."""


RULES = (
    Rule(r"(manifest|config|result|plan\.\d+(\.\d+)?|hardware\.\d+(\.\d+)?)\.json", 0),
    Rule(r"job\.log", 1 << 20),
    Rule(r"outcome/\d+\.\d+(\.\d+)?", 1 << 14),
    Rule(r"metrics\.jsonl", 1 << 17),
    Rule(r"not-passed\.txt", 1 << 16),
    Rule(r"stacks/[^/]+/[^/]+\.txt", 1 << 18),
    Rule(r"logs/\d+/[^/]+\.(out|err|task\.log)", 1 << 16),
)
"""What is taken, in this order, by its place in the run directory."""
WHY = {
    r"join\.key": "the key of the run",
    "checkpoints": "states of the training",
    "tensorboard": "the same numbers as metrics.jsonl",
    r"curves\.png": "the report has the curves",
    r"report\.html": "made anew",
    r"stacks/[^/]+/nccl\.rank\d+": "NCCL's flight recorder, which is no text: send it by itself",
}
"""Why something stays out, by its place; whatever is not named here: "not needed for support"."""


@dataclass(frozen=True)
class Bundle:
    archive: bytes
    packed: list[str]
    left_out: list[str]
    """Each with its reason."""

    def in_words(self) -> list[str]:
        return [
            f"in it: {counted(len(self.packed), 'file')}: {_few(self.packed)}",
            f"left out: {'; '.join(self.left_out[:20]) or 'nothing'}",
            "Names of nodes, users and paths stand in it: look at it before you send it.",
        ]


def pack(found: facts.RunFacts, html: str, env: Mapping[str, str]) -> Bundle:
    """The archive of a run, a gzipped tar. `html`: its report."""
    run, secrets = found.path, known_secrets(found.path, env)
    contents: dict[str, bytes] = {REPORT: html.encode()}
    left_out = list(_others(run))
    size = 0
    for name, rule in _chosen(run, found.tail[0].removesuffix(".err")):
        try:
            content = _content(within(run, name), rule, secrets)
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            left_out.append(f"{plain(name)} ({plain(why)})")
            continue
        if len(contents) >= MOST_FILES or size + len(content) > MOST_BYTES:
            left_out.append(f"{plain(name)} and what follows it (the archive would be too large)")
            break
        size += len(content)
        contents[name] = content
    packed = [name for name in contents if name != REPORT]
    told = [
        "What apptrain report --bundle has packed. Secrets are replaced by <secret>.",
        "Long files are cut in the middle.",
        "",
        *(f"in it: {plain(name)}, {len(contents[name])} bytes" for name in contents),
        *(f"left out: {line}" for line in left_out),
    ]
    contents[CONTENTS] = "".join(f"{line}\n" for line in told).encode()
    return Bundle(_archive(found.name, contents), [REPORT, *packed, CONTENTS], left_out)


def _chosen(run: Path, failed: str) -> list[tuple[str, Rule]]:
    """The files that a rule takes: first the logs of the rank that failed, then in the order of the rules;
    what later attempts left first, and of logs what has errors."""
    names = list(_names(run))
    chosen = [
        (name, rule)
        for rule in RULES
        for name in sorted((one for one in names if re.fullmatch(rule.pattern, one)), key=_place)
    ]
    return sorted(chosen, key=lambda one: one[0].rpartition(".")[0] != failed)


def _place(name: str) -> tuple[int, bool, str]:
    attempt = re.match(r"(?:logs|stacks|outcome)[/](\d{1,9})", name)
    return (-int(attempt[1]) if attempt else 0, name.endswith(".out"), name)


def _names(run: Path) -> Iterator[str]:
    """All that is there; of FOLDERS and the attempts in them what they hold."""
    for name in listed(run):
        if name not in FOLDERS or (run / name).is_symlink():
            yield name
            continue
        for one in listed(run / name):
            inner = run / name / one
            if files.is_directory(inner) and not inner.is_symlink():
                yield from (f"{name}/{one}/{file}" for file in listed(inner))
            else:
                yield f"{name}/{one}"


def _others(run: Path) -> Iterator[str]:
    """What no rule takes, with the reason, at most 200."""
    rest = [name for name in _names(run) if not any(re.fullmatch(rule.pattern, name) for rule in RULES)]
    for name in rest[:200]:
        yield f"{plain(name)} ({_why(run, name)})"
    if len(rest) > 200:
        yield f"{len(rest) - 200} more"


def _why(run: Path, name: str) -> str:
    if (run / name).is_symlink():
        return "it is a link"
    found = (why for pattern, why in WHY.items() if re.fullmatch(pattern, name))
    return next(found, "not needed for support")


def _content(path: Path, rule: Rule, secrets: Mapping[str, str]) -> bytes:
    """A file as it is packed. Raises OSError, ValueError."""
    if not rule.ends:
        text = files.read_text(path, reading.MOST)
        try:
            value = files.parse_json(text)
        except ValueError:
            return tokens.hide(text, secrets).encode("utf-8", "replace")
        if isinstance(value, dict):
            for name in ("command", "argv"):
                if isinstance(value.get(name), list):
                    value[name] = tokens.hide_words(facts.texts(value[name]), secrets)
        return (json.dumps(tokens.hide_values(value, secrets), indent=2) + "\n").encode()
    with files.open_regular(path) as file:
        text = ends_of(file, rule.ends)
    return tokens.hide(text, secrets).encode("utf-8", "replace")


def _archive(name: str, contents: Mapping[str, bytes]) -> bytes:
    """Of no user, no group and no time, readable by its owner alone."""
    folder = file_part(name).lstrip(".") or "run"
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path, content in contents.items():
            parts = "/".join(file_part(part) for part in path.split("/"))
            entry = tarfile.TarInfo(f"{folder}-support/{parts}")
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return raw.getvalue()


def _few(names: list[str]) -> str:
    return ", ".join(map(plain, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
