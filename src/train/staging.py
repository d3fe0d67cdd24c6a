"""Copies tensors to memory that is kept, laid out as a safetensors file. Begin at `Buffer`; checkpoint.py
keeps its drafts in it.

A file is the length of a header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each
tensor), and the tensors' bytes in row-major order without a gap. Reading is left to the safetensors library.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

CHUNK: Final = 4 << 20
"""Bytes handed out at a time: large enough to be quick, small enough to leave the interpreter to others."""

_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class Buffer:
    """One file's worth of tensors as they were at one moment.

    The memory stays for the next moment: writing to fresh pages takes several times as long.
    """

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._views: dict[str, Tensor] = {}
        self._header = b""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy them. From a GPU the copies are only queued behind its work; `chunks` waits for them.

        Raises TypeError for a dtype that the format does not have.
        """
        cuda = any(value.is_cuda for value in tensors.values())
        # Larger elements first, so that each tensor's place suits its elements.
        ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        layout = tuple((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in ordered)
        if layout != self._layout:
            self._lay_out(layout, pinned=cuda)
        for name, view in self._views.items():
            view.copy_(tensors[name].detach(), non_blocking=True)
        if cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file's content, piece by piece."""
        self._await_copies()
        yield self._header
        content = self._memory.numpy().data
        for begin in range(0, len(content), CHUNK):
            yield content[begin : begin + CHUNK]

    def not_finite(self) -> str | None:
        """The name of a tensor that holds an infinity or a NaN; None where there is none."""
        self._await_copies()
        return next((name for name, view in self._views.items() if not _finite(view)), None)

    def _await_copies(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _lay_out(self, layout: _Layout, *, pinned: bool) -> None:
        entries, places, end = {}, {}, 0
        for name, dtype, shape in layout:
            if dtype not in _NAMES:
                raise TypeError(f"{name} is of {dtype}, which a safetensors file cannot hold")
            begin, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            places[name] = slice(begin, end)
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        self._views = {
            name: self._memory[places[name]].view(dtype).view(shape) for name, dtype, shape in layout
        }
        self._layout = layout


def _finite(view: Tensor) -> bool:
    """By numpy, which leaves torch's threads to the training."""
    if not view.is_floating_point():
        return True
    if view.dtype == torch.bfloat16:
        exponent = 0x7F80
        return not bool(((view.view(torch.int16).numpy() & exponent) == exponent).any())
    return bool(np.isfinite(view.numpy()).all())
