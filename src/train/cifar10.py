"""CIFAR-10 as it is unpacked, in both versions: the form of its files; of a pickle only arrays are made."""

import pickle
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from torch import Tensor

from train.status import TrainingRefused

CIFAR_RECORD: Final = 1 + 3 * 32 * 32
UNREADABLE: Final = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError)
"""What a file raises that is not what it should be."""


def read_cifar10(path: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 [60000, 3, 32, 32] and labels int64 [60000]: the training batches in order, then the test.

    `path` is the folder of the binary version or of the Python version, or a folder that holds one.
    """
    for folder in (path / "cifar-10-batches-bin", path):
        if (folder / "data_batch_1.bin").is_file():
            return _read_cifar10(folder, ".bin", _cifar_binary)
    for folder in (path / "cifar-10-batches-py", path):
        if (folder / "data_batch_1").is_file():
            return _read_cifar10(folder, "", _cifar_python)
    raise TrainingRefused(
        "cifar10-missing",
        f"data.path={path}: no CIFAR-10 there: expected cifar-10-batches-bin/data_batch_1.bin to _5.bin and "
        "test_batch.bin (binary version), or cifar-10-batches-py/ (Python version)",
    )


def _read_cifar10(folder: Path, suffix: str, read: Any) -> tuple[Tensor, Tensor]:
    parts = []
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        file = folder / f"{name}{suffix}"
        try:
            part = read(file)
        except PermissionError:
            raise
        except (*UNREADABLE, pickle.UnpicklingError) as error:
            raise TrainingRefused(
                "cifar10-damaged", f"{file}: not a CIFAR-10 batch: {error}: download and unpack it again"
            ) from None
        if part.shape != (10_000, CIFAR_RECORD):
            raise TrainingRefused(
                "cifar10-short", f"{file}: {len(part)} images: expected 10000: download and unpack it again"
            )
        parts.append(part)
    table = torch.from_numpy(np.concatenate(parts))
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].to(torch.int64)


def _cifar_binary(file: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.fromfile(file, dtype=np.uint8).reshape(-1, CIFAR_RECORD)


def _cifar_python(file: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with file.open("rb") as stream:
        content = ArrayUnpickler(stream).load()
    labels = np.asarray(content[b"labels"], dtype=np.uint8)
    return np.column_stack([labels, np.asarray(content[b"data"], dtype=np.uint8)])


class ArrayUnpickler(pickle.Unpickler):
    """Reads containers, numbers, bytes and plain numeric arrays; any other class or function is refused."""

    _ALLOWED: Final = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"refused to load {module}.{name}")
        return self._ALLOWED[module, name]
