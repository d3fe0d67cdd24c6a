"""What the controller says about a job and the nodes. The only module that reads the output of Slurm's commands."""

import json
from dataclasses import dataclass
from typing import Any, Unpack

from tests.host import As, Host, Refused

ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"TIMEOUT"}
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the controller remembers it."""

    id: int
    state: str
    """As `squeue` has it: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, NODE_FAIL ..."""
    reason: str
    """Why it waits, or ended."""
    status: int
    """The batch script's exit status; 0 if a signal ended it."""
    signal: int
    """The signal that ended the batch script; 0 if none did."""
    nodes: str
    """As Slurm writes lists of hosts; empty before it has started."""
    restarts: int
    seconds: int
    """From its start, of the last run, to its end; while it runs, to the end of its time limit."""
    output: str
    """The file that its standard output goes to."""

    @property
    def ended(self) -> bool:
        """All of its processes are gone, and it will not be started again."""
        return self.state in ENDED


def submit(host: Host, argv: list[str], *, user: str, cwd: str) -> int:
    """Runs `sbatch` with these arguments; its refusal is Refused."""
    return int(_output(host, ["sbatch", "--parsable", *argv], user=user, cwd=cwd))


def show(host: Host, job: int | str) -> Job:
    """`job`: its number, or ARRAY_INDEX: the last element has the number of them all."""
    found = json.loads(_output(host, ["scontrol", "--json", "show", "job", str(job)]))["jobs"]
    index = str(job).partition("_")[2]  # which scontrol does not look at
    return _job(next(one for one in found if index in ("", str(one["array_task_id"]["number"]))))


def start_soon(host: Host, job: int | str) -> None:
    """Lets a waiting job start in two seconds: nodes tell the credentials of a job's runs apart by the second."""
    _output(host, ["scontrol", "update", f"JobId={job}", "StartTime=now+2"])


def slurmd_started(host: Host, node: str) -> int:
    """When the daemon of a node that last registered was started, as Unix time; 0 if none did."""
    found = json.loads(_output(host, ["scontrol", "--json", "show", "node", node]))["nodes"][0]
    return int(found["slurmd_start_time"]["number"])


def node_states(host: Host) -> dict[str, str]:
    """What `sinfo` calls each node, such as idle, mixed, allocated, down*; a `*` means that it does not answer."""
    lines = _output(host, ["sinfo", "--noheader", "--Node", "--format=%N %t"]).splitlines()
    return dict(line.split() for line in lines)


def _job(found: dict[str, Any]) -> Job:
    states = found["job_state"]
    exit_code = found["exit_code"]
    return Job(
        id=found["job_id"],
        state="COMPLETING" if "COMPLETING" in states else states[0],
        reason=found["state_reason"],
        status=exit_code["return_code"]["number"],
        signal=exit_code["signal"]["id"]["number"],
        nodes=found["nodes"],
        restarts=found["restart_cnt"],
        seconds=found["end_time"]["number"] - found["start_time"]["number"],
        output=found["standard_output"],
    )


TRIES = 3
"""As often a busy controller is asked: Slurm's own commands wait 10 s for an answer."""


def _output(host: Host, argv: list[str], **how: Unpack[As]) -> str:
    ended = host.run(argv, **how)
    for _ in range(TRIES - 1):
        if "timed out" not in ended.stderr or argv[0] == "sbatch":  # which might submit the job twice
            break
        ended = host.run(argv, **how)
    if ended.returncode:
        raise Refused(f"{argv[0]} ended with {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout
