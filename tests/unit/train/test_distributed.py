"""What a rank asks of its device, as far as that can be seen without one."""

import os
from collections.abc import Iterator

import pytest
import torch

from train.distributed import be_deterministic, use_threads
from train.environment import says_threads


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
