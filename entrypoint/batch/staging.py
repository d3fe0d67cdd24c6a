"""Decides whether a job's nodes get the image onto their own disks before their containers start, and who
copies it from whom. `decide` is the entry; host/staging.sh carries it out.

The model, in seconds, for n nodes and an image of S bytes, of which a start reads the share READ:

    unstaged(n) = n * READ * S / shared                all read at once from the shared file system
    staged(n)   = S / reader + sent(n) * S / node      one reads it all, then a tree of copies
    waves(n)    = n * S / shared                       each node copies it from the shared file system

`shared` is what the shared file system gives to all nodes together, `reader` to one (the lesser of `shared`
and `node`), `node` what one node sends, receives or writes. `sent(n)` is how many copies of the image leave a
node, one behind another, until all have it: width times the depth of the tree. Waves are always slower than
reading the image in place, so `auto` never makes them. A job of PBS does, for a directory that was asked for,
if ssh does not reach its nodes.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from entrypoint.core import image_header
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass

READ = 0.09
"""What a start reads of the image. Measured: 274 of 3,057 MB, for torch, torchvision, gloo and a step on a
CPU. A profile may have another."""
WIDTH = 8
"""Nodes to which one that has the image sends it in a wave."""
SBCAST_WIDTH = 16
"""Slurm's TreeWidth, as it is by default since 24.05; it was 50."""
SENDERS = 64
"""Most that send in a wave: the first node has an ssh open to each."""
READERS = 8
"""Nodes of a wave that copy the image from the shared file system at once."""
GAIN = 10.0
"""Seconds that staging must save, or `auto` does not stage: Apptainer waits as long for a mount."""
ROOM = 4 << 30
"""Bytes that must stay free beside the image, or twice a checkpoint if that is more."""
MOST = 16384
"""Nodes."""
AUTO, OFF = "auto", "off"


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bytes a second. The defaults are those of a fast file system and slow nodes: so `auto` stages late."""

    shared: float = 5e9
    node: float = 1e9


@dataclass(frozen=True, kw_only=True)
class Image:
    """A SIF file that every node is to have."""

    path: str
    bytes: int
    id: str
    """Of its header, in the form of a UUID."""
    sha256: str = ""
    """Empty where it is not compared."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One that a node gets."""

    wave: int
    source: str
    """A node; empty for the shared file system."""
    target: str


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Who copies the image to whom, and when a node's copy counts."""

    folder: str
    """On each node, for this job alone."""
    image: Image
    needs: int
    """Bytes that must be free in it."""
    by_name: bool
    """The user asked for this directory: a node that cannot have the image there takes no part."""
    named: bool
    """The user or the site chose the directory: it may be in memory."""
    least: int
    """So many nodes are enough."""

    @property
    def file(self) -> str:
        return f"{self.folder}/image.sif"


def unstaged(nodes: int, size: int, bandwidth: Bandwidth, read: float = READ) -> float:
    """Seconds in which that many nodes read what a start needs, the share `read` of the image."""
    return nodes * read * size / bandwidth.shared


def staged(nodes: int, size: int, bandwidth: Bandwidth, width: int = SBCAST_WIDTH) -> float:
    """Seconds in which a tree brings the image to that many nodes."""
    reader = min(bandwidth.shared, bandwidth.node)
    return size / reader + sent(nodes, width) * size / bandwidth.node


def waves(nodes: int, size: int, bandwidth: Bandwidth) -> float:
    """Seconds in which that many nodes copy it from the shared file system."""
    return nodes * size / bandwidth.shared


def sent(nodes: int, width: int) -> int:
    """Copies that leave a node one behind another until that many nodes have one: the first has it, and one
    that has it sends it to so many in a wave."""
    total, have = 0, 1
    while have < nodes:
        total += min(width, nodes - have)
        have *= width + 1
    return total


def pays(nodes: int, size: int, bandwidth: Bandwidth, width: int = SBCAST_WIDTH, read: float = READ) -> bool:
    """Whether `auto` stages."""
    return staged(nodes, size, bandwidth, width) + GAIN <= unstaged(nodes, size, bandwidth, read)


def break_even(size: int, bandwidth: Bandwidth, width: int = SBCAST_WIDTH, read: float = READ) -> int:
    """The number of nodes from which on `auto` stages; MOST + 1 if for none up to MOST. A further wave may
    make it not pay for some numbers beyond the first for which it does."""
    return 1 + max(nodes for nodes in range(1, MOST + 1) if not pays(nodes, size, bandwidth, width, read))


# --- who copies from whom -----------------------------------------------------------------------------------


def tree(hosts: Sequence[str]) -> Iterator[Copy]:
    """The first node copies from the shared file system; then who has the image sends it to WIDTH others."""
    yield Copy(wave=0, source="", target=hosts[0])
    have, wave = 1, 1
    while have < len(hosts):
        senders = min(have, SENDERS)
        targets = hosts[have : have + senders * WIDTH]
        for at, target in enumerate(targets):
            yield Copy(wave=wave, source=hosts[at % senders], target=target)
        have += len(targets)
        wave += 1


def from_shared(hosts: Sequence[str]) -> Iterator[Copy]:
    """All copy from the shared file system, so many at once."""
    for at, target in enumerate(hosts):
        yield Copy(wave=at // READERS, source="", target=target)


def at_once(hosts: Sequence[str]) -> Iterator[Copy]:
    """One program brings it to all, as sbcast does."""
    return (Copy(wave=0, source="", target=host) for host in hosts)


def copies(scheduler: str, hosts: Sequence[str]) -> Iterator[Copy]:
    """Slurm has a tree of its own."""
    return at_once(hosts) if scheduler == "slurm" else tree(hosts)


# --- whether ------------------------------------------------------------------------------------------------


def decide(
    asked: str,
    *,
    by_name: bool,
    place: str,
    key: str,
    hosts: Sequence[str],
    least: int,
    image: Image | None,
    bandwidth: Bandwidth,
    checkpoint: int = 0,
    width: int = SBCAST_WIDTH,
    read: float = READ,
) -> Staging | None:
    """What is staged, if anything is.

    `asked`: `auto`, `off` or a directory; `by_name`: the user did, and not the site; `place`: the directory
    of `auto`; `key` names the job; `least`: so many nodes are enough; `checkpoint`: bytes of one of this run;
    `read`: the share of the image that a start reads.

    Raises BadInput if the user asked for a directory, and the image is no file that can be copied.
    """
    if asked == OFF or (asked == AUTO and len(hosts) < 2):
        return None
    if image is None:
        if asked == AUTO or not by_name:
            return None
        raise BadInput(
            "stage-no-file",
            f"--stage {asked}: the image is not one SIF file that this node can read: give such a file in "
            "APPTRAIN_IMAGE, or leave --stage out",
        )
    if asked == AUTO and not pays(len(hosts), image.bytes, bandwidth, width, read):
        return None
    return Staging(
        folder=f"{(place if asked == AUTO else asked).rstrip('/')}/{key}",
        image=image,
        needs=image.bytes + max(ROOM, 2 * checkpoint),
        by_name=by_name and asked != AUTO,
        named=asked != AUTO,
        least=least,
    )


def of_file(path: str) -> Image | None:
    """The image of that path; None if it is no SIF file, or not seen here."""
    try:
        with Path(path).open("rb") as file:
            id = image_header.sif_id(file.read(image_header.WHOLE))
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    return Image(path=path, bytes=size, id=id) if id else None
