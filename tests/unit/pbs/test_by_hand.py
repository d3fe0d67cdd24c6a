"""The job script for PBS by hand, over what stands for ssh."""

import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import procs
from tests.unit.pbs.site import BOUND, Site, What, ours

UNAME = """#!/bin/sh
if [ "$1" = -n ] && [ -n "$STANDS_FOR" ]; then echo "$STANDS_FOR"; else exec /bin/uname "$@"; fi
"""
SSH = """#!/bin/bash
while [[ $1 != -- ]]; do shift; done
if [[ $2 == deaf ]]; then exec sleep 600; fi
if [[ $2 != twin* ]]; then export STANDS_FOR=$2; fi
exec /bin/bash -s
"""


END_TWICE = """
held=()
exec {first}</dev/null
held[3]=$first
end_ssh 3
exec {other}</dev/null # it takes the number that is free
end_ssh 3
[[ $first == "$other" && -e /proc/self/fd/$other && -z ${held[*]-} ]]
"""


def test_a_task_that_is_ended_twice_does_not_take_anothers_pipe_with_it() -> None:
    starters = Path(__file__).resolve().parents[3] / "pbs/starters.sh"
    line = ["bash", "-c", f'set -euo pipefail\nsource "$1"\n{END_TWICE}', "bash", str(starters)]
    assert subprocess.run(line, timeout=BOUND).returncode == 0


ASKED = """
source "$2"
sleep 60 &
pids=($!)
kill -STOP "${pids[0]}" # as by Ctrl-Z
"end_$3" 0
wait "${pids[0]}"
"""


@pytest.mark.parametrize(("starter", "status"), [("pbsdsh", 143), ("mpiexec", 143), ("pbs_tmrsh", 137)])
def test_a_starter_ends_when_it_is_asked_to_though_it_is_stopped(starter: str, status: int) -> None:
    checkout = Path(__file__).resolve().parents[3]
    files = [str(checkout / name) for name in ("pbs/starters.sh", "host/common.sh")]
    line = ["bash", "-c", f'set -euo pipefail\nsource "$1"\n{ASKED}', "bash", *files, starter]
    with subprocess.Popen(line, start_new_session=True) as asking:
        try:
            assert asking.wait(BOUND) == status
        finally:
            with suppress(ProcessLookupError):
                os.killpg(asking.pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class ByHand:
    site: Site
    env: dict[str, str]

    def program(self, name: str, text: str, *, folder: str) -> None:
        file = self.site.folder / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def start(self, nodes: str, what: What | None = None, **env: str) -> "subprocess.Popen[str]":
        """The job script in a process group of its own."""
        self.site.will(what)
        return subprocess.Popen(
            [
                "bash",
                "-c",
                'GROUP=$$ exec bash "$@"',
                "bash",
                self.site.script,
                "--start",
                "ssh",
                "--nodes",
                nodes,
            ],
            cwd=self.site.submit_dir,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, process: "subprocess.Popen[str]", bound: float = BOUND) -> tuple[int, list[str]]:
        """(status, lines) of one that ends in time."""
        try:
            said, _ = process.communicate(timeout=bound)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said.splitlines()

    def left(self) -> list[str]:
        """What runs of this checkout."""
        lines = (line.decode(errors="replace").replace("\0", " ") for _, line in procs.files("cmdline"))
        return [line for line in lines if str(self.site.checkout) in line]


def last(lines: list[str]) -> str:
    """What was said last, without where the logs are, which is checked."""
    run = ours(lines)[0].removeprefix("run directory ")
    assert ours(lines)[-1].endswith(f" (logs: {run}/logs/0)")
    return ours(lines)[-1].removesuffix(f" (logs: {run}/logs/0)")


@pytest.fixture
def hand(site: Site) -> Iterator[ByHand]:
    """A way to start tasks on any host that one may name; nothing of it is left afterwards."""
    first, stand_ins = site.folder / "first", site.folder / "stand-ins"
    path = f"{first}:{stand_ins}:{os.environ['PATH']}"
    disk = site.folder / "disk"
    disk.mkdir()
    found = ByHand(site=site, env={"PATH": path, "HOME": str(site.pbs.home), "TMPDIR": str(disk)})
    for name, text in (("ssh", SSH), ("uname", UNAME)):
        found.program(name, text, folder="stand-ins")
    yield found
    site.until(lambda: not found.left())
    site.until(lambda: not list(disk.glob("apptrain.??????")))  # a task's directory


def test_by_hand_each_host_has_a_task_and_the_first_failure_counts(hand: ByHand) -> None:
    status, lines = hand.end(hand.start("a,b", {"1": {"status": 7, "node": "b", "error": "x"}}))
    assert (status, sorted(lines[3:5])) == (7, ["host 0 ", "host 1 "])
    assert last(lines) == "status 7: b: x"


@pytest.mark.parametrize("says", [False, True], ids=["silent", "while they print"])
def test_by_hand_tasks_end_with_the_script_however_it_ends(hand: ByHand, says: bool) -> None:
    parts = {"parts": ["line\n"] * 1000} if says else {}
    process = hand.start("a,b", {str(host): {"wait": "never", **parts} for host in (0, 1)})
    logs = hand.site.submit_dir / "runs"
    hand.site.until(lambda: any(f.read_text().count("host ") == 2 for f in logs.glob("*/job.log")))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=BOUND)
    hand.site.until(lambda: not hand.left(), 30.0)  # by themselves they would end after 50
    assert not list(logs.glob("*/tasks/*.env"))


