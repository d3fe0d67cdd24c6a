"""A plan in one line, numbers of ranks that contradict what was granted, and variables of the ranks."""

import re
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, parse_args

from entrypoint.cli import main as cli
from entrypoint.core.errors import BadInput
from entrypoint.plan import launch_plan, rules
from entrypoint.plan.origin import Origin, ValueSource
from entrypoint.plan.profile import Profile
from entrypoint.plan.resolve import resolve
from entrypoint.plan.sources import Settings
from tests.unit.scene import planned


def settings(*options: str) -> Settings:
    given = vars(cli.parser().parse_args(["launch", "--nodes", "127.0.0.1", "--node-rank", "0", *options]))
    return resolve({}, given, ["script.py"], hostname=None)[1]


@pytest.mark.parametrize(
    ("members", "ranks", "size"),
    [([1, 2], 2, "2 nodes x 2 ranks"), ([1, 2], 1, "2 nodes x 1 rank"), ([1], 4, "1 node x 4 ranks")],
)
def test_a_plan_in_one_line_counts_as_one_speaks(members: list[int], ranks: int, size: str) -> None:
    plan = replace(launch_plan.with_members(planned(), members, 1), nproc_per_node=ranks)
    threads = plan.env["OMP_NUM_THREADS"]
    assert launch_plan.in_brief(plan) == (
        f"job 7, attempt 1: {size} on cpu, mode torchrun, rendezvous {plan.rendezvous.endpoint}, "
        f"OMP_NUM_THREADS={threads}"
    )


def test_another_number_of_ranks_than_that_of_the_tasks_which_are_one_each_is_refused() -> None:
    granted = replace(planned().allocation, tasks_per_node=(2, 2))
    found, _ = rules._nproc_per_node(granted, settings("--nproc-per-node", "2"), "rank", "cpu")
    assert found.value == 2
    text = (
        r"--nproc-per-node 3, but each of the 2 tasks on a node is one rank: leave it out, or start 3 tasks"
    )
    with pytest.raises(BadInput, match=text):
        rules._nproc_per_node(granted, settings("--nproc-per-node", "3"), "rank", "cpu")


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (None, "how many GPUs this node has for us is unknown: add --nproc-per-node N"),
        (0, "job 7 was granted no GPU on this node: give --gpus-per-node N, or give --device cpu"),
    ],
)
def test_gpus_are_not_counted_where_nobody_said_how_many_or_there_are_none(
    gpus: int | None, text: str
) -> None:
    granted = replace(planned().allocation, gpus=gpus)
    with pytest.raises(BadInput, match=f"--device cuda, but {text}"):
        rules._nproc_per_node(granted, settings(), "torchrun", "cuda")


CARRIED_OUT = {
    *("--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--rdzv-conf", "--local-addr", "--max-restarts", "--no-python"),
}
"""torchrun's options that `_run` in entrypoint/ranks/agent.py carries out: one more in the plan's line must first
be one more there."""


def test_the_line_of_a_plan_has_no_option_that_the_agent_does_not_carry_out() -> None:
    plan, script = planned(), ("script.py",)
    c10d = replace(plan.rendezvous, backend="c10d")
    both = (
        replace(plan, command=script),
        replace(plan, command=script, rendezvous=c10d, no_python=True, max_restarts=3),
    )
    found = {word.partition("=")[0] for each in both for word in each.argv[1:-1]}
    assert found == CARRIED_OUT


WORDS = [
    [],
    ["--"],
    ["--", "--"],
    ["--", "--lr", "0.1"],
    ["--", "--", "--lr", "0.1"],
    ["--lr", "0.1", "--", "rest"],
    ["first", "--", "--", "rest"],
    ["", "--", ""],
    ["--", "-m", "--", "--nnodes", "9"],
    ["--no-python", "-m", "--help"],
    ["$HOME", "$$", "${rank}", "${local_rank}", "a$", "$local_rank$$"],
]
"""What stands behind a script or a module."""


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
@pytest.mark.parametrize("begin", [["script.py"], ["-m", "package.module"], ["--no-python", "tool"]])
def test_a_program_gets_from_us_what_torchrun_gives_it_for_the_line_that_plan_prints(
    begin: Sequence[str], words: Sequence[str]
) -> None:
    no_python = begin[0] == "--no-python"
    command = (*begin[no_python:], *words)
    plan = replace(planned(), command=command, no_python=no_python)
    config, program, arguments = config_from_args(parse_args(plan.argv[1:]))  # type: ignore[no-untyped-call]
    assert (config.min_nodes, program == "tool") == (plan.nnodes, no_python)
    given = [string.Template(word).safe_substitute(local_rank="3") for word in arguments]
    started = plan.program[1:] if no_python else ["-u", *plan.program]
    assert given == started
    as_rank = replace(plan, mode="rank")
    assert as_rank.argv[0 if no_python else 1 :] == plan.program


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_in_mode_exec_no_torchrun_is_meant_and_the_program_gets_every_word(words: Sequence[str]) -> None:
    plan = replace(planned(), mode="exec", command=("tool", *words), no_python=True)
    assert plan.argv == ["tool", *words]


