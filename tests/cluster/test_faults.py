"""A training on the test cluster loses nothing that it promises to keep, whatever breaks: tests/faults, some of its cases.

Needs root. The moments are drawn; APPTRAIN_TEST_SEED=SEED draws those of an earlier session, whose seed stands at the
session's end. Where one run goes through several faults, it must get through each of them and end like the run that met none.
"""

import os
import secrets
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.account import Account, account, clear
from tests.faults import cases, table
from tests.faults.cases import Plan
from tests.faults.run import Reference, Suffered, go_through, reference

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]

RUNS: dict[str, Plan] = {
    "the walltime, a killed rank, a dead node": (
        "requeue",
        (cases.Walltime, cases.KilledRank, cases.DeadNode),
    ),
    "a full disk": ("requeue", (cases.FullDisk,)),
}
"""Of `make faults`, which has them all, as many as a session has time for."""


@pytest.fixture(scope="module")
def user(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(user: Account) -> Reference:
    return reference(user)


@pytest.fixture
def seed(tell: Callable[[str], None]) -> str:
    found = os.environ.get("APPTRAIN_TEST_SEED") or secrets.token_hex(4)
    tell(f"faults: APPTRAIN_TEST_SEED={found}")
    return found


@pytest.mark.timeout(2400, func_only=True)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_as_if_nothing_had_happened_after(
    user: Account, undisturbed: Reference, seed: str, tell: Callable[[str], None], name: str
) -> None:
    policy, kinds = RUNS[name]
    clear(user)
    folder = f"{policy}-{list(RUNS).index(name)}"

    def note(one: Suffered) -> None:
        tell(f"faults: {table.line(one)}")

    _, problems = go_through(
        user,
        folder,
        [kind() for kind in kinds],
        undisturbed,
        policy=policy,
        seed=f"{seed} {folder}",
        on_fault=note,
    )
    assert not problems, "\n".join(problems)
