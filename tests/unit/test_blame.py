"""Which rank is named, of a hanging job and of several failures."""

from dataclasses import replace
from typing import Any

import pytest

from entrypoint.blame import STUCK, first, is_echo, verdict
from entrypoint.claims import Failure, Sighting


def sighting(rank: int, **changes: Any) -> Sighting:
    """A rank that waits in a collective."""
    waiting = Sighting(
        rank=rank,
        node_rank=rank // 2,
        node=f"n{rank // 2}",
        step=7,
        quiet=30.0,
        state="S",
        at="train.py:90 advance",
        waits_in="all_reduce",
        stack="5f0a",
    )
    return replace(waiting, **changes)


def found(*sightings: Sighting, **changes: Any) -> Failure | None:
    how: dict[str, Any] = {"unseen": (), "now": 5.0} | changes
    return verdict(sightings, "no step for 30 s", **how)


def blamed(*sightings: Sighting) -> tuple[int | None, str]:
    failure = found(*sightings)
    assert failure is not None
    return failure.rank, failure.error


def test_a_stopped_rank_is_named_although_its_stack_is_that_of_the_others() -> None:
    assert found(sighting(0), sighting(1), sighting(2, state="T"), sighting(3)) == Failure(
        node_rank=1,
        node="n1",
        rank=2,
        status=STUCK,
        signal=0,
        time=5.0,
        error="stuck, no step for 30 s after step 7: it is stopped by a signal in train.py:90 advance, "
        "while 3 of 4 ranks wait in all_reduce, train.py:90 advance",
    )


def test_a_rank_that_a_file_system_holds_has_no_stack_and_is_named() -> None:
    assert blamed(sighting(0), sighting(1, state="D", at="", waits_in="", stack="")) == (
        1,
        "stuck, no step for 30 s after step 7: it waits for a device or a file system, "
        "while 1 of 2 ranks wait in all_reduce, train.py:90 advance",
    )


def test_a_stopped_rank_comes_before_one_that_reads_a_file() -> None:
    assert blamed(sighting(0, state="D"), sighting(1, state="T"))[0] == 1


def test_the_rank_that_is_behind_is_named() -> None:
    assert blamed(sighting(0, step=8), sighting(1, step=7, at="data.py:3 read"), sighting(2, step=8)) == (
        1,
        "stuck, no step for 30 s after step 7: others are at step 8, and it is in data.py:3 read",
    )


def test_the_rank_that_does_not_wait_for_others_is_named() -> None:
    loop = sighting(1, step=None, state="R", at="data.py:3 read", waits_in="", stack="77aa")
    assert blamed(sighting(0, step=None), loop) == (
        1,
        "stuck, no step for 30 s: it waits for no other rank, and is in data.py:3 read, "
        "while 1 of 2 ranks wait in all_reduce, train.py:90 advance",
    )


def test_where_nothing_tells_who_waits_the_odd_one_out_is_named() -> None:
    same = [sighting(rank, waits_in="", at="train.py:91 item") for rank in (0, 2, 3)]
    odd = sighting(1, waits_in="", at="train.py:80 load", stack="1b")
    assert blamed(*same, odd) == (
        1,
        "stuck, no step for 30 s after step 7: it is in train.py:80 load, "
        "while 3 of 4 ranks wait in train.py:91 item",
    )


def test_where_all_do_the_same_the_one_that_stopped_first_is_named_and_the_doubt_said() -> None:
    assert blamed(sighting(0), sighting(1, quiet=31.0), sighting(2)) == (
        1,
        "stuck, no step for 30 s after step 7: it gave its last sign first, and is in train.py:90 advance "
        "like all others",
    )


def test_several_ranks_are_counted() -> None:
    ranks = [sighting(0), *(sighting(rank, state="T") for rank in range(1, 8))]
    assert blamed(*ranks)[1].endswith(
        "; with it rank 2 on n1, rank 3 on n1, rank 4 on n2, rank 5 on n2 and 2 more"
    )


def test_a_node_that_did_not_answer_is_told() -> None:
    failure = found(sighting(0), sighting(1), unseen=["n1"])
    assert failure is not None
    assert failure.error.endswith("like all others; nothing was heard from n1")


def test_without_any_rank_there_is_nobody_to_blame() -> None:
    assert found() is None


RESET = (
    "RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error [10.0.0.2]:27539: Connection reset by peer."
)


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RESET, True),
        ("RuntimeError: [pair.cc:561] Connection closed by peer [10.0.0.2]:64642. This is typically", True),
        (
            "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
            True,
        ),
        ("DistNetworkError: Broken pipe", True),
        ("torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due", True),
        ("torch.distributed.DistBackendError: NCCL error: unhandled cuda error", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("killed by SIGKILL: " + RESET, False),
        ("RuntimeError: CUDA out of memory", False),
        ("", False),
    ],
)
def test_an_echo_says_only_that_a_connection_to_another_rank_is_gone(error: str, echo: bool) -> None:
    assert is_echo(error) == echo


def failed(rank: int, time: float, error: str, status: int = 1, signal: int = 0) -> Failure:
    return Failure(node_rank=0, node="n0", rank=rank, status=status, signal=signal, time=time, error=error)


KILLED = failed(0, 5.0, "killed by SIGKILL", 137, 9)
TERMINATED = failed(1, 5.1, "killed by SIGTERM", 143, 15)
ECHO, LATE_ECHO = failed(2, 5.0, RESET), failed(3, 5.2, RESET)
CAUSE = failed(4, 5.2, "ValueError: no such label")
SILENT_REFUSAL, REFUSAL = failed(5, 5.0, "", 64), failed(6, 5.1, "train: no such file", 64)


@pytest.mark.parametrize(
    ("failures", "named"),
    [
        ([LATE_ECHO, KILLED], KILLED),
        ([ECHO, TERMINATED, CAUSE], CAUSE),
        ([ECHO, TERMINATED, LATE_ECHO], ECHO),
        ([TERMINATED, CAUSE], TERMINATED),
        ([REFUSAL, SILENT_REFUSAL], REFUSAL),
        ([SILENT_REFUSAL], SILENT_REFUSAL),
    ],
)
def test_the_first_failure_is_the_one_that_the_others_follow_from(
    failures: list[Failure], named: Failure
) -> None:
    assert first(failures) == named
