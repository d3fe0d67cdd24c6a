"""A shared file system that gives all nodes of a cluster together so many bytes a second. `throttled` is the entry.

The controller serves a folder over SFTP, and each compute node mounts it with sshfs: so each has inodes and a page
cache of its own, as on a cluster. What the controller sends on the fast network, which it uses for nothing else,
leaves through one token bucket, which also counts it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.host import Refused
from tests.vcluster.cluster import Cluster
from tests.vcluster.layout import HIGH_SPEED
from tests.vcluster.shares import token_bucket

FOLDER: Final = Path("/shared")
"""Where each node sees it, read-only."""
OPTIONS: Final = ",".join(
    [
        *("ro", "allow_other"),
        "auto_cache",  # what was read stays in the page cache between two opens, as with NFS or Lustre
        *("IdentityFile=/home/alice/.ssh/id_ed25519", "BatchMode=yes", "ConnectTimeout=20"),
        *("Ciphers=aes128-gcm@openssh.com", "Compression=no"),
    ]
)
MOUNT: Final = f'mkdir -p {FOLDER} && exec sshfs "$0" {FOLDER} -o {OPTIONS} >/tmp/sshfs 2>&1'


@dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """A folder of the controller that all compute nodes have mounted."""

    cluster: Cluster
    source: Path
    """Its path on the controller."""

    def remount(self) -> None:
        """Mounts it anew on each node, which so has nothing of it in memory."""
        for node in self.cluster.nodes.values():
            node.run(["umount", FOLDER])
            ended = node.run(["sh", "-c", MOUNT, f"alice@ctl-hsn:{self.source}"])
            if ended.returncode:
                raise Refused(f"sshfs: {node.run(['cat', '/tmp/sshfs']).stdout.strip()}")

    def sent(self) -> int:
        """Bytes that have left through the bucket so far, with the headers of packets."""
        said = self.cluster.controller.run(["tc", "-s", "-j", "qdisc", "show", "dev", HIGH_SPEED.name])
        return int(json.loads(said.stdout)[0]["bytes"])


@contextmanager
def throttled(cluster: Cluster, source: Path, *, mbit: int) -> Iterator[SharedFolder]:
    """This folder of the controller on each compute node at FOLDER; together they read it with so many Mbit/s."""
    shared = SharedFolder(cluster=cluster, source=source)
    try:
        with token_bucket(cluster.controller, HIGH_SPEED, mbit):
            shared.remount()
            yield shared
    finally:
        for node in cluster.nodes.values():
            node.run(["umount", "--lazy", FOLDER])
