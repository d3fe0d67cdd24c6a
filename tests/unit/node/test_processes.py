"""Processes below this one: what they catch, and how every one of them is ended."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entrypoint.node import processes


def child(code: str) -> subprocess.Popen[str]:
    """A Python process that says `ready` once it is."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_caught_signal_is_told_from_an_ignored_and_a_default_one() -> None:
    process = child(
        "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: None)\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "sum(range(5_000_000))\nprint('ready', flush=True)\ninput()"
    )
    assert processes.catches(process.pid, signal.SIGUSR2)
    assert not processes.catches(process.pid, signal.SIGHUP)
    assert not processes.catches(process.pid, signal.SIGUSR1)
    process.kill()
    process.communicate()
    assert not processes.catches(process.pid, signal.SIGUSR2)


def test_a_process_whose_name_is_no_text_is_seen_like_any_other() -> None:
    """The kernel cuts a name after 15 bytes, so inside a letter; and a name may have any bytes of its own."""
    for given, shown in (
        ("обучение".encode()[:15], "обучени\ufffd"),
        (b"a) R 1\n\xff", "a) R 1 \ufffd"),
    ):
        process = child(
            f"import ctypes, signal\nctypes.CDLL(None).prctl(15, {given!r}, 0, 0, 0)\n"
            "signal.signal(signal.SIGUSR2, lambda *_: None)\nsum(range(5_000_000))\nprint('ready', flush=True)\ninput()"
        )
        pid = process.pid
        assert processes.catches(pid, signal.SIGUSR2)
        assert processes.is_running(pid)
        assert processes.state(pid) in ("S", "R")
        assert int(processes.begun(pid)) > 0
        assert processes.age(pid) is not None
        assert processes.cpu(pid) > 0
        assert processes.name(pid) == shown
        process.kill()
        process.communicate()
        assert (processes.state(pid), processes.begun(pid), processes.age(pid)) == ("", "", None)
        assert (processes.cpu(pid), processes.name(pid)) == (0.0, "")


def test_below_a_process_that_is_gone_there_is_nobody() -> None:
    process = child("print('ready', flush=True)\ninput()")
    process.kill()
    process.communicate()
    assert processes.catching_below(process.pid, signal.SIGUSR2) == []


