"""Passes on what the ranks print: whole lines to the job's output, everything to a log for each rank. Begin
at `Relay`; `Console` is one of our own streams.

Ranks write into pipes, which one thread reads. So a slow terminal or file system holds up the ranks' output,
and never the node's heartbeats. For the same reason another thread writes the launcher's own lines. Text that
is overwritten with carriage returns (a progress bar) is shown on terminals only; logs keep what remains of
the line. The traceback of a rank that only lost another one waits until it is known whether the job has
failed. If it has, only the log has it: a thousand of them would bury the one that tells why.
"""

import os
import queue
import re
import select
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import ENDS_TRACEBACK, plain
from entrypoint.meet import blame
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.ranks import frames

CHUNK = 65536
MEMORY = 8 << 20
"""Bytes that are kept of what ranks print, of all streams together, in each of four places: lines without an
end, tails, what is not shown yet, and stacks."""
LONGEST_LINE = 1 << 20
"""Bytes after which a line without an end is passed on in pieces; fewer where MEMORY is shared by many."""
TAIL = 1 << 16
"""Bytes of a stderr in which the reason of a failure is looked for; fewer where MEMORY is shared by many.
When they are full, the last half is kept."""
LONGEST_DUMP = 1 << 20
"""Bytes of a stderr that is diverted, of which the last are kept; fewer where MEMORY is shared by many."""
LONGEST_TRACEBACK = 1000
"""Lines."""
MOST_SAID = 1000
"""Lines of our own that wait for a reader who has stopped."""
ECHO_WAIT = 5.0
"""Seconds for which the traceback of a lost connection waits for the job's failure."""
SAME_WAIT = 2.0
"""Seconds for which any other does: it may be the same on many ranks."""
TERMINAL_BEHIND_PIPE = "APPTRAIN_PROGRESS"
"""Set to 1 by a parent that shows our output on a terminal: progress bars are passed on to it."""
_UP = b"\x1b[A"
_MOVES = re.compile(rb"(\n|\x1b\[A)")
_PREFIX = re.compile(rb"^(?:\[rank\d+\]: )?(?: +\| )?")
"""Torch's, of a rank, and Python's, of an exception group."""
_WHAT = re.compile(rb"^ +what\(\): +")
"""Stands before what an exception of C++ says that ends the process; a stack may follow."""
_TRACEBACK = b"Traceback (most recent call last):"
_CRASH = b"Fatal Python error: "
_BAR = re.compile(rb".*(?:\d%\||\[[\d:]{5,}[<,]).*\]\s*$")
"""All of a progress bar of tqdm, and nothing behind it."""
_EXCEPTION = re.compile(rb"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning|Failure|Timeout)\b")


@dataclass(kw_only=True, eq=False)
class _Stream:
    """What one process writes to stdout or to stderr."""

    name: str
    source: int
    log: int
    console: "Console"
    show: bool
    diverted: bytearray | None = None
    """Where the rest goes instead of log and console; not more than its end is kept."""
    rest: bytes = b""
    """Of a line without an end."""
    cut: bytes = b""
    """Of a sequence that moves the cursor."""
    blank: int = 0
    """Empty lines that are not passed on yet: a bar further down may begin with them."""
    up: int = 0
    """Lines that the cursor has moved up since anything was written."""
    tail: bytearray | None
    """The last of what it wrote, for stderr alone."""
    held: "_Held | None" = None


class _Exceptions:
    """Finds Python's exceptions in a stderr, line by line: by their names, or because they end a
    traceback."""

    def __init__(self) -> None:
        self._in_traceback = False
        """Changes with each line."""

    def has(self, line: bytes) -> bool:
        """`line`: the next one, without its prefix."""
        is_one = _EXCEPTION.match(line) or (self._in_traceback and ENDS_TRACEBACK.match(line))
        self._in_traceback = _TRACEBACK in line or (self._in_traceback and not is_one)
        return bool(is_one)


@dataclass(kw_only=True, eq=False)
class _Held:
    """What a stream does not show yet: a traceback, and what follows it."""

    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    error: str = ""
    """The exception; empty while it is still to come."""
    exceptions: _Exceptions = field(default_factory=_Exceptions)
    longest: int
    """Bytes."""
    shown_at: float

    def takes(self, line: bytes) -> bool:
        """Whether it is to be held on with this line."""
        self.lines.append(line)
        self.size += len(line)
        if self.size > self.longest or len(self.lines) >= LONGEST_TRACEBACK:
            return False
        text = _PREFIX.sub(b"", line)
        if _TRACEBACK in line:
            self.error = ""
        if self.exceptions.has(text):
            self.error = plain(text.decode(errors="replace"))
            self.shown_at = time.monotonic() + (ECHO_WAIT if blame.is_echo(self.error) else SAME_WAIT)
        return True


