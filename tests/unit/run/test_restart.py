"""When the nodes that are left go on, and who may."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli import main as cli
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet.terms import Timeouts
from entrypoint.plan.launch_plan import LaunchPlan, with_members
from entrypoint.plan.resolve import resolve
from entrypoint.plan.sources import Settings
from entrypoint.run.given import Given
from entrypoint.run.restart import Restarts

CRASH = Outcome(status=9, rank=3, node="127.0.0.2", time=5.0, error="ValueError: x")
LOSS = Outcome(status=1, node="127.0.0.2", time=5.0, error="lost: it closed the connection")


def planned(*options: str, node: int = 1, nodes: int = 4, attempt: str = "0") -> tuple[LaunchPlan, Settings]:
    """The plan of one of four nodes, by their place from 1."""
    env = {
        "APPTRAIN_EMBEDDED_JOB_ID": "7",
        "APPTRAIN_EMBEDDED_NODELIST": f"127.0.0.[1-{nodes}]",
        "APPTRAIN_EMBEDDED_NODENAME": f"127.0.0.{node}",
        "APPTRAIN_ATTEMPT": attempt,
    }
    given = vars(cli.parser().parse_args(["launch", "--on-failure", "restart", *options]))
    given.pop("command_name")
    return resolve(env, given, ["script.py"], hostname=None)


class Node:
    """One node's view of its job."""

    def __init__(self, tmp_path: Path, *options: str, **where: Any):
        self.plan, settings = planned(*options, **where)
        self.tmp_path = tmp_path
        self.restarts = Restarts.of(self.plan, settings)
        self.run(0)

    def run(self, attempt: int) -> RunDirectory:
        run = RunDirectory(self.tmp_path, attempt)
        run.create()
        return run

    def fails(self, ended: Outcome = CRASH, lost: tuple[int, ...] = ()) -> str:
        self.restarts = self.restarts.without(lost)
        return self.restarts.why_not(ended)

    def begin(self) -> None:
        self.restarts = self.restarts.begun()

    def meet(self, members: tuple[int, ...]) -> None:
        self.restarts = self.restarts.met(members)

    def seal(self, members: Sequence[int]) -> None:
        self.restarts.seal(self.run(self.restarts.count), members)

    def checkpoint(self, name: str) -> None:
        path = self.tmp_path / "checkpoints" / name
        path.mkdir(parents=True)
        written = 1_000_000_000 + int(name.strip(".").split(".")[0].removeprefix("step-"))
        os.utime(path, (written, written))


# Plans.


def test_nodes_beyond_the_most_are_spares() -> None:
    plan, _ = planned("--nnodes", "2:3", node=1)
    assert (plan.nodes, plan.nnodes, plan.node_rank) == (("127.0.0.1", "127.0.0.2", "127.0.0.3"), 3, 0)
    assert (plan.is_spare, plan.notes) == (False, ())
    spare, _ = planned("--nnodes", "2:3", node=4)
    assert (spare.nodes, spare.node_rank, spare.node) == (plan.nodes, 3, "127.0.0.4")
    assert spare.notes == ("127.0.0.4 is a spare: it takes the place of a node that is lost",)


def test_without_restarts_there_are_no_spares() -> None:
    with pytest.raises(BadInput, match="--nnodes 2:3, but this step has 4 nodes"):
        planned("--nnodes", "2:3", "--on-failure", "requeue")


def test_torchrun_itself_does_not_restart_ranks_beside_us() -> None:
    for follows, restarts in (("stop", "5"), ("requeue", "0"), ("restart", "0")):
        plan, _ = planned("--max-restarts", "5", "--on-failure", follows)
        assert f"--max-restarts={restarts}" in plan.argv


