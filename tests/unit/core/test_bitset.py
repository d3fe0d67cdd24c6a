"""A set of small numbers as one integer: the same as Python's own."""

from hypothesis import given
from hypothesis import strategies as st

from entrypoint.core.bitset import Bits

numbers = st.frozensets(st.integers(0, 200))


@given(numbers, numbers, st.integers(0, 200))
def test_it_is_what_a_set_is(one: frozenset[int], other: frozenset[int], number: int) -> None:
    first, second = Bits.of(one), Bits.of(other)
    assert (list(first), len(first), bool(first)) == (sorted(one), len(one), bool(one))
    assert (first <= second, number in first) == (one <= other, number in one)
    assert list(first | second) == sorted(one | other)
    assert list(first - second) == sorted(one - other)
    assert list(first.with_(number)) == sorted({*one, number})
    assert list(first.without(number)) == sorted(one - {number})
    assert Bits.from_hex(first.hex()) == first


def test_a_text_that_is_no_hexadecimal_number_is_none() -> None:
    assert [Bits.from_hex(text) for text in ("", "g", " 1", "0x1", "1_0", "-1")] == [None] * 6
