"""What make's variables become: whole words of a command, never shell."""

import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
RECORDER = """\
#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done >>"$RECORD"
"""
INJECTION = """2"; touch planted; echo "'$(touch planted)`touch planted`"""


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("demo", ["NODES", "CONFIG"]),
        ("submit", ["NODES", "CLUSTER", "GPUS", "PARTITION", "ACCOUNT", "TIME", "OPTIONS"]),
        ("profiles", ["PROFILE"]),
        ("image", ["STACK", "BASE", "EXTRA", "OFFLINE", "IMAGE"]),
    ],
)
def test_a_value_reaches_the_command_as_one_word_and_runs_nothing(
    target: str, names: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(RECORDER)
    python.chmod(0o755)
    record = tmp_path / "record"
    values = {name: f"{INJECTION} {name}" for name in names}
    given = [f"{name}={value.replace('$', '$$')}" for name, value in values.items()]  # make's own quoting
    venvs = [f"VENV={tmp_path}", f"IMAGE_VENV={tmp_path}"]
    env = {"PATH": os.environ["PATH"], "RECORD": str(record)}
    made: list[str | Path] = [
        "make",
        "-f",
        CHECKOUT / "Makefile",
        "-o",
        "venv",
        "-o",
        "venv-image",
        target,
        *venvs,
    ]
    ended = subprocess.run([*made, *given], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "planted").exists()
    words = record.read_text().split("\0")
    assert [
        name for name, value in values.items() if not {value, f"--{name.lower()}={value}"} & set(words)
    ] == []