def test_the_plan_of_the_survivors_is_the_one_that_these_nodes_would_have_at_that_attempt() -> None:
    plan, _ = planned(node=3)
    assert with_members(plan, range(4), 0) == plan
    again = with_members(plan, [1, 2, 3], 1).to_json()
    assert (again["nodes"], again["nnodes"]) == (["127.0.0.2", "127.0.0.3", "127.0.0.4"], 3)
    assert (again["node_rank"], again["attempt"], again["world_size"]) == (1, 1, 3)
    fresh, _ = planned(node=3, attempt="1")
    assert again["rendezvous"] == fresh.to_json()["rendezvous"] | {
        "endpoint": f"127.0.0.2:{fresh.rendezvous.master_port}"
    }
    assert again["rendezvous"]["is_host"] is False
    assert with_members(plan, [2, 3], 1).rendezvous.is_host


def test_a_port_that_was_chosen_is_kept() -> None:
    plan, _ = planned("--master-port", "23456")
    assert with_members(plan, range(4), 1).rendezvous.master_port == 23456


def test_a_script_that_starts_its_own_workers_is_told_the_new_places() -> None:
    plan, _ = planned("--mode", "exec", node=4)
    env = with_members(plan, [1, 3], 1).env
    assert (env["NNODES"], env["NODE_RANK"], env["MASTER_ADDR"]) == ("2", "1", "127.0.0.2")


# Whether.


def test_a_failed_rank_and_a_lost_node_are_followed_by_a_restart(tmp_path: Path) -> None:
    assert Node(tmp_path, "--nnodes", "3:4").fails(CRASH) == ""
    assert Node(tmp_path, "--nnodes", "3:4").fails(LOSS, lost=(1,)) == ""


def test_bad_input_would_be_refused_again(tmp_path: Path) -> None:
    refused = Outcome(status=64, rank=0, error="train: unknown key")
    assert Node(tmp_path).fails(refused) == "bad input would be refused again"


REFUSED = Outcome(status=64, rank=0, node="127.0.0.1", error="train: batch_size is 8")


def test_a_program_that_refuses_fewer_nodes_was_not_given_bad_input(tmp_path: Path) -> None:
    node = Node(tmp_path, "--nnodes", "1:4", "--nproc-per-node", "2")
    for members, expected in (
        ((0, 2, 3), "with 6 ranks on 3 nodes the program refuses to run: train: batch_size is 8"),
        ((2,), "with 2 ranks on 1 node the program refuses to run: train: batch_size is 8"),
    ):
        node.begin()
        node.meet(members)
        assert node.restarts.misfit(REFUSED) == expected
    silent = dataclasses.replace(REFUSED, error="")
    assert node.restarts.misfit(silent).endswith("the program refuses to run: nothing on stderr")


@pytest.mark.parametrize(
    ("restarts", "members", "ended"),
    [
        (0, (0, 1, 2), REFUSED),
        (1, (0, 1, 2, 3), REFUSED),
        (1, (0, 1, 2), CRASH),
        (1, (0, 1, 2), dataclasses.replace(REFUSED, rank=None)),
    ],
    ids=["the first attempt", "as many nodes as at first", "another status", "our own refusal"],
)
def test_what_is_refused_otherwise_stays_bad_input(
    tmp_path: Path, restarts: int, members: tuple[int, ...], ended: Outcome
) -> None:
    node = Node(tmp_path, "--nnodes", "2:4")
    for _ in range(restarts):
        node.begin()
    node.meet(members)
    assert node.restarts.misfit(ended) == ""


def test_a_port_that_is_taken_is_followed_by_a_restart_with_others_unless_it_was_chosen(
    tmp_path: Path,
) -> None:
    taken = Outcome(status=69, error="the store cannot be had")
    assert Node(tmp_path).fails(taken) == ""
    by_hand = ("--master-port", "23456")
    assert Node(tmp_path, *by_hand).fails(taken) == "the port is the same in each attempt"
    assert Node(tmp_path, *by_hand).fails(dataclasses.replace(taken, rank=0)) == ""


ANOTHER, CHOOSE = "the next attempt uses another port", "give another --master-port"


