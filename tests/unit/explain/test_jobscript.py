"""Job scripts: each trap by its line, and none in a good one."""

import json
from pathlib import Path

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.explain import jobscript, traps
from tests.unit.bounds import limited

HEAD = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
ASKED = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
PORT = "$((20000 + SLURM_JOB_ID % 20000))"
SRUN = "srun --kill-on-bad-exit=1"
TORCHRUN = f"torchrun --nnodes=2 --nproc_per_node=4 --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d --rdzv_endpoint=$head:{PORT}"
GOOD = f"{ASKED}{HEAD}{SRUN} apptainer exec --nv x.sif {TORCHRUN} train.py --lr 0.1\n"
PBS = "#!/bin/bash\n#PBS -l select=2:ncpus=8:ngpus=4\n#PBS -l walltime=01:00:00\n"


MEET = "--rdzv_backend=c10d --rdzv_endpoint=$head:$port"
SIGNAL = f"{ASKED}#SBATCH --signal={{}}\n"
LOOP = f"for node in $nodes; do\n  ssh $node 'torchrun --nnodes=2 --nproc_per_node=4 {MEET} t.py'{{}}\ndone\nwait\n"
TASKS = ASKED.replace("ntasks-per-node=1", "ntasks-per-node=4")
LINES = PBS.replace("ngpus=4", "ngpus=4:mpiprocs=4")
ONE_BY_ONE = f"for h in $hosts; do\n  {SRUN} -w $h {TORCHRUN} --node_rank=$((i++)) t.py{{}}\ndone\nwait\n"
IN_SHELL = (
    f"bash -c 'torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$head:{PORT} t.py'"
)
CASES: list[tuple[str, str, int]] = [
    (f"{ASKED}{SRUN} torchrun --nproc_per_node=4 t.py\n", "no-nnodes", 5),
    (f"{ASKED}{SRUN} torchrun --nnodes=2 --nproc_per_node=4 t.py\n", "no-endpoint", 5),
    (
        f"{ASKED}{SRUN} torchrun --standalone --nnodes=2 --nproc_per_node=4 t.py\n",
        "standalone-on-several-nodes",
        5,
    ),
    (f"{ASKED}{SRUN} torchrun --nnodes=2 --master_addr=$head t.py\n", "no-node-rank", 5),
    (f"{PBS}{LOOP.format('')}", "loop-waits", 5),
    (f"{PBS}{LOOP.format(' | tee log')}", "loop-waits", 5),
    (f"{PBS}{LOOP.format('').replace('ssh', 'ssh -nq -tt')}", "loop-waits", 5),
    (f"{PBS}{LOOP.format('; echo ended &')}", "loop-waits", 5),
    (
        f'{ASKED}{SRUN} bash -c "torchrun --nnodes=2 {MEET} --master_port=\\$((20000 + RANDOM % 99)) t.py"\n',
        "port-random",
        5,
    ),
    (
        f'for h in a b; do\n  ssh $h "torchrun --nnodes=2 {MEET} --master_port=$RANDOM t.py" &\ndone\n',
        "port-random",
        2,
    ),
    (
        f'{ASKED}{SRUN} bash -c "torchrun --nnodes=2 {MEET} \\\n  --node_rank=$SLURM_NODEID t.py"\n',
        "rank-once",
        6,
    ),
    (
        f"{PBS}pbsdsh -- bash -c 'torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$head:$((20000 + RANDOM % 99)) t.py'\n",
        "port-random",
        4,
    ),
    ("torchrun --nnodes=2 --nproc_per_node=4 --master_port=$RANDOM t.py\n", "port-random", 1),
    (f"{ASKED}{SRUN} python fit.py --trainer.devices 4 --trainer.num_nodes=2\n", "devices-against-tasks", 5),
    (f"{ASKED}{SRUN} python fit.py trainer.devices=4\n", "devices-against-tasks", 5),
    (GOOD.replace("#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks=1"), "fewer-tasks-than-nodes", 3),
    (GOOD.replace(SRUN, f"{SRUN} -n 1"), "fewer-tasks-than-nodes", 6),
    (GOOD.replace(HEAD, f"export SLURM_NTASKS=1\n{HEAD}"), "fewer-tasks-than-nodes", 5),
    (GOOD.replace(SRUN, f"SLURM_NTASKS='1' {SRUN}"), "fewer-tasks-than-nodes", 6),
    (f"{TASKS}srun -K --mpi=pmix mpirun -np 8 python t.py\n", "mpirun-in-srun", 5),
    (f"{ASKED}{SRUN} mpiexec python t.py\n", "mpirun-in-srun", 5),
    (GOOD.replace(HEAD, f"export CUDA_VISIBLE_DEVICES=0,1\n{HEAD}"), "visible-devices", 5),
    (f"{TASKS}export CUDA_VISIBLE_DEVICES='0'\n{SRUN} python t.py\n", "visible-devices", 5),
    (f"{PBS}CUDA_VISIBLE_DEVICES=0 mpiexec -n 8 --ppn 4 python t.py\n", "visible-devices", 4),
    (f"{TASKS}export WORLD_SIZE=$SLURM_NNODES\n{SRUN} python t.py\n", "world-size-is-nodes", 5),
    (f'{TASKS}WORLD_SIZE="${{SLURM_JOB_NUM_NODES}}"\n{SRUN} python t.py\n', "world-size-is-nodes", 5),
    (
        f"{ASKED}{HEAD}{SRUN} {IN_SHELL}\n",
        "not-exported",
        5,
    ),
    (
        "port=$((20000 + RANDOM % 99))\ntorchrun --nnodes=2 --node_rank=$1 --master_port=$port t.py\n",
        "port-random",
        1,
    ),
    (f"{LINES}NNODES=$(wc -l < $PBS_NODEFILE)\nmpiexec -n 8 --ppn 4 python t.py\n", "nodefile-lines", 4),
    (f"{LINES}nodes=`cat $PBS_NODEFILE | wc -l`\nmpiexec -n 8 --ppn 4 python t.py\n", "nodefile-lines", 4),
    (f"{ASKED}{HEAD}{ONE_BY_ONE.format('')}", "loop-waits", 7),
    (
        GOOD.replace("#SBATCH --nodes", "#SBATCH -o $SCRATCH/%j.out\n#SBATCH --nodes"),
        "variable-in-directive",
        2,
    ),
    (
        f"{PBS}mpiexec -n 8 --ppn 4 bash -c 'torchrun --nnodes=2 --nproc_per_node=4 {MEET} t.py'\n",
        "torchrun-per-task",
        4,
    ),
    (
        f"{PBS}P=4\nmpiexec --ppn=$P torchrun --nnodes=2 --nproc_per_node=4 {MEET} t.py\n",
        "torchrun-per-task",
        5,
    ),
    (f"{PBS}mpirun --map-by ppr:4:node torchrun --nnodes=2 {MEET} t.py\n", "torchrun-per-task", 4),
    (
        f"{PBS}source env/bin/activate\nfor n in $nodes; do ssh $n 'cd x; torchrun --nnodes=2 {MEET} --node_rank=$i t.py' & done\nwait\n",
        "ssh-environment",
        5,
    ),
    (f"{PBS}{LOOP.format(' > log 2>&1')}", "loop-waits", 5),
    (
        f"{ASKED}{SRUN} bash -c 'accelerate launch --multi_gpu --num_machines 2 \\\n --num_processes 4 t.py'\n",
        "num-processes",
        6,
    ),
    (
        f'{ASKED}{SRUN} bash -c "cd x && \\\n torchrun --nnodes=2 {MEET} \\\n --master_port 29500 t.py"\n',
        "fixed-port",
        7,
    ),
    (f"{PBS}{LOOP.format(' &').replace('wait', 'echo begun')}", "no-wait", 5),
    (GOOD.replace("--lr 0.1", "--lr 0.1 &"), "no-wait", 6),
    ("deepspeed --hostfile hosts --master_addr 127.0.0.1 t.py\n", "master-is-localhost", 1),
    (GOOD.replace(HEAD, "head=$(hostname -i)\n"), "head-by-hostname", 5),
    ("head=$(hostname)\ntorchrun --nnodes 2 --rdzv_endpoint=$head:1 t.py\n", "head-by-hostname", 1),
    (GOOD.replace(HEAD, "head=$(ping -c1 $(hostname) | head -1)\n"), "head-by-hostname", 5),
    (GOOD.replace(HEAD, "head=localhost\n"), "master-is-localhost", 5),
    (GOOD.replace(HEAD, "head=$SLURM_JOB_NODELIST\n"), "master-is-list", 5),
    (
        f"{ASKED}{SRUN} bash -c '\n  export MASTER_ADDR=$(hostname)\n  python t.py'\n",
        "master-in-each-task",
        6,
    ),
    (
        f"{ASKED}{SRUN} apptainer exec --nv x.sif bash -c 'M=1; MASTER_ADDR=$(scontrol show hostnames $X | head -1); python t.py'\n",
        "master-in-each-task",
        5,
    ),
    (GOOD.replace("--rdzv_id=$SLURM_JOB_ID", "--rdzv_id='$SLURM_JOB_ID'"), "single-quotes", 6),
    (GOOD.replace(PORT, "29500"), "fixed-port", 6),
    (f"{ASKED}export MASTER_PORT=29500\n{SRUN} python train.py\n", "fixed-port", 5),
    (
        f"{ASKED}{SRUN} bash -c '{TORCHRUN.replace('$SLURM_JOB_ID ', '$RANDOM ')} t.py'\n",
        "rdzv-id-random",
        5,
    ),
    (f"{PBS}pbsdsh -- torchrun --node_rank=$PBS_NODEID --nnodes=2 {MEET} t.py\n", "pbs-nodeid", 4),
    (GOOD.replace("--nnodes=2", "--nnodes=2 --node_rank=$SLURM_NODEID"), "rank-once", 6),
    (GOOD.replace("--nnodes=2", "--nnodes=2 --node_rank=1"), "rank-once", 6),
    (
        f'{ASKED}{HEAD}at="$head:29500"\n{SRUN} {TORCHRUN.replace("$head:" + PORT, "$at")} t.py\n',
        "fixed-port",
        7,
    ),
    (GOOD.replace(f"{SRUN} ", ""), "first-node-only", 6),
    (GOOD.replace("ntasks-per-node=1", "ntasks-per-node=4"), "torchrun-per-task", 6),
    (GOOD.replace("--nnodes=2", "--nnodes=4"), "nodes-against-nnodes", 6),
    (GOOD.replace("nproc_per_node=4", "nproc_per_node=8"), "tasks-against-nproc", 6),
    (
        f"#!/bin/bash\n#SBATCH --gres=gpu:p6000:1\n#SBATCH --ntasks-per-node=2\n{SRUN} python t.py\n",
        "tasks-against-gpus",
        4,
    ),
    (
        f"{ASKED.replace('=1', '=4').replace('gpus-per-node=4', 'gpus-per-task=1')}{SRUN} python t.py\n",
        "gpus-per-task",
        4,
    ),
    (
        GOOD.replace("#SBATCH --nodes", "#SBATCH --cpus-per-task=8\n#SBATCH --nodes"),
        "no-cpus-per-task",
        7,
    ),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH --ntasks=1\n#SBATCH --nodes"), "ntasks-against-nodes", 2),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH --ntasks=4\n#SBATCH --nodes"), "ntasks-against-nodes", 2),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH --signal=B:USR1@300\n#SBATCH --nodes"), "signal-unheard", 2),
    (f"{SIGNAL.format('B:USR1@300')}trap save USR1\n{HEAD}{SRUN} {TORCHRUN} t.py\n", "signal-behind-srun", 8),
    (f"{SIGNAL.format('USR1@300')}trap save USR1\n{HEAD}{SRUN} {TORCHRUN} t.py\n", "signal-without-b", 5),
    (f"{ASKED}{SRUN} deepspeed --hostfile hosts --num_nodes 2 t.py\n", "deepspeed-on-each-node", 5),
    (GOOD.replace(HEAD, f"module load cuda\nmodule purge\n{HEAD}"), "module-purge-late", 6),
    (GOOD.replace(HEAD, f"export NCCL_SOCKET_IFNAME=lo\n{HEAD}"), "ifname-loopback", 5),
    (GOOD.replace(SRUN, f"{SRUN} --export=MASTER_ADDR"), "export-drops", 6),
    (GOOD.replace(" --nv", ""), "no-nv", 6),
    (GOOD.replace(HEAD, f"conda activate x\n{HEAD}"), "conda-and-container", 5),
    (f"{ASKED}{SRUN} apptainer exec --nv x.sif conda activate x\n", "conda-and-container", 5),
    (
        f'{ASKED}{SRUN} apptainer exec --nv x.sif bash -lc "\n  module load cuda\n  python t.py"\n',
        "module-in-container",
        6,
    ),
    (
        GOOD.replace("#SBATCH --nodes", "#SBATCH --mem=1G --mem-per-cpu=1G\n#SBATCH --nodes"),
        "exclusive-options",
        2,
    ),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH --gres=gpu:4\n#SBATCH --nodes"), "exclusive-options", 5),
    (GOOD.replace(HEAD, f"{HEAD}#SBATCH --mem=1G\n"), "sbatch-after-command", 6),
    (GOOD.replace("\n", "\r\n"), "crlf", 1),
    (
        f"{PBS}pbsdsh -- apptainer exec --nv x.sif bash -c 'h=$(head -1 $PBS_NODEFILE); python t.py'\n",
        "nodefile-in-container",
        4,
    ),
    (GOOD.replace(HEAD, f"export NCCL_SOCKET_IFNAME=ib0\n{HEAD}"), "ifname", 5),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH -o /dev/null\n#SBATCH --nodes"), "output-null", 2),
    (f"{PBS}#PBS -l ncpus=8\npbsdsh -- true\n", "pbs-mixed-select", 4),
    (f"{PBS}#PBS -l walltime=48\npbsdsh -- true\n", "walltime-in-seconds", 4),
    ("while read h; do\nssh $h mkdir /scratch/x\ndone < hosts\n", "loop-is-read", 2),
    (GOOD.replace("#!/bin/bash\n", "# a job\n"), "no-shebang", 1),
    (GOOD.replace(f"$head:{PORT}", f"127.0.0.1:{PORT}"), "master-is-localhost", 6),
    (GOOD.replace(HEAD, "head=$SLURM_NODELIST\n"), "master-is-list", 5),
    (GOOD.replace(f"$head:{PORT}", "$head:$port").replace(HEAD, f"{HEAD}port='29500'\n"), "fixed-port", 6),
    (f"{ASKED}{SRUN} bash -c 'MASTER_PORT=29500 python t.py'\n", "fixed-port", 5),
    (f"{ASKED}{SRUN} torchrun --nnodes=2 {MEET} --master_port 29500 t.py\n", "fixed-port", 5),
    ("torchrun --nnodes=2 --nproc_per_node=4 --rdzv_id=$RANDOM t.py\n", "rdzv-id-random", 1),
    ("RDZV_ID=$RANDOM\ntorchrun --nnodes=2 --rdzv_id=$RDZV_ID t.py\n", "rdzv-id-random", 1),
    (f"{ASKED}export NODE_RANK=$SLURM_NODEID\n{SRUN} python t.py\n", "rank-once", 5),
    (f"{PBS}torchrun --nnodes=2 --nproc_per_node=4 t.py\n", "first-node-only", 4),
    (f"{PBS}pbsdsh -- torchrun --nnodes=2 --nproc_per_node=8 {MEET} t.py\n", "tasks-against-nproc", 4),
    (GOOD.replace("nproc_per_node=4", "nproc_per_node=2"), "tasks-against-nproc", 6),
    (
        f"{ASKED.replace('=1', '=4').replace('#SBATCH --gpus-per-node=4', '#')}{SRUN} --gpus-per-task=1 python t.py\n",
        "gpus-per-task",
        5,
    ),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH --export=NONE\n#SBATCH --nodes"), "export-drops", 2),
    (GOOD.replace(HEAD, f"micromamba activate x\n{HEAD}"), "conda-and-container", 5),
    (GOOD.replace(HEAD, f". conda/bin/activate x\n{HEAD}"), "conda-and-container", 5),
    (
        GOOD.replace("#SBATCH --nodes", "#SBATCH --ntasks-per-gpu=1\n#SBATCH --nodes"),
        "exclusive-options",
        4,
    ),
    (
        GOOD.replace("#SBATCH --nodes", "#SBATCH --exclusive --oversubscribe\n#SBATCH --nodes"),
        "exclusive-options",
        2,
    ),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH --ntasks=3\n#SBATCH --nodes"), "ntasks-against-nodes", 2),
    (
        f"#!/bin/bash\n#SBATCH --ntasks=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n{SRUN} python t.py\n",
        "ntasks-against-nodes",
        2,
    ),
    (GOOD.replace(HEAD, f"export GLOO_SOCKET_IFNAME='eth0'\n{HEAD}"), "ifname", 5),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH -e /dev/null\n#SBATCH --nodes"), "output-null", 2),
    (f"{PBS}#PBS -e /dev/null\npbsdsh -- true\n", "output-null", 4),
    (GOOD.replace(HEAD, f"ml load cuda\nml purge\n{HEAD}"), "module-purge-late", 6),
    (GOOD.replace(HEAD, f"module add cuda\nmodule purge\n{HEAD}"), "module-purge-late", 6),
]
REMARKS = [
    (GOOD.replace(SRUN, "srun"), "no-kill-on-bad-exit"),
    (GOOD.replace(SRUN, "srun --kill-on-bad-exit=0"), "no-kill-on-bad-exit"),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH --time=1:00:00\n#SBATCH --nodes"), "no-signal"),
    (f"{PBS}pbsdsh -- torchrun --nnodes=2 --nproc_per_node=4 {MEET} t.py\n", "no-signal"),
    (GOOD.replace(HEAD, "head=$(hostname)\n"), "head-by-hostname"),
    (GOOD.replace(HEAD, "head=$(srun -N1 -n1 hostname --ip-address)\n"), "head-by-address"),
    (GOOD.replace(HEAD, f"source v/bin/activate\n{HEAD}"), "venv-and-container"),
    (GOOD.replace(HEAD, f"export CUDA_LAUNCH_BLOCKING=1\n{HEAD}"), "debugging-slow"),
    (GOOD.replace(HEAD, f"export TORCH_DISTRIBUTED_DEBUG=DETAIL\n{HEAD}"), "debugging-slow"),
    (
        GOOD.replace("#SBATCH --nodes", "#SBATCH --time=48 --signal=USR1@9\n#SBATCH --nodes"),
        "time-in-minutes",
    ),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH -o logs/%j/out.txt\n#SBATCH --nodes"), "output-folder"),
    (GOOD.replace("#SBATCH --nodes", "#SBATCH -e /x/%x.%A/%a.err\n#SBATCH --nodes"), "output-folder"),
    (GOOD.replace("#SBATCH --gpus", "# SBATCH --mem=9G\n#SBATCH --gpus"), "blank-in-directive"),
]


