"""The wish to end early, for this program and for any other: the only module that handles signals.

SIGUSR2 asks for a planned end (save, then exit 75), SIGTERM for an end (save, then exit 143); both only
set a flag. This file imports nothing of ours, so that a training script can bring a copy of it along:

    request = stop.listen()                      # first, before slow imports
    for step in ...:
        ...
        if status := stop.agreed(request):       # on every rank, at the same place
            save()
            stop.leave(status)
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from typing import NoReturn

SAVED = 75  # EX_TEMPFAIL of sysexits.h: saved at a planned end, wants to go on
TERMINATED = 143  # 128 + SIGTERM


@dataclass
class StopRequest:
    """The flags that the handlers set; they are never cleared."""

    planned: bool = False
    terminated: bool = False


def listen(*, terminate: bool = True) -> StopRequest:
    """Install the handlers. Call it before the slow imports: until then SIGUSR2 kills the process.

    Without `terminate` SIGTERM goes on killing it, until `save_when_terminated` is called.
    """
    request = StopRequest()

    def plan(*_: object) -> None:
        request.planned = True

    signal.signal(signal.SIGUSR2, plan)
    if terminate:
        save_when_terminated(request)
    return request


def save_when_terminated(request: StopRequest) -> None:
    """Install SIGTERM's handler, once there is something to save."""

    def terminate(*_: object) -> None:
        request.terminated = True

    signal.signal(signal.SIGTERM, terminate)


def status_of(*, planned: float, terminated: float) -> int:
    """The exit status that these numbers of asking ranks lead to; 0: none asks. SIGTERM weighs more."""
    if terminated:
        return TERMINATED
    return SAVED if planned else 0


def agreed(request: StopRequest) -> int:
    """The status to leave with after this step, the same on every rank; 0: go on.

    A collective of two numbers: call it on all ranks after the same steps, each one or every few. Without
    a process group this rank decides alone.
    """
    planned, terminated = _sum(float(request.planned), float(request.terminated))
    return status_of(planned=planned, terminated=terminated)


def leave(status: int) -> NoReturn:
    """Wait until every rank has come here, so that all have saved, and exit with the status (0: done)."""
    _sum(0.0, 0.0)
    leave_group()
    sys.exit(status)


def leave_group() -> None:
    """Leave the process group, once all ranks are done.

    gloo's is left to the end of the process. Its destructor waits for gloo's threads with the interpreter's
    lock held, and one that has yet to let go of the last collective's tensor waits for that lock: now and
    then for ever. torch 2.8 mended that for `destroy_process_group` (pytorch/pytorch#154976), but not for a
    model in DDP, which holds the group, too: seen with torch 2.10.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "gloo":
        dist.destroy_process_group()


def die_of_interrupt() -> None:
    """Let SIGINT end the process at once, instead of raising KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ignore_in_loader_worker(_worker_id: int = 0) -> None:
    """Let a DataLoader worker outlive a signal to the process group: its rank still needs data to save.

    A `worker_init_fn`. The worker ends when its rank tells it to, or is gone.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _sum(*values: float) -> list[float]:
    """Sums over all ranks."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return list(values)
    on_gpu = dist.get_backend() == "nccl"
    numbers = torch.tensor(
        values, device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
    )
    dist.all_reduce(numbers)
    return [float(number) for number in numbers.tolist()]
