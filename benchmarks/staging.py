"""Starts of jobs from a throttled shared file system, with and without a copy of the image on each node,
beside the model of entrypoint/batch/staging.py. `staging` is the entry.

What a start takes beside the image is measured first: the same starts while the image is in every node's
memory.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from entrypoint.batch import staging as model
from tests.cluster.account import SCRIPT, USER, WORK, Account, open_account
from tests.cluster.images import PAYLOAD, padded
from tests.host import Bind
from tests.vcluster.layout import MANAGEMENT, MEMBERS
from tests.vcluster.shares import token_bucket
from tests.vcluster.throttled import FOLDER, SharedFolder, throttled

PADDING: Final = (0, 60, 240)
"""MB of the three images that nobody reads."""
NODES: Final = (2, 4)
SHARED_MBIT: Final = 84
"""A second, of the shared file system for all nodes together."""
NODE_MBIT: Final = 840
"""A second, that a node sends to others."""
FREE_MBIT: Final = 8000
"""No bound, for the parts that are not the image."""
SOURCE: Final = Path("/srv/images")
DISK: Final = "/tmp"
"""Of each node its own."""
SAMPLE: Final = 20_000_000
"""Bytes that each node reads to measure the shared file system."""
WITHIN: Final = 0.25
NAMES: Final = tuple(member.name for member in MEMBERS if member.role == "compute")
LOAD: Final = f"""
import os, time
with open("{PAYLOAD}", "rb") as file:
    while file.read(1 << 20):
        pass
