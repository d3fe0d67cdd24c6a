"""The options of qsub for a submission by us, and which of them ask for the same thing. Runs with Python
3.9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from entrypoint.batch.native import NativeOption, OptionTable
from entrypoint.schedulers import option_names as names

TABLE: Final = OptionTable(
    program="qsub",
    valued=tuple(f"-{letter}" for letter in names.QSUB_VALUED),
    optional=(),
    flags=tuple(f"-{letter}" for letter in names.QSUB_FLAGS),
    refused={
        "-C": "our script's lines begin with #PBS: leave it out",
        "-S": "the job script is for bash: leave it out",
        **dict.fromkeys(
            ("-I", "-X", "-G"), "qsub -I by itself, and in that job bash pbs/multinode.pbs -- CMD"
        ),
        "-z": "without the job's id nobody finds it again: leave it out",
    },
    called={
        "--array": "-J RANGE",
        "--job-name": "-N NAME",
        "--mail-user": "-M USER",
        "--mail-type": "-m EVENTS",
        "--dependency": "-W depend=afterok:JOB",
        **dict.fromkeys(("--qos", "--reservation"), "-q QUEUE"),
        "--output": "-o FILE",
        "--error": "-e FILE",
        "--begin": "-a TIME",
        "--export": "-v NAME=VALUE, or --pass NAME",
        "--env": "--pass NAME, or -v NAME=VALUE",
        "--storage": "-l storage=NAME",
        "--requeue": "-r y",
        "--no-requeue": "-r n",
        "--gres": "--gpus-per-node N",
        **dict.fromkeys(
            ("--mem", "--cpus-per-task", "--constraint", "--nodelist", "--ntasks-per-node"),
            "a resource of -l or of its select=, whichever --dry-run shows",
        ),
    },
)
LISTS: Final = ("-l", "-W")
"""Options that are given several times, each time for something else."""


def separated(options: Sequence[NativeOption]) -> list[NativeOption]:
    """With one resource in each `-l`, where the commas that separate them are sure to."""
    found = []
    for option in options:
        parts = option.value.split(",")
        is_list = option.name == "-l" and len(parts) > 1 and all("=" in part for part in parts)
        if not is_list or set(option.value) & set("\"'"):
            found.append(option)
            continue
        found += [NativeOption("-l", part, ("-l", part)) for part in parts]
    return found


def replaces(new: NativeOption, old: NativeOption) -> bool:
    """As native.Replaces says."""
    if new.name in ("", "-v") or new.name != old.name:
        return False
    if new.name not in LISTS:
        return True
    one, other = (option.value.partition("=")[0] for option in (new, old))
    is_whole = new.name == "-l" and one in names.QSUB_SIZES[:2]
    return one == other or (is_whole and (other in names.QSUB_SIZES or (one, other) == ("nodes", "place")))
