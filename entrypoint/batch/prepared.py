"""What is known of a job since it was prepared, as the directory has it in which both halves of a job script
leave what they tell each other. Begin at `PreparedJob`.
"""

import dataclasses
import shlex
from pathlib import Path

from entrypoint.core.frozen import dataclass
from entrypoint.job import handover
from entrypoint.plan.failure_policy import FailurePolicy

_STATE = (
    *("run_dir", "attempt", "host", "tasks", "policy", "bound", "port_by_hand", "scheduler", "batch"),
    *("restarts", "tries", "script", "began", "queued"),
)


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """What is known of the job since it was prepared."""

    run_dir: Path
    attempt: int
    hosts: tuple[str, ...]
    """In node-rank order of all that were granted."""
    tasks: int
    """Of each node."""
    policy: FailurePolicy
    """--on-failure"""
    bound: int | None
    """--max-restarts"""
    port_by_hand: bool
    scheduler: str
    batch: bool
    """Whether the scheduler can run it again: it was not started by hand."""
    restarts: int = 0
    """How often the scheduler had run it before."""
    tries: int = 1
    """Of this job, after ports that were taken."""
    script: float | None = None
    """When the job script began, in Unix seconds; None where nobody knows, or it began an earlier attempt."""
    began: float = 0.0
    """When it was prepared, in Unix seconds."""
    queued: float | None = None
    """Seconds that it had waited in the queue; None where nobody knows, or another attempt has counted it."""

    def write(self, where: Path) -> None:
        entries = [("host", host) for host in self.hosts]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "hosts" and value is not None:
                entries.append((field.name, str(int(value)) if isinstance(value, int) else str(value)))
        handover.write(_state(where, self.attempt), entries)

    @classmethod
    def read(cls, where: Path, attempt: int) -> "PreparedJob":
        """As it was when this attempt began. Raises BadInput where nothing was prepared."""
        facts = handover.read(_state(where, attempt), _STATE)
        return cls(
            run_dir=Path(facts.one("run_dir")),
            attempt=int(facts.one("attempt")),
            hosts=tuple(facts.all("host")),
            tasks=int(facts.one("tasks")),
            policy=FailurePolicy(facts.one("policy")),
            bound=int(facts.one("bound")) if facts.one("bound") else None,
            port_by_hand=facts.one("port_by_hand") == "1",
            scheduler=facts.one("scheduler"),
            batch=facts.one("batch") == "1",
            restarts=int(facts.one("restarts")),
            tries=int(facts.one("tries")),
            script=float(facts.one("script")) if facts.one("script") else None,
            began=float(facts.one("began")),
            queued=float(facts.one("queued")) if facts.one("queued") else None,
        )

    @property
    def may_be_asked(self) -> bool:
        """Whether the scheduler knows more of how a job ends than the outcomes do."""
        return self.batch and self.scheduler == "slurm"

    @property
    def by_hand(self) -> str:
        """How somebody goes on with the run."""
        return f"to go on: the same line again with APPTRAIN_RUN_DIR={shlex.quote(str(self.run_dir))}"


def _state(where: Path, attempt: int) -> Path:
    return where / f"{handover.STATE}.{attempt}"
