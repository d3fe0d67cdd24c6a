"""The training loop: steps, metrics, checkpoints, evaluations and the planned end, as one story.

The secret: when things happen. A step's sums over the ranks (loss, wishes to stop) are started at its
end and read after the next step, or at once where something is about to be written that must agree
with them. So all ranks learn of a wish to stop at the same step, and none ever waits for the news.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from train import checkpoint, resume, sampler, schedule
from train.config import Config
from train.datasets import Source
from train.distributed import SumLater, World
from train.evaluate import evaluate
from train.learner import Learner
from train.report import Recorder
from train.status import DONE, SAVED
from train.stop import StopRequest, status_of


class Diverged(Exception):
    """The loss is no longer a number."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the loop ended, with this process's own times."""

    status: int
    """DONE, SAVED or TERMINATED."""
    steps: int
    """Steps that this process did."""
    train_s: float
    """Time in steps, without checkpoints and evaluations."""
    first_step_done: float | None
    """When the first step was done, by time.monotonic; None if there was none to do."""
    first_step_s: float
    """How long it took, which is in `train_s`."""
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
    checkpoints: Path,
    total_steps: int,
) -> Ending:
    """Train from the learner's step to the last one, or to an agreed stop. A checkpoint holds the end."""
    begin = learner.step
    if 0 < begin < total_steps and _due(begin, config.evaluate.every):
        # The run that saved this state may have ended before the evaluation that was due.
        _measure(learner, source, config, world, recorder)
    batches = source.train_batches(
        sampler.rank_batches(
            seed=config.seed,
            size=source.train_size,
            position=begin * config.batch_size,
            batch_size=config.batch_size,
            accumulation=config.accumulation,
            rank=world.rank,
            world_size=world.size,
            steps=total_steps - begin,
            device=source.key_device,
        )
    )
    underway: deque[_Underway] = deque()
    train_s = first_step_s = 0.0
    first_step_done = loss = None
    status = DONE
    mark = time.monotonic()
    for step in range(begin + 1, total_steps + 1):
        lr = schedule.learning_rate(
            step,
            peak=config.optimizer.lr,
            warmup_steps=config.optimizer.warmup_steps,
            total_steps=total_steps,
        )
        loss_sum = learner.advance(batches, lr)
        wishes = [float(request.planned), float(request.terminated)]
        sums = SumLater(world, loss_sum, wishes)
        if first_step_done is None:
            sums.read()  # A GPU is done with the step only when its result is here.
        now = time.monotonic()
        underway.append(_Underway(step=step, lr=lr, seconds=now - mark, sums=sums))
        train_s += now - mark
        mark = now
        if first_step_done is None:
            first_step_done, first_step_s = now, train_s

        last = step in (total_steps, config.stop_at)
        save = last or _due(step, config.checkpoint.every)
        measure = _due(step, config.evaluate.every) and not last
        while len(underway) > (0 if save or measure or status else 1):
            loss, asked = _settle(underway.popleft(), config.batch_size, recorder)
            status = max(status, asked)
        if step == config.stop_at:
            status = status or SAVED
        if save or status:
            _save(learner, config, world, checkpoints, recorder)
        if status:
            break
        if measure:
            _measure(learner, source, config, world, recorder)
        if save or measure:
            mark = time.monotonic()
    world.barrier()
    return Ending(
        status=status,
        steps=learner.step - begin,
        train_s=train_s,
        first_step_done=first_step_done,
        first_step_s=first_step_s,
        loss=loss,
    )


def _settle(done: _Underway, batch_size: int, recorder: Recorder) -> tuple[float, int]:
    """Read a step's sums: its loss, which is written down, and the status that the ranks ask to end with."""
    loss_sum, planned, terminated = done.sums.read()
    loss = loss_sum / batch_size
    if not math.isfinite(loss):
        raise Diverged(
            f"the loss of step {done.step} is {loss}: lower optimizer.lr or set optimizer.clip_norm"
        )
    recorder.step(done.step, loss=loss, lr=done.lr, images_per_s=batch_size / done.seconds)
    return loss, status_of(planned=planned, terminated=terminated)


def _measure(learner: Learner, source: Source, config: Config, world: World, recorder: Recorder) -> None:
    on = config.evaluate.split
    score = evaluate(learner.model, source, learner.precision, world, config.evaluate.batch_size, on)
    recorder.evaluation(learner.step, score, source.split if on == "test" else on)


def _save(learner: Learner, config: Config, world: World, checkpoints: Path, recorder: Recorder) -> None:
    if world.is_first:
        path = checkpoint.save(checkpoints, resume.state_of(learner, config, world))
        checkpoint.prune(checkpoints, config.checkpoint.keep)
        recorder.say(f"step {learner.step}: saved {path.name}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
