"""`--on-failure restart`: whatever breaks, the nodes that are left go on in the same allocation."""

import json
import os
import re
import signal
from pathlib import Path

from entrypoint.job.rundir import RunDirectory
from tests.embedded.jobs import Ended, Job, agents, gone, processes_with, run, start
from tests.embedded.test_launch import command_line, node_name, write

RESTART = ("--on-failure", "restart")
WORK = """
cd $APPTRAIN_RUN_DIR
echo "attempt $APPTRAIN_ATTEMPT: node $NODE_RANK of $NNODES on $APPTRAIN_NODE at $MASTER_ADDR"
if [ $NODE_RANK = 0 ]; then mkdir -p checkpoints/step-$APPTRAIN_ATTEMPT; fi
echo $$ >.up.$APPTRAIN_NODE; mv .up.$APPTRAIN_NODE up.$APPTRAIN_ATTEMPT.$APPTRAIN_NODE
while [ ! -e end ]; do sleep 0.05; done
"""
"""Works until it is told to end; without torch, so that a node is up in a fraction of a second."""
SHELL = ("--mode", "exec", "--no-python", "--", "bash", "-c")
STEPS = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
run = Path(os.environ["APPTRAIN_RUN_DIR"])
(run / "checkpoints").mkdir(exist_ok=True)
found = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
begin = torch.tensor([found[-1] if found else 0])
dist.broadcast(begin, 0)
begin = int(begin)
print(f"rank {rank} of {size} from step {begin}", flush=True)
for step in range(begin + 1, 41):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    Path(os.environ["APPTRAIN_HEARTBEAT"], str(rank)).write_text(str(step))
    if step % 10 == 0 and rank == 0:
        (run / "checkpoints" / f"step-{step:08}").mkdir()
    attempt = int(os.environ["APPTRAIN_ATTEMPT"])
    if step == 15 + 10 * attempt:
        told = Path(f".pid.{os.environ['APPTRAIN_NODE']}")
        told.write_text(str(os.getpid()))
        told.rename(f"pid.{attempt}.{os.environ['APPTRAIN_NODE']}")
        while attempt < 2:
            dist.all_reduce(total)  # until the test breaks something
dist.destroy_process_group()
"""
"""Torch's ranks, which make steps that count until the third attempt."""


def up(job: Job, attempt: int, *nodes: int) -> None:
    """Waits until these nodes, numbered from 1, work."""
    files = [job.run / f"up.{attempt}.127.0.0.{node}" for node in nodes]
    job.until(lambda: all(file.exists() for file in files), f"nodes {nodes} work in attempt {attempt}")


def entrypoint_of(job: Job, node: int) -> int:
    """The process id of a node's entrypoint."""
    pids = [pid for pid in processes_with(str(job.run)) if " launch " in command_line(pid)]
    return next(pid for pid in pids if node_name(pid) == f"127.0.0.{node}")


def lose(job: Job, *nodes: int) -> None:
    """Kills entrypoints, as the loss of their nodes does."""
    for pid in [entrypoint_of(job, node) for node in nodes]:
        os.kill(pid, signal.SIGKILL)


def end(job: Job) -> Ended:
    (job.run / "end").touch()
    return job.end()


def said(ended: Ended) -> list[str]:
    """What the launch says, without the run directory and the lines on each start, and on tracebacks, which a
    rank that is ended at once does not print. What `apptrain run` says around it is left out too."""
    lines = [
        line.removeprefix("apptrain: ") for line in ended.err.splitlines() if line.startswith("apptrain: ")
    ]
    usual = ("job ", "the ranks started after ", "tracebacks of lost connections are in ")
    around = re.compile(
        r"\d+ nodes? on this machine, |to follow it from elsewhere: |the job ended with status "
    )
    told = [line for line in lines if not line.startswith(usual) and not around.match(line)]
    return [line.replace(str(ended.run), "RUN") for line in told]


def worked(ended: Ended, attempt: int) -> set[str]:
    """Who worked in an attempt."""
    begin = f"attempt {attempt}: "
    return {line.removeprefix(begin) for line in ended.out.splitlines() if line.startswith(begin)}


