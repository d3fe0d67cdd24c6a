"""Where a trap of job scripts begins and ends: cases next to each other, of which one is a trap."""

import pytest

from entrypoint.explain import traps

TWO = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4\n"
ONE = TWO.replace("--nodes=2", "--nodes=1")
SOME = TWO.replace("--nodes=2", "--nodes=2-4")
PBS = "#!/bin/bash\n#PBS -l select=2:ncpus=8:ngpus=4\n"
SRUN = "srun -K1"
MEET = "--rdzv_backend=c10d --rdzv_endpoint=$head:$port"
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
        (f"{ONE}export MASTER_PORT=29500\n{SRUN} torchrun --nproc_per_node=4 --standalone t.py\n", []),
        (f"{TWO}export WHO=$SLURM_PROCID\nexport RANK=$X\n{SRUN} python t.py\n", []),
        (f"{TWO}{SRUN} torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$X {MEET} t.py\n", []),
        (f"{SOME}{SRUN} torchrun --nproc_per_node=4 --node_rank=1 t.py\n", []),
        (f"{SOME}{SRUN} torchrun --nproc_per_node=4 --node_rank=$SLURM_NODEID t.py\n", [("rank-once", 3)]),
        (f"{TWO}torchrun --nnodes=2 --nproc_per_node=4 --node_rank=1 t.py\n", [("first-node-only", 3)]),
        (f"{TWO}{SRUN} bash -c 'torchrun --nnodes=2 {MEET} --node_rank=$SLURM_NODEID t.py'\n", []),
        (f"{SOME}torchrun --nproc_per_node=4 t.py\n", []),
        (f"{ONE}torchrun --nproc_per_node=4 t.py\n", []),
        (f"{TWO}hostname\n", []),
        (f"{TWO}{SRUN} torchrun --nnodes=12345678 {MEET} t.py\n", [("nodes-against-nnodes", 3)]),
        (f"{TWO}{SRUN} torchrun --nnodes=123456789 {MEET} t.py\n", []),
        (f"{TWO}{SRUN} torchrun --nnodes=1:2 {MEET} t.py\n", []),
        (f"{TWO}{SRUN} --ntasks-per-node=2 torchrun --nnodes=2 {MEET} t.py\n", [("torchrun-per-task", 3)]),
        (f"{TWO}{SRUN} --tasks-per-node 2 torchrun --nnodes=2 {MEET} t.py\n", [("torchrun-per-task", 3)]),
        (f"{TWO}{SRUN} --ntasks-per-node=4 python t.py\n", []),
        (f"{TWO}{SRUN} --ntasks-per-node=5 python t.py\n", [("tasks-against-gpus", 3)]),
        (f"{TWO}{SRUN} torchrun --nnodes=2 --nproc_per_node=auto {MEET} t.py\n", []),
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
        (f"{TWO}{SRUN} apptainer exec lumi-ROCm-6.sif python t.py\n", []),
        (f"{TWO}{SRUN} apptainer exec --rocm x.sif python t.py\n", []),
        (f"{TWO}module load rocm/6.2\n{SRUN} apptainer exec x.sif python t.py\n", []),
        (f"{TWO}IMAGE=/sw/rocm.sif\n{SRUN} apptainer exec $IMAGE python t.py\n", []),
        (f"{TWO}# not with rocm\n{SRUN} apptainer exec amd64.sif python t.py\n", [("no-nv", 4)]),
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
        (f"{TWO}#SBATCH --time=5 --signal=B:USR1@60\ntrap x USR1\n{SRUN} python t.py &\nwait\n", []),
        (f"{TWO}#SBATCH --time=5\n{SRUN} python t.py\n", [("no-signal", 3)]),
        (f"{PBS}#PBS -l walltime=5\npbsdsh -- python t.py\n", [("no-signal", 3)]),
        (f"{PBS}#PBS -l walltime=5\npbsdsh -- hostname\n", []),
        (f"{PBS}#PBS -l walltime=24\n", [("walltime-in-seconds", 3)]),
        (f"{PBS}#PBS -l walltime=3600\n", []),
        (f"{PBS}#PBS -l walltime=24:00\n", [("time-in-minutes", 3)]),
        (f"{PBS}#PBS -l walltime=24:00:00\n", []),
        (f"{TWO}#SBATCH -t 72\n{SRUN} hostname\n", [("time-in-minutes", 3)]),
        (f"{TWO}#SBATCH --time=24:00\n{SRUN} hostname\n", [("time-in-minutes", 3)]),
        (f"{TWO}#SBATCH --time=30\n{SRUN} hostname\n", []),
        (f"{TWO}#SBATCH --time=24:30\n{SRUN} hostname\n", []),
        (f"{TWO}#SBATCH --time=1-12\n{SRUN} hostname\n", []),
        (f"{PBS}#PBS -l mem=1gb\n", [("pbs-mixed-select", 3)]),
        (f"{PBS}#PBS -l walltime=5 -o log\n", []),
        (f"{PBS}#PBS -o /dev/null\n", [("output-null", 3)]),
        (f"{TWO}#SBATCH -o log\n{SRUN} python t.py\n", []),
        (f"{ONE}#SBATCH --ntasks=4 --ntasks-per-node=4\n", []),
        (f"{TWO}#SBATCH --ntasks=8 --ntasks-per-node=4\n", []),
        (f"{TWO}#SBATCH --ntasks=7 --ntasks-per-node=4\n", [("ntasks-against-nodes", 3)]),
        (f"{TWO}#SBATCH --ntasks=9 --ntasks-per-node=4\n", [("ntasks-against-nodes", 3)]),
        (f"{TWO}export NCCL_SOCKET_IFNAME=ib0\n{SRUN} python t.py\n", [("ifname", 3)]),
        (f"{TWO}export NCCL_SOCKET_IFNAME==ib0\n{SRUN} python t.py\n", [("ifname", 3)]),
        (f"{TWO}export NCCL_SOCKET_IFNAME=hsn\n{SRUN} python t.py\n", []),
        (f"{TWO}export GLOO_SOCKET_IFNAME=hsn\n{SRUN} python t.py\n", [("ifname", 3)]),
        (f"{TWO}export NCCL_SOCKET_IFNAME=hsn0,hsn1\n{SRUN} python t.py\n", []),
        (f"{TWO}export GLOO_SOCKET_IFNAME=hsn0,hsn1\n{SRUN} python t.py\n", []),
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
    text = f"{TWO}#SBATCH --ntasks=7 --ntasks-per-node=4\n{SRUN} torchrun --nnodes=3 {MEET} t.py\n"
    assert {one.trap.id: one.text for one in traps.find(text)} == {
        "ntasks-against-nodes": "--ntasks=7, --ntasks-per-node=4, --nodes=2",
        "torchrun-per-task": f"{SRUN} torchrun --nnodes=3 {MEET} t.py",
        "nodes-against-nnodes": "2 nodes, --nnodes 3",
    }
    text = (
        f"{PBS}#PBS -l ncpus=8 -l walltime=5\npbsdsh -- torchrun --nnodes=2 --nproc_per_node=8 {MEET} t.py\n"
    )
    assert {one.trap.id: one.text for one in traps.find(text)} == {
        "pbs-mixed-select": "-l select and -l ncpus",
        "tasks-against-nproc": "4 GPUs per node, --nproc_per_node 8",
        "no-signal": "walltime=5",
    }


