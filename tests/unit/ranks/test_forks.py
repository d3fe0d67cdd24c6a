"""A fork of the template against `python -u`: the same script, the same output, end and status. Without torch."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from entrypoint.ranks import forks

AGENT = """
import importlib.util, os, sys, types

def start_of_template(at_start):
    spec = importlib.util.spec_from_file_location("apptrain_forks", {forks!r})
    forks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forks)
    report = forks.leave_hook()
    sys.modules["torch"] = types.SimpleNamespace(default_generator=types.SimpleNamespace(seed=lambda: None))
    ranks = []
    for _ in range({ranks}):
        rank = forks.fork_rank(os.dup(1), os.dup(2), {cores})
        if rank is None:
            del sys.modules["torch"]
            return
        ranks.append(rank)
    for rank in ranks:
        rank.begin(dict(os.environ))
        os.write(report, b"%d " % os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1]))
    os._exit(0)
"""
"""What stands for torchrun's agent: one rank after the other."""
ADDRESS = re.compile("0x[0-9a-f]+")
PLACE = """
import os, sys
main = sys.modules["__main__"]
print(sys.argv, sys.orig_argv, sys.flags, sys.executable, sys.path[0], sys.warnoptions, sys._xoptions)
print(__name__, __file__, __spec__, __doc__, __package__, type(__loader__).__name__, sorted(vars(main)))
"""
BESIDE = "import beside, os\nprint(beside.NAME, os.path.relpath(beside.__file__))\n"
MULTIPROCESSING = """
import multiprocessing as mp, sys

class Thing:
    value = 41

def add(thing):
    return thing.value + 1

if __name__ == "__main__":
    for how in ("fork", "spawn", "forkserver"):
        with mp.get_context(how).Pool(1) as pool:
            print(how, pool.map(add, [Thing()]))
"""
ATEXIT = """
import atexit, threading, time
atexit.register(print, "at exit")
thread = threading.Thread(target=lambda: (time.sleep(1), print("thread")))
thread.start()
print("last line", threading.enumerate()[0].name, threading.active_count())
"""
OF_C = """
import ctypes
libc = ctypes.CDLL(None)
said = b"C is at its end"
libc.__cxa_atexit(libc.puts, said, None)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(said))
"""
HOOK = """
import sys
sys.excepthook = lambda kind, value, tb: print("mine", kind.__name__, value, tb.tb_next)
raise ValueError("no")
"""
PROBES: dict[str, str | tuple[str, ...]] = {
    "where it is": PLACE,
    "arguments": ("script.py", "--lr", "0.1", "a b", ""),
    "environment": "import os\nprint(sorted(os.environ.items()))\n",
    "environment as /proc shows it": "print(sorted(filter(None, open('/proc/self/environ').read().split('\\0'))))\n",
    "working directory and mask": "import os\nprint(os.getcwd(), os.umask(0), os.nice(0))\n",
    "session": "import os\nprint(os.getsid(0) == os.getpid() == os.getpgid(0))\n",
    "signals": "import signal\nprint([signal.getsignal(s) for s in signal.valid_signals()], signal.pthread_sigmask(0, []))\n",
    "standard input": "import sys\nprint(repr(sys.stdin.read()), sys.stdin.isatty(), sys.stdin.fileno())\n",
    "open files": "import os\nprint(sorted(os.listdir('/proc/self/fd')))\n",
    "streams": "import sys\nfor s in (sys.stdout, sys.stderr): print(s.line_buffering, s.write_through, s.encoding, s.errors, s.name)\n",
    "what ps shows": "print(open('/proc/self/cmdline').read().split('\\0')[1:], open('/proc/self/comm').read())\n",
    "the stack": "import inspect, traceback\nprint(len(inspect.stack()))\ntraceback.print_stack()\n",
    "modules beside it": BESIDE,
    "a status": "import sys\nsys.exit(7)\n",
    "a text for its end": "import sys\nsys.exit('because')\n",
    "an error": "def fail():\n    raise ValueError('no')\n\nfail()\n",
    "an error from another": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError('so') from error\n",
    "a syntax error": "print('never')\nif True print\n",
    "an end at once": "import os, atexit\natexit.register(print, 'never')\nos._exit(5)\n",
    "a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n",
    "an interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n",
    "a fault": "import ctypes\nctypes.string_at(0)\n",
    "its end": ATEXIT,
    "its own excepthook": HOOK,
    "objects at its end": "class Last:\n    def __del__(self):\n        print('gone')\n\nlast = Last()\n",
    "what C has buffered": "import ctypes\nctypes.CDLL(None).printf(b'from C\\n')\nraise SystemExit(3)\n",
    "what C does at its end": OF_C,
    "multiprocessing": MULTIPROCESSING,
    "text that is no ASCII": "print('\\u00e4\\u20ac')\n",
    "a module": ("-m", "package.tool", "x"),
    "a package": ("-m", "package"),
    "a module that is not there": ("-m", "package.nothing"),
    "pdb": ("-m", "pdb", "-c", "continue", "script.py"),
    "cProfile": ("-m", "cProfile", "-o", "/dev/null", "script.py"),
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "my work"
    (folder / "package").mkdir(parents=True)
    (folder / "beside.py").write_text("NAME = 'beside the script'\n")
    (folder / "script.py").write_text("import sys\nprint(sys.argv, sys.orig_argv)\n")
    (folder / "package/__init__.py").write_text("")
    (folder / "package/__main__.py").write_text(
        "print(__spec__, __package__)\nraise OSError('of the package')\n"
    )
    (folder / "package/tool.py").write_text(
        "import sys\nprint(__name__, __spec__, __package__, sys.argv, sys.path[0])\n"
    )
    return folder


def environment() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON", "COV"))
    }
    return {**kept, "PYTHONFAULTHANDLER": "1", "ODD": "a\nb", "PYTHONHASHSEED": "0"}


