"""Makes ranks that are forks of a process that has imported torch, so that a node imports it once. `install`
prepares the template, `fork_rank` makes a rank, `why_not` says if a script must not be forked.

A fork becomes what `python -u script.py` would be. The template is started as exactly that, and forks while
its interpreter starts, from a `sitecustomize` of ours. Each fork returns from there, and the interpreter goes
on with the script by itself: `__main__`, sys.argv, sys.flags, sys.path, tracebacks, the end of the process
and what ps shows are Python's own, and no frame of ours is on the stack.
"""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ORDERS = "APPTRAIN_TEMPLATE"
"""The pipe for reports and the template's folder, `FD:DIR`: a variable of the template alone."""
ANSWER = 60.0
ROOM = 4096
"""Bytes: torchrun's own variables take 700."""
IMPORTED = (".py", ".pyc", ".so")
HEARTBEAT = "APPTRAIN_HEARTBEAT"
INSIDE = "apptrain_inside"
AGENT = Path(__file__).with_name("agent.py")
READ_AT_IMPORT = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_"),
    *("ATEN_", "PYTORCH_", "TORCH", "LD_", "PYTHON"),
)
"""What libraries read while they are loaded, or may: the beginnings of names."""
WRITES = (b"environ", b"putenv", b"affinity")
"""Source without these words sets no variable and binds nothing. It is not parsed, which would take long."""
PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With one of these, OpenMP counts its cores when it is loaded, and binds its threads to them later."""

_HOOK = """\
import sys
at_start = sys.modules.copy()
try:
    import importlib.util
    spec = importlib.util.spec_from_file_location("apptrain_agent", {agent!r})
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    agent.start_of_template(at_start)
except BaseException:  # or Python would go on without
    import os, traceback
    traceback.print_exc()
    os._exit(1)
del at_start, spec, agent, importlib, sys
"""


def install(folder: Path, agent: Path = AGENT) -> None:
    """Makes a folder for the PYTHONPATH of a template, which `agent` makes of it."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_HOOK.format(agent=str(agent)))


def environment(env: dict[str, str], folder: Path, report: int) -> dict[str, str]:
    """Of a template for ranks with this environment, which writes its reports to this pipe."""
    path = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    # With room for the variables of the ranks, where /proc shows them.
    return {**env, "PYTHONPATH": path, ORDERS: f"{report}:{folder}".ljust(ROOM)}


def leave_hook() -> int:
    """Takes out of this process what makes it a template. Returns the pipe for reports."""
    report, _, folder = os.environ.pop(ORDERS).rstrip().partition(":")
    sys.path.remove(folder)
    rest = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        del os.environ["PYTHONPATH"]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401 # the machine's, which ours hides
    except ImportError:
        sys.modules["sitecustomize"] = ours
    return int(report)


# --- what speaks against a fork -----------------------------------------------------------------------------


def why_not(command: list[str], loaded: set[str]) -> str:
    """Why ranks with this CMD cannot be forks of a process with these modules; empty where they can.

    `loaded`: names at the top level, but for those that Python has loaded when it starts."""
    if command[0] == "-m" and len(command) > 1:
        script, beside = _module_file(command[1]), Path.cwd()
    elif command[0].startswith("-"):
        return f"options of Python ({command[0]}) stand before the script"
    else:
        script = Path(command[0])
        if not script.is_file() or script.suffix == ".pyc":
            return f"{script} is no file of Python source"
        beside = script.resolve().parent
    names: set[str] = set()
    if not os.environ.get("PYTHONSAFEPATH"):
        names = {entry.name.partition(".")[0] for entry in _entries(beside)}
        if clash := sorted(names & loaded):
            return f"{beside} has {clash[0]}, and torch has loaded another module of that name"
    if script is None or (tree := _parsed(script)) is None:
        return ""  # Python will say so
    if why := _sets_early(tree):
        return f"{script.name}, {why}"
    imports = _imports(tree, beside, script.parent)
    if command[0] == "-m":
        imports.add((beside, command[1]))  # with the packages that it lies in
    sources = {
        file
        for folder, name in imports
        if folder != beside or name.partition(".")[0] in names
        for file in _sources(folder, name)
    }
    for file in sorted(sources):
        if (tree := _parsed(file, WRITES)) and (why := _sets_early(tree)):
            return f"{os.path.relpath(file, beside)}, {why}"
    return ""


def _entries(folder: Path) -> list[Path]:
    """What may be imported from there."""
    try:
        return [entry for entry in folder.iterdir() if entry.suffix in IMPORTED or entry.is_dir()]
    except OSError:
        return []


def _module_file(name: str) -> Path | None:
    """The source of a module that `-m` runs, found without importing what it lies in."""
    here = [] if os.environ.get("PYTHONSAFEPATH") else [Path.cwd()]
    for folder in (*here, *(Path(entry) for entry in sys.path)):
        base = folder.joinpath(*name.split("."))
        for file in (base / "__main__.py", base.with_name(base.name + ".py")):
            if file.is_file():
                return file
    return None


def _parsed(file: Path, words: tuple[bytes, ...] = (b"",)) -> ast.Module | None:
    """The syntax tree of a file that has one of these words; None if it has none, or cannot be parsed."""
    try:
        text = file.read_bytes()
        return ast.parse(text) if any(word in text for word in words) else None
    except (OSError, SyntaxError, ValueError):
        return None


