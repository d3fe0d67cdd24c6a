"""The options of sbatch, as its own parser takes them (24.11), and which of them ask for the same thing.

Which take a value was asked of sbatch itself, option by option: tests/cluster/test_slurm.py does it again.
Those of other releases, and of a site's plugins, go through `--options`. Runs with Python 3.9.
"""

from __future__ import annotations

import re
from typing import Final

from entrypoint.batch.native import NativeOption, OptionTable

_PAIRS = """
    a=array A=account b=begin B=extra-node-info c=cpus-per-task C=constraint d=dependency D=chdir e=error
    F=nodefile G=gpus i=input J=job-name L=licenses m=distribution M=clusters n=ntasks N=nodes o=output
    p=partition q=qos S=core-spec t=time w=nodelist x=exclude H=hold k=no-kill O=overcommit Q=quiet
    s=oversubscribe v=verbose W=wait
"""
LONG: Final = {f"-{pair[0]}": f"--{pair[2:]}" for pair in _PAIRS.split()}
FLAGS: Final = (
    *("--contiguous", "--hold", "--ignore-pbs", "--no-requeue", "--overcommit", "--oversubscribe"),
    *("--parsable", "--quiet", "--reboot", "--requeue", "--spread-job", "--stepmgr", "--test-only"),
    *("--use-min-nodes", "--verbose", "--wait"),
)
OPTIONAL: Final = (
    *("--exclusive", "--get-user-env", "--nice", "--no-kill", "--oom-kill-step", "--propagate"),
    "--resv-ports",
)
VALUED: Final = (
    *("--account", "--acctg-freq", "--array", "--batch", "--bb", "--bbf", "--begin", "--chdir"),
    *("--cluster-constraint", "--clusters", "--comment", "--constraint", "--container", "--container-id"),
    *("--core-spec", "--cores-per-socket", "--cpu-freq", "--cpus-per-gpu", "--cpus-per-task", "--deadline"),
    *("--delay-boot", "--dependency", "--distribution", "--error", "--exclude", "--export", "--export-file"),
    *("--extra", "--extra-node-info", "--gid", "--gpu-bind", "--gpu-freq", "--gpus", "--gpus-per-node"),
    *("--gpus-per-socket", "--gpus-per-task", "--gres", "--gres-flags", "--hint", "--input", "--job-name"),
    *("--kill-on-invalid-dep", "--licenses", "--mail-type", "--mail-user", "--mcs-label", "--mem"),
    *("--mem-bind", "--mem-per-cpu", "--mem-per-gpu", "--mincpus", "--network", "--nodefile", "--nodelist"),
    *("--nodes", "--ntasks", "--ntasks-per-core", "--ntasks-per-gpu", "--ntasks-per-node"),
    *("--ntasks-per-socket", "--open-mode", "--output", "--partition", "--prefer", "--priority"),
    *("--profile", "--qos", "--reservation", "--segment", "--signal", "--sockets-per-node", "--switches"),
    *("--thread-spec", "--threads-per-core", "--time", "--time-min", "--tmp", "--tres-bind"),
    *("--tres-per-task", "--uid", "--wait-all-nodes", "--wckey", "--wrap"),
)
_RANKS = "the ranks of a node are --nproc-per-node N, or tasks with --ntasks-per-node N"
TABLE: Final = OptionTable(
    program="sbatch",
    valued=(*VALUED, *(short for short, long in LONG.items() if long in VALUED)),
    optional=OPTIONAL,
    flags=(*FLAGS, *(short for short, long in LONG.items() if long not in VALUED)),
    long=LONG,
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


def replaces(new: NativeOption, old: NativeOption) -> bool:
    """As native.Replaces says."""
    if not new.name:
        return False
    return kind(new) == kind(old) or group(new) == group(old) != ()


def group(option: NativeOption) -> tuple[str, ...]:
    return next((names for names in GROUPS if kind(option) in names), ())


def kind(option: NativeOption) -> str:
    """Its name, and of generic resources whether they are GPUs."""
    if option.name in ("--gres", "--tres-per-task") and re.search(r"\bgpu\b", option.value):
        return f"{option.name} gpu"
    return option.name
