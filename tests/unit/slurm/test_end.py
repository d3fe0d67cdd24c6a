"""The job script for Slurm: the run directory, and how a job ends."""

import os

import pytest

from tests.unit.slurm.cluster import Cluster, Tasks, failed, said


def test_the_run_directory_and_its_key_are_the_users_alone(cluster: Cluster) -> None:
    cluster.run()
    modes = {
        path.name: oct(path.stat().st_mode & 0o777) for path in [cluster.run_dir, *cluster.run_dir.iterdir()]
    }
    assert modes == {
        "apptrain-7": "0o700",
        "job.log": "0o600",
        "join.key": "0o600",
        "logs": "0o700",
        "outcome": "0o700",
    }
    assert len((cluster.run_dir / "join.key").read_text().strip()) == 64


def test_the_key_is_in_no_argument_variable_or_output(cluster: Cluster) -> None:
    ended = cluster.run()
    key = (cluster.run_dir / "join.key").read_text().strip()
    assert key not in repr(cluster.calls()) + ended.stdout + ended.stderr


def test_a_requeued_job_goes_on_in_its_run_directory_with_its_key(cluster: Cluster) -> None:
    cluster.run(tasks={"0": {"status": 75}, "1": {"status": 75}})
    key = (cluster.run_dir / "join.key").read_text()
    ended = cluster.run(SLURM_RESTART_COUNT="1")
    assert (
        "apptrain: this run directory has been used before: the run goes on there"
        in ended.stdout.splitlines()
    )
    assert (cluster.handed("APPTRAIN_ATTEMPT"), (cluster.run_dir / "join.key").read_text()) == ("1", key)
    assert (cluster.run_dir / "job.log").read_text().count("run directory /") == 2


def test_an_attempt_that_left_nothing_but_its_logs_counts(cluster: Cluster) -> None:
    (cluster.run_dir / "logs" / "9").mkdir(parents=True)
    (cluster.run_dir / "outcome").mkdir()
    (cluster.run_dir / "outcome" / "4.0").touch()
    cluster.run()
    assert cluster.handed("APPTRAIN_ATTEMPT") == "10"


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "apptrain-5_3"),
        ({"SLURM_JOB_NAME": "größe/a b;$(x)"}, "gr__e_a_b___x_-7"),
        ({"SLURM_JOB_NAME": None}, "job-7"),
    ],
)
def test_the_run_directory_is_named_after_the_job(
    cluster: Cluster, env: dict[str, str | None], name: str
) -> None:
    cluster.run(**env)
    assert [path.name for path in (cluster.submit_dir / "runs").iterdir()] == [name]


def test_a_given_run_directory_is_taken_from_where_the_script_runs(cluster: Cluster) -> None:
    cluster.run("--run-dir", "my runs/one", APPTRAIN_RUN_DIR="/another")
    assert cluster.handed("APPTRAIN_RUN_DIR") == f"{cluster.submit_dir}/my runs/one"
    assert (cluster.submit_dir / "my runs" / "one" / "job.log").exists()
    assert "--run-dir" not in cluster.launched()


def test_a_run_directory_that_cannot_be_made_is_refused(cluster: Cluster) -> None:
    (cluster.submit_dir / "file").touch()
    text = cluster.refused("--run-dir=file/run")
    assert text == (
        f"the run directory {cluster.submit_dir}/file/run cannot be written (Not a directory): "
        "give --run-dir a directory that all nodes share and you may write"
    )


@pytest.mark.parametrize(
    ("tasks", "status", "line"),
    [
        ({}, 0, None),
        ({"1": failed("9.000000")}, 7, "status 7: rank 1 on b: ValueError: no"),
        (
            {"0": failed("10.000000", status=3, rank=0, node="a"), "1": failed("9.500000")},
            7,
            "status 7: rank 1 on b: ValueError: no",
        ),
        (
            {"0": failed("9.000000", status=3, rank=0, node="a"), "1": failed("9.500000")},
            3,
            "status 3: rank 0 on a: ValueError: no",
        ),
        (
            {"0": {"status": 75, "time": "1.000000"}, "1": failed("9.000000")},
            7,
            "status 7: rank 1 on b: ValueError: no",
        ),
        ({"0": {"status": "none"}, "1": failed("9.000000")}, 7, "status 7: rank 1 on b: ValueError: no"),
        (
            {"1": failed("9.000000", rank="", error="lost: it fell silent", status=1)},
            1,
            "status 1: b: lost: it fell silent",
        ),
        (
            {"0": {"status": 75, "node": "a"}, "1": {"status": 0}},
            1,
            "status 1: a saved to go on, the others ended well",
        ),
        (
            {"1": {"status": 64, "node": "b", "error": "there is no image"}},
            64,
            "status 64: b: there is no image",
        ),
    ],
)
def test_the_status_is_that_of_the_earliest_failure(
    cluster: Cluster, tasks: Tasks, status: int, line: str | None
) -> None:
    ended = cluster.run(tasks=tasks)
    assert (ended.returncode, said(ended)) == (
        status,
        [f"{line} (logs: {cluster.run_dir}/logs/0)"] if line else [],
    )
    assert cluster.scontrol().count("requeue 7") == 0