def plain(words: Sequence[str], work: Path, env: dict[str, str]) -> tuple[str, str, list[int]]:
    line = [sys.executable, "-u", *words]
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "timeout": 60}
    ended = subprocess.run(line, cwd=work, env=env, capture_output=True, text=True, check=False, **how)
    return ended.stdout, ended.stderr, [ended.returncode]


def forked(
    words: Sequence[str], work: Path, env: dict[str, str], ranks: int = 1, cores: Sequence[int] = ()
) -> tuple[str, str, list[int]]:
    agent = work.parent / "agent.py"
    agent.write_text(AGENT.format(forks=forks.__file__, ranks=ranks, cores=list(cores)))
    forks.install(work.parent / "template", agent)
    reader, writer = os.pipe()
    line = [sys.executable, "-u", *words]
    process = subprocess.Popen(
        line,
        cwd=work,
        env=forks.environment(env, work.parent / "template", writer),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[writer],
        start_new_session=True,
    )
    os.close(writer)
    out, err = process.communicate(timeout=60)
    with os.fdopen(reader) as statuses:
        return out, err, [int(status) for status in statuses.read().split()]


@pytest.mark.parametrize("name", PROBES)
def test_a_fork_is_what_python_makes_of_the_script(work: Path, name: str) -> None:
    probe = PROBES[name]
    words = probe
    if isinstance(probe, str):
        (work / "script.py").write_text(probe)
        words = ("script.py", "--lr", "0.1")
    found, expected = forked(words, work, environment()), plain(words, work, environment())
    assert [ADDRESS.sub("0x", str(part)) for part in found] == [
        ADDRESS.sub("0x", str(part)) for part in expected
    ]


def test_a_symlinked_script_has_the_modules_beside_what_it_leads_to(work: Path) -> None:
    (work / "elsewhere").mkdir()
    (work / "elsewhere/link.py").symlink_to(work / "script.py")
    (work / "script.py").write_text(BESIDE)
    words = ("elsewhere/link.py",)
    found = forked(words, work, environment())
    assert found == plain(words, work, environment())
    assert found[2] == [0]


@pytest.mark.parametrize("path", ["", "/mine", "/mine:/yours"])
def test_a_pythonpath_of_the_users_is_as_before(work: Path, path: str) -> None:
    (work / "script.py").write_text("import os, sys\nprint(sys.path, os.environ.get('PYTHONPATH'))\n")
    env = {**environment(), **({"PYTHONPATH": path} if path else {})}
    assert forked(("script.py",), work, env) == plain(("script.py",), work, env)


