"""Makes docs/troubleshooting.md and entrypoint/explain/messages.json: of messages.yaml there, of the refusals
in the sources, and of the catalogue of causes. tools/catalogue.py writes both. Begin at `page` and `own`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from entrypoint.explain.catalogue import Entry
from tools.refusals import Site

IGNORED = "Lines that you can ignore"
HELP = "If you ask for help"
SCRIPT = "Errors of your script"
"""The part of the page to which the catalogue belongs."""
LEAST = 20
"""Letters that a message must have of its own to be known by them."""
CAPITALS = re.compile(r"\b[A-Z][A-Z0-9_]*\b|\.\.\.")
LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
FAMILIES = ("apptrain", "torchrun", "rendezvous", "NCCL", "gloo", "MPI", "GPUs", "libraries", "DDP")
"""Those that come first, in this order."""
OWN_NAMES = ("apptrain", "torchrun", "gloo")

FIRST = (
    "<!-- Made by `make catalogue` of entrypoint/explain/messages.yaml and catalogue.yaml: change those. -->"
)


def page(data: Mapping[str, Any], causes: Sequence[Entry]) -> str:
    """docs/troubleshooting.md. `data`: messages.yaml."""
    parts = data["parts"]
    titles = [*(part["title"] for part in parts), IGNORED, HELP]
    lines = [
        FIRST,
        data["begin"],
        *(f"{number}. [{one}](#{_anchor(one)})" for number, one in enumerate(titles, 1)),
        "",
    ]
    for part in parts:
        lines += [f"## {part['title']}", "", *_intro(part)]
        lines += _table([row for row in part["rows"] if not row.get("note")])
        if part["title"] == SCRIPT:
            lines += _of_others(causes)
    notes = [row for part in parts for row in part["rows"] if row.get("note")]
    lines += [
        f"## {IGNORED}",
        "",
        "Nothing is wrong if you see these.",
        "",
        *_table(notes),
        f"## {HELP}",
        "",
        data["end"],
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _intro(part: Mapping[str, Any]) -> list[str]:
    return [part["intro"], ""] if part.get("intro") else []


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| message | what it means | what to do |", "|---|---|---|"]
    for row in rows:
        message = _code(row["says"]) if "says" in row else row["line"]
        lines.append(f"| {_cell(message)} | {_cell(row['means'])} | {_cell(row.get('do', ''))} |")
    return [*lines, ""]


def _of_others(causes: Sequence[Entry]) -> Iterator[str]:
    yield "What other programs say, as `apptrain explain` knows it; `...` stands for any words:"
    yield ""
    families = sorted({one.family for one in causes}, key=_place)
    for family in families:
        yield f"### {family}" if family in OWN_NAMES else f"### {family[0].upper()}{family[1:]}"
        yield ""
        yield "| the log says | what it means | what to do |"
        yield "|---|---|---|"
        for one in causes:
            if one.family == family:
                said = ", ".join(_code(_shown(pattern.text)) for pattern in one.any[:3])
                means = f"**{one.title}**. {one.why}"
                yield f"| {_cell(said)} | {_cell(_text(means))} | {_cell(_text(one.remedy))} |"
        yield ""


def _place(family: str) -> tuple[int, str]:
    return (FAMILIES.index(family) if family in FAMILIES else len(FAMILIES), family.lower())


def _shown(pattern: str) -> str:
    return pattern.removeprefix("^").removesuffix("$").replace("*", " ... ").strip().replace("  ", " ")


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _text(text: str) -> str:
    """Without what Markdown would read as a tag or as emphasis."""
    parts = re.split(r"(\*\*)", text)
    return "".join(part if part == "**" else re.sub(r"([<>*_\[\]])", r"\\\1", part) for part in parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- what explain reads -----------------------------------------------------------------------------------


def own(data: Mapping[str, Any], refusals: Sequence[Site]) -> list[dict[str, Any]]:
    """messages.json: what tells each message of ours from others, and what to say of it."""
    rows = [row for part in data["parts"] for row in part["rows"] if "says" in row and not row.get("note")]
    advised = {row["id"] for row in rows if "id" in row}
    found = [_row(row.get("id", "apptrain-says"), _of_says(row["says"]), row, "id" in row) for row in rows]
    found += [_row(one.id, literal(one.text), {}, True) for one in refusals if one.id not in advised]
    known = {(one["id"], *one["parts"]): one for one in found if sum(map(len, one["parts"])) >= LEAST}
    return [known[key] for key in sorted(known)]


def _row(id: str, parts: list[str], row: Mapping[str, Any], is_refusal: bool) -> dict[str, Any]:
    means, do = _plain(row.get("means", "")), _plain(row.get("do", ""))
    return {"id": id, "parts": parts, "means": means, "do": do, "is_refusal": is_refusal}


def _plain(text: str) -> str:
    """As a terminal shows it."""
    return LINK.sub(lambda found: f"{found[1]} (docs/{found[2]})", text).replace("`", "")


def _of_says(says: str) -> list[str]:
    return [part for part in map(_trimmed, CAPITALS.split(says)) if part]


def _trimmed(part: str) -> str:
    """Empty if it says too little."""
    part = " ".join(part.split())
    return part if len(re.sub(r"[^A-Za-z]", "", part)) > 2 else ""


def literal(text: str) -> list[str]:
    """The parts of a refusal's text that are always the same, as tools/refusals.py gives it."""
    if text.startswith(('"', "'")):
        text = re.sub(r"\"\s+\"", " ", text).strip("\"'").replace("\\`", "`")
    parts, part, at = [], "", 0
    while at < len(text):
        opens = re.compile(r"\$?[{(]|\$\w+|%s").match(text, at) if text[at] in "${%" else None
        if opens is None:
            part, at = part + text[at], at + 1
            continue
        parts.append(part)
        part, at = "", _behind(text, at, opens.end())
    return [one for one in map(_trimmed, [*parts, part]) if one]


def _behind(text: str, begin: int, end: int) -> int:
    """Where what is filled in ends, brackets and all."""
    if text[end - 1] not in "{(":
        return end
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] in "{(") - (text[at] in "})")
        if depth == 0 and at >= end - 1:
            return at + 1
    return len(text)
