"""Which rank is named, of a hanging job and of several failures."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.core.errors import STUCK
from entrypoint.meet.blame import deadlock, first, has_left_early, is_consequence, is_echo, pause, verdict
from entrypoint.meet.reports import NO_ENDS, End, Ends, Failure, RankSnapshot


def sighting(rank: int, **changes: Any) -> RankSnapshot:
    """A rank that waits in a collective."""
    waiting = RankSnapshot(
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


def found(*sightings: RankSnapshot, **changes: Any) -> Failure | None:
    how: dict[str, Any] = {"unseen": (), "now": 5.0} | changes
    return verdict(sightings, "no step for 30 s", **how)


def blamed(*sightings: RankSnapshot) -> tuple[int | None, str]:
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


@pytest.mark.parametrize(("stacks", "named"), [("aab", 2), ("aaabc", 3), ("aabb", 0), ("aabcd", 0)])
def test_the_odd_one_out_is_named_only_if_more_than_half_do_the_same(stacks: str, named: int) -> None:
    """Else the one that stopped first."""
    ranks = [sighting(rank, waits_in="", stack=stack, quiet=40.0 - rank) for rank, stack in enumerate(stacks)]
    assert blamed(*ranks)[0] == named


def test_a_rank_without_a_stack_is_not_the_odd_one_out() -> None:
    mute = sighting(2, at="", waits_in="", stack="")
    rank, error = blamed(*(sighting(rank, quiet=30.0 + rank) for rank in (0, 1, 3)), mute)
    assert (rank, error.endswith("is in train.py:90 advance like all others")) == (3, True)


def test_a_rank_that_is_alone_is_not_compared_with_others() -> None:
    assert blamed(sighting(0))[1].endswith("it gave its last sign first, and is in train.py:90 advance")
    assert blamed(sighting(0, at=""))[1].endswith("it gave its last sign first")


def test_a_rank_that_has_ended_is_not_looked_at_for_what_it_does() -> None:
    gone = sighting(0, state="", at="data.py:3 read", waits_in="", stack="77aa")
    assert blamed(gone, sighting(1, quiet=31.0), sighting(2))[0] == 1


def test_where_all_do_the_same_the_one_that_stopped_first_is_named_and_the_doubt_said() -> None:
    assert blamed(sighting(0), sighting(1, quiet=31.0), sighting(2)) == (
        1,
        "stuck, no step for 30 s after step 7: it gave its last sign first, and is in train.py:90 advance "
        "like all others",
    )


@pytest.mark.parametrize(
    ("stopped", "more"),
    [
        (1, ""),
        (2, "; with it rank 2 on n1"),
        (5, "; with it rank 2 on n1, rank 3 on n1, rank 4 on n2, rank 5 on n2"),
        (6, "; with it rank 2 on n1, rank 3 on n1, rank 4 on n2, rank 5 on n2 and 1 more"),
        (7, "; with it rank 2 on n1, rank 3 on n1, rank 4 on n2, rank 5 on n2 and 2 more"),
    ],
)
def test_several_ranks_are_counted(stopped: int, more: str) -> None:
    ranks = [sighting(0), *(sighting(rank, state="T") for rank in range(1, 1 + stopped))]
    error = blamed(*ranks)[1]
    assert error.removesuffix(more).endswith(
        f"while 1 of {1 + stopped} ranks wait in all_reduce, train.py:90 advance"
    )


@pytest.mark.parametrize(
    ("unseen", "told"),
    [([], ""), (["n1"], "n1"), (["n1", "n2", "n3", "n4", "n5"], "n1, n2, n3, n4")],
)
def test_nodes_that_did_not_answer_are_told_the_first_four_of_them(unseen: list[str], told: str) -> None:
    failure = found(sighting(0), sighting(1), unseen=unseen)
    assert failure is not None
    assert failure.error.endswith("like all others" + (f"; nothing was heard from {told}" if told else ""))


@pytest.mark.parametrize("busy", [{"waits_in": ""}, {"state": "D"}, {"state": "T"}])
def test_ranks_are_told_apart_by_their_numbers_alone(
    busy: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compared with each would take node 0 a minute with 32,768 of them, in which no heartbeat goes out."""

    def compared(*_: object) -> bool:
        raise AssertionError

    several = [sighting(rank, **(busy if rank > 1 else {})) for rank in range(6)]
    monkeypatch.setattr(RankSnapshot, "__eq__", compared)
    assert ", while 2 of 6 ranks wait in all_reduce, train.py:90 advance" in pause(several, "x")
    deadlock(several, several, 1.0, "x", NO_ENDS, world=6, now=0.0)


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
        ([ECHO, TERMINATED, LATE_ECHO], replace(ECHO, same=1)),
        ([TERMINATED, CAUSE], TERMINATED),
        ([REFUSAL, SILENT_REFUSAL], REFUSAL),
        ([SILENT_REFUSAL], SILENT_REFUSAL),
    ],
)
def test_the_first_failure_is_the_one_that_the_others_follow_from(
    failures: list[Failure], named: Failure
) -> None:
    assert first(failures) == named


