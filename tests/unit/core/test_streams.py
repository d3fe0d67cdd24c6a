"""entrypoint/core/streams.py: every command ends as it would, whatever its standard streams and current directory are."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.core import streams

CHECKOUT = Path(__file__).resolve().parents[3]
APPTRAIN = str(CHECKOUT / "apptrain")
ENTRYPOINT = f"{sys.executable} -P -m entrypoint"
FULL = "apptrain: stdout cannot be written: No space left on device"
BAD = "plan --env-file /missing"


def ended(folder: Path, line: str) -> tuple[int, str]:
    """Status and stderr of a line of bash."""
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        (f"{APPTRAIN} --help >&-", 0, ""),
        (f"{APPTRAIN} --help >&- 2>&- <&-", 0, ""),
        (f"{APPTRAIN} --help >/dev/full", 1, FULL),
        (f"{APPTRAIN} doctor --help >/dev/full", 1, FULL),
        (f"{APPTRAIN} {BAD} 2>&-", 64, ""),
        (f"{APPTRAIN} {BAD} 2>/dev/full", 64, ""),
        (f"{ENTRYPOINT} {BAD} 2>/dev/full >&-", 64, ""),
        (f"{ENTRYPOINT} plan --help >/dev/full", 1, FULL),
        (f"{APPTRAIN} compare a b <&- >&-", 64, "apptrain: th"),
        (f"{APPTRAIN} --help | true; exit ${{PIPESTATUS[0]}}", 141, ""),
    ],
)
def test_a_stream_that_is_closed_or_full_changes_no_status_and_is_no_traceback(
    tmp_path: Path, line: str, status: int, said: str
) -> None:
    found, err = ended(tmp_path, line)
    assert (found if "PIPESTATUS" not in line else 141, err[: len(said)]) == (status, said)
    assert len(err.splitlines()) == bool(said), err


CLOSED = """
import os, sys
from entrypoint.core import streams
streams.make_usable()
print("lost", flush=True)
print("lost", file=sys.stderr)
found = [(os.readlink(f"/proc/self/fd/{n}"), os.get_inheritable(n)) for n in range(3)]
numbers = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]
open("seen", "w").write(repr((found, numbers, sys.stdin.read())))
"""


def test_what_a_command_starts_gets_the_streams_too(tmp_path: Path) -> None:
    """Else its first file would have the number of its stdout."""
    (tmp_path / "closed.py").write_text(CLOSED)
    assert ended(tmp_path, f"{sys.executable} -P closed.py <&- >&- 2>&-") == (0, "")
    null = ("/dev/null", True)
    assert (tmp_path / "seen").read_text() == repr(([null] * 3, [0, 1, 2], ""))


def test_a_stream_that_is_open_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "closed.py").write_text(CLOSED)
    assert ended(tmp_path, f"echo text | {sys.executable} -P closed.py >out 2>err") == (0, "")
    assert [(tmp_path / name).read_text() for name in ("out", "err")] == ["lost\n"] * 2
    assert (tmp_path / "seen").read_text().endswith(", [0, 1, 2], 'text\\n')")


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (errno.EPIPE, 141, ""),
        (errno.ENOSPC, 1, f"{FULL}\n"),
        (errno.EIO, 1, "apptrain: stdout cannot be written: Input/output error\n"),
        (errno.EBADF, None, ""),
        (errno.EACCES, None, ""),
    ],
)
def test_an_output_that_is_lost_has_a_status_and_any_other_error_is_ours(
    number: int, status: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(number, os.strerror(number))
    if status is None:
        with pytest.raises(OSError, match=os.strerror(number)):
            streams.lost(error)
    else:
        assert streams.lost(error) == status
    assert capsys.readouterr() == ("", said)
    with pytest.raises(OSError, match="its file"):
        streams.lost(OSError(number, os.strerror(number), "its file"))


@pytest.mark.parametrize(
    "words",
    [
        *(f"{APPTRAIN} {name}" for name in ("--version", "run -- x.py", "submit", "compare a b")),
        f"{ENTRYPOINT} launch",
        f"{sys.executable} -P -m entrypoint.cli.embedded -- x.py",
    ],
)
def test_a_current_directory_that_was_removed_is_one_line(tmp_path: Path, words: str) -> None:
    status, err = ended(tmp_path, f"mkdir gone && cd gone && rmdir ../gone && {words}")
    (line,) = (line for line in err.splitlines() if "getcwd" not in line)  # that is the shell's
    told = "the current directory cannot be found (No such file or directory): cd to one that exists"
    assert (status, line.partition(": ")[2]) == (64, told)


@pytest.mark.parametrize(
    "word", ["x';touch${IFS}P;'", "x';touch${IFS}P;'=1", "$(shell touch P)", '"`touch P`']
)
def test_a_word_for_make_is_no_command_of_a_shell(tmp_path: Path, word: str) -> None:
    (tmp_path / "tools").symlink_to(CHECKOUT / "tools")
    (tmp_path / "entrypoint").symlink_to(CHECKOUT / "entrypoint")
    (tmp_path / "containers").symlink_to(CHECKOUT / "containers")
    (tmp_path / "Makefile").symlink_to(CHECKOUT / "Makefile")
    done = subprocess.run(
        ["make", word], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "no target" in done.stderr
    assert not (tmp_path / "P").exists()
