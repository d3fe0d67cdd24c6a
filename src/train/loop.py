"""The training loop: steps, metrics, checkpoints, evaluations and the planned end, in one function, `train`.

A step's sums over the ranks (loss, wishes to stop) are started at its end and read after the next step, or at
once if something is about to be written that must agree with them. So all ranks learn at the same step of a
wish to stop or to save, and none waits for the news. Training goes on while a checkpoint is written; at the
end all wait until it is on the disk.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from train import sampler, schedule
from train.checkpoint import Checkpoint
from train.config import Config
from train.datasets import Source
from train.distributed import SumLater, World
from train.evaluate import evaluate
from train.figures import Timed
from train.heartbeat import Heartbeat
from train.learner import Learner
from train.report import Recorder
from train.saver import Saver
from train.status import DONE, NOT_SAVED, SAVED
from train.stop import StopRequest, status_of


class Diverged(Exception):
    """The loss is no longer a number."""


@dataclass(frozen=True, kw_only=True)
class LoopEnd:
    """How the loop ended, with this process's own times."""

    status: int
    """DONE, SAVED, NOT_SAVED in place of SAVED, or TERMINATED."""
    saved: bool
    """Whether the state after the last step is on the disk."""
    steps: int
    """Steps that this process did."""
    train_s: float
    """Time in steps, without checkpoints and evaluations."""
    first_step_done: float | None
    """When the first step was done, by time.monotonic; None if there was none to do."""
    first_step_s: float
    """How long it took, which is in `train_s`."""
    input_wait_s: float
    """How long this rank waited for images, which is in `train_s`."""
    sync_wait_s: float | None
    """How long it waited for the other ranks, which is in `train_s`; None where that cannot be measured."""
    first_step_waits: tuple[float, float | None]
    """The part of both waits that fell into the first step."""
    loss: float | None
    """Of the last step; None if there was none."""


@dataclass(frozen=True, kw_only=True)
class _Underway:
    """A step whose sums are not read yet."""

    step: int
    lr: float
    seconds: float
    sums: SumLater


def train(
    *,
    learner: Learner,
    source: Source,
    config: Config,
    world: World,
    recorder: Recorder,
    request: StopRequest,
    saver: Saver,
    heartbeat: Heartbeat,
    state: Callable[[float], Checkpoint],
    total_steps: int,
) -> LoopEnd:
    """Train from the learner's step to the last one, or to an agreed stop. A checkpoint holds the end.

    `state` makes the checkpoint of the moment, given the step's learning rate; only rank 0 calls it.
    """
    begin = learner.step
    if 0 < begin < total_steps and _due(begin, config.evaluate.every):
        # The run that saved this state may have ended before the evaluation that was due.
        _measure(learner, source, config, world, recorder, saver, heartbeat)
    keys = sampler.rank_batches(
        seed=config.seed,
        size=source.train_size,
        position=learner.position,
        batch_size=config.batch_size,
        accumulation=config.accumulation,
        rank=world.rank,
        world_size=world.size,
        steps=total_steps - begin,
        device=source.key_device,
    )
    batches = Timed(source.train_batches(keys))
    underway: deque[_Underway] = deque()
    train_s = first_step_s = 0.0
    first_step_done = loss = None
    first_waits: tuple[float, float | None] = (0.0, None)
    status, owed = DONE, False
    mark = time.monotonic()
    for step in range(begin + 1, total_steps + 1):
        lr = schedule.learning_rate(
            step,
            peak=config.optimizer.lr,
            warmup_steps=config.optimizer.warmup_steps,
            total_steps=total_steps,
        )
        last = step in (total_steps, config.stop_at)
        save = last or owed or _due(step, config.checkpoint.every)
        measure = _due(step, config.evaluate.every) and not last
        loss_sum = learner.advance(batches, lr)
        wishes = [float(request.planned), float(request.terminated), float(saver.due())]
        sums = SumLater(world, loss_sum, wishes)
        if first_step_done is None or save or measure:
            sums.read()  # A GPU is done with the step only when its result is here.
        now = time.monotonic()
        heartbeat.step(step)
        underway.append(_Underway(step=step, lr=lr, seconds=now - mark, sums=sums))
        train_s += now - mark
        mark = now
        if first_step_done is None:
            first_step_done, first_step_s = now, train_s
            first_waits = (batches.waited_s, learner.waits.waited_s)

        while len(underway) > (0 if save or measure or status else 1):
            loss, asked, due = _settle(underway.popleft(), config.batch_size, recorder)
            status = max(status, asked)
            owed = owed or due
        if step == config.stop_at:
            status = status or SAVED
        if status and not (save or measure):
            train_s += time.monotonic() - mark  # the last steps were waited for only now
        if save or status:
            owed = False
            _save(saver, world, heartbeat, step, partial(state, lr))
        if status:
            break
        if measure:
            _measure(learner, source, config, world, recorder, saver, heartbeat)
        if save or measure:
            mark = time.monotonic()
    (lost,) = world.sum([int(not saver.wait())], meanwhile=heartbeat.beat)
    return LoopEnd(
        status=NOT_SAVED if lost and status == SAVED else status,
        saved=not lost,
        steps=learner.step - begin,
        train_s=train_s,
        first_step_done=first_step_done,
        first_step_s=first_step_s,
        input_wait_s=batches.waited_s,
        sync_wait_s=learner.waits.waited_s,
        first_step_waits=first_waits,
        loss=loss,
    )


def _save(
    saver: Saver, world: World, heartbeat: Heartbeat, step: int, state: Callable[[], Checkpoint]
) -> None:
    """The first rank begins to save; the others wait for what it has to wait for, and show that they live."""
    if world.is_first:
        saver.finish_before(step)
    world.sum([0], meanwhile=heartbeat.beat)
    if world.is_first:
        saver.start(state())
    if not saver.is_in_background:
        world.sum([0], meanwhile=heartbeat.beat)


def _settle(done: _Underway, batch_size: int, recorder: Recorder) -> tuple[float, int, bool]:
    """Read a step's sums: its loss, which is written down, the status that the ranks ask to end with, and
    whether it is time to save."""
    loss_sum, planned, terminated, due = done.sums.read()
    loss = loss_sum / batch_size
    if not math.isfinite(loss):
        raise Diverged(
            f"the loss of step {done.step} is {loss}: lower optimizer.lr or set optimizer.clip_norm"
        )
    recorder.step(done.step, loss=loss, lr=done.lr, images_per_s=batch_size / done.seconds)
    return loss, status_of(planned=planned, terminated=terminated), due > 0


def _measure(
    learner: Learner,
    source: Source,
    config: Config,
    world: World,
    recorder: Recorder,
    saver: Saver,
    heartbeat: Heartbeat,
) -> None:
    on = config.evaluate.split
    size, beat = config.evaluate.batch_size, heartbeat.beat
    score = evaluate(learner.model, source, learner.precision, world, size, on, beat)
    recorder.evaluation(learner.step, score, source.split if on == "test" else on)
    saver.scored(learner.step, score.accuracy)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
