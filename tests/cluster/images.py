"""Images that the tests need, each built for real by an ordinary user on a test host, and kept. Begin at
`built`.

An image lies outside the checkout, in the test hosts' cache, under a digest of all files that go into it,
together with all that was printed while it was built; tests look at both. Downloads are kept, too. Whatever
is there may be removed at any time.
"""

import calendar
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from containers import stacks, wheels
from tests.host import Bind, Host, root, site, up
from tests.host.places import cache, locked, remove

CHECKOUT = Path(__file__).resolve().parents[2]
INPUTS = (
    *("containers", "host", "entrypoint", "src", "requirements"),
    *("tools", "apptrain", "Makefile", "pyproject.toml", "LICENSE"),
)
RECIPE = ("containers", "requirements/image.txt", "pyproject.toml")
"""Of those, what an image is made from beside our own two packages."""
BESIDE = ("run.sh", "host", "image*.sif", "image*.json", "__pycache__", ".*")
"""Names in them that change nothing in an image."""
BUILD_LIMIT = 1500.0
"""Seconds for one build with all its downloads; it takes 2 minutes on 2 cores once they are there."""
WAIT_LIMIT = 4 * BUILD_LIMIT

FIRST_RUN = 33_000_000_000
"""Bytes of disk that all tests together take at their most if no image is kept from an earlier run."""

# Where a builder's host shows things. alice sets nothing: what is kept between builds lies where hers would.
HOME = Path("/scratch/a user's/apptrain")
DOWNLOADS = Path("/home/alice/.cache/apptrain")
VENV = HOME / ".venv-image"
OUT = Path("/scratch/out")
TEMPORARY = Path("/tmp")
IMAGE = Path("/images/image.sif")
"""One that was built before."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What one build left."""

    folder: Path
    """On this machine; holds the image, what lies beside it, and `transcript.txt`."""

    @property
    def image(self) -> Path:
        return self.folder / "image.sif"

    @property
    def said(self) -> dict[str, Any]:
        """The JSON beside the image."""
        found: dict[str, Any] = json.loads((self.folder / "image.json").read_text())
        return found

    @property
    def when(self) -> tuple[str, str]:
        """Begin and end of the build, UTC."""
        begin = calendar.timegm(time.strptime(self.said["built"], "%Y-%m-%dT%H:%M:%SZ"))
        form = "%Y-%m-%d %H:%M:%S"
        return time.strftime(form, time.gmtime(begin)), time.strftime(
            form, time.gmtime(begin + self.said["seconds"])
        )

    @property
    def transcript(self) -> str:
        return (self.folder / "transcript.txt").read_text()


def lack_of_room(free: int) -> str:
    """Why all tests together would fill the disk, with so many bytes free; empty if they have room."""
    if free >= FIRST_RUN or list((cache() / "images").glob("default.*/complete")):
        return ""
    return (
        f"{cache()} has {free / 1e9:.0f} GB free, and the tests with real Apptainer take {FIRST_RUN / 1e9:.0f} GB in "
        "their first run: free some, or give another disk with APPTRAIN_TEST_CACHE=DIR"
    )


