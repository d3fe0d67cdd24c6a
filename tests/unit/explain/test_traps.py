"""Where a trap of job scripts begins and ends: cases next to each other, of which one is a trap."""

import pytest

from entrypoint.explain import traps

TWO = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4\n"
ONE = TWO.replace("--nodes=2", "--nodes=1")
SOME = TWO.replace("--nodes=2", "--nodes=2-4")
PBS = "#!/bin/bash\n#PBS -l select=2:ncpus=8:ngpus=4\n"
SRUN = "srun -K1"
IN_IMAGE = f"{SRUN} apptainer exec --nv x.sif"


def found(text: str) -> list[tuple[str, int]]:
    return [(one.trap.id, one.line) for one in traps.find(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{TWO}bash -c 'export MASTER_ADDR=$(hostname); python t.py'\n", [("master-in-each-task", 3)]),
        (f"{TWO}head=$(srun -N1 -n1 hostname)\n{SRUN} python t.py\n", []),
        (f"{ONE}head=$(srun -N1 -n1 hostname -i)\n{SRUN} python t.py\n", []),
        (f"{TWO}head=$(ping -c1 a)\n{SRUN} python t.py\n", [("head-by-hostname", 3)]),
        (f"{ONE}head=$(ping -c1 a)\n{SRUN} python t.py\n", []),
        (f"{TWO}export MASTER_ADDR=127.0.0.1\n{SRUN} python t.py\n", [("master-is-localhost", 3)]),
        (f"{SOME}export MASTER_ADDR=127.0.0.1\n{SRUN} python t.py\n", []),
        (f"{TWO}export MASTER_ADDR=127.0.0.1.example.org\n{SRUN} python t.py\n", []),
        (f"{TWO}export OTHER=127.0.0.1\n{SRUN} python t.py\n", []),
        (f"{SOME}export MASTER_ADDR=$SLURM_NODELIST\n{SRUN} python t.py\n", [("master-is-list", 3)]),
        (f"{ONE}export MASTER_ADDR=$SLURM_NODELIST\n{SRUN} python t.py\n", []),
        (f"{TWO}bash -c 'MASTER_PORT=29500 python t.py'\n", [("fixed-port", 3)]),
        (f"{TWO}{SRUN} bash -c 'MASTER_PORT=$P X=29500 python t.py'\n", []),
        (f"{TWO}export X=29500 MASTER_PORT=2950000\n{SRUN} python t.py\n", []),
        (f"{TWO}export MASTER_PORT=29500\n{SRUN} hostname\n", []),
        (f"{TWO}export MASTER_PORT=29500\n{SRUN} torchrun --nproc_per_node=4 --standalone t.py\n", []),
        (f"{TWO}export WHO=$SLURM_PROCID\nexport RANK=$X\n{SRUN} python t.py\n", []),
        (f"{TWO}{SRUN} torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$X t.py\n", []),
        (f"{SOME}{SRUN} torchrun --nproc_per_node=4 --node_rank=1 t.py\n", []),
        (f"{SOME}{SRUN} torchrun --nproc_per_node=4 --node_rank=$SLURM_NODEID t.py\n", [("rank-once", 3)]),
        (f"{TWO}torchrun --nnodes=2 --nproc_per_node=4 --node_rank=1 t.py\n", [("first-node-only", 3)]),
        (f"{TWO}{SRUN} bash -c 'torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$SLURM_NODEID t.py'\n", []),
        (f"{SOME}torchrun --nproc_per_node=4 t.py\n", []),
        (f"{ONE}torchrun --nproc_per_node=4 t.py\n", []),
        (f"{TWO}hostname\n", []),
        (f"{TWO}{SRUN} torchrun --nnodes=12345678 --nproc_per_node=4 t.py\n", [("nodes-against-nnodes", 3)]),
        (f"{TWO}{SRUN} torchrun --nnodes=123456789 --nproc_per_node=4 t.py\n", []),
        (f"{TWO}{SRUN} torchrun --nnodes=1:2 --nproc_per_node=4 t.py\n", []),
        (f"{TWO}{SRUN} --ntasks-per-node=2 torchrun --nnodes=2 t.py\n", [("torchrun-per-task", 3)]),
        (f"{TWO}{SRUN} --ntasks-per-node=4 python t.py\n", []),
        (f"{TWO}{SRUN} --ntasks-per-node=5 python t.py\n", [("tasks-against-gpus", 3)]),
        (f"{TWO}{SRUN} torchrun --nnodes=2 --nproc_per_node=auto t.py\n", []),
        (f"{SOME}srun python t.py\n", [("no-kill-on-bad-exit", 3)]),
        (f"{TWO}srun hostname\n", []),
        (
            f"{TWO}#SBATCH --export=NONE\n{SRUN} --export=NONE python t.py\n",
            [("export-drops", 3), ("export-drops", 4)],
        ),
        (f"{TWO}#SBATCH --export=X,ALL\n{SRUN} --export=ALL,Y python t.py\n", []),
        (f"{TWO}#SBATCH --cpus-per-task=8\n{SRUN} python t.py\n", [("no-cpus-per-task", 4)]),
        (f"{TWO}#SBATCH --cpus-per-task=8\n{SRUN} --exclusive python t.py\n", []),
        (
            f"{ONE.replace('node=4', 'node=1')}{SRUN} apptainer exec x.sif python t.py\n",
            [("no-nv", 3)],
        ),
        (
            f"{TWO}{SRUN} apptainer exec x.sif python a.py\n{SRUN} apptainer exec x.sif python b.py\n"
            f"{SRUN} apptainer exec y.sif python c.py\n",
            [("no-nv", 3), ("no-nv", 5)],
        ),
        ("#!/bin/bash\napptainer exec x.sif python t.py\n", []),
        ("#!/bin/bash\napptainer exec x.sif torchrun t.py\n", []),
        ("#!/bin/bash\napptainer exec x.sif torchrun --nproc_per_node=2 t.py\n", [("no-nv", 2)]),
        (f"{PBS}apptainer exec --nv x.sif bash -c 'cat $PBS_NODEFILE'\n", [("nodefile-in-container", 3)]),
        (f"{PBS}pbsdsh -- apptainer exec --nv x.sif cat '$PBS_NODEFILE'\n", [("nodefile-in-container", 3)]),
        (f"{PBS}pbsdsh -- apptainer exec --nv x.sif cat $PBS_NODEFILE\n", []),
        (f"{PBS}apptainer exec --nv x.sif cat '$PBS_NODEFILE'\n", []),
        (f"{TWO}conda activate x\n{SRUN} hostname\n", []),
        (f"{TWO}mamba activate x\n{IN_IMAGE} python t.py\n", [("conda-and-container", 3)]),
        (f"{TWO}source x.sh\nconda list\n{IN_IMAGE} python t.py\n", []),
        (f"{TWO}. v/bin/activate\n{IN_IMAGE} python t.py\n", [("venv-and-container", 3)]),
        (f"{TWO}. conda/bin/activate base\n{IN_IMAGE} python t.py\n", [("conda-and-container", 3)]),
        (f"{TWO}{IN_IMAGE} ml load x\n", [("module-in-container", 3)]),
        (f"{TWO}#SBATCH --mem=1G\n#SBATCH --mem-per-gpu=1G\n{SRUN} python t.py\n", [("exclusive-options", 4)]),
        (f"{TWO}#SBATCH --mem=1G --mem=2G\n{SRUN} python t.py\n", []),
        (f"{TWO}#SBATCH --gres=gpu:4\n#SBATCH --gpus=8\n", [("exclusive-options", 4)]),
        (f"{TWO}{SRUN} python t.py\n#SBATCH --mem=1G\n#PBS -q a\n", [("sbatch-after-command", 4), ("sbatch-after-command", 5)]),
        (f"{TWO}#SBATCH --time=5 --signal=B:USR1@60\ntrap x USR1\n{SRUN} python t.py\n", []),
        (f"{TWO}#SBATCH --time=5\n{SRUN} python t.py\n", [("no-signal", 3)]),
        (f"{PBS}#PBS -l walltime=5\npbsdsh -- python t.py\n", [("no-signal", 3)]),
        (f"{PBS}#PBS -l walltime=5\npbsdsh -- hostname\n", []),
        (f"{PBS}#PBS -l mem=1gb\n", [("pbs-mixed-select", 3)]),
        (f"{PBS}#PBS -l walltime=5 -o log\n", []),
        (f"{PBS}#PBS -o /dev/null\n", [("output-null", 3)]),
        (f"{TWO}#SBATCH -o log\n{SRUN} python t.py\n", []),
        (f"{ONE}#SBATCH --ntasks=4 --ntasks-per-node=4\n", []),
        (f"{TWO}#SBATCH --ntasks=8 --ntasks-per-node=4\n", []),
        (f"{TWO}#SBATCH --ntasks=7 --ntasks-per-node=4\n", [("ntasks-against-nodes", 3)]),
        (f"{TWO}#SBATCH --ntasks=9 --ntasks-per-node=4\n", [("ntasks-against-nodes", 3)]),
        (f"{TWO}export NCCL_SOCKET_IFNAME=ib0\n{SRUN} python t.py\n", [("ifname", 3)]),
        (f"{TWO}export NCCL_SOCKET_IFNAME=\n{SRUN} python t.py\n", []),
        (f"{TWO}export GLOO_SOCKET_IFNAME=lo\n{SRUN} python t.py\n", [("ifname-loopback", 3)]),
        (f"{TWO}module load a\nml purge\nmodule list\n{SRUN} python t.py\n", [("module-purge-late", 4)]),
        (f"{TWO}module purge\n{SRUN} python t.py\n", []),
        (f"{TWO}#SBATCH --signal=B:USR1@60\n{SRUN} hostname\n", []),
        (f"{TWO}#SBATCH --signal=B:USR1@60\nexec {SRUN} python t.py\n", [("signal-unheard", 3)]),
        ("\n".join(["#SBATCH -N 1", "", f"{SRUN} python t.py", ""]), [("no-shebang", 1)]),
        (f"{TWO}echo $PBS_NODEID\n", [("pbs-nodeid", 3)]),
        (f"{TWO}echo a # $PBS_NODEID\n  # $PBS_NODEID\necho $PBS_NODEIDS\n", []),
    ],
)  # fmt: skip
def test_a_trap_is_found_on_one_side_of_its_edge(text: str, expected: list[tuple[str, int]]) -> None:
    assert found(text) == expected


