"""The relay of the ranks' output: whole lines, logs, progress bars."""

import os
import select
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.core.plain import plain
from entrypoint.ranks import output
from entrypoint.ranks.output import Console, Relay, Voice, own_consoles, wants_progress


class Screen:
    """A console whose bytes a test can read."""

    def __init__(self, *, progress: bool = False):
        self._reader, self.fd = os.pipe()
        self.console = Console(self.fd, progress=progress)

    def text(self) -> bytes:
        os.close(self.fd)
        data = b""
        while chunk := os.read(self._reader, 65536):
            data += chunk
        os.close(self._reader)
        return data


def relay(
    tmp_path: Path, *writes: bytes, progress: bool = False, show: bool = True
) -> tuple[bytes, bytes, str]:
    """(shown, logged, first error) of a rank that writes these pieces to its stderr."""
    screen = Screen(progress=progress)
    reading = Relay({"out": screen.console, "err": screen.console})
    writer = reading.add("rank0", "err", tmp_path / "log", show=show)
    reading.start()
    for data in writes:
        before = reading.heard
        os.write(writer, data)
        deadline = time.monotonic() + 5
        while data and reading.heard == before and time.monotonic() < deadline:  # each is read by itself
            time.sleep(0.001)
    os.close(writer)
    reading.finish(5, 5)
    return screen.text(), (tmp_path / "log").read_bytes(), reading.first_error("rank0")


def test_the_relay_ends_by_itself_once_nobody_can_write(tmp_path: Path) -> None:
    screen = Screen()
    reading = Relay({"out": screen.console, "err": screen.console})
    writers = [reading.add("rank0", name, tmp_path / name, show=True) for name in ("out", "err")]
    reading.start()
    for writer in writers:
        os.write(writer, b"line\n")
        os.close(writer)
    reading.join(5)
    assert not reading.is_alive()
    assert screen.text() == b"line\nline\n"


def test_lines_written_in_pieces_arrive_whole(tmp_path: Path) -> None:
    shown, logged, _ = relay(tmp_path, b"one, ", b"still one\ntwo", b"\n", b"three")
    assert shown == logged == b"one, still one\ntwo\nthree\n"


def test_bytes_that_are_no_text_pass_unchanged(tmp_path: Path) -> None:
    shown, logged, _ = relay(tmp_path, b"\xff\xfe\x00 binary\n")
    assert shown == logged == b"\xff\xfe\x00 binary\n"


def test_a_hidden_rank_is_logged_only(tmp_path: Path) -> None:
    shown, logged, _ = relay(tmp_path, b"line\n", show=False)
    assert (shown, logged) == (b"", b"line\n")


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"before\n")
    assert relay(tmp_path, b"after\n")[1] == b"before\nafter\n"


def test_a_progress_bar_is_shown_on_a_terminal_and_only_its_end_is_logged(tmp_path: Path) -> None:
    shown, logged, _ = relay(tmp_path, b"\r 10%", b"\r 50%", b"\r100%\n", progress=True)
    assert logged == b"100%\n"
    assert shown == b"\r\x1b[K 10%\r\x1b[K 50%\r\x1b[K100%\n"


def test_a_progress_bar_elsewhere_is_one_line(tmp_path: Path) -> None:
    shown, logged, _ = relay(tmp_path, b"\r 10%", b"\r 50%", b"\r100%\n")
    assert shown == logged == b"100%\n"


def test_a_progress_bar_that_is_longer_than_any_line_may_be_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LONGEST_LINE", 100)
    _, logged, _ = relay(
        tmp_path, b"a%" + b" " * 70 + b"\r", b"b%" + b" " * 70 + b"\r", b"c%" + b" " * 70 + b"\r"
    )
    assert logged == b"c%" + b" " * 70 + b"\n"


def bar(percent: int, position: int) -> list[bytes]:
    """What tqdm writes for a bar at a position, in its own pieces."""
    return [b"\n" * position, b"\rbar %d%%" % percent, b"\x1b[A" * position]