def ranks_env(command: Sequence[str], *options: str, **env: str) -> dict[str, str]:
    """What a plan adds for the ranks, on a node with four CPUs."""
    given = vars(cli.parser().parse_args(["launch", "--run-dir", "run", *options]))
    job = {"APPTRAIN_EMBEDDED_JOB_ID": "7", "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.1"}
    node = job | {"APPTRAIN_EMBEDDED_NODENAME": "127.0.0.1", "APPTRAIN_EMBEDDED_CPUS_ON_NODE": "4"}
    return dict(resolve(node | env, given, command, hostname=None)[0].env)


def test_the_reference_job_has_one_thread_everywhere_and_a_script_its_share_of_the_cpus() -> None:
    assert ranks_env(["-m", "train", "steps=2"])["OMP_NUM_THREADS"] == "1"
    assert ranks_env(["script.py"])["OMP_NUM_THREADS"] == "4"
    assert ranks_env(["script.py"], "--nproc-per-node", "2")["OMP_NUM_THREADS"] == "2"


def test_a_variable_of_the_profile_counts_unless_the_user_has_set_it(tmp_path: Path) -> None:
    site = tmp_path / "lab.yaml"
    site.write_text("title: The lab\nenv: {NCCL_DEBUG: INFO}\n")
    assert ranks_env(["script.py"], "--profile", str(site))["NCCL_DEBUG"] == "INFO"
    assert "NCCL_DEBUG" not in ranks_env(["script.py"], "--profile", str(site), NCCL_DEBUG="WARN")


def test_nodes_on_one_machine_do_not_take_a_sites_interfaces_but_the_users(tmp_path: Path) -> None:
    site = tmp_path / "lab.yaml"
    site.write_text("launch: {interface: ib0}\nenv: {NCCL_SOCKET_IFNAME: hsn}\nhost_suffix: -ib0\n")
    found = ranks_env(["script.py"], "--profile", str(site))
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    found = ranks_env(["script.py"], "--profile", str(site), "--interface", "eth1")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")


def test_nccl_gets_whole_names() -> None:
    found = ranks_env(["script.py"], "--interface", "hsn0,hsn1")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("hsn0,hsn1", "=hsn0,hsn1")


def test_efa_is_libfabrics_provider_unless_the_user_or_the_profile_has_chosen(tmp_path: Path) -> None:
    site = tmp_path / "aws.yaml"
    site.write_text("launch: {fabric: efa}\n")
    assert ranks_env(["script.py"], "--profile", str(site))["FI_PROVIDER"] == "efa"
    assert "FI_PROVIDER" not in ranks_env(["script.py"], "--profile", str(site), FI_PROVIDER="tcp")
    site.write_text("launch: {fabric: efa}\nenv: {FI_PROVIDER: sockets}\n")
    assert ranks_env(["script.py"], "--profile", str(site))["FI_PROVIDER"] == "sockets"
    assert "FI_PROVIDER" not in ranks_env(["script.py"], "--fabric", "slingshot")


@pytest.mark.parametrize(
    ("name", "key", "origin"),
    [
        ("port_is_derived", "master_port", Origin.DERIVED),
        ("device_is_default", "device", Origin.DEFAULT),
        ("nproc_is_derived", "nproc_per_node", Origin.DERIVED),
        ("preload_is_derived", "preload", Origin.DERIVED),
        ("venv_is_by_variable", "venv", Origin.ENVIRONMENT),
    ],
)
def test_a_plan_knows_which_values_nobody_chose(name: str, key: str, origin: Origin) -> None:
    for each in Origin:
        plan = replace(planned(), sources={key: ValueSource(each)})
        assert getattr(plan, name) is (each is origin)


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (8, 8), (9, 8), (20, 8)])
def test_the_first_eight_nodes_of_a_plan_are_shown(count: int, shown: int) -> None:
    plan = planned()
    names = tuple(f"n{number}" for number in range(count))
    granted = replace(plan.allocation, nodes=names, tasks_per_node=(1,) * count, node_rank=0)
    plan = replace(plan, allocation=granted, hosts=names, members=tuple(range(count)))
    more = f",... ({count} nodes)" if count > 8 else ""
    lines = launch_plan.describe(plan).splitlines()
    (line,) = (line for line in lines if line.startswith("nodes "))
    assert line.partition("  [")[0].split(maxsplit=1)[1] == ",".join(names[:shown]) + more


