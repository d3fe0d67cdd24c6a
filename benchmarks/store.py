"""Measures torch's own start of a job: its store with real clients. `store` is the entry.

Under the static rendezvous node 0's agent serves the store, each other agent is a client, and all exchange
what they are (torch.distributed.elastic.utils.store.synchronize). Here the server has a process of its own
and each client a connection of its own; a few processes hold the clients in threads.

The CPU seconds of the server count. torch looks up the name of each address that it connects to: where nobody
answers, as on a machine without DNS, that is most of the time that passes.

    python -m benchmarks.store CLIENTS     one exchange, as JSON
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

SIZES = (16, 64, 256, 1024)
HOLDERS = 4
BOUND = 600
"""Seconds for an exchange."""
QUIET = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def store(pairs: int) -> dict[str, Any]:
    """Seconds until all clients know of all, and the CPU seconds of the server, by the number of clients."""
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in SIZES}
    for number in range(pairs):
        for size in SIZES if number % 2 == 0 else SIZES[::-1]:
            command = [sys.executable, "-m", "benchmarks.store", str(size)]
            done = subprocess.run(
                command, env=QUIET, capture_output=True, text=True, timeout=2 * BOUND, check=True
            )
            runs[size].append(json.loads(done.stdout))
            one = runs[size][-1]
            print(
                f"  round {number + 1} of {pairs}: {size} clients: {one['seconds']:.2f} s, server "
                f"{one['server_cpu_s']:.2f} CPU s",
                flush=True,
            )
    return {
        "server_cpu_s": {
            size: statistics.median(one["server_cpu_s"] for one in found) for size, found in runs.items()
        },
        "seconds": {size: statistics.median(one["seconds"] for one in found) for size, found in runs.items()},
        "runs": [one for found in runs.values() for one in found],
    }


def one(clients: int) -> dict[str, Any]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=BOUND), wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    holders = []
    for part in range(HOLDERS):
        here, there = spawn.Pipe()
        ranks = list(range(part, clients, HOLDERS))
        holder = spawn.Process(target=_hold, args=(there, server.port, clients, ranks), daemon=True)
        holder.start()
        ends.append(here)
        holders.append(holder)
    for end in ends:
        end.recv()
    cpu, begun = _cpu(), time.monotonic()
    for end in ends:
        end.send("go")
    wrong = sum(end.recv() for end in ends)
    found = {"clients": clients, "seconds": time.monotonic() - begun, "server_cpu_s": _cpu() - cpu}
    for end in ends:
        end.send("end")
    for holder in holders:
        holder.join(10)
        if holder.is_alive():
            holder.kill()
    del server
    if wrong:
        sys.exit(f"store: {wrong} of {clients} clients did not learn of all")
    return found


def _cpu() -> float:
    """CPU seconds of all threads of this process."""
    times = os.times()
    return times.user + times.system


def _hold(end: Connection, port: int, clients: int, ranks: list[int]) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.utils.store import synchronize

    complete: list[int] = []

    def take_part(rank: int) -> None:
        client = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=BOUND))
        told = synchronize(client, f"node {rank}".encode(), rank, clients, "apptrain/")
        if [*told] == [f"node {other}".encode() for other in range(clients)]:
            complete.append(rank)

    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in ranks]
    end.send("ready")
    end.recv()
    for thread in threads:
        thread.start()
    until = time.monotonic() + BOUND
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    end.send(len(ranks) - len(complete))
    end.poll(BOUND)


if __name__ == "__main__":
    print(json.dumps(one(int(sys.argv[1]))))
