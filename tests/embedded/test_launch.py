"""`launch` on two embedded nodes: real torchrun, real ranks, every way in which they can end."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import jsonschema
import pytest

from entrypoint.plan.rendezvous import JOBS, port_pair
from tests.embedded.jobs import (
    CHECKOUT,
    Ended,
    Job,
    agents,
    clean_env,
    gone,
    master_port,
    processes_with,
    run,
    start,
)

ALL_REDUCE = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
rank, size = dist.get_rank(), dist.get_world_size()
assert total.item() == size * (size + 1) / 2
print(f"rank {rank} of {size} local {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}", flush=True)
dist.destroy_process_group()
"""
SHELL = ("--mode", "rank", "--no-python", "--", "bash", "-c")
"""One task a node, which is one rank: everything but torch, in a fraction of a second."""

EXEC = ("--mode", "exec", *SHELL[2:])
"""The same started once a node."""


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


LONG = """
for line in range(2000):
    sys.stdout.write(str(rank) * 200 + f" {line}\\n")
sys.stdout.write(f"no newline at the end of {rank}")
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two nodes with two ranks each under torchrun, which say much, among files of the user's that are called as
    ours are."""
    folder = tmp_path_factory.mktemp("world")
    wrong_modules(folder)
    return run(folder, "--nproc-per-node", "2", "--", write(folder, "script.py", ALL_REDUCE + LONG))


def wrong_modules(folder: Path) -> None:
    for name in ("train.py", "hello.py", "join.py", "plan.py"):
        write(folder, name, "raise SystemExit('the wrong module')")
    (folder / "entrypoint").mkdir()
    write(folder / "entrypoint", "__init__.py", "raise SystemExit('the wrong module')")


def test_torchrun_forms_one_world_over_both_nodes_and_every_rank_has_its_logs(world: Ended) -> None:
    assert world.status == 0, world.err
    expected = {f"rank {rank} of 4 local {rank % 2} of 2" for rank in range(4)}
    assert expected <= set(world.out.splitlines())
    for rank in range(4):
        log = world.log(f"0/127.0.0.{1 + rank // 2}.rank{rank}.out")
        assert log.startswith(f"rank {rank} of 4 local {rank % 2} of 2\n")
    assert [world.outcome(f"0.{node}").status for node in (0, 1)] == [0, 0]
    job_log = (world.run / "job.log").read_text().splitlines()
    assert expected <= set(job_log)


def test_output_of_all_ranks_is_whole(world: Ended) -> None:
    expected = sorted(
        [f"rank {rank} of 4 local {rank % 2} of 2" for rank in range(4)]
        + [f"{str(rank) * 200} {line}" for rank in range(4) for line in range(2000)]
        + [f"no newline at the end of {rank}" for rank in range(4)]
    )
    assert sorted(world.out.splitlines()) == expected
    assert len(world.log("0/127.0.0.2.rank3.out").splitlines()) == 2002


