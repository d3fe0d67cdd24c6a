"""The image and the host that builds it: neither changes the other. Needs root, for the test hosts.

`make image` of an ordinary user who has set nothing, once where /tmp is a folder of the root's file system, as on most
machines, and once where it is a file system of its own. There APPTAINER_TMPDIR's default, /tmp, is.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import small
from tests.cluster.images import BUILD_LIMIT, HOME, VENV, builder, checkout_of, make
from tests.host import Bind, Host

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users"),
    pytest.mark.timeout(2 * BUILD_LIMIT),
]
IMAGE = HOME / f"containers/image-{small.NAME}.sif"
LINKS = Path("/scratch/links")
OTHERS = """
cd "$1"
mkdir -p other/lib/python3/__pycache__ other/usr/lib/python3.13/__pycache__
echo kept >other/lib/python3/__pycache__/module.cpython-313.pyc
echo kept >other/usr/lib/python3.13/__pycache__/module.cpython-313.pyc
ln -s /tmp other/around
chmod 600 other/lib/python3/__pycache__/module.cpython-313.pyc
"""
"""What other programs of the user keep in such a directory: Python's caches, and a link that leads back."""
LISTING = """
import hashlib, os, sys
for top in sys.argv[1:]:
    for folder, folders, files in os.walk(top):
        for path in sorted(os.path.join(folder, name) for name in [*folders, *files]):
            at = os.lstat(path)
            text = open(path, "rb").read() if os.path.isfile(path) else b""
            print(path, oct(at.st_mode), at.st_uid, at.st_mtime_ns, hashlib.sha256(text).hexdigest())
"""
SHARED = ("/tmp", "/var/tmp", "/dev/shm")


def listing(host: Host) -> list[str]:
    """Every file below SHARED with its mode, owner, time and content."""
    ended = host.run(["python3", "-I", "-c", LISTING, *SHARED])
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


TREE = """
import json, sys
from pathlib import Path
sys.path.insert(0, ".")
from containers.build import Builder
json.dump(Builder.find().tree(Path(sys.argv[1])), sys.stdout)
"""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What one build said, left, and did to the host."""

    said: str
    before: list[str]
    after: list[str]
    tree: dict[str, str]
    partition: str


def build(name: str, folder: Path, *, apart: bool) -> Left:
    folder.mkdir()
    with builder(name, folder, binds=[Bind(source=folder, target=LINKS)]) as host:
        small.lay_out(checkout_of(name), folder)
        if apart:
            host.run(["mount", "-t", "tmpfs", "-o", "mode=1777,size=3g", "tmp", "/tmp"]).check_returncode()
        for place in SHARED:
            host.run(["bash", "-euc", OTHERS, "bash", place], user="alice").check_returncode()
        before = listing(host)
        site = {"PIP_FIND_LINKS": f"{host.env.get('PIP_FIND_LINKS', '')} {LINKS}"}
        status, said = make(host, "image", f"STACK={small.NAME}", env=site)
        after = listing(host)
        assert status == 0, said[-3000:]
        tree = host.run([VENV / "bin/python", "-c", TREE, IMAGE], user="alice", cwd=HOME, timeout=120)
        assert tree.returncode == 0, tree.stderr
        described = json.loads(
            (checkout_of(name) / "containers" / IMAGE.with_suffix(".json").name).read_text()
        )
    return Left(
        said=said,
        before=before,
        after=after,
        tree=json.loads(tree.stdout),
        partition=described["partition_sha256"],
    )


def test_with_nothing_set_the_image_is_built_and_the_same_wherever_tmp_is(tmp_path: Path) -> None:
    on_root = build("tmp-on-root", tmp_path / "on-root", apart=False)
    apart = build("tmp-apart", tmp_path / "apart", apart=True)
    for left in (on_root, apart):
        assert "image: temporary files in /tmp (APPTAINER_TMPDIR)\n" in left.said
        assert len(left.before) >= 3 * 8
        assert left.after == left.before
    assert len(on_root.tree) > 5000
    assert on_root.tree == apart.tree
    assert on_root.partition == apart.partition
    assert not {path for path in on_root.tree if path.startswith(("/tmp/", "/var/tmp/"))}