def test_after_a_killed_worker_and_a_lost_first_node_all_go_on_from_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    """Under torchrun: for the first node the next one takes over, and a spare for that."""
    script = write(tmp_path, "script.py", STEPS)
    job = start(tmp_path, "--nodes", "3", "--nnodes", "2", *RESTART, "--", script)
    job.until(lambda: len(list(tmp_path.glob("pid.0.*"))) == 2, "both ranks make steps")
    os.kill(int((tmp_path / "pid.0.127.0.0.2").read_text()), signal.SIGKILL)
    job.until(lambda: len(list(tmp_path.glob("pid.1.*"))) == 2, "both ranks make steps again")
    lose(job, 1)
    ended = job.end()
    assert ended.status == 0, ended.err
    begins = [f"rank {rank} of 2 from step {step}" for step in (0, 10, 20) for rank in (0, 1)]
    assert sorted(ended.out.splitlines()) == sorted(begins)
    first, second, *_, third = said(ended)
    assert [first, second, third] == [
        "rank 1 on 127.0.0.2 failed first, status 137: killed by SIGKILL (RUN/logs/0/127.0.0.2.rank1.err)",
        "restart 1 inside the allocation, as attempt 1",
        "restart 2 inside the allocation, as attempt 2, without 127.0.0.1",
    ]
    statuses = {name: ended.outcome(name).status for name in ("0.0", "0.1", "2.1", "2.2")}
    assert statuses == {"0.0": 137, "0.1": 137, "2.1": 0, "2.2": 0}
    assert (ended.run / "outcome" / "2.nodes").read_text() == "1 127.0.0.2\n2 127.0.0.3\n"
    plan = json.loads((ended.run / "plan.1.json").read_text())
    assert (plan["node_rank"], plan["nodes"], plan["attempt"]) == (0, ["127.0.0.2", "127.0.0.3"], 2)
    found = re.findall(r"attempt (\d): .* rendezvous 127.0.0.(\d):(\d+)", ended.err)
    assert [(attempt, node) for attempt, node, _ in found] == [("0", "1"), ("1", "1"), ("2", "2")]
    assert len({port for _, _, port in found}) == 3
    assert (ended.run / "logs" / "2" / "127.0.0.3.rank1.out").exists()
    assert gone(str(ended.run))


def test_a_killed_agent_is_followed_by_a_restart(tmp_path: Path) -> None:
    work = 'touch "$APPTRAIN_RUN_DIR/up.$APPTRAIN_ATTEMPT.$APPTRAIN_NODE"; [ $APPTRAIN_ATTEMPT = 1 ] || sleep 100'
    job = start(tmp_path, "--nodes", "1", *RESTART, "--no-python", "--", "bash", "-c", work)
    up(job, 0, 1)
    found = agents(job.run)
    os.kill(found[0], signal.SIGKILL)
    ended = job.end()
    assert ended.status == 0, ended.err
    assert (ended.run / "up.1.127.0.0.1").exists()
    assert "torchrun's agent ended with status -9" in said(ended)[0]


def test_a_stopped_rank_is_named_and_followed_by_a_restart(tmp_path: Path) -> None:
    # Each gives a sign until it is stopped, without ever emptying the file.
    sign = "[ $APPTRAIN_ATTEMPT = 1 ] || echo 15 1<>$APPTRAIN_HEARTBEAT/$NODE_RANK"
    work = sign + WORK.replace("do sleep", f"do {sign}; sleep")
    job = start(tmp_path, "--hang-timeout", "3", *RESTART, *SHELL, work)
    up(job, 0, 1, 2)
    os.kill(int((job.run / "up.0.127.0.0.2").read_text()), signal.SIGSTOP)
    up(job, 1, 1, 2)
    ended = end(job)
    assert ended.status == 0, ended.err
    first = said(ended)[0]
    assert first.startswith(
        "CMD of node 1 on 127.0.0.2, status 124: stuck, no step for 3 s after step 15: it is stopped"
    ), first