@pytest.mark.parametrize("position", [1, 3])
def test_a_bar_further_down_is_one_line_too(tmp_path: Path, position: int) -> None:
    pieces = [piece for percent in range(5) for piece in bar(percent, position)]
    end = [b"\rbar 100%", b"\n"]
    for writes in ([*pieces, *end], [b"".join([*pieces, *end])], [*pieces, b"\x1b", b"[A\rbar 100%\n"]):
        shown, logged, _ = relay(tmp_path, *writes)
        assert shown == b"bar 100%\n"
        assert logged.endswith(shown)
        (tmp_path / "log").unlink()


def test_what_is_printed_between_such_bars_is_lost_nowhere(tmp_path: Path) -> None:
    text = [b"first\n\n", *bar(1, 2), b"Traceback:\n", b"  line\n", *bar(2, 2), b"\rlast\n\nend\n\n"]
    shown, _, _ = relay(tmp_path, *text)
    assert shown == b"first\n\nTraceback:\n  line\nlast\n\nend\n\n"


@pytest.mark.parametrize("written", [b"one\n\n\ntwo\n", b"\n\none\n", b"one\n\n", b"\n \n\tone\n"])
def test_blank_lines_stay_where_they_were(tmp_path: Path, written: bytes) -> None:
    shown, logged, _ = relay(tmp_path, written)
    assert (shown, logged) == (written.replace(b" \n", b"\n"),) * 2


def test_bars_one_below_the_other_keep_their_last_words(tmp_path: Path) -> None:
    inner = [piece for percent in (10, 50, 100) for piece in bar(percent, 1)]
    shown, _, _ = relay(tmp_path, b"\router 0%", *inner, b"\router 50%", *inner, b"\router 100%", b"\n")
    assert shown.endswith(b"outer 100%\n")
    assert shown.count(b"\n") <= 3


def test_windows_line_ends_lose_nothing(tmp_path: Path) -> None:
    assert relay(tmp_path, b"text\r\nmore\r\n")[1] == b"text\nmore\n"


def test_a_line_without_an_end_is_passed_on_in_pieces(tmp_path: Path) -> None:
    piece = b"x" * 65536
    shown: list[bytes] = []
    screen = Screen()
    reading = Relay({"out": screen.console})
    writer = reading.add("rank0", "out", tmp_path / "log", show=False)
    reading.start()
    for _ in range(40):
        os.write(writer, piece)
    deadline = time.monotonic() + 10
    while (tmp_path / "log").stat().st_size < 1 << 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    shown.append((tmp_path / "log").read_bytes())
    os.close(writer)
    reading.finish(5, 5)
    assert len(shown[0]) >= 1 << 20
    assert (tmp_path / "log").stat().st_size == 40 * 65536 + 1


def test_many_streams_share_the_memory_that_one_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MEMORY", 400)
    reading = Relay({"err": Screen().console})
    writers = [reading.add(f"rank{rank}", "err", tmp_path / f"log{rank}", show=False) for rank in range(4)]
    reading.start()
    for writer in writers:
        os.write(writer, b"ValueError: the reason\n" + b"x" * 101)
    deadline = time.monotonic() + 10
    while (tmp_path / "log3").stat().st_size < 124 and time.monotonic() < deadline:
        time.sleep(0.01)
    passed_on = (tmp_path / "log3").read_bytes()
    for writer in writers:
        os.close(writer)
    reading.finish(5, 5)
    assert passed_on == b"ValueError: the reason\n" + b"x" * 101
    assert reading.first_error("rank3") == "x" * 50


def test_a_process_that_keeps_the_pipe_open_is_not_waited_for(tmp_path: Path) -> None:
    screen = Screen()
    reading = Relay({"out": screen.console})
    writer = reading.add("rank0", "out", tmp_path / "log", show=True)
    reading.start()
    os.write(writer, b"whole\nrest")
    reading.finish(0.5, 5)
    assert not reading.is_alive()
    assert (tmp_path / "log").read_bytes() == b"whole\nrest\n"
    os.close(writer)


