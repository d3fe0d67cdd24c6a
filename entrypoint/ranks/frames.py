"""Reads the frames that Python prints, of tracebacks and of faulthandler, and picks the line that a person
wants to see. `own` and `waits_in` are the rules. Pure functions.

The line is the script's own, not one of a library below it. What the script waits for is the function of
torch to which this line led.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

Frame = tuple[str, str, str]
"""File, line, function."""
_DUMPED = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_RAISED = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')
_TORCH = re.compile(r"/(torch|lightning_fabric)/|^<frozen ")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3(\.\d+)?/|^<")
_WAITS = re.compile(r"/torch/(distributed|autograd|nn/parallel|cuda)/")


def main_thread(text: str) -> list[Frame]:
    """The main thread's in a dump, innermost first; faulthandler lists it last."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            frames = []
        elif found := _DUMPED.match(line):
            frames.append((found["file"], found["line"], found["function"]))
    return frames


def dumped(lines: Iterable[str]) -> list[Frame]:
    """Those of the thread whose stack a dump goes on with, innermost first."""
    frames: list[Frame] = []
    for line in lines:
        if not (found := _DUMPED.match(line)):
            break
        frames.append((found["file"], found["line"], found["function"]))
    return frames


def last_traceback(lines: Iterable[str]) -> list[Frame]:
    """Those of the last traceback, innermost first; empty where there is none."""
    frames: list[Frame] = []
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            frames = []
        elif found := _RAISED.match(line):
            frames.append((found["file"], found["line"], found["function"]))
    return frames[::-1]


def own(frames: Sequence[Frame]) -> Frame | None:
    """The innermost that is the script's: no library's, or where all are, not torch's. None: no frames."""
    for foreign in ([_LIBRARY, _TORCH], [_LIBRARY], [_TORCH]):
        for frame in frames:
            if not any(pattern.search(frame[0]) for pattern in foreign):
                return frame
    return frames[0] if frames else None


def waits_in(frames: Sequence[Frame]) -> str:
    """torch's function that waits for other ranks; empty where the script is elsewhere."""
    inner = next((index for index, frame in enumerate(frames) if not _TORCH.search(frame[0])), len(frames))
    waits = [frame[2] for frame in frames[:inner] if _WAITS.search(frame[0]) and frame[2] != "wrapper"]
    return waits[-1] if waits else ""


def shown(frame: Frame) -> str:
    """`train.py:31 advance`."""
    file, line, function = frame
    return f"{Path(file).name}:{line} {function}"[:200]


def in_words(frames: Sequence[Frame]) -> str:
    """`in backward (train.py:31)`, or `at train.py:31`; empty where nothing is known."""
    frame = own(frames)
    if frame is None:
        return ""
    spot = f"{Path(frame[0]).name}:{frame[1]}"[:200]
    waits = waits_in(frames)
    return f"in {waits} ({spot})" if waits else f"at {spot}"
