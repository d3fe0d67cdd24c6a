"""What a rank asks of its device, as far as that can be seen without one."""

import os
from collections.abc import Iterator

import pytest
import torch

from train.distributed import be_deterministic


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