def _imports(tree: ast.Module, beside: Path, package: Path) -> set[tuple[Path, str]]:
    """(folder, name) of what this source may import: from the folder beside, or from its own package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(beside, one.name) for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = package.joinpath(*[".."] * (node.level - 1)) if node.level else beside
            found |= {(folder, ".".join(filter(None, (node.module, one.name)))) for one in node.names}
    return found


def _sources(folder: Path, name: str) -> Iterator[Path]:
    """What an import of this name from this folder runs. Its end may be no module: `from a import b`."""
    for part in name.split("."):
        folder /= part
        yield from [file for file in (folder / "__init__.py", Path(f"{folder}.py")) if file.is_file()][:1]


def _sets_early(tree: ast.Module) -> str:
    """Where and why this source may set what torch or a library reads while it is loaded; empty: nowhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("sched_setaffinity", "cpu_affinity"):
            return f"line {node.lineno}: it binds itself to CPUs"
        for name in _set_there(node):
            if name is None or name.startswith(READ_AT_IMPORT):
                what = f"{name}, which is" if name else "variables whose names it computes, and one may be"
                return f"line {getattr(node, 'lineno', 0)}: it sets {what} read as torch is imported"
    return ""


def _set_there(node: ast.AST) -> list[str | None]:
    """Names of variables that this piece of a syntax tree sets; None: one that only its run tells."""

    def is_environ(value: Any) -> bool:
        return getattr(value, "attr", getattr(value, "id", "")) == "environ"

    def text(value: Any) -> str | None:
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None

    def keys(value: ast.expr) -> list[str | None]:
        return [text(key) for key in value.keys] if isinstance(value, ast.Dict) else [None]

    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and is_environ(node.value):
        return [text(node.slice)]
    if isinstance(node, ast.AugAssign) and is_environ(node.target):
        return keys(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "putenv" or (node.func.attr == "setdefault" and is_environ(node.func.value)):
            return [text(name) for name in node.args[:1]]
        if node.func.attr == "update" and is_environ(node.func.value):
            return [*(name for one in node.args for name in keys(one)), *(word.arg for word in node.keywords)]
    return []


def threads() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


# --- forks --------------------------------------------------------------------------------------------------


def fork() -> int:
    """os.fork, which warns of threads: numpy's own, which its library ends before and starts after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def asked_in_fork(question: Any, store: int | None = None) -> str:
    """What a function answers in a fork that ends with it: it may open CUDA, after which no fork could. Empty
    where it does not answer, or not within ANSWER seconds. `store`: a socket that the fork must not have: it
    would keep the port if this process is killed meanwhile."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            if store is not None:
                os.close(store)
            os.write(writer, str(question()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read() if select.select([answer], [], [], ANSWER)[0] else ""
    if not said:
        os.kill(pid, signal.SIGKILL)  # a driver may hang
    os.waitpid(pid, 0)
    return said


class Fork:
    """A rank that waits for its environment."""

    def __init__(self, pid: int, orders: int):
        self.pid = pid
        self.returncode: int | None = None
        self._orders = orders

    def begin(self, env: dict[str, str]) -> None:
        """The rank goes on with the script, in this environment."""
        data = json.dumps(env).encode() + b"\n"
        while data:
            data = data[os.write(self._orders, data) :]
        os.close(self._orders)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def run_on(cores: list[int]) -> None:
    """This thread, and all that it starts from now on, runs on these cores; empty: on those of before. If
    they were taken from the job meanwhile, a line on stderr says so, and it goes on with what is left."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        os.write(2, f"apptrain: this rank is not bound to its cores: {error.strerror}\n".encode())


def fork_rank(out: int, err: int, cores: list[int]) -> Fork | None:
    """A rank that writes to these pipes and waits, on these cores (none: on any); None in that rank itself,
    once it is to begin."""
    reader, writer = os.pipe()
    pid = fork()
    if pid:
        os.close(reader)
        return Fork(pid, writer)
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    run_on(cores)
    os.dup2(reader, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    order = bytearray()
    while chunk := os.read(3, 1 << 16):
        order += chunk
    os.close(3)
    if not order.endswith(b"\n"):
        os._exit(0)  # whoever forked it is gone
    os.environ.clear()
    os.environ.update(json.loads(order))
    _show_environment()
    _differ()
    _end_without_destructors()
    return None


def _show_environment() -> None:
    """Has /proc/PID/environ say what it says of a process that was started with these variables; nothing
    looks at that memory any more."""
    import ctypes

    numbers = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(numbers[47]), int(numbers[48])  # env_start and env_end of proc(5)
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in os.environ.items())
    if start and len(block) <= end - start:
        ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def _end_without_destructors() -> None:
    """Has this process leave out, at its very end, the destructors of the libraries that it shares with the
    template. They write to 80 MB of what the forks share, which takes 0.2 s for each rank. The interpreter
    ends as ever before that, as does what is loaded from now on; what C has buffered is written."""
    import ctypes

    libc = ctypes.CDLL(None)
    if os.environ.get("LD_PRELOAD") or not hasattr(libc, "on_exit"):
        return  # such a library may have something to say at its end; not every libc has the function
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def _differ() -> None:
    """Makes anew what every process has by chance, and forks would share."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy.random")
    torch.default_generator.seed()  # of CUDA each process has the same one
    if numpy:
        numpy.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    if inside := sys.modules.get(INSIDE):
        inside.start()
