"""What a stranger on the same network can and cannot do to a job, and what of it others may read.

Attacks on the join's protocol itself are in tests/unit/meet/test_hub.py and test_wire.py; planted pickles and YAML tags in
tests/unit/train/test_checkpoint.py, test_config.py and tests/unit/cli/test_main.py; shells in tests/unit/host/test_injection.py.
docs/security.md names them all.
"""

import ast
import asyncio
import base64
import datetime
import json
import os
import pickle
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from entrypoint import __version__
from entrypoint.meet import wire
from entrypoint.meet.identity import Identity
from tests.embedded.jobs import CHECKOUT, Ended, Job, clean_env, processes_with, start
from tests.ports import free_port

WAITING = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist
here = Path(os.environ["APPTRAIN_RUN_DIR"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
(here / f"up.{dist.get_rank()}").touch()
while not (here / "go").exists():
    time.sleep(0.05)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
os._exit(0)  # sooner than torch is taken down
"""
SECRETS = {
    "HF_TOKEN": "hf_secret-0a1b2c3d4e5f",
    "WANDB_API_KEY": "wandb_secret-5f4e3d2c1b0a",
    "PBS_JOBCOOKIE": "cookie_secret-99887766",
    "SLURM_JWT": "jwt_secret-55443322",
}
LISTEN = "0A"
"""A listening socket's state in /proc/net/tcp."""


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def listeners(port: int) -> set[str]:
    """The IPv4 addresses, and `IPv6` for any of those, on which this machine listens at this port."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            host, _, number = address.partition(":")
            if state == LISTEN and int(number, 16) == port:
                octets = reversed(bytes.fromhex(host))
                found.add(".".join(map(str, octets)) if name == "tcp" else "IPv6")
    return found


def is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 10).close()
    except ConnectionRefusedError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What could be seen of a job on two nodes while its ranks ran, and how it ended."""

    master_addr: str
    store: set[str]
    """Where its store listens."""
    open: list[str]
    """The addresses at which it can be reached."""
    join: set[str]
    """Where its join listens."""
    planted: list[str]
    """The keys of torchrun in the store, without the job's name, which held a pickle from then on."""
    key: bytes
    key_mode: int
    processes: dict[int, bytes]
    """Command lines and environments."""
    holders: set[Path]
    """Files with the key."""
    ran: bool
    """Whether the pickle was loaded."""
    ended: Ended


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    folder = tmp_path_factory.mktemp("waiting")
    (folder / "waiting.py").write_text(WAITING)
    passed = {"APPTRAIN_PASS": f"PYTHONPATH {' '.join(SECRETS)}"}
    job = start(folder, "--", str(folder / "waiting.py"), env=SECRETS | passed)
    try:
        job.until(lambda: all((job.run / f"up.{rank}").exists() for rank in (0, 1)), "its ranks to be up")
        plan = json.loads((job.run / "plan.0.json").read_text())
        port, file = plan["master_port"], job.run / "join.key"
        key = file.read_bytes().strip()
        pids = processes_with(f"APPTRAIN_RUN_DIR={job.run}")
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=20))
        keys = store.list_keys()  # type: ignore[attr-defined]
        name = plan["rendezvous"]["id"]
        elastic = sorted(found for found in keys if "torchelastic" in found)
        seen = partial(
            Seen,
            master_addr=plan["master_addr"],
            store=listeners(port),
            open=[address for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3") if is_open(address, port)],
            join=listeners(plan["rendezvous"]["join_port"]),
            planted=[found.removeprefix(name) for found in elastic],
            key=key,
            key_mode=file.stat().st_mode & 0o777,
            processes={pid: said_of(pid) for pid in pids},
            holders=holding(job.run, key),
        )
        evil = pickle.dumps(Planted(job.run / "ran"))
        for found in [*elastic, f"torch.rendezvous.{name}"]:
            for text in (evil, base64.b64encode(evil)):
                store.set(found, text)  # type: ignore[arg-type]
    finally:
        (job.run / "go").touch()
        ended = job.end()
    ran = (job.run / "ran").exists()
    if not ran:
        pickle.loads(evil)
        assert (job.run / "ran").exists(), "it would have run"
    return seen(ran=ran, ended=ended)


def holding(folder: Path, *texts: bytes) -> set[Path]:
    """The files below this folder that hold any of the texts."""
    found = set()
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # one that was just renamed
            if path.is_file() and any(text in path.read_bytes() for text in texts):
                found.add(path)
    return found


def said_of(pid: int) -> bytes:
    """A process's arguments and environment; empty if it has just ended."""
    with suppress(OSError):
        return b"".join(Path(f"/proc/{pid}/{what}").read_bytes() for what in ("cmdline", "environ"))
    return b""


def test_torchs_store_is_at_the_rendezvous_address_alone_where_it_runs_nothing(seen: Seen) -> None:
    """Who reaches that one address can read and write the store, as with torchrun itself."""
    assert (seen.master_addr, seen.store, seen.open) == ("127.0.0.1", {"127.0.0.1"}, ["127.0.0.1"])
    assert "/torchelastic/role_info/0" in seen.planted
    assert seen.ended.status == 0, seen.ended.err
    assert not seen.ran


def test_once_all_have_met_the_join_takes_nobody(seen: Seen) -> None:
    assert seen.join == set()


def test_the_key_stands_in_its_file_alone(seen: Seen) -> None:
    assert seen.key_mode == 0o600
    assert len(seen.processes) >= 4, "two entrypoints and two ranks at least"
    assert not [pid for pid, text in seen.processes.items() if seen.key in text]
    assert seen.holders == {seen.ended.run / "join.key"}


def test_secrets_of_the_environment_are_in_no_file_and_no_output_of_a_job_under_torchrun(seen: Seen) -> None:
    assert holding(seen.ended.run.parent, *(value.encode() for value in SECRETS.values())) == set()


def test_secrets_of_the_environment_are_in_no_file_and_no_output_of_a_training(tmp_path: Path) -> None:
    """And where the user's umask lets everybody write, what the run leaves is still theirs alone."""
    small = ("--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16", "steps=2")
    before = os.umask(0)
    try:
        passed = {"APPTRAIN_PASS": f"PYTHONPATH {' '.join(SECRETS)}"}
        ended = start(tmp_path, "--mode", "rank", "--", "-m", "train", *small, env=SECRETS | passed).end()
    finally:
        os.umask(before)
    assert ended.status == 0, ended.err
    assert (ended.run / "result.json").exists()
    assert holding(tmp_path, *(value.encode() for value in SECRETS.values())) == set()
    assert ended.run.stat().st_mode & 0o777 == 0o700
    ours = ("plan.*.json", "join.key", "job.log", "outcome", "outcome/*", "logs", "logs/*", "logs/*/*")
    found = [path for pattern in ours for path in ended.run.glob(pattern)]
    assert len(found) > 10
    assert {oct(path.stat().st_mode & 0o077) for path in found} == {"0o0"}


def test_variables_of_the_secrets_file_reach_ranks_and_nothing_that_is_written(tmp_path: Path) -> None:
    """The ranks' own arguments and environment aside: no argument of any process, plan, log or manifest."""
    file = tmp_path / "secrets"
    file.write_text("WANDB_API_KEY=hush-0a1b2c3d\nMINE=hush-9f8e7d6c\n")
    file.chmod(0o600)
    script = tmp_path / "see.py"
    script.write_text(
        "import os, pathlib\n"
        "assert os.environ['WANDB_API_KEY'].startswith('hush-') and os.environ['MINE'].startswith('hush-')\n"
        "every = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline') if os.access(p, os.R_OK)]\n"
        "assert not [one for one in every if b'hush-' in one]\n"
        "print('seen')\n"
    )
    ended = start(tmp_path, "--secrets", str(file), "--", str(script), env={"WANDB_API_KEY": "old"}).end()
    assert (ended.status, ended.out.count("seen")) == (0, 2), ended.err
    file.rename(tmp_path.parent / f"{tmp_path.name}.secrets")
    assert holding(tmp_path, b"hush-0a1b2c3d", b"hush-9f8e7d6c") == set()
    assert "WANDB_API_KEY" in (ended.run / "manifest.json").read_text()


def one_node(folder: Path, command: str, *program: str) -> Ended:
    """How a job of one node ends under `launch` or `embedded`, in the run directory `run`."""
    argv = [sys.executable, "-P", "-m"]
    argv += ["entrypoint", "launch"] if command == "launch" else ["entrypoint.cli.embedded"]
    argv += ["--nodes=127.0.0.1", "--node-rank=0"] if command == "launch" else ["--nodes=1"]
    argv += ["--device", "cpu", "--mode", "exec"]
    argv += ["--run-dir", str(folder / "run"), "--no-python", "--", *program]
    return Job(argv, folder, folder / "run", clean_env(APPTRAIN_PASS="PYTHONPATH")).end()


@pytest.mark.parametrize("command", ["launch", "embedded"])
def test_a_run_directory_that_others_may_open_is_closed_to_them(tmp_path: Path, command: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o2777)
    ended = one_node(tmp_path, command, "true")
    assert (ended.status, oct(ended.run.stat().st_mode & 0o7777)) == (0, "0o2700"), ended.err


@pytest.mark.parametrize("command", ["launch", "embedded"])
def test_an_error_of_a_rank_that_is_quoted_cannot_write_to_the_terminal(tmp_path: Path, command: str) -> None:
    """Its own output passes as it is; logs and terminal get that once."""
    error = r"import sys; sys.exit('ValueError: \x1b[2J\x1b]0;title\a\u202e red \x1b[31m')"
    ended = one_node(tmp_path, command, sys.executable, "-c", error)
    quoted = "ValueError: ?[2J?]0;title?? red ?[31m"
    (told,) = (line for line in ended.err.splitlines() if "failed first" in line)
    assert told.endswith(f"failed first, status 1: {quoted} ({ended.run}/logs/0/127.0.0.1.rank0.err)")
    assert ended.outcome("0.0").error == quoted


# --- while the nodes meet --------------------------------------------------------------------------------------------


def node(folder: Path, rank: int, port: int, *command: str) -> Job:
    """`launch` of one of two nodes by hand, whose ranks need no torch."""
    here = folder / f"node{rank}"
    here.mkdir()
    argv = [sys.executable, "-P", "-m", "entrypoint", "launch", "--nodes", "127.0.0.1,127.0.0.2"]
    argv += ["--node-rank", str(rank), "--master-port", str(port), "--device", "cpu", "--mode", "rank"]
    argv += ["--join-key-file", str(folder / "key"), "--run-dir", str(folder / "run"), "--no-python"]
    return Job([*argv, "--", *(command or ("true",))], here, folder / "run", clean_env())


async def pretend(port: int, key: bytes, evil: bytes) -> str:
    """How the hub answers a stranger who speaks its protocol and has another key."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    spoken = await wire.greet(reader, writer, key, hub=False)
    claim = Identity(
        job_id="manual",
        attempt=0,
        node_rank=1,
        local_rank=None,
        name="127.0.0.2",
        nnodes=2,
        nproc_per_node=1,
        mode="rank",
        device="cpu",
        image_id=base64.b64encode(evil).decode(),
        lock_digest="",
        versions={},
    )
    spoken.send({"type": "hello", "identity": asdict(claim), "left": 100.0})
    try:
        return str(await asyncio.wait_for(spoken.receive(), 20))
    except wire.WireError as error:
        return type(error).__name__
    finally:
        spoken.abort()


def test_a_stranger_neither_joins_nor_disturbs_the_meeting(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    evil = pickle.dumps(Planted(canary))
    (tmp_path / "key").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "key").chmod(0o600)
    port = free_port()
    first = node(tmp_path, 0, port)
    first.until(lambda: is_open("127.0.0.1", port + 1), "the hub to listen")
    assert listeners(port + 1) == {"127.0.0.1"}
    greeting = wire.PROTOCOL + b"n" * wire.NONCE_BYTES
    held = []
    for data in (b"", b"\0" * 100_000, b"GET / HTTP/1.1\r\n\r\n", evil, greeting, greeting + b"\xff\xff\xff\xff",
                 greeting + b"\0\0\0\2" + b"m" * 32 + b"{}", greeting + len(evil).to_bytes(4, "big") + b"m" * 32 + evil):  # fmt: skip
        for stays in (False, True):
            stranger = socket.create_connection(("127.0.0.1", port + 1), 20)
            with suppress(ConnectionError):  # it was sent away before it had said all
                stranger.sendall(data)
            held.append(stranger)
            if not stays:
                stranger.close()
    held += [socket.create_connection(("127.0.0.1", port + 1), 20) for _ in range(400)]
    answer = asyncio.run(pretend(port + 1, b"another key, and as long as ours", evil))
    assert answer in ("WrongKey", "Closed")
    assert first.process.poll() is None, first.text()
    second = node(tmp_path, 1, port)
    ended = [job.end() for job in (first, second)]
    for stranger in held:
        stranger.close()
    assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
    assert "Traceback" not in ended[0].err
    strangers = [line for line in ended[0].err.splitlines() if "stranger" in line]
    assert 1 <= len(strangers) <= 17, "one line an address"
    assert not canary.exists()


# --- while ranks run -------------------------------------------------------------------------------------------------


async def join_and_say(port: int, key: bytes, message: dict[str, object]) -> None:
    """What a participant does that holds the key and says something wrong as soon as all have met."""
    spoken = await wire.greet(*await asyncio.open_connection("127.0.0.1", port), key, hub=False)
    claim = Identity(
        job_id="manual",
        attempt=0,
        node_rank=1,
        local_rank=0,
        name="127.0.0.2",
        nnodes=2,
        nproc_per_node=1,
        mode="rank",
        device="cpu",
        image_id="",
        lock_digest="",
        versions={"python": sys.version.split()[0], "apptrain": __version__, "torch": version("torch")},
    )
    spoken.send({"type": "hello", "identity": asdict(claim), "left": 100.0})
    async with asyncio.timeout(20):
        while (await spoken.receive())["type"] != "go":
            pass
        spoken.send(message)
        with suppress(wire.WireError):
            while True:
                await spoken.receive()
    spoken.abort()


def failing(**changes: object) -> dict[str, object]:
    """A rank's failure as it goes over the wire."""
    known: dict[str, object] = {"node_rank": 1, "node": "127.0.0.2", "rank": 1, "status": 9, "signal": 0}
    return {**known, "time": 1e9, "error": "planted", "at": "", "same": 0, **changes}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"type": "fail", "failure": failing(status=0)}, "status: 0"),
        ({"type": "fail", "failure": failing(status=256)}, "status: 256"),
        ({"type": "stop", "left": 10**4000}, f"left: 1{'0' * 39}..."),
        ({"type": "beat", "time": 1e14}, "time: 100000000000000.0"),
    ],
    ids=["fail 0", "fail 256", "stop", "beat"],
)
def test_a_participant_that_holds_the_key_cannot_make_a_failed_job_end_well(
    tmp_path: Path, message: dict[str, object], why: str
) -> None:
    key = b"0123456789abcdef0123456789abcdef"
    (tmp_path / "key").write_bytes(key)
    (tmp_path / "key").chmod(0o600)
    port = free_port()
    first = node(tmp_path, 0, port, "sleep", "60")
    first.until(lambda: is_open("127.0.0.1", port + 1), "the hub to listen")
    asyncio.run(join_and_say(port + 1, key, message))
    ended = first.end()
    assert ended.status == 1, ended.err
    assert f"apptrain: 127.0.0.2: lost: it sent a wrong {why}\n" in ended.err
    assert "Traceback" not in ended.err


