"""The wish to end early. The only module that handles signals.

SIGUSR2 asks for a planned end (save, then exit 75), SIGTERM for an end (save, then exit 143); both only
set a flag, which the training loop shares with the other ranks. SIGINT ends the process at once.
"""

import signal
from dataclasses import dataclass

from train.status import SAVED, TERMINATED


@dataclass(kw_only=True)
class StopRequest:
    """The flags that the handlers set; they are never cleared."""

    planned: bool = False
    terminated: bool = False


def listen() -> StopRequest:
    """Install the handlers. Call it before the slow imports: until then SIGUSR2 kills the process."""
    request = StopRequest()

    def plan(*_: object) -> None:
        request.planned = True

    def terminate(*_: object) -> None:
        request.terminated = True

    signal.signal(signal.SIGUSR2, plan)
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return request


def ignore_in_loader_worker(_worker_id: int = 0) -> None:
    """Let a DataLoader worker outlive a signal to the process group: its rank still needs data to save.

    The worker ends when its rank tells it to, or is gone.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def status_of(*, planned: float, terminated: float) -> int:
    """The exit status that these numbers of asking ranks lead to; 0: none asks. SIGTERM weighs more."""
    if terminated:
        return TERMINATED
    return SAVED if planned else 0
