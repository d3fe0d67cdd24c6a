"""Finds out where this node's ranks are: their Python stacks, their state, NCCL's flight recorder. Begin at
`StackCollector`.

The scripts need not be changed. Python's faulthandler prints the stacks of all threads, in C and without the
interpreter's lock. A signal of ours makes it print and the process goes on (inside.py). If only an
environment variable has switched faulthandler on, SIGABRT makes it print, and the process ends. A debugger
would need a right that many sites deny. NCCL's flight recorder dumps if something is written into a pipe that
torch made.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint.core.plain import plain
from entrypoint.core.threads import run_in_thread
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet.reports import RankSnapshot
from entrypoint.node import processes
from entrypoint.ranks import frames
from entrypoint.ranks import hooks as inside
from entrypoint.ranks.frames import Frame
from entrypoint.ranks.heartbeat import Heartbeats
from entrypoint.ranks.ranks import Ranks

RECORDER = 8.0
"""Seconds for torch to dump its flight recorder: it looks at its pipe once a second, and the first dump
imports torch._inductor (1.4 to 3 s on a local disk)."""
PIPE = "recorder.rank"
"""Of the pipes that torch makes for it, before the rank's number."""
KEEP = 4.0
"""Seconds for the file system to take what was found."""
DUMP = 5.0
"""Seconds for a rank to print its stacks. The first look takes up to KEEP + RECORDER and the closer one up to
DUMP + SETTLED: together less than the hub's bound for all (meet.terms.JobBounds.look)."""
SETTLED = 2.0
"""Seconds for what a rank has printed to come through."""
_RECORDER_NAMES = {
    "BUFFER_SIZE": ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    "DUMP_TEMP_FILE": ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
}
"""torch's names for the flight recorder's settings, the older ones second."""