def found(text: str) -> list[tuple[str, int]]:
    return [(one.trap.id, one.line) for one in traps.find(text) if not one.trap.is_remark]


def test_a_good_script_has_no_trap() -> None:
    assert found(GOOD) == []


@pytest.mark.parametrize(("text", "trap", "line"), CASES)
def test_a_trap_is_found_alone_and_by_its_line(text: str, trap: str, line: int) -> None:
    assert found(text) == [(trap, line)]


@pytest.mark.parametrize("begin", ["", "#!/bin/bash\n"])
def test_the_line_of_a_trap_is_quoted(begin: str) -> None:
    line = "apptainer exec x.sif torchrun --nnodes=1 --nproc_per_node=2 --standalone t.py"
    told = [(one.trap.id, one.line, one.text) for one in traps.find(f"{begin}  {line}\n")]
    assert told == [("no-nv", 1 + bool(begin), line)]


@pytest.mark.parametrize(
    "text",
    [
        LOOP.format(" &"),
        LOOP.format(" 2>&1 | tee log &"),
        LOOP.format(" > log 2>&1 & echo begun"),
        LOOP.replace("ssh", "(ssh").format(") &"),
        LOOP.replace("ssh", "(ssh").format("; echo ended) > log 2>&1 &"),
        LOOP.replace("ssh", "{{ ssh").format("; echo ended; } > log &"),
        LOOP.replace(" t.py'", " t.py &'").format(""),
        LOOP.replace("--nnodes=2 ", "").format(""),
        LOOP.replace("--nnodes=2", "--nnodes=1").format(""),
        LOOP.replace("ssh $node", "pbsdsh -- bash -c").format(""),
        LOOP.replace("torchrun --nnodes=2 --nproc_per_node=4", "python").format(""),
        "(for node in $nodes; do ssh $node mkdir /tmp/a; done)\nssh b 'torchrun --nnodes=2 t.py'\n",
        "ssh b 'for try in 1 2; do torchrun --nnodes=2 t.py && break; done'\n",
        LOOP.replace("ssh", "ssh -f").format(""),
        LOOP.format(" &")
        + LOOP.format("").replace("ssh", "if last; then ssh").replace("\ndone", "; fi\ndone"),
        LOOP.replace("--nnodes=2", "--standalone").format(""),
        "ssh b 'torchrun --nnodes=2 --nproc_per_node=4 t.py'\n",
    ],
)
def test_a_loop_that_does_not_wait_is_no_trap(text: str) -> None:
    assert "loop-waits" not in [one.trap.id for one in traps.find(f"{PBS}{text}")]


