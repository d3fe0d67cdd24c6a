"""What holds the double of OpenPBS to the recordings of the real one.

What a request becomes and which variables there are is compared with every recording; what happens to processes,
with the transcripts under tests/recordings/openpbs/logs.
"""

import time
from collections.abc import Callable
from pathlib import Path

from entrypoint.node import processes
from tests.pbs_double.local import Local

RECORDINGS = Path(__file__).parents[2] / "recordings/openpbs"
HOSTS = ("pbsn1", "pbsn2", "pbsn3")
KILL_DELAY = 1.0
"""Seconds, of the queue for what lingers; the real one's default is that of Config."""
BOUND = 50.0  # s, for anything waited for here
PATIENT = 600.0
"""Of the other queue, where nothing must wait for it."""
TWO = ("-l", "select=2:ncpus=1", "-l", "place=scatter")
TASK = """\
trap 'echo $EPOCHREALTIME TERM >>{log}.$PBS_NODENUM' TERM
exec {{pause}}<> <(:)
echo $EPOCHREALTIME start >>{log}.$PBS_NODENUM
for ((i = 0; i < 1800; i++)); do echo $EPOCHREALTIME alive >>{log}.$PBS_NODENUM; read -t 0.05 -u $pause; done
"""
"""Logs every TERM and goes on, for a minute and a half."""


def runs(pid: int) -> bool:
    return processes.is_running(pid)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def ran(pbs: Local, script: str, *options: str, name: str = "t") -> tuple[str, str, dict[str, str]]:
    """(stdout, stderr, attributes) of a job."""
    id = pbs.submit(f"#!/bin/bash\n{script}\n", "-N", name, *(options or TWO))
    ended = pbs.wait(id)
    number = id.split(".")[0]
    out, err = (pbs.home / f"{name}.{letter}{number}" for letter in "oe")
    return out.read_text(), err.read_text(), ended


def there(*files: Path) -> str:
    """Waits for something in these files, in bash."""
    tests = " && ".join(f"-s {file}" for file in files)
    return f"until [[ {tests} ]]; do sleep 0.02; done"


def started(log: Path) -> None:
    until(lambda: all(Path(f"{log}.{host}").exists() for host in (0, 1)), "the tasks start")


def qdel(
    pbs: Local, script: str, log: Path, *options: str, queue: str = "workq"
) -> tuple[float, dict[str, str], str]:
    """(when qdel was called, attributes, stdout) of a job that was deleted once its tasks had started."""
    task = log.with_name("task.sh")
    task.write_text(TASK.format(log=log))
    id = pbs.submit(f"#!/bin/bash\n{script.format(task=task)}\n", "-N", "q", "-q", queue, *TWO)
    started(log)
    when = time.time()
    assert pbs.run("qdel", *options, id).returncode == 0
    ended = pbs.wait(id)
    return when, ended, (pbs.home / f"q.o{id.split('.')[0]}").read_text()
