"""A variable of a scheduler is read whole, or refused with its name and value."""

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.schedulers import variables


def refusal(name: str, value: str | None, where: str = "") -> str:
    with pytest.raises(BadInput) as refused:
        variables.number({} if value is None else {name: value}, name, "do this", where)
    return str(refused.value)


@pytest.mark.parametrize(("value", "number"), [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_a_whole_number_is_read(value: str, number: int) -> None:
    assert variables.number({"X": value}, "X", "do this") == number
    assert variables.optional_number({"X": value}, "X", "do this") == number


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "X is not set in step 0: do this"),
        ("", "X is empty in step 0: do this"),
        (" ", "X is empty in step 0: do this"),
        ("-1", "X=-1 is not a whole number: do this"),
        (" 1", "X= 1 is not a whole number: do this"),
        ("٣", "X=٣ is not a whole number: do this"),
        ("1\x1b", "X='1\\x1b' is not a whole number: do this"),
        ("9" * 19, f"X={'9' * 19} is not a whole number: do this"),
    ],
)
def test_what_is_missing_empty_or_malformed_is_told_apart(value: str | None, said: str) -> None:
    assert refusal("X", value, " in step 0") == said


def test_an_optional_number_may_be_missing_but_not_empty() -> None:
    assert variables.optional_number({}, "X", "do this") is None
    with pytest.raises(BadInput, match=r"^X is empty: do this$"):
        variables.optional_number({"X": ""}, "X", "do this")


def test_the_middle_of_a_long_value_is_left_out() -> None:
    assert variables.shown("X", "a" * 120) == f"X={'a' * 120}"
    assert variables.shown("X", "a" * 90 + "b" * 31) == f"X={'a' * 80}...{'b' * 30}"


@pytest.mark.parametrize(
    ("value", "devices", "slices"),
    [
        (None, None, 0),
        ("", 0, 0),
        (" ", 0, 0),
        ("0", 1, 0),
        (" 3 , 1 ", 2, 0),
        ("0,-1,1", 1, 0),
        ("NoDevFiles", 0, 0),
        ("GPU-5d8ef1ac,GPU-8a3b1f22", 2, 0),
        ("MIG-3e1c8a51,MIG-GPU-1/2/3", 2, 2),
        ("MIG-3e1c8a51,0", 2, 1),
        ("999999999", 1, 0),
    ],
)
def test_devices_and_slices_are_counted_as_cuda_reads_them(
    value: str | None, devices: int | None, slices: int
) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert (variables.visible_devices(env), variables.visible_slices(env)) == (devices, slices)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0,x", "'x' is no device: give numbers or UUIDs between commas, or unset it"),
        ("0,,1", "'' is no device: give numbers or UUIDs between commas, or unset it"),
        ("1234567890", "'1234567890' is no device: give numbers or UUIDs between commas, or unset it"),
        ("1,0,1", "device 1 twice: give each once, or unset it"),
    ],
)
def test_what_is_no_device_or_stands_twice_is_refused(value: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        variables.visible_devices({"CUDA_VISIBLE_DEVICES": value})
    assert str(refused.value) == f"CUDA_VISIBLE_DEVICES={value}: {said}"