def test_a_lost_node_is_left_behind_where_enough_remain(tmp_path: Path) -> None:
    job = start(tmp_path, "--nodes", "3", "--nnodes", "2:3", *RESTART, *SHELL, WORK)
    up(job, 0, 1, 2, 3)
    lose(job, 2)
    up(job, 1, 1, 3)
    ended = end(job)
    assert ended.status == 0, ended.err
    assert worked(ended, 1) == {
        "node 0 of 2 on 127.0.0.1 at 127.0.0.1",
        "node 1 of 2 on 127.0.0.3 at 127.0.0.1",
    }
    assert said(ended) == [
        "127.0.0.2: lost: it closed the connection",
        "restart 1 inside the allocation, as attempt 1, without 127.0.0.2",
    ]
    assert gone(str(ended.run))


def test_two_nodes_that_are_lost_at_once_are_replaced(tmp_path: Path) -> None:
    shape = ("--nodes", "5", "--nnodes", "2:3")
    # Nobody is told that the second is lost too: the others give it up as the first of them, then as a member.
    job = start(tmp_path, *shape, *RESTART, *SHELL, WORK, answer=8.0, window=16.0)
    up(job, 0, 1, 2, 3)
    lose(job, 1, 2)
    up(job, 1, 3, 4, 5)
    ended = end(job)
    assert ended.status == 0, ended.err
    assert worked(ended, 1) == {f"node {rank} of 3 on 127.0.0.{3 + rank} at 127.0.0.3" for rank in range(3)}


def test_nodes_are_lost_one_after_the_other_until_too_few_are_left(tmp_path: Path) -> None:
    job = start(tmp_path, "--nodes", "3", "--nnodes", "2:3", *RESTART, *SHELL, WORK)
    up(job, 0, 1, 2, 3)
    lose(job, 1)
    up(job, 1, 2, 3)
    lose(job, 3)
    ended = job.end()
    assert ended.status == 1
    assert said(ended)[-2:] == [
        "127.0.0.3: lost: it closed the connection",
        "no restart inside the allocation: 1 of 3 nodes are left, without 127.0.0.1, 127.0.0.3, and --nnodes asks for 2",
    ]
    assert ended.outcome("1.1").error == "lost: it closed the connection"


def test_a_program_that_refuses_fewer_nodes_leaves_the_job_with_the_failure_before(tmp_path: Path) -> None:
    fits = '[ $NNODES = 3 ] || { echo "batch_size is 9: give a multiple of $NNODES" >&2; exit 64; }'
    job = start(tmp_path, "--nodes", "3", "--nnodes", "2:3", *RESTART, *SHELL, fits + WORK)
    up(job, 0, 1, 2, 3)
    lose(job, 2)
    ended = job.end()
    assert ended.status == 1
    assert said(ended) == [
        "127.0.0.2: lost: it closed the connection",
        "restart 1 inside the allocation, as attempt 1, without 127.0.0.2",
        "no restart inside the allocation: with 2 ranks on 2 nodes the program refuses to run: "
        "batch_size is 9: give a multiple of 2",
    ]
    for place in (0, 2):
        assert ended.outcome(f"1.{place}") == ended.outcome(f"0.{place}")
    assert not (ended.run / "outcome" / "2.nodes").exists()
    assert gone(str(ended.run))


def test_the_loss_of_a_spare_changes_nothing(tmp_path: Path) -> None:
    job = start(tmp_path, "--nodes", "3", "--nnodes", "2", *RESTART, *SHELL, WORK)
    up(job, 0, 1, 2)
    lose(job, 3)
    job.until(lambda: "the spare node 2" in job.text(), "the loss is said")
    ended = end(job)
    assert ended.status == 0, ended.err
    assert said(ended) == ["the spare node 2 (127.0.0.3) is lost: it closed the connection"]


