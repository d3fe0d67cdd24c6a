"""What an attempt begins with: its bounds, its environment, what it says of itself; and how this node answers the
meeting."""

import asyncio
import contextlib
import os
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest

from entrypoint import __version__
from entrypoint.cli import main as cli
from entrypoint.core import checkout
from entrypoint.core.errors import Unavailable
from entrypoint.doctor.preflight import Preflight
from entrypoint.job import lock, outcome
from entrypoint.job.outcome import Outcome
from entrypoint.meet.identity import Identity
from entrypoint.meet.messages import Tried, Try
from entrypoint.meet.reach import carry_out
from entrypoint.node import processes
from entrypoint.node.network import Endpoint
from entrypoint.plan.resolve import resolve
from entrypoint.ranks.output import Voice
from entrypoint.run.finished import FinishedAttempt
from entrypoint.run.given import Given, identity, version_of_torch
from entrypoint.run.meeting import Meeting, OurNode

COUNTED = {"APPTRAIN_ATTEMPT": "3"}
"""A job script counts the attempts."""


def given(*options: str, **env: str) -> Given:
    """Of the second of four nodes."""
    env = {
        "APPTRAIN_EMBEDDED_JOB_ID": "7",
        "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.[1-4]",
        "APPTRAIN_EMBEDDED_NODENAME": "127.0.0.2",
        "PATH": os.environ["PATH"],
        **env,
    }
    words = vars(cli.parser().parse_args(["launch", "--device", "cpu", "--no-python", *options]))
    words.pop("command_name")
    plan, settings = resolve(env, words, ["true"], hostname=None)
    return Given.of_launch(plan, settings, env)


def ended(one: Given, status: int = 1) -> FinishedAttempt:
    return FinishedAttempt(
        plan=one.plan, run_dir=one.run_dir, outcome=Outcome(status=status), refusal=None, has_met=True
    )


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "env", "advice"),
    [
        ((), COUNTED, "the next attempt uses another port"),
        (("--on-failure=restart",), {}, "the next attempt uses another port"),
        ((), {}, "give another --master-port"),  # by hand: nothing follows
        (("--master-port=20000",), COUNTED, "give another --master-port"),
        (("--master-port=20000", "--on-failure=restart"), {}, "give another --master-port"),
    ],
)
def test_what_to_do_about_a_port_that_is_taken(
    options: tuple[str, ...], env: dict[str, str], advice: str
) -> None:
    assert given(*options, **env).port_advice == advice


@pytest.mark.parametrize(
    ("options", "again", "step", "is_chosen"),
    [
        ((), 60.0, 300.0, False),
        (("--hang-timeout=50",), 10.0, 50.0, True),
        (("--hang-timeout=0",), 60.0, 0.0, True),
    ],
)
def test_ranks_that_make_no_step_are_looked_at_after_a_fifth_of_the_bound(
    options: tuple[str, ...], again: float, step: float, is_chosen: bool
) -> None:
    one = given(*options)
    policy = one.hang_policy
    assert (one.again, one.timeouts.again, policy.again) == (again, again, again)
    assert (policy.step, policy.is_chosen, policy.silence) == (step, is_chosen, 0.0)


def test_the_bounds_of_the_meeting_are_those_that_were_asked_for_until_it_is_a_restart() -> None:
    options = ("--join-timeout=77", "--peer-timeout=33", "--on-failure=restart")
    first = given(*options)
    assert (first.timeouts.join, first.timeouts.peer) == (77.0, 33.0)
    assert first.restarts is not None
    again = first.following(ended(first), first.restarts.begun())
    assert (again.timeouts.join, again.timeouts.peer) == (30.0, 33.0)


def test_the_attempt_after_one_has_the_next_number_and_the_nodes_that_are_left() -> None:
    first = given("--on-failure=restart")
    assert first.restarts is not None
    before = ended(first)
    again = first.following(before, first.restarts.without([0, 2]).begun())
    assert (again.plan.attempt, again.plan.members, again.before) == (1, (1, 3), before)
    assert (again.run_dir.attempt, again.run_dir.path) == (1, first.run_dir.path)
    assert given().restarts is None


def test_the_plan_takes_another_address_of_node_0_only_if_there_is_one() -> None:
    one = given()
    assert one.planned((0, 1, 2, 3), "") == one.plan
    moved = one.planned((1, 3), "127.0.0.9")
    assert (moved.members, moved.attempt) == ((1, 3), one.plan.attempt)
    assert moved.rendezvous.master_addr == "127.0.0.9"


def test_variables_that_do_not_pass_are_named_once_and_in_order_and_the_list_itself_is_no_ranks() -> None:
    one = given(APPTRAIN_NOT_PASSED="B A B")
    assert one.not_passed == ("A", "B")
    assert "APPTRAIN_NOT_PASSED" not in one.env
    assert given().not_passed == ()