def test_old_line_ends_are_those_of_lines() -> None:
    assert found(f"{TWO}echo $PBS_NODEID\n".replace("\n", "\r")) == [("pbs-nodeid", 3)]


FOUR = "#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=4\n"
FOUR_OF_PBS = "#!/bin/bash\n#PBS -l select=4:ncpus=8:ngpus=4\n"
OF_NODES = {"no-nnodes", "standalone-on-several-nodes", "no-endpoint", "no-node-rank"}
MODULE = "python -m torch.distributed.run"


def told_of_nodes(text: str) -> list[tuple[str, int]]:
    return [one for one in found(text) if one[0] in OF_NODES]


@pytest.mark.parametrize(
    ("text", "trap"),
    [
        (f"{FOUR}{SRUN} torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} torchrun --nproc-per-node 4 t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} torchrun --nnodes 1:1 --nproc-per-node 4 t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} torchrun --nproc_per_node=4 {MEET} t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} torchrun --nproc_per_node=4 -m pkg.t", "no-nnodes"),
        (f"{FOUR}{SRUN} torchrun --nproc_per_node=4 $HOME/t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} torchrun --nproc_per_node=4 $WHERE/x/t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} bash -c 'torchrun --nproc_per_node=4 t.py'", "no-nnodes"),
        (f"{FOUR}{SRUN} bash -c 'torchrun --nproc_per_node=4 t.py >log.$SLURM_NODEID 2>&1'", "no-nnodes"),
        (f"{FOUR}{SRUN} bash -c 'torchrun --nproc_per_node=4 t.py | tee -a log.$SLURM_NODEID'", "no-nnodes"),
        (f'{FOUR}{SRUN} bash -c "torchrun --nproc_per_node=4 --node_rank=\\$SLURM_NODEID t.py"', "no-nnodes"),
        (f"{FOUR}{IN_IMAGE} torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} --nodes=$SLURM_NNODES torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} -N 2 torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} -n 4 torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"#!/bin/bash\n#\n{SRUN} -N 4 torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"#!/bin/bash\n#SBATCH -N 4\n{SRUN} torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"{FOUR_OF_PBS}pbsdsh -- torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"{FOUR_OF_PBS}mpiexec -n 4 --ppn 1 torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"{FOUR_OF_PBS}mpirun -np $N torchrun --nproc_per_node=4 t.py", "no-nnodes"),
        (f"{FOUR}{SRUN} torchrun --nnodes=4 --nproc_per_node=4 t.py", "no-endpoint"),
        (f"{FOUR}{SRUN} torchrun --nnodes $SLURM_NNODES --nproc_per_node=4 t.py", "no-endpoint"),
        (f"{FOUR}{SRUN} torchrun --nnodes=1:4 --nproc_per_node=4 t.py", "no-endpoint"),
        (f"{FOUR}{SRUN} torchrun --nnodes=4 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID t.py", "no-endpoint"),
        (f"{FOUR}{SRUN} torchrun --nnodes=4 --rdzv_backend=c10d --master_addr=$head t.py", "no-endpoint"),
        (f"{FOUR}{SRUN} bash -c 'torchrun --nnodes=4 --node_rank=$SLURM_NODEID t.py'", "no-endpoint"),
        (f"{SOME}{SRUN} torchrun --nnodes=2 --nproc_per_node=4 t.py", "no-endpoint"),
        (f"{FOUR_OF_PBS}pbsdsh -- torchrun --nnodes=4 --nproc_per_node=4 t.py", "no-endpoint"),
        (f"{FOUR}{SRUN} torchrun --nnodes=4 --master_addr=$head --master_port=$port t.py", "no-node-rank"),
        (f"{FOUR}{SRUN} torchrun --nnodes=4 --rdzv_id=$id --rdzv_endpoint=$head:$port t.py", "no-node-rank"),
        (f"{FOUR}{SRUN} torchrun --nnodes=4 --rdzv-backend static --rdzv-endpoint $head:$port t.py", "no-node-rank"),
        (
            f"{FOUR}{SRUN} bash -c 'NODE_RANK=$SLURM_NODEID torchrun --nnodes=4 --master_addr=a t.py'",
            "no-node-rank",
        ),
        (f"{FOUR}{SRUN} torchrun --standalone --nnodes=4 --nproc_per_node=4 t.py", "standalone-on-several-nodes"),
        (f"{FOUR}{SRUN} torchrun --standalone --nnodes=1 --nproc_per_node=4 t.py", "standalone-on-several-nodes"),
        (f"{FOUR}{SRUN} torchrun --standalone $OTHERS t.py", "standalone-on-several-nodes"),
        (f"{FOUR}{SRUN} torchrun --standalone --nnodes=4 {MEET} t.py", "standalone-on-several-nodes"),
        (f"{FOUR}{SRUN} {MODULE} --standalone --nproc_per_node=4 t.py", "standalone-on-several-nodes"),
    ],
)  # fmt: skip
def test_nodes_that_would_train_alone_or_never_meet_are_a_trap(text: str, trap: str) -> None:
    assert told_of_nodes(f"{text}\n") == [(trap, 3)]


@pytest.mark.parametrize(
    "text",
    [
        f"{ONE}{SRUN} torchrun --nproc_per_node=4 t.py",
        f"{ONE}{SRUN} torchrun --standalone --nproc_per_node=4 t.py",
        f"{ONE}{SRUN} torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 t.py",
        f"{ONE}torchrun --nnodes=1 --nproc_per_node=4 t.py",
        f"{SOME}{SRUN} torchrun --nproc_per_node=4 t.py",
        f"{SOME}{SRUN} torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 t.py",
        "#!/bin/bash\ntorchrun --standalone --nproc_per_node=4 t.py",
        "#!/bin/bash\ntorchrun --nnodes=2 --nproc_per_node=4 t.py",
        f"#!/bin/bash\n{SRUN} torchrun --nproc_per_node=4 t.py",
        f"{FOUR}{SRUN} torchrun --nnodes=4 --nproc_per_node=4 {MEET} t.py",
        f"{FOUR}{SRUN} torchrun --nnode=4 --nproc_per_node=4 {MEET} t.py",
        f"{FOUR}{SRUN} torchrun --nnodes $SLURM_NNODES --rdzv-backend c10d --rdzv-endpoint $head:$port t.py",
        f"{FOUR}{SRUN} torchrun --nnodes=4 --rdzv_backend=$backend t.py",
        f"{FOUR}{SRUN} torchrun --nnodes=4 --rdzv_backend=etcd-v2 --rdzv_endpoint=$etcd t.py",
        f"{FOUR}{SRUN} bash -c 'torchrun --nnodes=4 --node_rank=$SLURM_NODEID --master_addr=$head t.py'",
        f"{FOUR}{SRUN} bash -c 'torchrun --nnodes=4 --node_rank=$SLURM_PROCID --rdzv_endpoint=$head:$port t.py'",
        f"{FOUR}export PET_NNODES=4 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=$h:$p\n{SRUN} torchrun t.py",
        f"{FOUR}{SRUN} bash -c 'PET_NODE_RANK=$SLURM_NODEID torchrun --nnodes=4 --master_addr=$head t.py'",
        f"{FOUR}{SRUN} torchrun $OPTIONS t.py",
        f"{FOUR}{SRUN} torchrun --nproc_per_node=4 ${{OPTIONS[@]}} t.py",
        f'{FOUR}{SRUN} torchrun --nproc_per_node=4 "$@"',
        f"{FOUR}WHERE='--nnodes=4 --rdzv_backend=c10d'\nWHERE+=$MORE\n{SRUN} torchrun --nproc_per_node=4 $WHERE t.py",
        f"{FOUR}WHERE='--nnodes=4 {MEET}'\n{SRUN} torchrun --nproc_per_node=4 $WHERE t.py",
        f"{FOUR}torchrun --nproc_per_node=4 t.py",
        f"{FOUR}{SRUN} -N1 -n1 torchrun --nproc_per_node=4 t.py",
        f"{FOUR}{SRUN} --ntasks=1 torchrun --standalone --nproc_per_node=4 t.py",
        f"{FOUR}{SRUN} -w $first torchrun --nproc_per_node=4 t.py",
        f"{FOUR}{SRUN} -N $n torchrun --nproc_per_node=4 t.py",
        f"{FOUR}{SRUN} bash -c 'torchrun --nproc_per_node=4 t.py --fold $SLURM_PROCID'",
        f"{FOUR}{SRUN} bash -c 'export SEED=$SLURM_NODEID; torchrun --standalone t.py --seed $SEED'",
        f"{FOUR}{SRUN} bash -c 'if [ $(hostname) = $head ]; then torchrun --nnodes=4 --master_addr=$head t.py; fi'",
        f"{FOUR}if [ $SLURM_NNODES -gt 1 ]; then\n{SRUN} torchrun --nnodes=4 {MEET} t.py\nelse\n"
        f"{SRUN} torchrun --standalone t.py\nfi",
        f"{FOUR}for n in 0 1 2 3; do\n{SRUN} -w ${{h[$n]}} torchrun --nnodes=4 --node_rank=$n --master_addr=a t.py &\ndone",
        f"{FOUR_OF_PBS}for h in a b c d; do\nssh $h torchrun --nnodes=4 --node_rank=$((i++)) --master_addr=a t.py &\ndone",
        f"{FOUR_OF_PBS}for h in a b c d; do\nssh $h torchrun --nproc_per_node=4 t.py &\ndone",
        f"{FOUR_OF_PBS}ssh a torchrun --nnodes=2 t.py &\nssh b torchrun --nnodes=2 --node_rank=1 --master_addr=a t.py",
        f"{FOUR_OF_PBS}pdsh -w a,b torchrun --nnodes=2 --node_rank=%n --master_addr=a t.py",
        f"{FOUR_OF_PBS}pbsdsh -n 1 torchrun --nproc_per_node=4 t.py",
        f"{FOUR_OF_PBS}mpiexec -n 1 torchrun --nproc_per_node=4 t.py",
        f"{FOUR_OF_PBS}mpiexec -n 4 --ppn 4 torchrun --nproc_per_node=1 t.py",
        f"{FOUR}{SRUN} accelerate launch --num_processes 16 t.py",
    ],
)  # fmt: skip
def test_nodes_that_meet_or_are_to_work_alone_are_none(text: str) -> None:
    assert told_of_nodes(f"{text}\n") == []


@pytest.mark.parametrize(
    ("options", "trap"),
    [("--nnodes=4 --node_rank=$i", "no-endpoint"), ("--nnodes=4 --master_addr=$head", "no-node-rank")],
)
@pytest.mark.parametrize("starter", ["ssh $h", f"{SRUN} -N1 -n1 -w $h"])
def test_a_loop_that_starts_nodes_which_never_meet_is_a_trap(starter: str, options: str, trap: str) -> None:
    text = f"{FOUR}for h in $hosts; do\n  {starter} torchrun {options} t.py &\ndone\nwait\n"
    assert told_of_nodes(text) == [(trap, 4)]


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("torchrun --nnodes=1 t.py", True),
        ("-N 2 torchrun --nnodes=2 t.py", False),
        ("-N 2 torchrun --nnodes=3 t.py", True),
        ("-N1 -n1 torchrun --nnodes=1 t.py", False),
        ("bash -c 'torchrun --nnodes=1 t.py --fold $SLURM_PROCID'", False),
        ("torchrun --standalone --nnodes=1 t.py", False),
    ],
)
def test_nnodes_is_compared_with_the_nodes_of_its_own_step(line: str, is_told: bool) -> None:
    traps_found = [name for name, _ in found(f"{FOUR}{SRUN} {line}\n")]
    assert ("nodes-against-nnodes" in traps_found) == is_told