def test_a_sitecustomize_of_the_machine_is_imported(work: Path) -> None:
    site = work.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_machine = 41\n")
    (work / "script.py").write_text("import sitecustomize\nprint(of_the_machine, sitecustomize.__file__)\n")
    env = {**environment(), "PYTHONPATH": str(site)}
    assert forked(("script.py",), work, env) == plain(("script.py",), work, env)


@pytest.mark.parametrize("preload", ["", "libm.so.6"])
def test_a_fork_ends_without_what_libraries_of_the_template_do_at_their_end(work: Path, preload: str) -> None:
    """But for one that was put under all, which may be there to say something at its end."""
    site = work.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(OF_C)
    env = {**environment(), "PYTHONPATH": str(site), **({"LD_PRELOAD": preload} if preload else {})}
    said = "C is at its end\n"
    (work / "script.py").write_text("print('ran')\n")
    assert plain(("script.py",), work, env) == (f"ran\n{said}", "", [0])
    assert forked(("script.py",), work, env) == (f"ran\n{said if preload else ''}", "", [0])


def test_a_fork_runs_on_its_cores_from_the_start(work: Path) -> None:
    (work / "script.py").write_text("import os\nprint(sorted(os.sched_getaffinity(0)))\n")
    granted = sorted(os.sched_getaffinity(0))
    for cores, found, said in (
        (granted[-1:], granted[-1:], ""),
        ([], granted, ""),
        ([1 << 14], granted, "apptrain: this rank is not bound to its cores: Invalid argument\n"),
    ):
        ended = forked(("script.py",), work, environment(), cores=cores)
        assert ended == (f"{found}\n", said, [0])


def test_forks_draw_different_numbers_and_trust_different_keys(work: Path) -> None:
    """What every fresh process has by chance."""
    (work / "script.py").write_text(
        "import random, multiprocessing, tempfile, uuid\n"
        "print(random.random(), multiprocessing.current_process().authkey.hex(), tempfile.mktemp(), uuid.uuid4())\n"
    )
    out, err, statuses = forked(("script.py",), work, environment(), ranks=3)
    lines = [line.split() for line in out.splitlines()]
    assert (err, statuses, len(lines)) == ("", [0, 0, 0], 3)
    for drawn in zip(*lines, strict=True):
        assert len(set(drawn)) == 3, drawn


def test_a_rank_whose_template_has_gone_ends(work: Path) -> None:
    agent = work.parent / "agent.py"
    text = AGENT.format(forks=forks.__file__, ranks=1, cores=[]).replace(
        "rank.begin(dict(os.environ))", "os._exit(3)"
    )
    agent.write_text(text)
    forks.install(work.parent / "template", agent)
    reader, writer = os.pipe()
    env = forks.environment(environment(), work.parent / "template", writer)
    line = [sys.executable, "-u", "script.py"]
    ended = subprocess.run(
        line, cwd=work, env=env, capture_output=True, text=True, pass_fds=[writer], timeout=60, check=False
    )
    os.close(writer)
    os.close(reader)
    # The pipes' end, for which this has waited, is the rank's.
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")


# --- what speaks against a fork -----------------------------------------------------------------------------------