@pytest.mark.parametrize(
    "line",
    [
        'bash -c "torchrun --nnodes=2 --node_rank=\\$SLURM_NODEID t.py"',
        "bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID t.py'",
    ],
)
def test_a_rank_that_the_tasks_shell_fills_in_is_no_trap(line: str) -> None:
    assert "rank-once" not in [one.trap.id for one in traps.find(f"{ASKED}{SRUN} {line}\n")]


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc_per_node=4 --master_port=$RANDOM t.py\n",
        "for seed in 1 2; do\n  torchrun --nnodes=1 --rdzv_id=$RANDOM --master_port=$RANDOM t.py\ndone\n",
        "deepspeed --hostfile hosts --num_nodes 2 --master_port=$RANDOM t.py\n",
        f'{ASKED}{SRUN} bash -c "torchrun --nnodes=2 --rdzv_id=$RANDOM --master_port=$RANDOM t.py"\n',
    ],
)
def test_what_is_drawn_once_for_all_nodes_is_no_trap(text: str) -> None:
    assert not {"port-random", "rdzv-id-random"} & {one.trap.id for one in traps.find(text)}


@pytest.mark.parametrize("options", ["--include localhost:0,1", "--hostfile=/dev/null --num_gpus 2"])
def test_deepspeed_on_gpus_of_this_machine_may_meet_on_it(options: str) -> None:
    found = traps.find(f"deepspeed {options} --master_addr 127.0.0.1 t.py\n")
    assert "master-is-localhost" not in [one.trap.id for one in found]


