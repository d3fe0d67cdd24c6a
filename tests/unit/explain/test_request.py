"""What a job script asks its scheduler for, counted as that scheduler counts it."""

import pytest

from entrypoint.explain import request


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("#SBATCH", []),
        ("#SBATCH -N 2", [("nodes", "2")]),
        ("#SBATCH -N2 --gres=gpu:1", [("nodes", "2"), ("gres", "gpu:1")]),
        ("#SBATCH -N=2 --mem 4G", [("nodes", "2"), ("mem", "4G")]),
        ("#SBATCH --mem= -N 1", [("mem", ""), ("nodes", "1")]),
        ("#SBATCH --export=A=1,B=2 -o x=y", [("export", "A=1,B=2"), ("output", "x=y")]),
        ("#SBATCH --exclusive -H --requeue -J a", [("exclusive", ""), ("hold", ""), ("requeue", ""), ("job-name", "a")]),
        ("#SBATCH --exclusive=user -y 5", [("exclusive", "user"), ("y", "5")]),
        ("#SBATCH --nodes", [("nodes", "")]),
        ("#SBATCH -N 2 two --mem=1", [("nodes", "2")]),
        ("#SBATCH -N 2 -- --mem=1", [("nodes", "2")]),
        ("#SBATCH -N 2 - --mem=1", [("nodes", "2")]),
        ("#SBATCH -J 'a b' # --mem=1", [("job-name", "a b")]),
        ("#SBATCH --comment=it's --mem=1 # -N 2", [("comment", "it's"), ("mem", "1")]),
        ("#SBATCH" + " " * 3997 + "-N23", [("nodes", "2")]),
        (" #SBATCH -N 2", []),
        ("# SBATCH -N 2", []),
        ("#PBS", []),
        ("#PBS -q gpu -N a", [("q", "gpu"), ("N", "a")]),
        ("#PBS -qgpu -V -h -x -z -r n", [("q", "gpu"), ("V", ""), ("h", ""), ("x", ""), ("z", ""), ("r", "n")]),
        (
            "#PBS -l select=2:ncpus=8:mem=1gb+1,walltime=1:00,place=pack",
            [("select", "2:ncpus=8:mem=1gb+1"), ("walltime", "1:00"), ("place", "pack")],
        ),
        ("#PBS -l 'select=1:a=\"x,y\"+1,walltime=1'", [("select", '1:a="x,y"+1'), ("walltime", "1")]),
        ("#PBS -l place=scatter:excl", [("place", "scatter:excl")]),
        (
            "#PBS -lnodes=2:ppn=4,walltime=1:00,software=a=b",
            [("nodes", "2"), ("walltime", "1:00"), ("software", "a=b")],
        ),
        ("#PBS -q", [("q", "")]),
        ("#PBS -q a - -N b", [("q", "a")]),
        ("#PBS -q a b -N c", [("q", "a")]),
    ],
)  # fmt: skip
def test_each_option_is_kept_by_its_long_name_and_line(line: str, options: list[tuple[str, str]]) -> None:
    asked = request.read(["#!/bin/bash", line])
    assert asked.options == tuple(request.AskedOption(*option, 2) for option in options)


def test_a_directive_counts_up_to_the_first_command() -> None:
    lines = [
        "#!/bin/bash",
        "#SBATCH -N 2",
        "  # a note",
        "",
        "#PBS -q a",
        "#SBATCH -n 4",
        "cd x",
        "#SBATCH -n 9",
        "",
        "#PBS -q b",
    ]
    asked = request.read(lines)
    assert asked.scheduler == "slurm"
    assert [(one.name, one.line) for one in asked.options] == [("nodes", 2), ("ntasks", 6)]
    assert asked.late == (8, 10)
    asked = request.read(["#PBS -q a", "#SBATCH -N 2"])
    assert (asked.scheduler, [one.name for one in asked.options]) == ("pbs", ["q"])
    assert request.read(["true"]) == request.ScriptRequest("", (), ())


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
def test_each_component_of_a_heterogeneous_job_asks_for_itself(word: str) -> None:
    asked = request.read(["#SBATCH -N 1 -n 1", f"#SBATCH {word}", "#SBATCH -N 4", "true", "#SBATCH -N 9"])
    assert [(one.nodes, len(one.options), one.late) for one in (asked, *asked.others)] == [
        (1, 2, (5,)),
        (4, 1, (5,)),
    ]