@pytest.mark.parametrize("word", ["$S", '"${S}"'])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("t.py", ["no-nnodes"]),
        ("~/t.py", ["no-nnodes"]),
        ("$HOME/t.py", ["no-nnodes"]),
        ("--nnodes=4", ["no-endpoint"]),
        ("$X", []),
    ],
)
def test_a_variable_in_front_may_hold_options(word: str, value: str, told: list[str]) -> None:
    text = f"{FOUR}S='{value}'\n{SRUN} torchrun --nproc_per_node=4 {word} --lr 1\n"
    assert told_of_nodes(text) == [(trap, 4) for trap in told]


def test_standalone_is_quoted_with_the_nodes_of_its_step() -> None:
    text = f"{FOUR}{SRUN} -N 2 torchrun \\\n  --nproc_per_node=4 \\\n  --standalone t.py\n"
    (one,) = [one for one in traps.find(text) if one.trap.id in OF_NODES]
    assert (one.line, one.text) == (5, "2 nodes, --standalone")


IN_HALVES = "torchrun --nnodes=1 --nproc_per_node=2 --standalone t.py"
DEEPSPEED = "deepspeed --hostfile hosts"
OPTIONS = f"--nnodes=2 --nproc_per_node=4 {MEET}"
ON_SIGNAL = f"{TWO}#SBATCH --signal={{}}\ntrap save USR1\n"
LINES = PBS.replace("ngpus=4", "ngpus=4:mpiprocs=4")
SSH = 'ssh -n $n "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$i --master_addr=$m t.py" &'
OF_PORT = "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$head:$MASTER_PORT t.py"


