"""Compares our image with one from the usual recipe: size, time to build, start and `import torch`. `image`
is the entry.

The same ordinary user builds both on a test host, from the same Debian and the same wheels, which lie on its
disk. Python itself times the imports, warm and alternating: through FUSE, from the unpacked image, and from a
venv of the same lock on the same disk.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from containers import debian, stacks, wheels
from tests.cluster.images import DOWNLOADS, HOME, OUT, VENV, builder, make
from tests.host import Host

LIMIT: Final = 1500.0
BUILDS: Final = 1  # of each; the pair takes ten minutes
IMPORT: Final = "import time; begin = time.perf_counter(); import torch; print(time.perf_counter() - begin)"
BARE: Final = ("apptainer", "-q", "exec", "--cleanenv", "--no-mount", "home,cwd,tmp,bind-paths")


def image(pairs: int) -> dict[str, Any]:
    """All of it; imports `pairs` times each way. Needs root, for the test host."""
    stack = stacks.find("")
    with TemporaryDirectory(dir="/var/tmp") as folder:
        out = Path(folder)
        out.chmod(0o777)
        with builder("bench", out) as host:
            status, said = make(host, "image-fetch")
            assert status == 0, said
            wheelhouse = DOWNLOADS / "wheels" / wheels.digest(stack.lock("amd64"))[:16]
            seconds = [(_ours(host), _naive(host, stack, wheelhouse)) for _ in range(BUILDS)]
            size = {name: (out / f"{name}.sif").stat().st_size for name in ("ours", "naive")}
            _venv(host, wheelhouse)
            _run(host, "apptainer", "-q", "build", "--sandbox", f"{OUT}/unpacked", f"{OUT}/ours.sif")
            ways: dict[str, Callable[[], float]] = {
                "venv on disk": lambda: _import(host, f"{OUT}/venv/bin/python"),
                "unpacked": lambda: _import(host, *BARE, f"{OUT}/unpacked", "python"),
                "through FUSE": lambda: _import(host, *BARE, f"{OUT}/ours.sif", "python"),
                "naive, through FUSE": lambda: _import(host, *BARE, f"{OUT}/naive.sif", "python3"),
                "start": lambda: _start(host, "ours"),
                "start of the naive one": lambda: _start(host, "naive"),
            }
            for way in ways.values():
                way()
            rounds = [{name: way() for name, way in ways.items()} for _ in range(pairs)]
    ratios = {
        name: _spread([one[name] / one["venv on disk"] for one in rounds])
        for name in ways
        if not name.startswith(("start", "venv"))
    }
    built = _spread([naive / ours for ours, naive in seconds])
    print(f"size {size['ours'] / 1e9:.2f} GB, naive {size['naive'] / 1e9:.2f} GB")
    print(f"build: naive / ours {built}, seconds {seconds}")
    for name in ways:
        print(f"{name}: {statistics.median(one[name] for one in rounds):.2f} s", ratios.get(name, ""))
    return {
        "bytes": size,
        "build_s": seconds,
        "build_ratio": built,
        "rounds_s": rounds,
        "import_ratio": ratios,
    }


def _ours(host: Host) -> float:
    begin = time.perf_counter()
    status, said = make(host, "image", f"IMAGE={OUT}/ours.sif")
    assert status == 0, said[-3000:]
    return time.perf_counter() - begin


def _naive(host: Host, stack: stacks.Stack, wheelhouse: Path) -> float:
    values = {"SUITE": stack.base.suite, "MIRROR": debian.mirror(), "LOCK": f"{stack.name}-amd64.txt"}
    arguments = [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
    locks = f'type=bind,"source={HOME}/containers/locks",destination=/media'
    shown = ["--bind", f"{wheelhouse}:/mnt:ro", "--mount", locks]
    target = ["--force", f"{OUT}/naive.sif", str(HOME / "naive.def")]
    text = Path(__file__).with_name("naive.def").read_text()
    host.run(["tee", HOME / "naive.def"], input=text, user="alice")
    begin = time.perf_counter()
    _run(host, "apptainer", "-q", "build", *arguments, *shown, *target)
    return time.perf_counter() - begin


def _venv(host: Host, wheelhouse: Path) -> None:
    """From the image's lock, with bytecode, by the test host's Python, which is the image's."""
    _run(host, "python3", "-m", "venv", "--without-pip", f"{OUT}/venv")
    options = ["--quiet", "--offline", "--no-index", "--compile-bytecode", "--find-links", str(wheelhouse)]
    lock = str(HOME / "containers/locks/cu132-amd64.txt")
    _run(host, f"{VENV}/bin/uv", "pip", "install", *options, "--python", f"{OUT}/venv/bin/python", "-r", lock)


def _import(host: Host, *python: str) -> float:
    return float(_run(host, *python, "-c", IMPORT))


def _start(host: Host, name: str) -> float:
    begin = time.perf_counter()
    _run(host, *BARE, f"{OUT}/{name}.sif", "true")
    return time.perf_counter() - begin


def _run(host: Host, *command: str) -> str:
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    ended = host.run(command, user="alice", cwd=OUT, env=env, timeout=LIMIT)
    if ended.returncode:
        raise RuntimeError(f"{json.dumps(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    return ended.stdout


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }
