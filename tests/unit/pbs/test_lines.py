"""What the job script for PBS shows of its tasks' output, and by which clock it waits."""

import resource
import subprocess
from pathlib import Path

import pytest

from tests.unit.pbs.site import BOUND, CHECKOUT, Site, What, ours

LOOKS = """
set -euo pipefail
LC_ALL=C
source "$1/host/common.sh"
source "$1/pbs/starters.sh"
say() { echo "$*" >&2; }
files=("${@:2}") nnodes=$(($# - 1)) fds=() rests=() more='' unfinished='' run_dir=/run attempt=0
"""
ROOM = 80_000_000
"""Bytes of memory for bash."""


def looks(script: str, *texts: bytes, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """What these lines of bash show of files with these texts."""
    files = [folder / f"{number}.log" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text)
    return subprocess.run(
        ["bash", "-c", LOOKS + script, "bash", CHECKOUT, *files],
        capture_output=True,
        timeout=BOUND,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM)),
    )


def test_a_long_line_is_shown_as_it_is_and_kept_nowhere(tmp_path: Path) -> None:
    line = b"x" * 100_000_000
    ended = looks("show_rest", line, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout == line + b"\n"


def test_a_look_shows_a_part_of_a_flood(tmp_path: Path) -> None:
    text = b"some line\n" * 1_000_000
    ended = looks('show_lines; echo "more: $more"', text, b"the other's\n", folder=tmp_path)
    shown, _, other = ended.stdout.rpartition(b"more: ")
    assert other == b"yes\n"
    assert len(shown) < len(text) / 2
    assert shown.endswith(b"some line\nthe other's\n")


@pytest.mark.parametrize("texts", [(b"a\nb", b"c"), (b"", b"c"), (b"a\n", b"b\n"), (b"x" * 20_000, b"c")])
def test_a_last_line_without_an_end_is_shown_as_a_line(tmp_path: Path, texts: tuple[bytes, ...]) -> None:
    shown = looks("show_rest", *texts, folder=tmp_path).stdout
    assert sorted(shown.splitlines()) == sorted(line for text in texts for line in text.splitlines())
    assert shown.endswith(b"\n")


@pytest.mark.parametrize("length", [1, 16383, 16384, 16385, 40000])
def test_the_lines_of_two_hosts_do_not_run_into_one_another(tmp_path: Path, length: int) -> None:
    first = b"a" * length
    more = f'show_lines; printf "bc\\nd" >>{tmp_path}/0.log; printf "2\\n" >>{tmp_path}/1.log; show_rest'
    lines = looks(more, first, b"b1\nb", folder=tmp_path).stdout.split(b"\n")
    assert b"b1" in lines
    assert b"b2" in lines
    assert b"d" in lines
    assert b"".join(line for line in lines if line not in (b"b1", b"b2", b"d")) == first + b"bc"


def test_a_flood_that_does_not_end_is_left_with_a_word(tmp_path: Path) -> None:
    """The clock here tells 40 s more each time."""
    clock = "read_clock() { seconds=$((${seconds:-0} + 40)); };\n"
    ended = looks(clock + "show_rest", b"x\n" * 10_000_000, folder=tmp_path)
    assert ended.stderr == b"not all that the tasks printed is shown: it is in /run/logs/0\n"


def test_the_wall_clock_may_be_set_while_tasks_start_and_run(site: Site) -> None:
    """bash's SECONDS follows it: here that goes on by an hour at each look, and `date` by as much."""
    starters = site.checkout / "pbs/starters.sh"
    jumps = 'pause() { SECONDS=$((SECONDS + 3600)); read -r -t "$POLL" -u "$clock" || true; }\n'
    starters.write_text(starters.read_text() + jumps)
    what: What = {"0": {"wait": "outcome/0.1"}, "1": {}}
    status, lines = site.ran(what=what)
    assert (status, [line for line in ours(lines) if "answered" in line]) == ("0", [])


@pytest.mark.parametrize("wait", ["read_job_time", "job_end"])
def test_the_end_of_the_walltime_is_counted_by_the_nodes_clock(wait: str) -> None:
    script = f"""
APPTRAIN_HOME=$1
source "$1/host/common.sh"
source "$1/pbs/host.sh"
printf -v before '%(%s)T' -1
read_clock
wall=$((before - 7200)) wall_at=$seconds end_at=$((before - 7200 + 60)) # the wall clock was two hours behind then
now=0
{wait} >/tmp/null.$$ && told=$(cat /tmp/null.$$)
rm /tmp/null.$$
echo "$((now - before + 7200)) $((${{told:-0}} - before))"
"""
    ended = subprocess.run(
        ["bash", "-c", script, "bash", CHECKOUT], capture_output=True, text=True, timeout=BOUND
    )
    since, left = map(int, ended.stdout.split())
    if wait == "read_job_time":
        assert 0 <= since < BOUND
    else:
        assert -1 <= left - 60 < BOUND  # two clocks are read, each in whole seconds
