"""Measures `import torch` in each stack's image through FUSE against a plain directory, and what each of our
measures brings. `imports` is the entry. The plain directory is the image unpacked, without those measures.

Each import gets a mount of its own: the image's pages in the host's memory are warm, those that FUSE hands
out are not. All ways alternate. To leave a measure out, its file in the image is covered by an empty one.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.image import BARE, IMPORT, LIMIT
from containers import stacks
from tests.cluster.account import given_image
from tests.cluster.images import RECIPE, built
from tests.host import Bind, Host, up

IMAGE: Final = Path("/scratch/image.sif")
OUT: Final = Path("/scratch/out")
AHEAD, BYTECODE = "/opt/apptrain/ahead", "/opt/apptrain/bytecode"
PLAIN: Final = "plain directory"
WAYS: Final[dict[str, tuple[Path, list[str]]]] = {
    PLAIN: (OUT / "unpacked", [BYTECODE]),
    "unpacked": (OUT / "unpacked", []),
    "through FUSE": (IMAGE, []),
    "without reading ahead": (IMAGE, [AHEAD]),
    "without all": (IMAGE, [BYTECODE]),
}
"""Name to the image, and what is left out of it. Without the bytecode nothing of ours does anything."""


def imports(pairs: int) -> dict[str, Any]:
    """Of all stacks for this processor, or of the image that APPTRAIN_TEST_IMAGE gives. Needs root, for the
    test host, and room for 35 GB: downloads, a build, and what it leaves."""
    if image := given_image():
        return {"stacks": {image.name: _measured(image.name, image, pairs)}}
    here = stacks.debian_architecture()
    every = [stack for stack in stacks.read().values() if here in stack.architectures]
    return {"stacks": {stack.name: _measured(stack.name, _built(stack), pairs) for stack in every}}


def _built(stack: stacks.Stack) -> Path:
    """The image that the tests build and keep."""
    made = built("default") if stack.is_default else built(stack.name, f"STACK={stack.name}", inputs=RECIPE)
    return made.image


def _measured(name: str, image: Path, pairs: int) -> dict[str, Any]:
    """Seconds of each round, after one to warm up, and the ratios to the plain directory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        out = Path(folder)
        out.chmod(0o777)
        binds = [Bind(source=out, target=OUT, mode="rw"), Bind(source=image, target=IMAGE)]
        with up("imports-bench", binds=binds) as host:
            _run(host, "apptainer", "-q", "build", "--sandbox", f"{OUT}/unpacked", str(IMAGE))
            rounds = [{way: _import(host, *WAYS[way]) for way in WAYS} for _ in range(pairs + 1)][1:]
    ratios = {}
    for way in WAYS:
        found = [one[way] / one[PLAIN] for one in rounds]
        ratios[way] = {"median": statistics.median(found), "min": min(found), "max": max(found)}
        seconds = statistics.median(one[way] for one in rounds)
        spread = f"{ratios[way]['median']:.2f} ({min(found):.2f} to {max(found):.2f})"
        print(f"{name}, {way}: {seconds:.2f} s, {spread}", flush=True)
    return {"rounds_s": rounds, "ratio": ratios}


def _import(host: Host, image: Path, left_out: list[str]) -> float:
    empty = [word for path in left_out for word in ("--bind", f"/dev/null:{path}:ro")]
    return float(_run(host, *BARE, *empty, str(image), "python", "-c", IMPORT))


def _run(host: Host, *command: str) -> str:
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "APPTAINER_TMPDIR": str(OUT)}
    ended = host.run(command, user="alice", cwd=OUT, env=env, timeout=LIMIT)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    return ended.stdout
