"""The wish to end: which signals ask for what, and what `leave` does."""

import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from train import stop


@pytest.mark.parametrize("group", [False, True])
def test_who_leaves_ends_with_the_status_and_leaves_gloos_group_to_the_end(group: bool) -> None:
    if group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    statuses = [stop.agreed(stop.StopRequest(planned=one)) for one in (False, True)]
    assert statuses == [0, 75]
    with pytest.raises(SystemExit) as ended:
        stop.leave(75)
    assert ended.value.code == 75
    assert dist.is_initialized() == group
    if group:
        dist.destroy_process_group()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of before are back afterwards."""
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_sigusr2_asks_for_a_planned_end_from_the_first_and_sigterm_for_one_once_there_is_something_to_save() -> (
    None
):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request = stop.listen(terminate=False)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert stop.agreed(request) == 0
    signal.raise_signal(signal.SIGUSR2)
    assert (request.planned, request.terminated, stop.agreed(request)) == (True, False, 75)
    stop.save_when_terminated(request)
    signal.raise_signal(signal.SIGTERM)
    assert (request.planned, request.terminated, stop.agreed(request)) == (True, True, 143)
    whole = stop.listen()
    signal.raise_signal(signal.SIGTERM)
    assert (whole.planned, whole.terminated) == (False, True)


@pytest.mark.parametrize(
    ("planned", "terminated", "status"), [(0, 0, 0), (1, 0, 75), (3, 0, 75), (0, 1, 143), (7, 1, 143)]
)
def test_sigterm_to_any_rank_weighs_more_than_all_planned_ends(
    planned: int, terminated: int, status: int
) -> None:
    assert stop.status_of(planned=planned, terminated=terminated) == status


@pytest.mark.usefixtures("handlers")
def test_a_loaders_worker_outlives_what_ends_its_rank_and_a_keyboard_ends_the_rank_at_once() -> None:
    stop.ignore_in_loader_worker()
    assert [signal.getsignal(one) for one in (signal.SIGUSR2, signal.SIGTERM)] == [signal.SIG_IGN] * 2
    stop.die_of_interrupt()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