@pytest.mark.parametrize(
    ("text", "trap", "lines"),
    [
        (f"{ONE}CUDA_VISIBLE_DEVICES=0,1 {IN_HALVES} &\nCUDA_VISIBLE_DEVICES=2,3 {IN_HALVES} &\nwait", "tasks-against-nproc", []),
        (f"{ONE}CUDA_VISIBLE_DEVICES=$mine {IN_HALVES} &\nwait", "tasks-against-nproc", []),
        (f"{ONE}CUDA_VISIBLE_DEVICES=0,1,2 {IN_HALVES} &\nwait", "tasks-against-nproc", [3]),
        (f"{ONE}CUDA_VISIBLE_DEVICES=0 {IN_HALVES} &\nwait", "tasks-against-nproc", []),
        (f"{ONE}CUDA_VISIBLE_DEVICES=0 {IN_HALVES} &\nwait", "visible-devices", [3]),
        (f"{ONE}{IN_HALVES}", "tasks-against-nproc", [3]),
        (f"{TWO}{DEEPSPEED} t.py", "first-node-only", []),
        (f"{TWO}deepspeed --launcher pdsh t.py", "first-node-only", []),
        (f"{TWO}deepspeed --hostfile=/dev/null t.py", "first-node-only", [3]),
        (f"{TWO}{DEEPSPEED} --no_ssh --node_rank 0 t.py", "first-node-only", [3]),
        (f"{TWO}deepspeed --num_gpus 4 t.py", "first-node-only", [3]),
        (f"{TWO}{SRUN} {DEEPSPEED} t.py", "deepspeed-on-each-node", [3]),
        (f"{PBS}pbsdsh -- {DEEPSPEED} t.py", "deepspeed-on-each-node", [3]),
        (f"{TWO}{DEEPSPEED} t.py", "deepspeed-on-each-node", []),
        (f"{ONE}{SRUN} {DEEPSPEED} t.py", "deepspeed-on-each-node", []),
        (f"{TWO}{SRUN} -N1 -n1 {DEEPSPEED} t.py", "deepspeed-on-each-node", []),
        (f"{TWO}{SRUN} bash -c '{DEEPSPEED} --no_ssh --node_rank $SLURM_NODEID t.py'", "deepspeed-on-each-node", []),
        (f"{TWO}{SRUN} bash -c 'if [ $SLURM_NODEID = 0 ]; then {DEEPSPEED} t.py; fi'", "deepspeed-on-each-node", []),
        (f"{TWO}#SBATCH --job-name=$1\ntrue", "variable-in-directive", [3]),
        (f"{TWO}#SBATCH --job-name=${{2}}\ntrue", "variable-in-directive", [3]),
        (f"{TWO}#SBATCH --comment=5$\ntrue", "variable-in-directive", []),
        (f"{TWO}srun -n1 python t.py", "no-kill-on-bad-exit", []),
        (f"{TWO}srun -N1 -n1 python t.py", "no-kill-on-bad-exit", []),
        (f"{TWO}srun -w $first python t.py", "no-kill-on-bad-exit", []),
        (f"{TWO}srun -N1 -n2 python t.py", "no-kill-on-bad-exit", [3]),
        (f"{TWO}#SBATCH -c 8\nsrun --cpu-bind=none python t.py", "no-cpus-per-task", []),
        (f"{TWO}#SBATCH -c 8\nsrun --cpu-bind=verbose,no python t.py", "no-cpus-per-task", []),
        (f"{TWO}#SBATCH -c 8\nsrun --cpu-bind=cores python t.py", "no-cpus-per-task", [4]),
        (f"{TWO}srun --no-container-mount-home bash -c 'RANK=$SLURM_PROCID python t.py'", "no-kill-on-bad-exit", [3]),
    ],
)  # fmt: skip
def test_gpus_and_tasks_are_those_that_a_line_gets(text: str, trap: str, lines: list[int]) -> None:
    assert [line for name, line in found(f"{text}\n") if name == trap] == lines


