"""Makes docs/images/failure.svg, the picture of a failing job in README, from a real run on this machine.

Usage: `python tools/recording.py`, with the Python of `make venv`. It types COMMANDS into a shell beside a
script that fails on rank 3, and draws what was printed. `draw` writes the SVG itself: the libraries that
export terminals as SVG have one fixed background, and this picture follows the reader's light or dark theme.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from tests.pages import ALICE, FILES  # noqa: E402

PICTURE = CHECKOUT / "docs/images/failure.svg"
COMMANDS = ('apptrain run --nproc-per-node 2 -- fail.py; echo "status $?"', "apptrain explain runs/*")
COLUMNS = 112
LINE, LETTER = 18, 7.83
"""Height of a line and width of a letter, in pixels, of a monospaced font of 13 pixels."""
STYLE = """\
rect { fill: #f6f8fa; stroke: #d0d7de }
text { font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
text { fill: #57606a; white-space: pre }
.typed { fill: #1f2328; font-weight: bold }
.first { fill: #b3261e; font-weight: bold }
@media (prefers-color-scheme: dark) {
  rect { fill: #161b22; stroke: #30363d }
  text { fill: #9da7b3 }
  .typed { fill: #f0f6fc }
  .first { fill: #ff8a80 }
}"""


def kind(line: str) -> str:
    """The class of the style: of a command, of the lines about the first failure, '' of all others."""
    if line.startswith("$ "):
        return "typed"
    return "first" if line.startswith(("status ", "  do:")) or " failed first, " in line else ""


def draw(lines: list[str]) -> str:
    """The SVG that shows these lines, the long ones wrapped after COLUMNS letters."""
    rows = [
        (row, kind(line))
        for line in lines
        for row in textwrap.wrap(
            line, COLUMNS, subsequent_indent="    ", break_on_hyphens=False, drop_whitespace=False
        )
        or [""]
    ]
    width, height = round(COLUMNS * LETTER) + 32, len(rows) * LINE + 28
    texts = [
        f'<text x="16" y="{number * LINE + 12}" class="{name}">{escape(row.rstrip())}</text>'
        for number, (row, name) in enumerate(rows, 1)
    ]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            "<!-- made by tools/recording.py from a real run -->",
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *texts,
            "</svg>\n",
        ]
    )


def record(folder: Path) -> list[str]:
    """What a shell in this folder prints for each of COMMANDS, with the command above it."""
    (folder / "fail.py").write_text(FILES["fail.py"])
    path = os.pathsep.join([str(CHECKOUT), str(Path(sys.executable).parent), "/usr/local/bin:/usr/bin:/bin"])
    env = {"PATH": path, "HOME": str(folder), "USER": "alice", "LANG": "C.UTF-8"}
    script = "\n".join(f"printf '%s\\n' {shlex.quote(f'$ {command}')}\n{command}" for command in COMMANDS)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(f"{folder}/", f"{ALICE}/")
    return [line.rpartition("\r")[2] for line in text.splitlines()]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        lines = record(Path(folder).resolve())
    if not any("failed first" in line for line in lines):
        print(
            "\n".join([*lines, "recording: no line says `failed first`: nothing was written"]),
            file=sys.stderr,
        )
        return 1
    PICTURE.write_text(draw(lines), encoding="utf-8")
    print(f"recording: {PICTURE.relative_to(CHECKOUT)}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
