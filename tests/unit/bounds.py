"""Copies of shell scripts with other bounds than their own, so that a rule about seconds is tried in a part of one; and
the command with a bound on what it may take.
"""

import re
import resource
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
LIMITS = {resource.RLIMIT_DATA: 200 << 20, resource.RLIMIT_CPU: 30}
"""Bytes, and seconds of a core that is slow and busy: what is tried takes less than 5."""


def shorten(script: Path, **bounds: float) -> None:
    """Changes values that the script sets with `readonly NAME=VALUE`."""
    text = script.read_text()
    for name, value in bounds.items():
        text, count = re.subn(
            rf"^readonly {name}=[\d.]+", f"readonly {name}={value}", text, flags=re.MULTILINE
        )
        assert count == 1, f"{script.name} sets {name} {count} times"
    script.write_text(text)


def limited(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`apptrain ARGUMENTS` in this folder, within LIMITS."""
    code = f"import resource; [resource.setrlimit(what, (most, most)) for what, most in {LIMITS}.items()]; "
    code += "import sys; from entrypoint.cli import apptrain as command; sys.exit(command.main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