COMPUTED = "it sets variables whose names it computes, and one may be read as torch is imported"
CASES = {
    "a script": ("import torch\n", ""),
    "threads": (
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n",
        "script.py, line 2: it sets OMP_NUM_THREADS, which is read as torch is imported",
    ),
    "by setdefault": (
        "import os\nos.environ.setdefault('TORCH_LOGS', '+dynamo')\n",
        "script.py, line 2: it sets TORCH_LOGS, which is read as torch is imported",
    ),
    "by update": (
        "import os\nos.environ.update({'A': '1', 'KMP_AFFINITY': 'x'})\n",
        "script.py, line 2: it sets KMP_AFFINITY, which is read as torch is imported",
    ),
    "by update's words": (
        "import os\nos.environ.update(MKL_NUM_THREADS='1')\n",
        "script.py, line 2: it sets MKL_NUM_THREADS, which is read as torch is imported",
    ),
    "by putenv": (
        "from os import environ, putenv\nimport os\nos.putenv('LD_PRELOAD', 'x')\n",
        "script.py, line 3: it sets LD_PRELOAD, which is read as torch is imported",
    ),
    "by the name alone": (
        "from os import environ\nenviron['OPENBLAS_NUM_THREADS'] = '1'\n",
        "script.py, line 2: it sets OPENBLAS_NUM_THREADS, which is read as torch is imported",
    ),
    "in a function": (
        "import os\ndef main():\n    os.environ['PYTORCH_ALLOC_CONF'] = 'x'\n",
        "script.py, line 3: it sets PYTORCH_ALLOC_CONF, which is read as torch is imported",
    ),
    "CPUs": ("import os\nos.sched_setaffinity(0, {1})\n", "script.py, line 2: it binds itself to CPUs"),
    "what nothing reads so early": (
        "import os\nos.environ['NCCL_DEBUG'] = 'INFO'\nos.environ['MASTER_PORT'] = '1'\n",
        "",
    ),
    "what it only reads": (
        "import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ.get('TORCH_LOGS'))\n",
        "",
    ),
    "what is not the environment": (
        "settings = {}\nsettings['OMP_NUM_THREADS'] = '1'\nsettings.update(OMP_NUM_THREADS='1')\n"
        "settings.setdefault('OMP_NUM_THREADS', '1')\nOMP_NUM_THREADS = '1'\n",
        "",
    ),
    "an annotated one": (
        "import os\nos.environ['MKL_NUM_THREADS']: str = '1'\n",
        "script.py, line 2: it sets MKL_NUM_THREADS, which is read as torch is imported",
    ),
    "in a loop": (
        "import os\nfor name in ('OMP', 'MKL'):\n    os.environ[f'{name}_NUM_THREADS'] = '1'\n",
        f"script.py, line 3: {COMPUTED}",
    ),
    "by a dict at once": (
        "import os\nos.environ |= {'A': '1', 'OMP_NUM_THREADS': '1'}\n",
        "script.py, line 2: it sets OMP_NUM_THREADS, which is read as torch is imported",
    ),
    "by a dict from elsewhere": ("import os\nos.environ |= settings()\n", f"script.py, line 2: {COMPUTED}"),
    "by update, from elsewhere": (
        "import os\nos.environ.update(A='1', **settings())\n",
        f"script.py, line 2: {COMPUTED}",
    ),
    "two at once": (
        "import os\nos.environ['A'], os.environ['MKL_NUM_THREADS'] = '12'\n",
        "script.py, line 2: it sets MKL_NUM_THREADS, which is read as torch is imported",
    ),
    "what nothing reads so early, by a dict": ("import os\nos.environ |= {'A': '1'}\n", ""),
    "by a computed name, what it only reads": (
        "import os\nprint(os.environ[name], os.environ.get(name))\n",
        "",
    ),
    "a syntax error": ("if True print\n", ""),
}


