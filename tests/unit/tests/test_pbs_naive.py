"""The double of OpenPBS: what a naive job script runs into."""

import os
import pwd
import shlex
import signal
from pathlib import Path

from tests.pbs_double.local import Local
from tests.unit.tests.double import TWO, ran, runs, started, there

NAIVE = """\
export MASTER=$(head -n 1 $PBS_NODEFILE) NNODES=2 DATA="$PWD/data"
echo started
pbsdsh -- bash -c 'echo "node ${PBS_NODEID-none} of ${NNODES-none} master ${MASTER-none} in $PWD"; exit $PBS_NODENUM'
"""
"""As tutorials have it: exports, PBS_NODEID, and the status of pbsdsh."""


def test_a_naive_script_knows_neither_rank_nor_master_on_any_node_and_ends_well(pbs: Local) -> None:
    out, _, ended = ran(pbs, NAIVE)
    lines = [line for line in out.splitlines() if line.startswith("node")]
    assert lines == [f"node none of none master none in {pbs.home}"] * 2
    assert ended["Exit_status"] == "0", "although a task failed"


def test_a_naive_script_runs_two_tasks_on_one_host_when_chunks_are_packed(pbs: Local) -> None:
    out, _, _ = ran(
        pbs,
        NAIVE.replace("$PBS_NODEID", "$PBS_NODENUM").replace("${PBS_NODEID-none}", "$PBS_NODENUM"),
        "-l",
        "select=2:ncpus=1",
    )
    assert [line.split()[1] for line in out.splitlines() if line.startswith("node")] == ["0", "0"]


def test_a_naive_script_loses_what_its_tasks_would_save(pbs: Local, tmp_path: Path) -> None:
    saving = "trap 'sleep 1; touch {log}.saved.$PBS_NODENUM; exit' TERM\ntouch {log}.$PBS_NODENUM; sleep 60 & wait; wait\n"
    log = tmp_path / "log"
    task = tmp_path / "save.sh"
    task.write_text(saving.format(log=log))
    id = pbs.submit(f"#!/bin/bash\npbsdsh -- bash {task}\n", *TWO)
    started(log)
    pbs.run("qdel", id)
    pbs.wait(id)
    assert sorted(path.name for path in tmp_path.glob("log.saved*")) == []


def test_a_naive_script_that_counts_hosts_from_one_runs_twice_on_the_first_and_never_asks(pbs: Local) -> None:
    script = 'for i in 1 2; do pbsdsh -n $i -- sh -c "echo rank $((i - 1)) on \\$PBS_NODENUM"; done'
    out, err, ended = ran(pbs, script)
    assert (sorted(out.splitlines()), err) == (["rank 0 on 1", "rank 1 on 0"], "")
    assert ended["Exit_status"] == "0"


def test_a_naive_script_that_starts_torchrun_itself_runs_on_the_first_host_alone(pbs: Local) -> None:
    out, _, _ = ran(pbs, 'echo "torchrun --nnodes $(sort -u $PBS_NODEFILE | wc -l) on $PBS_NODENUM"')
    assert out == "torchrun --nnodes 2 on 0\n"


def test_a_naive_script_gets_no_answer_from_a_command_substitution(pbs: Local) -> None:
    out, _, _ = ran(pbs, 'MASTER=$(pbsdsh -n 0 -- hostname); echo "master <$MASTER>"')
    assert "master <>" in out.splitlines()


def test_a_naive_script_leaves_what_called_setsid_on_every_host(pbs: Local, tmp_path: Path) -> None:
    file = tmp_path / "pid.$PBS_NODENUM"
    task = f"setsid bash -c 'echo $$ >{file}; exec sleep 304' & {there(file)}"
    ran(pbs, f"pbsdsh -- bash -c {shlex.quote(task)}")
    left = [int((tmp_path / f"pid.{host}").read_text()) for host in (0, 1)]
    assert [runs(pid) for pid in left] == [True, True]
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def test_whoever_submits_is_known_by_the_password_file(pbs: Local) -> None:
    out, _, _ = ran(pbs, "echo $USER")
    assert out.strip() == pwd.getpwuid(os.getuid()).pw_name
