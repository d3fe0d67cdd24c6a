"""What the hub makes of all that it is told while ranks run: how the job ends, for everyone alike.

It knows which message means what for the job: what is an end, whose failure came first (by the rules of
watch/blame.py), when everyone must be asked where its ranks are.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from entrypoint.meet.claims import Identity, Place, load, pack
from entrypoint.meet.link import Message, loss
from entrypoint.meet.terms import Timeouts
from entrypoint.meet.wire import WireError
from entrypoint.plain import plain
from entrypoint.watch import blame
from entrypoint.watch.pauses import Pauses
from entrypoint.watch.reports import End, Failure, Sighting

CLOCKS = 1.0
"""Seconds by which the nodes' clocks may differ and still be believed."""
Timed = TypeVar("Timed", Failure, End)


@dataclass(eq=False, kw_only=True)
class Judge:
    """Of one meeting; `tell` tells everyone."""

    hub: int
    nodes: Sequence[str]
    present: Collection[Place]
    """Who has come, as that changes."""
    timeouts: Timeouts
    say: Callable[[str], None]
    tell: Callable[[Message], None]
    is_over: Callable[[], bool]
    """Whether the last event was told."""
    start: Callable[[Coroutine[Any, Any, None]], None]
    """Lets something go on in the background."""
    active: set[Place] = field(init=False, default_factory=set)
    """Who takes part; the others are spares, whose loss is no failure."""
    world: int = field(init=False, default=0)
    """How many ranks there are."""
    _finished: set[Place] = field(init=False, default_factory=set)
    """Done, failed or lost: nothing that happens to their connections now is a loss."""
    _done: set[Place] = field(init=False, default_factory=set)
    _failures: list[Failure] = field(init=False, default_factory=list)
    _ends: dict[int, End] = field(init=False, default_factory=dict)
    """By rank: who has ended well."""
    _gone: set[int] = field(init=False, default_factory=set)
    """Nodes that were lost, those among them that had nothing to do."""
    _stopping: bool = field(init=False, default=False)
    _clocks: dict[Place, float] = field(init=False, default_factory=dict)
    """How far each participant's clock is behind ours, in seconds, by its last heartbeat."""
    _silent: set[Place] = field(init=False, default_factory=set)
    _looking: str = field(init=False, default="")
    """Why everyone was asked to look; empty before."""
    _looked: float = field(init=False, default=0.0)
    _sightings: dict[int, Sighting] = field(init=False, default_factory=dict)
    """By rank."""
    _answered: set[Place] = field(init=False, default_factory=set)
    _unclear: set[Place] = field(init=False, default_factory=set)
    """Whose ranks are there and have shown no stack, up to the closer look at them."""
    _looks_closer: bool = field(init=False, default=False)
    _pauses: Pauses = field(init=False)

    def __post_init__(self) -> None:
        self._pauses = Pauses(
            ask=lambda: self.tell({"type": "peek"}),
            everyone=lambda: self.active,
            ends=lambda: list(self._ends.values()),
            world=lambda: self.world,
            say=self.say,
            end=self._take_deadlock,
            start=self.start,
            again=self.timeouts.again,
            bound=self.timeouts.look,
        )

    def begin(self, active: set[Place], world: int) -> None:
        """All have met: these take part, and so many ranks."""
        self.active, self.world = active, world

    def beat(self, place: Place, then: float) -> None:
        """A participant's heartbeat, with the time by its clock."""
        self._clocks[place] = time.time() - then

    def hear(self, place: Place, message: Message) -> None:
        """What a participant reports once all have met. WireError: it makes no sense."""
        match message:
            case {"type": "stop", "left": int() | float() | None as left}:
                if not self._stopping:
                    self._stopping = True
                    self.tell({"type": "stop", "left": left})
            case {"type": "ended", "end": end}:
                one = self._by_our_clock(place, load(End, end))
                self._ends[one.rank] = one
            case {"type": "done"}:
                self._take_done(place)
            case {"type": "fail", "failure": failure}:
                self._collect(self._by_our_clock(place, load(Failure, failure)))
                self._finished.add(place)
                self._judge_if_complete()
            case {"type": "stalled", "why": str(why)}:
                self._look(plain(why))
            case {"type": "silent", "why": str(why)}:
                (self._silent.add if why else self._silent.discard)(place)
                if self.active <= self._silent | self._finished:
                    self._look(plain(why))
            case {"type": "paused", "why": str() | None as why}:
                self._pauses.report(place, plain(why))
            case {"type": "peeked", "sightings": list(raw), "last": bool(last)}:
                self._pauses.seen(place, [load(Sighting, one) for one in raw], last=last)
            case {"type": "seen", "sightings": list(raw), "last": bool(last)} if self._looking:
                self._take_sightings(place, [load(Sighting, one) for one in raw], last)
            case _:
                raise WireError("it sent a message that has no meaning here")

    def lose(self, lost: Identity, why: str, at: float) -> None:
        """A participant is lost since `at`, in Unix seconds, once all have met."""
        place = lost.place
        if place not in self.active:
            if lost.node_rank not in self._gone and not self.is_over():
                self.say(f"the spare {lost} is lost: {why}")
            self._gone.add(lost.node_rank)
        elif place not in self._finished:
            self._finished.add(place)
            self._gone.add(lost.node_rank)
            self._collect(loss(lost.node_rank, lost.name, why, at))
            self._judge_if_complete()

    def decide(self) -> None:
        """Calls one of the failures the first, if there is any."""
        if self._failures:
            self._tell_failure(blame.first(self._failures, list(self._ends.values()), world=self.world))

    def _take_done(self, place: Place) -> None:
        self._finished.add(place)
        self._done.add(place)
        if self.active <= self._done and not self._failures:
            alone = [one.alone for one in self._ends.values()]
            several = len(alone) == self.world > 1
            self.tell({"type": "all done", "alone": several and all(alone)})

    def _look(self, why: str) -> None:
        if not self._looking and not self._failures:
            self._looking, self._looked = why, time.time()
            self.tell({"type": "look", "why": why})
            asyncio.get_running_loop().call_later(self.timeouts.look, self._judge)

    def _take_sightings(self, place: Place, sightings: Sequence[Sighting], last: bool) -> None:
        self._sightings |= {one.rank: one for one in sightings}
        if any(one.state and not one.stack for one in sightings):
            self._unclear.add(place)
        if last:
            self._answered.add(place)
        self._judge_if_complete()

    def _take_deadlock(self, failure: Failure) -> None:
        if not self._looking and not self._failures:
            self._tell_failure(load(Failure, asdict(failure)))

    def _judge_if_complete(self) -> None:
        if not self._looking or not self.active <= self._answered | self._finished:
            return
        if self._looks_closer or not self._unclear - self._finished:
            self._judge()
            return
        # Only now: a rank that is ended for its stack is missing to those that wait for it.
        self._looks_closer = True
        self._answered -= self._unclear
        self.tell({"type": "look closer"})

    def _judge(self) -> None:
        """Name the rank that the others wait for."""
        unseen = [self.nodes[node] for node, _ in sorted(set(self.present) - self._answered - self._finished)]
        found = blame.verdict(list(self._sightings.values()), self._looking, unseen=unseen, now=time.time())
        if found is not None:
            self._tell_failure(load(Failure, asdict(found)))
        elif not self._failures:
            self._collect(
                loss(self.hub, self.nodes[self.hub], f"{self._looking}, and no rank was found", time.time())
            )
        else:
            self.decide()

    def _collect(self, failure: Failure) -> None:
        """Take a failure; a rank that ends while everyone looks is not the first."""
        if self._looking and failure.rank is not None and failure.time >= self._looked:
            return
        self._failures.append(failure)
        if len(self._failures) == 1:
            # Who only lost another rank may end before that one does.
            follows = blame.is_consequence(failure.error)
            settle = self.timeouts.settle_echo if follows else self.timeouts.settle
            asyncio.get_running_loop().call_later(settle, self.decide)

    def _by_our_clock(self, place: Place, what: Timed) -> Timed:
        """With its time by our clock, where the participant's differs: what came first is the cause."""
        apart = self._clocks.get(place, 0.0)
        return replace(what, time=what.time + apart) if abs(apart) > CLOCKS else what

    def _tell_failure(self, failure: Failure) -> None:
        self.tell({"type": "failed", "failure": asdict(failure), "lost": pack(self._gone)})
