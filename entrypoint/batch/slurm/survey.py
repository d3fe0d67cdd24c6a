"""Reads a site's nodes and partitions from sinfo and scontrol, and chooses a partition. `survey` is the
entry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from entrypoint.batch.survey import gpus, limits
from entrypoint.batch.survey.answer import SiteSurvey
from entrypoint.batch.survey.ask import LoginNode
from entrypoint.batch.survey.draft import Line
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.plan.profile import ARCHITECTURES
from entrypoint.schedulers.hostlist import expand

FORMAT = "%P %a %l %D %c %m %h %G %N"
"""Partition, state, time limit, nodes; of each its CPUs, MB, sharing and resources; their names."""
NO_GRES = (
    "sinfo shows no GPUs (GRES {}): have the nodes of {} any that Slurm does not count, or those of another "
    "partition? Then write `nodes: {{gpus: N, whole: true}}` and `request: {{nodes_only: true}}`. Until then "
    "submit with --device cpu"
)
DRIVER = "which NVIDIA driver have the nodes (nvidia-smi)? On {} each stack needs 580 or newer"
NO_MEMORY = "how much memory has a node? sinfo does not say, and without this a job asks for 32 GiB"
OF_GPUS = re.compile(
    r"(^|[-_])(gpu|acc|cuda|gh|gh200|gb200|[ahbv][1-3]00|p100|l40s?|t4|rtx)s?[0-9x]*($|[-_])", re.IGNORECASE
)
"""The name of a partition whose nodes have GPUs, at a site that does not count them."""
WITHOUT = (19, 5)
"""The first version of Slurm whose sbatch knows --gpus-per-node."""


@dataclass(frozen=True)
class Group:
    """Nodes of one partition that are alike."""

    partition: str
    is_default: bool
    is_up: bool
    limit: str
    """Of its time, as Slurm spells it."""
    nodes: int
    cpus: int
    memory_mb: int
    sharing: str
    model: str
    """Of the GPUs; empty: not named."""
    gpus: int
    """Of this model, on one node."""
    is_mixed: bool
    """Whether a node has GPUs of other models, too."""
    names: str
    resources: str = ""
    """As sinfo has them."""

    def __str__(self) -> str:
        what = f"{self.gpus} x {self.model or 'GPU'}" if self.gpus else "no GPU"
        return f"{counted(self.nodes, 'node')} with {what}"


def survey(machine: LoginNode) -> SiteSurvey:
    """What Slurm says. Raises BadInput where sinfo does not answer."""
    groups = parse(machine.ask("sinfo", "--noheader", "--exact", f"--format={FORMAT}"))
    if not groups:
        raise BadInput("site-no-partitions", f"{machine.told[-1]}: ask again where sinfo lists partitions")
    config = _settings(machine.ask("scontrol", "show", "config"))
    chosen = _choose(groups)
    node = _first(chosen)
    details = dict(
        re.findall(
            r"(\w+)=(\S*)", machine.ask("scontrol", "--oneliner", "show", "node", node) if node else ""
        )
    )
    source = "sinfo"
    lines = [
        *_cluster(config),
        *_nodes(chosen, details, config, node),
        *_request(groups, chosen, config),
        *(gpus.lines(chosen[0].model, source) if chosen[0].gpus else ()),
    ]
    return SiteSurvey(
        lines=lines,
        name=config.get("ClusterName", ""),
        node=node,
        switch=config.get("SwitchType", ""),
        gpus=chosen[0].gpus,
        models=chosen[0].model,
    )


# --- reading ------------------------------------------------------------------------------------------------


def parse(answer: str) -> list[Group]:
    """Each line of sinfo. A node with GPUs of several models, or slices of some, counts as its best."""
    found = []
    for line in answer.splitlines():
        words = line.split()
        if len(words) < 8 or not words[3].isdecimal() or not int(words[3]):
            continue
        cards = resources(words[7])
        model = max(cards, key=lambda each: (gpus.rank(each), cards[each]), default="")
        found.append(
            Group(
                partition=words[0].rstrip("*"),
                is_default=words[0].endswith("*"),
                is_up=words[1] == "up",
                limit=words[2],
                nodes=int(words[3]),
                cpus=_number(words[4]),
                memory_mb=_number(words[5]),
                sharing=words[6],
                model=model,
                gpus=cards.get(model, 0),
                is_mixed=len(cards) > 1,
                names=words[8] if len(words) > 8 else "",
                resources=words[7],
            )
        )
    return found


def resources(gres: str) -> dict[str, int]:
    """GPUs by model, of gpu:a100:4(S:0-1),gpu:v100:2,nvme:1; the model is empty where it is not named."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = item.split(":")
        if name != "gpu":
            continue
        count = int(rest.pop()) if rest and rest[-1].isdecimal() else 1
        model = rest[0] if rest else ""
        found[model] = found.get(model, 0) + count
    return {model: count for model, count in found.items() if count}


