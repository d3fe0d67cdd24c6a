"""A job whose ranks make no step: what is said of it, and when it is proven that it never will.

The secret: when to look, and how often to speak. An evaluation, a compilation or a download pauses a script
that tells nothing of it, so a pause is said once and ends nothing. Everyone is asked where its ranks are,
again at growing intervals; only two looks can prove a deadlock (blame.py).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from entrypoint.watch import blame
from entrypoint.watch.reports import End, Failure, Sighting


@dataclass(eq=False, kw_only=True)
class Pauses:
    """Of one attempt; whoever judges has it. `everyone` is asked by `ask`, and answers by `seen`."""

    ask: Callable[[], None]
    everyone: Callable[[], Collection[Hashable]]
    ends: Callable[[], Sequence[End]]
    world: Callable[[], int]
    """How many ranks there are."""
    say: Callable[[str], None]
    end: Callable[[Failure], None]
    """Takes the verdict on a deadlock."""
    start: Callable[[Coroutine[Any, Any, None]], None]
    """Lets something go on in the background."""
    again: float
    """Seconds from the first look to the second; twice as many to each further one."""
    bound: float
    """Seconds in which everyone answers."""
    _whys: dict[Hashable, str] = field(init=False, default_factory=dict)
    _over: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _all_seen: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _found: list[Sighting] = field(init=False, default_factory=list)
    _answered: set[Hashable] = field(init=False, default_factory=set)
    _follows: bool = field(init=False, default=False)
    _longest: float = field(init=False, default=0.0)
    """Seconds that a pause has lasted after which the job went on."""

    def report(self, who: Hashable, why: str | None) -> None:
        """`why` a participant's ranks pause; empty where it would be wrong to say so; None: they go on."""
        if why is None:
            self._whys.pop(who, None)
            if not self._whys:
                self._over.set()
            return
        self._whys[who] = why
        if not self._follows:
            self._follows = True
            self._over.clear()
            self.start(self._follow())

    def seen(self, who: Hashable, sightings: Sequence[Sighting], *, last: bool = True) -> None:
        """Takes the answer of a participant, which may come in parts."""
        self._found += sightings
        if last:
            self._answered.add(who)
            if self._answered >= set(self.everyone()):
                self._all_seen.set()

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        began = looked = loop.time()
        before: list[Sighting] = []
        nap, said = self.again, False
        while self._whys:
            is_whole = await self._look()
            found, now = self._found, loop.time()
            why = next(filter(None, self._whys.values()), "")
            if is_whole and before:
                stuck = blame.deadlock(
                    before, found, now - looked, why, self.ends(), world=self.world(), now=time.time()
                )
                if stuck is not None:
                    self.end(stuck)
                    return
            if why and not said and now - began >= self._longest and (text := blame.pause(found, why)):
                said = True
                self.say(text)
            before, looked = found, now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(nap):
                    await self._over.wait()
            nap *= 2
        self._longest = max(self._longest, loop.time() - began)
        self._follows = False

    async def _look(self) -> bool:
        """Whether everyone has said where its ranks are."""
        self._found, self._answered = [], set()
        self._all_seen.clear()
        self.ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.bound):
                await self._all_seen.wait()
        return self._all_seen.is_set()