GLOO_TIMEOUT = (
    "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
)
STORE_TIMEOUT = "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1"
WATCHDOG = (
    "killed by SIGABRT:   what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7"
)


@pytest.mark.parametrize(
    ("error", "signal", "follows"),
    [
        (RESET, 0, True),
        (GLOO_TIMEOUT, 0, True),
        (STORE_TIMEOUT, 0, True),
        (WATCHDOG, 6, True),
        ("RuntimeError: [tcp/pair.cc:144] Application timeout caused pair closure", 0, True),
        ("TimeoutError: timed out", 0, True),
        ("requests.exceptions.ReadTimeout: timed out", 0, False),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", 0, False),
        (WATCHDOG, 0, False),
        ("killed by SIGABRT: ValueError: x", 6, False),
        ("ValueError: x", 0, False),
        ("", 0, False),
    ],
)
def test_a_rank_that_waited_for_another_in_vain_follows_from_that_one(
    error: str, signal: int, follows: bool
) -> None:
    assert is_consequence(failed(0, 5.0, error, signal=signal)) == follows


def left(rank: int, time: float = 4.9, step: int | None = 8, status: int = 0) -> End:
    return End(rank=rank, node_rank=rank // 2, node=f"n{rank // 2}", status=status, time=time, step=step)


def waited(rank: int, at: str = "in backward (train.py:31)", error: str = RESET) -> Failure:
    """A rank that failed because another one was gone."""
    return replace(failed(rank, 5.0 + rank / 100, error), at=at)


STEPS = "do all ranks make the same number of steps?"


@pytest.mark.parametrize(
    ("failures", "ends", "rank", "error"),
    [
        pytest.param(
            [waited(0), waited(2)],
            [left(1)],
            1,
            f"ended with 0 after 8 steps while 3 others were still in backward (train.py:31): {STEPS}",
            id="uneven loaders",
        ),
        pytest.param(
            [waited(3, "in barrier (train.py:50)")],
            [left(1, step=9), left(0, 4.8, step=9), left(2, step=9)],
            0,
            "ended with 0 after 9 steps (2 other ranks too) while 1 other was still in barrier (train.py:50): "
            + STEPS,
            id="one rank has skipped a collective",
        ),
        pytest.param(
            [waited(1, error=STORE_TIMEOUT, at="in init_process_group (train.py:5)")],
            [left(0, step=None)],
            0,
            f"ended with 0 while 3 others were still in init_process_group (train.py:5): {STEPS}",
            id="an exit in `if rank == 0` before the ranks had met",
        ),
        pytest.param(
            [replace(waited(1, error=WATCHDOG, at=""), signal=6), TERMINATED],
            [left(0, step=1)],
            0,
            f"ended with 0 after 1 step while 3 others were still running: {STEPS}",
            id="NCCL's watchdog tells nothing of the script",
        ),
        pytest.param(
            [waited(2)],
            [left(1, status=75)],
            1,
            "ended with 75 after 8 steps while 3 others were still in backward (train.py:31): "
            "do all ranks stop after the same step?",
            id="one rank has saved alone",
        ),
    ],
)
def test_a_rank_that_ended_well_while_others_needed_it_is_named(
    failures: list[Failure], ends: list[End], rank: int, error: str
) -> None:
    found = first(failures, Ends.of(ends), world=4)
    node = f"n{rank // 2}"
    earliest = min(one.time for one in failures if one.at or one.error == WATCHDOG)
    assert found == Failure(
        node_rank=rank // 2, node=node, rank=rank, status=1, signal=0, time=earliest, error=error
    )
    assert has_left_early(found.error)


@pytest.mark.parametrize(
    "cause", [CAUSE, KILLED, replace(CAUSE, error="", status=9), replace(CAUSE, rank=None)]
)
def test_a_rank_that_ended_well_is_not_named_where_another_failed_by_itself(cause: Failure) -> None:
    assert replace(first([ECHO, TERMINATED, cause], Ends.of([left(1)]), world=4), same=0) == cause


def test_without_a_rank_that_ended_well_the_first_that_waited_in_vain_is_named() -> None:
    assert first([waited(2, error=GLOO_TIMEOUT), KILLED]) == KILLED
    assert first([waited(2, error=GLOO_TIMEOUT), CAUSE]).rank == 2


def again(rank: int, **changes: Any) -> tuple[RankSnapshot, RankSnapshot]:
    """A rank in two looks, 10 s apart; the changes are of the second one."""
    one = sighting(rank, cpu=50.0)
    return one, replace(one, cpu=50.1, **changes)


def proven(
    *ranks: tuple[RankSnapshot, RankSnapshot],
    ends: Sequence[End] = (),
    world: int = 2,
    why: str = "no step for 30 s",
) -> Failure | None:
    before, after = zip(*ranks, strict=True)
    return deadlock(before, after, 10.0, why, Ends.of(ends), world=world, now=9.0)


def test_ranks_that_all_wait_for_one_another_without_using_the_cpu_are_a_deadlock() -> None:
    odd = replace(sighting(1, stack="77aa", waits_in="barrier", at="train.py:50 save"), cpu=50.0)
    found = proven(again(0), (odd, odd), again(2), world=3)
    assert found is not None
    assert (found.rank, found.status, found.time) == (1, STUCK, 9.0)
    assert "it is in train.py:50 save" in found.error


@pytest.mark.parametrize(
    "changes",
    [
        {"waits_in": ""},
        {"waits_in": "synchronize"},
        {"stack": "77aa"},
        {"stack": ""},
        {"state": "R"},
        {"state": "D"},
    ],
    ids=[
        "busy elsewhere",
        "waits for a GPU",
        "has gone on",
        "shows no stack",
        "computes",
        "waits for a file",
    ],
)
def test_one_rank_that_may_go_on_is_no_deadlock(changes: dict[str, Any]) -> None:
    assert proven(again(0), again(1)) is not None
    assert proven(again(0), again(1, **changes)) is None


def test_a_rank_that_stays_stopped_by_a_signal_is_one_whoever_else_waits_or_has_ended() -> None:
    stopped = sighting(1, state="T", at="", waits_in="", stack="")
    for others, ends, world in (((again(0), again(2)), (), 3), ((again(0),), [left(2)], 3), ((), (), 1)):
        found = proven((stopped, stopped), *others, ends=ends, world=world)
        assert found is not None
        assert (found.rank, found.status) == (1, STUCK)
        assert "it is stopped by a signal" in found.error
    assert proven((sighting(1), stopped), again(0)) is None
    assert proven((replace(stopped, state="t"), replace(stopped, state="t")), again(0)) is None  # a debugger


@pytest.mark.parametrize(
    ("step", "ends", "noticed"),
    [
        (7, [left(0), left(2)], "2 other ranks ended well, and it goes no further after step 7"),
        (None, [left(0)], "1 other rank ended well, and it goes no further"),
        (None, [], "it goes no further"),
    ],
)
def test_a_stopped_rank_that_others_have_left_behind_is_named_although_no_step_was_missed(
    step: int | None, ends: list[End], noticed: str
) -> None:
    stopped = sighting(1, step=step, state="T", at="", waits_in="", stack="")
    found = proven((stopped, stopped), ends=ends, world=1 + len(ends), why="")
    assert found is not None
    assert found.error == f"stuck, {noticed}: it is stopped by a signal"


def test_a_rank_that_uses_the_cpu_is_no_deadlock() -> None:
    one, two = again(1)
    assert proven(again(0), (one, replace(two, cpu=50.5))) is not None
    assert proven(again(0), (one, replace(two, cpu=50.6))) is None
    assert proven(again(0), (one, replace(two, cpu=0.2))) is None, "another process"


def test_without_a_word_of_every_rank_nothing_is_proven() -> None:
    assert proven(again(0), again(1), world=3) is None
    assert deadlock([], [sighting(0)], 10.0, "", NO_ENDS, world=1, now=9.0) is None
    assert deadlock([], [], 10.0, "", Ends.of([left(0)]), world=1, now=9.0) is None


def test_a_rank_that_ended_well_and_is_waited_for_is_to_blame() -> None:
    found = proven(again(0), again(2), ends=[left(1), left(3, step=7)], world=4)
    assert found is not None
    assert (found.rank, found.status) == (1, STUCK)
    assert found.error == (
        "ended with 0 after 8 steps (1 other rank too) while 2 others were still in all_reduce (train.py:90): "
        + STEPS
    )
    assert has_left_early(found.error)
    assert proven(again(0), again(2, waits_in=""), ends=[left(1), left(3)], world=4) is None


def test_what_is_said_of_a_pause_names_who_keeps_the_others_waiting() -> None:
    saving = sighting(1, at="train.py:77 save", waits_in="", stack="77aa")
    assert pause([sighting(0), saving], "no step for 300 s") == (
        "rank 1 on n0: no step for 300 s after step 7: it waits for no other rank, and is in train.py:77 save, "
        "while 1 of 2 ranks wait in all_reduce, train.py:90 advance: the job goes on, and stacks/ of the run "
        "directory has where each rank is (--hang-timeout)"
    )
    assert pause([], "no step for 300 s") == ""


def test_what_a_rank_writes_is_not_taken_for_our_own_words() -> None:
    assert not has_left_early("ended with 3 warnings")
