"""Decides whether a job goes on inside its allocation after a failure, how often, and with which nodes. Begin
at `Restarts`.

The nodes that are left meet again, with the next attempt's number and ports; the first of them in the list is
node 0. If two halves of a job are cut off from each other, only one may go on: it claims the attempt with a
file in the run directory, which only one of them can make.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from entrypoint.core.errors import BAD_INPUT, Unavailable
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.job.again import too_many
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet.terms import MembershipPolicy, Timeouts
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.plan.sources import Settings

WINDOW = 30.0
"""Seconds from the first to the last survivor at the meeting."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """What one node knows of the attempts of its launch. Each event gives a new value."""

    plan: LaunchPlan
    """Of the launch: with all nodes that were granted."""
    least: int
    """So many nodes must be left."""
    most: int
    """So many take part; others are spares."""
    bound: int | None
    """Restarts in all; None if none was given."""
    active: int
    """How many nodes took part last."""
    lost: frozenset[int] = frozenset()
    """Nodes by their places in the allocation."""
    count: int = 0
    """Restarts so far in this launch."""

    @classmethod
    def of(cls, plan: LaunchPlan, settings: Settings) -> "Restarts":
        """At the start of a launch."""
        least, most = settings.value("nnodes") or (plan.allocation.nnodes, plan.allocation.nnodes)
        bound = settings.value("max-restarts")
        return cls(plan=plan, least=least, most=most, bound=bound, active=plan.nnodes)

    def begun(self) -> "Restarts":
        """A restart is tried."""
        return replace(self, count=self.count + 1)

    def met(self, members: Collection[int]) -> "Restarts":
        """These nodes have met and go."""
        return replace(self, lost=self.lost - {*members}, active=len(members))

    def without(self, lost: Iterable[int]) -> "Restarts":
        """These nodes are known to be lost too."""
        return replace(self, lost=self.lost | {*lost})

    def why_not(self, ended: Outcome) -> str:
        """Why no restart follows this failure; empty where one may."""
        if ended.status == BAD_INPUT:
            return "bad input would be refused again"
        if ended.is_unavailable and not self.plan.port_is_derived:
            return "the port is the same in each attempt"
        if len(self._left) < self.least:
            return self._too_few(len(self._left))
        return ""

    def misfit(self, ended: Outcome) -> str:
        """Why it is the number of ranks that the program of this restart refuses, so that a requeue with all
        nodes may go on; empty where it is not."""
        nodes, ranks = self.active, self.active * self.plan.nproc_per_node
        if self.count == 0 or ended.rank is None or ended.status != BAD_INPUT or nodes >= self.plan.nnodes:
            return ""
        left = f"with {counted(ranks, 'rank')} on {counted(nodes, 'node')}"
        return f"{left} the program refuses to run: {ended.reason}"

    def members(self) -> tuple[int, ...]:
        """Who will take part if all that are not known to be lost come."""
        return tuple(self._left[: self.most])

    @property
    def lost_names(self) -> list[str]:
        """Of the nodes that are gone."""
        return [self.plan.allocation.nodes[place] for place in sorted(self.lost)]

    def timeouts(self, given: Timeouts) -> Timeouts:
        """The bounds of the meeting: for the first one those given."""
        return replace(given, join=WINDOW) if self.count else given

    @property
    def membership(self) -> MembershipPolicy:
        """How the nodes meet. At first node 0 must come."""
        mine = self.plan.place
        candidates = [place for place in self._left if place < mine]
        return MembershipPolicy(
            candidates=[*candidates, mine] if self.count else [0],
            absent=self.lost,
            least=self.least,
            most=self.most,
            quorum=(self.active + 1) // 2,
        )

    @property
    def _left(self) -> list[int]:
        """This node is never lost to itself."""
        places = range(self.plan.allocation.nnodes)
        return [place for place in places if place not in self.lost or place == self.plan.place]

    def seal(self, run: RunDirectory, members: Sequence[int]) -> None:
        """Claims the attempt of `run` for these nodes. Unavailable: others have, it was ruled out, or it
        would be one too many."""
        is_restart = self.count > 0
        if is_restart and (why := too_many(run, self.bound)):
            raise Unavailable("restarts-used-up", why)
        names = self.plan.allocation.nodes
        try:
            run.claim([(place, names[place]) for place in members], exclusive=is_restart)
            if is_restart:
                run.add_restart()
        except FileExistsError:
            raise Unavailable(
                "attempt-taken",
                "another node knows that this is the end"
                if run.is_closed()
                else f"other nodes run attempt {run.attempt}: {self.plan.node} was cut off from them",
            ) from None
        except OSError as error:
            raise Unavailable(
                "attempt-not-claimable",
                f"attempt {run.attempt} cannot be claimed in {run.path}: {error.strerror}",
            ) from None

    def _too_few(self, left: int) -> str:
        names, granted = ", ".join(self.lost_names[:4]), self.plan.allocation.nnodes
        return f"{left} of {granted} nodes are left, without {names}, and --nnodes asks for {self.least}"