def test_variables_that_somebody_has_set_for_the_ranks_are_known_by_name() -> None:
    one = given(ACCELERATE_USE_CPU="true", TERM="xterm", MINE="1", APPTRAIN_PASS="MINE")
    assert one.wished == ("ACCELERATE_USE_CPU", "MINE")
    one = given(ACCELERATE_USE_CPU="true", TORCH_OF_IMAGE="1", APPTRAIN_PASSED="ACCELERATE_USE_CPU GONE")
    assert one.wished == ("ACCELERATE_USE_CPU",)
    assert "APPTRAIN_PASSED" not in one.env


def test_the_ranks_find_our_hooks_behind_the_users_own_modules(tmp_path: Path) -> None:
    one = given(PYTHONPATH="/mine", MINE="1", GROUP_RANK="5")
    found = one.rank_env(one.plan, tmp_path)
    assert found["PYTHONPATH"] == f"/mine:{tmp_path}"
    assert (found["MINE"], "GROUP_RANK" in found) == ("1", False)  # another launcher has left it
    assert found.items() >= one.plan.env.items()
    assert given().rank_env(one.plan, tmp_path)["PYTHONPATH"] == str(tmp_path)


def test_what_a_script_imports_may_have_the_names_of_our_packages(tmp_path: Path) -> None:
    paths = f"{checkout.HOME}:/mine"
    one = given(PYTHONPATH=paths)
    assert one.rank_env(one.plan, tmp_path)["PYTHONPATH"] == f"/mine:{checkout.HOME}:{tmp_path}"
    ours = replace(one.plan, command=("-m", "train", "steps=2"))
    assert one.rank_env(ours, tmp_path)["PYTHONPATH"] == f"{paths}:{tmp_path}"


def test_a_node_says_of_itself_what_all_must_agree_on() -> None:
    one = given(APPTRAIN_IMAGE_ID="7be4", **COUNTED)
    assert identity(one.plan, one.env, "lo 127.0.0.2 9 token", {"gpu": "hot"}) == Identity(
        job_id="7",
        attempt=3,
        node_rank=1,
        local_rank=None,
        name="127.0.0.2",
        nnodes=4,
        nproc_per_node=1,
        mode="torchrun",
        device="cpu",
        image_id="7be4",
        lock_digest="",
        versions={
            "python": sys.version.split()[0],
            "apptrain": __version__,
            "torch": metadata.version("torch"),
        },
        contact="lo 127.0.0.2 9 token",
        findings={"gpu": "hot"},
    )
    assert identity(one.plan, {}, "").image_id == ""