@pytest.mark.parametrize(
    ("options", "counted", "advice"),
    [
        (["--on-failure", "stop"], True, ANOTHER),
        (["--on-failure", "restart"], False, ANOTHER),
        (["--on-failure", "stop"], False, CHOOSE),
        (["--on-failure", "restart", "--master-port", "23456"], True, CHOOSE),
    ],
    ids=["in a job script", "with restarts", "by hand", "a chosen port"],
)
def test_of_a_port_that_is_taken_only_what_will_be_is_promised(
    options: list[str], counted: bool, advice: str
) -> None:
    env = {"APPTRAIN_ATTEMPT": "0"} if counted else {}
    assert Given.of_launch(*planned(*options), env).port_advice == advice


def test_without_a_least_number_all_nodes_are_needed(tmp_path: Path) -> None:
    assert Node(tmp_path).fails(LOSS, lost=(1,)) == (
        "3 of 4 nodes are left, without 127.0.0.2, and --nnodes asks for 4"
    )


def test_lost_nodes_add_up(tmp_path: Path) -> None:
    node = Node(tmp_path, "--nnodes", "2:4")
    assert node.fails(LOSS, lost=(1,)) == ""
    node.begin()
    assert node.fails(LOSS, lost=(3,)) == ""
    assert node.restarts.members() == (0, 2)
    node.begin()
    assert node.fails(LOSS, lost=(2,)) == (
        "1 of 4 nodes are left, without 127.0.0.2, 127.0.0.3, 127.0.0.4, and --nnodes asks for 2"
    )


def test_a_node_that_came_all_the_same_is_not_lost(tmp_path: Path) -> None:
    node = Node(tmp_path, "--nnodes", "3:4")
    assert node.fails(LOSS, lost=(1,)) == ""
    node.begin()
    node.meet((0, 1, 2, 3))
    assert (node.restarts.lost_names, node.restarts.members()) == ([], (0, 1, 2, 3))


def restart(node: Node) -> str:
    """Fails and begins a restart; why its meeting does not go, or empty."""
    assert node.fails() == ""
    node.begin()
    try:
        node.seal(node.restarts.members())
    except Unavailable as refusal:
        return str(refusal)
    return ""


FRUITLESS = "restarted 3 times before, the last 3 without a new checkpoint"