class Console:
    """One of our own output streams: complete lines, and on a terminal one unfinished line at its end."""

    def __init__(self, fd: int, *, progress: bool):
        self.fd = fd
        self.progress = progress
        self._unfinished = False
        self._lock = threading.Lock()
        self._said: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._teller: threading.Thread | None = None

    def line(self, data: bytes) -> None:
        """Waits for the reader, as long as that takes."""
        with self._lock:
            self._write((b"\r\x1b[K" if self._unfinished else b"") + data)
            self._unfinished = False

    def unfinished(self, data: bytes) -> None:
        if self.progress:
            with self._lock:
                self._write(b"\r\x1b[K" + data)
                self._unfinished = bool(data)

    def say(self, text: str) -> None:
        """A line of our own, from the event loop or a signal handler: waits for nobody."""
        if self._teller is None:
            self._teller = threading.Thread(target=self._tell, daemon=True, name="console")
            self._teller.start()
        if self._said.qsize() < MOST_SAID:
            self._said.put(text.encode(errors="backslashreplace") + b"\n")

    def flush(self, seconds: float) -> None:
        """Waits until everything that was said before is written, for `seconds` at most."""
        if self._teller is not None:
            written = threading.Event()
            self._said.put(written)
            written.wait(seconds)

    def _tell(self) -> None:
        while True:
            said = self._said.get()
            if isinstance(said, threading.Event):
                said.set()
            else:
                self.line(said)

    def _write(self, data: bytes) -> None:
        # Where nobody reads any more (a closed pipe, a full disk) the ranks go on; their logs have it all.
        _write_all(self.fd, data)


@dataclass(frozen=True, kw_only=True)
class Voice:
    """Says lines of apptrain's own to the user."""

    console: Console
    is_heard: bool = True
    """Whether this node says what is the same for all: the first does."""
    said: set[str] = field(default_factory=set)
    """What was said once; grows."""

    def say(self, text: str) -> None:
        self.console.say(f"apptrain: {text}")

    def once(self, text: str) -> None:
        """Says what is the same for all nodes."""
        if self.is_heard and text not in self.said:
            self.said.add(text)
            self.say(text)

    def of(self, plan: LaunchPlan) -> "Voice":
        """The same once the nodes that take part are known."""
        return replace(self, is_heard=plan.is_first)


def wants_progress(fd: int, env: Mapping[str, str]) -> bool:
    return os.isatty(fd) or env.get(TERMINAL_BEHIND_PIPE) == "1"


def own_consoles(env: Mapping[str, str]) -> dict[str, Console]:
    """Our own streams `out` and `err`."""
    return {name: Console(fd, progress=wants_progress(fd, env)) for name, fd in (("out", 1), ("err", 2))}