@pytest.mark.parametrize(
    "rank", ["PBS_NODENUM", "PBS_TASKNUM", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"]
)
@pytest.mark.parametrize("starter", ["pbsdsh --", "mpirun -np 2 --map-by ppr:1:node", "mpiexec -n 2 --ppn 1"])
@pytest.mark.parametrize(
    ("line", "is_once"),
    [
        ('bash -lc "cd x; \\\n torchrun {} --node_rank=${} t.py"', True),
        ("torchrun {} --node_rank=${} t.py", True),
        ('bash -lc "torchrun {} --node_rank=\\${} t.py"', False),
        ("bash -lc 'torchrun {} --node_rank=${} t.py'", False),
    ],
)
def test_a_rank_of_pbs_or_mpi_is_one_that_each_task_must_fill_in(
    starter: str, line: str, rank: str, is_once: bool
) -> None:
    text = f"{PBS}{starter} {line.format(OPTIONS, rank)}\n"
    lines = [at for name, at in found(text) if name == "rank-once"]
    assert lines == ([3 + line.count("\n")] if is_once else [])


def test_a_rank_that_a_shell_of_ssh_fills_in_is_none_of_the_batch_script() -> None:
    text = f"{PBS}for h in $hosts; do\n  ssh $h torchrun {OPTIONS} --node_rank={{}}PBS_NODENUM t.py &\ndone\nwait\n"
    assert ("rank-once", 4) in found(text.format("$"))
    assert "rank-once" not in dict(found(text.format("\\$")))


@pytest.mark.parametrize(
    ("signal", "line", "expected"),
    [
        ("B:USR1@300", f"{SRUN} python t.py", [("signal-behind-srun", 5)]),
        ("B:SIGUSR1@300", f"{SRUN} python t.py | tee log", [("signal-behind-srun", 5)]),
        ("B:10@300", "python t.py", [("signal-behind-srun", 5)]),
        ("B:USR1@300", f"{SRUN} python t.py &\nwait", []),
        ("B:USR1@300", f"go() {{\n  {SRUN} python t.py\n}}\ngo &\nwait", []),
        ("B:USR1@300", f"go() {{\n  {SRUN} python t.py\n}}\ngo &\nwhile kill -0 $!; do sleep 1; done", []),
        ("B:USR1@300", f"exec {SRUN} python t.py", []),
        ("B:USR1@300", f"for i in 1 2; do {SRUN} python t.py; done", []),
        ("B:USR2@300", f"{SRUN} python t.py", []),
        ("USR1@300", f"{SRUN} python t.py", [("signal-without-b", 3)]),
        ("R:USR1@300", f"{SRUN} python t.py &\nwait", [("signal-without-b", 3)]),
        ("USR2@300", f"{SRUN} python t.py", []),
        ("USR1@300", "hostname", []),
        ("USR1@300", f"export -f save\n{SRUN} python t.py", []),
    ],
)
def test_a_trap_must_get_its_signal_in_time(signal: str, line: str, expected: list[tuple[str, int]]) -> None:
    of_signal = {"signal-behind-srun", "signal-without-b"}
    assert [one for one in found(f"{ON_SIGNAL.format(signal)}{line}\n") if one[0] in of_signal] == expected


@pytest.mark.parametrize("handler", ["''", "-"])
@pytest.mark.parametrize("signal", ["USR1@300", "B:USR1@300"])
def test_a_signal_that_the_script_ignores_is_meant_for_others(signal: str, handler: str) -> None:
    text = ON_SIGNAL.replace("save", handler).format(signal) + f"{SRUN} python t.py\n"
    assert {"signal-behind-srun", "signal-without-b"}.isdisjoint(dict(found(text)))


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (f"{SRUN} bash -c 'MASTER_PORT=$(shuf -i 20000-30000 -n 1)\n{OF_PORT}'", [3]),
        (f"{SRUN} bash -c '\nexport MASTER_PORT=$((20000 + RANDOM % 99))\n{OF_PORT}'", [4]),
        (f'{SRUN} bash -c "export MASTER_PORT=\\$RANDOM; {OF_PORT}"', [3]),
        (f"{SRUN} bash -c 'export MASTER_PORT=$RANDOM RANK=$SLURM_PROCID; python t.py'", [3]),
        (f'{SRUN} bash -c "export MASTER_PORT=$RANDOM; {OF_PORT}"', []),
        (f"MASTER_PORT=$RANDOM {SRUN} bash -c '{OF_PORT}'", []),
        (f"{SRUN} bash -c '[ $SLURM_NODEID = 0 ] && MASTER_PORT=$RANDOM; {OF_PORT}'", []),
        (f"{SRUN} bash -c 'export MASTER_PORT=$P; {OF_PORT}'", []),
        (f"{SRUN} bash -c 'export MASTER_PORT=${{MASTER_PORT:-$RANDOM}}; {OF_PORT}'", []),
        (f"{SRUN} bash -c 'RANDOM=$SLURM_JOB_ID; MASTER_PORT=$RANDOM; {OF_PORT}'", []),
        (f"{SRUN} bash -c 'export OTHER_PORT=$RANDOM; {OF_PORT}'", []),
        (f"{SRUN} -N1 -n1 bash -c 'export MASTER_PORT=$RANDOM; {OF_PORT}'", []),
        (f"{SRUN} bash -c 'export MASTER_PORT=$RANDOM; python t.py --fold $SLURM_PROCID'", []),
        (f"{SRUN} bash -c 'export MASTER_PORT=$RANDOM; {OF_PORT.replace('nnodes=2', 'nnodes=1')}'", []),
    ],
)
def test_a_port_that_each_task_draws_is_another_one_on_each_node(line: str, lines: list[int]) -> None:
    assert [at for name, at in found(f"{TWO}{line}\n") if name == "port-random"] == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"{LINES}for n in $(cat $PBS_NODEFILE); do\n{SSH}\ndone\nwait", [3]),
        (f"{LINES}H=($(cat $PBS_NODEFILE))\nfor n in ${{H[@]}}; do\n{SSH}\ndone\nwait", [4]),
        (f"{LINES}H=(`cat $PBS_NODEFILE`)\nNNODES=${{#H[@]}}\npbsdsh -- torchrun --nproc_per_node=4 t.py", [4]),
        (f'{LINES}H=($(< "$PBS_NODEFILE"))\npbsdsh -- torchrun --nnodes=${{#H[@]}} --nproc_per_node=4 t.py', [4]),
        (f"{LINES}while read n; do\n{SSH}\ndone < $PBS_NODEFILE\nwait", [3]),
        (f'{LINES}while IFS= read -r n\ndo\n{SSH}\ndone <"${{PBS_NODEFILE}}"\nwait', [3]),
        (f"{LINES}sort -u $PBS_NODEFILE | while read n; do\n{SSH}\ndone\nwait", []),
        (f"{LINES}while read n; do\n{SSH}\ndone < <(sort -u $PBS_NODEFILE)\nwait", []),
        (f"{PBS}for n in $(cat $PBS_NODEFILE); do\n{SSH}\ndone\nwait", []),
        (f"{LINES}for n in $(sort -u $PBS_NODEFILE); do\n{SSH}\ndone\nwait", []),
        (f"{LINES}for n in $(cat $PBS_NODEFILE | uniq); do\n{SSH}\ndone\nwait", []),
        (f"{LINES}for n in $(cat $PBS_NODEFILE); do\n[ $n = $last ] && continue\n{SSH}\ndone\nwait", []),
        (f"{LINES}for n in $(cat $PBS_NODEFILE); do\n{SSH.replace('node=4', 'node=1')}\ndone\nwait", []),
        (f"{LINES}H=($(cat $PBS_NODEFILE))\nH=($(echo ${{H[@]}} | uniq))\nfor n in ${{H[@]}}; do\n{SSH}\ndone", []),
        (f"{LINES}H=($(cat $PBS_NODEFILE))\nRANKS=${{#H[@]}}\npbsdsh -- torchrun --nproc_per_node=4 t.py", []),
    ],
)  # fmt: skip
def test_lines_of_the_node_file_are_no_nodes(text: str, lines: list[int]) -> None:
    assert [at for name, at in found(f"{text}\n") if name == "nodefile-lines"] == lines


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("ssh $n mkdir /tmp/x", True),
        ("srun -N1 -w $n hostname", True),
        ("ssh -t $n 'torchrun --nnodes=2 t.py'", True),
        ("srun -n 1 -w $n hostname", True),
        ("ssh -i key $n mkdir /tmp/x", True),
        ("ssh -n $n mkdir /tmp/x", False),
        ("ssh -fx $n mkdir /tmp/x", False),
        ("ssh $n mkdir /tmp/x </dev/null", False),
        ("ssh $n bash -s <<E\nmkdir /tmp/x\nE", False),
        ("srun --input=none -w $n hostname", False),
        ("srun -i /dev/null -w $n hostname", False),
        ("ssh $n mkdir /tmp/x &", False),
        ("scp x $n:", False),
    ],
)
def test_what_reads_the_list_of_its_loop_is_told(line: str, is_told: bool) -> None:
    loops = ["while read -r n; do\n{}\ndone < hosts", "cat hosts | while IFS= read n\ndo\n{}\ndone"]
    for loop in loops:
        told = found(f"#!/bin/bash\n{loop.format(line)}\n")
        assert [at for name, at in told if name == "loop-is-read"] == [loop.count("\n") + 1] * is_told
    others = [
        "for n in a b; do\n{}\ndone",
        "while read -u 3 n; do\n{}\ndone 3< hosts",
        "while :; do\n{}\ndone",
        "while read n; do\necho $n\ndone < hosts\nwhile :; do\n{}\ndone",
    ]
    for loop in others:
        assert "loop-is-read" not in dict(found(f"#!/bin/bash\n{loop.format(line)}\n"))


