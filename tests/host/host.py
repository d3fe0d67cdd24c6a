"""A test host: namespaces with a file tree of their own. The only module that makes, enters and ends them.

The tree is the common root under a layer of the host's own that goes when the host goes. So a test may do to it
as root what it likes: remove a program, make a device node, mount a small or noexec file system. Nothing is
mounted, configured or left outside the namespaces and the host's folder in the cache.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from tests.host import cgroups, root, site
from tests.host.places import Refused, cache, locked, remove

BOOT = Path(__file__).with_name("boot.sh")
LIMIT = 30.0
"""Seconds allowed to each step of going up and down, which normally takes a fraction of one."""
RESOLVER = "10.0.2.3"  # slirp4netns passes DNS on from here
PATH = "/usr/local/bin:/usr/bin:/bin"
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NO_USER_NAMESPACES = (
    *("unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c"),
    'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --ambient-caps=-all -- "$@"',
    "sh",
)
"""Put before an ordinary user's command, it runs as on a host that allows no user namespaces."""

Arg = str | os.PathLike[str]
Helper = subprocess.Popen[bytes]
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A file or directory of this machine that a host shows."""

    source: Path
    target: Path
    mode: Literal["ro", "rw"] = "ro"


class As(TypedDict, total=False):
    """How a command starts on a host."""

    user: str
    """root if not given"""
    cwd: Arg
    """the user's home directory if not given"""
    env: Mapping[str, str]
    """added to what a login gives; nothing else of this machine's environment crosses"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host that is up."""

    folder: Path
    """What belongs to it in the cache; its last part is the key that `find` knows it by."""
    pid: int
    """Its process 1, as seen from this machine."""
    env: Mapping[str, str]
    """Variables that a login gives beside HOME, PATH and the like."""
    helpers: Sequence[Helper] = field(default=(), repr=False)
    """Processes of this machine that end with the host, where they are this process's to wait for."""

    def run(
        self, argv: Sequence[Arg], *, input: str | None = None, timeout: float = 60.0, **how: Unpack[As]
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; after `timeout` seconds it is killed and TimeoutExpired raised."""
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        with self.start(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as process:
            try:
                out, err = process.communicate(input, timeout)
            except BaseException:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def start(
        self,
        argv: Sequence[Arg],
        *,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        **how: Unpack[As],
    ) -> subprocess.Popen[str]:
        """Starts a command in a process group of its own: signal it with `os.killpg(process.pid, signum)`."""
        line, env = self.command(argv, **how)
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        return subprocess.Popen(line, env=env, text=True, umask=0o022, start_new_session=True, **streams)

    def command(self, argv: Sequence[Arg], **how: Unpack[As]) -> tuple[list[str], dict[str, str]]:
        """The command line of this machine, with its whole environment, that runs `argv` on the host."""
        if not _is_process_1(self.pid, self.folder):
            raise Refused(f"host {self.folder.name} is down: bring it up again")
        user = how.get("user", "root")
        home = "/root" if user == "root" else f"/home/{user}"
        login = {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
        path = ROOT_PATH if user == "root" else PATH
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        enter = ["nsenter", f"--target={self.pid}", *spaces, f"--wdns={os.fspath(how.get('cwd', home))}"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        line = [*enter, "--", *become, "--", *(os.fspath(arg) for arg in argv)]
        return line, {**login, "PATH": path, **self.env, **how.get("env", {})}

    def down(self) -> None:
        """Ends all processes of the host and removes what belongs to it."""
        with _all_hosts():
            _kill(self.pid, self.folder)
            cgroups.thaw(self.folder)
            for helper in self.helpers:
                helper.communicate(timeout=10 * LIMIT)
            with locked(self.folder / "lock", LIMIT):
                _remove(self.folder)


@contextmanager
def up(name: str, *, online: bool = False, binds: Sequence[Bind] = ()) -> Iterator[Host]:
    """A host for the length of a `with`; it ends with the calling thread, too, however that ends."""
    host = boot(name, online=online, binds=binds, owned=True)
    try:
        yield host
    finally:
        host.down()


def boot(
    name: str,
    *,
    key: str = "",
    online: bool = False,
    binds: Sequence[Bind] = (),
    controllers: Sequence[str] = (),
    owned: bool = False,
) -> Host:
    """Brings up a host with a network of its own: the loopback device, and nothing else unless it is `online`.

    Then it reaches what this machine reaches, through a network stack in user space, with this machine's
    settings of pip, proxies and certificates. One that is not `owned` stays until someone takes it down.
    `find` knows it by its `key`; without one that is its name, with this process's id if it is `owned`.
    For `controllers` it has cgroup hierarchies in which it may make cgroups.
    """
    tree = root.make()
    settings = site.read(os.environ) if online else site.NONE
    with _all_hosts() as hosts:
        _sweep(hosts)
        folder = hosts / (key or (f"{name}.{os.getpid()}" if owned else name))
        if folder.exists():
            raise Refused(f"host {folder.name} is up already: use it, or take it down first")
        for part in ("", "upper", "upper/etc", "work", "root"):
            (folder / part).mkdir()
            (folder / part).chmod(0o755)  # whatever the umask: the host's / and /etc have these modes
        (folder / "lower").symlink_to(tree)
        resolver = f"nameserver {RESOLVER}\n" if online else ""
        for file, text in {"pip.conf": settings.pip_conf, "resolv.conf": resolver}.items():
            (folder / "upper/etc" / file).write_text(text)
            (folder / "upper/etc" / file).chmod(0o644)
        hierarchies = cgroups.make(folder, controllers)
        shown = [
            *(Bind(source=file, target=file) for file in settings.files),
            *(Bind(source=own, target=seen, mode="rw") for own, seen in hierarchies.items()),
            *binds,
        ]
        pid, helpers = _start(folder, name, shown, online=online, owned=owned)
        (folder / "state.new").write_text(json.dumps({"pid": pid, "env": settings.env}))
        (folder / "state.new").rename(folder / "state.json")
        return Host(folder=folder, pid=pid, env=settings.env, helpers=helpers)


def find(key: str) -> Host | None:
    """The host of that key, if it is up."""
    folder = cache() / "hosts" / key
    try:
        state = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return None
    return Host(folder=folder, **state) if _is_process_1(state["pid"], folder) else None


def list_up() -> list[str]:
    """The keys of the hosts that are up."""
    files = sorted((cache() / "hosts").glob("*/state.json"))
    return [file.parent.name for file in files if find(file.parent.name)]


def _start(
    folder: Path, name: str, binds: Sequence[Bind], *, online: bool, owned: bool
) -> tuple[int, Sequence[Helper]]:
    """Starts what a host consists of; returns process 1, and the processes of this machine that end with it.

    Each holds the lock of the folder; `owned` ones are killed when the calling thread ends.
    """
    spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child=KILL"]
    shown = [part for bind in binds for part in (bind.source.resolve(), bind.target, bind.mode)]
    enter = ["unshare", *spaces, "--", "bash", BOOT, folder, name, _title(folder), *shown]
    stack = ["slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback", "--exit-fd=0"]
    lock_file, console_file = folder / "lock", folder / "console"
    with ExitStack() as failed, locked(lock_file, 0) as lock, console_file.open("wb") as console:

        def spawn(*argv: Arg, stdin: Any, stdout: Any) -> Helper:
            line = ["setpriv", f"--pdeathsig={'KILL' if owned else 'keep'}", *argv]
            streams = {"stdin": stdin, "stdout": stdout, "stderr": console}
            process = subprocess.Popen(line, **streams, pass_fds=[lock], umask=0o022, start_new_session=True)
            failed.callback(process.kill)
            return process

        helpers = [spawn(*enter, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)]
        pid = _until(lambda: _process_1(helpers[0], folder), helpers, console_file)
        if online:
            # Process 1 holds the other end of this pipe, and nobody else: the two end together.
            helpers.append(spawn(*stack, str(pid), "tap0", stdin=helpers[0].stdout, stdout=console))
            routes = Path(f"/proc/{pid}/net/route")
            _until(lambda: "tap0\t00000000" in routes.read_text(), helpers, console_file)
        failed.pop_all()
        return pid, helpers


def _until(condition: Callable[[], Found], processes: Sequence[Helper], console: Path) -> Found:
    """What the condition gives once that is true; Refused when a process ends before, or it takes too long."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if found := condition():
            return found
        time.sleep(0.01)
    why = console.read_text().strip() or "no message"
    raise Refused(f"host {console.parent.name} did not come up: {why}")


def _process_1(unshare: Helper, folder: Path) -> int:
    """The child of `unshare`, once it has become the host's process 1; 0 before."""
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
    return next((pid for pid in map(int, children) if _is_process_1(pid, folder)), 0)


def _title(folder: Path) -> str:
    return f"apptrain-host {folder}"


def _is_process_1(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] == os.fsencode(_title(folder))
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill(pid: int, folder: Path) -> None:
    """Kills process 1, and with it the kernel all others. What has the number by now without being it stays."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(process):
        if _is_process_1(pid, folder):
            signal.pidfd_send_signal(process, signal.SIGKILL)


@contextmanager
def _all_hosts() -> Iterator[Path]:
    """The folder of the hosts, in which nobody else makes or removes one for that time."""
    hosts = cache() / "hosts"
    hosts.mkdir(parents=True, exist_ok=True)
    with locked(hosts / ".lock", 12 * LIMIT):
        yield hosts


def _sweep(hosts: Path) -> None:
    """Removes what is left of hosts that did not go down in order: nobody holds the lock of their folders."""
    for folder in filter(Path.is_dir, hosts.iterdir()):
        with suppress(Refused), locked(folder / "lock", 0):
            _remove(folder)


def _remove(folder: Path) -> None:
    cgroups.remove(folder)
    remove(folder)