@pytest.mark.parametrize(("dollar", "is_trap"), [("$", False), ("\\$", True)])
def test_the_node_file_that_the_job_script_reads_for_a_container_is_no_trap(
    dollar: str, is_trap: bool
) -> None:
    line = f'ssh b "apptainer exec --nv x.sif torchrun --nnodes=2 --master_addr={dollar}(head -n 1 {dollar}PBS_NODEFILE) t.py"'
    found = traps.find(f"{PBS}{line}\n")
    assert ("nodefile-in-container" in [one.trap.id for one in found]) == is_trap


@pytest.mark.parametrize(
    ("word", "is_slow"),
    [
        ("NCCL_IB_DISABLE=1", True),
        ("NCCL_P2P_DISABLE='1'", True),
        ("NCCL_NET=Socket", True),
        ("NCCL_IB_DISABLE=0", False),
        ("NCCL_NET=IB", False),
    ],
)
def test_nccl_without_a_fast_way_is_a_remark(word: str, is_slow: bool) -> None:
    found = traps.find(GOOD.replace(HEAD, f"export {word}\n{HEAD}"))
    slow = [(one.trap.is_remark, one.line) for one in found if one.trap.id == "slow-transport"]
    assert slow == ([(True, 5)] if is_slow else [])


@pytest.mark.parametrize(
    ("line", "is_fixed"),
    [
        ("torchrun --nnodes=2 --node_rank=0 t.py", True),
        ("accelerate launch --num_machines 2 --machine_rank 0 t.py", True),
        ("torchrun --nnodes=2 --node_rank=$1 t.py", False),
        ("torchrun --nnodes=1 --node_rank=0 t.py", False),
        ("ssh b torchrun --nnodes=2 --node_rank=1 t.py", False),
        (
            "if x; then\ntorchrun --nnodes=2 --node_rank=0 t.py; else torchrun --nnodes=2 --node_rank=1 t.py; fi",
            False,
        ),
    ],
)
def test_a_fixed_rank_of_a_node_is_a_remark(line: str, is_fixed: bool) -> None:
    found = [one.trap.is_remark for one in traps.find(f"{line}\n") if one.trap.id == "rank-fixed"]
    assert found == ([True] if is_fixed else [])


@pytest.mark.parametrize(
    "text",
    [
        "source env/bin/activate\nssh b 'source env/bin/activate; torchrun --nnodes=2 t.py' &\n",
        "conda activate x\nssh b 'env/bin/torchrun --nnodes=2 t.py' &\n",
        "conda activate x\nssh b 'bash -lc \"torchrun --nnodes=2 t.py\"' &\n",
        "ssh b 'torchrun --nnodes=2 t.py' &\n",
        "conda activate x\nssh b hostname\n",
    ],
)
def test_an_environment_that_ssh_makes_itself_or_does_not_need_is_no_trap(text: str) -> None:
    assert "ssh-environment" not in [one.trap.id for one in traps.find(f"{PBS}{text}")]


@pytest.mark.parametrize(
    ("options", "is_fixed"),
    [("--nnodes=$n --node_rank=0", True), ("--nnodes=$n --node_rank=$i", False), ("--node_rank=0", False)],
)
def test_a_loop_that_gives_all_nodes_one_rank_is_a_remark(options: str, is_fixed: bool) -> None:
    text = f"for h in $hosts; do ssh $h 'torchrun {options} t.py' > $h.log 2>&1 & done\nwait\n"
    assert ("rank-fixed" in [one.trap.id for one in traps.find(text)]) == is_fixed


@pytest.mark.parametrize(
    "end",
    ["wait", "wait $!", "pid=$!\nwait $pid", "while kill -0 $!; do sleep 9; done", "tail --pid=$! -f log"],
)
def test_a_training_in_the_background_that_is_waited_for_is_no_trap(end: str) -> None:
    for separator in ("\n", " "):
        found = traps.find(GOOD.replace("--lr 0.1", f"--lr 0.1 &{separator}{end}"))
        assert "no-wait" not in [one.trap.id for one in found]