def test_the_run_directory_is_the_users_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, *SHELL, "true")
    assert ended.status == 0, ended.err
    for path in [ended.run, *ended.run.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_each_node_resolves_its_own_plan(tmp_path: Path) -> None:
    ended = run(tmp_path, *SHELL, "true")
    plans = [json.loads((ended.run / f"plan.{node}.0.json").read_text()) for node in (0, 1)]
    assert [plan["node_rank"] for plan in plans] == [0, 1]
    assert [plan["sources"]["node_rank"] for plan in plans] == ["derived:APPTRAIN_EMBEDDED_NODENAME"] * 2
    assert [plan["rendezvous"]["is_host"] for plan in plans] == [True, False]
    assert plans[0]["nodes"] == plans[1]["nodes"] == ["127.0.0.1", "127.0.0.2"]


def test_the_manifest_tells_what_each_attempt_ran_and_no_secret_of_the_environment(tmp_path: Path) -> None:
    for word in ("one", "two"):
        assert run(tmp_path, *SHELL, f"echo {word}", env={"HF_TOKEN": "hf_secret"}).status == 0
    path = tmp_path / "run" / "manifest.json"
    found = json.loads(path.read_text())
    schema = json.loads((Path(__file__).parents[2] / "docs/manifest.schema.json").read_text())
    jsonschema.validate(found, schema)
    assert "HF_TOKEN" in found["environment"]["names"]
    assert found["code"]["program"] is None
    assert found["code"]["apptrain"]["repository"]["commit"]
    (kind,) = found["hardware"]
    assert kind["nodes"] == ["127.0.0.1", "127.0.0.2"]
    first, second = found["attempts"]
    versions = first.pop("versions")
    assert versions.keys() == {"python", "torch", "apptrain"}
    assert all(versions.values())
    for attempt in (first, second):
        assert datetime.fromisoformat(attempt.pop("began")).tzinfo is not None
        assert datetime.fromisoformat(attempt.pop("ended")).tzinfo is not None
        assert attempt.pop("threads")
        assert attempt.pop("job_id")
        parts = attempt.pop("start")
        assert parts.keys() == {"task", "plan", "nodes", "torch", "ranks"}
        assert 0 < sum(parts.values()) < 120
    assert first == {
        "attempt": 0,
        "status": 0,
        "scheduler": "embedded",
        "nodes": ["127.0.0.1", "127.0.0.2"],
        "nproc_per_node": 1,
        "world_size": 2,
        "mode": "rank",
        "device": "cpu",
        "no_python": True,
        "transport": "gloo over lo",
        "command": ["bash", "-c", "echo one"],
        "venv": None,
        "image": None,
    }
    assert second["command"] == ["bash", "-c", "echo two"]
    assert "hf_secret" not in path.read_text()


def test_the_manifest_says_how_an_attempt_ended_whose_launcher_was_killed(tmp_path: Path) -> None:
    words = ("--nodes", "1", "--mode", "exec", "--no-python", "--", "sh", "-c", "kill -9 $PPID; sleep 60")
    assert run(tmp_path, *words).status == 137
    (attempt,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["attempts"]
    assert attempt["status"] == 137
    assert datetime.fromisoformat(attempt["ended"]).tzinfo is not None


def test_the_manifest_says_which_image_it_was(tmp_path: Path) -> None:
    image = image_env(tmp_path, "image-1", "0" * 64)
    ended = run_by_hand(tmp_path, "--no-python", "--mode", "exec", "--", "true", images=[image, image])
    assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
    (attempt,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["attempts"]
    assert attempt["image"] == {
        "id": "image-1",
        "stack": "cu132",
        "cuda": "13.2",
        "lock_sha256": "0" * 64,
    }


def test_what_is_no_manifest_stays_and_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "manifest.json"
    path.write_text('{"format": 1, "att')
    ended = run(tmp_path, *SHELL, "true")
    assert ended.status == 0
    assert path.read_text() == '{"format": 1, "att'
    assert f"apptrain: {path} does not tell of this attempt: " in ended.err


def test_one_task_per_rank_forms_the_same_world(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", ALL_REDUCE + "os._exit(0)  # sooner than torch is taken down\n")
    ended = run(tmp_path, "--tasks-per-node", "2", "--", script)
    assert ended.status == 0, ended.err
    assert set(ended.out.splitlines()) == {f"rank {rank} of 4 local {rank % 2} of 2" for rank in range(4)}
    assert {ended.outcome(f"0.{node}.{local}").rank for node in (0, 1) for local in (0, 1)} == {0, 1, 2, 3}


def test_a_launcher_of_the_users_own_is_started_once_per_node_as_the_page_says(tmp_path: Path) -> None:
    page = (CHECKOUT / "docs" / "own-script.md").read_text()
    (line,) = re.findall("^apptrain run (--mode exec .* my_script.py')$", page, re.MULTILINE)
    write(tmp_path, "my_script.py", ALL_REDUCE)
    ended = run(tmp_path, *shlex.split(line))
    assert ended.status == 0, ended.err
    # Ranks that share an output without a buffer may write between a line of another and its end.
    said = re.findall(r"rank \d of \d local \d of \d", ended.out)
    assert sorted(said) == [f"rank {n} of 4 local {n % 2} of 2" for n in range(4)]


def test_in_mode_exec_a_failure_is_told_of_its_node(tmp_path: Path) -> None:
    ended = run(tmp_path, *EXEC[:2], "--nproc-per-node", "2", *EXEC[2:], "exit $((NODE_RANK * 7))")
    assert ended.status == 7
    assert "apptrain: CMD of node 1 on 127.0.0.2 failed first, status 7: " in ended.err


def test_a_script_that_spawns_its_own_workers_runs_once_per_node(tmp_path: Path) -> None:
    """By fork, which needs no further import of torch."""
    script = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(local_rank, per_node):
    rank = int(os.environ["NODE_RANK"]) * per_node + local_rank
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=int(os.environ["NNODES"]) * per_node)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    sys.stdout.write(f"spawned rank {rank} sum {total.item()}\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    per_node = int(os.environ["NPROC_PER_NODE"])
    mp.start_processes(worker, args=(per_node,), nprocs=per_node, start_method="fork")
"""
    ended = run(
        tmp_path, "--mode", "exec", "--nproc-per-node", "2", "--", write(tmp_path, "script.py", script)
    )
    assert ended.status == 0, ended.err
    assert set(ended.out.splitlines()) == {f"spawned rank {rank} sum 6.0" for rank in range(4)}


def run_by_hand(
    tmp_path: Path,
    *command: str,
    images: Sequence[Mapping[str, str]] = ({}, {}),
    nodes: str = "127.0.0.1,127.0.0.2",
) -> list[Ended]:
    """Both nodes' ends, started without a scheduler; each image is what a container's environment says of it."""
    port = master_port()
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    key.chmod(0o600)
    jobs = []
    for node, image in enumerate(images):
        folder = tmp_path / str(node)
        folder.mkdir()
        argv = [sys.executable, "-P", "-m", "entrypoint", "launch", "--nodes", nodes]
        argv += ["--node-rank", str(node), "--master-port", port, "--device", "cpu"]
        argv += ["--join-key-file", str(key), "--run-dir", str(tmp_path / "run"), *command]
        jobs.append(Job(argv, folder, tmp_path / "run", clean_env(**image)))
    return [job.end() for job in jobs]


def test_nodes_listed_by_hand_run_without_a_scheduler(tmp_path: Path) -> None:
    ended = run_by_hand(tmp_path, "--no-python", "--", "bash", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
    assert [one.out for one in ended] == [f"rank {rank} of 2\n" for rank in (0, 1)]


def test_the_line_of_a_failure_names_the_log_of_a_rank_that_c10d_has_numbered(tmp_path: Path) -> None:
    """It goes by the addresses, whatever the order of the nodes."""
    options = ("--rdzv-backend", "c10d", "--nproc-per-node", "1")
    fails = '[ $RANK = 1 ] && echo "ValueError: no" >&2 && exit 7; sleep 60'
    command = (*options, "--no-python", "--", "bash", "-c", fails)
    first, _ = run_by_hand(tmp_path, *command, nodes="127.0.0.2,127.0.0.1")
    (said,) = [line for line in first.err.splitlines() if "failed first" in line]
    found = re.fullmatch(r"apptrain: rank 1 on (\S+) failed first, status 7: ValueError: no \((.*)\)", said)
    assert found, first.err
    assert found[2] == f"{tmp_path}/run/logs/0/{found[1]}.rank*.err"
    (log,) = Path(found[2]).parent.glob(Path(found[2]).name)
    assert log.read_text() == "ValueError: no\n"


def image_env(folder: Path, image_id: str, lock: str) -> dict[str, str]:
    facts = {"name": "cu132", "cuda": "13.2", "driver": "580", "compute_capability": [], "lock_sha256": lock}
    stack = write(folder, f"{image_id}.json", json.dumps(facts))
    return {"APPTRAIN_IMAGE_ID": image_id, "APPTRAIN_STACK": stack}


def test_nodes_in_different_images_are_refused_with_both_named(tmp_path: Path) -> None:
    images = [image_env(tmp_path, "7be444fb", "5e1f"), image_env(tmp_path, "090607d9", "8a02")]
    ended = run_by_hand(tmp_path, *SHELL, "echo started", images=images)
    line = (
        "apptrain: the nodes do not agree: image_id is 7be444fb on {0} and 090607d9 on {1}; lock_digest is 5e1f on "
        "{0} and 8a02 on {1}: start every node with the same options, profile and image\n"
    ).format("node 0 (127.0.0.1, local rank 0)", "node 1 (127.0.0.2, local rank 0)")
    assert [(one.status, one.out, one.err) for one in ended] == [(64, "", line)] * 2


def test_the_first_failing_ranks_status_and_error_end_the_job_and_are_said_once(tmp_path: Path) -> None:
    script = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    print("a warning", file=sys.stderr)
    try:
        raise ValueError("the real reason")
    except ValueError:
        import traceback
        traceback.print_exc()
        sys.exit(7)
time.sleep(60)
"""
    ended = run(tmp_path, "--", write(tmp_path, "script.py", script))
    assert ended.status == 7
    log = ended.run / "logs" / "0" / "127.0.0.2.rank1.err"
    message = f"apptrain: rank 1 on 127.0.0.2 failed first, status 7: ValueError: the real reason ({log})"
    assert [line for line in ended.err.splitlines() if "failed first" in line] == [message]
    for node in (0, 1):
        outcome = ended.outcome(f"0.{node}")
        assert (outcome.status, outcome.rank, outcome.node, outcome.signal, outcome.error) == (
            7,
            1,
            "127.0.0.2",
            0,
            "ValueError: the real reason",
        )
    assert gone(str(ended.run))


NEIGHBOURS = """
import os, signal, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
number = torch.zeros(1)
try:
    for step in range(2000):
        dist.all_reduce(number)
        if step == 5 and dist.get_rank() == 1:
            FAIL
finally:
    dist.destroy_process_group()
"""
"""The other rank may end first: it finds the connection closed while rank 1 is still ending."""


def test_a_job_ends_with_what_its_failure_means_and_where_to_read_on(tmp_path: Path) -> None:
    script = NEIGHBOURS.replace("FAIL", 'open("/no/such/data")')
    ended = run(tmp_path, "--mode", "rank", "--", write(tmp_path, "script.py", script))
    assert ended.err.splitlines()[-3:] == [
        "apptrain: the job ended with status 1",
        "apptrain: explain: a file is not there: ls the path inside the job on that node; give whole paths; bind the folder "
        "into the image.",
        f"apptrain: explain: more by `apptrain explain {ended.run}`",
    ]


def test_a_rank_that_fails_is_named_and_shown_though_its_neighbours_end_before_it(tmp_path: Path) -> None:
    script = NEIGHBOURS.replace("FAIL", 'raise ValueError("no such label")')
    ended = run(tmp_path, "--mode", "rank", "--", write(tmp_path, "script.py", script))
    logs = ended.run / "logs" / "0"
    ours = [line for line in ended.err.splitlines() if line.startswith("apptrain: ")]
    assert ours[-3:] == [
        "apptrain: rank 1 on 127.0.0.2 failed first, status 1: ValueError: no such label "
        f"({logs}/127.0.0.2.rank1.err)",
        f"apptrain: tracebacks of lost connections are in {logs} alone",
        "apptrain: the job ended with status 1",
    ]
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert "Connection" not in ended.err
    assert "Connection" in ended.log("0/127.0.0.1.rank0.err")


ALL_AT_ONCE = """
import os, pathlib, time
here = pathlib.Path(os.environ["APPTRAIN_RUN_DIR"], "here")
here.mkdir(exist_ok=True)
(here / os.environ["RANK"]).touch()
while len(list(here.iterdir())) < 4:
    time.sleep(0.01)
raise FileNotFoundError("no data")
"""


def test_one_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", ALL_AT_ONCE)
    ended = run(tmp_path, "--tasks-per-node", "2", "--", script)
    said = [line for line in ended.err.splitlines() if "Error: no data" in line]
    assert (ended.status, len(said)) == (1, 2), ended.err
    assert said.count("FileNotFoundError: no data") == 1
    assert " failed first, status 1: FileNotFoundError: no data" in "".join(said)
    assert ended.err.count("Traceback") == 1
    assert "no data" in ended.log("0/127.0.0.2.rank3.err")


def test_of_a_crash_the_scripts_own_line_is_named(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import ctypes\ndef load():\n    ctypes.string_at(0)\nload()")
    ended = run(tmp_path, "--nodes", "1", "--mode", "rank", "--", script)
    assert (ended.status, ended.outcome("0.0.0").error) == (
        139,
        "killed by SIGSEGV: Segmentation fault: script.py:3 load, in string_at",
    )


ALONE = """
import os
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in range(8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
os._exit(0)  # sooner than torch is taken down
"""


def test_a_job_in_which_no_rank_joined_a_process_group_says_so_and_ends_well(tmp_path: Path) -> None:
    ended = run(tmp_path, "--mode", "rank", "--", write(tmp_path, "script.py", ALONE))
    assert ended.status == 0, ended.err
    assert [line for line in ended.err.splitlines() if "group" in line] == [
        "apptrain: no rank joined a process group: each of the 2 ranks trained for itself, on what it took for "
        "all data (docs/own-script.md, Each rank for itself)"
    ]
    assert [ended.outcome(f"0.{node}.0").alone for node in (0, 1)] == [True, True]
    (attempt,) = json.loads((ended.run / "manifest.json").read_text())["attempts"]
    assert (attempt["attempt"], attempt["process_group"]) == (0, None)


def test_that_no_rank_joined_a_process_group_is_recorded_of_a_job_that_is_ended_early_too(
    tmp_path: Path,
) -> None:
    endless = ALONE.replace("range(8)", "iter(int, 1)") + "\n"
    endless = endless.replace(
        "    optimizer.step()", "    optimizer.step()\n    open(os.environ['RANK'], 'w')"
    )
    job = start(tmp_path, "--", write(tmp_path, "script.py", endless))
    job.until(lambda: all((tmp_path / rank).exists() for rank in "01"), "both ranks train")
    job.signal(signal.SIGTERM)
    ended = job.end()
    assert ended.status == 143, ended.err
    (attempt,) = json.loads((ended.run / "manifest.json").read_text())["attempts"]
    assert (attempt["status"], attempt["process_group"]) == (143, None)


LAUNCHES = """
import subprocess, sys
start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
sys.exit(subprocess.call([*start, sys.argv[1]]))
"""
STEP = """
import torch
torch.distributed.init_process_group("gloo")
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1).step()
torch.distributed.destroy_process_group()
"""


def test_ranks_that_start_a_launcher_of_their_own_train_once_for_each_node(tmp_path: Path) -> None:
    step = write(tmp_path, "step.py", STEP)
    ended = run(tmp_path, "--", write(tmp_path, "script.py", LAUNCHES), step)
    assert ended.status == 0, ended.err
    assert "no rank joined a process group: each of the 2 ranks trained for itself" in ended.err


UNEVEN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in range(8 if dist.get_rank() == 1 else 10):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
EXIT = """
import datetime, sys, os
if os.environ["RANK"] == "0":
    sys.exit()
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
"""


@pytest.mark.parametrize(
    ("script", "rank", "after", "others"),
    [
        (UNEVEN, 1, " after 8 steps", "in backward (script.py:9)"),
        (EXIT, 0, "", "in init_process_group (script.py:6)"),
    ],
    ids=["uneven loaders", "an exit in `if rank == 0`"],
)
def test_a_rank_that_ends_well_while_others_need_it_is_named(
    tmp_path: Path, script: str, rank: int, after: str, others: str
) -> None:
    ended = run(tmp_path, "--mode", "rank", "--", write(tmp_path, "script.py", script))
    node = f"127.0.0.{rank + 1}"
    error = (
        f"ended with 0{after} while 1 other was still {others}: do all ranks make the same number of steps?"
    )
    assert [line for line in ended.err.splitlines() if "apptrain: rank" in line] == [
        f"apptrain: rank {rank} on {node} {error}"
    ]
    for outcome in (ended.outcome("0.0.0"), ended.outcome("0.1.0")):
        assert (ended.status, outcome.status, outcome.rank, outcome.node, outcome.error) == (
            1,
            1,
            rank,
            node,
            error,
        )


def test_a_failure_ends_ranks_that_ignore_sigterm_within_its_bound(tmp_path: Path) -> None:
    script = 'trap "" TERM; if [ $RANK = 0 ]; then sleep 1; date +%s.%N > failed; exit 3; fi; for i in $(seq 600); do sleep 0.1; done'
    ended = run(tmp_path, *SHELL, script)
    assert ended.status == 3
    assert gone(str(ended.run))
    failed_at = float((tmp_path / "failed").read_text())
    ended_at = (ended.run / "outcome" / "0.1.0").stat().st_mtime
    assert ended_at - failed_at < 30, "they would sleep for a minute"


def test_a_rank_killed_by_a_signal_gives_128_plus_its_number(tmp_path: Path) -> None:
    ended = run(tmp_path, *SHELL, "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 60")
    outcome = ended.outcome("0.1.0")
    assert (ended.status, outcome.status, outcome.signal) == (137, 137, 9)
    assert outcome.error == "killed by SIGKILL"


def test_a_program_whose_name_the_kernel_cuts_inside_a_letter_fails_like_any_other(tmp_path: Path) -> None:
    program = Path(
        write(tmp_path, "обучение_модели.sh", '#!/bin/sh\n[ "$NODE_RANK" = 1 ] && exit 7\nsleep 100\n')
    )
    program.chmod(0o700)
    ended = run(tmp_path, "--mode", "exec", "--no-python", "--", str(program))
    assert ended.status == 7, ended.err
    assert "CMD of node 1 on 127.0.0.2 failed first, status 7: nothing on stderr" in ended.err
    assert "Traceback" not in ended.err


def test_a_torchrun_rank_killed_by_a_signal_gives_128_plus_its_number(tmp_path: Path) -> None:
    script = "import os, signal, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    ended = run(tmp_path, "--nodes", "1", "--", write(tmp_path, "script.py", script))
    outcome = ended.outcome("0.0")
    assert (ended.status, outcome.status, outcome.signal, outcome.rank) == (137, 137, 9, 0)


def test_75_of_all_ranks_is_75(tmp_path: Path) -> None:
    ended = run(tmp_path, *SHELL, "exit 75")
    assert ended.status == 75
    assert [ended.outcome(f"0.{node}.0").status for node in (0, 1)] == [75, 75]


def test_a_neighbour_that_the_agent_ends_after_a_75_has_saved_too_and_none_is_started_again(
    tmp_path: Path,
) -> None:
    script = """
import os, sys, time
if os.environ["LOCAL_RANK"] == "0":
    print("saves", flush=True)
    sys.exit(75)
time.sleep(60)
"""
    node = ("--nodes", "1", "--nproc-per-node", "2")
    ended = run(tmp_path, *node, "--max-restarts", "1", "--", write(tmp_path, "script.py", script))
    assert (ended.status, ended.out) == (75, "saves\n"), ended.err
    assert ended.outcome("0.0").status == 75


def test_torchrun_restarts_its_ranks_as_often_as_asked(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(9)
print("second try", flush=True)
"""
    ended = run(tmp_path, "--nodes", "1", "--max-restarts", "1", "--", write(tmp_path, "script.py", script))
    assert (ended.status, ended.out) == (0, "second try\n"), ended.err


def test_interrupting_ends_both_nodes_at_once(tmp_path: Path) -> None:
    job = start(tmp_path, *SHELL, "touch ready.$RANK; sleep 100")
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both ranks run")
    job.signal(signal.SIGINT)
    ended = job.end()
    assert ended.status == 130
    assert ended.seconds < 50, "they would sleep for 100 s"
    assert "apptrain: 127.0.0.1: interrupted" in ended.err
    assert "Traceback" not in ended.err
    assert gone(str(ended.run))


def test_interrupting_while_the_nodes_still_meet_leaves_nothing(tmp_path: Path) -> None:
    job = start(tmp_path, "--", write(tmp_path, "script.py", "import time; time.sleep(100)"))
    job.until(lambda: processes_with(str(job.run)), "a node has started")
    job.signal(signal.SIGINT)
    ended = job.end()
    assert ended.status == 130
    assert "Traceback" not in ended.err
    assert gone(str(ended.run))


def test_sigterm_reaches_the_ranks_which_may_save_and_ends_with_143(tmp_path: Path) -> None:
    script = (
        'trap "sleep 1; echo saved; exit 0" TERM; touch ready.$RANK; for i in $(seq 1000); do sleep 0.1; done'
    )
    job = start(tmp_path, *SHELL, script)
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both ranks run")
    job.signal(signal.SIGTERM)
    ended = job.end()
    assert ended.status == 143
    assert ended.out == "saved\nsaved\n"
    assert [ended.outcome(f"0.{node}.0").status for node in (0, 1)] == [143, 143]


def test_ranks_that_save_longer_than_the_grace_are_killed(tmp_path: Path) -> None:
    script = (
        'trap "sleep 8; echo saved; exit 0" TERM; touch ready.$RANK; for i in $(seq 1000); do sleep 0.1; done'
    )
    job = start(tmp_path, "--term-grace", "1", *SHELL, script)
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both ranks run")
    job.signal(signal.SIGTERM)
    ended = job.end()
    assert (ended.status, ended.out) == (143, "")
    assert gone(str(ended.run))


def test_the_stop_file_reaches_the_ranks_that_catch_the_signal_and_no_others(tmp_path: Path) -> None:
    """Not the agent either: it takes no notice of USR2, but TERM would have it end all ranks."""
    script = """
import os, signal, sys, time
from pathlib import Path
def stop(*_): Path(f"stopped.{os.environ['RANK']}").touch()
if os.environ["RANK"] != "2":
    signal.signal(signal.SIGTERM, stop)
Path(f"ready.{os.environ['RANK']}").touch()
while len(list(Path().glob("stopped.*"))) < 2:
    time.sleep(0.05)
if os.environ["RANK"] == "2":
    time.sleep(1)  # the agent would end it meanwhile
    Path("spared").touch()
while not Path("spared").exists():
    time.sleep(0.05)
sys.exit(75)
"""
    node = ("--nodes", "1", "--nproc-per-node", "3", "--stop-signal", "TERM")
    job = start(tmp_path, *node, "--", write(tmp_path, "script.py", script))
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 3, "all ranks run")
    (job.run / "stop").touch()
    ended = job.end()
    assert ended.status == 75, ended.err
    assert (tmp_path / "spared").exists()
    assert {path.name for path in tmp_path.glob("stopped.*")} == {"stopped.0", "stopped.1"}


def test_a_stop_that_was_asked_for_before_the_ranks_started_reaches_them(tmp_path: Path) -> None:
    script = 'trap "exit 75" USR2; for i in $(seq 600); do sleep 0.1; done'
    job = start(tmp_path, *SHELL, script)
    job.until(lambda: list((job.run / "outcome").parent.glob("plan.*")), "a node has its plan")
    job.signal(signal.SIGUSR2)
    ended = job.end()
    assert ended.status == 75, ended.err


def test_an_earlier_runs_stop_does_not_stop_a_launch_without_a_job_script(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    argv = [sys.executable, "-P", "-m", "entrypoint", "launch", "--nodes", "127.0.0.1", "--node-rank", "0"]
    argv += ["--master-port", master_port(), "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    argv += ["--mode", "exec", "--no-python", "--"]
    script = 'trap "exit 75" USR2; sleep 1.5 & wait'
    ended = Job([*argv, "bash", "-c", script], tmp_path, tmp_path / "run", clean_env()).end()
    assert ended.status == 0, ended.err


def test_a_run_directory_that_is_removed_while_the_job_runs_is_said_to_be_gone(tmp_path: Path) -> None:
    script = "touch ready.$RANK; until [ -e go ]; do sleep 0.05; done"
    job = start(tmp_path, *SHELL, script)
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both ranks run")
    job.run.rename(tmp_path / "away")  # at once: files are written there meanwhile
    (tmp_path / "go").touch()
    ended = job.end()
    assert ended.status == 0, ended.err
    assert f"apptrain: the run directory {job.run} was removed while the job ran: its logs" in ended.err


def test_an_agent_that_is_stopped_is_given_up_once_its_ranks_have_ended(tmp_path: Path) -> None:
    script = 'import time\nfrom pathlib import Path\nPath("ready").touch()\n'
    script += 'while not Path("go").exists(): time.sleep(0.05)\n'
    command = ("--nodes", "1", "--", write(tmp_path, "script.py", script))
    job = start(tmp_path, *command, agent_stopped=2)
    job.until((tmp_path / "ready").exists, "the rank")
    (agent,) = agents(job.run)
    os.kill(agent, signal.SIGSTOP)
    (tmp_path / "go").touch()
    ended = job.end()
    assert ended.status == 1, ended.err
    assert f"127.0.0.1: torchrun's agent (process {agent}) was stopped by a signal" in ended.err


def test_usr1_for_every_process_of_the_job_is_a_planned_end(tmp_path: Path) -> None:
    """As Slurm sends it to all steps with --signal=USR1@90, which Lightning's users bring: the ranks, the agents and
    the launchers have it."""
    script = """
import os, signal, sys, threading, time
from pathlib import Path
warned, stop = threading.Event(), threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: warned.set())
signal.signal(signal.SIGUSR2, lambda *_: stop.set())
Path(f"ready.{os.environ['RANK']}").touch()
while not stop.wait(0.05):
    pass
if warned.wait(20):  # Python ends without the handler: the signal must not come later
    Path(f"warned.{os.environ['RANK']}").touch()
sys.exit(75)
"""
    job = start(tmp_path, "--", write(tmp_path, "script.py", script))
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "all ranks run")
    for pid in set(processes_with(str(job.run))) - {job.process.pid}:
        os.kill(pid, signal.SIGUSR1)
    ended = job.end()
    assert ended.status == 75, ended.err
    assert len(list(tmp_path.glob("warned.*"))) == 2


def test_a_rank_finds_what_torchrun_gives_it(tmp_path: Path) -> None:
    """No thread of ours among its own, and a file for the error that @record writes."""
    script = """
import os, sys, threading
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    print(threading.active_count(), flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise ValueError("from the file")
main()
"""
    ended = run(tmp_path, "--nodes", "1", "--", write(tmp_path, "script.py", script))
    assert (ended.status, ended.out) == (1, "1\n")
    assert "rank 0 on 127.0.0.1 failed first, status 1: ValueError: from the file (" in ended.err


def test_another_stop_signal_can_be_chosen_and_a_deaf_rank_is_told(tmp_path: Path) -> None:
    script = 'if [ $RANK = 0 ]; then trap "exit 75" USR1; fi; touch ready.$RANK; until [ -e told ]; do sleep 0.1; done; exit 75'
    job = start(tmp_path, "--stop-signal", "USR1", *SHELL, script)
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both ranks run")
    (job.run / "stop").touch()
    job.until(lambda: "catches no SIGUSR1" in job.text(), "it is told")
    (tmp_path / "told").touch()
    ended = job.end()
    assert ended.status == 75, ended.err
    assert (
        "apptrain: a stop was asked for, but rank 1 on 127.0.0.2 catches no SIGUSR1 and runs on\n"
        in ended.err
    )


def ask_to_stop(job: Job, end: float) -> None:
    """As a job script does whose job may run again: with when the scheduler ends it."""
    (job.run / ".stop").write_text(f"end={end:.0f}")
    (job.run / ".stop").rename(job.run / "stop")


def test_a_rank_that_catches_no_stop_is_ended_before_the_job_that_goes_on_as_another(tmp_path: Path) -> None:
    script = 'if [ $RANK = 0 ]; then trap "exit 75" TERM USR2; fi; touch ready.$RANK; for i in $(seq 400); do sleep 0.1; done'
    job = start(tmp_path, *SHELL, script)
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both ranks run")
    ask_to_stop(job, time.time() + 6)
    ended = job.end()
    assert ended.status == 143, ended.err
    why = "the job's time is up, and rank 1 on 127.0.0.2 catches no SIGUSR2: ended by SIGTERM"
    assert f"apptrain: 127.0.0.2: {why}\n" in ended.err


def test_ranks_that_were_asked_to_stop_may_save_until_the_job_ends(tmp_path: Path) -> None:
    script = 'trap "sleep 3; exit 75" USR2; trap "exit 1" TERM; touch ready.$RANK; for i in $(seq 400); do sleep 0.1; done'
    job = start(tmp_path, *SHELL, script)
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both ranks run")
    ask_to_stop(job, time.time() + 2)
    ended = job.end()
    assert ended.status == 75, ended.err


def test_a_killed_agent_leaves_no_rank_running(tmp_path: Path) -> None:
    job = start(
        tmp_path,
        "--",
        write(tmp_path, "script.py", "open('ready','w').close()\nimport time; time.sleep(100)"),
    )
    job.until((tmp_path / "ready").exists, "a rank runs")
    found = agents(job.run)
    assert len(found) == 2
    os.kill(found[0], signal.SIGKILL)
    ended = job.end()
    assert ended.status == 1
    assert "torchrun's agent ended with status -9" in ended.err
    assert gone(str(ended.run))


def test_a_killed_entrypoint_takes_its_ranks_along_and_the_other_node_hears_of_it(tmp_path: Path) -> None:
    job = start(
        tmp_path,
        "--",
        write(
            tmp_path,
            "script.py",
            "import os,time\nopen('ready.'+os.environ['RANK'],'w').close()\ntime.sleep(100)",
        ),
    )
    job.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both ranks run")
    nodes = {node_name(pid): pid for pid in processes_with(str(job.run)) if " launch " in command_line(pid)}
    job.started = time.monotonic()
    os.kill(nodes["127.0.0.2"], signal.SIGKILL)
    ended = job.end()
    assert ended.status != 0
    assert ended.seconds < 50
    assert ended.outcome("0.0").node == "127.0.0.2"
    assert gone(str(ended.run))


def test_a_node_that_dies_before_it_joins_ends_the_others_wait(tmp_path: Path) -> None:
    job = start(tmp_path, "--", write(tmp_path, "script.py", "import time; time.sleep(100)"))

    def second() -> list[int]:
        found = [pid for pid in processes_with(str(job.run)) if " launch " in command_line(pid)]
        return [pid for pid in found if node_name(pid) == "127.0.0.2"]

    job.until(second, "the second node has started")
    os.kill(second()[0], signal.SIGKILL)
    ended = job.end()
    assert ended.status == 137, ended.err
    assert ended.seconds < 90
    assert gone(str(ended.run))


@pytest.mark.parametrize("how", ["--start-ranks=fork", "--start-ranks=spawn", "--mode=exec"])
def test_ranks_of_a_launch_in_the_background_do_not_ignore_what_a_keyboard_sends(
    tmp_path: Path, how: str
) -> None:
    """bash has what it starts there ignore it, as PBS's tasks."""
    tell = "import signal; print(*(signal.getsignal(s) == signal.SIG_IGN for s in (2, 3)))"
    launch = [sys.executable, "-P", "-m", "entrypoint", "launch", "--nodes", "127.0.0.1", "--node-rank", "0"]
    given = ["--device", "cpu", "--nproc-per-node", "1", "--master-port", master_port(), how]
    script = write(tmp_path, "script.py", tell)
    line = ["bash", "-c", '"$@" & wait $!', "bash", *launch, *given, "--run-dir", str(tmp_path / "run")]
    ended = Job([*line, "--", script], tmp_path, tmp_path / "run", clean_env()).end()
    assert (ended.status, ended.out) == (0, "False False\n"), ended.err


def test_a_program_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    argv = [
        "nohup",
        sys.executable,
        "-P",
        "-m",
        "entrypoint.cli.embedded",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    job = Job([*argv, *SHELL, "touch ready; sleep 2"], tmp_path, tmp_path / "run", clean_env())
    job.until((tmp_path / "ready").exists, "a rank runs")
    job.signal(signal.SIGHUP)
    assert job.end().status == 0


def test_users_files_do_not_stand_in_for_ours_and_theirs_are_found(tmp_path: Path) -> None:
    """The entrypoint's and train's; `world` has the agent's."""
    wrong_modules(tmp_path)
    ended = run(tmp_path, "--mode", "rank", "--", "-m", "train.hello")
    assert ended.status == 0, ended.err
    assert "hello from [127.0.0.2:gloo] process 1/2" in ended.out


def test_a_script_imports_what_lies_beside_it_and_gets_its_arguments_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    write(folder, "model.py", "NAME = 'model beside the script'")
    script = write(
        folder, "train.py", "import json, sys, model\nprint(json.dumps([model.NAME, *sys.argv[1:]]))"
    )
    arguments = [
        "--lr",
        "0.1",
        "a b",
        "it's",
        'say "x"',
        "$HOME",
        "$$",
        "${rank}",
        "new\nline",
        "",
        "--",
        "-m",
        "*",
    ]
    ended = run(tmp_path, "--nodes", "1", "--", script, "--", *arguments)  # as torchrun takes it
    assert ended.status == 0, ended.err
    assert json.loads(ended.out) == ["model beside the script", *arguments]


def test_a_users_module_is_found_in_the_current_directory(tmp_path: Path) -> None:
    write(tmp_path, "mine.py", "print('my module')")
    ended = run(tmp_path, "--nodes", "1", "--", "-m", "mine")
    assert (ended.status, ended.out) == (0, "my module\n"), ended.err


def test_only_rank_0_is_shown_on_request_and_the_logs_have_everything(tmp_path: Path) -> None:
    ended = run(tmp_path, "--show-ranks", "0", *SHELL, "echo rank $RANK")
    assert (ended.status, ended.out) == (0, "rank 0\n")
    assert ended.log("0/127.0.0.2.rank1.out") == "rank 1\n"


def test_what_an_outer_launcher_left_behind_does_not_reach_the_ranks(tmp_path: Path) -> None:
    left = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PET_NNODES": "7",
        "RANK": "5",
        "PYTHON_EXEC": "/no/where",
    }
    env = {**left, "APPTRAIN_PASS": "PYTHONPATH TORCHELASTIC_* PET_* RANK PYTHON_EXEC"}
    ended = run(
        tmp_path,
        "--mode",
        "exec",
        "--no-python",
        "--",
        "bash",
        "-c",
        "env | grep -E '^(TORCHELASTIC|PET|RANK|PYTHON_EXEC)' ; true",
        env=env,
    )
    assert (ended.status, ended.out) == (0, "")
    message = (
        "not passed on to the ranks, meant for another launcher: PET_NNODES, PYTHON_EXEC, RANK, "
        "TORCHELASTIC_USE_AGENT_STORE"
    )
    assert ended.err.count(message) == 1


def test_variables_that_do_not_reach_the_ranks_are_named_and_no_rank_sees_the_list(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "import os\nprint(*(n for n in ('FSDP_X', 'MY_DATA', 'APPTRAIN_NOT_PASSED') if n in os.environ))",
    )
    env = {"FSDP_X": "1", "MY_DATA": "secret", "ANOTHER": "", "A": "", "B": "", "APPTRAIN_PASS": "PYTHONPATH"}
    ended = run(tmp_path, "--nodes", "1", "--", script, env=env)
    assert (ended.status, ended.out) == (0, "FSDP_X\n"), ended.err
    assert (
        "the ranks do not get MY_DATA, which script.py mentions, A, ANOTHER and 1 more, all in" in ended.err
    )
    file = ended.run / "not-passed.txt"
    assert file.stat().st_mode & 0o777 == 0o600
    assert {"MY_DATA", "ANOTHER", "A", "B"} <= set(file.read_text().split())
    assert "secret" not in file.read_text()


def test_what_an_image_says_of_itself_reaches_the_nodes(tmp_path: Path) -> None:
    names = ("APPTRAIN_IMAGE_ID", "APPTRAIN_STACK", "LD_LIBRARY_PATH")
    env = image_env(tmp_path, "7be444fb", "5e1f") | {"LD_LIBRARY_PATH": "/.singularity.d/libs"}
    ended = run(tmp_path, "--nodes", "1", *SHELL, "echo $" + " $".join(names), env=env)
    assert (ended.status, ended.out) == (0, " ".join(env[name] for name in names) + "\n"), ended.err


def test_the_ranks_run_under_the_entrypoints_python_whatever_torchrun_is_told(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import sys; print(sys.executable)")
    env = {"PYTHON_EXEC": "/no/where", "APPTRAIN_PASS": "PYTHONPATH PYTHON_EXEC"}
    ended = run(tmp_path, "--nodes", "1", "--", script, env=env)
    assert (ended.status, ended.out) == (0, f"{sys.executable}\n"), ended.err


def test_an_agent_whose_ranks_have_ended_leaves_at_once(tmp_path: Path) -> None:
    """It takes nothing of torch down, which takes half as long as the import; a rank of the user's does."""
    at_exit = "open(f\"{sys.argv[0].rpartition('/')[2]}.{os.getpid()}.end\", 'w').close()"
    write(tmp_path, "sitecustomize.py", f"import atexit, os, sys\natexit.register(lambda: {at_exit})\n")
    script = write(tmp_path, "script.py", "")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ended = run(tmp_path, "--nodes", "1", "--", script, env={"PYTHONPATH": path})
    assert ended.status == 0, ended.err
    # The agent, which has the same arguments, is not among them.
    assert len(list(tmp_path.glob("script.py.*.end"))) == 1


def number_of(scheduler: int) -> int | None:
    """The slot that an embedded scheduler has taken, by the name of its socket; None before."""
    open_files = set()
    for file in Path(f"/proc/{scheduler}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was just closed
            open_files.add(file.stat().st_ino)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        *_, inode, name = (line + " -").split()[:8]
        if name.startswith("@apptrain-embedded-") and int(inode) in open_files:
            return int(name.rpartition("-")[2])
    return None


def test_a_taken_join_port_is_met_with_the_next_attempts_ports(tmp_path: Path) -> None:
    for another in range(20):
        gate = tmp_path / f"{another}.go"
        job = start(tmp_path / f"{another}", *SHELL, "echo attempt $MASTER_PORT", gate=gate)
        number = job.process.pid
        _, join_port = port_pair(job_number=number, array_index=0, step=0, attempt=0)
        with socket.socket() as taken, contextlib.suppress(OSError):  # another job may have it
            taken.bind(("127.0.0.1", join_port))  # nobody answers there, or node 1 would wait for words
            gate.touch()
            job.until(partial(number_of, number), "it has its number")
            if number_of(number) == number % JOBS:
                ended = job.end()
                break
        job.give_up()
    assert {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+) is taken", ended.err)} == {join_port}
    second, _ = port_pair(job_number=number, array_index=0, step=0, attempt=1)
    assert (ended.status, ended.out) == (0, f"attempt {second}\n" * 2), ended.err
    assert ended.outcome("0.0.0").status == 69


def test_a_port_set_by_hand_is_not_retried(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1] - 1
        ended = run(tmp_path, "--master-port", str(port), *SHELL, "echo never")
    assert (ended.status, ended.out) == (69, "")
    assert not list((ended.run / "outcome").glob("1.*"))


STEPS = """
import ctypes, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.zeros(1)
beat = os.open(os.path.join(os.environ["APPTRAIN_HEARTBEAT"], str(rank)), os.O_CREAT | os.O_WRONLY)

def load(step):
    if step == 5 and sys.argv[1:] == [str(rank)]:
        ctypes.PyDLL(None).sleep(1000)  # without letting go of the interpreter's lock

for step in range(1, 1000000):
    load(step)
    dist.all_reduce(total)
    os.pwrite(beat, str(step).encode(), 0)  # in one call: whenever it is stopped, there is a number
    if step == 20:
        Path(f".pid.{rank}").write_text(str(os.getpid()))
        Path(f".pid.{rank}").rename(f"pid.{rank}")
    time.sleep(0.01)
"""


def stuck(ended: Ended) -> list[str]:
    """What the user reads of a hang."""
    return [line for line in ended.err.splitlines() if "stuck" in line or "where each" in line]


def test_a_stopped_rank_is_named_with_the_stacks_of_all_while_the_others_wait(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", STEPS)
    job = start(tmp_path, "--nproc-per-node", "2", "--hang-timeout", "3", "--", script)
    job.until(lambda: len(list(tmp_path.glob("pid.*"))) == 4, "all ranks make steps")
    pid = int((tmp_path / "pid.3").read_text())
    os.kill(pid, signal.SIGSTOP)
    job.until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T", "the rank is stopped", 5)
    ended = job.end()
    assert ended.status == 124
    message, where = stuck(ended)
    begin = "apptrain: rank 3 on 127.0.0.2, status 124: stuck, no step for 3 s after step "
    assert message.startswith(begin), message
    assert ": it is stopped by a signal in script.py:" in message
    assert message.endswith(", while 3 of 4 ranks wait in all_reduce, script.py:16 <module>")
    assert where == f"apptrain: where each rank was: {ended.run / 'stacks' / '0'}"
    for rank in range(4):
        stack = (ended.run / "stacks" / "0" / f"127.0.0.{1 + rank // 2}.rank{rank}.txt").read_text()
        assert 'script.py", line ' in stack, stack
    for node in (0, 1):
        outcome = ended.outcome(f"0.{node}")
        assert (outcome.status, outcome.rank, outcome.node, outcome.signal) == (124, 3, "127.0.0.2", 0)
    assert "Fatal Python error" not in ended.err
    assert gone(str(ended.run))


def test_a_rank_that_holds_the_interpreters_lock_is_named_by_its_line(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", STEPS)
    ended = run(tmp_path, "--hang-timeout", "3", "--mode", "rank", "--", script, "0")
    assert stuck(ended)[0] == (
        "apptrain: rank 0 on 127.0.0.1, status 124: stuck, no step for 3 s after step 4: it waits for no "
        "other rank, and is in script.py:12 load, while 1 of 2 ranks wait in all_reduce, script.py:16 <module>"
    )


PAUSE = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
optimizer = torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1)
def evaluate():
    time.sleep(1000)
for step in range(8):
    dist.all_reduce(torch.zeros(1))
    optimizer.step()
if dist.get_rank() == 1:
    evaluate()
dist.all_reduce(torch.zeros(1))
"""


def test_a_script_that_tells_nothing_is_ended_where_the_user_chose_the_bound(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", PAUSE)
    ended = run(tmp_path, "--nodes", "1", "--tasks-per-node", "2", "--hang-timeout", "2", "--", script)
    assert (ended.status, stuck(ended)[0]) == (
        124,
        "apptrain: rank 1 on 127.0.0.1, status 124: stuck, no step for 2 s after step 8: it waits for no other "
        "rank, and is in script.py:8 evaluate, while 1 of 2 ranks wait in all_reduce, script.py:14 <module>",
    )


def start_hastily(tmp_path: Path, script: str, ranks: int, first_step: float, hang_timeout: float) -> Job:
    """One node with nothing set, where what takes minutes by default takes seconds."""
    argv = [sys.executable, "-P", "-m", "tests.embedded.hasty"]
    argv += [f"first_step={first_step}", f"hang_timeout={hang_timeout}", "launch"]
    argv += ["--nodes", "127.0.0.1", "--node-rank", "0", "--device", "cpu", "--nproc-per-node", str(ranks)]
    argv += ["--master-port", master_port(), "--run-dir", str(tmp_path / "run"), "--"]
    return Job([*argv, write(tmp_path, "script.py", script)], tmp_path, tmp_path / "run", clean_env())


APART = f"""{PAUSE.replace("1000", "9").rstrip()}
optimizer.step()
groups = [dist.new_group([0, 1]) for _ in range(2)]
dist.all_reduce(torch.zeros(1), group=groups[dist.get_rank()])
"""
"""A pause that ends, and then a deadlock."""


def test_with_nothing_set_a_pause_is_said_once_and_only_a_proven_deadlock_ends_the_job(
    tmp_path: Path,
) -> None:
    ended = start_hastily(tmp_path, script=APART, ranks=2, first_step=60, hang_timeout=3).end()
    told = [line for line in ended.err.splitlines() if "no step" in line]
    last = told[-1].replace("rank 1", "rank 0", 1)  # whichever it was
    assert (ended.status, [*told[:-1], last]) == (
        124,
        [
            "apptrain: rank 1 on 127.0.0.1: no step for 3 s after step 8: it waits for no other rank, and is in "
            "script.py:8 evaluate, while 1 of 2 ranks wait in all_reduce, script.py:14 <module>: the job goes on, "
            "and stacks/ of the run directory has where each rank is (--hang-timeout)",
            "apptrain: rank 0 on 127.0.0.1, status 124: stuck, no step for 3 s after step 9: it gave its last "
            "sign first, and is in script.py:17 <module> like all others",
        ],
    )


def test_with_nothing_set_a_rank_that_stays_stopped_ends_the_job_and_is_named(tmp_path: Path) -> None:
    stops = PAUSE.replace("import ", "import os, signal, ", 1)
    stops = re.sub(r"(?m)^( *)time\.sleep\(1000\)$", r"\1os.kill(os.getpid(), signal.SIGSTOP)", stops)
    assert "SIGSTOP" in stops
    ended = start_hastily(tmp_path, script=stops, ranks=2, first_step=60, hang_timeout=3).end()
    assert ended.status == 124, ended.err
    last = [line for line in ended.err.splitlines() if "status 124" in line]
    assert last[-1].startswith(
        "apptrain: rank 1 on 127.0.0.1, status 124: stuck, no step for 3 s after step 8: it is stopped by a signal"
    )


SPAWNS = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(rank):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "%s"}
    dist.init_process_group("gloo", rank=rank, world_size=2)

if __name__ == "__main__":
    mp.spawn(worker, nprocs=2)
"""


def test_a_script_that_spawns_its_own_workers_under_torchrun_is_told_of_the_mode_for_it(
    tmp_path: Path,
) -> None:
    job = start_hastily(tmp_path, script=SPAWNS % master_port(), ranks=1, first_step=5, hang_timeout=300)
    job.until(lambda: "--mode exec" in job.text(), "it is told")
    job.signal(signal.SIGINT)
    ended = job.end()
    told = [line for line in ended.err.splitlines() if "--mode exec" in line]
    assert (ended.status, told) == (
        130,
        [
            "apptrain: rank 0 on 127.0.0.1 has started processes of its own, and they wait in init_process_group "
            "(script.py:8): torchrun starts one process for each rank, and a script that starts its own (mp.spawn) "
            "needs --mode exec"
        ],
    )


def test_a_hang_of_a_single_participant_is_ended(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "import os, time\nopen(f\"{os.environ['APPTRAIN_HEARTBEAT']}/0\", 'w').write('3')\ntime.sleep(1000)",
    )
    ended = run(tmp_path, "--nodes", "1", "--hang-timeout", "3", "--", script)
    assert (ended.status, stuck(ended)[0]) == (
        124,
        "apptrain: rank 0 on 127.0.0.1, status 124: stuck, no step for 3 s after step 3: it gave its last "
        "sign first, and is in script.py:3 <module>",
    )


def test_a_rank_that_is_no_python_and_hangs_is_ended_without_a_stack(tmp_path: Path) -> None:
    ended = run(tmp_path, "--hang-timeout", "1", *SHELL, "echo 7 >$APPTRAIN_HEARTBEAT/$RANK; sleep 1000")
    assert ended.status == 124
    assert stuck(ended)[0].endswith("stuck, no step for 1 s after step 7: it gave its last sign first")
    assert gone(str(ended.run))


@pytest.mark.parametrize("way", ["cannot be made", "takes nothing"])
def test_a_file_system_that_does_not_take_the_stacks_neither_holds_the_job_up_nor_changes_its_status(
    tmp_path: Path, way: str
) -> None:
    """It hangs as a FIFO does that nobody reads: whoever opens it waits for ever."""
    folder = tmp_path / "run" / "stacks"
    folder.parent.mkdir(mode=0o700)
    if way == "takes nothing":
        (folder / "0").mkdir(parents=True)
        for node in (1, 2):
            os.mkfifo(folder / "0" / f"127.0.0.{node}.rank{node - 1}.txt")
    plant = ': >"$APPTRAIN_RUN_DIR/stacks"; ' if way == "cannot be made" else ""  # at the start it is refused
    script = (
        plant
        + 'trap "echo dumped >&2; exit 134" ABRT; touch here.$RANK; until [ -e here.0 -a -e here.1 ]; do sleep 0.1; done; echo 7 >$APPTRAIN_HEARTBEAT/$RANK; while :; do sleep 0.1; done'
    )
    ended = run(tmp_path, "--hang-timeout", "1", *SHELL, script)
    assert ended.status == 124, ended.err
    why = {"cannot be made": "Not a directory", "takes nothing": "no answer within 4 s"}[way]
    for node in (1, 2):
        assert f"apptrain: 127.0.0.{node}: the stacks cannot be kept in {folder / '0'}: {why}\n" in ended.err
    assert stuck(ended)[0].endswith("stuck, no step for 1 s after step 7: it gave its last sign first")
    assert gone(str(ended.run))


def test_ranks_that_never_tell_a_step_are_left_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, "--hang-timeout", "0.5", *SHELL, "sleep 3; echo done")
    assert (ended.status, ended.out) == (0, "done\ndone\n"), ended.err


def test_a_rank_that_has_ended_does_not_hang(tmp_path: Path) -> None:
    script = "if [ $RANK = 0 ]; then echo 7 >$APPTRAIN_HEARTBEAT/0; sleep 0.5; else sleep 6; fi"
    ended = run(tmp_path, "--hang-timeout", "4", *SHELL, script)
    assert ended.status == 0, ended.err


def test_silence_of_all_ranks_is_a_hang_where_that_is_asked_for(tmp_path: Path) -> None:
    script = "[ $RANK = 0 ] || sleep 1000; for i in $(seq 20); do echo $i; sleep 0.1; done; sleep 1000"
    ended = run(tmp_path, "--silence-timeout", "4", *SHELL, script)
    assert (ended.status, ended.out.splitlines()[-1]) == (124, "20")
    assert "stuck, no rank has written anything for 4 s (--silence-timeout)" in stuck(ended)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--frobnicate",), "unrecognized arguments: --frobnicate: see `apptrain run --help`"),
        (("--nodes", "300"), "--nodes 300: 254 at most on one machine"),
        (("--mode", "rank", "--on-failure", "restart"), "--on-failure restart needs one task on every node, and --mode rank has one for each rank: start one task per node, or use --on-failure requeue"),
        (("--mode", "rank", "--max-restarts", "2"), "--max-restarts 2 needs --mode torchrun, this is rank: leave it out"),
        (("--mode", "rank", "--rdzv-backend", "c10d"), "--rdzv-backend c10d needs --mode torchrun, this is rank: leave it out"),
        (("--no-python", "--", "no-such-program"), "CMD no-such-program is no program in PATH: check the spelling, or give its path"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_64_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    ended = run(tmp_path, *arguments)
    assert (ended.status, ended.out, ended.err) == (64, "", f"apptrain: {message}\n")
    assert not ended.run.exists()


def test_a_script_that_does_not_exist_is_told_with_the_folder_it_was_sought_in(tmp_path: Path) -> None:
    ended = run(tmp_path, "--", "trian.py")
    assert (ended.status, ended.err) == (
        64,
        f"apptrain: CMD trian.py does not exist in {tmp_path}: check the spelling; a module is given as -m NAME, "
        "a program that is no Python script needs --no-python\n",
    )


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def node_name(pid: int) -> str:
    """Empty for one that has just ended, or starts another program."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    names = (line for line in environ if line.startswith(b"APPTRAIN_EMBEDDED_NODENAME="))
    return next(names, b"").decode().partition("=")[2]


SAVES = """
import signal, sys, time
came = []
for signum in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(signum, lambda signum, _: came.append(signum))
print("ready", flush=True)
while not came:
    time.sleep(0.05)
time.sleep(1)
print("saved", flush=True)
sys.exit(75 if came[0] == signal.SIGUSR2 else 143)
"""


@pytest.mark.parametrize("mode", ["torchrun", "rank", "exec"])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR2, 75)])
def test_a_program_that_a_shell_has_started_saves_as_one_without_a_shell_does(
    tmp_path: Path, mode: str, signum: int, status: int
) -> None:
    """The shell dies of SIGTERM at once, and catches no signal."""
    line = f"{shlex.quote(sys.executable)} {write(tmp_path, 'saves.py', SAVES)}; exit $?"
    words = ("--device", "cpu", "--nproc-per-node", "1", "--mode", mode, "--no-python", "--", "bash", "-c")
    job = start(tmp_path, *words, line)
    job.until(lambda: job.text().count("ready\n") == 2, "both programs catch signals")
    job.signal(signum)
    ended = job.end()
    assert (ended.status, ended.out.count("saved\n")) == (status, 2), ended.err


def test_each_program_that_a_shell_starts_hears_of_a_planned_end(tmp_path: Path) -> None:
    saves = f"{shlex.quote(sys.executable)} {write(tmp_path, 'saves.py', SAVES)}"
    words = ("--nodes", "1", "--device", "cpu", "--mode", "exec", "--no-python", "--", "bash", "-c")
    job = start(tmp_path, *words, f"{saves}; {saves}; exit $?")
    job.until(lambda: "ready\n" in job.text(), "the first program catches signals")
    job.signal(signal.SIGUSR2)
    ended = job.end()
    assert (ended.status, ended.out) == (75, "ready\nsaved\nready\nsaved\n"), ended.err