def test_what_a_slow_file_system_holds_up_is_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, really = threading.Event(), threading.Event(), output._write_all

    def slowly(fd: int, data: bytes) -> bool:
        begun.set()
        goes_on.wait(10)
        return really(fd, data)

    monkeypatch.setattr(output, "_write_all", slowly)
    reading = Relay({"out": Screen().console})
    writer = reading.add("rank0", "out", tmp_path / "log", show=False)
    reading.start()
    os.write(writer, b"first\n")
    assert begun.wait(10)
    os.write(writer, b"last\n")
    ending = threading.Thread(target=reading.finish, args=(0.1, 10))
    ending.start()
    time.sleep(0.2)  # longer than nothing may come
    goes_on.set()
    ending.join()
    os.close(writer)
    assert (tmp_path / "log").read_bytes() == b"first\nlast\n"


def test_a_process_that_writes_for_ever_is_not_read_for_ever(tmp_path: Path) -> None:
    reading = Relay({"out": Screen().console})
    writer = reading.add("rank0", "out", tmp_path / "log", show=False)
    with subprocess.Popen(["yes"], stdout=writer) as endless:
        try:
            os.close(writer)
            reading.start()
            reading.finish(0.1, 0.3)
            reading.join(10)
            assert not reading.is_alive()
        finally:
            endless.kill()


def test_a_closed_console_ends_neither_the_relay_nor_the_log(tmp_path: Path) -> None:
    reader, fd = os.pipe()
    os.close(reader)
    reading = Relay({"out": Console(fd, progress=True)})
    writer = reading.add("rank0", "out", tmp_path / "log", show=True)
    reading.start()
    os.write(writer, b"line\n")
    os.close(writer)
    reading.finish(5, 5)
    os.close(fd)
    assert (tmp_path / "log").read_bytes() == b"line\n"


def test_a_console_that_someone_made_non_blocking_gets_all() -> None:
    reader, fd = os.pipe()
    os.set_blocking(fd, False)
    line = b"x" * 500_000 + b"\n"  # more than a pipe holds
    teller = threading.Thread(target=Console(fd, progress=False).line, args=(line,))
    teller.start()
    found = b""
    while not found.endswith(b"\n"):
        found += os.read(reader, 65536)
    teller.join(5)
    assert found == line
    for end in (reader, fd):
        os.close(end)


def test_a_full_disk_ends_nothing_and_the_line_is_shown_even_if_hidden() -> None:
    screen = Screen()
    reading = Relay({"out": screen.console})
    writer = reading.add("rank0", "out", Path("/dev/full"), show=False)
    reading.start()
    os.write(writer, b"line\n")
    os.close(writer)
    reading.finish(5, 5)
    assert screen.text() == b"line\n"


TRACEBACK = b"""W before
Traceback (most recent call last):
  File "x.py", line 1, in <module>
ValueError: the reason
Exception ignored in: <function>
some noise at exit
"""


@pytest.mark.parametrize(
    ("written", "logged", "shown"),
    [
        (
            [b"ValueError: bad \r overwritten\n"],
            b"ValueError: bad   overwritten\n",
            "ValueError: bad overwritten",
        ),
        (
            [b"ValueError: bad \r", b" overwritten\n"],
            b"ValueError: bad   overwritten\n",
            "ValueError: bad overwritten",
        ),
        ([b" 10%\r 20%\rValueError: bad\rmore\r\n"], b"ValueError: bad more\n", "ValueError: bad more"),
        ([b"[rank0]: ValueError: a\rb\n"], b"[rank0]: ValueError: a b\n", "ValueError: a b"),
        ([b"ValueError: a\vb\fc\x08d\n"], b"ValueError: a\vb\fc\x08d\n", "ValueError: a b c?d"),
        (
            ["ValueError: a\x85b\u2028c\n".encode()],
            "ValueError: a\x85b\u2028c\n".encode(),
            "ValueError: a b c",
        ),
    ],
)
def test_what_an_exception_says_is_kept_whole_whatever_control_characters_are_in_it(
    tmp_path: Path, written: list[bytes], logged: bytes, shown: str
) -> None:
    """A line ends with a newline, and with nothing else."""
    _, log, error = relay(tmp_path, *written)
    assert (log, plain(error)) == (logged, shown)


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (TRACEBACK, "ValueError: the reason"),
        (b"[rank3]: Traceback (most recent call last):\n[rank3]: torch.OutOfMemoryError: CUDA out of memory\n", "torch.OutOfMemoryError: CUDA out of memory"),
        (b"train: unknown key lr\n", "train: unknown key lr"),
        (b"usage\n\nlast line\n\n", "last line"),
        (b"", ""),
        (b"KeyError: " + b"x" * 2000 + b"\n", "KeyError: " + "x" * 990),
    ],
)  # fmt: skip
def test_the_first_error_is_the_exception_else_the_last_line(
    tmp_path: Path, written: bytes, error: str
) -> None:
    assert relay(tmp_path, written)[2] == error


