"""`python -m train`: reads the arguments, builds a training, runs it and writes its result. Begin at `main`;
`run` is the whole story on one rank.
"""

import dataclasses
import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from train.arguments import Asked, read
from train.environment import RankInfo, read_rank_info, said_rank, says_threads
from train.status import BAD_INPUT, DONE, FAILED, NOT_SAVED, SAVED, TrainingRefused
from train.stop import StopRequest, die_of_interrupt, listen, save_when_terminated

_OTHER_DIR = "give another in run_dir=DIR or APPTRAIN_RUN_DIR"


HEAD_START_S: Final = 2.0
"""How long ranks that leave the word to another stay: launchers quote the rank that ended first."""
LAST_SAVE_S: Final = 3.0
"""How long a rank that fails waits for the save that goes on."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    request = listen(terminate=False)  # that has nothing to save before it trains
    die_of_interrupt()
    rank = said_rank(os.environ)
    try:
        info = read_rank_info(os.environ)
        asked = read(arguments, info.world_size)
        gc.disable()  # until all is imported and built: there is no garbage to find
        # Torch's agent asks for the traceback of a rank that fails in a file of its own.
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(run)(asked, info, request) or DONE
    except TrainingRefused as error:
        if error.rank in (None, rank):
            print(f"train: {error}", file=sys.stderr)
        else:
            time.sleep(HEAD_START_S)
        return BAD_INPUT


def run(asked: Asked, info: RankInfo, request: StopRequest) -> int:
    """Build the parts, train, evaluate, report. Returns the exit status."""
    import torch

    from train import (
        datasets,
        distributed,
        evaluate,
        figures,
        flops,
        heartbeat,
        learner,
        loop,
        models,
        report,
        resume,
        rng,
        saver,
        schedule,
        trouble,
    )

    config, name, note = asked.config, asked.name, asked.note
    device = distributed.choose_device(config.device, info)
    distributed.be_deterministic(config.deterministic, device)
    distributed.use_threads(config.threads, says_threads(os.environ))
    run_dir = info.run_dir or Path(config.run_dir or f"runs/{name}")
    world = distributed.World(info, device)

    def say(line: str) -> None:
        if world.is_first:
            report.show(line)

    with world.unanimous() as vote:
        source = datasets.open_source(config.data, seed=config.seed, device=device)
        vote.value = source.all_images
        torch.manual_seed(rng.seed_for(config.seed, rng.WEIGHTS))
        model = models.build(
            config.model.name,
            classes=source.classes,
            channels=source.channels,
            image_size=source.image_size,
        )
    if not vote.is_agreed:
        with world.unanimous():
            first = world.broadcast_json({"node": info.node, "images": source.all_images})
            if told := datasets.difference(first["images"], source.all_images):
                raise TrainingRefused(
                    "images-differ-by-rank",
                    f"data.path={config.data.path}: the images differ between rank 0 on {first['node']} and "
                    f"rank {info.rank} on {info.node} ({told}): give each node the same images",
                )
    start, stopped, batch_size = None, 0, 0
    with world.unanimous():
        if world.is_first:
            make_run_dir(run_dir)
            goes_on = resume.goes_on(run_dir, info.attempt)
            try:
                start = resume.find_start(run_dir, asked.resume, say, request, goes_on=goes_on)
            except resume.StoppedWaiting:
                stopped = 1
            batch_size = resume.batch_size(start, config, world, is_given=asked.is_batch_given)
    stopped, batch_size = world.sum([stopped, batch_size])  # all but rank 0's are 0
    if stopped:
        say("stopped before the first step, as a checkpoint could not be read: the next attempt tries again")
        world.close()
        return SAVED
    if batch_size != config.batch_size:
        config = dataclasses.replace(config, batch_size=batch_size)
        note = f"{name}: batch_size {batch_size} as in the checkpoint, {batch_size // world.size} a rank"
    if note:
        say(note)
    total = schedule.total_steps(
        steps=config.steps, epochs=config.epochs, train_size=source.train_size, batch_size=config.batch_size
    )
    say(
        f"{name}: {config.model.name} ({models.parameter_count(model) / 1e6:.1f} M parameters), "
        f"{config.data.name} ({source.train_size} train, {source.test_size} {source.split}), "
        f"{total} steps of {config.batch_size} images on {world.size} x {device.type} ({world.backend})"
    )
    student = learner.Learner(model, config, world)
    with world.unanimous():
        if world.is_first:
            if start:
                resume.check_same(start.checkpoint.state, config, source.fingerprint, world, total, say)
                say(f"resumed from {start.path}: step {start.checkpoint.step} of {total}")
            resume.clear_way(run_dir, asked.resume, start, say, goes_on=goes_on)
            resume.tell(run_dir, name, config, world, start, info.attempt)
    resume.share(start, student, world)
    student.start((source.channels, source.image_size, source.image_size))
    troubles = trouble.Troubles(report.warn)
    pulse = heartbeat.Heartbeat(info.heartbeat)
    mine = run_dir if world.is_first else None
    recorder = report.Recorder(mine, troubles, step=student.step, total_steps=total)
    keeper = saver.Saver(
        mine,
        config.checkpoint,
        say=recorder.say,
        troubles=troubles,
        before_commit=recorder.sync,
        scores=resume.scores(run_dir, start),
        beat=pulse.beat,
    )
    keeper.rehearse()
    pedigree = resume.pedigree(start, run_dir)
    save_when_terminated(request)
    gc.freeze()  # what was imported and built stays: no later search need look at it
    gc.enable()
    with recorder.closed_if_refused():
        try:
            ending = loop.train(
                learner=student,
                source=source,
                config=config,
                world=world,
                recorder=recorder,
                request=request,
                saver=keeper,
                heartbeat=pulse,
                state=lambda lr: resume.state_of(student, config, source.fingerprint, world, pedigree, lr),
                total_steps=total,
            )
        except BaseException:
            keeper.abandon(LAST_SAVE_S)
            raise
    if ending.status:
        recorder.close()
        if world.is_first:
            troubles.summarise()
            _tell_stop(student.step, total, ending.saved, keeper.failure)
        world.close()
        if ending.status == NOT_SAVED and not world.is_first:
            time.sleep(HEAD_START_S)
        return ending.status
    size = config.evaluate.batch_size
    with recorder.closed_if_refused():
        score = evaluate.evaluate(student.model, source, student.precision, world, size, beat=pulse.beat)
    recorder.evaluation(total, score, source.split)
    recorder.close()
    ranks = world.gather_json(figures.of_rank(ending, config.batch_size // world.size, info, device))
    world.close()
    status = DONE
    if world.is_first:
        rates = figures.of_run(ending, config.batch_size, info)
        identity = resume.identity(world)
        count = flops.per_image(
            config.model.name,
            classes=source.classes,
            channels=source.channels,
            image_size=source.image_size,
        )
        result = {
            **dataclasses.asdict(score),
            "accuracy": score.accuracy,
            "split": source.split,
            "evaluated_on": config.evaluate.split if config.evaluate.split == "train" else source.split,
            "steps": student.step,
            "weights_sha256": learner.weights_sha256(student.weights()),
            **rates,
            **flops.figures(
                count,
                rates["images_per_s"],
                precision=config.precision,
                device=identity["processor"],
                ranks=world.size,
            ),
            "loss": ending.loss if ending.steps else resume.loss(run_dir, start),
            "config": name,
            "model": config.model.name,
            "parameters": models.parameter_count(model),
            "train_samples": source.train_size,
            "seed": config.seed,
            "batch_size": config.batch_size,
            "precision": config.precision,
            "run": pedigree["id"],
            "resumed_from": start and start.checkpoint.step,
            "checkpoints": {"saved": keeper.saved, "failed": keeper.failed, "held_s": keeper.held_s},
            **identity,
            **figures.of_ranks(ranks),
        }
        complete = report.finish(run_dir, result, troubles)
        troubles.summarise()
        if not complete:
            report.warn(f"train: the run is done, but {run_dir} does not hold all of its results")
        if not ending.saved:
            report.warn(f"train: the run is done, but its last state is not saved: {keeper.failure}")
        status = DONE if complete and ending.saved else NOT_SAVED
    return status


def _tell_stop(step: int, total: int, saved: bool, failure: str) -> None:
    from train import report

    if saved:
        report.show(f"stopped after step {step} of {total}; --resume auto goes on from there")
    else:
        report.warn(
            f"train: stopped after step {step} of {total}, which is not saved: {failure}: "
            "--resume auto goes on from the newest checkpoint"
        )


def make_run_dir(path: Path) -> None:
    """Make the run directory, mode 700. Raises TrainingRefused where that cannot be."""
    from train.files import make_directory

    try:
        make_directory(path)
    except OSError as error:
        raise TrainingRefused(
            "train-run-dir", f"run directory {path}: {error.strerror}: {_OTHER_DIR}"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise TrainingRefused("train-run-dir", f"run directory {path} is not writable: {_OTHER_DIR}")


def end(status: int) -> NoReturn:
    """Leave at once: after an error, torch's threads and process group would wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = FAILED
    end(status)
