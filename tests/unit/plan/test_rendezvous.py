"""The port formula, checked by enumeration against the promise in its docstring."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.plan.rendezvous import Rendezvous, port_pair

STEPS_AND_ATTEMPTS = list(itertools.product(range(8), range(3)))


def ports(*, job: int = 0, index: int = 0, step: int = 0, attempt: int = 0) -> tuple[int, int]:
    return port_pair(job_number=job, array_index=index, step=step, attempt=attempt)


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**3))
def test_ports_come_in_pairs_above_the_ephemeral_range(job: int, index: int, step: int, attempt: int) -> None:
    master, join = ports(job=job, index=index, step=step, attempt=attempt)
    assert join == master + 1
    assert 61000 <= master < join <= 65535


@given(st.integers(0, 10**9), st.integers(0, 1000), st.integers(0, 1000))
def test_neighbouring_jobs_share_no_port_over_steps_and_attempts(job: int, index: int, first: int) -> None:
    used = [
        port
        for neighbour in range(94)
        for step, attempt in STEPS_AND_ATTEMPTS
        for port in ports(job=job + neighbour, index=index, step=step, attempt=first + attempt)
    ]
    assert len(set(used)) == len(used) == 94 * 24 * 2


@given(st.integers(0, 10**9), st.integers(0, 10**4))
def test_neighbouring_array_elements_share_no_port(job: int, first: int) -> None:
    used = [
        port
        for element in range(94)
        for step, attempt in STEPS_AND_ATTEMPTS
        for port in ports(job=job, index=first + element, step=step, attempt=attempt)
    ]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize(
    ("job", "index", "step", "attempt", "expected"),
    [
        (0, 0, 0, 0, (61000, 61001)),
        (0, 0, 0, 1, (61002, 61003)),
        (0, 0, 1, 0, (61006, 61007)),
        (1, 0, 0, 0, (61048, 61049)),
        (93, 0, 7, 2, (65510, 65511)),
        (94, 0, 0, 0, (61000, 61001)),
        (10, 3, 0, 0, (61000 + 2 * ((10 + 111) % 94) * 24, 61001 + 2 * ((10 + 111) % 94) * 24)),
    ],
)
def test_some_ports_by_hand(job: int, index: int, step: int, attempt: int, expected: tuple[int, int]) -> None:
    assert ports(job=job, index=index, step=step, attempt=attempt) == expected


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [("a.b", "a.b:29500"), ("10.0.0.1", "10.0.0.1:29500"), ("fe80::1", "[fe80::1]:29500")],
)
def test_an_address_with_colons_stands_in_brackets(address: str, endpoint: str) -> None:
    met = Rendezvous("static", address, 29500, 29501, "7.0", is_host=True, local_addr="a", host_suffix="")
    assert met.endpoint == endpoint
