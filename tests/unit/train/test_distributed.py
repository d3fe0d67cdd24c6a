"""What a rank asks of its device, as far as that can be seen without one."""

import os
from collections.abc import Iterator

import pytest
import torch

from train.distributed import be_deterministic, choose_device, use_threads
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
