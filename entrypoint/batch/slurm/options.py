"""The options of sbatch for a submission by us, and which of them ask for the same thing. Those of other
releases, and of a site's plugins, go through `--options`. Runs with Python 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from entrypoint.batch.native import NativeOption, OptionTable
from entrypoint.schedulers import option_names as names

LONG: Final = {f"-{short}": f"--{long}" for short, long in names.SBATCH_SHORT.items()}
SECOND: Final = {f"--{name}": f"--{first}" for name, first in names.SLURM_SECOND_NAMES.items()}
FLAGS: Final = tuple(f"--{name}" for name in names.SBATCH_FLAGS)
OPTIONAL: Final = tuple(f"--{name}" for name in names.SBATCH_OPTIONAL)
VALUED: Final = tuple(f"--{name}" for name in names.SBATCH_VALUED)
_RANKS = "the ranks of a node are --nproc-per-node N, or tasks with --ntasks-per-node N"
TABLE: Final = OptionTable(
    program="sbatch",
    valued=(*VALUED, *(short for short, long in LONG.items() if long in VALUED)),
    optional=OPTIONAL,
    flags=(*FLAGS, *(short for short, long in LONG.items() if long not in VALUED)),
    long={**LONG, **SECOND},
    refused={
        "--wrap": "our script starts CMD: -- my_script.py, or --no-python -- PROGRAM",
        "--chdir": "a job runs where it is submitted: cd to that folder, and submit there",
        **dict.fromkeys(("--ntasks", "--ntasks-per-gpu", "--ntasks-per-socket"), _RANKS),
        "--ntasks-per-core": _RANKS,
        **dict.fromkeys(("--container", "--container-id"), "the image is given with --image FILE"),
        "--nodefile": "nodes are named with --nodelist NAMES, and counted with --nodes N",
    },
    called={
        "-l": "--gres, --licenses or --constraint",
        "-P": "--account NAME",
        "-I": "salloc, and in it bash slurm/multinode.sbatch",
        **dict.fromkeys(("-j", "-R"), "--output FILE"),
        "-r": "--requeue or --no-requeue",
        "-V": "nothing, as all variables pass",
        "--storage": "--bind /PATH",
        "--env": "--pass NAME, or --export=ALL,NAME=VALUE",
    },
)
GROUPS: Final = (
    (
        "--gpus-per-node",
        "--gpus",
        "--gpus-per-task",
        "--gpus-per-socket",
        "--gres gpu",
        "--tres-per-task gpu",
    ),
    ("--mem", "--mem-per-cpu", "--mem-per-gpu"),
    ("--cpus-per-task", "--cpus-per-gpu"),
    ("--exclusive", "--oversubscribe"),
)
"""Options that ask for the same in several ways, of which sbatch takes one. The first is the job script's."""
LISTS: Final = ("--gres", "--tres-per-task")
"""Options whose value is a list. sbatch takes the last one alone, whatever the others ask for."""


def replaces(new: NativeOption, old: NativeOption) -> bool:
    """As native.Replaces says."""
    if not new.name:
        return False
    return kind(new) == kind(old) or group(new) == group(old) != ()


def group(option: NativeOption) -> tuple[str, ...]:
    return next((names for names in GROUPS if kind(option) in names), ())


def kind(option: NativeOption) -> str:
    """Its name, and of generic resources whether they are GPUs."""
    if option.name in LISTS and re.search(r"\bgpu\b", option.value):
        return f"{option.name} gpu"
    return option.name


def joined(options: Sequence[NativeOption]) -> list[NativeOption]:
    """With one option of each of `LISTS`, where the first stood."""
    found: list[NativeOption] = []
    for option in options:
        names = [each.name for each in found]
        if option.name not in LISTS or option.name not in names:
            found.append(option)
            continue
        at = names.index(option.name)
        value = f"{found[at].value},{option.value}"
        found[at] = NativeOption(option.name, value, (f"{option.name}={value}",))
    return found
