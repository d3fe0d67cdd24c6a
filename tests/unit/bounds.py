"""Copies of shell scripts with other bounds than their own, so that a rule about seconds is tried in a part of one."""

import re
from pathlib import Path


def shorten(script: Path, **bounds: float) -> None:
    """Changes values that the script sets with `readonly NAME=VALUE`."""
    text = script.read_text()
    for name, value in bounds.items():
        text, count = re.subn(
            rf"^readonly {name}=[\d.]+", f"readonly {name}={value}", text, flags=re.MULTILINE
        )
        assert count == 1, f"{script.name} sets {name} {count} times"
    script.write_text(text)