def test_a_node_without_an_outcome_is_a_failure_that_names_it(cluster: Cluster) -> None:
    ended = cluster.run(tasks={"1": {"status": "none"}})
    assert (ended.returncode, said(ended)) == (
        1,
        [f"status 1: no outcome was written by b (logs: {cluster.run_dir}/logs/0)"],
    )


def test_a_step_that_cannot_start_is_a_failure(cluster: Cluster) -> None:
    ended = cluster.run(FAKE_SRUN="srun: error: Unable to create step")
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "srun: error: Unable to create step",
        f"apptrain: status 1: no outcome was written by a, b (logs: {cluster.run_dir}/logs/0)",
    ]


def test_a_port_that_is_taken_is_tried_again_with_the_next_attempt(cluster: Cluster) -> None:
    taken = {"status": 69, "node": "a", "error": "the port is taken"}
    ended = cluster.run(tasks={"0.0": taken, "1.0": taken})
    assert ended.returncode == 0
    assert [call["env"]["APPTRAIN_ATTEMPT"] for call in cluster.calls()] == ["0", "1", "2"]
    assert said(ended) == [
        "attempt 0: a: the port is taken",
        "trying again: attempt 1, with other ports",
        "attempt 1: a: the port is taken",
        "trying again: attempt 2, with other ports",
    ]


def test_a_rank_that_ends_with_69_itself_is_not_tried_again(cluster: Cluster) -> None:
    ended = cluster.run(tasks={"0": {"status": 69, "node": "a", "rank": 0, "error": "no licence"}})
    assert (ended.returncode, len(cluster.calls())) == (69, 1)
    assert said(ended) == [f"status 69: rank 0 on a: no licence (logs: {cluster.run_dir}/logs/0)"]


def test_three_attempts_are_all(cluster: Cluster) -> None:
    ended = cluster.run(tasks={"0": {"status": 69, "node": "a", "error": "the port is taken"}})
    assert (ended.returncode, len(cluster.calls())) == (69, 3)
    assert said(ended)[-1] == f"status 69: a: the port is taken (logs: {cluster.run_dir}/logs/2)"


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (["--master-port", "29500"], {}),
        (["--master_port=29500"], {}),
        ([], {"APPTRAIN_MASTER_PORT": "29500"}),
        ([], {"APPTRAIN_ARGS": "--device cpu --master-port 29500 -- x.py"}),
    ],
)
def test_a_port_set_by_hand_is_not_tried_again(
    cluster: Cluster, arguments: list[str], env: dict[str, str]
) -> None:
    ended = cluster.run(*arguments, tasks={"0": {"status": 69}}, **env)
    assert (ended.returncode, len(cluster.calls())) == (69, 1)


def test_a_planned_end_on_every_node_requeues_the_job(cluster: Cluster) -> None:
    ended = cluster.run(tasks={node: {"status": 75, "asked": True} for node in "01"})
    assert (ended.returncode, said(ended)) == (75, ["saved at a planned end"])
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"
    assert cluster.scontrol() == ["requeue 7"]


def test_a_requeued_job_whose_run_directory_is_gone_says_that_it_begins_anew(cluster: Cluster) -> None:
    gone = f"WARNING: this job has run before, but its run directory {cluster.run_dir} is not there: it begins anew"
    assert said(cluster.run(SLURM_RESTART_COUNT="1")) == [gone]
    assert said(cluster.run(SLURM_RESTART_COUNT="2")) == []


def test_a_job_that_may_not_be_requeued_says_how_to_go_on(cluster: Cluster) -> None:
    ended = cluster.run(
        tasks={"0": {"status": 75}, "1": {"status": 75}}, FAKE_REQUEUE="slurm_requeue error: disabled"
    )
    assert ended.returncode == 75
    assert said(ended)[-1] == (
        "slurm does not run it again (slurm_requeue error: disabled); "
        f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"
    )


def test_inside_an_allocation_nothing_is_requeued(cluster: Cluster) -> None:
    ended = cluster.run(batch=False, tasks={"0": {"status": 75}, "1": {"status": 75}})
    assert (ended.returncode, cluster.scontrol()) == (75, [])
    assert said(ended)[-1] == f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"