def test_a_plan_as_a_person_reads_it_has_no_empty_line_and_no_control_character() -> None:
    plan = replace(planned(), command=("my.py", "a\x1bb"))
    lines = launch_plan.describe(plan).splitlines()
    assert lines[-2] == "command:"
    assert lines[-1].endswith(" my.py 'a?b'")
    assert not [line for line in lines if line.startswith(("schema_version", "cores", "local_rank"))]
    assert f"rendezvous.endpoint      {plan.rendezvous.endpoint}" in lines
    at = lines.index("environment added for the workers:")
    assert len(lines[at + 1 : -2]) == len(plan.env)


@pytest.mark.parametrize(
    ("members", "place", "node_rank", "is_spare", "is_first"),
    [((0, 1, 2), 0, 0, False, True), ((2, 0), 0, 1, False, False), ((2, 0), 2, 0, False, True), ((0, 2), 1, 2, True, False)],
)  # fmt: skip
def test_a_node_has_its_rank_among_those_that_take_part(
    members: tuple[int, ...], place: int, node_rank: int, is_spare: bool, is_first: bool
) -> None:
    plan = planned()
    granted = replace(
        plan.allocation, nodes=("a", "b", "c"), tasks_per_node=(2,) * 3, node_rank=place, local_id=1
    )
    plan = replace(plan, allocation=granted, members=members, nproc_per_node=2)
    assert (plan.node_rank, plan.is_spare, plan.nnodes, plan.world_size) == (
        node_rank,
        is_spare,
        len(members),
        2 * len(members),
    )
    assert (plan.nodes, plan.node) == (tuple("abc"[at] for at in members), "abc"[place])
    assert (plan.rank, plan.local_rank, plan.is_first) == (None, None, is_first)
    of_rank = replace(plan, mode="rank")
    assert (of_rank.rank, of_rank.local_rank, of_rank.is_first) == (2 * node_rank + 1, 1, False)
    first = replace(of_rank, allocation=replace(granted, local_id=0))
    assert (first.rank, first.is_first) == (2 * node_rank, is_first)


def test_derived_threads_are_no_more_than_a_rank_has_cores_for() -> None:
    plan = planned()
    for origin, threads, expected in (
        (Origin.DERIVED, 2, "2"),
        (Origin.DERIVED, 3, "3"),
        (Origin.DERIVED, 4, "3"),
        (Origin.FLAG, 2, "3"),
    ):
        given = launch_plan.with_env(plan, {"OMP_NUM_THREADS": "3"}, ValueSource(origin, "x"))
        found = launch_plan.with_cores(given, (), threads)
        changed = expected != "3"
        assert found.env["OMP_NUM_THREADS"] == expected
        assert (str(found.sources["env.OMP_NUM_THREADS"]) == "derived:numa_binding") is changed
        assert str(found.sources["cores"]) == "derived:numa_binding"


@pytest.mark.parametrize(("nodes", "shown"), [(8, "2,1,1,1,1,1,1,1"), (9, "2,1,1,1,1,1,1,1,...")])
def test_uneven_tasks_are_refused_with_the_first_eight_numbers(nodes: int, shown: str) -> None:
    plan = planned()
    granted = replace(
        plan.allocation, nodes=tuple("abcdefghi"[:nodes]), tasks_per_node=(2, *[1] * (nodes - 1))
    )
    with pytest.raises(BadInput, match=rf"\b{re.escape(shown)}[^,.\d]"):
        rules._mode(granted, settings())


@pytest.mark.parametrize(
    ("scratch", "submit_dir", "env", "folder"),
    [
        ("$SCRATCH/", "/w", {"SCRATCH": "/s", "PWD": "/p"}, "/s/runs/a_b-7"),
        ("", "/w/", {"PWD": "/p"}, "/w/runs/a_b-7"),
        ("", None, {"PWD": "/p"}, "/p/runs/a_b-7"),
        ("", None, {}, "./runs/a_b-7"),
    ],
)
def test_a_run_directory_is_on_the_sites_scratch_else_where_the_job_was_submitted(
    scratch: str, submit_dir: str | None, env: dict[str, str], folder: str
) -> None:
    assert rules.run_directory(env, "a b", "7", submit_dir, Profile(scratch=scratch)) == folder