class Relay(threading.Thread):
    """Reads pipes until their writers have closed them all, or until `finish` gives up.

    All pipes are added before the thread starts.
    """

    def __init__(self, consoles: Mapping[str, Console]):
        """`consoles`: where the streams `out` and `err` are shown."""
        super().__init__(name="relay", daemon=True)
        self._consoles = dict(consoles)
        self._selector = selectors.DefaultSelector()
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._deadline = self._last_deadline = float("inf")
        self._quiet = 0.0
        self._heard = time.monotonic()
        self._failed = False
        self._error = self._blamed = ""
        self.echoes = 0
        """Tracebacks that the logs alone have."""

    def add(self, name: str, stream: str, log: Path, *, show: bool) -> int:
        """Makes a pipe for `stream` (`out` or `err`) of `name`; returns the end to write into, which the
        caller closes once its children have it. Everything goes to `log` (appended), and with `show` to
        the console."""
        assert self.ident is None, "the thread goes through the streams"
        reader, writer = os.pipe()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        tail = bytearray() if stream == "err" else None
        console = self._consoles[stream]
        added = _Stream(name=name, source=reader, log=fd, console=console, show=show, tail=tail)
        self._streams[name, stream] = added
        self._selector.register(reader, selectors.EVENT_READ, added)
        return writer

    def run(self) -> None:
        while self._selector.get_map() and time.monotonic() < self._deadline:
            holding = any(stream.held is not None for stream in self._streams.values())
            ready = self._selector.select(timeout=0.02 if holding else 0.2)
            for key, _ in ready:
                self._read(key.data)
            now = time.monotonic()
            if ready and self._quiet:  # a log may have taken long to be written
                self._deadline = min(now + self._quiet, self._last_deadline)
            for stream in self._streams.values():
                if stream.held is not None and (now > stream.held.shown_at or self._is_to_blame(stream)):
                    self._show_held(stream)
        for key in list(self._selector.get_map().values()):
            self._close(key.data)

    def failed(self, error: str = "", blamed: str = "") -> None:
        """The job has failed, and who failed first is told: what followed from it, or is the same error of
        another one than `blamed`, need not be shown."""
        if error:
            self._error, self._blamed = error, blamed
        self._failed = True

    def finish(self, quiet: float, seconds: float) -> None:
        """Reads what is left, until nothing comes for `quiet` seconds, and for `seconds` at most: what
        outlives the ranks may hold a pipe open."""
        now = time.monotonic()
        self._last_deadline, self._quiet, self._deadline = now + seconds, quiet, now + quiet
        if self.ident is not None:
            self.join(seconds + 1)
        for stream in self._streams.values():
            self._show_held(stream)

    def first_error(self, name: str) -> str:
        """The line that tells best why `name` failed: the last exception on stderr, Python's before C++'s,
        else the last line that is no progress bar."""
        lines, crash = _without_crash(self._tail(name))
        if crash:
            return crash
        lines = [_PREFIX.sub(b"", line) for line in lines if line.strip()]
        found = _Exceptions()
        exceptions = [line for line in lines if found.has(line)]
        thrown = [_WHAT.sub(b"", line) for line in lines if _WHAT.match(line)]
        others = [line for line in lines if not _BAR.match(line)]
        chosen = (exceptions or thrown or others or lines or [b""])[-1]
        return chosen.decode(errors="replace").strip()[:1000]

    def last_place(self, name: str) -> str:
        """Where the last traceback of `name` says that its script was; empty where there is none."""
        lines = (_PREFIX.sub(b"", line).decode(errors="replace") for line in self._tail(name))
        return frames.in_words(frames.last_traceback(lines))

    def _tail(self, name: str) -> list[bytes]:
        """The last lines of its stderr, as far as they are kept."""
        stream = self._streams.get((name, "err"))
        return bytes(stream.tail).split(b"\n") if stream and stream.tail else []

    def divert_errors(self, name: str) -> None:
        """From now on, what `name` writes to stderr is kept for `diverted` alone."""
        self._streams[name, "err"].diverted = bytearray()

    def diverted(self, name: str) -> bytes:
        """What `name` has written since then."""
        return bytes(self._streams[name, "err"].diverted or b"")

    @property
    def heard(self) -> float:
        """When anybody last wrote anything, on the monotonic clock."""
        return self._heard

    def _read(self, stream: _Stream) -> None:
        data = os.read(stream.source, CHUNK)
        self._heard = time.monotonic()
        if not data:
            self._close(stream)
            return
        data = stream.cut + data
        stream.cut = next((cut for cut in (b"\x1b[", b"\x1b") if data.endswith(cut)), b"")
        for part in _MOVES.split(data.removesuffix(stream.cut)):
            if part == b"\n":
                self._end_line(stream)
            elif part == _UP:
                self._move_up(stream)
            elif part:
                self._take_text(stream, part)
        stream.rest = _not_overwritten(stream.rest)
        if len(stream.rest) > self._share(LONGEST_LINE):
            self._emit_blank(stream)
            self._emit(stream, stream.rest)
            stream.rest = b""
        elif b"\r" in stream.rest and stream.show:
            stream.console.unfinished(_visible(stream.rest))

    def _take_text(self, stream: _Stream, text: bytes) -> None:
        if not text.startswith(b"\r"):
            self._emit_blank(stream)
        stream.rest += text
        stream.up = 0

    def _end_line(self, stream: _Stream) -> None:
        """A program that draws a bar further down than its cursor (tqdm's `position`) goes down, draws it
        and goes up again, every time. Where it only goes down again, no line has ended."""
        if stream.up:
            stream.up -= 1
            return
        if not stream.rest.strip():
            stream.blank += 1
        else:
            self._emit_blank(stream)
            self._emit(stream, _visible(stream.rest) + b"\n")
        stream.rest = b""

    def _move_up(self, stream: _Stream) -> None:
        stream.blank = max(0, stream.blank - 1)
        stream.up += 1
        stream.rest += b"\r"  # what is written next replaces the bar

    def _emit_blank(self, stream: _Stream) -> None:
        for _ in range(stream.blank):
            self._emit(stream, b"\n")
        stream.blank = 0

    def _emit(self, stream: _Stream, data: bytes) -> None:
        if stream.diverted is not None:
            _add(stream.diverted, data, self._share(LONGEST_DUMP))
            return
        if stream.tail is not None:
            _add(stream.tail, data, self._share(TAIL))
        logged = _write_all(stream.log, data)
        # What a full disk keeps out of the log is shown even if the user asked for other ranks only.
        if not logged:
            self._show_held(stream, whole=True)
            stream.console.line(data)
        elif stream.show:
            self._show(stream, data)

    def _show(self, stream: _Stream, data: bytes) -> None:
        if stream.held is None:
            if _TRACEBACK not in data:
                stream.console.line(data)
                return
            stream.held = _Held(shown_at=time.monotonic() + ECHO_WAIT, longest=self._share(LONGEST_LINE))
        if not stream.held.takes(data):
            self._show_held(stream, whole=True)

    def _is_to_blame(self, stream: _Stream) -> bool:
        return stream.held is not None and bool(stream.held.error) and stream.name == self._blamed

    def _show_held(self, stream: _Stream, *, whole: bool = False) -> None:
        """`whole`: also where it need not be."""
        held, stream.held = stream.held, None
        if held is None:
            return
        if self._failed and not whole:
            if blame.is_echo(held.error):
                self.echoes += 1
                return
            if held.error and held.error == self._error and stream.name != self._blamed:
                return
        for line in held.lines:
            stream.console.line(line)

    def _share(self, wanted: int) -> int:
        """As many bytes as are wanted for each stream, or as it may have."""
        return min(wanted, MEMORY // len(self._streams))

    def _close(self, stream: _Stream) -> None:
        self._emit_blank(stream)
        if rest := _visible(stream.rest + stream.cut):
            self._emit(stream, rest + b"\n")
        self._selector.unregister(stream.source)
        os.close(stream.source)
        os.close(stream.log)


def _add(kept: bytearray, data: bytes, most: int) -> None:
    """Of what is too much the last half stays."""
    kept += data
    if len(kept) > most:
        del kept[: -most // 2]


def _without_crash(lines: Sequence[bytes]) -> tuple[Sequence[bytes], str]:
    """What was written before Python's crash report, and for other crashes than an abort, which someone
    explains before he aborts, the report in a line: what, and where in the thread that crashed."""
    begin = next((at for at, line in enumerate(lines) if line.startswith(_CRASH)), None)
    if begin is None:
        return lines, ""
    what = lines[begin].removeprefix(_CRASH).decode(errors="replace").strip()
    if what == "Aborted" and any(line.strip() for line in lines[:begin]):
        return lines[:begin], ""
    current = next((at for at, line in enumerate(lines) if line.startswith(b"Current thread")), len(lines))
    where = _place([line.decode(errors="replace") for line in lines[current + 1 :]])
    return (), f"{what}: {where}" if where else what


def _place(lines: Sequence[str]) -> str:
    """`script.py:12 load, in string_at`: the script's line, and what it was in."""
    stack = frames.dumped(lines)
    line = frames.own(stack)
    if line is None:
        return ""
    return frames.shown(line) + (f", in {stack[0][2]}" if line != stack[0] else "")


def _visible(line: bytes) -> bytes:
    """What a terminal would show of a line: its last part between carriage returns that is not blank. An
    exception is no progress bar: what it says before and after them stays."""
    if b"\r" in line and (whole := _exception(line)):
        return b" ".join(part for part in whole.split(b"\r") if part.strip())
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")


def _exception(line: bytes) -> bytes:
    """From the part between carriage returns on that begins like an exception; empty if none does."""
    parts = line.split(b"\r")
    texts = (_PREFIX.sub(b"", part) for part in parts)
    begin = next((at for at, text in enumerate(texts) if _EXCEPTION.match(text)), len(parts))
    return b"\r".join(parts[begin:])


def _not_overwritten(line: bytes) -> bytes:
    """An unfinished line from the part on that a terminal shows: a progress bar has no end for hours."""
    if b"\r" in line and (whole := _exception(line)):
        return whole
    begin = line.rfind(b"\r", 0, len(line.rstrip()))
    return line[max(begin, 0) :]


def _write_all(fd: int, data: bytes) -> bool:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])  # Somebody made our stdout non-blocking.
        except OSError:
            return False
    return True