def test_restarts_without_a_new_checkpoint_between_them_come_to_an_end(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.checkpoint("step-00000010")
    assert [restart(node) for _ in range(4)] == ["", "", "", FRUITLESS]
    newest = "1000000010.000000000"
    assert (tmp_path / "restarts").read_text() == f"1 {newest}\n2 {newest}\n3 {newest}\n"


def test_those_of_earlier_launches_of_the_run_count(tmp_path: Path) -> None:
    (tmp_path / "restarts").write_text("1 0\n2 0\n3 0\n")
    assert restart(Node(tmp_path)) == FRUITLESS


def test_a_new_checkpoint_is_progress(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for number in range(8):
        if number % 3 == 0:
            node.checkpoint(f"step-{number:08}")
        assert restart(node) == ""


def test_a_checkpoint_that_is_not_complete_is_none(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for number in range(3):
        node.checkpoint(f".step-{number:08}.7.tmp")
        assert restart(node) == ""
    assert restart(node) == FRUITLESS


def test_restarts_are_as_many_as_asked_in_all(tmp_path: Path) -> None:
    node = Node(tmp_path, "--max-restarts", "2")
    for number in range(2):
        node.checkpoint(f"step-{number:08}")
        assert restart(node) == ""
    node.checkpoint("step-00000002")
    assert restart(node) == "restarted 2 times before, and --max-restarts is 2"


def test_within_that_number_checkpoints_that_were_seen_must_go_on_to_come(tmp_path: Path) -> None:
    node = Node(tmp_path, "--max-restarts", "6")
    node.checkpoint("step-00000010")
    assert [restart(node) for _ in range(4)] == ["", "", "", FRUITLESS]


def test_where_there_are_no_checkpoints_to_be_seen_a_given_number_counts_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, "--max-restarts", "6")
    assert [restart(node) for _ in range(6)] == [""] * 6
    assert restart(node) == "restarted 6 times before, and --max-restarts is 6"


# With whom.


def test_at_first_all_meet_at_the_first_node(tmp_path: Path) -> None:
    muster = Node(tmp_path, "--nnodes", "2:3", node=4).restarts.membership
    assert (muster.candidates, muster.absent, muster.least, muster.most) == ([0], frozenset(), 2, 3)


def test_afterwards_at_the_first_that_is_left(tmp_path: Path) -> None:
    node = Node(tmp_path, "--nnodes", "2:3", node=3)
    node.fails(LOSS, lost=(0,))
    node.begin()
    muster = node.restarts.membership
    assert (muster.candidates, muster.absent, muster.quorum) == ([1, 2], {0}, 2)
    assert node.restarts.members() == (1, 2, 3)


def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path) -> None:
    node = Node(tmp_path, "--nnodes", "2:2")
    node.fails(LOSS, lost=(1,))
    assert node.restarts.members() == (0, 2)


def test_half_of_those_that_took_part_last_need_not_wait_for_others(tmp_path: Path) -> None:
    node = Node(tmp_path, "--nnodes", "1:4")
    node.meet((0, 1, 2, 3))
    assert node.restarts.membership.quorum == 2
    node.meet((0, 2))
    assert node.restarts.membership.quorum == 1


def test_a_node_that_others_take_for_lost_is_not_lost_to_itself(tmp_path: Path) -> None:
    node = Node(tmp_path, "--nnodes", "2:4", node=2)
    node.fails(LOSS, lost=(1, 3))
    assert node.restarts.members() == (0, 1, 2)


def test_the_survivors_have_half_a_minute_to_meet(tmp_path: Path) -> None:
    node, given = Node(tmp_path), Timeouts(join=300, peer=7)
    assert node.restarts.timeouts(given) == given
    node.begin()
    assert node.restarts.timeouts(given) == Timeouts(join=30, peer=7)


# The claim.


def test_only_one_half_of_a_job_can_claim_an_attempt(tmp_path: Path) -> None:
    halves = [Node(tmp_path, "--nnodes", "1:4", node=node) for node in (1, 3)]
    for half in halves:
        half.begin()
    halves[0].seal([0, 1])
    with pytest.raises(Unavailable) as caught:
        halves[1].seal([2, 3])
    assert str(caught.value) == "other nodes run attempt 1: 127.0.0.3 was cut off from them"
    assert (tmp_path / "outcome" / "1.nodes").read_text() == "0 127.0.0.1\n1 127.0.0.2\n"
    assert RunDirectory(tmp_path, 1).crew() == [0, 1]


def test_an_attempt_that_was_closed_is_claimed_by_no_restart(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.begin()
    node.run(1).close()
    with pytest.raises(Unavailable, match="another node knows that this is the end"):
        node.seal([0])
    assert node.run(0).later_attempts() == 0


def test_an_attempt_that_was_claimed_is_not_closed(tmp_path: Path) -> None:
    run = Node(tmp_path).run(1)
    run.claim([(2, "c")], exclusive=True)
    run.close()
    assert (run.crew(), run.is_closed()) == ([2], False)


def test_the_first_attempts_claim_replaces_an_earlier_runs(tmp_path: Path) -> None:
    for members in ([0, 1], [0, 2]):
        Node(tmp_path).seal(members)
        assert RunDirectory(tmp_path, 0).crew() == members


def test_a_run_directory_that_is_gone_ends_the_restarts(tmp_path: Path) -> None:
    node = Node(tmp_path / "run")
    node.begin()
    run = node.run(1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match=r"attempt 1 cannot be claimed in .*: No such file or directory"):
        node.restarts.seal(run, [0])


def test_the_last_of_the_attempts_that_followed_is_found(tmp_path: Path) -> None:
    first: Callable[[], int] = RunDirectory(tmp_path, 3).later_attempts
    (tmp_path / "outcome").mkdir()
    assert first() == 3
    for attempt in (4, 5, 7):
        (tmp_path / "outcome" / f"{attempt}.nodes").write_text("0 a\n")
    (tmp_path / "outcome" / "6.nodes").touch()
    assert first() == 5
