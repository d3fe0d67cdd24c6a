"""Whether the ranks of this node go on: what counts as a hang, and what is reported of it.

`HangWatch.observe` is the rule, a pure function; `Alone` takes the reports if there is no other node.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from entrypoint.bitset import Bits
from entrypoint.meet import job_state
from entrypoint.meet.job_state import JobState, Now, Say, StartTimer, TellAll
from entrypoint.meet.messages import Paused, Report, Silent, Stalled, Told
from entrypoint.meet.terms import Timeouts


@dataclass(frozen=True, kw_only=True)
class HangPolicy:
    """What counts as a hang."""

    step: float
    """Seconds without a step of a rank that tells its steps; 0: any."""
    silence: float
    """Seconds in which no rank of the job writes anything; 0: any."""
    start: float
    """Seconds without a step after which a rank's own workers are looked for the first time."""
    is_chosen: bool
    """Whether the user set `step`: then it counts for scripts that tell nothing of evaluations too."""
    again: float
    """Seconds between the first two looks at ranks that make no step."""

    @property
    def interval(self) -> float | None:
        """Seconds between two looks; None if nothing counts as a hang."""
        bounds = [bound / 4 for bound in (self.step, self.silence) if bound]
        return min([1.0, *bounds]) if bounds else None


@dataclass(frozen=True, kw_only=True)
class Signs:
    """What one look at the ranks shows."""

    passed: float
    """Seconds since the last look in which this process ran: a suspended job does not seem to hang."""
    is_stalled: bool
    """Whether a rank that tells its steps has made none for too long."""
    is_paused: bool
    """Whether the ranks' optimizers have made none for too long."""
    heard: float
    """When a rank last wrote something."""
    any_ended: bool


@dataclass(frozen=True, kw_only=True)
class HangWatch:
    """What is known from earlier looks."""

    policy: HangPolicy
    heard: float = 0.0
    silence: float = 0.0
    """Seconds in which no rank wrote anything."""
    since_end: float = 0.0
    """Seconds since a rank ended."""
    pause: str | None = None
    """What was reported as Paused."""
    is_over: bool = False
    """Whether a stalled rank was reported, which is the last report."""

    def observe(self, signs: Signs) -> "tuple[HangWatch, list[Report]]":
        """What follows from a look, and what is to be reported."""
        policy = self.policy
        why = f"no step for {policy.step:g} s"
        is_paused = bool(policy.step) and signs.is_paused
        if policy.step and (signs.is_stalled or (is_paused and policy.is_chosen)):
            return replace(self, is_over=True), [Stalled(why)]
        reports: list[Report] = []
        # Whoever has ended well may be needed by others, who perhaps have never made a step.
        since_end = self.since_end + signs.passed if signs.any_ended else 0.0
        pause = "" if policy.step and since_end > policy.step else None
        if is_paused:
            pause = why
        if pause != self.pause:
            reports.append(Paused(pause))
        silence = self.silence + signs.passed if signs.heard == self.heard else 0.0
        was_silent, is_silent = self.silence > policy.silence, silence > policy.silence
        if policy.silence and was_silent != is_silent:
            text = f"no rank has written anything for {policy.silence:g} s (--silence-timeout)"
            reports.append(Silent(text if is_silent else ""))
        return replace(self, heard=signs.heard, silence=silence, since_end=since_end, pause=pause), reports


class Alone:
    """What stands for the link of a single participant: the same rules for one node, and no network."""

    def __init__(
        self, node: str, world: int, *, post: Callable[[Told], None], say: Callable[[str], None], again: float
    ):
        """`post` takes what a link would have been told. `again`: as of HangPolicy."""
        self._post = post
        self._say = say
        self._job = JobState(
            nodes=[node],
            hub=0,
            local_ranks=1,
            bounds=Timeouts(again=again),
            present=Bits.of([0]),
            active=Bits.of([0]),
            world=world,
        )

    def report(self, report: Report) -> None:
        self._step(report)

    def _step(self, event: job_state.Event) -> None:
        loop = asyncio.get_running_loop()
        now = Now(wall=time.time(), steady=loop.time())
        self._job, effects = job_state.step(self._job, (0, None), event, now)
        for effect in effects:
            match effect:
                case TellAll(message):
                    self._post(message)
                case Say(text):
                    self._say(text)
                case StartTimer(seconds, timer):
                    loop.call_later(seconds, self._step, timer)