BAR = " 38%|███▊      | 3/8 [00:00<00:01,  3.07it/s, loss 2.4752]".encode()
ODD = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
    float("n/a")
ValueError: could not convert string to float: 'n/a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise Diverged("the loss of step 3 is no number")
Diverged: the loss of step 3 is no number
"""


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (ODD, "Diverged: the loss of step 3 is no number"),
        (ODD.replace(b"Diverged: the", b"train.main.<locals>.Out: the"), "train.main.<locals>.Out: the loss of step 3 is no number"),
        (ODD.rpartition(b"Diverged: ")[0] + b"queue.Empty\n", "queue.Empty"),
        (b"".join(b"[rank3]: " + line + b"\n" for line in ODD.splitlines()), "Diverged: the loss of step 3 is no number"),
        (b"\r" + BAR + ODD + b"\r" + BAR + b"\n", "Diverged: the loss of step 3 is no number"),
        (ODD.rpartition(b"Diverged: ")[0] + BAR + b"\n100%|#| 8/8 [00:04<00:00]\nDiverged: it\n", "Diverged: it"),
        (ODD + b"Diverged: said later\nDone\n", "Diverged: the loss of step 3 is no number"),
        (b"train: unknown key lr\n" + BAR + b"\n3it [00:00, 3.07it/s]\n", "train: unknown key lr"),
        (BAR + b"train: unknown key lr\n", (BAR + b"train: unknown key lr").decode().strip()),
        (BAR + b"\n", BAR.decode().strip()),
    ],
    ids=["odd name", "of a function", "without a text", "of torch", "bar", "bar between", "once", "no traceback", "in a line", "alone"],
)  # fmt: skip
def test_what_ends_a_traceback_is_the_exception_whatever_its_name_and_a_bar_is_no_error(
    tmp_path: Path, written: bytes, error: str
) -> None:
    assert relay(tmp_path, written)[2] == error


GROUP = b"""  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 9, in <module>
  |     raise ExceptionGroup("two shards", errors)
  | ExceptionGroup: two shards (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: shard 3 is empty
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 4, in read
    |     raise Diverged("shard 7 is no number")
    | Diverged: shard 7 is no number
    +------------------------------------
"""
THROWN = b"""terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
For debugging consider passing CUDA_LAUNCH_BLOCKING=1

Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f12 in libc10.so)
frame #1: clone + 0x43 (0x7f56 in libc.so.6)
"""


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (GROUP, "Diverged: shard 7 is no number"),
        (GROUP[: GROUP.index(b"    +-------")], "ValueError: shard 3 is empty"),
        (b"".join(b"[rank3]: " + line + b"\n" for line in GROUP.splitlines()), "Diverged: shard 7 is no number"),
        (THROWN, "CUDA error: an illegal memory access was encountered"),
        (ODD + THROWN, "Diverged: the loss of step 3 is no number"),
        (THROWN + b"Fatal Python error: Aborted\n\nThread 0x7f (most recent call first):\n  <no Python frame>\n", "CUDA error: an illegal memory access was encountered"),
    ],
    ids=["group", "group without tracebacks", "group of torch", "C++", "C++ behind Python", "C++ before Python's report"],
)  # fmt: skip
def test_of_a_group_the_last_exception_is_the_error_and_of_c_plus_plus_what_it_says(
    tmp_path: Path, written: bytes, error: str
) -> None:
    assert relay(tmp_path, written)[2] == error


LOST = b"""Traceback (most recent call last):
  File "/home/alice/train.py", line 88, in <module>
    loss.backward()
RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error [10.0.0.2]:27539: Connection reset by peer. This is
typically caused by a remote worker hanging
"""
CAUSE = b"""Traceback (most recent call last):
  File "/home/alice/train.py", line 41, in <module>
    batch = next(batches)
Overslept: the file system is away
"""


@pytest.mark.parametrize("prefix", [b"", b"[rank3]: "])
def test_where_a_ranks_script_was_is_told_from_its_last_traceback(tmp_path: Path, prefix: bytes) -> None:
    screen = Screen()
    reading = Relay({"out": screen.console, "err": screen.console})
    writers = [reading.add(name, "err", tmp_path / name, show=False) for name in ("rank3", "rank4")]
    reading.start()
    os.write(writers[0], b"".join(prefix + line + b"\n" for line in CAUSE.splitlines()))
    for writer in writers:
        os.close(writer)
    reading.finish(5, 5)
    places = [reading.last_place(name) for name in ("rank3", "rank4", "none")]
    assert places == ["at train.py:41", "", ""]


def echoing(tmp_path: Path, written: bytes, *, failed: bool) -> tuple[bytes, bytes, int]:
    """(shown, logged, hidden tracebacks) of a rank that ends with these words, of a job that has failed."""
    screen = Screen()
    reading = Relay({"out": screen.console, "err": screen.console})
    writer = reading.add("rank0", "err", tmp_path / "log", show=True)
    reading.start()
    os.write(writer, written)
    os.close(writer)
    if failed:
        reading.failed()
    reading.finish(5, 5)
    return screen.text(), (tmp_path / "log").read_bytes(), reading.echoes


@pytest.mark.parametrize("prefix", [b"", b"[rank3]: "])
@pytest.mark.parametrize("bar", [b"", b" 50%|##### | 20/40 "])
def test_of_a_failed_job_a_traceback_of_a_lost_connection_is_logged_only(
    tmp_path: Path, prefix: bytes, bar: bytes
) -> None:
    words = bar + b"".join(prefix + line + b"\n" for line in LOST.splitlines())
    assert echoing(tmp_path, b"begun\n" + words, failed=True) == (b"begun\n", b"begun\n" + words, 1)


def test_of_a_job_that_has_not_failed_all_is_shown(tmp_path: Path) -> None:
    assert echoing(tmp_path, b"begun\n" + LOST, failed=False) == (b"begun\n" + LOST,) * 2 + (0,)


@pytest.mark.parametrize(
    "written",
    [
        CAUSE,
        LOST + b"\nDuring handling of the above exception, another exception occurred:\n\n" + CAUSE,
        CAUSE.replace(b"Overslept", b"ConnectionError") + b"after it\n",
        CAUSE.rpartition(b"Overslept")[0],
        LOST.rpartition(b"RuntimeError")[0] + b"RuntimeError: Connection refused\n",
    ],
    ids=["cause", "cause after an echo", "of a user", "cut off", "other error"],
)
def test_any_other_traceback_is_shown(tmp_path: Path, written: bytes) -> None:
    assert echoing(tmp_path, b"begun\n" + written, failed=True) == (b"begun\n" + written,) * 2 + (0,)


@pytest.mark.parametrize(
    ("error", "blamed", "shown"),
    [
        ("Overslept: the file system is away", "rank1", False),
        ("Overslept: the file system is away", "rank0", True),
        ("Overslept: another one", "rank1", True),
        ("", "", True),
    ],
    ids=["another rank's", "its own", "another error", "no rank's"],
)
def test_of_one_error_on_several_ranks_the_traceback_of_the_one_to_blame_is_shown(
    tmp_path: Path, error: str, blamed: str, shown: bool
) -> None:
    screen = Screen()
    reading = Relay({"out": screen.console, "err": screen.console})
    writer = reading.add("rank0", "err", tmp_path / "log", show=True)
    reading.start()
    os.write(writer, b"[rank0]: " + CAUSE.replace(b"\n", b"\n[rank0]: ", 3) + b"noise at exit\n")
    os.close(writer)
    reading.failed(error, blamed)
    reading.failed()
    reading.finish(5, 5)
    assert screen.text() == ((tmp_path / "log").read_bytes() if shown else b"")


@pytest.mark.parametrize(("text", "wait"), [(CAUSE, "SAME_WAIT"), (LOST, "ECHO_WAIT")], ids=["cause", "lost"])
def test_a_traceback_is_shown_where_no_failure_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, wait: str
) -> None:
    monkeypatch.setattr(output, wait, 0.1)
    screen = Screen()
    reading = Relay({"out": screen.console, "err": screen.console})
    writer = reading.add("rank0", "err", tmp_path / "log", show=True)
    reading.start()
    os.write(writer, text)
    shown = b""
    while len(shown) < len(text):
        shown += os.read(screen._reader, len(text))
    os.close(writer)
    reading.finish(5, 5)
    assert (shown, screen.text()) == (text, b"")


@pytest.mark.parametrize("longer", ["LONGEST_LINE", "LONGEST_TRACEBACK"])
def test_a_traceback_without_an_end_is_shown_before_it_takes_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longer: str
) -> None:
    monkeypatch.setattr(output, longer, {"LONGEST_LINE": 90, "LONGEST_TRACEBACK": 3}[longer])
    lines = LOST.rpartition(b"RuntimeError")[0]
    assert echoing(tmp_path, lines + LOST, failed=True)[0].startswith(lines)
    monkeypatch.setattr(output, "ECHO_WAIT", 60.0)
    screen = Screen()
    reading = Relay({"out": screen.console, "err": screen.console})
    writer = reading.add("rank0", "err", tmp_path / "log", show=True)
    reading.start()
    os.write(writer, lines)
    assert select.select([screen._reader], [], [], 5)[0], "it is shown while the rank still writes"
    os.close(writer)
    reading.finish(5, 5)
    assert screen.text() == lines


def test_a_traceback_as_long_as_it_may_be_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LONGEST_LINE", len(LOST))
    assert echoing(tmp_path, LOST, failed=True) == (b"", LOST, 1)


def test_a_traceback_that_the_log_does_not_take_is_shown() -> None:
    screen = Screen()
    reading = Relay({"out": screen.console, "err": screen.console})
    writer = reading.add("rank0", "err", Path("/dev/full"), show=True)
    reading.failed()
    reading.start()
    os.write(writer, LOST)
    os.close(writer)
    reading.finish(5, 5)
    assert (screen.text(), reading.echoes) == (LOST, 0)


def test_a_terminal_wants_progress_and_a_parent_may_speak_for_one() -> None:
    leader, follower = os.openpty()
    reader, writer = os.pipe()
    assert wants_progress(follower, {})
    assert not wants_progress(writer, {})
    assert wants_progress(writer, {"APPTRAIN_PROGRESS": "1"})
    for fd in (leader, follower, reader, writer):
        os.close(fd)


def test_our_own_consoles_are_the_two_streams_of_this_process() -> None:
    found = own_consoles({"APPTRAIN_PROGRESS": "1"})
    assert {name: (console.fd, console.progress) for name, console in found.items()} == {
        "out": (1, True),
        "err": (2, True),
    }


def test_what_we_say_ourselves_waits_for_no_reader_and_comes_in_order() -> None:
    reader, writer = os.pipe()
    console = Console(writer, progress=False)
    texts = [f"{number} {'x' * 200}" for number in range(output.MOST_SAID)]
    for text in texts:
        console.say(text)
    console.flush(0.01)
    for _ in range(output.MOST_SAID):
        console.say("too much")
    data = b""
    while data.count(b"\n") < len(texts):
        data += os.read(reader, 65536)
    console.flush(10)
    assert data.decode().splitlines()[: len(texts)] == texts
    console.say("the last")
    console.flush(10)
    rest = data.decode().splitlines()[len(texts) :] + os.read(reader, 1 << 20).decode().splitlines()
    assert (set(rest[:-1]) <= {"too much"}, rest[-1]) == (True, "the last")
    assert len(rest) < output.MOST_SAID
    for fd in (reader, writer):
        os.close(fd)


def test_many_writers_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    screen_reader, screen_writer = os.pipe()
    reading = Relay({"out": Console(screen_writer, progress=False)})
    writers = [reading.add(f"rank{rank}", "out", tmp_path / f"log{rank}", show=True) for rank in range(4)]
    reading.start()
    collected: list[bytes] = []

    def collect() -> None:
        while chunk := os.read(screen_reader, 65536):
            collected.append(chunk)

    def write(rank: int) -> None:
        for _ in range(500):
            os.write(writers[rank], str(rank).encode() * 50)
            os.write(writers[rank], str(rank).encode() * 50 + b"\n")

    collector = threading.Thread(target=collect)
    collector.start()
    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        os.close(writer)
    reading.finish(5, 5)
    os.close(screen_writer)
    collector.join()
    lines = b"".join(collected).splitlines()
    assert sorted(lines) == sorted(str(rank).encode() * 100 for rank in range(4) for _ in range(500))


CRASH = b"""Fatal Python error: %s

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f0 (most recent call first):
  File "/home/alice/model.py", line 41 in forward
  File "/home/alice/train.py", line 88 in <module>

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


