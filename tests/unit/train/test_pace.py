"""The pace that is told, of a device that works beside the process as a GPU does; and what ranks do while one saves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from train import config, figures, loop
from train.stop import StopRequest

STEP = 0.05
"""Seconds of a step on the device; the process needs LAUNCH to queue it."""
LAUNCH = 0.002


class Clock:
    """Of the process, and when the device will be free."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def advance(self, *_: object) -> None:
        self.now += LAUNCH
        self.free = max(self.free, self.now) + STEP


class Learner:
    step = position = 0
    waits = SimpleNamespace(waited_s=None)

    def __init__(self, clock: Clock, request: StopRequest, stops_at: int) -> None:
        self._clock, self._request, self._stops_at = clock, request, stops_at

    def advance(self, *_: object) -> None:
        self.step += 1
        self._clock.advance()
        if self.step == self._stops_at:
            self._request.planned = True


@pytest.mark.parametrize(("steps", "every", "stops_at"), [(20, 0, 0), (60, 10, 0), (60, 4, 0), (60, 0, 30)])
def test_the_pace_is_that_of_the_device_however_often_is_saved(
    steps: int, every: int, stops_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, request = Clock(), StopRequest()

    class Sums:
        def __init__(self, _world: object, _loss: object, wishes: list[float]) -> None:
            self._done, self._values = clock.free, [64.0, *wishes]

        def read(self) -> list[float]:
            clock.now = max(clock.now, self._done)
            return self._values

    monkeypatch.setattr(loop, "SumLater", Sums)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    learner: Any = Learner(clock, request, stops_at)
    done: Any = lambda *_, **__: None  # noqa: E731
    saver: Any = SimpleNamespace(
        due=lambda: False,
        start=done,
        finish_before=done,
        is_in_background=True,
        wait=lambda: True,
        scored=done,
    )
    world: Any = SimpleNamespace(rank=0, size=1, is_first=True, sum=lambda values, **_: values)
    source: Any = SimpleNamespace(train_size=1000, key_device="cpu", train_batches=lambda keys: keys)
    beat: Any = SimpleNamespace(step=done, beat=done)
    ended = loop.train(
        learner=learner,
        source=source,
        config=replace(
            config.Config(batch_size=64, steps=steps), checkpoint=config.CheckpointOptions(every=every)
        ),
        world=world,
        recorder=SimpleNamespace(step=done),  # type: ignore[arg-type]
        request=request,
        saver=saver,
        heartbeat=beat,
        state=done,
        total_steps=steps,
    )
    assert ended.train_s == pytest.approx(clock.now)
    assert figures._pace(ended, 64) == pytest.approx(64 / STEP, rel=0.05)


@pytest.mark.parametrize("is_in_background", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_all_ranks_wait_together_for_what_a_save_waits_for(is_first: bool, is_in_background: bool) -> None:
    """A rank that waits in a collective of its step gives no sign of life, and would be taken for stuck."""
    did: list[str] = []
    beat: Any = SimpleNamespace(beat=lambda: did.append("beat"))

    def together(values: list[int], meanwhile: Any) -> list[int]:
        meanwhile()
        return values

    world: Any = SimpleNamespace(is_first=is_first, sum=together)
    saver: Any = SimpleNamespace(
        finish_before=lambda step: did.append(f"before {step}"),
        start=lambda state: did.append(state),
        is_in_background=is_in_background,
    )
    loop._save(saver, world, beat, 7, lambda: "starts")  # type: ignore[arg-type,return-value]
    assert did == ["before 7"] * is_first + ["beat"] + ["starts"] * is_first + ["beat"] * (
        not is_in_background
    )
