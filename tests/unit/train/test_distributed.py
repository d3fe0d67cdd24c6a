"""What a rank asks of its device, as far as that can be seen without one."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from train.distributed import SumLater, World, be_deterministic, choose_device, use_threads
from train.environment import RankInfo, says_threads
from train.status import TrainingRefused


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's choice of CUDA's kernels, and the environment, are as before afterwards."""
    cudnn, deterministic = torch.backends.cudnn, torch.utils.deterministic  # type: ignore[attr-defined]
    for place, name in (
        (cudnn, "benchmark"),
        (cudnn, "deterministic"),
        (deterministic, "fill_uninitialized_memory"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)


def chosen() -> tuple[bool, bool, bool, str | None]:
    """(deterministic algorithms, deterministic cuDNN, cuDNN tries which is the fastest, cuBLAS's workspace)."""
    cudnn = torch.backends.cudnn
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, workspace


@pytest.mark.usefixtures("kernels")
def test_kernels_of_a_gpu_are_the_same_each_time_or_the_fastest_as_is_wanted() -> None:
    before = chosen()
    be_deterministic(True, torch.device("cpu"))
    assert chosen() == before
    be_deterministic(False, torch.device("cuda", 0))
    assert chosen() == (False, False, True, None)
    be_deterministic(True, torch.device("cuda", 0))
    assert chosen() == (True, True, False, ":4096:8")
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wanted", "environment", "found"),
    [(0, {"OMP_NUM_THREADS": "2"}, 2), (0, {}, 1), (3, {"OMP_NUM_THREADS": "2"}, 3), (3, {}, 3)],
)
def test_threads_are_the_configs_else_those_of_the_environment_else_one(
    wanted: int, environment: dict[str, str], found: int
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # what torch had read
        use_threads(wanted, says_threads(environment))
        assert torch.get_num_threads() == found
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("wanted", "gpus", "local_rank", "found"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 2, 1, "cuda:1"),
        ("cuda", 2, 0, "cuda:0"),
        ("cpu", 2, 1, "cpu"),
        ("auto", 2, 2, "LOCAL_RANK is 2 on gpu-a01, where torch sees 2 GPUs: "),
        ("cuda", 0, 0, "LOCAL_RANK is 0 on gpu-a01, where torch sees 0 GPUs: "),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_cpu(
    wanted: str, gpus: int, local_rank: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    info = RankInfo(node="gpu-a01", rank=5, local_rank=local_rank)
    if found.startswith("LOCAL_RANK"):
        with pytest.raises(TrainingRefused) as refused:
            choose_device(wanted, info)
        assert str(refused.value) == found + "start at most one rank per GPU, or give device=cpu"
        assert refused.value.rank == 5
    else:
        assert str(choose_device(wanted, info)) == found
    assert taken == ([local_rank] if found.startswith("cuda") else [])


@pytest.fixture
def world() -> Iterator[World]:
    """Of one rank."""
    yield World(RankInfo(node="gpu-a01"), torch.device("cpu"))
    dist.destroy_process_group()


def test_a_world_of_one_hears_itself(world: World) -> None:
    assert (world.rank, world.size, world.is_first, world.backend) == (0, 1, True, "gloo")
    assert world.sum([3, -1, 1 << 62]) == [3, -1, 1 << 62]
    value = {"a": [1, None, "\u00e9"], "b": 0.1}
    assert world.broadcast_json(value) == value
    assert world.broadcast_json(None) is None
    assert world.gather_json(value) == [value]
    assert SumLater(world, torch.tensor(1.5, dtype=torch.float64), [2.0, 0.0]).read() == [1.5, 2.0, 0.0]
    odd = torch.arange(6.0).reshape(2, 3).t()
    world.broadcast([odd])
    assert odd.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    world.barrier()


def test_a_refusal_of_a_rank_is_all_ranks_and_any_other_error_its_own(world: World) -> None:
    with world.unanimous():
        pass
    with pytest.raises(TrainingRefused) as refused, world.unanimous():
        raise TrainingRefused("some-id", "no such data", rank=9)
    assert (refused.value.id, str(refused.value), refused.value.rank) == ("some-id", "no such data", 0)
    with pytest.raises(ValueError, match="of its own"), world.unanimous():
        raise ValueError("of its own")


@pytest.mark.parametrize(
    ("other", "is_agreed"), [({"images": 40}, True), ({"images": 34}, False), (None, False)]
)
def test_a_vote_knows_of_a_rank_that_has_found_something_else(
    world: World, monkeypatch: pytest.MonkeyPatch, other: Any, is_agreed: bool
) -> None:
    """The other rank's part is what this one gave when it voted for the same."""
    parts: list[torch.Tensor] = []

    def least(part: torch.Tensor, **_: object) -> None:
        parts.append(part.clone())
        part.copy_(torch.minimum(part, parts[0]))

    monkeypatch.setattr(dist, "all_reduce", least)
    for value in (other, {"images": 40}):
        with world.unanimous() as vote:
            vote.value = value
    assert vote.is_agreed is is_agreed
    assert len(parts) == 2


def test_others_that_are_late_are_waited_for_in_a_collective_with_signs_of_life(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shows where a rank is sees torch's Python function alone, and only while that does not return."""
    signs = list[int]()
    third = threading.Event()

    def sign() -> None:
        signs.append(1)
        if len(signs) == 3:
            third.set()

    def others_are_late(_: torch.Tensor) -> None:
        assert third.wait(60)

    monkeypatch.setattr(dist, "all_reduce", others_are_late)
    assert world.sum([7], meanwhile=sign) == [7]
    after = len(signs)
    assert world.sum([8]) == [8]
    assert len(signs) == after >= 3


def test_on_a_gpu_a_sum_is_waited_for_in_a_function_of_torch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's collectives return at once, and tensor.tolist() has no frame."""
    done, on_cpu = list[str](), torch.tensor

    class Stream:
        def synchronize(self) -> None:
            done.append("synchronize")

    monkeypatch.setattr(world, "device", torch.device("cuda"))
    monkeypatch.setattr(torch, "tensor", lambda values, dtype, **_: on_cpu(values, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(dist, "all_reduce", lambda _: done.append("all_reduce"))
    assert world.sum([7]) == [7]
    assert done == ["all_reduce", "synchronize"]