def _number(text: str) -> int:
    """sinfo has a + behind the least of several."""
    digits = text.rstrip("+")
    return int(digits) if digits.isdecimal() else 0


def _settings(answer: str) -> Mapping[str, str]:
    return {name: value.strip() for name, value in re.findall(r"(?m)^(\S+) *= *(.*)$", answer)}


# --- choosing -----------------------------------------------------------------------------------------------


def _choose(groups: Sequence[Group]) -> list[Group]:
    """The alike nodes that a first job asks for: of one partition, with the same GPUs, the commonest."""
    best = max(
        groups,
        key=lambda one: (
            bool(one.gpus),
            not one.gpus and bool(OF_GPUS.search(one.partition)),
            one.is_up,
            gpus.rank(one.model),
            one.is_default,
            not limits.TESTING.search(one.partition.lower()),
            sum(other.gpus * other.nodes for other in groups if other.partition == one.partition),
            one.nodes,
        ),
    )
    same = [one for one in groups if one.partition == best.partition]
    kinds: dict[tuple[str, int], int] = {}
    for one in same:
        kinds[one.model, one.gpus] = kinds.get((one.model, one.gpus), 0) + one.nodes
    fit = [kind for kind in kinds if bool(kind[1]) == bool(best.gpus)]
    kind = max(fit, key=lambda each: (gpus.rank(each[0]), kinds[each] * max(1, each[1])))
    return [one for one in same if (one.model, one.gpus) == kind]


def _first(chosen: Sequence[Group]) -> str:
    try:
        return expand(chosen[0].names, "sinfo")[0] if chosen[0].names else ""
    except BadInput:
        return ""


# --- what follows -------------------------------------------------------------------------------------------


def _cluster(config: Mapping[str, str]) -> Iterator[Line]:
    yield Line("scheduler", "slurm", "sinfo answers")
    if name := config.get("ClusterName", ""):
        yield Line("clusters", (name,), "scontrol show config: ClusterName")
    else:
        text = (
            "what is ClusterName in `scontrol show config`? Jobs there then take this profile by themselves"
        )
        yield Line("clusters", questions=(text,))


