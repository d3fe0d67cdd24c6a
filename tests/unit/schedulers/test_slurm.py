"""Slurm's environment as an allocation: a test for each rule, on a recording changed where it matters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.cli.main import read_env_file
from entrypoint.core.errors import BadInput
from entrypoint.schedulers import choice, slurm
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.request import PlacementRequest
from tests.unit import plans

NOTHING = PlacementRequest()


def granted(recording: str, **change: str | None) -> Allocation:
    """What the recording grants; None takes a variable away."""
    env = read_env_file(plans.RECORDINGS / "slurm" / f"{recording}.env")
    env.update({name: value for name, value in change.items() if value is not None})
    return slurm.allocation({name: env[name] for name in env if change.get(name, "") is not None}, NOTHING)


def test_a_step_is_read_whole() -> None:
    assert granted("two-tasks-step-gpus-per-task.task5") == Allocation(
        scheduler="slurm",
        job_id="10",
        job_number=10,
        job_name="two-tasks-step-gpus-per-task.sh",
        run_id="10",
        submit_dir="/home/alice/fx",
        step_id="0",
        context="task",
        nodes=("gpu-a01", "gpu-a02", "gpu-b07"),
        node_rank=2,
        tasks_per_node=(2, 2, 2),
        local_id=1,
        gpus=2,
        gpus_visible=1,
        cpus=2,
        start_line="srun --ntasks-per-node=1 apptrain launch -- CMD",
        sources={
            "job_id": "SLURM_JOB_ID",
            "nodes": "SLURM_STEP_NODELIST",
            "tasks_per_node": "SLURM_STEP_TASKS_PER_NODE",
            "gpus": "SLURM_GPUS_ON_NODE",
            "cpus": "SLURM_CPUS_ON_NODE",
            "step_id": "SLURM_STEP_ID",
            "node_rank": "SLURM_NODEID",
            "local_id": "SLURM_LOCALID",
            "gpus_visible": "CUDA_VISIBLE_DEVICES",
        },
    )


def test_the_commands_environment_of_salloc_is_read_whole() -> None:
    assert granted("salloc.command") == Allocation(
        scheduler="slurm",
        job_id="31",
        job_number=31,
        job_name="interactive",
        run_id="31",
        submit_dir="/home/alice/fx",
        context="batch",
        nodes=("gpu-a01", "gpu-a02"),
        node_rank=0,
        tasks_per_node=(1, 1),
        gpus=2,
        cpus=1,
        start_line="srun --ntasks-per-node=1 apptrain launch -- CMD",
        sources={
            "job_id": "SLURM_JOB_ID",
            "nodes": "SLURM_JOB_NODELIST",
            "tasks_per_node": "SLURM_TASKS_PER_NODE",
            "gpus": "SLURM_GPUS_PER_NODE",
            "cpus": "SLURM_JOB_CPUS_PER_NODE",
        },
    )


def test_uneven_tasks_are_told_node_by_node() -> None:
    task = granted("five-tasks-cyclic.task4")
    assert (task.tasks_per_node, task.node_rank, task.local_id) == ((3, 1, 1), 0, 2)
    assert granted("nine-tasks.task8").tasks_per_node == (8, 1)


def test_an_array_element_has_the_arrays_number_and_a_run_of_its_own() -> None:
    first = granted("array.task0", SLURM_JOB_ID="19", SLURM_ARRAY_TASK_ID="3")
    assert (first.job_id, first.job_number, first.array_index, first.run_id) == ("19", 20, 3, "20_3")


def test_a_requeued_job_counts_its_restarts_and_keeps_its_run() -> None:
    again = granted("requeued.batch")
    assert (again.restart_count, again.run_id) == (1, "34")
    assert granted("one.batch").restart_count == 0


def test_an_interactive_shell_is_a_place_before_the_step() -> None:
    shell = granted("salloc-shell.shell")
    assert (shell.context, shell.nodes, shell.tasks_per_node) == ("batch", ("gpu-a01", "gpu-a02"), (1, 1))
    assert shell.sources["nodes"] == "SLURM_JOB_NODELIST"


def test_more_cpus_on_the_node_than_the_tasks_asked_for_are_not_theirs() -> None:
    task = granted("gpus-per-node-typed.task0", SLURM_CPUS_PER_TASK="3")
    assert (task.cpus, task.sources["cpus"]) == (3, "SLURM_CPUS_PER_TASK")


def test_cpus_per_task_left_over_from_the_job_do_not_enlarge_the_step() -> None:
    task = granted("two-tasks-gpus-per-node.task0", SLURM_CPUS_PER_TASK="8")
    assert (task.cpus, task.sources["cpus"]) == (2, "SLURM_CPUS_ON_NODE")


def test_in_a_batch_script_the_cpus_are_the_first_nodes() -> None:
    batch = granted("five-tasks-cyclic.batch")
    assert (batch.cpus, batch.sources["cpus"]) == (3, "SLURM_JOB_CPUS_PER_NODE")


@pytest.mark.parametrize(
    ("per_task", "cpus", "source"),
    [("1", 2, "SLURM_CPUS_PER_TASK"), ("2", 4, "SLURM_CPUS_ON_NODE"), ("3", 4, "SLURM_CPUS_ON_NODE")],
)
def test_the_cpus_of_all_tasks_of_the_node_are_counted_up_to_those_of_the_node(
    per_task: str, cpus: int, source: str
) -> None:
    task = granted("two-tasks-gpus-per-node.task0", SLURM_CPUS_ON_NODE="4", SLURM_CPUS_PER_TASK=per_task)
    assert (task.cpus, task.sources["cpus"]) == (cpus, source)


def test_slices_of_gpus_are_those_that_a_task_sees_and_before_the_step_those_of_its_only_task() -> None:
    slices = "MIG-3e1c8a51,MIG-4e1c8a51"
    assert granted("gres.task0", CUDA_VISIBLE_DEVICES=slices).slices == 2
    assert granted("gres.batch", CUDA_VISIBLE_DEVICES=slices, SLURM_TASKS_PER_NODE="1(x3)").slices == 2
    assert granted("gres.batch", CUDA_VISIBLE_DEVICES=slices, SLURM_TASKS_PER_NODE="2(x3)").slices == 0


def test_a_job_without_a_name_or_a_folder_has_none_that_is_empty() -> None:
    task = granted("gres.task0", SLURM_JOB_NAME="", SLURM_SUBMIT_DIR="")
    assert (task.job_name, task.submit_dir) == ("job", None)


def test_without_a_variable_the_cpus_are_unknown() -> None:
    assert granted("gres.task2", SLURM_CPUS_ON_NODE=None).cpus is None
    assert granted("gres.batch", SLURM_JOB_CPUS_PER_NODE=None).cpus is None


def test_a_step_without_gpus_has_none_whatever_the_job_has() -> None:
    assert granted("gres-step-none.task0").gpus == 0
    assert granted("gres-step-none.batch").gpus == 2


@pytest.mark.parametrize(
    ("variable", "value"),
    [("CUDA_VISIBLE_DEVICES", "NoDevFiles"), ("SLURM_GPUS_PER_NODE", "0"), ("SLURM_JOB_GPUS", "0,1")],
)
def test_a_variable_of_gpus_without_a_number_means_none(variable: str, value: str) -> None:
    task = granted("whole-nodes.task0", **{variable: value})
    assert (task.gpus, task.gpus_unnamed, task.sources["gpus"]) == (0, False, variable)


def test_without_any_variable_of_gpus_it_is_unknown_whether_there_are_some() -> None:
    for place in ("batch", "task0"):
        found = granted(f"whole-nodes.{place}")
        assert (found.gpus, found.gpus_unnamed, found.gpus_unknown) == (None, True, "")
    assert granted("cpu-only.task0").gpus is None


def test_visible_devices_without_a_number_of_gpus_leave_it_unknown() -> None:
    shared = granted("gres.task0", SLURM_GPUS_ON_NODE=None)
    assert (shared.gpus, shared.gpus_unknown) == (None, "SLURM_GPUS_ON_NODE is not set")


def test_sallocs_command_without_gpus_per_node_leaves_them_unknown() -> None:
    command = granted("salloc.command", SLURM_GPUS_PER_NODE=None)
    assert (command.gpus, command.gpus_unknown) == (None, "SLURM_GPUS_PER_NODE is not set")


@pytest.mark.parametrize(("text", "gpus"), [("4", 4), ("a100:4", 4), ("a100:2,h100:1", 3), ("gpu:a100:2", 2)])
def test_types_of_gpus_are_left_out_of_their_number(text: str, gpus: int) -> None:
    assert granted("salloc.command", SLURM_GPUS_PER_NODE=text).gpus == gpus


@pytest.mark.parametrize("visible", [None, "0,1", "1,0"])
def test_a_task_that_sees_all_gpus_is_not_limited(visible: str | None) -> None:
    assert granted("gres.task0", CUDA_VISIBLE_DEVICES=visible).gpus_visible is None


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("1", 1),
        ("0,-1,1", 1),
        ("-1", 0),
        ("", 0),
        ("NoDevFiles", 0),
        ("MIG-3e1c8a51-4b1e-5c0f-9d57-21fdc8d5e4a7", 1),
    ],
)
def test_a_task_that_sees_fewer_gpus_is_limited_to_them(visible: str, seen: int) -> None:
    task = granted("gres.task0", CUDA_VISIBLE_DEVICES=visible)
    assert (task.gpus, task.gpus_visible) == (2, seen)


def test_a_total_of_gpus_that_comes_out_even_is_taken() -> None:
    assert granted("gpus-total.task1", SLURM_GPUS="4").gpus == 2
    assert granted("gpus-total.task1", SLURM_GPUS="a100:4").gpus == 2


def test_a_total_of_gpus_says_nothing_about_a_step_on_a_part_of_the_job() -> None:
    assert granted("gpus-total.task1", SLURM_JOB_NUM_NODES="3").gpus == 2


def test_a_total_of_gpus_says_nothing_about_a_step_that_asked_per_node() -> None:
    assert granted("gpus-total.task1", SLURM_GPUS_PER_NODE="2").gpus == 2


def test_a_step_needs_no_variable_of_the_job_but_its_number() -> None:
    bare = {
        name: value
        for name, value in read_env_file(plans.RECORDINGS / "slurm" / "gres.task2.env").items()
        if name in ("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_LOCALID") or name.startswith("SLURM_STEP_")
    }
    task = slurm.allocation(bare, NOTHING)
    assert (task.nodes, task.node_rank, task.gpus, task.cpus) == (
        ("gpu-a01", "gpu-a02", "gpu-b07"),
        2,
        0,
        None,
    )
    assert (task.job_name, task.submit_dir) == ("job", None)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=6))
def test_repeated_numbers_expand_to_one_for_each_node(runs: list[tuple[int, int]]) -> None:
    tasks = [number for number, times in runs for _ in range(times)]
    text = ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in runs)
    env = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": f"n[1-{len(tasks)}]",
        "SLURM_TASKS_PER_NODE": text,
    }
    assert slurm.allocation(env, NOTHING).tasks_per_node == tuple(tasks)


def test_the_variables_of_two_schedulers_are_slurms_job_and_that_is_said() -> None:
    env = read_env_file(plans.RECORDINGS / "slurm" / "gres.task0.env") | {"PBS_JOBID": "5.login01"}
    taken = choice.allocation(env, "auto", NOTHING)
    assert taken.scheduler == "slurm"
    assert taken.notes == ("taking slurm: the variables of pbs are there too (--scheduler chooses)",)
    assert choice.allocation(env, "slurm", NOTHING).notes == ()


def test_options_that_repeat_what_slurm_says_are_taken() -> None:
    env = read_env_file(plans.RECORDINGS / "slurm" / "gres.task2.env")
    request = PlacementRequest(nodes="gpu-a[01-02],gpu-b07", node_rank=2)
    assert choice.allocation(env, "auto", request) == slurm.allocation(env, NOTHING)


def test_a_node_file_beside_slurm_is_ignored_and_that_is_said() -> None:
    env = read_env_file(plans.RECORDINGS / "slurm" / "gres.task2.env")
    request = PlacementRequest(nodefile=plans.RECORDINGS / "missing")
    assert choice.allocation(env, "auto", request).notes == (
        f"--nodefile {plans.RECORDINGS / 'missing'} is ignored: slurm tells its nodes itself",
    )


def test_an_unknown_scheduler_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        BadInput, match=r"^--scheduler lsf is unknown: choose from auto, embedded, slurm, pbs, manual$"
    ):
        choice.find({}, "lsf", NOTHING)


def test_a_machine_list_as_large_as_a_cluster_is_read() -> None:
    env = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "r[00-15]c[00-31]n[00-31]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x16384)",
        "SLURM_NODEID": "16383",
        "SLURM_LOCALID": "0",
    }
    task = slurm.allocation(env, NOTHING)
    assert (task.nnodes, task.nodes[task.node_rank]) == (16_384, "r15c31n31")
