"""What is written is what the safetensors library reads, for any tensors."""

from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from train.staging import CHUNK, Buffer

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@st.composite
def tensors(draw: Any) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(torch.Size(shape).numel())
    values = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    tensor = values.reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


def file_of(buffer: Buffer) -> bytes:
    return b"".join(bytes(chunk) for chunk in buffer.chunks())


@settings(max_examples=200)
@given(
    st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), tensors(), max_size=6)
)
def test_the_library_reads_what_was_taken(taken: dict[str, Tensor]) -> None:
    buffer = Buffer()
    buffer.take(taken)
    found = safetensors.torch.load(file_of(buffer))
    assert found.keys() == taken.keys()
    for name, value in taken.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name], value)


def test_the_next_state_goes_to_the_same_memory_and_another_layout_to_new() -> None:
    buffer = Buffer()
    weight = torch.arange(6.0)
    buffer.take({"weight": weight})
    place = buffer._memory.data_ptr()
    weight += 1
    assert safetensors.torch.load(file_of(buffer))["weight"].tolist() == [0, 1, 2, 3, 4, 5]
    buffer.take({"weight": weight})
    assert buffer._memory.data_ptr() == place
    assert safetensors.torch.load(file_of(buffer))["weight"].tolist() == [1, 2, 3, 4, 5, 6]
    buffer.take({"weight": weight.reshape(2, 3), "bias": torch.ones(1)})
    assert {name: list(value.shape) for name, value in safetensors.torch.load(file_of(buffer)).items()} == {
        "weight": [2, 3],
        "bias": [1],
    }


def test_a_large_tensor_comes_in_pieces() -> None:
    buffer = Buffer()
    buffer.take({"weight": torch.zeros(2 * CHUNK + 1, dtype=torch.uint8)})
    assert [len(chunk) for chunk in buffer.chunks()][1:] == [CHUNK, CHUNK, 1]


def test_an_infinity_or_nan_is_found_by_name_in_every_type_that_has_them() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for value in (float("inf"), float("-inf"), float("nan")):
            buffer = Buffer()
            buffer.take({"good": torch.zeros(3, dtype=dtype), "bad": torch.tensor([1.0, value], dtype=dtype)})
            assert buffer.not_finite() == "bad"
        buffer = Buffer()
        extremes = [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny]
        buffer.take({"good": torch.tensor(extremes, dtype=dtype), "whole": torch.tensor(2**62)})
        assert buffer.not_finite() is None


def test_a_type_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^w is of torch\.complex128, which a safetensors file cannot hold$"):
        Buffer().take({"w": torch.zeros(1, dtype=torch.complex128)})