def variables(
    device: str, scratch: Path, run: RunDirectory, env: Mapping[str, str], torch: str
) -> dict[str, str]:
    """What a rank's environment needs for its stacks to be seen, beyond what the user has set. `torch`: its
    version; empty where it is not known."""
    wanted = {"PYTHONFAULTHANDLER": "1"}
    if device == "cuda":
        wanted["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{scratch}/{PIPE}"
        recorder = {"BUFFER_SIZE": "2000", "DUMP_TEMP_FILE": f"{run.stacks}/nccl.rank"}
        for name, value in recorder.items():
            if not any(one in env for one in _RECORDER_NAMES[name]):
                wanted |= dict.fromkeys(_RECORDER_NAMES[name][: 2 if _is_old(torch) else 1], value)
    return {name: value for name, value in wanted.items() if name not in env}


def _is_old(torch: str) -> bool:
    """Whether it may know the older names alone; a newer one warns of them."""
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < (2, 9)


class LastLook:
    """Where the ranks of this node are when the job hangs, and is to end with that."""

    def __init__(self, ranks: Ranks, run: RunDirectory, scratch: Path, signs: Path, beats: Heartbeats):
        self._ranks = ranks
        self._run = run
        self._scratch = scratch
        self._signs = signs
        self._beats = beats
        self._states: dict[int, str] = {}
        self._texts: dict[int, str] = {}

    async def first(self) -> list[RankSnapshot]:
        """Of ranks that show it and go on. None is ended before all nodes have looked: whoever loses a rank
        is no longer where it waited. NCCL's flight recorder dumps meanwhile, if the rank is not stopped."""
        alive = _alive(self._ranks)
        self._states = {rank: processes.state(pid) for rank, pid in alive.items()}
        self._texts = dict.fromkeys(alive, "")
        able = {rank: pid for rank, pid in alive.items() if self._states[rank] not in processes.STOPPED}
        shown, _ = await asyncio.gather(_shown_by(able, self._signs), self._dump_recorders(able))
        self._texts |= shown
        return self._sightings()

    async def closer(self) -> list[RankSnapshot]:
        """The same with those that have shown nothing, as all nodes have looked by now: faulthandler shows
        them, which ends them. The agent is stopped only now: torch's store is in it, and a rank asks that
        before it looks at the recorder's pipe."""
        self._ranks.freeze_agent()
        silent = {rank: pid for rank, pid in _alive(self._ranks).items() if not self._texts.get(rank)}
        dumps = await asyncio.gather(*(_dump(self._ranks, rank, pid) for rank, pid in silent.items()))
        self._texts |= dict(zip(silent, dumps, strict=True))
        return self._sightings()

    async def keep(self, say: Callable[[str], None]) -> None:
        """Writes the stacks into the run directory, whose file system may be what hangs."""
        if not self._texts:
            return
        node = self._ranks.plan.node
        files = {self._run.stack(node, rank): text for rank, text in self._texts.items() if text}
        if trouble := await _kept(_make, self._run) or await _kept(_write, files):
            say(f"{node}: the stacks cannot be kept in {self._run.stacks}: {trouble}")

    def _sightings(self) -> list[RankSnapshot]:
        return [
            _seen(self._ranks, self._beats, rank, state=self._states.get(rank, ""), dump=text)
            for rank, text in sorted(self._texts.items())
        ]

    async def _dump_recorders(self, ranks: Iterable[int]) -> None:
        pipes = {rank: self._scratch / f"{PIPE}{rank}.pipe" for rank in ranks}
        pipes = {rank: pipe for rank, pipe in pipes.items() if pipe.exists()}
        if not pipes or await _kept(_make, self._run):
            return
        asked = []
        for rank, path in pipes.items():
            with contextlib.suppress(OSError):
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(pipe, b"dump\n")
                finally:
                    os.close(pipe)
                asked.append(self._run.stacks / f"nccl.rank{rank}")
        if asked:
            await _kept(_await_files, asked, time.monotonic() + RECORDER, seconds=RECORDER)


class StackCollector:
    """Finds out where the ranks of this node are."""

    def __init__(self, ranks: Ranks, run: RunDirectory, scratch: Path, signs: Path):
        """`signs`: where the ranks leave their signs of life and their stacks."""
        self._ranks = ranks
        self._run = run
        self._scratch = scratch
        self._signs = signs
        self.heartbeats = Heartbeats(signs)

    def last_look(self) -> LastLook:
        """For the end of the job."""
        return LastLook(self._ranks, self._run, self._scratch, self._signs, self.heartbeats)

    async def peek(self) -> list[RankSnapshot]:
        """Where they are; all go on."""
        alive = _alive(self._ranks)
        texts = await _shown_by(alive, self._signs)
        files = {self._run.stack(self._ranks.plan.node, rank): text for rank, text in texts.items()}
        # The file system may be what the ranks wait for.
        threading.Thread(target=_keep, args=(self._run, files), daemon=True).start()
        return [
            _seen(
                self._ranks,
                self.heartbeats,
                rank,
                state=processes.state(pid),
                dump=texts[rank],
                cpu=processes.cpu(pid),
            )
            for rank, pid in sorted(alive.items())
        ]

    async def workers(self) -> str:
        """What it looks like if a rank has started processes that wait for a process group; else empty."""
        for rank, pid in sorted(self._ranks.pids.items()):
            for child in processes.catching_below(pid, inside.STACK_SIGNAL):
                stack = frames.main_thread(await _ask(self._signs, child))
                if frames.waits_in(stack) == "init_process_group":
                    who, where = f"rank {rank} on {self._ranks.plan.node}", plain(frames.in_words(stack))
                    return f"{who} has started processes of its own, and they wait {where}"
        return ""


def _alive(ranks: Ranks) -> dict[int, int]:
    """Process ids by rank."""
    return {rank: pid for rank, pid in ranks.pids.items() if processes.is_running(pid)}


def _seen(
    ranks: Ranks, beats: Heartbeats, rank: int, *, state: str, dump: str, cpu: float = 0.0
) -> RankSnapshot:
    plan = ranks.plan
    return sighting(beats, rank=rank, node_rank=plan.place, node=plan.node, state=state, dump=dump, cpu=cpu)


async def _shown_by(pids: Mapping[int, int], signs: Path) -> dict[int, str]:
    """The stacks that processes show and go on, by rank."""
    texts = await asyncio.gather(*(_ask(signs, pid) for pid in pids.values()))
    return dict(zip(pids, texts, strict=True))


async def _ask(signs: Path, pid: int) -> str:
    """The stacks of a process, or of the first below it that shows any; empty where none does."""
    for target in [pid, *processes.catching_below(pid, inside.STACK_SIGNAL)]:
        file = signs / f"{inside.STACKS}.{target}"
        if file.exists() and processes.catches(target, inside.STACK_SIGNAL):
            return await _shown(file, target)
    return ""


async def _shown(file: Path, pid: int) -> str:
    before = file.stat().st_size
    with contextlib.suppress(OSError):
        os.kill(pid, inside.STACK_SIGNAL)
    deadline, size = time.monotonic() + DUMP, before
    while time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        last, size = size, file.stat().st_size
        if size == last > before:
            break
    return file.read_bytes()[before:].decode(errors="replace")


def _make(run: RunDirectory) -> None:
    run.stacks.mkdir(mode=0o700, exist_ok=True, parents=True)


def _keep(run: RunDirectory, files: Mapping[Path, str]) -> None:
    with contextlib.suppress(OSError):
        _make(run)
        _write(files)


def _await_files(paths: Sequence[Path], deadline: float) -> None:
    """Until all are written: they have bytes, and grow no longer."""
    sizes: list[int] = []
    while time.monotonic() < deadline:
        last, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in paths]
        if all(sizes) and sizes == last:
            return
        time.sleep(0.1)