def test_of_a_crash_its_kind_and_place_are_the_first_error(tmp_path: Path) -> None:
    _, _, error = relay(tmp_path, b"a warning\n", CRASH % b"Segmentation fault")
    assert error == "Segmentation fault: model.py:41 forward"


IN_CTYPES = b"""Fatal Python error: Segmentation fault

Current thread 0x00007f0 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 500 in string_at
  File "/home/alice/train.py", line 12 in load
  File "/home/alice/train.py", line 88 in <module>
"""


def test_of_a_crash_in_a_library_the_scripts_own_line_is_named(tmp_path: Path) -> None:
    _, _, error = relay(tmp_path, IN_CTYPES)
    assert error == "Segmentation fault: train.py:12 load, in string_at"


def test_a_crash_of_a_thread_that_is_no_pythons_has_no_place(tmp_path: Path) -> None:
    no_frame = b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x07 (most recent call first):\n  <no Python frame>\n"
    assert relay(tmp_path, no_frame)[2] == "Segmentation fault"


def test_of_an_abort_what_was_said_before_it_is_the_first_error(tmp_path: Path) -> None:
    _, _, error = relay(tmp_path, b"terminate called\n  what():  NCCL timeout\n", CRASH % b"Aborted")
    assert error == "NCCL timeout"
    _, _, error = relay(tmp_path, CRASH % b"Aborted")
    assert error == "Aborted: model.py:41 forward"


def test_diverted_errors_are_neither_shown_nor_logged(tmp_path: Path) -> None:
    screen = Screen()
    reading = Relay({"out": screen.console, "err": screen.console})
    writer = reading.add("rank0", "err", tmp_path / "log", show=True)
    reading.start()
    os.write(writer, b"before\n")
    deadline = time.monotonic() + 5
    while (tmp_path / "log").read_bytes() != b"before\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reading.diverted("rank0") == b""
    reading.divert_errors("rank0")
    os.write(writer, b"after\n")
    os.close(writer)
    reading.finish(5, 5)
    assert screen.text() == (tmp_path / "log").read_bytes() == b"before\n"
    assert reading.diverted("rank0") == b"after\n"


def test_what_is_the_same_for_all_nodes_is_said_once_and_by_the_first_alone() -> None:
    screen = Screen()
    voice = Voice(console=screen.console)
    for text in ("one", "two", "one"):
        voice.once(text)
    voice.say("one")
    silent = replace(voice, is_heard=False)
    silent.once("three")
    silent.say("four")
    screen.console.flush(5)
    assert screen.text() == b"apptrain: one\napptrain: two\napptrain: one\napptrain: four\n"
