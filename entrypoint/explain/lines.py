"""What a line of a log says of itself: its message, its time, the rank, the node and the GPU. Pure
functions.

Times are in seconds; those without a year, or with a day alone, are of a year that is
the same for all, so that they can be compared with each other.
"""

from __future__ import annotations

import calendar
import re

ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Colours and other escapes of a terminal."""
_LABELS = re.compile(
    rb"\s*(?:"
    rb"\[(?:rank|RANK|Rank|default)\s?\d+\]:?"
    rb"|\[\d+,\d+\]<\w+>:?"
    rb"|\[\d{4}-\d\d-\d\d[ T][\d:.,]+Z?\]"
    rb"|\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?"
    rb"|\[?[IWEF]\d{3,4} \d\d:\d\d:\d\d[.\d]*[^\]]{0,80}\]"
    rb"|\d{1,5}:(?= )"
    rb"|\((?:\w+ )?(?:pid|rank)[= ]?\d+[^)]{0,60}\)"
    rb"|\|(?= )"  # of an exception group
    rb"|[a-z][a-z_-]*[0-9][\w.-]{0,60}:(?= (?:\[(?:rank|default)\d|Traceback \("
    rb"|(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception)\b))"
    rb")\s*"
)
_RANK = re.compile(
    rb"\[rank\s?(\d{1,6})\]|\[?\b[Rr]ank[ "
    rb"=:]{1,2}(\d{1,6})\b|\[\d+,(\d{1,6})\]<\w+>|\brank\s{2,}:\s(\d{1,6})\b"
)
_OF_TORCHRUN = re.compile(rb"\[default\s?\d{1,6}\]:?")
_LABEL_RANK = re.compile(rb"\s{0,3}(\d{1,5}): ")
_DATE = re.compile(
    rb"(?P<y>\d{4})[-/](?P<m>\d\d)[-/](?P<d>\d\d)[ T](?P<t>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)"
    rb"|(?P<m2>\d\d)/(?P<d2>\d\d)/(?P<y2>\d{4}) (?P<t2>\d\d:\d\d:\d\d)"
    rb"|(?<![0-9A-Za-z])[IWEF](?P<m3>\d{1,2})(?P<d3>\d\d) (?P<t3>\d\d:\d\d:\d\d(?:\.\d{1,9})?)"
    rb"|(?P<m4>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<d4>\d{1,2}) (?P<t4>\d\d:\d\d:\d\d)"
)
_MONTHS = b"JanFebMarAprMayJunJulAugSepOctNovDec"
_HOST = rb"[A-Za-z][A-Za-z0-9._-]{0,62}"
_NODE = re.compile(
    rb"srun: error: (?P<a>%(h)s): tasks? "
    rb"|\bON (?P<b>%(h)s) (?:CANCELLED|AT )"
    rb"|(?:^|[\s\]])(?P<c>%(h)s):\d+:\d+ \[\d+\] "
    rb"|Node failure on (?P<d>%(h)s)"
    rb"|failed on node (?P<e>%(h)s)"
    rb"|\bhost\s{2,}: (?P<f>%(h)s)"
    rb"|\d\d:\d\d:\d\d (?P<g>%(h)s) (?:kernel|slurmstepd|slurmd|pbs_mom|systemd)"
    rb"|(?:apptrain|run\.sh): (?P<i>(?=[^:]*\d)%(h)s): "
    rb"|apptrain: (?:attempt \d+: |status \d+: )?(?P<p>%(h)s): "
    rb"(?=lost: |torchrun's agent |the entrypoint ended |ended by |port )"
    rb"|(?:^|[\s:])rank \d+ on (?P<j>%(h)s)(?=[ ,:])"
    rb"|node \d+ \((?P<k>%(h)s)\)"
    rb"|^(?P<l>[a-z][a-z_-]*[0-9][A-Za-z0-9._-]{0,60}): "
    rb"|\[(?P<r>%(h)s) kernel\]"
    rb"|\bconnect to host (?P<q>%(h)s) port "
    rb"|\bon node (?P<m>%(h)s)|(?<![\w-])node=(?P<n>%(h)s)|\bNode (?P<o>%(h)s) is down" % {b"h": _HOST}
)
_NO_NODE = {b"python3", b"apptrain", b"srun", b"py3", b"http2", b"cuda12", b"libc10", b"bash5", b"mpi4py"}
_DEVICE = re.compile(
    rb"\bGPU (\d{1,2})\b|\bcuda:(\d{1,2})\b|\[(\d{1,2})\] .{0,60}?NCCL|CUDA device (\d{1,2})\b|\bcuda "
    rb"device (\d{1,2})\b"
)
_FILE_RANK = re.compile(r"(?:^|[._/-])rank[._-]?(\d{1,6})(?=[._/-]|$)|/(\d{1,5})/std(?:err|out)\.log$")
_FILE_NODE = re.compile(r"([A-Za-z][A-Za-z0-9-]{0,62})\.rank\d+\.(?:out|err)$")


def body(line: bytes) -> bytes:
    """The message, behind labels of ranks and times. pdsh and clush write a node's name before each line:
    that is a label only before an exception or the label of a rank, as programs write their names so too."""
    at = 0
    for _ in range(4):
        found = _LABELS.match(line, at)
        if not found or found.end() == at:
            break
        at = found.end()
    return line[at:]


def rank(line: bytes) -> int | None:
    """The rank that a line is of; None if it does not say. torchrun's own label, [default3], has the number
    on its node, which on other nodes is another rank's."""
    text = _OF_TORCHRUN.sub(b"", line, 1)
    found = _RANK.search(text, 0, 400) or _LABEL_RANK.match(text)
    return int(next(filter(None, found.groups()))) if found else None


def node(line: bytes) -> str:
    """The node that a line names; empty for none."""
    if b"DUE TO NODE FAILURE" in line:
        return ""  # it names the node that says so
    for found in _NODE.finditer(line, 0, 600):
        name = next((one for one in found.groups() if one), b"")
        if name and name not in _NO_NODE and not name.startswith(b"slurmstepd"):
            return name.decode().rstrip(".-")
    return ""


def device(line: bytes) -> str:
    """The number of the GPU that a line names; empty for none."""
    found = _DEVICE.search(line, 0, 600)
    return next(filter(None, found.groups())).decode() if found else ""


def time(line: bytes) -> float | None:
    """Seconds; None for a line without a time, or with one that is none."""
    found = _DATE.search(line, 0, 300)
    if not found:
        return None
    parts = found.groupdict()
    clock = next(parts[name] for name in ("t", "t2", "t3", "t4") if parts[name])
    if parts["m4"]:
        month, day = _MONTHS.index(parts["m4"]) // 3 + 1, int(parts["d4"])
    else:
        suffix = "3" if parts["m3"] else "" if parts["y"] else "2"
        month, day = int(parts["m" + suffix]), int(parts["d" + suffix])
    hours, minutes, seconds = clock.replace(b",", b".").split(b":")
    if not (1 <= month <= 12 and 1 <= day <= 31 and int(hours) < 24 and int(minutes) < 60):
        return None
    # The year is left out: logs of one job mix times with and without.
    return calendar.timegm((2000, month, day, int(hours), int(minutes), 0)) + float(seconds)


def of_file(name: str) -> tuple[int | None, str]:
    """(rank, node) that a file's name has."""
    found, place = _FILE_RANK.search(name), _FILE_NODE.search(name)
    number = next(filter(None, found.groups())) if found else None
    return (int(number) if number else None), (place[1] if place else "")