@pytest.mark.parametrize(("text", "why"), CASES.values(), ids=CASES)
def test_a_script_that_sets_what_is_read_at_the_import_is_started_afresh(
    work: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.chdir(work)
    (work / "script.py").write_text(text)
    assert forks.why_not(["script.py"], {"torch", "numpy"}) == why


OMP = "line 2: it sets OMP_NUM_THREADS, which is read as torch is imported"


@pytest.mark.parametrize(
    ("text", "file", "why"),
    [
        ("import setup_env, torch\n", "setup_env.py", f"setup_env.py, {OMP}"),
        (
            "def main():\n    from package.sub import setup_env\n",
            "package/sub/setup_env.py",
            f"package/sub/setup_env.py, {OMP}",
        ),
        ("from package.sub import name\n", "package/sub.py", f"package/sub.py, {OMP}"),
        ("import package.tool as tool\n", "package/__init__.py", f"package/__init__.py, {OMP}"),
        ("import numpy.setup_env\n", "elsewhere/setup_env.py", ""),
        ("import other\n", "setup_env.py", ""),
    ],
)
def test_a_module_beside_the_script_that_it_imports_counts_too(
    work: Path, monkeypatch: pytest.MonkeyPatch, text: str, file: str, why: str
) -> None:
    (work / "script.py").write_text(text)
    (work / file).parent.mkdir(parents=True, exist_ok=True)
    (work / file).write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    assert forks.why_not([f"{work}/script.py"], {"torch"}) == why
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert forks.why_not([f"{work}/script.py"], {"torch"}) == "", "Python does not look there"


@pytest.mark.parametrize(
    ("text", "file", "why"),
    [
        ("", "__init__.py", f"package/__init__.py, {OMP}"),
        ("from . import setup_env\n", "setup_env.py", f"package/setup_env.py, {OMP}"),
        ("from .sub.deep import name\n", "sub/deep.py", f"package/sub/deep.py, {OMP}"),
    ],
)
def test_so_do_the_modules_of_the_package_that_is_run(
    work: Path, monkeypatch: pytest.MonkeyPatch, text: str, file: str, why: str
) -> None:
    monkeypatch.chdir(work)
    (work / "package/tool.py").write_text(text)
    (work / "package" / file).parent.mkdir(exist_ok=True)
    (work / "package" / file).write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    assert forks.why_not(["-m", "package.tool"], {"torch"}) == why


@pytest.mark.parametrize("name", ["numpy.py", "numpy", "numpy.cpython-311-x86_64-linux-gnu.so"])
def test_a_name_beside_the_script_that_torch_has_loaded_too_speaks_against_a_fork(
    work: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(work.parent)
    path = work / name
    if path.suffix:
        path.touch()
    else:
        path.mkdir()
    why = f"{work} has numpy, and torch has loaded another module of that name"
    assert forks.why_not([f"{work}/script.py"], {"torch", "numpy"}) == why
    assert forks.why_not([f"{work}/script.py"], {"torch"}) == ""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert forks.why_not([f"{work}/script.py"], {"torch", "numpy"}) == ""


def test_of_a_module_the_working_directory_counts_and_its_own_source(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    assert forks.why_not(["-m", "package.tool"], {"torch"}) == ""
    assert "beside, and torch" in forks.why_not(["-m", "package.tool"], {"beside"})
    (work / "package/tool.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    assert forks.why_not(["-m", "package.tool"], {"torch"}).startswith(
        "tool.py, line 2: it sets OMP_NUM_THREADS"
    )
    assert forks.why_not(["-m", "no.such"], {"torch"}) == ""  # Python will say so
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert forks.why_not(["-m", "package.tool"], {"torch"}) == ""  # Python does not look there


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["-X", "dev", "script.py"], "options of Python (-X) stand before the script"),
        (["-c", "print()"], "options of Python (-c) stand before the script"),
        (["nothing.py"], "nothing.py is no file of Python source"),
        (["package"], "package is no file of Python source"),
    ],
)
def test_what_python_would_not_run_as_a_script_is_left_to_python(
    work: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], why: str
) -> None:
    monkeypatch.chdir(work)
    assert forks.why_not(command, {"torch"}) == why


def test_what_may_open_a_device_is_asked_in_a_fork_that_ends() -> None:
    pid = os.getpid()
    assert forks.asked_in_fork(lambda: os.getpid() != pid) == "True"
    assert forks.asked_in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL)) == ""


def test_pythons_warning_of_threads_at_a_fork_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and newer give it."""

    def forked() -> int:
        warnings.warn("multi-threaded, use of fork() may lead to deadlocks", DeprecationWarning, stacklevel=2)
        return 7

    monkeypatch.setattr(os, "fork", forked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert forks.fork() == 7


def test_a_fork_gets_its_environment_and_is_polled_as_a_popen_is() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        env = b""
        while chunk := os.read(reader, 100):
            env += chunk
        os._exit(len(json.loads(env)["LONG"]) % 251)
    os.close(reader)
    rank = forks.Fork(pid, writer)
    assert rank.poll() is None
    rank.begin({"LONG": "x" * 200_000})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (rank.poll(), rank.poll(), rank.returncode) == (200_000 % 251,) * 3


def test_what_is_asked_in_a_fork_does_not_keep_the_port_of_torchs_store() -> None:
    with socket.create_server(("127.0.0.2", 0)) as store:
        fd = store.fileno()

        def has_it() -> bool:
            try:
                os.fstat(fd)
            except OSError:
                return False
            return True

        assert forks.asked_in_fork(has_it, fd) == "False"
        assert forks.asked_in_fork(has_it) == "True"
