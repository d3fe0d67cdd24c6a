"""Measures what a meeting of many nodes costs the first of them. `meeting` is the entry.

The hub is the product's own (entrypoint/meet), in a process of its own. The others are scripted: a few
processes hold them, each on a loopback address of its own. They prove who they are as real ones do, and
answer a trial of the ways at once instead of trying them. So the hub does all of its work, and this machine
need not be thousands of nodes. Their CPU time is not counted.

    python -m benchmarks.meeting PARTICIPANTS [OPEN_FILES]     one meeting, as JSON
"""

import asyncio
import contextlib
import ipaddress
import json
import multiprocessing
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from entrypoint.meet import messages
from entrypoint.meet.identity import Identity
from entrypoint.meet.join import meet
from entrypoint.meet.link import Link
from entrypoint.meet.messages import Beat, Go, Hello, Tried, Try, Welcome
from entrypoint.meet.terms import LocalNode, Timeouts
from entrypoint.meet.wire import encode, greet

SIZES = (64, 256, 1024, 4096, 16384)
FEW_FILES = (1024, 4096, 1024)
"""Participants, limit of open files: of those that are measured with fewer files than they need."""
HOLDERS = 4
"""Processes that hold the scripted participants."""
AT_ONCE = 64
"""Connections that each of them opens at a time."""
KEY = b"k" * 32
BOUND = 900.0
"""Seconds for a meeting: two cores that play all nodes need longer than a job allows each of its nodes."""
PATIENT = Timeouts(join=BOUND, connect=BOUND, handshake=BOUND, reach=BOUND, peer=6 * BOUND, beat=BOUND)
"""Without heartbeats: how many there are depends on how long this machine needs to play all others. What one
to all costs is measured beside."""
FIRST = int(ipaddress.ip_address("127.1.0.0"))


class FirstNode(LocalNode):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    async def address(self, hub: int) -> str:  # noqa: ARG002
        return "127.0.0.1"


def meeting(pairs: int) -> dict[str, Any]:
    """The hub's CPU seconds, memory, messages and open files, by the number of participants."""
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in SIZES}
    for number in range(pairs):
        for size in SIZES if number % 2 == 0 else SIZES[::-1]:
            runs[size].append(_apart(size))
            print(f"  round {number + 1} of {pairs}: {_line(runs[size][-1])}", flush=True)
    few = [_apart(size, files) for size in FEW_FILES[:2] for files in FEW_FILES[2:]]
    for one in few:
        print(f"  {_line(one)}", flush=True)
    median = {
        size: statistics.median(float(one["hub_cpu_s"]) for one in found) for size, found in runs.items()
    }
    for size, seconds in median.items():
        print(f"{size:6} participants: {seconds:.2f} CPU s at the hub, {1e6 * seconds / size:.0f} us each")
    return {
        "hub_cpu_s": median,
        "runs": [one for found in runs.values() for one in found],
        "few_open_files": few,
    }


def _line(one: dict[str, Any]) -> str:
    limit = f", {one['open_files_limit']} open files allowed" if one["open_files_limit"] else ""
    if one["refused"]:
        return f"{one['participants']} participants{limit}: {one['refused']}"
    return (
        f"{one['participants']} participants{limit}: hub {one['hub_cpu_s']:.2f} CPU s, "
        f"{one['seconds']:.2f} s, {one['hub_memory_mb']:.0f} MB, {one['hub_open_files']} files"
    )


