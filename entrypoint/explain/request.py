"""What a job script asks its scheduler for: `read` takes the #SBATCH and #PBS lines. A pure function.

Only what the traps and the same job as one of ours need is interpreted; each option is kept as it stands.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from entrypoint.core.frozen import dataclass
from entrypoint.schedulers import option_names as names

NONE = ""
OF_GPUS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "tres-per-task", "gpus-per-socket")
"""Options of Slurm that ask for GPUs; the first of them counts."""
OF_ALL_KINDS = ("gres", "tres-per-task")
"""They may ask for something else."""
NODES_OF_SLURM = re.compile(r"\$\{?SLURM_(?:NNODES|JOB_NUM_NODES)\}?")
_PYXIS_FLAG = re.compile(
    r"no-container-\S+|container-(?:mount-home|remap-root|writable|readonly|entrypoint|entrypoint-log)"
)
"""Options that pyxis adds to srun and sbatch, and that take no value."""
_NEXT_COMPONENT = ("hetjob", "packjob")
"""Words of #SBATCH between the components of a heterogeneous job."""
_GPUS_OF_CHUNK = re.compile(r"\b(?:ngpus|gpus|naccelerators)=(\d{1,4})\b")
_PARTS = re.compile(r"""(?:"[^"]*"|'[^']*'|[^,])+""")
"""Resources of one -l, between commas that are not in quotes."""


@dataclass(frozen=True)
class AskedOption:
    name: str
    """The long name, the first if there are two; of PBS the letter, or for -l the resource."""
    value: str
    line: int