@pytest.mark.parametrize(
    ("line", "is_waited_for"),
    [
        ("for n in $hosts; do ssh $n {} & done; wait", True),
        ("for n in $hosts; do ssh $n {} & done", False),
        ("wait; srun {} &", False),
        ("srun {} & pid=$!; trap 'kill $pid' TERM; wait $pid", True),
        ("srun {} & tail -f log &", False),
        ("srun bash -c '{} & wait'", True),
        ("srun bash -c '{} &'; wait", True),
        ("srun bash -c '{} & wait' &", False),
        ("srun {} & ssh $n 'wait'", False),
    ],
)
def test_what_waits_is_told_by_its_place_not_by_its_line(line: str, is_waited_for: bool) -> None:
    found = traps.find(f"{ASKED}{line.format(f'{TORCHRUN} t.py')}\n")
    assert ("no-wait" not in [one.trap.id for one in found]) == is_waited_for


def test_accelerates_processes_of_all_gpus_are_no_trap() -> None:
    line = "accelerate launch --num_machines 2 --num_processes 8 --machine_rank \\$SLURM_PROCID t.py"
    assert "num-processes" not in [one.trap.id for one in traps.find(f'{ASKED}{SRUN} bash -c "{line}"\n')]


@pytest.mark.parametrize("options", ["--ppn 1", "-n 2", "--ppn $UNKNOWN", "-N 1"])
def test_mpiexec_with_one_torchrun_a_node_is_no_trap(options: str) -> None:
    found = traps.find(f"{PBS}mpiexec {options} torchrun --nnodes=2 --nproc_per_node=4 t.py\n")
    assert "torchrun-per-task" not in [one.trap.id for one in found]


def test_as_many_devices_as_tasks_are_no_trap() -> None:
    asked = ASKED.replace("ntasks-per-node=1", "ntasks-per-node=4")
    found = traps.find(f"{asked}{SRUN} python fit.py --trainer.devices 4\n")
    assert "devices-against-tasks" not in [one.trap.id for one in found]


def test_the_devices_of_a_program_that_is_not_lightnings_are_no_trap() -> None:
    found = traps.find(f"{ASKED}{SRUN} python fit.py --devices 4\n")
    assert "devices-against-tasks" not in [one.trap.id for one in found]


@pytest.mark.parametrize(
    ("script", "trap"),
    [
        (f"{ASKED}{HEAD}export port=1 \\\n  head\n{SRUN} {IN_SHELL}\n", "not-exported"),
        (f"{ASKED}{HEAD}{SRUN} apptainer exec --nv --env head=$head x.sif {IN_SHELL}\n", "not-exported"),
        (f"{PBS}{HEAD}mpirun -x head=$head {IN_SHELL}\n", "not-exported"),
        (f"{ASKED}{HEAD}{SRUN} --export=ALL,head=$head {IN_SHELL}\n", "not-exported"),
        (f"{ASKED}head=${{head:-x}}\n{SRUN} {IN_SHELL}\n", "not-exported"),
        (
            f"{ASKED}i=0\n{SRUN} bash -c 'for i in 1 2; do torchrun --nnodes=2 t.py $i; done'\n",
            "not-exported",
        ),
        (f"{TASKS}CUDA_VISIBLE_DEVICES=0 python check.py\n{SRUN} python t.py\n", "visible-devices"),
        (f"{TASKS}CUDA_VISIBLE_DEVICES=0 {SRUN} -N1 -n1 python prepare.py\n", "visible-devices"),
        (f"{TASKS}{SRUN} python t.py\nexport CUDA_VISIBLE_DEVICES=0\n", "visible-devices"),
        (
            f"{TASKS}export CUDA_VISIBLE_DEVICES=0\nunset CUDA_VISIBLE_DEVICES\n{SRUN} python t.py\n",
            "visible-devices",
        ),
        (
            f"{TASKS}if [[ $D ]]; then\n  export CUDA_VISIBLE_DEVICES=0\nfi\n{SRUN} python t.py\n",
            "visible-devices",
        ),
        (
            f"{TASKS}WORLD_SIZE=$SLURM_NNODES\nexport WORLD_SIZE=8\n{SRUN} python t.py\n",
            "world-size-is-nodes",
        ),
        (f"{LINES}NNODES=$(( $(wc -l < $PBS_NODEFILE) / 4 ))\nmpiexec -n 8 python t.py\n", "nodefile-lines"),
        (f'{ASKED}for s in 1 2; do\n  {SRUN} -w "$SLURM_JOB_NODELIST" {TORCHRUN} t.py\ndone\n', "loop-waits"),
        (f'{ASKED}for s in 1 2; do\n  {SRUN} -w "$hosts" {TORCHRUN} t.py\ndone\n', "loop-waits"),
        (f"{ASKED}{SRUN} -N1 -n1 -w $first {TORCHRUN} --node_rank=0 t.py\n", "rank-once"),
        (
            f"{ASKED}{SRUN} -n1 -r0 {TORCHRUN} t.py &\n{SRUN} -n1 -r1 {TORCHRUN} t.py\nwait\n",
            "fewer-tasks-than-nodes",
        ),
        (f"{ASKED}{SRUN} -n1 deepspeed --hostfile h t.py\n", "fewer-tasks-than-nodes"),
        (f"{ASKED}{SRUN} -n1 accelerate launch evaluate.py\n", "fewer-tasks-than-nodes"),
        (GOOD.replace("#SBATCH --nodes", "#SBATCH -o /x/%u/%x/%j.out\n#SBATCH --nodes"), "output-folder"),
        (GOOD.replace(HEAD, f"{HEAD}cat >x.sh <<E\n# SBATCH --mem=9G\nE\n"), "blank-in-directive"),
        (
            "MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 99))}\n"
            "torchrun --nnodes=$N --node_rank=$1 --master_port=$MASTER_PORT t.py\n",
            "port-random",
        ),
        (f"{ASKED}{HEAD}{ONE_BY_ONE.format(' &')}", "loop-waits"),
        (
            f"{ASKED}{HEAD}{SRUN} -N 1 -n 1 python download.py\n{SRUN} {TORCHRUN} t.py\n",
            "fewer-tasks-than-nodes",
        ),
        (GOOD.replace("--ntasks-per-node=1", "--ntasks=2"), "fewer-tasks-than-nodes"),
        (GOOD.replace(HEAD, f"export SLURM_NTASKS=2\n{HEAD}"), "fewer-tasks-than-nodes"),
        (
            GOOD.replace("--ntasks-per-node=1", "--ntasks=1").replace(
                HEAD, f"export SLURM_NTASKS=$SLURM_NNODES\n{HEAD}"
            ),
            "fewer-tasks-than-nodes",
        ),
        (
            GOOD.replace(HEAD, f"export SLURM_NTASKS=1\n{HEAD}").replace(SRUN, f"{SRUN} -n 2"),
            "fewer-tasks-than-nodes",
        ),
        (GOOD.replace(HEAD, f"export SLURM_NTASKS=1\n{HEAD}unset SLURM_NTASKS\n"), "fewer-tasks-than-nodes"),
        (
            GOOD.replace("--ntasks-per-node=1", "--ntasks=1").replace(SRUN, f"{SRUN} -n 2"),
            "fewer-tasks-than-nodes",
        ),
        (f"{ASKED}{SRUN} -N 1 -n 1 mpirun -np 8 python t.py\n", "mpirun-in-srun"),
        (f"{ASKED}mpirun -np 8 python t.py\n", "mpirun-in-srun"),
        (GOOD.replace(HEAD, f"export CUDA_VISIBLE_DEVICES=0,1,2,3\n{HEAD}"), "visible-devices"),
        (GOOD.replace(HEAD, f"export CUDA_VISIBLE_DEVICES=$MINE\n{HEAD}"), "visible-devices"),
        (GOOD.replace(HEAD, f"CUDA_VISIBLE_DEVICES=0 python check.py\n{HEAD}"), "visible-devices"),
        (f"{TASKS}export WORLD_SIZE=$SLURM_NTASKS\n{SRUN} python t.py\n", "world-size-is-nodes"),
        (f"{TASKS}export WORLD_SIZE=$((SLURM_NNODES * 4))\n{SRUN} python t.py\n", "world-size-is-nodes"),
        (f"{ASKED}export WORLD_SIZE=$SLURM_NNODES\n{SRUN} python t.py\n", "world-size-is-nodes"),
        (GOOD.replace("#SBATCH --nodes", "#SBATCH -o logs/%x-%j.out\n#SBATCH --nodes"), "output-folder"),
        (f"{ASKED}export {HEAD}{SRUN} {IN_SHELL}\n", "not-exported"),
        (f"{ASKED}{HEAD}export port=1 head\n{SRUN} {IN_SHELL}\n", "not-exported"),
        (f"{ASKED}set -a\n{HEAD}{SRUN} {IN_SHELL}\n", "not-exported"),
        (f"{ASKED}{HEAD}{SRUN} {IN_SHELL.replace('torchrun', 'head=$1; torchrun')}\n", "not-exported"),
        (f"{ASKED}{HEAD}{SRUN} {IN_SHELL.replace(chr(39), chr(34))}\n", "not-exported"),
        (
            "for h in a b; do\n  port=$RANDOM\n  ssh $h torchrun --nnodes=2 --node_rank=$((i++)) t.py &\ndone\n",
            "port-random",
        ),
        (f"{LINES}NNODES=$(sort -u $PBS_NODEFILE | wc -l)\nmpiexec -n 8 python t.py\n", "nodefile-lines"),
        (f"{LINES}RANKS=$(wc -l < $PBS_NODEFILE)\nmpiexec -n 8 python t.py\n", "nodefile-lines"),
        (f"{PBS}NNODES=$(wc -l < $PBS_NODEFILE)\nmpiexec -n 8 python t.py\n", "nodefile-lines"),
        (f"{ASKED}go() {{\n  {TORCHRUN} t.py\n}}\nexport -f go\n{SRUN} bash -c go\n", "first-node-only"),
    ],
)
def test_what_looks_like_a_trap_and_is_none(script: str, trap: str) -> None:
    assert trap not in [one.trap.id for one in traps.find(script)]