def test_a_single_node_restarts_too(tmp_path: Path) -> None:
    job = start(tmp_path, "--nodes", "1", *RESTART, *SHELL, WORK)
    up(job, 0, 1)
    os.kill(int((job.run / "up.0.127.0.0.1").read_text()), signal.SIGKILL)
    up(job, 1, 1)
    ended = end(job)
    assert ended.status == 0, ended.err
    assert worked(ended, 1) == {"node 0 of 1 on 127.0.0.1 at 127.0.0.1"}


def test_a_failure_that_comes_again_and_again_ends_the_job_with_its_own_status(tmp_path: Path) -> None:
    ended = run(
        tmp_path, *RESTART, *SHELL, "echo try; [ $NODE_RANK = 0 ] || { echo no >&2; exit 7; }; sleep 60"
    )
    assert (ended.status, ended.out.count("try\n")) == (7, 8)
    *_, failed, last = said(ended)
    assert failed == "CMD of node 1 on 127.0.0.2 failed first, status 7: no (RUN/logs/3/127.0.0.2.rank1.err)"
    assert last == (
        "no restart inside the allocation: restarted 3 times before, the last 3 without a new checkpoint"
    )
    assert [ended.outcome(f"{attempt}.0").status for attempt in range(4)] == [7] * 4
    assert not (ended.run / "outcome" / "4.0").exists()
    assert not (ended.run / "logs" / "4").exists()


def test_a_planned_end_is_not_followed_by_a_restart(tmp_path: Path) -> None:
    ended = run(tmp_path, *RESTART, *SHELL, "exit 75")
    assert ended.status == 75
    assert len(list((ended.run / "outcome").glob("*.nodes"))) == 1


def test_a_planned_end_after_a_restart_is_75(tmp_path: Path) -> None:
    work = "trap 'exit 75' USR2" + WORK
    job = start(tmp_path, *RESTART, *SHELL, work)
    up(job, 0, 1, 2)
    os.kill(int((job.run / "up.0.127.0.0.2").read_text()), signal.SIGKILL)
    up(job, 1, 1, 2)
    (job.run / "stop").touch()
    ended = job.end()
    assert ended.status == 75, ended.err
    assert [ended.outcome(f"1.{place}").status for place in (0, 1)] == [75, 75]


def test_a_planned_end_is_not_followed_by_a_restart_although_a_node_is_lost_on_the_way(
    tmp_path: Path,
) -> None:
    work = "trap 'touch asked; sleep 60' USR2" + WORK
    job = start(tmp_path, *RESTART, "--nnodes", "1:2", *SHELL, work)
    up(job, 0, 1, 2)
    (job.run / "stop").touch()
    job.until((job.run / "asked").exists, "the ranks are asked to save")
    lose(job, 2)
    ended = job.end()
    assert ended.status == 1
    assert "no restart inside the allocation: a planned end was asked for" in said(ended)[-1]
    assert RunDirectory(ended.run, 1).is_closed()


def test_an_asked_end_is_not_followed_by_a_restart(tmp_path: Path) -> None:
    job = start(tmp_path, *RESTART, *SHELL, WORK)
    up(job, 0, 1, 2)
    job.signal(signal.SIGTERM)
    ended = job.end()
    assert ended.status == 143
    assert RunDirectory(ended.run, 1).is_closed()
    assert gone(str(ended.run))


def test_an_end_that_is_asked_for_while_the_nodes_meet_again_ends_them_all(tmp_path: Path) -> None:
    job = start(tmp_path, *RESTART, "--nnodes", "1:2", *SHELL, WORK)
    up(job, 0, 1, 2)
    stopped = entrypoint_of(job, 2)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(int((job.run / "up.0.127.0.0.1").read_text()), signal.SIGKILL)
    job.until((job.run / "logs" / "1").exists, "the first node wants to go on")
    job.signal(signal.SIGTERM)
    job.until(RunDirectory(job.run, 1).is_closed, "the first node heard of the end")
    os.kill(stopped, signal.SIGCONT)
    ended = job.end()
    assert ended.status in (137, 143)
    assert not list((ended.run / "outcome").glob("1.[0-9]*"))
    assert gone(str(ended.run))
