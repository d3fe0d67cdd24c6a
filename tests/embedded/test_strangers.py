"""Strangers that connect to every port of ours and say nothing: a job begins all the same, and says little of them.

The real command on two hosts for the ports of a job; the join alone for 600 participants.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.embedded.hosts import MANAGEMENT, address, hosts, listening
from tests.embedded.jobs import Job, clean_env
from tests.ports import free_port

FEW_FILES = ("sh", "-c", 'ulimit -Sn 1024; exec "$0" "$@"')
"""Before a command line: no more files may be open, unless it raises that itself."""
JOIN = 29501
"""The join's port of a job by hand."""
HOLD = """\
import select, socket, sys, time
count, address, *ports = sys.argv[1:]
held = []
for _ in range(int(count)):
    for port in ports:
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex((address, int(port)))
deadline = time.monotonic() + 20
for one in held:
    poll = select.poll()
    poll.register(one, select.POLLOUT)
    poll.poll(1000 * max(0, deadline - time.monotonic()))
print("held", flush=True)
sys.stdin.read()
"""
PARTICIPANTS = """\
import asyncio, sys
from entrypoint.meet.identity import Identity
from entrypoint.meet.terms import LocalNode, Timeouts
from entrypoint.meet.join import meet
from entrypoint.meet.messages import Done
first, last, count, port = map(int, sys.argv[1:])

def who(node):
    return Identity(
        job_id="7", attempt=0, node_rank=node, local_rank=None, name=f"n{node}", nnodes=count, nproc_per_node=1,
        mode="torchrun", device="cpu", image_id="", lock_digest="", versions={},
    )

class Node(LocalNode):
    def say(self, text):
        print(text, file=sys.stderr, flush=True)

    async def address(self, hub):
        return "127.0.0.1"

async def main():
    given = {"nodes": [f"n{node}" for node in range(count)], "port": port, "key": b"k" * 32}
    bounds = Timeouts(join=100, peer=60, connect=100, remind=1000)
    links = await asyncio.gather(
        *(meet(who(node), local=Node(), timeouts=bounds, **given) for node in range(first, last))
    )
    print(len(links), "met", len(links[0].members), flush=True)
    for link in links:
        link.report(Done())
    await asyncio.gather(*(link.close() for link in links))

asyncio.run(main())
"""


@contextmanager
def strangers(count: int, where: str, *ports: int, before: Sequence[str] = ()) -> Iterator[None]:
    """So many connections to each port, from processes of at most 900; `before` stands before their command lines."""
    with ExitStack() as held:
        started = []
        for begin in range(0, count * len(ports), 900):
            share = min(900, count * len(ports) - begin) // len(ports)
            argv = [*before, sys.executable, "-c", HOLD, str(share), where, *map(str, ports)]
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            held.callback(process.communicate)
            started.append(process)
        for process in started:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
        yield


def but_for_strangers(text: str) -> list[str]:
    """What a job says beside what it always says, and while it waits for a slow machine."""
    usual = (
        *("apptrain: job ", "apptrain: network: ", "apptrain: the ranks started after "),
        "apptrain: preflight: 2 nodes, nothing found, ",
    )
    lines = text.splitlines()
    return [line for line in lines if not line.startswith(usual) and "have not come" not in line]


@pytest.mark.ci_may_skip("a CI without root cannot make namespaces")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces of its own")
def test_a_job_begins_while_they_hold_a_thousand_connections_to_every_port_of_its_nodes(
    tmp_path: Path,
) -> None:
    (tmp_path / "key").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "key").chmod(0o600)
    with hosts(2, tmp_path) as both:

        def node(number: int) -> Job:
            argv = [*FEW_FILES, sys.executable, "-P", "-m", "entrypoint", "launch", "--nodes", "n0,n1"]
            argv += ["--node-rank", str(number), "--device", "cpu", "--mode", "exec", "--no-python"]
            argv += ["--join-key-file", str(tmp_path / "key"), "--run-dir", str(tmp_path / "run")]
            here = tmp_path / str(number)
            here.mkdir()
            return Job(both[number].argv([*argv, "--", "true"]), here, tmp_path / "run", clean_env())

        first = node(0)
        pid = first.process.pid  # which has yet to enter its namespace
        first.until(lambda: JOIN in (found := listening(pid)) and len(found) == 2, "node 0 to listen")
        ports = listening(pid)
        with strangers(1100, address(0, MANAGEMENT), *ports, before=both[1].argv([])):
            ended = [job.end() for job in (node(1), first)]
    assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
    assert [but_for_strangers(one.err) for one in ended] == [
        [],
        [
            "apptrain: refused a stranger from 10.77.42.2 on 10.77.42.1:29501: too many connections that prove "
            "nothing"
        ],
    ]


@pytest.mark.parametrize(
    ("participants", "limit", "few"),
    [
        (600, "ulimit -Sn 1024", []),
        (
            300,
            "ulimit -n 1024",
            [
                "node 0 may have 1024 open files (ulimit -Hn): it listens to SOME at once that have not proved who they "
                "are, instead of 556"
            ],
        ),
    ],
    ids=["soft limit", "hard limit"],
)
def test_hundreds_of_participants_meet_while_they_hold_thousands_of_connections(
    tmp_path: Path, participants: int, limit: str, few: list[str]
) -> None:
    """Node 0, which may have 1024 open files, in a process of its own; the others in another one."""
    port = free_port()

    def meeting(first: int, last: int, *before: str) -> Job:
        numbers = map(str, (first, last, participants, port))
        here = tmp_path / str(first)
        here.mkdir()
        return Job([*before, sys.executable, "-c", PARTICIPANTS, *numbers], here, tmp_path, clean_env())

    hub = meeting(0, 1, "sh", "-c", f'{limit}; exec "$0" "$@"')
    hub.until(lambda: port in listening(hub.process.pid), "node 0 to listen")
    with strangers(3000, "127.0.0.1", port):
        others = meeting(1, participants)
        ended = [job.end() for job in (others, hub)]
    assert [(one.status, one.out) for one in ended] == [
        (0, f"{participants - 1} met {participants}\n"),
        (0, f"1 met {participants}\n"),
    ], [one.err for one in ended]
    assert [re.sub(r"to \d+ at", "to SOME at", one.err).splitlines() for one in ended] == [
        [],
        [
            *few,
            f"refused a stranger from 127.0.0.1 on 127.0.0.1:{port}: too many connections that prove nothing",
        ],
    ]