@pytest.mark.parametrize(
    ("lines", "nodes", "tasks", "gpus"),
    [
        ([], None, None, None),
        (["#SBATCH -J x"], 1, 1, 0),
        (["#SBATCH -N 2 --gres=gpu:a100:4"], 2, 1, 4),
        (["#SBATCH -N2 --gres=gpu"], 2, 1, 1),
        (["#SBATCH --nodes=2-4"], None, 1, 0),
        (["#SBATCH --nodes 2  # not 3"], 2, 1, 0),
        (["#SBATCH --nodes=2", "#SBATCH --nodes=3"], 3, 1, 0),
        (["#SBATCH --ntasks=8 --ntasks-per-node=4"], 2, 4, 0),
        (["#SBATCH --ntasks=9 --ntasks-per-node=4"], 3, 4, 0),
        (["#SBATCH -n 8"], None, None, 0),
        (["#SBATCH -n 1"], 1, 1, 0),
        (["#SBATCH -N 2 -n 7"], 2, 4, 0),
        (["#SBATCH -N 2 --gpus=8"], 2, 1, 4),
        (["#SBATCH -N 2 -n 8 --gpus-per-task=2"], 2, 4, 8),
        (["#SBATCH --gpus-per-node=h100:4,nvme:1"], 1, 1, 4),
        (["#SBATCH -N 2 -n 8 --tres-per-task=cpu=4,gres/gpu:1"], 2, 4, 4),
        (["#SBATCH -N 2 --tres-per-task=gres/gpu=2"], 2, 1, 2),
        (["#SBATCH -N 2 --tres-per-task=cpu=4"], 2, 1, 0),
        (["#SBATCH -N 2 --gpus-per-socket=2"], 2, 1, None),
        (["#SBATCH -N 2 --gres=gpu:$N"], 2, 1, None),
        (["#SBATCH --gres=nvme:1 --gpus-per-node=2"], 1, 1, 2),
        (["#SBATCH --exclusive -N 2"], 2, 1, 0),
        (["#SBATCH -N 2 --gres=nvme:2"], 2, 1, 0),
        (["#SBATCH -N 2 --gres=nvme:1,gpu:2"], 2, 1, 2),
        (["#SBATCH --comment='it is -N 9' -N 2"], 2, 1, 0),
        (["#SBATCH --comment=it's -N 2"], 2, 1, 0),
        (["#SBATCH -N 2", "#PBS -l select=9"], 2, 1, 0),
        (["#SBATCH -N 2", "", "# a note", "#SBATCH -N 3", "true", "#SBATCH -N 4"], 3, 1, 0),
        (["#PBS -q gpu"], 1, None, 0),
        (["#PBS -l select=2:ncpus=8:ngpus=4+1:ncpus=8"], 3, None, 4),
        (["#PBS -lselect=4:naccelerators=2"], 4, None, 2),
        (["#PBS -l nodes=2:ppn=4,walltime=1:00"], 2, None, 0),
        (["#PBS -l ncpus=96", "#PBS -l ngpus=8"], None, None, None),
        (["#PBS -l ncpus=8"], None, None, 0),
        (["#PBS -l mem=8gb"], 1, None, 0),
        (["#PBS -l nodes=2", "#PBS -l ngpus=3"], 2, None, 3),
        (["#PBS -V -l select=3"], 3, None, 0),
        (["#SBATCH"], 1, 1, 0),
        (["#SBATCH -N 12345678"], 12345678, 1, 0),
        (["#SBATCH -N 123456789"], None, 1, 0),
        (["#SBATCH -N ٣"], None, 1, 0),
        (["#SBATCH -n 8 --ntasks-per-node=0"], None, 0, 0),
        (["#SBATCH -n 8 --ntasks-per-node=gpu"], None, None, 0),
        (["#SBATCH -N 2 --ntasks=$((4*2))"], 2, None, 0),
        (["#SBATCH -N 2 --ntasks-per-node=$N"], 2, None, 0),
        (["#SBATCH -N 2 --ntasks=${SLURM_NNODES}"], 2, 1, 0),
        (["#SBATCH -N 2-4 -n 1 --gpus=8"], None, None, None),
        (["#SBATCH -N 2 -n 8 --ntasks-per-node=3"], 2, 3, 0),
        (["#SBATCH -n 8 --gpus-per-task=2"], None, None, None),
        (["#SBATCH -N 2 --gpus=h100:9"], 2, 1, 4),
        (["#SBATCH --gres=gpu:2(S:0-1)"], 1, 1, 2),
        (["#SBATCH --gres=gpu:12345"], 1, 1, 1),
        (["#SBATCH --gres=gpu:9999"], 1, 1, 9999),
        (["#SBATCH --gpus-per-node=2 --gres=gpu:3 --gpus=4 --gpus-per-task=5"], 1, 1, 2),
        (["#SBATCH --gres=gpu:3 --gpus=4 --gpus-per-task=5"], 1, 1, 3),
        (["#SBATCH --gpus=4 --gpus-per-task=5"], 1, 1, 4),
        (["#PBS"], None, None, 0),
        (["#PBS -l select=a:ngpus=2"], None, None, 2),
        (["#PBS -l select=999999:ngpus=9999"], 999999, None, 9999),
        (["#PBS -l select=1234567:ngpus=12345"], None, None, 0),
        (["#PBS -l select=2:gpus=1+host=a:ngpus=1"], 2, None, 1),
        (["#PBS -l select=1:ngpus=1+3:ngpus=2"], 4, None, None),
        (["#PBS -l nodes=4:ppn=32:gpus=2"], 4, None, 2),
        (["#PBS -l select=2:mygpus=1"], 2, None, 0),
        (["#PBS -l nodes=gpu01:ppn=4"], 1, None, 0),
        (["#PBS -l select=2", "#PBS -l ngpus=3"], 2, None, 3),
        (["#PBS -l ngpus=0"], None, None, 0),
    ],
)
def test_what_is_asked_of_the_scheduler_is_counted_as_it_counts(
    lines: list[str], nodes: int | None, tasks: int | None, gpus: int | None
) -> None:
    asked = request.read(lines)
    assert (asked.nodes, asked.tasks_per_node, asked.gpus_per_node) == (nodes, tasks, gpus)


