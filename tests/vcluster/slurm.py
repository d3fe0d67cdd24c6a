"""How Slurm is configured on the test cluster. It writes all its configuration files.

Values follow what sites have. Where they do not, the reason is a namespace on one machine: a node offers more CPUs
and memory than there are, no process is bound to a CPU, and timeouts are short.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from tests.vcluster.layout import MANAGEMENT, MEMBERS, Member

Proctrack = Literal["linuxproc", "cgroup"]

FOLDER = "/etc/slurm"
LOGS = "/var/log/slurm"
SETTINGS: Mapping[str, str] = {
    "ClusterName": "testbed",
    "SlurmUser": "slurm",
    "AuthType": "auth/munge",
    "StateSaveLocation": "/var/spool/slurmctld",
    "SlurmdSpoolDir": "/var/spool/slurmd",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmctldLogFile": f"{LOGS}/slurmctld.log",
    "SlurmdLogFile": f"{LOGS}/%h.log",
    "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "DefMemPerCPU": "1024",
    "GresTypes": "gpu",
    "SlurmdParameters": "config_overrides",  # a node may claim more than the machine has
    "NodeName": "DEFAULT CPUs=32 Sockets=2 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=262144",
    "PropagateResourceLimits": "NONE",  # root may lack the capability to raise limits
    "ReturnToService": "2",  # a node that comes back is used again, whatever took it down
    "SlurmdTimeout": "30",
    "KillWait": "30",
    "UnkillableStepTimeout": "600",  # a process that waits for a slow disk drains no node
    "MinJobAge": "86400",  # without a database, the controller's memory tells how a job ended
    "JobCompType": "jobcomp/filetxt",
    "JobCompLoc": f"{LOGS}/jobs.log",
    "MailProg": "/bin/true",
}
TRACKING: Mapping[Proctrack, Mapping[str, str]] = {
    "linuxproc": {"ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none"},
    "cgroup": {"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup"},
}
CONTROLLERS: Mapping[Proctrack, Sequence[str]] = {"linuxproc": (), "cgroup": ("freezer", "devices")}
"""The cgroup hierarchies that a node needs."""
CGROUP_CONF: Mapping[Proctrack, str] = {
    "linuxproc": "CgroupPlugin=disabled\n",
    "cgroup": "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\n",
}
GPU = "a100"


def files(proctrack: Proctrack, settings: Mapping[str, str]) -> dict[str, str]:
    """The files of /etc/slurm, the same on all hosts; `settings` come after, and instead of, those above."""
    return {
        "slurm.conf": _slurm_conf({**SETTINGS, **TRACKING[proctrack], **settings}),
        "gres.conf": _gres_conf(),
        "cgroup.conf": CGROUP_CONF[proctrack],
    }


def changed(slurm_conf: str, settings: Mapping[str, str]) -> str:
    """The text of slurm.conf with these lines instead of those that set the same."""
    kept = [line for line in slurm_conf.splitlines() if line.partition("=")[0] not in settings]
    return "".join(f"{line}\n" for line in [*kept, *(f"{name}={value}" for name, value in settings.items())])


def _slurm_conf(settings: Mapping[str, str]) -> str:
    controller = next(member for member in MEMBERS if member.role == "controller")
    compute = [member for member in MEMBERS if member.role == "compute"]
    lines = [f"SlurmctldHost={controller.name}({controller.v4(MANAGEMENT)})"]
    lines += [f"{name}={value}" for name, value in settings.items()]
    lines += [_node(member) for member in compute]
    partitions = {
        "gpu": ([member for member in compute if member.gpus], " Default=YES"),
        "cpu": ([member for member in compute if not member.gpus], ""),
        "all": (compute, ""),
    }
    for name, (members, default) in partitions.items():
        nodes = ",".join(member.name for member in members)
        lines.append(f"PartitionName={name} Nodes={nodes}{default} DefaultTime=01:00:00 MaxTime=1-0 State=UP")
    return "".join(f"{line}\n" for line in lines)


def _node(member: Member) -> str:
    gres = f" Gres=gpu:{GPU}:{member.gpus}" if member.gpus else ""
    # By address: what a test does to names must not reach Slurm's own traffic.
    return f"NodeName={member.name} NodeAddr={member.v4(MANAGEMENT)}{gres} State=UNKNOWN"


def _gres_conf() -> str:
    lines = [
        f"NodeName={member.name} Name=gpu Type={GPU} File=/dev/nvidia[0-{member.gpus - 1}]"
        for member in MEMBERS
        if member.gpus
    ]
    return "".join(f"{line}\n" for line in ["AutoDetect=off", *lines])