def test_every_trap_has_a_case_above() -> None:
    assert {case[1] for case in CASES} == {one.id for one in traps.TRAPS if not one.is_remark}


@pytest.mark.parametrize(
    "change",
    [
        (
            HEAD,
            f"{HEAD}# head=$(hostname) --rdzv_id='$X'\ncat <<'E' >x\nsrun torchrun --rdzv_id='$Y' x.py\nE\n",
        ),
        (HEAD, f"{HEAD}export NCCL_SOCKET_IFNAME=^lo,docker\n"),
        (
            HEAD,
            'first=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))\nhead=$(srun -N1 -n1 -w $first hostname -i)\n',
        ),
        ("--nnodes=2", '--nnodes="$SLURM_NNODES"'),
        ("--kill-on-bad-exit=1", "-K1"),
    ],
)
def test_what_only_looks_like_a_trap_is_none(change: tuple[str, str]) -> None:
    assert found(GOOD.replace(*change)) == []


def test_a_fixed_port_on_nodes_of_ones_own_is_none() -> None:
    text = GOOD.replace(PORT, "29500").replace("#SBATCH --nodes", "#SBATCH --exclusive\n#SBATCH --nodes")
    assert found(text) == []


def test_a_rank_that_the_script_gives_once_is_none_if_there_is_one_task() -> None:
    text = GOOD.replace("--nodes=2", "--nodes=1").replace(
        "--nnodes=2", "--nnodes=1 --node_rank=$SLURM_NODEID"
    )
    assert found(text) == []


HEARD = GOOD.replace("#SBATCH --nodes", "#SBATCH --signal=B:USR1@300\n#SBATCH --nodes")


@pytest.mark.parametrize("line", [". v/bin/activate", "source conda/bin/activate x"])
def test_an_environment_that_is_activated_hears_no_signal(line: str) -> None:
    text = HEARD.replace(" apptainer exec --nv x.sif", "").replace(HEAD, f"{line}\n{HEAD}")
    assert found(text)[0] == ("signal-unheard", 2)