def test_of_a_tree_the_topmost_that_catch_a_signal_are_found() -> None:
    catching = "import signal; signal.signal(signal.SIGUSR2, lambda *_: None); "
    below = f"import subprocess, sys, time; {catching}\nprint('ready', flush=True); time.sleep(60)"
    code = (
        f"import subprocess, sys\nbelow = {below!r}\n"
        "one = subprocess.Popen([sys.executable, '-c', below], stdout=subprocess.PIPE)\none.stdout.readline()\n"
        "print('ready', flush=True); print(one.pid, flush=True)\ninput()"
    )
    process = child(code)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert processes.catching_below(process.pid, signal.SIGUSR2) == [pid]
    assert processes.catching_below(process.pid, signal.SIGUSR1) == []
    processes.signal_groups([process.pid], signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("starts", ["a shell", "a script", "a program"])
def test_for_a_shell_what_it_has_started_heeds_a_signal_and_for_a_program_none_of_its_own(
    tmp_path: Path, starts: str
) -> None:
    catching = "import signal\nsignal.signal(signal.SIGUSR2, print)\nprint('ready', flush=True)\ninput()"
    words = [sys.executable, "-c", catching]
    below = [sys.executable, "-c", f"import subprocess\nsubprocess.run({words!r})"]
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\n{shlex.join(words)}\nexit $?\n")
    script.chmod(0o700)
    line = {"a shell": ["sh", str(script)], "a script": [str(script)], "a program": below}[starts]
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (child,) = processes.catching_below(process.pid, signal.SIGUSR2)
    both = {process.pid: () if starts == "a program" else (child,), child: (child,)}
    assert processes.heeding([process.pid, child], signal.SIGUSR2) == both
    assert processes.heeding([process.pid], signal.SIGUSR1) == {process.pid: ()}
    processes.signal_groups([process.pid], signal.SIGKILL)
    process.communicate()


def test_a_program_of_a_shell_that_takes_its_handler_back_still_heeds_the_signal_that_it_got() -> None:
    once = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: signal.signal(signal.SIGUSR2, signal.SIG_IGN))\n"
    waits = "while signal.getsignal(signal.SIGUSR2) != signal.SIG_IGN: time.sleep(0.01)\n"
    code = f"{once}print('ready', flush=True)\n{waits}print('told', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen(
        ["sh", "-c", f"{shlex.join([sys.executable, '-c', code])}; exit $?"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (child,) = processes.heeding([process.pid], signal.SIGUSR2)[process.pid]
    os.kill(child, signal.SIGUSR2)
    assert process.stdout.readline() == "told\n"
    assert processes.heeding([process.pid], signal.SIGUSR2) == {process.pid: ()}
    assert processes.heeding([process.pid], signal.SIGUSR2, {child}) == {process.pid: (child,)}
    processes.signal_groups([process.pid], signal.SIGKILL)
    process.communicate()


def test_one_look_at_all_processes_shows_what_each_shell_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "sh -c 'trap : USR2; echo ready; read line; exit'; exit"
    shells = [
        subprocess.Popen(["sh", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [shell.stdout.readline() for shell in shells if shell.stdout] == ["ready\n"] * 3
    looks: list[int] = []
    look = processes._by_parent

    def counted() -> dict[int, list[int]]:
        looks.append(1)
        return look()

    monkeypatch.setattr(processes, "_by_parent", counted)
    found = processes.heeding([shell.pid for shell in shells], signal.SIGUSR2)
    assert (len(looks), [len(targets) for targets in found.values()]) == (1, [1, 1, 1])
    assert processes.heeding([targets[0] for targets in found.values()], signal.SIGUSR2)
    assert len(looks) == 1
    for shell in shells:
        shell.communicate("\n")


def test_what_a_shell_has_started_is_seen_after_it_has_ended() -> None:
    line = "trap 'exit 0' TERM; sh -c 'trap \"\" TERM; echo ready; exec sleep 60' & wait"
    process = subprocess.Popen(
        ["bash", "-c", line], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(processes.in_groups([process.pid])) == 2
    assert processes.in_groups([1]) == []
    processes.adopt_orphans()
    try:
        processes.signal_groups([process.pid], signal.SIGTERM)
        assert process.wait(30) == 0
        (left,) = processes.in_groups([process.pid])
        os.kill(left, signal.SIGKILL)
        os.waitpid(left, 0)
    finally:
        processes._prctl(processes.PR_SET_CHILD_SUBREAPER, 0)
    assert processes.in_groups([process.pid]) == []


def test_a_zombie_is_not_running() -> None:
    process = child("sum(range(5_000_000))\nprint('ready', flush=True)\ninput()")
    assert processes.is_running(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.is_running(process.pid)
    process.communicate()
    assert not processes.is_running(process.pid)


def test_orphans_in_sessions_of_their_own_are_found_and_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
from entrypoint.node import processes
processes.adopt_orphans()
nap = "import os, time; open({str(pids)!r}, 'a').write(str(os.getpid()) + chr(10)); time.sleep(100)"
# A child that starts a session with a grandchild, and dies: what an agent leaves behind.
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{nap!r}}], start_new_session=True)"
subprocess.run([sys.executable, "-c", middle], check=True)
while not os.path.exists({str(pids)!r}) or not os.path.getsize({str(pids)!r}): time.sleep(0.02)
processes.kill_descendants()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    pid = int(pids.read_text())
    assert not processes.is_running(pid)


def test_a_child_may_be_made_to_die_with_its_parent() -> None:
    code = """
import subprocess, sys, time
from entrypoint.node import processes
nap = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], preexec_fn=processes.die_with_parent)
print(nap.pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert processes.is_running(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while processes.is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes.is_running(pid)


def test_only_orphans_that_nobody_waits_for_are_reaped() -> None:
    """At the second look: who waits for a child of its own has taken its end by then."""
    code = """
import os, subprocess, time
from entrypoint.node import processes
processes.adopt_orphans()
subprocess.run("true & true &", shell=True, check=True)
mine = subprocess.Popen(["sleep", "50"])
while [processes.state(pid) for pid in processes._children(os.getpid())].count("Z") < 2: time.sleep(0.02)
first = processes.reap(frozenset())
second = processes.reap(first)
left = [pid for pid in first if processes.state(pid)]
print(len(first), len(second), len(left), mine.poll())
mine.kill()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "2 0 0 None\n"