def requeues(cluster: Cluster, *arguments: str, checkpoints: bool = False) -> list[bool]:
    """Whether the job is requeued after its first to its sixth failure; with a new checkpoint before each."""
    found: list[bool] = []
    for number in range(6):
        if checkpoints:
            checkpoint = cluster.run_dir / "checkpoints" / f"step-{number:08}"
            checkpoint.mkdir(parents=True)
            os.utime(checkpoint, (1_000_000_000 + number, 1_000_000_000 + number))
        assert cluster.run(*arguments, tasks={"0": failed("1.000000")}).returncode == 7
        found.append(len(cluster.scontrol()) > sum(found))
        if not found[-1]:
            break
    return found


def test_failures_requeue_the_job_where_asked_for(cluster: Cluster) -> None:
    ended = cluster.run("--on-failure", "requeue", tasks={"0": failed("1.000000")})
    assert (ended.returncode, cluster.scontrol()) == (7, ["requeue 7"])
    assert cluster.launched() == ["--on-failure=requeue"]
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"
    assert (cluster.run_dir / "restarts").read_text() == "1 0\n"


def test_requeues_without_a_new_checkpoint_between_them_come_to_an_end(cluster: Cluster) -> None:
    assert requeues(cluster, "--on-failure=requeue") == [True, True, True, False]
    ended = cluster.run("--on-failure=requeue", "--max-restarts=0", tasks={"0": failed("1.000000")})
    again = f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"
    assert said(ended)[-1] == f"not run again: restarted 0 times before, and --max-restarts is 0; {again}"


def test_a_new_checkpoint_is_progress_after_which_a_job_may_be_requeued(cluster: Cluster) -> None:
    assert requeues(cluster, "--on-failure=requeue", checkpoints=True) == [True] * 6


def test_requeues_are_as_many_as_asked_in_all(cluster: Cluster) -> None:
    bounds = ("--on-failure=requeue", "--max-restarts", "4")
    assert requeues(cluster, *bounds, checkpoints=True) == [True] * 4 + [False]
    assert cluster.launched() == ["--max-restarts=4", "--on-failure=requeue"]


def test_within_that_number_checkpoints_that_were_seen_must_go_on_to_come(cluster: Cluster) -> None:
    (cluster.run_dir / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert requeues(cluster, "--on-failure=requeue", "--max-restarts=5") == [True, True, True, False]


def test_restarts_without_a_new_checkpoint_count_only_in_a_row(cluster: Cluster) -> None:
    cluster.run_dir.mkdir(parents=True)
    (cluster.run_dir / "restarts").write_text("1 0\n2 1000000010.000000000\n3 0\n4 0\n")
    cluster.run("--on-failure=requeue", tasks={"0": failed("1.000000")})
    assert cluster.scontrol() == ["requeue 7"]


def test_where_there_are_no_checkpoints_a_given_number_of_requeues_counts_alone(cluster: Cluster) -> None:
    assert requeues(cluster, "--on-failure=requeue", "--max-restarts=5") == [True] * 5 + [False]


def test_restarts_inside_the_allocation_count_with_requeues(cluster: Cluster) -> None:
    cluster.run_dir.mkdir(parents=True)
    (cluster.run_dir / "restarts").write_text("1 0\n2 0\n3 0\n")
    ended = cluster.run("--on-failure=restart", tasks={"0": failed("1.000000")})
    assert cluster.scontrol() == []
    assert said(ended)[-1].startswith(
        "not run again: restarted 3 times before, the last 3 without a new checkpoint; "
    )
    assert not (cluster.run_dir / "restarts").exists()


@pytest.mark.parametrize(("end", "requeued"), [(75, 7), (0, 6)])
def test_a_planned_end_and_a_good_one_break_a_row_of_failures(
    cluster: Cluster, end: int, requeued: int
) -> None:
    for status in (7, 7, 7, end, 7, 7, 7):
        tasks = {node: {"status": status, "asked": status == 75} for node in "01"}
        cluster.run(tasks=tasks, APPTRAIN_ON_FAILURE="requeue")
    assert len(cluster.scontrol()) == requeued


def test_a_script_that_ends_with_75_unasked_and_saves_nothing_is_not_run_for_ever(cluster: Cluster) -> None:
    tasks = {node: {"status": 75} for node in "01"}
    ends = [cluster.run(tasks=tasks) for _ in range(4)]
    assert [ended.returncode for ended in ends] == [75] * 4
    assert cluster.scontrol() == ["requeue 7"] * 3
    again = f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"
    assert said(ends[-1]) == [
        "saved at an end that was not asked for",
        f"not run again: restarted 3 times before, the last 3 without a new checkpoint; {again}",
    ]


def test_a_script_that_ends_with_75_unasked_and_saves_goes_on(cluster: Cluster) -> None:
    for number in range(6):
        step = cluster.run_dir / "checkpoints" / f"step-{number}"
        step.mkdir(parents=True)
        os.utime(step, (number, number))
        cluster.run(tasks={node: {"status": 75} for node in "01"})
    assert cluster.scontrol() == ["requeue 7"] * 6