def _nodes(
    chosen: Sequence[Group], details: Mapping[str, str], config: Mapping[str, str], node: str
) -> Iterator[Line]:
    one = chosen[0]
    alike = counted(sum(each.nodes for each in chosen), "such node")
    yield Line("nodes.gpus", one.gpus, f"sinfo: {alike} in {one.partition}")
    yield from _processor(details, node)
    cpus, memory = min(each.cpus for each in chosen), min(each.memory_mb for each in chosen)
    why = "sinfo: the least of these nodes"
    if details.get("CPUEfctv", "").isdecimal() and int(details["CPUEfctv"]) < cpus:
        cpus, why = int(details["CPUEfctv"]), f"scontrol show node {node}: CPUEfctv"
    if cpus:
        yield Line("nodes.cpus", cpus, why)
    if one.sharing.startswith("EXCLUSIVE"):
        yield Line(
            "nodes.whole", True, "sinfo: the partition's nodes are EXCLUSIVE; all memory comes with them"
        )
        return
    why = "sinfo: the least of these nodes"
    if details.get("MemSpecLimit", "").isdecimal():
        memory -= int(details["MemSpecLimit"])
        why += f", without MemSpecLimit of scontrol show node {node}"
    most = config.get("MaxMemPerNode", "")
    if most.isdecimal() and 0 < int(most) < memory:
        memory, why = int(most), "scontrol show config: MaxMemPerNode"
    if memory >= 2048:
        yield Line("nodes.memory_gib", memory // 1024, why)
    else:
        yield Line("nodes.memory_gib", questions=(NO_MEMORY,))


def _processor(details: Mapping[str, str], node: str) -> Iterator[Line]:
    """The kind of processor, if it is not the usual one here and there."""
    kind = details.get("Arch", "")
    if kind not in ARCHITECTURES or kind == os.uname().machine == ARCHITECTURES[0]:
        return
    yield Line("nodes.architecture", kind, f"scontrol show node {node}: Arch")
    if kind != ARCHITECTURES[0]:
        yield Line("nodes.driver", questions=(DRIVER.format(kind),))


def _request(groups: Sequence[Group], chosen: Sequence[Group], config: Mapping[str, str]) -> Iterator[Line]:
    one = chosen[0]
    others = _others(groups, one)
    asked = (f"is {one.partition} the right partition? With GPUs there are also: {'; '.join(others)}",)
    if not one.gpus:
        asked = (NO_GRES.format(one.resources, one.partition),)
    why = "sinfo: the default, " if one.is_default else "sinfo: "
    state = "" if one.is_up else ", which is not up"
    yield Line(
        "request.partition", one.partition, f"{why}{one}{state}", asked if others or not one.gpus else ()
    )
    enforced = config.get("AccountingStorageEnforce", "")
    if "associations" in enforced or "limits" in enforced:
        text = f"does a job need an account? (AccountingStorageEnforce={enforced}; `sacctmgr show assoc`)"
        yield Line("request.account", questions=(text,))
    elif not config:
        yield Line("request.account", questions=("does a job need an account?",))
    yield Line("request.time", limits.asked(one.limit), f"sinfo: the partition's limit is {one.limit}")
    yield from _gpus(groups, one, config)


def _others(groups: Sequence[Group], one: Group) -> list[str]:
    found: dict[str, list[Group]] = {}
    for each in groups:
        if each.gpus and each.is_up and each.partition != one.partition:
            found.setdefault(each.partition, []).append(each)
    return [f"{name} ({', '.join(map(str, several))}, {several[0].limit})" for name, several in found.items()]


def _gpus(groups: Sequence[Group], one: Group, config: Mapping[str, str]) -> Iterator[Line]:
    """How GPUs are asked for. --gpus-per-node is the profile's own way."""
    if not one.gpus:
        return
    same = [each for each in groups if each.partition == one.partition and each.gpus]
    rest = [str(each) for each in same if (each.model, each.gpus) != (one.model, one.gpus)]
    questions = (f"{one.partition} has other nodes too: {', '.join(rest)}: is {one} right?",) if rest else ()
    several = one.model and (one.is_mixed or len({each.model for each in same}) > 1)
    model = f"{one.model}:" if several else ""
    version = tuple(map(int, re.findall(r"\d+", config.get("SLURM_VERSION", ""))[:2]))
    plugin = config.get("SelectType", "select/cons_tres")
    if plugin != "select/cons_tres" or (version and version < WITHOUT):
        why = f"scontrol show config: {plugin}, SLURM_VERSION {config.get('SLURM_VERSION', 'unknown')}"
        yield Line("request.gpus", f"--gres=gpu:{model}{{gpus}}", why, questions)
        yield Line(
            "request.form", "wrapped", "this Slurm may refuse --gpus-per-node, which the job script has"
        )
    elif several:
        yield Line("request.gpus", f"--gpus-per-node={model}{{gpus}}", "sinfo: GRES", questions)
    else:
        yield Line(
            "request.gpus",
            "--gpus-per-node={gpus}",
            "scontrol show config: SelectType" if config else "the usual way",
            questions,
        )
