"""`pbs/multinode.pbs` and its neighbours on the double of OpenPBS, with a stand-in for run.sh.

The stand-in does what a test says for a host, and writes the outcome that the entrypoint would write.
tests/cluster/test_pbs.py has the real image, real hosts, ssh and mpiexec.
"""

import marshal
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entrypoint.node import processes
from tests.pbs_double.local import Local
from tests.unit import in_image
from tests.unit.bounds import shorten

CHECKOUT = Path(__file__).resolve().parents[3]
HOSTS = ("pbsn1", "pbsn2", "pbsn3")
KILL_DELAY = 3.0
QUEUES = {"25": 25.0}
"""A further one, with its kill_delay."""
BOUND = 90.0  # s, for anything started here
RUN_SH = """#!{python} -IS
import _signal, marshal, os, sys, time  # which take no time to import
word = sys.argv[sys.argv.index("entrypoint") + 1]
if word in ("prepare", "conclude"):
    exec({in_image!r})
host, attempt = os.environ.get("PBS_NODENUM", os.environ.get("APPTRAIN_NODE_RANK")), os.environ.get("APPTRAIN_ATTEMPT", "0")
with open("{here}/what", "rb") as file:
    what = marshal.load(file)
what = what.get(attempt + "." + host, what.get(host, {{}}))
run = os.environ["APPTRAIN_RUN_DIR"]
words = sys.argv[sys.argv.index("entrypoint") + 1:]
def put(path, content):  # whole, or not at all
    new = f"{{path}}.{{os.getpid()}}.new"
    with open(new, "wb") as file:
        file.write(content)
    os.rename(new, path)
terms = []
_signal.signal(_signal.SIGTERM, lambda *_: terms.append(time.time()))
put(f"{here}/{{attempt}}.{{host}}.seen", marshal.dumps({{"env": dict(os.environ), "argv": words, "options": sys.argv[1:sys.argv.index("python") - 1], "cwd": os.getcwd()}}))
print(f"host {{host}}", what.get("print", ""), flush=True)
for part in what.get("parts", []):
    sys.stdout.write(part)
    sys.stdout.flush()
    time.sleep(0.01)
image = None
if what.get("fuse"):  # what mounts the image: its own process group, the same session, no handler, no environment
    import subprocess
    image = subprocess.Popen(["sleep", "600"], process_group=0, env={{}})
    rank = subprocess.Popen(["sleep", "601"], start_new_session=True)
    put(f"{here}/{{host}}.pids", f"{{os.getpid()}} {{image.pid}} {{rank.pid}}".encode())
if what.get("wait"):
    deadline = time.monotonic() + 50
    while not (terms or os.path.exists(f"{{run}}/{{what['wait']}}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    if terms:
        if what.get("deaf"):
            time.sleep(50)
        if host == "0":
            open(f"{{run}}/told", "w").close()  # as the join tells the other nodes
        time.sleep(what.get("save", 0))
        put(f"{here}/{{host}}.saved", f"{{image is None or image.poll() is None}} {{len(terms)}}".encode())
        what["status"] = 143
for left in (image, rank) if image else ():
    left.kill()
status = what.get("status", 0)
if status != "none":
    lines = {{"status": status, "rank": what.get("rank", ""), "node": what.get("node", ""), "signal": 0,
        "time": what.get("time", "100.000000"), "error": what.get("error", "")}}
    for number, crew in what.get("crews", {{}}).items():
        put(f"{{run}}/outcome/{{number}}.nodes", crew.encode())
    for number, later in {{attempt: status, **what.get("then", {{}})}}.items():
        text = "".join(f"{{name}}={{value}}\\n" for name, value in {{**lines, "status": later}}.items())
        put(f"{{run}}/outcome/{{number}}.{{host}}", text.encode())
    hand = os.environ["APPTRAIN_HAND"]
    if host == "0" and os.path.isdir(hand):
        with open(f"{{hand}}/state.{{attempt}}", "rb") as file:
            hosts = [entry[5:].decode() for entry in file.read().split(bytes(1)) if entry[:5] == b"host="]
        crew = [int(line.split()[0]) for crew in what.get("crews", {{}}).values() for line in crew.splitlines()]
        gone = [at for at in range(len(hosts)) if crew and at not in crew]
        if lines["error"].startswith("lost: "):
            gone.append(hosts.index(lines["node"]))
        over = [f"lost={{at}}" for at in gone] + ["asked=yes"] * (status == 143)
        put(f"{{hand}}/over", "".join(entry + chr(0) for entry in over).encode())
    sys.exit(0 if status == 75 else status)
sys.exit(1)
"""
BOUNDS = {
    "host/job.sh": {"LOG_PAUSE": 0.01, "LOG_TRIES": 500},
    "pbs/starters.sh": {"POLL": 0.05, "SETTLE": 1, "SETTLE_ALL": 0, "LOST": 1},
    "pbs/task.sh": {"TRY_PAUSE": 0.02},
}
"""What the scripts allow a shared file system, which is not needed here."""
What = dict[str, dict[str, Any]]
"""What the stand-in does on a host of this rank (`0`), or of an attempt and a rank (`1.0`)."""