def test_by_hand_the_environment_is_readable_by_its_owner_alone_and_the_next_attempt_removes_what_was_left(
    hand: ByHand,
) -> None:
    process = hand.start("a,b", {"0": {"wait": "go"}, "1": {"wait": "go"}})
    hand.site.until(lambda: hand.site.hosts_seen() == [0, 1])
    (env,) = hand.site.submit_dir.glob("runs/*/tasks/0.env")
    run = env.parents[1]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (env, run)] == [0o600, 0o700]
    left = env.read_bytes()
    (run / "go").touch()
    assert hand.end(process)[0] == 0
    assert not env.exists()
    for name in ("0.env", "0.env.new"):
        (env.parent / name).write_bytes(left)
    assert hand.end(hand.start("a,b", {}, APPTRAIN_RUN_DIR=str(run)))[0] == 0
    assert list(env.parent.glob("*.env*")) == []


HERE = f"{os.uname().nodename},b"
BEFORE = ("readlink", "dirname", "mktemp", "env", "timeout", "mkfifo", "tee", "rm")
STARTING = ("mktemp 2", "cat", "setsid", "ssh", "mkfifo 4", "uname")
MOMENTS = [
    ("at once", "a,b"),
    *((at, "a,b") for at in BEFORE),
    *((at, n) for at in STARTING for n in ("a,b", HERE)),
]
"""With the hosts: as the script calls a program, for the so manieth time. The clock would tell nothing of where the
script is, and what bash loses is a matter of luck then: an interrupt just as a $(...) has ended."""
AT_A_MOMENT = """#!/bin/sh
echo >>{calls}
if [ "$(wc -l <{calls})" -ge {number} ] && ln -s . {calls}.once 2>/dev/null; then kill -s {signal} -- "-$GROUP"; fi
exec {program} "$@"
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("moment", "nodes"), MOMENTS)
def test_by_hand_a_signal_ends_it_at_whatever_moment_it_comes(
    hand: ByHand, moment: str, nodes: str, signum: signal.Signals
) -> None:
    name, _, number = moment.partition(" ")
    program = shutil.which(name, path=hand.env["PATH"])
    if program:
        text = AT_A_MOMENT.format(
            calls=hand.site.folder / "calls", number=number or 1, signal=signum.name[3:], program=program
        )
        hand.program(name, text, folder="first")
    process = hand.start(nodes, {"0": {"wait": "never"}, "1": {"wait": "outcome/0.0", "status": 9}})
    if not program:
        os.killpg(process.pid, signum)
    status, lines = hand.end(process)
    assert status in (-signum, 128 + signum), lines
    assert not program or (hand.site.folder / "calls").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("nodes", ["a,b", HERE])
def test_by_hand_a_signal_ends_it_while_tasks_run(hand: ByHand, nodes: str, signum: signal.Signals) -> None:
    process = hand.start(nodes, {"0": {"wait": "never"}, "1": {"wait": "outcome/0.0", "status": 9}})
    hand.site.until(lambda: hand.site.hosts_seen() == [0, 1])
    os.killpg(process.pid, signum)
    assert hand.end(process)[0] == 128 + signum


def test_by_hand_a_second_interrupt_does_not_wait_for_tasks_that_do_not_end(hand: ByHand) -> None:
    hand.site.bounds("pbs/starters.sh", TO_END=1, POLL=0.01)
    process = hand.start("a,b", {str(host): {"wait": "never", "deaf": 1} for host in (0, 1)})
    hand.site.until(lambda: hand.site.hosts_seen() == [0, 1])
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.5)  # they may be saving: TO_END, here 1, is not for them
    os.killpg(process.pid, signal.SIGINT)
    assert hand.end(process, 20.0)[0] == 130


def test_by_hand_a_host_that_takes_the_connection_and_no_more_is_named(hand: ByHand) -> None:
    hand.site.bounds("pbs/starters.sh", TO_END=1)
    process = hand.start("a,deaf", {"0": {"wait": "outcome/0.1"}}, APPTRAIN_ANSWER_TIMEOUT="4")
    status, lines = hand.end(process)
    assert status == 1
    assert last(lines) == "status 1: deaf: no task has answered there for 4 s: ssh said: nothing"


def test_by_hand_two_names_of_one_host_are_refused(hand: ByHand) -> None:
    status, lines = hand.end(hand.start("twin1,twin2", {"0": {"status": "none"}, "1": {"status": "none"}}))
    here = os.uname().nodename
    error = f"tasks of (twin1 and twin2|twin2 and twin1) both run on {here}: name it once"
    assert status == 1
    assert re.fullmatch(rf"status 1: twin[12]: {error} \(logs: .*\)", ours(lines)[-1])


def test_by_hand_a_task_that_ends_without_an_outcome_gets_one_while_others_wait_for_it(hand: ByHand) -> None:
    process = hand.start("a,b", {"0": {"wait": "outcome/0.1"}, "1": {"status": "none"}})
    status, lines = hand.end(process)
    assert status == 1
    assert last(lines) == "status 1: b: its task ended and left no outcome"