def test_the_loopback_interface_is_one_interface_on_one_node() -> None:
    text = f"#!/bin/bash\n#SBATCH --gpus-per-node=4\nexport NCCL_SOCKET_IFNAME=lo\n{SRUN} python t.py\n"
    assert found(text) == [("ifname", 3)]


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("#SBATCH --nodes", "#SBATCH --ntasks=2\n#SBATCH --nodes"),
        GOOD.replace("#SBATCH --nodes", "#SBATCH --signal=USR1@300\n#SBATCH --nodes"),
        GOOD.replace("#SBATCH --nodes", "#SBATCH --signal=B:USR1@300\n#SBATCH --nodes").replace(
            HEAD, f"trap save USR1\n{HEAD}"
        ),
        GOOD.replace(HEAD, f"module purge\nmodule load cuda\n{HEAD}"),
        GOOD.replace(HEAD, f"module load old\nmodule purge\nmodule load cuda\n{HEAD}"),
        HEARD.replace(HEAD, f". ./handlers.sh\n{HEAD}"),
        f"#!/bin/bash\n#SBATCH --ntasks=6\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n{SRUN} python t.py\n",
        f"{ASKED.replace('nodes=2', 'nodes=1')}head=$(hostname)\n{SRUN} python t.py --at $head\n",
        f"{ASKED.replace('nodes=2', 'nodes=1')}export MASTER_ADDR=localhost\n{SRUN} python t.py\n",
        f"{ASKED}{HEAD}{SRUN} bash -c \"{TORCHRUN} t.py --name '$NAME'\"\n",
        f"{ASKED}{SRUN} bash -c 'RANK=$SLURM_PROCID python t.py'\n",
        f"{ASKED}# export NODE_RANK=$PBS_NODEID\n{SRUN} python t.py # not $PBS_NODEID\n",
        "torchrun --nnodes=1 --rdzv_id=$RANDOM t.py\n",
        GOOD.replace(HEAD, f"RDZV_ID=$RANDOM\n{HEAD}").replace("_id=$SLURM_JOB_ID", "_id=$RDZV_ID"),
        f"{ASKED.replace('gpus-per-node=4', 'gpus-per-task=1')}{SRUN} python t.py\n",
        f"{ASKED.replace('gpus-per-node=4', 'gpus-per-task=4')}{SRUN} -n $SLURM_NTASKS python t.py\n",
        f"#!/bin/bash\n#SBATCH -N 2 --gpus-per-task=4\n{SRUN} -n $((SLURM_NNODES)) python t.py\n",
        f"{ASKED.replace('=1', '=4')}{SRUN} python t.py\n",
        GOOD.replace("#SBATCH --nodes", "#SBATCH --cpus-per-task=1\n#SBATCH --nodes"),
        GOOD.replace("#SBATCH --nodes", "#SBATCH -c 8\n#SBATCH --nodes").replace(SRUN, f"{SRUN} -c 8"),
        GOOD.replace("#SBATCH --nodes", "#SBATCH -c 8\n#SBATCH --nodes").replace(
            HEAD, f"export SRUN_CPUS_PER_TASK=8\n{HEAD}"
        ),
        GOOD.replace(SRUN, f"{SRUN} --export=ALL,X=1"),
        GOOD.replace("#SBATCH --nodes", "#SBATCH --export=ALL\n#SBATCH --nodes"),
        GOOD.replace("#SBATCH --nodes", "#SBATCH --export=NONE\n#SBATCH --nodes").replace(
            HEAD, f"export SLURM_EXPORT_ENV=ALL\n{HEAD}"
        ),
        GOOD.replace("#SBATCH --nodes", "#SBATCH --export=NONE\n#SBATCH --nodes").replace(
            SRUN, f"{SRUN} --export=ALL"
        ),
        GOOD.replace(" --nv", " --rocm"),
        GOOD.replace(HEAD, f"apptainer exec x.sif python --version\n{HEAD}"),
        GOOD.replace(" --nv", "").replace(HEAD, f"export APPTAINER_NV=1\n{HEAD}"),
        GOOD.replace(" --nv", "")
        .replace("#SBATCH --gpus-per-node=4\n", "")
        .replace("_per_node=4", "_per_node=1"),
        GOOD.replace(HEAD, f"conda activate x\n{HEAD}").replace(" apptainer exec --nv x.sif", ""),
        GOOD.replace("#SBATCH --nodes", "#SBATCH --gres=nvme:1\n#SBATCH --nodes"),
        GOOD.replace(HEAD, f"export NCCL_SOCKET_IFNAME=$IFACE\n{HEAD}"),
        GOOD.replace(HEAD, f"export BATCH=128 MASTER_PORT={PORT}\n{HEAD}"),
    ],
)
def test_what_goes_together_is_no_trap(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(("text", "remark"), REMARKS)
def test_what_may_be_meant_so_is_a_remark(text: str, remark: str) -> None:
    assert [(one.trap.id, one.trap.is_remark) for one in traps.find(text)] == [(remark, True)]


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash\n#SBATCH --ntasks=1\n#SBATCH --gpus-per-node=1\nsrun python t.py\n",
        GOOD.replace(HEAD, f"export SLURM_KILL_BAD_EXIT=1\n{HEAD}").replace(SRUN, "srun"),
        GOOD.replace("#SBATCH --nodes", "#SBATCH --time=1:00:00\n#SBATCH --signal=USR2@120\n#SBATCH --nodes"),
        "#!/bin/bash\n#SBATCH --time=1:00:00\necho x\n",
        GOOD.replace(" apptainer exec --nv x.sif", "").replace(HEAD, f"source v/bin/activate\n{HEAD}"),
    ],
    ids=["one task", "by a variable", "with a signal", "no training", "no container"],
)
def test_nothing_is_remarked_where_nothing_is_lost(text: str) -> None:
    assert traps.find(text) == []