async def _kept(work: Callable[..., None], *args: Any, seconds: float = KEEP) -> str:
    """Does it in the run directory; returns why it failed, empty where it did not."""
    try:
        await run_in_thread(work, *args, seconds=seconds)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _write(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)


async def _dump(ranks: Ranks, rank: int, pid: int) -> str:
    """What faulthandler prints; empty where the rank has none."""
    targets = (
        [pid] if processes.catches(pid, signal.SIGABRT) else processes.catching_below(pid, signal.SIGABRT)
    )
    if not targets:
        return ""
    ranks.divert_errors(rank)
    deadline = time.monotonic() + DUMP
    for target in targets:
        with contextlib.suppress(OSError):
            resource.prlimit(target, resource.RLIMIT_CORE, (0, 0))  # A rank's memory would fill the disk.
            os.kill(target, signal.SIGABRT)
            os.kill(target, signal.SIGCONT)
        await _ended(target, deadline)
    return await _settled(ranks, rank)


async def _ended(pid: int, deadline: float) -> None:
    while processes.is_running(pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


async def _settled(ranks: Ranks, rank: int) -> str:
    """What the rank has printed once that no longer grows."""
    text = None
    deadline = time.monotonic() + SETTLED
    while time.monotonic() < deadline:
        last, text = text, ranks.diverted(rank)
        if text and text == last:
            break
        await asyncio.sleep(0.1)
    return text or ""


def sighting(
    beats: Heartbeats, *, rank: int, node_rank: int, node: str, state: str, dump: str, cpu: float = 0.0
) -> RankSnapshot:
    """What a rank's state and its dump say, which is empty where there is none."""
    stack = frames.main_thread(dump)
    line = frames.own(stack)
    quiet = beats.quiet(rank)
    return RankSnapshot(
        rank=rank,
        node_rank=node_rank,
        node=node,
        step=beats.step(rank),
        quiet=-1.0 if quiet is None else quiet,
        state=state,
        at=plain(frames.shown(line)) if line else "",
        waits_in=plain(frames.waits_in(stack)),
        stack=_digest(stack),
        cpu=cpu,
    )


def _digest(stack: Sequence[Frame]) -> str:
    functions = "\n".join(f"{file} {function}" for file, _, function in stack)
    return hashlib.sha256(functions.encode()).hexdigest()[:16] if stack else ""
