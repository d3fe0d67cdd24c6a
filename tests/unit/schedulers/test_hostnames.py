"""When two spellings name one host."""

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.schedulers import hostnames


@pytest.mark.parametrize(
    ("names", "hosts", "counts"),
    [
        (["n1", "N1", "n1"], ("n1",), (3,)),
        (["n1", "n1.a.org", "N1.A.ORG"], ("n1",), (3,)),
        (["n1.a.org", "n1"], ("n1.a.org",), (2,)),
        (["n2", "n1.a.org", "n1.b.org"], ("n2", "n1.a.org", "n1.b.org"), (1, 1, 1)),
        (["10.0.0.1", "10.0.0.10", "10"], ("10.0.0.1", "10.0.0.10", "10"), (1, 1, 1)),
        (["fd00::1", "fd00::1", "fd00"], ("fd00::1", "fd00"), (2, 1)),
        ([], (), ()),
    ],
)
def test_a_short_name_stands_for_the_one_host_that_begins_so(
    names: list[str], hosts: tuple[str, ...], counts: tuple[int, ...]
) -> None:
    assert hostnames.merge(names, "FILE") == (hosts, counts)


def test_a_short_name_beside_two_such_hosts_is_refused() -> None:
    with pytest.raises(BadInput) as refused:
        hostnames.merge(["n1.b.org", "n1", "n1.a.org"], "FILE")
    assert str(refused.value) == "FILE: n1 may be n1.a.org or n1.b.org: use full names throughout"


@pytest.mark.parametrize(
    ("hostname", "hosts", "found", "in_networks"),
    [
        ("N1", ["n0", "n1"], [1], [1]),
        ("n1", ["n1.a", "n1.b"], [0, 1], [0, 1]),
        ("n1.a", ["n1", "n1.a"], [1], [1]),
        ("n1.a", ["n1", "n1.b"], [0], [0]),
        ("n1.a", ["n1.b"], [], []),
        ("n1", ["n0-ib0", "n1-ib0.a"], [], [1]),
        ("n1-ib0.a", ["n0", "n1"], [], [1]),
        ("n1", ["n10-ib0", "n11"], [], []),
        ("n1-ib0", ["n1-ib1"], [], []),
        ("10.0.0.1", ["10", "10.0.0.1"], [1], [1]),
        ("10", ["10.0.0.1"], [], []),
    ],
)
def test_a_host_is_found_by_its_name_short_or_full_and_by_that_of_another_network(
    hostname: str, hosts: list[str], found: list[int], in_networks: list[int]
) -> None:
    assert hostnames.find(hostname, hosts) == found
    assert hostnames.find_interface(hostname, hosts) == in_networks
