"""A stack that builds in a minute: the real recipe and Debian, with two wheels that only look like torch's.
`lay_out` is the entry. For tests of how an image is built that do not care what is in it.
"""

import hashlib
import re
import textwrap
import zipfile
from pathlib import Path

import yaml

NAME = "small"
STACK = {
    "torch": "1.0",
    "torchvision": "1.0",
    "cuda": "13.2",
    "cudnn": "9.1.2",
    "nccl": "2.3.4",
    "driver": "580",
    "compute_capability": ["9.0"],
    "architectures": ["amd64", "arm64"],
    "megabytes": {"download": 300, "work": 1500, "image": 300},
}
TORCH = """\
import types

__version__ = "1.0"
version = types.SimpleNamespace(cuda="13.2")
backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 90102))
cuda = types.SimpleNamespace(nccl=types.SimpleNamespace(version=lambda: (2, 3, 4)))
_C = types.SimpleNamespace(_cuda_getArchFlags=lambda: "sm_90")
"""


def lay_out(checkout: Path, links: Path) -> None:
    """Adds the stack to this copy of the checkout, and leaves nothing to build but it; its wheels go to `links`."""
    containers = checkout / "containers"
    with (containers / "stacks.yaml").open("a") as file:
        file.write(textwrap.indent(yaml.safe_dump({NAME: STACK}), "  "))
    (checkout / "requirements/run.in").write_text("torch\ntorchvision\n")
    (containers / "image/selftest.py").write_text('print("apptrain: selftest: small")\n')
    links.mkdir(parents=True, exist_ok=True)
    made = [wheel(links, "torch", TORCH), wheel(links, "torchvision", '__version__ = "1.0"\n')]
    wheel(links, "needs_torch", "", needs="torch>=0.9")  # of no stack
    for architecture in ("amd64", "arm64"):
        real = (containers / f"locks/cu132-{architecture}.txt").read_text()
        needed = re.search(r"^setuptools==(?:.*\\\n)+.*\n", real, re.MULTILINE)  # builds our own package
        assert needed
        lines = [f"{name}==1.0 --hash=sha256:{digest}\n" for name, digest in made]
        (containers / f"locks/{NAME}-{architecture}.txt").write_text("".join(lines) + needed[0])


def wheel(folder: Path, name: str, text: str, needs: str = "") -> tuple[str, str]:
    """Makes NAME-1.0, one module with this text; returns its name and digest, the same each time."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    file = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), content)
    return name, hashlib.sha256(file.read_bytes()).hexdigest()
