"""A login node that never was: commands that print what they are given, and the files of a kernel."""

import json
from collections.abc import Mapping
from pathlib import Path

from entrypoint.batch.survey.ask import LoginNode

SITES = Path(__file__).parents[3] / "recordings/sites"
Answers = Mapping[str, str]
"""What a command prints, by its words; those that are not asked for print nothing and fail."""


class Login:
    def __init__(self, folder: Path) -> None:
        self.bin, self.root = folder / "bin", folder / "root"
        self.bin.mkdir()
        self.root.mkdir()
        self.env = {"PATH": str(self.bin), "HOME": str(folder)}

    def has(self, answers: Answers) -> None:
        """`sinfo`, or with its words `scontrol show config`, of which the last may be left out."""
        programs: dict[str, list[tuple[str, str]]] = {}
        for words, text in answers.items():
            program, _, rest = words.partition(" ")
            programs.setdefault(program, []).append((rest, text))
        for program, several in programs.items():
            lines = ["#!/bin/sh", 'case "$*" in']
            for rest, text in several:
                lines.append(f"*'{rest}'*) /bin/cat <<'END-OF-ANSWER'\n{text.rstrip()}\nEND-OF-ANSWER\n;;")
            self.script(program, "\n".join([*lines, '*) echo "$0: unknown: $*" >&2; exit 1 ;;', "esac"]))

    def recorded(self, name: str) -> None:
        """It answers as that site of tests/recordings/sites."""
        text = (SITES / name).read_text().partition("\n$ ")[2]
        self.has(dict(part.split("\n", 1) for part in text.split("\n$ ")))

    def script(self, program: str, text: str) -> None:
        path = self.bin / program
        path.write_text(f"{text}\n")
        path.chmod(0o755)

    def file(self, path: str, text: str = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def machine(self, answer: float = 20.0) -> LoginNode:
        return LoginNode(self.env, self.root, answer)


def address(name: str, *inet: str, kind: str = "ether", state: str = "UP") -> dict[str, object]:
    """Of `ip -j addr`."""
    info = [
        {"family": "inet", "local": one.partition("/")[0], "prefixlen": int(one.partition("/")[2])}
        for one in inet
    ]
    return {"ifname": name, "operstate": state, "link_type": kind, "addr_info": info}


def addresses(*several: dict[str, object]) -> str:
    return json.dumps([address("lo", "127.0.0.1/8", kind="loopback"), *several])
