"""Reads a site's nodes and queues from pbsnodes and qstat, and chooses a queue. `survey` is the entry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from entrypoint.batch.survey import gpus, limits
from entrypoint.batch.survey.answer import SiteSurvey
from entrypoint.batch.survey.ask import LoginNode
from entrypoint.batch.survey.draft import Line
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.schedulers.pbs import COUNTED

MODEL = re.compile(r"(gpu|accel)\w*_?(type|model|name|mod)")
"""A resource that names them."""
NAMED = re.compile(r"gpu|[vahbp][1-9]00|cuda|volta|ampere|hopper")
"""In the name of a queue for GPUs."""
AVAILABLE = "resources_available."
DOWN = ("down", "offline", "offline_by_mom", "stale", "state-unknown")
"""States in which a vnode takes no jobs until somebody mends it. It may have others at the same time."""
PALS = "does the site start tasks with mpiexec (HPE's PALS)? Then start: mpiexec. Else pbsdsh starts them"

Attributes = Mapping[str, str]


@dataclass(frozen=True)
class Host:
    name: str
    gpus: int
    counted_by: str
    """The resource."""
    model: str
    model_by: str
    cpus: int
    memory_gib: int
    is_whole: bool
    """Jobs get it alone."""
    is_up: bool
    """One of its vnodes is, at least."""
    attributes: Attributes
    """Of its first vnode."""


def survey(machine: LoginNode) -> SiteSurvey:
    """What PBS says. Raises BadInput where there are no queues, or where this is Torque."""
    queues = parse(machine.ask("qstat", "-Qf"), "Queue: ")
    told = machine.told[-1]
    servers = parse(machine.ask("qstat", "-Bf"), "Server: ")
    vnodes = parse(machine.ask("pbsnodes", "-a"))
    if not queues:
        raise BadInput("site-no-queues", f"{told}: ask again where qstat -Qf lists queues")
    if any("np" in attributes for attributes in vnodes.values()):
        raise BadInput(
            "site-torque",
            "pbsnodes shows Torque, and a profile asks as PBS does, with select: "
            "submit pbs/multinode.pbs by hand there (docs/pbs.md)",
        )
    server, of_server = next(iter(servers.items()), ("", {}))
    every = hosts(vnodes)
    having = [host for host in every if host.gpus]
    default, all_have = of_server.get("default_queue", "").partition("@")[0], having == every
    with_gpus = [host for host in having if host.is_up] or having
    queue, others = _choose(queues, with_gpus, default, all_have=all_have)
    chosen, rest = _alike(_of_queue(queues.get(queue, {}), queue, with_gpus) or with_gpus)
    one = chosen[0] if chosen else None
    lines = [
        *_cluster(server),
        *_nodes(chosen),
        *_request(queues.get(queue, {}), queue, others, one),
        *_gpus(one, rest),
        *(gpus.lines(one.model, f"pbsnodes: {one.model_by}") if one else ()),
    ]
    name, model = (one.name, one.model) if one else ("", "")
    return SiteSurvey(
        lines=lines,
        name=server.partition(".")[0],
        node=name,
        gpus=one.gpus if one else 0,
        models=model,
        of_network=[Line("start", questions=(PALS,))],
    )


# --- reading ------------------------------------------------------------------------------------------------


def parse(answer: str, begin: str = "") -> dict[str, dict[str, str]]:
    """Attributes by name: what a name has is indented below it; a line that goes on begins with a tab, or
    has no equals sign."""
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    last = ""
    for line in answer.splitlines():
        name, equals, value = line.strip().partition(" = ")
        if line[:1].strip():
            current, last = found.setdefault(line.strip().removeprefix(begin), {}), ""
        elif (line.startswith("\t") or not equals) and last:
            current[last] += line.strip()
        elif equals:
            current[name], last = value, name
    return found


def hosts(vnodes: Mapping[str, Attributes]) -> list[Host]:
    """The vnodes of a host together."""
    by_host: dict[str, list[Attributes]] = {}
    for name, attributes in vnodes.items():
        by_host.setdefault(attributes.get(f"{AVAILABLE}host", name), []).append(attributes)
    found = []
    for name, several in by_host.items():
        counted = next((each for each in COUNTED if _sum(several, each)), COUNTED[0])
        first = next((each for each in several if each.get(AVAILABLE + counted, "0") != "0"), several[0])
        model_by = next((key for key in first if key.startswith(AVAILABLE) and MODEL.search(key)), "")
        found.append(
            Host(
                name=name,
                gpus=_sum(several, counted),
                counted_by=counted,
                model=first.get(model_by, ""),
                model_by=model_by[len(AVAILABLE) :],
                cpus=_sum(several, "ncpus"),
                memory_gib=sum(limits.gib(each.get(f"{AVAILABLE}mem", "")) or 0 for each in several),
                is_whole=first.get("sharing", "").startswith(("default_excl", "force_excl")),
                is_up=any(not _is_down(each) for each in several),
                attributes=first,
            )
        )
    return found


def _is_down(vnode: Attributes) -> bool:
    return any(state.lower() in DOWN for state in _items(vnode.get("state", "")))


def _sum(several: Sequence[Attributes], resource: str) -> int:
    texts = (each.get(AVAILABLE + resource, "") for each in several)
    return sum(int(text) for text in texts if text.isdecimal())


# --- choosing -----------------------------------------------------------------------------------------------


def _choose(
    queues: Mapping[str, Attributes], with_gpus: Sequence[Host], default: str, *, all_have: bool
) -> tuple[str, Sequence[str]]:
    """(the queue that a first job asks for, others with GPUs); empty where none is known to have them.
    `all_have`: every host has GPUs."""
    open_ = [
        name
        for name, has in queues.items()
        if has.get("enabled", "True") == "True"
        and has.get("started", "True") == "True"
        and has.get("from_route_only", "False") != "True"
    ]
    sure = [name for name in open_ if _has_gpus(queues[name], name, with_gpus)]
    fit = sure or [name for name in open_ if NAMED.search(name.lower()) and not _has_none(queues[name])]
    if not fit and with_gpus and all_have:
        fit = open_
    if not fit:
        return "", open_

    def rank(name: str) -> tuple[object, ...]:
        has = queues[name]
        is_closed = "True" in (has.get("acl_user_enable"), has.get("acl_group_enable"))
        is_test = bool(limits.TESTING.search(name.lower()))
        return (not is_closed, not is_test, bool(NAMED.search(name.lower())), name == default)

    best = max(fit, key=rank)  # the first of equals
    return best, [name for name in fit if name != best]


def _has_gpus(has: Attributes, name: str, with_gpus: Sequence[Host]) -> bool:
    if _has_none(has):
        return False
    kinds = ("resources_min.", "resources_default.", "default_chunk.", "resources_max.", AVAILABLE)
    counts = (has.get(kind + resource, "0") for kind in kinds for resource in COUNTED)
    return any(text.isdecimal() and int(text) for text in counts) or bool(_of_queue(has, name, with_gpus))


def _has_none(has: Attributes) -> bool:
    return any(has.get(f"resources_max.{resource}") == "0" for resource in COUNTED)


def _of_queue(has: Attributes, name: str, with_gpus: Sequence[Host]) -> list[Host]:
    """The hosts that belong to the queue: by their attribute, or by a resource that its chunks ask for."""
    wanted = {
        key.partition(".")[2]: value
        for key, value in has.items()
        if key.startswith("default_chunk.") and not value[:1].isdecimal()
    }
    found = [host for host in with_gpus if name in _items(host.attributes.get("queue", ""))]
    if not found and wanted:
        found = [
            host
            for host in with_gpus
            if all(
                value in _items(host.attributes.get(AVAILABLE + resource, ""))
                for resource, value in wanted.items()
            )
        ]
    return found


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def _alike(found: Sequence[Host]) -> tuple[list[Host], list[str]]:
    """(the commonest hosts with the same GPUs, the others in words)."""
    kinds: dict[tuple[str, int], list[Host]] = {}
    for host in found:
        kinds.setdefault((host.model, host.gpus), []).append(host)
    if not kinds:
        return [], []
    best = max(kinds, key=lambda kind: (gpus.rank(kind[0]), len(kinds[kind]) * kind[1]))
    rest = [
        f"{len(several)} with {kind[1]} x {kind[0] or 'GPU'}"
        for kind, several in kinds.items()
        if kind != best
    ]
    return kinds[best], rest


# --- what follows -------------------------------------------------------------------------------------------


def _cluster(server: str) -> Iterator[Line]:
    yield Line("scheduler", "pbs", "qstat -Qf answers")
    if server:
        names = tuple(dict.fromkeys((server, server.partition(".")[0])))
        yield Line("clusters", names, "qstat -Bf: the server's name, which a job's id ends with")
    else:
        text = "what follows the number in a job's id? Jobs there then take this profile by themselves"
        yield Line("clusters", questions=(text,))


def _nodes(chosen: Sequence[Host]) -> Iterator[Line]:
    if not chosen:
        text = "pbsnodes shows no GPUs: how many has a node? Until then submit with --device cpu"
        yield Line("nodes.gpus", 0, "nothing is known", (text,))
        return
    one = chosen[0]
    down = "" if one.is_up else "; no host with GPUs is up"
    yield Line(
        "nodes.gpus",
        one.gpus,
        f"pbsnodes: {one.counted_by} of {counted(len(chosen), 'host')}, such as {one.name}{down}",
    )
    if cpus := min(host.cpus for host in chosen):
        yield Line("nodes.cpus", cpus, "pbsnodes: the least ncpus of these hosts")
    if all(host.is_whole for host in chosen):
        yield Line("nodes.whole", True, f"pbsnodes: sharing is {one.attributes['sharing']}")
    if memory := min(host.memory_gib for host in chosen):
        yield Line("nodes.memory_gib", memory, "pbsnodes: the least mem of these hosts")


def _request(has: Attributes, queue: str, others: Sequence[str], one: Host | None) -> Iterator[Line]:
    if queue:
        listed = ", ".join(others)
        asked = (f"is {queue} the right queue? With GPUs there are also: {listed}",) if others else ()
        sure = _has_gpus(has, queue, [one] if one else [])
        named = "its name" if NAMED.search(queue.lower()) else "all nodes have GPUs"
        belongs = "its resources, or its nodes have GPUs" if sure else named
        yield Line("request.partition", queue, f"qstat -Qf: {belongs}", asked)
    else:
        listed = f" There are: {', '.join(others)}" if others else ""
        yield Line("request.partition", questions=(f"which queue has the GPUs?{listed}",))
    yield Line(
        "request.account",
        questions=("does a job need a project? (with -P instead of -A: account_option: -P)",),
    )
    limit = has.get("resources_max.walltime", "")
    why = f"qstat -Qf: resources_max.walltime is {limit}" if limit else "no limit was found"
    yield Line("request.time", limits.asked(limit), why)


def _gpus(one: Host | None, rest: Sequence[str]) -> Iterator[Line]:
    if one is None:
        return
    questions = (
        f"there are other nodes too: {', '.join(rest)}: is {one.gpus} x {one.model or 'GPU'} right?",
    )
    named = (
        f":{one.model_by}={one.model}" if rest and one.model and not re.search(r"[\s:,+=]", one.model) else ""
    )
    word = f"{one.counted_by}={{gpus}}{named}"
    yield Line("request.gpus", word, f"pbsnodes: {AVAILABLE}{one.counted_by}", questions if rest else ())