print(os.environ["APPTRAIN_NODE"], time.time(), os.environ["APPTAINER_CONTAINER"], flush=True)
"""
"""What ranks do: a start ends when the last of them has read what it needs."""


@dataclass(frozen=True, kw_only=True)
class Start:
    seconds: float
    """From `sbatch` until the last rank has what it needs of the image."""
    sent: int
    """Bytes that the shared file system has sent meanwhile."""
    printed: list[str]
    """By each rank: its node, when, and its image."""
    said: list[str]
    """By the launcher."""


def staging(rounds: int) -> dict[str, Any]:
    """Three images, on NODES, staged and not, in turn. Needs root, for the cluster."""
    with starts() as (user, folder):
        with throttled(user.cluster, SOURCE, mbit=FREE_MBIT) as shared:
            size, read = _read(user, shared, folder)
            rest = _rest(user, shared, rounds)
        with ExitStack() as undo:
            for node in user.cluster.nodes.values():
                undo.enter_context(token_bucket(node, MANAGEMENT, NODE_MBIT))
            shared = undo.enter_context(throttled(user.cluster, SOURCE, mbit=SHARED_MBIT))
            bandwidth = model.Bandwidth(shared=_shared(user, shared), node=_node(user))
            print(f"a start reads {read / 1e6:.1f} MB; {bandwidth}; the rest takes {rest}", flush=True)
            measured = _measure(user, shared, rounds)
    sizes = {padding: (folder / f"{padding}.sif").stat().st_size for padding in PADDING}
    cells = [_cell(key, found, sizes[key[0]], read, bandwidth, rest) for key, found in measured.items()]
    for cell in cells:
        print(
            f"{cell['image_mb']:4.0f} MB, {cell['nodes']} nodes, {'' if cell['staged'] else 'not '}staged: "
            f"{cell['seconds']['median']:5.1f} s, model {cell['model_s']:5.1f} s: {cell['ratio']:.2f}"
        )
    return {
        "bytes_read_by_a_start": round(read),
        "bytes_read_measured_with_image_of": size,
        "shared_bytes_s": round(bandwidth.shared),
        "node_bytes_s": round(bandwidth.node),
        "rest_s": {f"{nodes} nodes, {kind}": seconds for (nodes, kind), seconds in rest.items()},
        "break_even": [_break_even(size, read, bandwidth) for size in sizes.values()],
        "starts": cells,
        "failed": [cell for cell in cells if abs(cell["ratio"] - 1) > WITHIN],
    }


@contextmanager
def starts(padding: Sequence[int] = PADDING) -> Iterator[tuple[Account, Path]]:
    """An account with a program that reads what a start needs, and the folder of the images, SOURCE there."""
    folder = padded(padding)
    shown = Bind(source=folder, target=SOURCE)
    with open_account(folder / f"{padding[0]}.sif", patched=True, binds=[shown]) as user:
        user.write(WORK / "load.py", LOAD)
        yield user, folder


def start(user: Account, shared: SharedFolder, padding: int, nodes: int, *options: str) -> Start:
    """A job on so many nodes, from that image of the shared file system.

    Raises RuntimeError if it does not end well.
    """
    asked = ("--partition=all", f"--nodes={nodes}", f"--nodelist={','.join(NAMES[:nodes])}")
    each = ("--cpus-per-task=1", "--gpus-per-node=0", "--mem=1G")
    image = {"APPTRAIN_IMAGE": str(FOLDER / f"{padding}.sif")}
    before, began = shared.sent(), time.time()
    words = ("--device", "cpu", "--mode", "exec", *options, "--", "load.py")
    ran = user.ran(*asked, *each, SCRIPT, *words, env=image)
    if ran.ended != ("COMPLETED", 0):
        raise RuntimeError(f"a start ended with {ran.ended}:\n{ran}")
    return Start(
        seconds=max(float(line.split()[1]) for line in ran.printed) - began,
        sent=shared.sent() - before,
        printed=ran.printed,
        said=ran.said("apptrain"),
    )


def stage_option(kind: str) -> tuple[str, str]:
    return ("--stage", DISK if kind == "staged" else "off")


def _read(user: Account, shared: SharedFolder, folder: Path) -> tuple[int, float]:
    """Bytes of the smallest image, and how many of them a start reads: what is sent for it, less the share of
    headers, which a read of the whole image shows."""
    size = (folder / f"{PADDING[0]}.sif").stat().st_size
    once = start(user, shared, PADDING[0], 1, "--stage", "off").sent
    shared.remount()
    before = shared.sent()
    _bytes(user, NAMES[0], f"cat {FOLDER}/{PADDING[0]}.sif >/dev/null")
    return size, size * once / (shared.sent() - before)


def _rest(user: Account, shared: SharedFolder, rounds: int) -> dict[tuple[int, str], float]:
    """Median seconds of a start with the image in memory, by nodes and kind."""
    for name in NAMES:
        _bytes(user, name, f"cat {FOLDER}/{PADDING[0]}.sif >/dev/null")
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for nodes in NODES:
            for kind in ("off", "staged"):
                one = start(user, shared, PADDING[0], nodes, *stage_option(kind))
                found.setdefault((nodes, kind), []).append(one.seconds)
    return {key: round(statistics.median(seconds), 2) for key, seconds in found.items()}


def _bytes(user: Account, name: str, line: str) -> None:
    user.cluster[name].run(["sh", "-c", line], user=USER, timeout=120).check_returncode()


def _shared(user: Account, shared: SharedFolder) -> float:
    """Bytes a second that all nodes read together."""
    line = f"head -c {SAMPLE} {FOLDER}/{PADDING[-1]}.sif >/dev/null"
    nodes = user.cluster.nodes.values()
    shared.remount()
    began = time.monotonic()
    running = [node.start(["sh", "-c", line], user=USER) for node in nodes]
    for process in running:
        if process.wait(120):
            raise RuntimeError(f"{line} ended with {process.returncode}")
    return len(running) * SAMPLE / (time.monotonic() - began)


def _node(user: Account) -> float:
    """Bytes a second that one node sends to another."""
    size = 10 * SAMPLE
    line = f"head -c {size} /dev/zero | ssh -o BatchMode=yes {NAMES[1]} 'cat >/dev/null'"
    began = time.monotonic()
    _bytes(user, NAMES[0], line)
    return size / (time.monotonic() - began)


Key = tuple[int, int, str]


def _measure(user: Account, shared: SharedFolder, rounds: int) -> Mapping[Key, list[Start]]:
    """By padding, nodes and kind."""
    found: dict[Key, list[Start]] = {}
    for number in range(rounds):
        for nodes in NODES:
            for padding in PADDING:
                for kind in ("off", "staged")[:: -1 if number % 2 else 1]:
                    shared.remount()
                    one = start(user, shared, padding, nodes, *stage_option(kind))
                    found.setdefault((padding, nodes, kind), []).append(one)
                    print(f"  {padding}, {nodes} nodes, {kind}: {one.seconds:.1f} s, {one.sent}", flush=True)
    return found


def _cell(
    key: Key,
    found: list[Start],
    size: int,
    read: float,
    bandwidth: model.Bandwidth,
    rest: Mapping[tuple[int, str], float],
) -> dict[str, Any]:
    _, nodes, kind = key
    if kind == "staged":
        image = model.staged(nodes, size, bandwidth)
    else:
        image = model.unstaged(nodes, size, bandwidth, read / size)
    seconds = [one.seconds for one in found]
    median, other = statistics.median(seconds), rest[nodes, kind]
    return {
        "image_mb": round(size / 1e6, 1),
        "nodes": nodes,
        "staged": kind == "staged",
        "seconds": {"median": round(median, 2), "min": round(min(seconds), 2), "max": round(max(seconds), 2)},
        "model_s": round(other + image, 2),
        "ratio": round(median / (other + image), 3),
        "model_image_s": round(image, 2),
        "image_s": round(median - other, 2),
        "bytes_sent": [one.sent for one in found],
    }


def _break_even(size: int, read: float, bandwidth: model.Bandwidth) -> dict[str, Any]:
    """From how many nodes on a copy is faster by the model, and `auto` makes it, for it must save GAIN."""
    share = read / size
    faster = (
        nodes
        for nodes in range(2, model.MOST)
        if model.staged(nodes, size, bandwidth) < model.unstaged(nodes, size, bandwidth, share)
    )
    return {
        "image_mb": round(size / 1e6, 1),
        "read_percent": round(100 * share, 1),
        "copies_are_faster_from": next(faster, None),
        "auto_stages_from": model.break_even(size, bandwidth, read=share),
    }