@dataclass(frozen=True)
class ScriptRequest:
    scheduler: str
    """slurm or pbs; empty for a script that asks for nothing."""
    options: tuple[AskedOption, ...]
    late: tuple[int, ...]
    """Lines that look like a request, and stand behind the first command."""
    others: tuple[ScriptRequest, ...] = ()
    """Of a heterogeneous job, what its further components ask."""

    def find(self, *names: str) -> AskedOption | None:
        """The last of these: it is the one that counts."""
        return next((one for one in reversed(self.options) if one.name in names), None)

    def number(self, *names: str) -> int | None:
        found = self.find(*names)
        return (
            int(found.value)
            if found and found.value.isascii() and found.value.isdigit() and len(found.value) < 9
            else None
        )

    @property
    def nodes(self) -> int | None:
        """None where it is not known."""
        if self.scheduler == "pbs":
            select = self.find("select")
            if select is None:
                return self.number("nodes") or (1 if self.options and not self.has_totals else None)
            counts = [chunk.partition(":")[0] for chunk in select.value.split("+")]
            return sum(int(one) for one in counts if one.isascii() and one.isdigit() and len(one) < 7) or None
        number = self.number("nodes")
        if number is None and self.scheduler == "slurm" and self.find("nodes") is None:
            tasks, per_node = self.number("ntasks"), self.number("ntasks-per-node")
            return -(-tasks // per_node) if tasks and per_node else (1 if tasks in (None, 1) else None)
        return number

    @property
    def has_totals(self) -> bool:
        """Whether PBS is asked by sizes alone. They are of one node, or of all nodes together at a site such
        as clusters/gadi.yaml."""
        return self.find("select", "nodes") is None and self.find("ncpus", "ngpus") is not None

    @property
    def tasks_per_node(self) -> int | None:
        """Of Slurm; None where it is not known."""
        if (asked := self.number("ntasks-per-node")) is not None:
            return asked
        total = self.find("ntasks")
        if total is None and self.find("ntasks-per-node") is None:
            return 1 if self.scheduler == "slurm" else None
        if total and NODES_OF_SLURM.fullmatch(total.value):
            return 1
        tasks, nodes = self.number("ntasks"), self.nodes
        return -(-tasks // nodes) if tasks is not None and nodes else None

    @property
    def gpus_per_node(self) -> int | None:
        """None where it is not known, 0 where none is asked for."""
        if self.scheduler == "pbs":
            select = self.find("select")
            counts = set(_GPUS_OF_CHUNK.findall(select.value)) if select else set()
            other = self.number("ngpus")
            if len(counts) > 1:
                return None
            if counts or not other:
                return int(counts.pop()) if counts else 0
            return None if self.has_totals else other
        for name in OF_GPUS:
            option = self.find(name)
            if option is None:
                continue
            if name in OF_ALL_KINDS and "gpu" not in option.value:
                continue
            if name == "gpus-per-socket":
                return None
            value = option.value[option.value.index("gpu") :] if name in OF_ALL_KINDS else option.value
            if "$" in value:
                return None
            found = re.search(r"(?:^|:|=)(\d{1,4})(?:$|[(,])", value)
            count = int(found[1]) if found else 1
            if name == "gpus":
                return count // self.nodes if self.nodes else None
            if name in ("gpus-per-task", "tres-per-task"):
                return count * self.tasks_per_node if self.tasks_per_node else None
            return count
        return 0 if self.scheduler else None

    @property
    def is_exclusive(self) -> bool:
        """Whether nobody else has the nodes."""
        place = self.find("place")
        exclusive = self.find("exclusive")
        return (place is not None and "excl" in place.value) or (
            exclusive is not None and exclusive.value in ("", "true")
        )


def read(lines: Sequence[str]) -> ScriptRequest:
    """Of the lines of a script."""
    options: list[AskedOption] = []
    components = [options]
    late: list[int] = []
    scheduler, over = "", False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        is_slurm = line.startswith("#SBATCH")
        if is_slurm or line.startswith("#PBS"):
            if over:
                late.append(number)
                continue
            scheduler = scheduler or ("slurm" if is_slurm else "pbs")
            if (scheduler == "slurm") == is_slurm:
                words = _words(line[7 if is_slurm else 4 :])
                if is_slurm and words and words[0] in _NEXT_COMPONENT:
                    options = []
                    components.append(options)
                options += slurm(words, number) if is_slurm else _pbs(words, number)
        elif text and not text.startswith("#"):
            over = True
    first, *others = [ScriptRequest(scheduler, tuple(one), tuple(late)) for one in components]
    return replace(first, others=tuple(others))


def _words(text: str) -> list[str]:
    """Without what stands behind a #."""
    try:
        return shlex.split(text[:4000], comments=True)
    except ValueError:
        return text.partition(" #")[0].split()


def slurm(words: Sequence[str], line: int) -> list[AskedOption]:
    """Options of sbatch or srun, up to the first word that is none."""
    found = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = names.SRUN_SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = value
        if not equals and _takes_value(name) and rest:
            value = rest.pop(0)
        found.append(AskedOption(names.SLURM_SECOND_NAMES.get(name, name), value, line))
    return found


def _takes_value(name: str) -> bool:
    """Whether the next word is the value of this option of sbatch or srun."""
    return name not in names.SRUN_BARE and _PYXIS_FLAG.fullmatch(name) is None


def words_behind(words: Sequence[str]) -> int:
    """How many of these are srun's own options with their values."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        word = words[at]
        at += 1
        name = word[2:].partition("=")[0] if word.startswith("--") else names.SRUN_SHORT.get(word[1], word[1])
        has_value = "=" in word if word.startswith("--") else len(word) > 2
        if not has_value and _takes_value(name):
            at += 1
    return min(at, len(words))


def _pbs(words: Sequence[str], line: int) -> list[AskedOption]:
    found = []
    rest = list(words)
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        word = rest.pop(0)
        letter, value = word[1], word[2:]
        if not value and rest and letter not in (*names.QSUB_FLAGS, "h", "x"):
            value = rest.pop(0)
        if letter != "l":
            found.append(AskedOption(letter, value, line))
            continue
        for part in _PARTS.findall(value):
            name, _, text = part.partition("=")
            if name == "nodes":
                gpus = set(_GPUS_OF_CHUNK.findall(text))
                if len(gpus) == 1 and "+" not in text:
                    found.append(AskedOption("ngpus", gpus.pop(), line))
                found.append(AskedOption("nodes", text.partition(":")[0], line))
            else:
                found.append(AskedOption(name, text, line))
    return found
