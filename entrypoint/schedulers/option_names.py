"""The names of the options of sbatch, srun and qsub, and which of them take a value. Runs with Python 3.9.

Those of sbatch are as its own parser takes them (24.11), asked option by option: tests/cluster/test_slurm.py
does it again. Those of qsub are as the manual page and the parser of OpenPBS have them (23.06).
"""

from __future__ import annotations

from typing import Final

_PAIRS = """
    a=array A=account b=begin B=extra-node-info c=cpus-per-task C=constraint d=dependency D=chdir e=error
    F=nodefile G=gpus i=input J=job-name L=licenses m=distribution M=clusters n=ntasks N=nodes o=output
    p=partition q=qos S=core-spec t=time w=nodelist x=exclude H=hold k=no-kill O=overcommit Q=quiet
    s=oversubscribe v=verbose W=wait
"""
SBATCH_SHORT: Final = {pair[0]: pair[2:] for pair in _PAIRS.split()}
SBATCH_FLAGS: Final = (
    *("contiguous", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe"),
    *("parsable", "quiet", "reboot", "requeue", "spread-job", "stepmgr", "test-only"),
    *("use-min-nodes", "verbose", "wait"),
)
SBATCH_OPTIONAL: Final = (
    *("exclusive", "get-user-env", "nice", "no-kill", "oom-kill-step", "propagate"),
    "resv-ports",
)
SBATCH_VALUED: Final = (
    *("account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir"),
    *("cluster-constraint", "clusters", "comment", "constraint", "container", "container-id"),
    *("core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline"),
    *("delay-boot", "dependency", "distribution", "error", "exclude", "export", "export-file"),
    *("extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node"),
    *("gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input", "job-name"),
    *("kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem"),
    *("mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist"),
    *("nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node"),
    *("ntasks-per-socket", "open-mode", "output", "partition", "prefer", "priority"),
    *("profile", "qos", "reservation", "segment", "signal", "sockets-per-node", "switches"),
    "tasks-per-node",
    *("thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind"),
    *("tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap"),
)
SLURM_SECOND_NAMES: Final = {"tasks-per-node": "ntasks-per-node"}
"""Of sbatch and srun: options that have another name as well."""
SRUN_SHORT: Final = {**SBATCH_SHORT, "K": "kill-on-bad-exit", "l": "label", "u": "unbuffered"}
SRUN_BARE: Final = frozenset(
    {
        *(name for name in (*SBATCH_FLAGS, *SBATCH_OPTIONAL) if name != "wait"),
        *(
            "kill-on-bad-exit",
            "label",
            "unbuffered",
            "overlap",
            "exact",
            "multi-prog",
            "pty",
            "disable-status",
        ),
    }
)
"""Of sbatch and srun: their value, if they have one, stands behind a `=`. `--wait` has one with srun."""
QSUB_VALUED: Final = "aAcCejJklmMNopPqrRSuvW"
QSUB_FLAGS: Final = "fGIVXz"
QSUB_SIZES: Final = ("select", "nodes", "ncpus", "ngpus", "mem", "mpiprocs", "ompthreads")
"""Resources that say how large a job is. qsub takes the first two beside none of the others."""