@pytest.mark.parametrize(
    ("name", "text", "is_script"),
    [
        ("x", "#!/bin/bash\n", True),
        ("x", "#!/usr/bin/env bash\n", True),
        ("x", "\n#SBATCH -N 2\n", True),
        ("x.sbatch", "torchrun x\n", True),
        ("x.log", "step 1\n", False),
        ("x.sh", "", False),
        ("x.sh", " \n", False),
        ("x", "#!/usr/bin/python3\n", False),
        ("x", "#!/usr/bin/bashful\n", False),
        ("x", "#!/usr/bin/env python\n", False),
        ("x", "\ufeff\n #! /bin/sh\n", True),
        ("x", "#!/usr/bin/env -S bash -l\n", True),
        *(("x", f"#!/bin/{shell}sh -e\n", True) for shell in ("ba", "da", "k", "z", "c", "tc", "")),
        ("x", "a\n#PBS  -N x\n", True),
        ("x", "a\n#SBATCH--nodes=2\n #SBATCH -N 2\n", False),
        ("x", "a" * 4080 + "\n#SBATCH -N 2\n", True),
        ("x", "a" * 4096 + "\n#SBATCH -N 2\n", False),
        *(
            (f"x{end}", "a\n", True)
            for end in (".pbs", ".sh", ".slurm", ".qsub", ".job", ".bash", ".slm", ".sub")
        ),
        ("x.py", "a\n", False),
        ("x.sh", "a\0", False),
        *((f"x.sh{end}", "#!/bin/bash\n", False) for end in (".log", ".out", ".err", ".o123", ".e1")),
        ("x.log.sh", "#!/bin/bash\n", True),
    ],
)
def test_a_script_is_told_from_a_log(name: str, text: str, is_script: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert jobscript.is_one(tmp_path / name) == is_script


def test_what_cannot_be_read_is_no_script(tmp_path: Path) -> None:
    (tmp_path / "folder.sh").mkdir()
    for name in ("folder.sh", "nowhere.sh"):
        assert not jobscript.is_one(tmp_path / name)
        with pytest.raises(BadInput) as refusal:
            jobscript.main(tmp_path / name, as_json=False)
        assert refusal.value.id == "explain-script-unreadable"
    assert str(refusal.value).endswith(
        "nowhere.sh cannot be read (No such file or directory): give a job script"
    )


MENDED = "#!/bin/bash\n#SBATCH --gpus-per-node=1 --output=/dev/null\nsrun --kill-on-bad-exit python t.py\n"
BARE = "#!/bin/bash\n#SBATCH --time=5 -N2 --gpus-per-node=1\nmodule load x\nexport A=1\nsrun -K python t.py x\x1b[31m\n"


def test_traps_are_told_with_their_lines_why_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.sh").write_text(MENDED)
    assert jobscript.main(tmp_path / "x.sh", as_json=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "x.sh:2: the output goes to /dev/null (output-null)",
        "  /dev/null",
        "  why: If it fails there is no log to read.",
        "  do:  #SBATCH --output=%x-%j.out.",
        "",
        "the same job as one of ours:",
        "  sbatch --nodes=1 --gpus-per-node=1 slurm/multinode.sbatch -- t.py",
        "  or: apptrain submit --cluster NAME --nodes 1 --gpus-per-node 1 -- t.py",
    ]


def test_remarks_and_what_is_not_carried_over_stand_behind_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.sh").write_text(BARE)
    assert jobscript.main(tmp_path / "x.sh", as_json=False) == 1
    assert capsys.readouterr().out.splitlines() == [
        "nothing was found that must be mended",
        "x.sh:2: a remark: no signal comes before the time limit: #SBATCH --signal=B:USR2@120 and a handler that "
        "saves; under PBS a clock of your own. Frequent checkpoints do too.",
        "",
        "the same job as one of ours:",
        "  sbatch --nodes=2 --gpus-per-node=1 --time=5 slurm/multinode.sbatch -- t.py 'x'$'\\033''[31m'",
        "  or: apptrain submit --cluster NAME --nodes 2 --gpus-per-node 1 --time 5 -- t.py 'x'$'\\033''[31m'",
        "  in a profile: modules: [x]",
        "  not carried over: line 4: A: export it where you submit; APPTRAIN_PASS=A for the ranks",
    ]
    (tmp_path / "x.sh").write_text("echo a\n")
    assert jobscript.main(tmp_path / "x.sh", as_json=False) == 1
    assert "as one of ours" not in capsys.readouterr().out


def test_json_has_the_same_with_the_words_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.sh").write_text(MENDED)
    assert jobscript.main(tmp_path / "x.sh", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "schema_version": 1,
        "causes": [
            {
                "id": "output-null",
                "title": "the output goes to /dev/null",
                "why": "If it fails there is no log to read.",
                "remedy": "#SBATCH --output=%x-%j.out.",
                "where": {"file": "x.sh", "line": 2},
                "rank": None,
                "node": None,
                "text": "/dev/null",
            }
        ],
        "remarks": [],
        "as_ours": {
            "lines": [
                "sbatch --nodes=1 --gpus-per-node=1 slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 1 --gpus-per-node 1 -- t.py",
            ],
            "profile": [],
            "not_carried_over": [],
        },
    }
    (tmp_path / "x.sh").write_text(BARE)
    assert jobscript.main(tmp_path / "x.sh", as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert ([one["id"] for one in told["remarks"]], told["causes"]) == (["no-signal"], [])
    assert told["as_ours"]["profile"] == ["modules: [x]"]
    assert told["as_ours"]["not_carried_over"] == [
        "line 4: A: export it where you submit; APPTRAIN_PASS=A for the ranks"
    ]
    assert told["as_ours"]["lines"][0].endswith("-- t.py 'x'$'\\033''[31m'")


@pytest.mark.parametrize(
    ("training", "program"),
    [
        (f"{SRUN} accelerate launch --multi_gpu --num_processes 8 --same_network nlp.py --lr 1", "nlp.py --lr 1"),
        ("mpirun -np 8 --report-bindings python -W ignore train.py", "train.py"),
        (f"{SRUN} bash -c 'python -W ignore -m torch.distributed.run --nnodes=2 train.py'", "train.py"),
        ("deepspeed --hostfile=h --bind_cores_to_rank train.py --deepspeed ds.json", "train.py --deepspeed ds.json"),
    ],
)  # fmt: skip
def test_the_command_proposes_the_script_that_is_trained(training: str, program: str, tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text(f"{ASKED}{training}\n")
    ended = limited(tmp_path, "explain", "x.sh")
    assert f"  sbatch --nodes=2 --gpus-per-node=4 slurm/multinode.sbatch -- {program}\n" in ended.stdout


def test_a_program_beside_the_training_is_no_training_on_the_first_node(tmp_path: Path) -> None:
    good = GOOD.replace(HEAD, f"python -m pip install -e .\npython get.py --out d\n{HEAD}")
    (tmp_path / "x.sh").write_text(good)
    ended = limited(tmp_path, "explain", "x.sh")
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (1, "nothing was found that must be mended")
    assert " slurm/multinode.sbatch -- train.py --lr 0.1\n" in ended.stdout
    (tmp_path / "x.sh").write_text(f"{ASKED}python get.py --out d\npython train.py\n")
    assert "(first-node-only)" in limited(tmp_path, "explain", "x.sh").stdout


def test_sizes_of_all_nodes_together_are_not_held_against_those_of_one(tmp_path: Path) -> None:
    asked = "#!/bin/bash\n#PBS -q gpuvolta\n#PBS -l ngpus=8,ncpus=96\n#PBS -l mem=700GB\n"
    loop = f"for node in $(uniq $PBS_NODEFILE); do\n  ssh $node '{TORCHRUN} t.py' < /dev/null &\ndone\nwait\n"
    (tmp_path / "x.pbs").write_text(f"{asked}{loop}")
    ended = limited(tmp_path, "explain", "x.pbs")
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (1, "nothing was found that must be mended")
    assert "  apptrain submit --cluster NAME --partition gpuvolta -- t.py\n" in ended.stdout
    assert "qsub" not in ended.stdout


@pytest.mark.parametrize("asked", ["#SBATCH --gpus=8 --nodes=2-4", "#PBS -l ncpus=8,ngpus=2"])
def test_an_image_is_to_have_gpus_of_which_the_number_on_a_node_is_not_known(asked: str) -> None:
    found = traps.find(f"#!/bin/bash\n{asked}\napptainer exec x.sif torchrun --standalone t.py\n")
    assert "no-nv" in [one.trap.id for one in found]


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text(
        f"#!/bin/bash\ntouch {tmp_path}/run\nsrun torchrun --nnodes=$(touch {tmp_path}/run) x.py\n"
    )
    jobscript.main(tmp_path / "x.sh", as_json=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("body", "first"),
    [
        ("make all", "no training was found in this script: only its requests were looked at"),
        ("apptrain run -- t.py", "nothing was found that must be mended"),
        ("python t.py", "nothing was found that must be mended"),
        ("#SBATCH --nodes=2 --gres=gpu:1\nls\n#SBATCH -t 5", "x.sh:4: a directive (#SBATCH or #PBS) stands after"),
    ],
)  # fmt: skip
def test_a_script_in_which_no_training_was_found_is_not_called_sound(
    body: str, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.sh").write_text(f"#!/bin/bash\n{body}\n")
    assert jobscript.main(tmp_path / "x.sh", as_json=False) == (0 if first.startswith("x.sh") else 1)
    said = capsys.readouterr().out
    assert said.startswith(first)
    assert ("no training was found" in said) == first.startswith("no training")


def test_a_megabyte_in_one_line_takes_little_memory_and_time(tmp_path: Path) -> None:
    """24,000 places that would be quoted."""
    (tmp_path / "x.sh").write_text("#!/bin/bash\n" + "while read n; do ssh $n python t.py; done; " * 24_000)
    ended = limited(tmp_path, "explain", "x.sh")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "x.sh:2: what a loop starts reads the rest of the list" in ended.stdout
    assert len(ended.stdout) < 20_000