def _apart(participants: int, files: int = 0) -> dict[str, Any]:
    """One meeting whose hub has a process of its own."""
    command = [sys.executable, "-m", "benchmarks.meeting", str(participants), str(files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * BOUND, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- one meeting ------------------------------------------------------------------------------------------


def one(participants: int, files: int) -> dict[str, Any]:
    """A meeting in this process, which has not more than so many open files (0: as it is)."""
    spawn = multiprocessing.get_context("spawn")
    names = [f"n{node}" for node in range(participants)]
    port = _free_port()
    shares = [list(range(1 + part, participants, HOLDERS)) for part in range(HOLDERS)]
    ends = []
    for share in shares:
        here, there = spawn.Pipe()
        holder = spawn.Process(target=_hold, args=(there, port, participants, share), daemon=True)
        holder.start()
        ends.append((holder, here))
    for _, end in ends:
        end.recv()
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    found = asyncio.run(_measure(participants, names, port, [end for _, end in ends]))
    for holder, _ in ends:
        holder.join(10 if not found["refused"] else 0)
        if holder.is_alive():
            holder.kill()
    return {"participants": participants, "open_files_limit": files or None, **found}


async def _measure(
    participants: int, names: Sequence[str], port: int, ends: list[Connection]
) -> dict[str, Any]:
    local = FirstNode()
    loop = asyncio.get_running_loop()
    before, cpu, begun = _memory(), time.process_time(), time.monotonic()
    task = loop.create_task(
        meet(
            _identity(0, participants),
            local=local,
            nodes=names,
            port=port,
            key=KEY,
            timeouts=PATIENT,
            everywhere=True,
        )
    )
    refused, link = "", None
    await asyncio.sleep(0)
    for end in ends:
        end.send("go")
    try:
        link = await task
    except Exception as error:
        refused = str(error)
    told = [await loop.run_in_executor(None, _receive, end) for end in ends] if link else []
    cpu = time.process_time() - cpu
    found = {
        "refused": refused,
        "said": local.said,
        "hub_cpu_s": cpu,
        "beat_round_cpu_s": _beat_all(link) if link else None,
        "seconds": time.monotonic() - begun,
        "hub_memory_mb": (_memory() - before) / 1e6,
        "hub_open_files": len(list(Path("/proc/self/fd").iterdir())),
        "messages": {name: sum(one[name] for one in told) for name in ("to_hub", "from_hub")},
        "bytes": {name: sum(one[f"bytes_{name}"] for one in told) for name in ("to_hub", "from_hub")},
        "lost": sum(one["lost"] for one in told),
    }
    for end in ends:
        with contextlib.suppress(BrokenPipeError):
            end.send("end")
    if link:
        await asyncio.wait([asyncio.ensure_future(link.close())], timeout=30)
    return found


def _beat_all(link: Link) -> float:
    """CPU seconds of a heartbeat to everyone."""
    begin = time.process_time()
    beat = encode(messages.pack(Beat(time.time())))
    for wire in link._peers.values():
        wire.send(beat)
    return time.process_time() - begin


def _receive(end: Connection) -> dict[str, int]:
    if not end.poll(BOUND + 30):
        raise TimeoutError("the scripted participants did not end")
    found: dict[str, int] = end.recv()
    return found


def _identity(node: int, participants: int) -> Identity:
    return Identity(
        job_id="7",
        attempt=0,
        node_rank=node,
        local_rank=None,
        name=f"n{node}",
        nnodes=participants,
        nproc_per_node=4,
        mode="torchrun",
        device="cuda",
        image_id="7be444fb-0f6a-4f6c-9f6a-7be444fb0f6a",
        lock_digest="5e" * 32,
        versions={"apptrain": "0.3.0", "python": "3.13.5", "torch": "2.15.0"},
    )


def _memory() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


# --- the scripted participants ------------------------------------------------------------------------------


def _hold(end: Connection, port: int, participants: int, share: list[int]) -> None:
    end.send("ready")
    end.recv()
    counts = asyncio.run(_play(port, participants, share))
    end.send(counts)
    end.poll(BOUND)  # connections stay open until then, as those of a job do


async def _play(port: int, participants: int, share: list[int]) -> dict[str, int]:
    counts = {"to_hub": 0, "from_hub": 0, "bytes_to_hub": 0, "bytes_from_hub": 0, "lost": 0}
    gate = asyncio.Semaphore(AT_ONCE)
    over = asyncio.Event()
    going: list[int] = []

    async def take_part(node: int) -> None:
        try:
            await _take_part(node, port, participants, gate, counts)
        except Exception:
            counts["lost"] += 1
        going.append(node)
        if len(going) == len(share):
            over.set()

    tasks = [asyncio.ensure_future(take_part(node)) for node in share]
    await asyncio.wait([asyncio.ensure_future(over.wait())], timeout=BOUND)
    for task in tasks:
        task.cancel()
    return counts


OPEN: list[asyncio.StreamWriter] = []


async def _take_part(
    node: int, port: int, participants: int, gate: asyncio.Semaphore, counts: dict[str, int]
) -> None:
    address = str(ipaddress.ip_address(FIRST + node))
    async with gate:
        reader, writer = await _connect(address, port)
        wire = await greet(reader, writer, KEY, hub=False)
        contact = f"hsn0 {address} 40000 {'5e' * 16}"
        wire.send(messages.pack(Hello(replace(_identity(node, participants), contact=contact), BOUND)))
        extent = messages.Extent(nodes=participants, ranks=4 * participants)
        if messages.load(await wire.receive(), extent) != Welcome():
            raise ValueError("not welcome")
    OPEN.append(writer)
    counts["to_hub"] += 1
    counts["from_hub"] += 1
    while True:
        message = messages.load(await wire.receive(), extent)
        counts["from_hub"] += 1
        if isinstance(message, Try):
            wire.send(messages.pack(Tried(message.number, ())))
            counts["to_hub"] += 1
        elif isinstance(message, Go):
            sent, received = _bytes_of(writer)
            counts["bytes_to_hub"] += sent
            counts["bytes_from_hub"] += received
            return
        elif not isinstance(message, Beat):
            raise ValueError(f"unexpected: {message}")


def _bytes_of(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Sent and received, as Linux counts them (struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received)."""
    information = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    sent, received = struct.unpack_from("QQ", information, 120)
    return sent, received


async def _connect(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        except ConnectionRefusedError:
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    print(json.dumps(one(numbers[0], numbers[1] if len(numbers) > 1 else 0)))
