"""An attempt that has ended, as this node knows it. What the next attempt, the job script and the user are
told of it is made of this value alone.
"""

from entrypoint.core.errors import Refusal
from entrypoint.core.frozen import dataclass
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.run import endings


@dataclass(frozen=True, kw_only=True)
class FinishedAttempt:
    """How one attempt ended on this node."""

    plan: LaunchPlan
    """With the nodes that took part."""
    run_dir: RunDirectory
    outcome: Outcome
    refusal: Refusal | None = None
    """Why no rank was started here; None where one was, or where a signal came first."""
    has_met: bool
    lost: tuple[int, ...] = ()
    """The places of the nodes that are known to be lost."""
    why_final: str = ""
    """Why its ranks say that nothing may follow; empty where something may."""
    misfit: str = ""
    """Why the program refuses to run on so few nodes; `outcome` is then that of the attempt before."""
    is_unwritten: bool = False
    """Whether this node's outcome was to be written and could not be."""
    has_echoes: bool = False
    """Whether tracebacks of lost connections were kept from the console."""

    @property
    def speaks(self) -> bool:
        """Whether this node says for all how it ended: node 0 does, and the next two where it is lost, as one
        of them may be so too."""
        ended, (first, *others) = self.outcome, self.plan.members
        lost_first = ended.rank is None and not ended.signal and ended.node == self.plan.nodes[0]
        return self.plan.is_first or (
            (lost_first or first in self.lost) and self.plan.place in others[:2] and not self.plan.local_rank
        )

    def in_words(self) -> list[str]:
        """The end as the user reads it, one message for the whole job."""
        # With a misfit, the failure before was told when the restart began.
        found = [] if self.misfit else endings.in_words(self.outcome, self.plan, self.run_dir)
        hidden = f"tracebacks of lost connections are in {self.run_dir.logs} alone"
        return [*found, *([hidden] if self.has_echoes else [])]