def test_traps_come_by_their_lines_and_remarks_behind_them() -> None:
    text = f"{TWO}#SBATCH --time=5 -o /dev/null\nexport MASTER_PORT=29500\nsrun python t.py\n"
    assert found(text) == [
        ("output-null", 3),
        ("fixed-port", 4),
        ("no-signal", 3),
        ("no-kill-on-bad-exit", 5),
    ]


def test_a_trap_is_quoted_as_a_person_would() -> None:
    text = (
        f"{TWO}#SBATCH --ntasks=7 --ntasks-per-node=4\n{SRUN} torchrun --nnodes=3 --nproc_per_node=2 t.py\n"
    )
    assert {one.trap.id: one.text for one in traps.find(text)} == {
        "ntasks-against-nodes": "--ntasks=7, --ntasks-per-node=4, --nodes=2",
        "torchrun-per-task": f"{SRUN} torchrun --nnodes=3 --nproc_per_node=2 t.py",
        "nodes-against-nnodes": "2 nodes, --nnodes 3",
    }
    text = f"{PBS}#PBS -l ncpus=8 -l walltime=5\npbsdsh -- torchrun --nnodes=2 --nproc_per_node=8 t.py\n"
    assert {one.trap.id: one.text for one in traps.find(text)} == {
        "pbs-mixed-select": "-l select and -l ncpus",
        "tasks-against-nproc": "4 GPUs per node, --nproc_per_node 8",
        "no-signal": "walltime=5",
    }


def test_old_line_ends_are_those_of_lines() -> None:
    assert found(f"{TWO}echo $PBS_NODEID\n".replace("\n", "\r")) == [("pbs-nodeid", 3)]