@pytest.mark.parametrize(
    ("line", "is_exclusive"),
    [
        ("#SBATCH --exclusive", True),
        ("#SBATCH --exclusive=true -N 2", True),
        ("#SBATCH --exclusive=user", False),
        ("#PBS -l place=scatter:excl", True),
        ("#PBS -l place=scatter", False),
        ("#SBATCH -N 2", False),
        ("#PBS -l select=1", False),
    ],
)
def test_nodes_of_ones_own_are_asked_for_in_these_words(line: str, is_exclusive: bool) -> None:
    assert request.read([line]).is_exclusive == is_exclusive


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["-N", "2", "python", "-c", "x"], 2),
        (["-N2", "-K1", "--exclusive", "--label", "x"], 4),
        (["--nodes=2", "--ntasks", "4", "-l", "--", "x"], 4),
        (["x", "-N", "2"], 0),
        (["-N"], 1),
        (["-N2", "x", "y"], 1),
        ([], 0),
        (["-"], 0),
        (["--", "-N2"], 0),
        (["--nodes", "2", "--mem=4G", "x"], 3),
        (["-y", "5", "-y5", "x"], 3),
        (["--overlap", "--wait", "0", "x"], 3),
        (["--no-container-mount-home", "x", "y"], 1),
        (["--container-image", "i", "--container-writable", "--no-container-entrypoint", "x"], 4),
    ],
)
def test_the_program_stands_behind_sruns_own_options(words: list[str], count: int) -> None:
    assert request.words_behind(words) == count