# --- our own code ----------------------------------------------------------------------------------------------------


UNPICKLES = {"load", "loads", "Unpickler"}
BY_PICKLE = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "monitored_barrier"),
}


def called(path: Path) -> Iterator[str]:
    """The dotted names of what a module calls, or derives from."""
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.Call):
            yield ast.unparse(found.func)
        elif isinstance(found, ast.ClassDef):
            yield from map(ast.unparse, found.bases)


def test_nothing_of_ours_unpickles_or_evaluates_but_the_loader_of_arrays() -> None:
    """Which names the only classes that it makes (tests/unit/train/test_datasets.py)."""
    found = set()
    for path in [*(CHECKOUT / "entrypoint").rglob("*.py"), *(CHECKOUT / "src/train").rglob("*.py")]:
        for name in called(path):
            *module, last = name.split(".")
            unpickles = last in UNPICKLES and module in (
                ["pickle"],
                ["torch"],
                ["marshal"],
                ["shelve"],
                ["joblib"],
            )
            unsafe = name in ("eval", "exec", "yaml.load", "os.system", "os.popen")
            if unpickles or unsafe or last in BY_PICKLE:
                found.add((path.name, name))
        assert "distributed.checkpoint" not in path.read_text()
    assert found == {("cifar10.py", "pickle.Unpickler")}


def test_every_test_that_the_documentation_names_is_there() -> None:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", (CHECKOUT / "docs/security.md").read_text()))
    defined = set()
    for path in (CHECKOUT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"def (test_\w+)", path.read_text()))
    assert len(named) > 20
    assert named - defined == set()


def test_the_shell_is_asked_for_nothing() -> None:
    """Commands of ours are lists."""
    for path in [*(CHECKOUT / "entrypoint").rglob("*.py"), *(CHECKOUT / "src/train").rglob("*.py")]:
        for found in ast.walk(ast.parse(path.read_text())):
            if isinstance(found, ast.keyword) and found.arg == "shell":
                raise AssertionError(f"{path.name}:{found.value.lineno}")
