"""The job script for Slurm: the run directory, and how a job ends."""

from tests.unit.slurm.cluster import Cluster, failed, said


def test_the_run_directory_and_its_key_are_the_users_alone(cluster: Cluster) -> None:
    cluster.run()
    modes = {
        path.name: oct(path.stat().st_mode & 0o777) for path in [cluster.run_dir, *cluster.run_dir.iterdir()]
    }
    assert modes == {
        "apptrain-7": "0o700",
        "job.log": "0o600",
        "first-attempt": "0o600",
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


def test_a_given_run_directory_is_taken_from_where_the_script_runs(cluster: Cluster) -> None:
    cluster.run("--run-dir", "my runs/one", APPTRAIN_RUN_DIR="/another")
    assert cluster.handed("APPTRAIN_RUN_DIR") == f"{cluster.submit_dir}/my runs/one"
    assert (cluster.submit_dir / "my runs" / "one" / "job.log").exists()
    assert "--run-dir" not in cluster.launched()


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


def test_failures_requeue_the_job_if_asked_for_and_the_earliest_counts(cluster: Cluster) -> None:
    tasks = {"0": failed("10.000000", status=3, rank=0, node="a"), "1": failed("9.500000")}
    ended = cluster.run("--on-failure", "requeue", tasks=tasks)
    assert (ended.returncode, cluster.scontrol()) == (7, ["requeue 7"])
    assert said(ended) == [f"status 7: rank 1 on b: ValueError: no (logs: {cluster.run_dir}/logs/0)"]
    assert cluster.launched() == ["--on-failure=requeue"]
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"
    assert (cluster.run_dir / "restarts").read_text() == "1 0\n"