def test_the_version_of_torch_is_that_of_its_metadata(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert version_of_torch() == metadata.version("torch")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('it is imported')")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert version_of_torch() == ""
    for folder in ("torch-2.6.0a0+ec.nv25.1.dist-info", "torch_geometric-2.7.dist-info", "torch.egg-info"):
        (tmp_path / folder).mkdir()
    assert version_of_torch() == "2.6.0a0+ec.nv25.1"
    (tmp_path / "torch-2.6.0a0+ec.nv25.1.dist-info").rmdir()
    (tmp_path / "torch.egg-info/PKG-INFO").write_text("Name: torch\nVersion: 2.7\n")
    assert version_of_torch() == "2.7"
    monkeypatch.setattr(sys, "path", [])
    assert version_of_torch() == ""


def test_who_has_a_run_directory_is_known_by_its_job_and_its_process() -> None:
    holder = lock.holder_of(given().plan)
    assert (holder.job, holder.is_unique, holder.node, holder.pid) == (
        "7",
        True,
        os.uname().nodename,
        os.getpid(),
    )
    assert (holder.where, holder.begun) == (lock._where(), processes.begun(os.getpid()))
    assert len(holder.token) == 16
    assert holder.token != lock.holder_of(given().plan).token


# --- this node, as the meeting asks it ----------------------------------------------------------------------


class Silent:
    """What is said to nobody."""

    def say(self, text: str) -> None:
        raise AssertionError(text)


def our_node(one: Given) -> OurNode:
    endpoint = Endpoint(plan=one.plan, first="127.0.0.1", interface="lo", address="127.0.0.2")
    console: Any = Silent()
    voice = Voice(console=console)
    return OurNode(
        given=one, plan=one.plan, endpoint=endpoint, voice=voice, listening=contextlib.AsyncExitStack()
    )


@pytest.mark.parametrize(("hub", "address"), [(0, "127.0.0.1"), (1, "127.0.0.2"), (3, "127.0.0.4")])
def test_if_the_job_may_restart_each_node_may_be_node_0(hub: int, address: str) -> None:
    restarts = our_node(given("--on-failure=restart"))
    assert asyncio.run(restarts.address(hub)) == address
    assert asyncio.run(our_node(given()).address(hub)) == "127.0.0.1"


def test_a_node_of_one_machine_listens_to_nobody_who_tries_the_way() -> None:
    one = our_node(given())
    assert asyncio.run(one.listen(one.endpoint)) == ""


@pytest.mark.parametrize(("local_rank", "listens"), [(None, True), (0, True), (1, False)])
def test_of_nodes_on_machines_of_their_own_the_first_task_listens_to_who_tries_the_way(
    local_rank: int | None, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "joins_machines", True)
    one = our_node(given())
    if local_rank is not None:
        allocation = replace(one.plan.allocation, local_id=local_rank)
        one = replace(one, plan=replace(one.plan, mode="rank", allocation=allocation))

    async def go() -> str:
        async with one.listening:
            where = await one.listen(one.endpoint)
            answer = await carry_out(Try(1, ((1, where),)), 5.0) if where else Tried(1, ())
        assert answer == Tried(1, ())
        return where

    assert asyncio.run(go()).startswith("lo 127.0.0.2 ") == listens


def run_in(folder: Path, *options: str, **env: str) -> Given:
    return given("--run-dir", str(folder), *options, **env)


def test_a_node_whose_outcome_is_there_before_all_have_met_will_not_come(tmp_path: Path) -> None:
    """Node 0 looks for all, the others for node 0 alone."""
    (tmp_path / "outcome").mkdir()
    mine = our_node(run_in(tmp_path, APPTRAIN_EMBEDDED_NODENAME="127.0.0.1", **COUNTED))
    other = our_node(run_in(tmp_path, **COUNTED))
    assert mine.never_started() is None
    outcome.write(tmp_path / "outcome" / "2.0", Outcome(status=64, node="of another attempt", error="x"))
    (tmp_path / "outcome" / "3.1").touch()  # it is reserved
    assert mine.never_started() is None
    outcome.write(tmp_path / "outcome" / "3.2", Outcome(status=64, node="n2", error="no such option"))
    assert mine.never_started() == "n2 ended before it joined, status 64: no such option"
    outcome.write(tmp_path / "outcome" / "3.2", Outcome(status=64, error="no such option"))
    assert mine.never_started() == "127.0.0.3 ended before it joined, status 64: no such option"
    assert other.never_started() is None
    outcome.write(tmp_path / "outcome" / "3.0", Outcome(status=64, node="n0", error="no such option"))
    assert other.never_started() == "n0 ended before it joined, status 64: no such option"
    again = our_node(replace(mine.given, before=ended(mine.given)))
    assert again.never_started() is None


def test_an_outcome_of_an_older_launch_by_hand_keeps_nobody_from_coming(tmp_path: Path) -> None:
    (tmp_path / "outcome").mkdir()
    outcome.write(tmp_path / "outcome" / "0.0", Outcome(status=64, error="no such option"))
    assert our_node(run_in(tmp_path)).never_started() is None
    assert our_node(run_in(tmp_path, APPTRAIN_ATTEMPT="0")).never_started() is not None


def test_an_attempt_that_others_have_claimed_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "outcome").mkdir()
    first = run_in(tmp_path, "--on-failure=restart")
    assert first.restarts is not None
    again = first.following(ended(first), first.restarts.begun())
    our_node(again).seal([1, 2])
    with pytest.raises(Unavailable):
        our_node(again).seal([3])
    our_node(run_in(tmp_path)).seal([0])  # without restarts nobody claims


# --- what is said of the meeting ----------------------------------------------------------------------------


class Together:
    """A link of two nodes."""

    elsewhere: ClassVar = {"127.0.0.2": "ib0"}
    findings: ClassVar = {"127.0.0.2": {"gpu": "hot"}}
    members = (0, 1)


@pytest.mark.parametrize(
    ("address", "looked", "heads"),
    [
        (
            "10.0.0.2",
            True,
            ["network: rendezvous at", "preflight: ", "preflight: 2 nodes, 1 finding, 1.50 s"],
        ),
        ("10.0.0.2", False, ["network: rendezvous at"]),
        ("127.0.0.2", True, ["preflight: "]),
        ("127.0.0.2", False, []),
    ],
)
def test_the_network_and_the_time_of_the_preflight_are_said_of_machines_of_their_own(
    address: str, looked: bool, heads: list[str]
) -> None:
    one = given()
    endpoint = Endpoint(plan=one.plan, first="10.0.0.1", interface="eth0", address=address)
    link: Any = Together()
    found = Preflight(seconds=1.5, findings={}) if looked else None
    lines = Meeting(link=link, plan=one.plan, preflight=found).in_words(endpoint, one.env)
    assert [line[: len(head)] for line, head in zip(lines, heads, strict=True)] == heads
    assert ("ib0 on 127.0.0.2" in "".join(lines)) == (address == "10.0.0.2")
    assert ("hot" in "".join(lines)) == looked


def test_of_a_job_of_one_participant_no_meeting_is_told() -> None:
    one = given()
    endpoint = Endpoint(plan=one.plan, first="10.0.0.1", interface="eth0", address="10.0.0.2")
    found = Preflight(seconds=1.5, findings={"gpu": "hot"})
    assert Meeting(link=None, plan=one.plan, preflight=found).in_words(endpoint, one.env) == []
