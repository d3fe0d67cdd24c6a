"""Decides whether a job goes on inside its allocation after a failure, how often, and with which nodes. Begin
at `Restarts`.

The nodes that are left meet again, with the next attempt's number and ports; the first of them in the list is
node 0. If two halves of a job are cut off from each other, only one may go on: it claims the attempt with a
file in the run directory, which only one of them can make.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence

from entrypoint.errors import BAD_INPUT, Unavailable
from entrypoint.job.again import too_many
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet.terms import MembershipPolicy, Timeouts
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.plan.sources import Settings
from entrypoint.watch.blame import count

WINDOW = 30.0
"""Seconds from the first to the last survivor at the meeting."""


class Restarts:
    """What one node knows of the attempts of its launch."""

    def __init__(self, plan: LaunchPlan, settings: Settings):
        wanted = settings.value("nnodes")
        self._plan = plan
        self._least = wanted[0] if wanted else plan.allocation.nnodes
        self._most = wanted[1] if wanted else plan.allocation.nnodes
        self._bound: int | None = settings.value("max-restarts")
        self._lost: set[int] = set()
        self._active = plan.nnodes
        self.count = 0
        """Restarts so far in this launch."""

    def why_not(self, ended: Outcome, lost: Iterable[int]) -> str:
        """Why no restart follows this failure; empty where one may."""
        self._lost |= set(lost)
        if ended.status == BAD_INPUT:
            return "bad input would be refused again"
        if ended.is_unavailable and not self._plan.port_is_derived:
            return "the port was chosen by hand"
        if len(self._left) < self._least:
            return self._too_few(len(self._left))
        return ""

    def misfit(self, ended: Outcome) -> str:
        """Why it is the number of ranks that the program of this restart refuses, so that a requeue with all
        nodes may go on; empty where it is not."""
        nodes, ranks = self._active, self._active * self._plan.nproc_per_node
        if self.count == 0 or ended.rank is None or ended.status != BAD_INPUT or nodes >= self._plan.nnodes:
            return ""
        left = f"with {count(ranks, 'rank')} on {count(nodes, 'node')}"
        return f"{left} the program refuses to run: {ended.reason}"

    def begin(self) -> None:
        """A restart is tried."""
        self.count += 1

    def members(self) -> tuple[int, ...]:
        """Who will take part if all that are not known to be lost come."""
        return tuple(self._left[: self._most])

    def went(self, members: Sequence[int]) -> None:
        """These nodes have met and go."""
        self._lost -= set(members)
        self._active = len(members)

    @property
    def lost(self) -> list[str]:
        """The names of the nodes that are gone."""
        return [self._plan.allocation.nodes[place] for place in sorted(self._lost)]

    def timeouts(self, given: Timeouts) -> Timeouts:
        """The bounds of the meeting: for the first one those given."""
        return dataclasses.replace(given, join=WINDOW) if self.count else given

    def muster(self, run: RunDirectory, address: Callable[[int], Awaitable[str]]) -> MembershipPolicy:
        """How the nodes meet for the attempt of `run`. At first node 0 must come."""
        mine = self._plan.place
        candidates = [place for place in self._left if place < mine]
        return MembershipPolicy(
            candidates=[*candidates, mine] if self.count else [0],
            address=address,
            absent=frozenset(self._lost),
            least=self._least,
            most=self._most,
            quorum=(self._active + 1) // 2,
            seal=lambda members: self._seal(run, members),
        )

    @property
    def _left(self) -> list[int]:
        """This node is never lost to itself."""
        places = range(self._plan.allocation.nnodes)
        return [place for place in places if place not in self._lost or place == self._plan.place]

    def _seal(self, run: RunDirectory, members: Sequence[int]) -> None:
        """Claims the attempt. Unavailable: others have, it was ruled out, or it would be one too many."""
        is_restart = self.count > 0
        if is_restart and (why := too_many(run, self._bound)):
            raise Unavailable(why)
        names = self._plan.allocation.nodes
        try:
            run.claim([(place, names[place]) for place in members], exclusive=is_restart)
            if is_restart:
                run.add_restart()
        except FileExistsError:
            raise Unavailable(
                "another node knows that this is the end"
                if run.is_closed()
                else f"other nodes run attempt {run.attempt}: {self._plan.node} was cut off from them"
            ) from None
        except OSError as error:
            raise Unavailable(
                f"attempt {run.attempt} cannot be claimed in {run.path}: {error.strerror}"
            ) from None

    def _too_few(self, left: int) -> str:
        names, granted = ", ".join(self.lost[:4]), self._plan.allocation.nnodes
        return f"{left} of {granted} nodes are left, without {names}, and --nnodes asks for {self._least}"
