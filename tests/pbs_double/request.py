"""What a job asks for, and where its chunks go: how `-l` is read, places, node files.

A host may appear on several lines of a node file: with mpiprocs, with chunks packed on it, or in between others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNITS = {"b": 0, "kb": 1, "mb": 2, "gb": 3, "tb": 4}
CONSUMED = ("ncpus", "ngpus")


class Refused(Exception):
    """A request that qsub does not take; the text is qsub's own."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a select statement; `resources` as spelled, in their order."""

    resources: Mapping[str, str]

    def number(self, name: str) -> int:
        return int(self.resources.get(name, 0))

    @property
    def processes(self) -> int:
        return int(self.resources.get("mpiprocs", 1))


@dataclass(frozen=True, kw_only=True)
class Request:
    """`-l` after qsub has read it."""

    chunks: tuple[Chunk, ...]
    place: str
    listed: Mapping[str, str]
    """Resource_List.NAME, as qstat shows it."""

    @property
    def arrangement(self) -> str:
        """free, pack or scatter; a host of one's own (excl) does not matter here."""
        return self.place.split(":")[0]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A chunk on its host."""

    host: str
    chunk: Chunk
    slot: int
    """The number of the job's place on that host."""


def read(resources: Mapping[str, str], *, split: int = 0) -> Request:
    """The request that `-l NAME=VALUE`s make. Raises Refused.

    With `split`, a site's hook turns `-l ncpus=N` of more than that into chunks of that many CPUs, one a host.
    """
    given = dict(resources)
    walltime = {"walltime": clock(given.pop("walltime"))} if "walltime" in given else {}
    nodes = given.pop("nodes", None)
    if nodes and ("select" in given or "place" in given):
        raise Refused("Cannot be used with select or place: nodes")
    if "place" in given and "select" not in given:
        raise Refused('Cannot have "place" without "select"')
    if nodes or "select" in given:
        select, place = given.pop("select", ""), given.pop("place", "free")
        for name in given:
            raise Refused(f'"-lresource=" cannot be used with "select" or "place", resource is: {name}')
        if nodes:
            select, place = _old_nodes(nodes), "scatter"
    elif split and int(given.get("ncpus", 1)) > split:
        count = -(-int(given["ncpus"]) // split)
        each = "".join(f":ngpus={int(given['ngpus']) // count}" if "ngpus" in given else "")
        select, place = f"{count}:ncpus={split}{each}", "scatter"
    else:
        given.setdefault("ncpus", "1")
        select = "1:" + ":".join(f"{name}={given[name]}" for name in _order(given))
        place = "pack"
    chunks = tuple(_chunks(select))
    listed = {"nodect": str(len(chunks)), "place": place, "select": select, **walltime}
    for name in ("ncpus", "ngpus", "mpiprocs"):
        if any(name in chunk.resources for chunk in chunks):
            listed[name] = str(sum(chunk.number(name) for chunk in chunks))
    if nodes:
        listed["nodes"] = nodes
    if any("mem" in chunk.resources for chunk in chunks):
        listed["mem"] = _rounded(sum(_kilobytes(chunk.resources.get("mem", "0")) for chunk in chunks))
    return Request(chunks=chunks, place=place, listed=dict(sorted(listed.items())))


def arrange(
    request: Request, free: Mapping[str, Mapping[str, int]], slots: Mapping[str, int]
) -> list[Placed] | None:
    """Where the chunks go on hosts with these free resources, in the hosts' order; None if they do not fit now."""
    left = {host: dict(has) for host, has in free.items()}
    counts = dict(slots)
    placed: list[Placed] = []
    for chunk in request.chunks:
        taken = {one.host for one in placed}
        for host, has in left.items():
            if "host" in chunk.resources and chunk.resources["host"] != host:
                continue
            if request.arrangement == "scatter" and host in taken:
                continue
            if request.arrangement == "pack" and taken and host not in taken:
                continue
            if all(has[name] >= chunk.number(name) for name in CONSUMED):
                break
        else:
            return None
        for name in CONSUMED:
            left[host][name] -= chunk.number(name)
        placed.append(Placed(host=host, chunk=chunk, slot=counts.get(host, 0)))
        counts[host] = counts.get(host, 0) + 1
    return placed


def why_never(request: Request, total: Mapping[str, Mapping[str, int]]) -> str:
    """The comment of a job that no set of these hosts could run."""
    for name in CONSUMED:
        wanted, most = (
            max(chunk.number(name) for chunk in request.chunks),
            sum(h[name] for h in total.values()),
        )
        if wanted > max(has[name] for has in total.values()):
            return f"Can Never Run: Insufficient amount of resource: {name} (R: {wanted} A: {most} T: {most})"
    return "Not Running: Not enough free nodes available"


def node_file(placed: Sequence[Placed]) -> list[str]:
    return [one.host for one in placed for _ in range(one.chunk.processes)]


def line_chunks(placed: Sequence[Placed]) -> list[Chunk]:
    """The chunk of each line of the node file."""
    return [one.chunk for one in placed for _ in range(one.chunk.processes)]


def hosts(placed: Sequence[Placed]) -> list[str]:
    """Each host once, in order of first appearance."""
    return list(dict.fromkeys(one.host for one in placed))


def exec_host(placed: Sequence[Placed]) -> str:
    def one(part: Placed) -> str:
        cpus = part.chunk.number("ncpus")
        return f"{part.host}/{part.slot}" + (f"*{cpus}" if cpus > 1 else "")

    return "+".join(map(one, placed))


def exec_vnode(placed: Sequence[Placed]) -> str:
    def one(part: Placed) -> str:
        resources = {n: v for n, v in part.chunk.resources.items() if n in ("ncpus", "ngpus", "mem")}
        if "mem" in resources:
            resources["mem"] = f"{_kilobytes(resources['mem'])}kb"
        return "(" + ":".join([part.host, *(f"{name}={value}" for name, value in resources.items())]) + ")"

    return "+".join(map(one, placed))


def seconds(clock: str) -> int:
    """Of HH:MM:SS, MM:SS or SS."""
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part)
    return total


def clock(text: str) -> str:
    """As a job's attributes have it."""
    total = seconds(text)
    return f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"


def _old_nodes(text: str) -> str:
    """`2:ppn=2` as a select statement."""
    count, _, rest = text.partition(":")
    name, _, each = rest.partition("=")
    if not count.isdecimal() or (rest and name != "ppn"):
        raise Refused(f"illegal -lnodes value: {text}")
    return f"{count}:ncpus={each or 1}:mpiprocs={each or 1}"


def _chunks(select: str) -> list[Chunk]:
    found = []
    for part in select.split("+"):
        count, *words = part.split(":")
        if not count.isdecimal():
            count, words = "1", [count, *words]
        resources = dict(word.partition("=")[::2] for word in words)
        resources.setdefault("ncpus", "1")
        found += [Chunk(resources=resources)] * int(count)
    return found


def _order(given: Mapping[str, str]) -> list[str]:
    return sorted(given)


def _rounded(kilobytes: int) -> str:
    """In the largest unit that leaves no fraction."""
    units = iter(("kb", "mb", "gb", "tb"))
    unit = next(units)
    while kilobytes and kilobytes % 1024 == 0 and unit != "tb":
        kilobytes, unit = kilobytes // 1024, next(units)
    return f"{kilobytes}{unit}"


def _kilobytes(text: str) -> int:
    number = text.rstrip("bkmgtBKMGT")
    return int(number) * 1024 ** UNITS[text[len(number) :].lower() or "b"] // 1024