class Site:
    """A checkout with the real job script on a double of OpenPBS."""

    def __init__(self, pbs: Local, folder: Path):
        self.pbs = pbs
        self.folder = folder
        self.checkout = folder / "check [out] it's"
        self.submit_dir = folder / "submit, here"
        self.submit_dir.mkdir(parents=True)
        for script in ("train.py", "x.py", "my.py", "a.py", "b.py", "a b.py", "a b"):
            (self.submit_dir / script).touch()
        shutil.copytree(CHECKOUT / "pbs", self.checkout / "pbs")
        for name in ("containers", "host", "clusters"):
            (self.checkout / name).mkdir()
        for name in ("job.sh", "common.sh", "staging.sh", "stage.sh", "staged.sh"):
            shutil.copy(CHECKOUT / "host" / name, self.checkout / "host")
        run_sh = self.checkout / "containers/run.sh"
        run_sh.write_text(RUN_SH.format(python=sys.executable, here=folder, in_image=in_image.client()))
        run_sh.chmod(0o755)
        for name, values in BOUNDS.items():
            self.bounds(name, **values)
        self.script = self.checkout / "pbs/multinode.pbs"

    def bounds(self, script: str, **values: float) -> None:
        shorten(self.checkout / script, **values)

    def will(self, what: What | None) -> None:
        """Tells the stand-ins what to do."""
        (self.folder / "what").write_bytes(marshal.dumps(what or {}))

    def submit(
        self, *options: str, what: What | None = None, script: Path | None = None, **variables: str
    ) -> str:
        """qsub, with these variables named in one -v."""
        self.will(what)
        words = [*options, *(["-v", ",".join(variables)] if variables else []), str(script or self.script)]
        ended = self.pbs.run("qsub", *words, cwd=self.submit_dir, env=variables)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def end(self, id: str) -> tuple[str, list[str]]:
        """(exit status, lines of the output) of a job that ends."""
        found = self.pbs.wait(id, limit=BOUND)
        text = self.output(found).read_text()
        print(text)
        return found["Exit_status"], text.splitlines()

    def output(self, attributes: dict[str, str]) -> Path:
        return Path(attributes["Output_Path"].partition(":")[2])

    def ran(self, *options: str, **how: Any) -> tuple[str, list[str]]:
        return self.end(self.submit(*options, **how))

    def run_dir(self, id: str, name: str = "apptrain") -> Path:
        number = id.split(".")[0].replace("[", "_").replace("]", "")
        return self.submit_dir / f"runs/{name}-{number}"

    def seen(self, host: int, attempt: int = 0) -> dict[str, Any]:
        """What the stand-in saw there."""
        found: dict[str, Any] = marshal.loads((self.folder / f"{attempt}.{host}.seen").read_bytes())
        return found

    def hosts_seen(self, attempt: int = 0) -> list[int]:
        return sorted(int(path.name.split(".")[1]) for path in self.folder.glob(f"{attempt}.*.seen"))

    def work(self, id: str, hosts: int = 2) -> None:
        """Returns once so many hosts work, and what ends them knows of them."""
        tasks = self.run_dir(id) / "tasks"
        self.until(lambda: self.hosts_seen() == list(range(hosts)))
        self.until(lambda: all((tasks / f"0.{host}").exists() for host in range(hosts)))

    def until(self, condition: Callable[[], object], bound: float = BOUND) -> None:
        deadline = time.monotonic() + bound
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def sed(self, expression: str) -> Path:
        """The job script with other directives."""
        script = self.checkout / "pbs/edited.pbs"
        edited = subprocess.run(["sed", expression, self.script], capture_output=True, text=True, check=True)
        script.write_text(edited.stdout)
        return script


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


def ours(lines: list[str]) -> list[str]:
    return [line.removeprefix("apptrain: ") for line in lines if line.startswith("apptrain: ")]


LOST = {"status": 1, "node": "pbsn2", "error": "lost: nothing was heard from it for 60 s"}
"""What the other hosts' entrypoints write."""


def processes_gone(folder: Path, hosts: tuple[int, ...] = (0, 1)) -> bool:
    pids = [int(pid) for host in hosts for pid in (folder / f"{host}.pids").read_text().split()]
    return not any(processes.is_running(pid) for pid in pids)


def busy(site: Site, *options: str, **more: Any) -> str:
    """A job whose hosts work with an image and a rank each, until told."""
    what: What = {
        "0": {"wait": "go", "fuse": 1, "save": 0.3, **more},
        "1": {"wait": "told", "fuse": 1, "status": 143, **more},
    }
    id = site.submit(*options, what=what)
    site.work(id)
    site.until(lambda: all((site.folder / f"{host}.pids").exists() for host in (0, 1)))
    return id


def mpiexec(folder: Path, version: str) -> str:
    """The line by which a login shell finds an mpiexec of this version."""
    file = folder / "mpi/mpiexec"
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\necho {shlex.quote(version)}\n")
    file.chmod(0o755)
    return f"PATH={shlex.quote(str(file.parent))}:$PATH"


def task(folder: Path, *arguments: str, **env: str) -> tuple[int, str, list[str]]:
    """(status, stderr, lines of its outcome but the time) of pbs/task.sh with this run directory."""
    for name in ("pbs/task.sh", "host/common.sh"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / name, folder / name)
    script = folder / "pbs/task.sh"
    shorten(script, TRIES=2, TRY_PAUSE=0.01)
    ended = subprocess.run(
        ["bash", script, str(folder / "run"), "0", *arguments],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    outcomes = list(folder.glob("run/outcome/0.*"))
    lines = outcomes[0].read_text().splitlines() if outcomes and arguments[1] != "-" else []
    return ended.returncode, ended.stderr, [line for line in lines if not line.startswith("time=")]