def digest(*names: str) -> str:
    """Of the files of the checkout with these names, or below them."""
    found = hashlib.sha256()
    for name in names:
        top = CHECKOUT / name
        for path in sorted([top] if top.is_file() else top.rglob("*")):
            inside = path.relative_to(CHECKOUT)
            if path.is_file() and not any(fnmatch(part, name) for part in inside.parts for name in BESIDE):
                found.update(f"{inside}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def kept(name: str, inputs: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` has filled for these inputs, now or in an earlier run; older ones are removed."""
    images = cache() / "images"
    images.mkdir(parents=True, exist_ok=True)
    images.chmod(0o755)
    folder = images / f"{name}.{inputs}"
    with locked(images / f".{name}.lock", WAIT_LIMIT):
        if not (folder / "complete").exists():
            for old in images.glob(f"{name}.*"):
                remove(old)
            folder.mkdir()
            folder.chmod(0o777)
            make(folder)
            (folder / "complete").touch()
    return folder


@contextmanager
def builder(name: str, out: Path, *, online: bool = True, binds: Sequence[Bind] = ()) -> Iterator[Host]:
    """A host with a fresh copy of the checkout, owned by alice; `out` is where images go, if she says so."""
    images = cache() / "images"
    downloads, venv, checkout = images / ".downloads", images / ".venv", checkout_of(name)
    remove(checkout)
    for folder in (downloads, venv, checkout):
        folder.mkdir(parents=True, exist_ok=True)
    for part in INPUTS:
        if (CHECKOUT / part).is_dir():
            skipped = shutil.ignore_patterns("image*.sif", "image*.json", "__pycache__", ".*")
            shutil.copytree(CHECKOUT / part, checkout / part, ignore=skipped)
        else:
            shutil.copy(CHECKOUT / part, checkout / part)
    shown = [
        *binds,
        Bind(source=checkout, target=HOME, mode="rw"),
        Bind(source=venv, target=VENV, mode="rw"),
        Bind(source=downloads, target=DOWNLOADS, mode="rw"),
        Bind(source=out, target=OUT, mode="rw"),
    ]
    with up(name, online=online, binds=shown) as host:
        host.run(["find", HOME, "-path", VENV, "-prune", "-o", "-exec", "chown", "alice:alice", "{}", "+"])
        host.run(["chown", "alice:alice", VENV, DOWNLOADS, DOWNLOADS.parent])
        yield host
    remove(checkout)


def checkout_of(name: str) -> Path:
    """Where on this machine the builder of that name has its checkout, while it is up."""
    return cache() / "images" / f".checkout-{name}"


def make(
    host: Host, *words: str, transcript: Path | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """`make WORDS` as alice in the copied checkout: its status, and all that it printed, here and to her."""
    line = ["timeout", f"{BUILD_LIMIT:.0f}", "make", *words]
    log = transcript or host.folder / "transcript"
    print(
        f"\n{time.strftime('%T')} on {host.folder.name}: make {' '.join(words)}", file=sys.stderr, flush=True
    )
    with log.open("w") as stream:
        process = host.start(line, user="alice", cwd=HOME, env=env or {}, stdout=stream, stderr=stream)
        status = process.wait(BUILD_LIMIT + 30)
    said = log.read_text(errors="replace")
    ours = [line for line in said.splitlines() if line.startswith("apptrain: ")]
    print("\n".join(ours), file=sys.stderr, flush=True)
    return status, said


def take(checkout: Path, folder: Path) -> None:
    """Moves an image and what lies beside it from where `make image` leaves it."""
    for left in (checkout / "containers").glob("image*.*"):
        left.rename(folder / f"image.{left.name.partition('.')[2]}")


def built(name: str, *words: str, inputs: tuple[str, ...] = INPUTS) -> Built:
    """The image of `make image WORDS`, built by alice, who sets nothing."""

    def build(folder: Path) -> None:
        with builder(f"build-{name}", folder) as host:
            log = folder / "transcript.txt"
            status, said = make(host, "image", *words, transcript=log)
            assert status == 0, said[-1500:]
            take(checkout_of(f"build-{name}"), folder)

    asked = repr((digest(*inputs), words))
    return Built(folder=kept(name, hashlib.sha256(asked.encode()).hexdigest()[:16], build))


OWN = """\
Bootstrap: scratch

%setup
    rootfs=${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}
    cp -a /scratch/out/tree/. "$rootfs/"
    # On one file system with the target, where what is unpacked is linked, not copied.
    export UV_CACHE_DIR="$rootfs/tmp/uv" UV_LINK_MODE=hardlink
    /scratch/out/uv pip install --quiet --no-config --offline --no-index --find-links=/scratch/wheels \\
        --python-version=PYTHON --python-platform=x86_64-manylinux_2_40 \\
        --target="$rootfs/usr/local/lib/pythonPYTHON/dist-packages" --require-hashes -r /scratch/out/lock.txt
    rm -r "$rootfs/tmp/uv"

%post
    # As pip does it; some modules are no Python 3.
    python3 -m compileall -q /usr/local/lib/pythonPYTHON || true
"""
"""Plain Debian as a user has it from a registry, without one: no variable, no command and no package of ours."""
OWN_PACKAGES = ("python3", "ca-certificates")
"""Debian's: Python as python3 alone. The others are wheels, as they come from PyPI."""


def own() -> Built:
    """An image that apptrain did not make: a plain Debian 13 with PyPI's torch, and what the reference training needs."""
    stack = stacks.find("")
    lock, python = stack.lock("amd64"), stack.base.python
    recipe = OWN.replace("PYTHON", python)

    def build(folder: Path) -> None:
        downloads = cache() / "images" / ".downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        links = wheels.fetch(lock, python, "amd64", downloads, None)
        tree = folder / "tree"
        root.plain(tree, OWN_PACKAGES)
        remove(tree / "dev")
        (tree / "dev").mkdir()
        subprocess.run(["chmod", "-R", "a+rX", tree], check=True)
        shutil.copy(wheels.uv(), folder / "uv")
        shutil.copy(lock, folder / "lock.txt")
        (folder / "own.def").write_text(recipe)
        shown = [
            Bind(source=folder, target=OUT, mode="rw"),
            Bind(source=links, target=Path("/scratch/wheels")),
        ]
        with up("build-own", binds=shown) as host:
            packing = ["--mksquashfs-args", "-comp zstd -Xcompression-level 1"]  # gzip takes 8 minutes
            line: list[str | Path] = ["apptainer", "build", *packing, OUT / "image.sif", OUT / "own.def"]
            ended = host.run(line, user="alice", timeout=BUILD_LIMIT)
            assert ended.returncode == 0, ended.stderr[-3000:]
        remove(tree)
        (folder / "uv").unlink()

    inputs = repr((recipe, OWN_PACKAGES, wheels.digest(lock)))
    return Built(folder=kept("own", hashlib.sha256(inputs.encode()).hexdigest()[:16], build))


PAYLOAD = Path("/opt/payload")
"""What the program of a job with a `padded` image reads, as others read torch's libraries."""
PAYLOAD_MB = 60
PADDED_PACKAGES = ("python3", "python3-psutil")


def padded(megabytes: Sequence[int]) -> Path:
    """A folder with an image N.sif for each N of these: Debian's Python, PAYLOAD, and N MB that nobody reads."""

    def build(folder: Path) -> None:
        tree = folder / "tree"
        root.plain(tree, PADDED_PACKAGES)
        remove(tree / "dev")
        (tree / "dev").mkdir()
        (tree / str(PAYLOAD).lstrip("/")).write_bytes(os.urandom(PAYLOAD_MB * 1_000_000))
        package = tree / f"usr/local/lib/python{stacks.find('').base.python}/dist-packages/torch"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()  # jobs ask whether it is there; these ranks do not import it
        subprocess.run(["chmod", "-R", "a+rX", tree], check=True)
        with up("build-padded", binds=[Bind(source=folder, target=OUT, mode="rw")]) as host:
            for size in megabytes:
                (tree / "opt/padding").write_bytes(os.urandom(size * 1_000_000))
                packing = ("--mksquashfs-args", "-comp zstd -Xcompression-level 1")
                line: list[str | Path] = ["apptainer", "build", *packing]
                line += [OUT / f"{size}.sif", OUT / "tree"]
                ended = host.run(line, user="alice", timeout=BUILD_LIMIT)
                assert ended.returncode == 0, ended.stderr[-3000:]
        remove(tree)

    inputs = hashlib.sha256(repr((PADDED_PACKAGES, PAYLOAD_MB, tuple(megabytes))).encode()).hexdigest()[:16]
    return kept("padded", inputs, build)


ADDED = Path("/sw/my venvs/added")
"""Where a cluster shows the venv of `added`, and where it was made."""
ADDED_PACKAGES = ("accelerate", "lightning", "transformers")


def added(default: Built) -> Bind:
    """A venv on top of the image of `make image`, with packages that themselves need torch, made by alice as the pages
    say."""

    def install(folder: Path) -> None:
        shown = [
            Bind(source=default.folder, target=IMAGE.parent),
            Bind(source=folder, target=ADDED.parent, mode="rw"),
        ]
        with builder("build-venv", folder, binds=shown) as host:
            host.run(["install", "-D", "-o", "alice", "/etc/pip.conf", "/home/alice/.pip/pip.conf"])
            status, said = make(host, "venv", f"DIR={ADDED}", f"IMAGE={IMAGE}")
            assert status == 0, said[-1500:]
            add: list[str | Path] = [HOME / "containers/run.sh", IMAGE]
            add += ["pip", "install", *ADDED_PACKAGES]
            reached = site.read(os.environ).files  # indexes and certificates of this machine
            env = {"APPTRAIN_VENV": str(ADDED), "APPTRAIN_BIND": "\n".join(map(str, reached))}
            ended = host.run(add, user="alice", cwd=HOME, env=env, timeout=BUILD_LIMIT)
            assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-1500:]

    inputs = hashlib.sha256(repr((default.folder.name, ADDED_PACKAGES)).encode()).hexdigest()[:16]
    return Bind(source=kept("added", inputs, install), target=ADDED.parent)


SITE_PACKAGES = Path("/sw/packages")
"""Where a cluster shows `packages`."""
NOT_TAKEN = ("grpcio", "matplotlib", "tensorboard", "tensorboard-data-server", "torchvision", "triton")
"""Of the default stack's lock: large, and not needed for training in an environment."""


def packages() -> Bind:
    """torch and what it needs, as pip installs it, for the Python of the hosts: what an environment of a user's has."""
    stack = stacks.find("")
    lock, python = stack.lock("amd64"), stack.base.python

    def install(folder: Path) -> None:
        downloads = cache() / "images" / ".downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        links = wheels.fetch(lock, python, "amd64", downloads, None)
        entries = re.split(r"^(?=[A-Za-z0-9])", lock.read_text(), flags=re.M)
        wanted = folder / "lock.txt"
        wanted.write_text("".join(entry for entry in entries if entry.partition("==")[0] not in NOT_TAKEN))
        line: list[str | Path] = [
            wheels.uv(),
            "pip",
            "install",
            "--quiet",
            "--no-config",
            "--offline",
            "--no-index",
            "--no-deps",
        ]
        line += [
            f"--find-links={links}",
            f"--python-version={python}",
            "--python-platform=x86_64-manylinux_2_40",
        ]
        line += [f"--target={folder}/packages", "--require-hashes", "-r", wanted]
        env = {**os.environ, "UV_CACHE_DIR": f"{folder}/uv", "UV_LINK_MODE": "hardlink"}
        subprocess.run(line, env=env, check=True, timeout=BUILD_LIMIT)
        remove(folder / "uv")
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)

    inputs = hashlib.sha256(repr((wheels.digest(lock), NOT_TAKEN)).encode()).hexdigest()[:16]
    return Bind(source=kept("packages", inputs, install) / "packages", target=SITE_PACKAGES)