OPTIONS_SET = [
    f"{OPTIONS} --nproc_per_node 8 --node_rank=$SLURM_NODEID",
    f"({OPTIONS}\n  --nproc_per_node 8 # all of them\n  --node_rank=$SLURM_NODEID)",
]


@pytest.mark.parametrize(
    ("value", "used", "lines"),
    [(f'"{OPTIONS_SET[0]}"', "$A", (3, 3)), (OPTIONS_SET[1], '"${A[@]}"', (4, 5))],
)
def test_the_options_of_a_variable_have_the_traps_of_those_in_the_line(
    value: str, used: str, lines: tuple[int, int]
) -> None:
    told = found(f"{TWO}A={value}\n{SRUN} torchrun {used} t.py\n")
    assert sorted(told) == [("rank-once", lines[1]), ("tasks-against-nproc", lines[0])]


@pytest.mark.parametrize("line", ['bash -c "$L t.py"', "$L t.py", "bash -c '${L} t.py'"])
@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (f'"torchrun {OPTIONS} \\\n --node_rank=$SLURM_NODEID"', [4]),
        ('"accelerate launch --num_machines 2 --machine_rank $SLURM_PROCID"', [3]),
        (f'"torchrun {OPTIONS} --node_rank=\\$SLURM_NODEID"', []),
        (f"'torchrun {OPTIONS} --node_rank=$SLURM_NODEID'", []),
        (f'"torchrun {OPTIONS} --rdzv_id=$RANDOM"', []),
    ],
)
def test_the_script_fills_in_the_ranks_of_a_launcher_in_a_variable(
    value: str, lines: list[int], line: str
) -> None:
    told = found(f"{TWO}export L={value}\n{SRUN} {line}\n")
    assert [at for name, at in told if name == "rank-once"] == lines
    assert {"rdzv-id-random", "not-exported", "single-quotes"}.isdisjoint(dict(told))


@pytest.mark.parametrize(
    "front",
    [
        "nsys profile -o out torchrun",
        "nsys profile --trace=cuda -w true torchrun",
        "ncu --set full torchrun",
        "timeout -s USR1 3000 torchrun",
        "timeout $LIMIT torchrun",
        "env -u X A=1 torchrun",
        "uv run --with x torchrun",
        "conda run -n e --no-capture-output torchrun",
        "shifter --module gpu torchrun",
        "$(which torchrun)",
        '"$(command -v torchrun)"',
        "`which python3` -m torch.distributed.run",
        "$RUN",
    ],
)
def test_the_traps_of_a_launcher_are_found_behind_what_starts_it(front: str) -> None:
    line = f"{SRUN} {front} --nnodes=2 --nproc_per_node=4 t.py"
    assert found(f"{TWO}LIMIT=55m\nRUN=$(which torchrun)\n{line}\n") == [("no-endpoint", 5)]
