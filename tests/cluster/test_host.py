"""The test host itself: whose it is, what a user finds there, and that nothing of it stays. Needs root."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import procs
from tests.host import Bind, Host, Refused, find, root, up
from tests.host.places import locked

CHECKOUT = Path(__file__).resolve().parents[2]
BOUND = 30.0  # s, for what takes a fraction of one
NO_GOCRYPTFS = "INFO:    gocryptfs not found, will not be able to use gocryptfs\n"
TINY = """\
Bootstrap: scratch

%setup
    for program in sh id touch chown stat cat cut getopt; do
        cp -L --parents "/bin/$program" $(ldd "/bin/$program" | grep -o '/[^ ]*') "$APPTAINER_ROOTFS"
    done
    touch "$APPTAINER_ROOTFS/etc/passwd" "$APPTAINER_ROOTFS/etc/group"

%post
    touch /owned
    chown 7:8 /owned
    stat -c 'owned by %u:%g' /owned
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@contextmanager
def private_umask() -> Iterator[None]:
    """That of a cautious account, which must not show on a host."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    shared = tmp_path_factory.mktemp("shared")
    (shared / "a b,c:d").mkdir()
    (shared / "a b,c:d/file").write_text("text")
    binds = [
        Bind(source=shared / "a b,c:d", target=Path("/shared/a b,c:d")),
        Bind(source=shared, target=Path("/var/run/rw"), mode="rw"),
    ]
    with ExitStack() as down:
        with private_umask():
            host = down.enter_context(up("node1", binds=binds))
        yield host


@pytest.fixture(scope="module")
def image(host: Host) -> str:
    return build(host, "alice")


def build(host: Host, user: str) -> str:
    host.run(["tee", "tiny.def"], user=user, input=TINY)
    built = host.run(["apptainer", "build", "--force", "tiny.sif", "tiny.def"], user=user)
    assert built.returncode == 0, built.stderr
    assert "owned by 7:8" in built.stdout
    return f"/home/{user}/tiny.sif"


def processes(word: str) -> list[str]:
    """The command lines on this machine that contain a word, of processes that have not ended."""
    lines = [line for _, line in procs.files("cmdline") if word.encode() in line]
    return [line.replace(b"\0", b" ").decode(errors="replace") for line in lines]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, f"waited {BOUND} s for {what}"
        time.sleep(0.02)


def test_a_user_finds_a_host_of_its_own_and_nothing_of_this_machine(host: Host) -> None:
    script = "id; hostname; pwd; umask; ps -e -o pid,user | head -n 2; ls /sys/class/net; env | sort"
    with private_umask():
        found = host.run(["sh", "-c", script], user="bob", env={"ONE": "a 'b' $c\n"})
    assert found.stderr == ""
    assert found.stdout == (
        "uid=2002(bob) gid=2002(bob) groups=2002(bob)\nnode1\n/home/bob\n0022\n    PID USER\n      1 root\nlo\n"
        "\nHOME=/home/bob\nLANG=C.UTF-8\nLOGNAME=bob\nONE=a 'b' $c\nPATH=/usr/local/bin:/usr/bin:/bin\n"
        "PWD=/home/bob\nSHELL=/bin/bash\nUSER=bob\n"
    )


def test_what_is_bound_is_there_and_is_written_only_where_that_was_asked_for(host: Host) -> None:
    assert host.run(["cat", "/shared/a b,c:d/file"], user="alice").stdout == "text"
    refused = host.run(["touch", "/shared/a b,c:d/new"])
    assert refused.stderr == "touch: cannot touch '/shared/a b,c:d/new': Read-only file system\n"
    assert host.run(["tee", "file"], cwd="/run/rw/a b,c:d", input="changed").returncode == 0
    assert host.run(["cat", "/shared/a b,c:d/file"], user="alice").stdout == "changed"


def test_what_root_does_to_a_host_is_gone_with_it(image: str, host: Host, tmp_path: Path) -> None:
    copy = tmp_path / "tiny.sif"
    copy.write_bytes((host.folder / "upper" / image[1:]).read_bytes())
    with up("node2", binds=[Bind(source=copy, target=Path("/tiny.sif"))]) as other:
        other.run(["chmod", "600", "/dev/fuse"])
        ran = other.run(["apptainer", "exec", "/tiny.sif", "id"], user="alice")
        assert (ran.returncode, ran.stdout) == (255, "")
        assert "fuse: failed to open /dev/fuse: Permission denied" in ran.stderr
        other.run(["rm", "/usr/bin/squashfuse", "/usr/bin/squashfuse_ll"])
        ran = other.run(["apptainer", "exec", "/tiny.sif", "id", "-un"], user="alice")
        assert (ran.returncode, ran.stdout) == (0, "alice\n")
        assert "INFO:    Converting SIF file to temporary sandbox..." in ran.stderr
        assert NO_GOCRYPTFS in host.run(["apptainer", "exec", image, "id"], user="alice").stderr
    assert not other.folder.exists()
    assert processes(str(other.folder)) == []
    with pytest.raises(Refused, match=rf"host node2\.{os.getpid()} is down: bring it up again"):
        other.run(["true"])


def test_only_a_host_that_is_online_reaches_the_package_mirrors(host: Host) -> None:
    fetch = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read(7).decode())"
    mirror = host.run(["cat", "/etc/apt/sources.list"]).stdout.split()[1]
    argv = ["python3", "-c", fetch, f"{mirror}dists/trixie/Release"]
    assert "name resolution" in host.run(argv, user="alice").stderr
    with up("login1", online=True) as online:
        assert online.run(argv, user="alice").stdout == "Origin:\n"
        download = (
            "python3 -m venv venv && venv/bin/pip download --no-deps --no-cache-dir six >log && ls six*"
        )
        found = online.run(["sh", "-c", download], user="alice", timeout=120)
        assert found.stdout.startswith("six-"), found.stderr


def test_a_command_that_takes_too_long_is_killed_with_what_it_started(host: Host) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sh", "-c", "sleep 98765 & sleep 98765"], user="alice", timeout=0.5)
    until(lambda: not processes("sleep\x0098765"), "the sleeps to end")


def test_a_host_whose_test_run_was_killed_ends_and_the_next_start_removes_its_folder() -> None:
    script = "import time; from tests.host import up\nwith up('lost', online=True) as host: print(host.folder, flush=True); time.sleep(99)"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout
        folder = Path(run.stdout.readline().strip())
        assert processes(str(folder))
        run.send_signal(signal.SIGKILL)
    with locked(folder / "lock", BOUND):  # as soon as the last of its processes closed its files
        until(lambda: not processes(str(folder)), "the host's processes to be gone")
    with up("next"):
        assert not folder.exists()


def test_a_host_brought_up_by_hand_stays_until_it_is_taken_down(tmp_path: Path) -> None:
    def tool(*argv: str) -> tuple[int, str, str]:
        line = [sys.executable, "-m", "tests.host", *argv]
        ended = subprocess.run(line, cwd=CHECKOUT, capture_output=True, text=True, timeout=10 * BOUND)
        return ended.returncode, ended.stdout, ended.stderr

    name = f"byhand{os.getpid()}"
    not_up = f"host: host {name} is not up: python -m tests.host up --name {name}\n"
    status, said, _ = tool("root")  # on a machine that has none yet it says on stderr that it makes one
    assert (status, said) == (0, f"{root.path()}\n")
    assert tool("run", "--name", name, "--", "true") == (64, "", not_up)
    is_up = (0, f"{name} is up: python -m tests.host shell --name {name}\n", "")
    try:
        assert tool("up", "--name", name, "--bind", f"{tmp_path}::rw") == is_up
        assert tool("up", "--name", name) == is_up
        assert name in tool("status")[1].splitlines()
        script = ["sh", "-c", 'pwd; id -un; touch here; exit "$1"', "sh", "7"]
        where = ("--name", name, "--user", "root", "--cwd", str(tmp_path))
        assert tool("run", *where, "--", *script) == (7, f"{tmp_path}\nroot\n", "")
        assert (tmp_path / "here").exists()
    finally:
        assert tool("down", "--name", name) == (0, "", "")
    assert find(name) is None
    assert name not in tool("status")[1].splitlines()
