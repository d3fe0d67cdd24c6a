"""Likely mistakes: what people try first, and the one line that each ends with; nothing is started or submitted.

Each is tried in a folder of a user's, with stand-ins for a scheduler's commands that record their calls: in this
process, and one of each command as a user would, in a shell.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from entrypoint.cli import apptrain
from entrypoint.plan import mistakes
from tests.unit.cli.site import SIF

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 60  # s; 2 on a machine that does nothing else
RECORDS = '#!/bin/sh\necho "$0 $*" >>"$CALLS"\n'
STARTED = ("sbatch", "qsub", "srun", "torchrun", "apptainer")
SITE = """\
title: A lab
tested: on two nodes
scheduler: slurm
nodes: {gpus: 4, cpus: 64}
request: {time: "01:00:00"}
"""


COMMANDS = {
    "run": "apptrain",
    "plan --nodes a --node-rank 0 --device cpu": "apptrain",
    "launch --nodes a --node-rank 0 --device cpu": "apptrain",
    "submit --cluster generic": "apptrain",
}
"""What takes a CMD, and in whose name it refuses one."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    given: str
    """Of a shell."""
    found: str
    """The whole line, without who says it; {folder} and {checkout} stand for those."""
    who: str = "apptrain"
    status: int = 64


TRIED = [
    # the command
    Mistake(given="apptrain train", found="train is no command: did you mean `apptrain demo`? (see apptrain --help)", who="apptrain"),
    Mistake(given="apptrain install-image", found="install-image is no command: did you mean `apptrain image build`? (see apptrain --help)"),
    Mistake(given="apptrain shell", found="shell is no command: did you mean `make -C {checkout} shell`? (see apptrain --help)"),
    Mistake(given="apptrain venv", found="venv is no command: did you mean `make -C {checkout} venv`? (see apptrain --help)"),
    Mistake(given="apptrain test", found="test is no command: did you mean `make -C {checkout} test`? (see apptrain --help)"),
    Mistake(given="apptrain image pull docker://nvcr.io/nvidia/pytorch:25.10-py3", found="image pull: apptainer does it: apptainer pull image.sif docker://nvcr.io/nvidia/pytorch:25.10-py3 && export APPTRAIN_IMAGE=$PWD/image.sif"),
    Mistake(given="apptrain lanch", found="lanch is no command: did you mean launch? (see apptrain --help)", who="apptrain"),
    Mistake(given="apptrain my_script.py --lr 1", found="my_script.py is no command: did you mean `apptrain run -- my_script.py --lr 1`?", who="apptrain"),
    Mistake(given="apptrain -- my_script.py", found="-- is no command: did you mean `apptrain run -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain -m my.module", found="-m is no command: did you mean `apptrain run -- -m my.module`?", who="apptrain"),
    Mistake(given="apptrain python -u my_script.py --lr 1", found="python is no command: did you mean `apptrain run -- my_script.py --lr 1`? (left out: -u)", who="apptrain"),
    Mistake(given="apptrain python3 -m my.module", found="python3 is no command: did you mean `apptrain run -- -m my.module`?", who="apptrain"),
    Mistake(given="apptrain python -m torch.distributed.run --nproc-per-node 2 my_script.py", found="python is no command: did you mean `apptrain run --nproc-per-node 2 -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain python -c 'import torch'", found="python is no command: did you mean `apptrain run -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain torchrun --nproc-per-node 2 my_script.py --lr 1", found="torchrun is no command: did you mean `apptrain run --nproc-per-node 2 -- my_script.py --lr 1`?", who="apptrain"),
    Mistake(given="apptrain torchrun --nnodes=2 --rdzv-backend c10d my_script.py", found="torchrun is no command: did you mean `apptrain run --nnodes=2 --rdzv-backend c10d -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain mpirun -n 2 python my_script.py", found="mpirun is no command: did you mean `apptrain run -- my_script.py`? (left out: -n)", who="apptrain"),
    Mistake(given="apptrain bash run.sh", found="bash is no command: did you mean `apptrain run --no-python -- bash run.sh`?", who="apptrain"),
    *(
        Mistake(given=f"apptrain {name} -N 2 -- my_script.py --lr 1", found=f"{name} is no command: did you mean `apptrain submit --cluster NAME --nodes 2 -- my_script.py --lr 1`?", who="apptrain")
        for name in ("slurm", "srun", "salloc", "sbatch")
    ),
    *(
        Mistake(given=f"apptrain {name} -N 2 -- my_script.py --lr 1", found=f"{name} is no command: did you mean `apptrain submit --cluster NAME -- my_script.py --lr 1`? (left out: -N)", who="apptrain")
        for name in ("pbs", "qsub")
    ),
    Mistake(given="apptrain srun -N8 --gpus-per-node=4 -n 32 --gres=gpu:4 -t 1:00:00 python -u my_script.py --lr 1", found="srun is no command: did you mean `apptrain submit --cluster NAME --gpus-per-node=4 --time 1:00:00 -- my_script.py --lr 1`? (left out: -N8, -n, --gres, -u)", who="apptrain"),
    Mistake(given="apptrain srun --nodes 2-4 torchrun --nnodes 2 --nproc_per_node 4 my_script.py", found="srun is no command: did you mean `apptrain submit --cluster NAME --nodes 2-4 --nnodes 2 --nproc_per_node 4 -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain slurm", found="slurm is no command: did you mean `apptrain submit --cluster NAME -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain --nodes 2 my_script.py", found="--nodes stands before the command: did you mean `apptrain run --nodes 2 -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain --nodes=2 -- my_script.py", found="--nodes stands before the command: did you mean `apptrain run --nodes=2 -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain --cluster delta my_script.py", found="--cluster stands before the command: did you mean `apptrain submit --cluster delta -- my_script.py`?", who="apptrain"),
    *(
        Mistake(given=f"apptrain {name} 123", found=f"{name} is no command: a job is followed with `apptrain submit --follow JOB` or tail -f RUN/job.log, and ended with scancel JOB or qdel JOB", who="apptrain")
        for name in ("status", "logs", "stop")
    ),
    Mistake(given="apptrain --hlep", found="--hlep is no command: did you mean --help? (see apptrain --help)", who="apptrain"),
    Mistake(given="apptrain frobnicate", found="frobnicate is no command: give one of demo, run, submit, site, image, plan, launch, check, doctor, rerun, report, explain, scaling, compare (see apptrain --help)", who="apptrain"),
    Mistake(given="apptrain -v", found="-v is no command: did you mean --version? (see apptrain --help)", who="apptrain"),
    Mistake(given="apptrain -N 2 my_script.py", found="-N stands before the command: did you mean `apptrain run --nodes 2 -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain -p gpu my_script.py", found="-p stands before the command: did you mean `apptrain submit --cluster NAME --partition gpu -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain --nodse 2 my_script.py", found="--nodse stands before the command: did you mean `apptrain run --nodes 2 -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain --frobnicate my_script.py", found="--frobnicate is neither a command nor an option of one (see apptrain --help)", who="apptrain"),
    Mistake(given="apptrain image --hlep", found="image --hlep: give one of build, fetch, verify, inspect: did you mean --help?", who="apptrain"),
    *(
        Mistake(given=f"apptrain {name} --hlep", found="unrecognized arguments: --hlep: did you mean --help?", who=who)
        for name, who in (("launch", "apptrain"), ("plan", "apptrain"), ("check", "apptrain"), ("run", "apptrain"), ("demo", "apptrain"), ("doctor", "apptrain"), ("compare", "apptrain"), ("image build", "apptrain"), ("site", "apptrain"))
    ),
    Mistake(given="apptrain submit --cluster generic --hlep", found="--hlep: no option of submit, of a job or of sbatch: did you mean --help?"),
    *(
        Mistake(given=f"apptrain run {option} 2 -- my_script.py", found=f"unrecognized arguments: {option} 2: did you mean {meant}?")
        for option, meant in (("-np", "--nproc-per-node"), ("--nprocs", "--nproc-per-node"), ("--num-processes", "--nproc-per-node"), ("--num_machines", "--nodes"))
    ),
    Mistake(given="apptrain launch --help-al", found="unrecognized arguments: --help-al: did you mean --help-all?"),
    *(
        Mistake(given=f"apptrain {name} frobnicate", found=f"unrecognized arguments: frobnicate (CMD comes behind --): see `apptrain {name.split()[0]} --help`", who=who)
        for name, who in (("launch", "apptrain"), ("plan", "apptrain"), ("run", "apptrain"), ("demo", "apptrain"), ("submit --cluster generic", "apptrain"))
    ),
    Mistake(given="apptrain image fetch --stack cu999", found="image fetch: STACK=cu999: there is no such stack: give one of cu132, cu128, cu126", who="apptrain"),
    Mistake(given="apptrain image biuld", found="image biuld: give one of build, fetch, verify, inspect: did you mean build?", who="apptrain"),
    # what another command takes
    Mistake(given="apptrain doctor --help-all", found="unrecognized arguments: --help-all: see `apptrain doctor --help`", who="apptrain"),
    *(
        Mistake(given=f"apptrain {words}", found=f"{option} is an option of run, submit and launch, not of {words.split()[0]}: see `apptrain {words.split()[0]} --help`", who=who)
        for words, option, who in (("doctor --nodes 2", "--nodes", "apptrain"), ("compare --nodes 2 a b", "--nodes", "apptrain"), ("image build --nodes 2", "--nodes", "apptrain"), ("check --device cpu", "--device", "apptrain"), ("site --nodes 2", "--nodes", "apptrain"))
    ),
    Mistake(given="apptrain check --gpu", found="unrecognized arguments: --gpu: see `apptrain check --help`"),
    Mistake(given="apptrain plan --dry-run", found="--dry-run is an option of submit, not of plan: see `apptrain plan --help`"),
    Mistake(given="apptrain launch --dry-run -- my_script.py", found="--dry-run is an option of submit, not of launch: see `apptrain launch --help`"),
    Mistake(given="apptrain launch --follow", found="--follow is an option of submit, not of launch: see `apptrain launch --help`"),
    Mistake(given="apptrain run --cluster lab -- my_script.py --lr 1", found="--cluster is of submit: did you mean `apptrain submit --cluster lab -- my_script.py --lr 1`?"),
    Mistake(given="apptrain run --gpus-per-node 4 --cluster=lab my_script.py", found="--cluster is of submit: did you mean `apptrain submit --gpus-per-node 4 --cluster=lab -- my_script.py`?"),
    Mistake(given="apptrain run --follow -- my_script.py", found="--follow is of submit: did you mean `apptrain submit --cluster NAME --follow -- my_script.py`?"),
    Mistake(given="apptrain run --dry-run -- my_script.py", found="--dry-run is of submit: did you mean `apptrain submit --cluster NAME --dry-run -- my_script.py`?"),
    Mistake(given="apptrain demo --cluster lab", found="--cluster is of submit: did you mean `apptrain submit --cluster lab`?"),
    Mistake(given="apptrain doctor --cluster lab", found="unrecognized arguments: --cluster lab: did you mean --profile?", who="apptrain"),
    Mistake(given="apptrain plan --cluster=lab", found="unrecognized arguments: --cluster=lab: did you mean --profile?"),
    Mistake(given="apptrain submit --cluster derecho --tasks-per-node 2", found="--tasks-per-node is an option of run, not of submit: see `apptrain submit --help`"),
    Mistake(given="apptrain doctor my_script.py", found="doctor takes no script: did you mean `apptrain run -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain check my_script.py --lr 1", found="check takes no script: did you mean `apptrain run -- my_script.py --lr 1`?"),
    Mistake(given="apptrain check frobnicate", found="unrecognized arguments: frobnicate: see `apptrain check --help`"),
    Mistake(given="apptrain compare --x", found="unrecognized arguments: --x: see `apptrain compare --help`", who="apptrain"),
    Mistake(given="apptrain site mine.yaml", found="unrecognized arguments: mine.yaml: did you mean -o mine.yaml?"),
    Mistake(given="apptrain submit perlmutter my_script.py", found="perlmutter stands without --cluster: did you mean `apptrain submit --cluster perlmutter -- my_script.py`?"),
    Mistake(given="apptrain submit generic --nodes 4 -- my_script.py", found="generic stands without --cluster: did you mean `apptrain submit --cluster generic --nodes 4 -- my_script.py`?"),
    Mistake(given="apptrain submit --cluster ./x.yaml -- my_script.py", found="--cluster ./x.yaml: there is no x.yaml: check the path, or run `apptrain site -o x.yaml` on your cluster's login node, which writes one"),
    Mistake(given="apptrain run --image my_script.py", found="my_script.py is no image: did you mean `apptrain run --image -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain run --image my_script.py --lr 1 --nodes 2", found="my_script.py is no image: did you mean `apptrain run --nodes 2 --image -- my_script.py --lr 1`?", who="apptrain"),
    Mistake(given="apptrain run --no-python --image=run.sh -- a", found="run.sh is no image: did you mean `apptrain run --no-python --image -- run.sh a`?", who="apptrain"),
    Mistake(given="apptrain run my_script.py --image", found="my_script.py stands before --: did you mean `apptrain run --image -- my_script.py`?", who="apptrain"),
    Mistake(given="apptrain run -m my.module --image my.sif", found="-m stands before --: did you mean `apptrain run --image=my.sif -- -m my.module`?", who="apptrain"),
    # words in front of a script
    Mistake(given="apptrain run -- python my_script.py --lr 1", found="CMD begins with python: leave it out, Python runs CMD anyway: -- my_script.py --lr 1"),
    Mistake(given="apptrain run -- python3 -u -m my.module", found="CMD begins with python3: leave it out, Python runs CMD anyway: -- -m my.module"),
    Mistake(given="apptrain run -- torchrun --nproc_per_node 2 my_script.py", found="CMD begins with torchrun: leave it and its options out, apptrain starts the ranks: --nproc-per-node=2 -- my_script.py"),
    Mistake(given="apptrain run -- torchrun --nproc-per-node=gpu my_script.py", found="CMD begins with torchrun: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run -- torchrun --nnodes 2 --numa_binding=node my_script.py", found="CMD begins with torchrun: leave it and its options out, apptrain starts the ranks: --numa-binding=node -- my_script.py"),
    Mistake(given="apptrain run -- torchrun --numa-binding exclusive my_script.py --numa-binding x", found="CMD begins with torchrun: leave it and its options out, apptrain starts the ranks: --numa-binding=exclusive -- my_script.py --numa-binding x"),
    Mistake(given="apptrain run -- python -m torch.distributed.run my_script.py", found="CMD begins with torch.distributed.run: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run -- accelerate launch my_script.py", found="CMD begins with accelerate: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run -- mpirun -n 4 my_script.py", found="CMD begins with mpirun: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run -- bash run.sh", found="CMD begins with bash, which is a shell's: give the Python script that it starts, or have each rank run it as it is: --no-python -- bash run.sh"),
    Mistake(given="apptrain run -- ./run.sh", found="CMD begins with ./run.sh, which is a shell's: give the Python script that it starts, or have each rank run it as it is: --no-python -- bash ./run.sh"),
    *(
        Mistake(given=f"apptrain {command} -- {given} my_script.py --lr 1", found=f"CMD begins with {given.partition(' ')[0]}: leave it and its options out, apptrain starts the ranks: -- my_script.py --lr 1", who=who)
        for command, who in COMMANDS.items()
        for given in ("accelerate launch", "composer -n 4", "fabric run --devices 2", "lightning run model", "tune run", "yolo train")
        if command == "run" or given.startswith("acc")
    ),
    *(
        Mistake(given=f"apptrain run -- -m {module} {options} my_script.py", found=f"CMD begins with -m {module}: leave it and its options out, apptrain starts the ranks: -- my_script.py")
        for module, options in (("torch.distributed.run", "--standalone"), ("torch.distributed.launch", "--use-env"), ("accelerate.commands.launch", ""), ("lightning.fabric.cli", "run"), ("deepspeed.launcher.runner", "--num_gpus 4"))
    ),
    Mistake(given="apptrain run -- python -u -m accelerate.commands.launch my_script.py", found="CMD begins with accelerate.commands.launch: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run --mode exec -- torchrun my_script.py", found="CMD begins with torchrun: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run -- ''", found="CMD begins with an empty word: give a script with its arguments, or -m NAME"),
    Mistake(given="apptrain run -- python -c 'import torch'", found="CMD is python -c: put the code in a file, and give that: -- my_script.py"),
    Mistake(given="apptrain run -- python", found="CMD begins with python: leave it out, Python runs CMD anyway: -- my_script.py"),
    Mistake(given="apptrain run -- python -X dev -W error my_script.py", found="CMD begins with python: leave it out, Python runs CMD anyway: -- my_script.py"),
    Mistake(given="apptrain run -- /usr/bin/python3.11 my_script.py", found="CMD begins with /usr/bin/python3.11: leave it out, Python runs CMD anyway: -- my_script.py"),
    Mistake(given="apptrain run --no-python -- nothing my_script.py", found="CMD nothing is no program in PATH: check the spelling, or give its path"),
    Mistake(given="apptrain run --no-python -- torchrun my_script.py", found="CMD begins with torchrun: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run --no-python --mode rank -- ./nothing", found="CMD ./nothing is no program in PATH: check the spelling, or give its path"),
    Mistake(given="apptrain run -- ls", found="CMD ls is a program, no Python script: put --no-python before -- if each rank is to run it"),
    Mistake(given="apptrain run -- -m", found="CMD begins with -m: give a script with its arguments, or -m NAME; options come before --"),
    Mistake(given="apptrain run -- -m data/train", found="-m data/train: -m takes a module's name: leave -m out for a file"),
    Mistake(given="apptrain run -- data/job.pbs -x", found="CMD begins with data/job.pbs, which is a shell's: give the Python script that it starts, or have each rank run it as it is: --no-python -- bash data/job.pbs -x"),
    Mistake(given="apptrain run -- mpirun -n 2", found="CMD begins with mpirun: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run -- -m torch.distributed.run", found="CMD begins with -m torch.distributed.run: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain run -- my.yaml", found="CMD my.yaml is no Python script: give the script that reads it, as its argument"),
    Mistake(given="apptrain run my.yaml", found="unrecognized arguments: my.yaml (CMD comes behind --): see `apptrain run --help`"),
    # the script
    Mistake(given="apptrain run -- my_scirpt.py", found="CMD my_scirpt.py does not exist in {folder}: did you mean my_script.py?"),
    Mistake(given="apptrain run -- $PWD/my_scirpt.py", found="CMD {folder}/my_scirpt.py does not exist in {folder}: did you mean {folder}/my_script.py?"),
    Mistake(given="apptrain run -- data/trian.py", found="CMD data/trian.py does not exist in {folder}/data: did you mean data/train.py?"),
    Mistake(given="cd data && apptrain run -- ../my_scirpt.py", found="CMD ../my_scirpt.py does not exist in {folder}/data/..: did you mean ../my_script.py?"),
    Mistake(given="apptrain run -- /none/my_script.py", found="CMD /none/my_script.py does not exist: there is no directory /none: check the path"),
    Mistake(given="apptrain run -- 'my_script.py --lr 1'", found="CMD my_script.py --lr 1 is one word: leave its quotes out: -- my_script.py --lr 1"),
    Mistake(given="apptrain run -- 'python my_script.py'", found="CMD python my_script.py is one word: leave its quotes out: -- my_script.py"),
    Mistake(given="apptrain run --nodes a,b -- my_script.py", found="--nodes=a,b: apptrain run takes a number, its nodes are on this machine; on others: apptrain launch --nodes a,b --node-rank I on each"),
    Mistake(given="apptrain run --node-rank 1 -- my_script.py", found="--node-rank 1: apptrain run starts all nodes, on this machine: leave it out; on machines of your own: apptrain launch --nodes LIST --node-rank I"),
    Mistake(given="apptrain run --nnodes 3 -- my_script.py", found="--nnodes 3, but this step has 2 nodes: give --nodes 3, or leave --nnodes out"),
    Mistake(given="apptrain run --hang-timeout soon -- my_script.py", found="--hang-timeout=soon: must be seconds, a number"),
    Mistake(given="APPTRAIN_NPROC_PER_NOD=2 apptrain run -- my_script.py", found="APPTRAIN_NPROC_PER_NOD is no variable of apptrain: did you mean APPTRAIN_NPROC_PER_NODE? Correct the name, or unset it"),
    Mistake(given="apptrain run -- nothing.py", found="CMD nothing.py does not exist in {folder}: check the spelling; a module is given as -m NAME, a program that is no Python script needs --no-python"),
    Mistake(given="apptrain run -- 'my book.ipynb' --lr 1", found="CMD my book.ipynb is a notebook: jupyter nbconvert --to script 'my book.ipynb', and give the script that this makes: -- 'my book.py'"),
    Mistake(given="apptrain run -- -m my_script.py", found="-m my_script.py: -m takes a module's name: leave -m out for a file"),
    Mistake(given="apptrain run -- data", found="CMD data is a directory: give a script in it, with its arguments"),
    *(
        Mistake(given=given, found=f"CMD {what}, and each rank opens CMD for itself: write the script to a file, and give that")
        for given, what in (
            ("apptrain run -- /dev/stdin", "/dev/stdin is what this process alone has open"),
            ("cat my_script.py | apptrain submit --cluster generic -- /dev/stdin", "/dev/stdin is what this process alone has open"),
            ("apptrain run -- /dev/fd/63", "/dev/fd/63 is what this process alone has open"),
            ("mkfifo pipe && apptrain run -- pipe", "pipe is a FIFO"),
            ("apptrain run -- /dev/null", "/dev/null is a character device"),
        )
    ),
    Mistake(given="apptrain run --nodes 2 my_script.py --lr 1", found="my_script.py stands before --: did you mean `apptrain run --nodes 2 -- my_script.py --lr 1`?"),
    Mistake(given="apptrain run my_script.py --lr 1 --nodes 2", found="my_script.py stands before --: did you mean `apptrain run --nodes 2 -- my_script.py --lr 1`?"),
    Mistake(given="apptrain run -m my.module -- --lr 1", found="-m stands before --: did you mean `apptrain run -- -m my.module --lr 1`?"),
    Mistake(given="apptrain run data", found="unrecognized arguments: data (CMD comes behind --): see `apptrain run --help`"),
    Mistake(given="apptrain plan --nodes a --node-rank 0 my_script.py", found="my_script.py stands before --: did you mean `apptrain plan --nodes a --node-rank 0 -- my_script.py`?"),
    Mistake(given="apptrain launch run.sh", found="run.sh stands before --: did you mean `apptrain launch -- run.sh`?"),
    Mistake(given="apptrain demo --nodes 3 my_script.py", found="my_script.py stands before --: did you mean `apptrain run --nodes 3 -- my_script.py`?"),
    Mistake(given="apptrain run -- --device cpu my_script.py", found="CMD begins with --device: give a script with its arguments, or -m NAME; options come before --"),
    # options of torchrun
    Mistake(given="apptrain run --standalone -- my_script.py", found="--standalone is torchrun's: leave it out: apptrain run --nodes 1 starts one node, and brings its ranks together"),
    Mistake(given="apptrain run --local_ranks_filter=0 -- my_script.py", found="--local_ranks_filter is torchrun's: leave it out: --show-ranks 0 shows rank 0's output alone"),
    Mistake(given="apptrain plan --role trainer -- my_script.py", found="--role is torchrun's: leave it out: nothing here needs it"),
    Mistake(given="apptrain submit --cluster generic --tee 3 -- my_script.py", found="--tee is torchrun's: leave it out: each rank's output is shown, and kept in RUN/logs (--run-dir); --show-ranks 0 shows rank 0's alone"),
    # options and values
    Mistake(given="apptrain run --nproc 2 -- my_script.py", found="unrecognized arguments: --nproc 2: did you mean --nproc-per-node?"),
    Mistake(given="apptrain run -n 2 -- my_script.py", found="unrecognized arguments: -n 2: did you mean --nodes or --nproc-per-node?"),
    Mistake(given="apptrain run --cpu -- my_script.py", found="unrecognized arguments: --cpu: did you mean --device cpu?"),
    Mistake(given="apptrain run --device gpu -- my_script.py", found="--device=gpu: must be one of auto, cpu, cuda: did you mean cuda?"),
    Mistake(given="apptrain run --nodes 2 --gpus 4 -- my_script.py", found="unrecognized arguments: --gpus 4: did you mean --gpus-per-node?"),
    Mistake(given="apptrain run --gpu 4 -- my_script.py", found="unrecognized arguments: --gpu 4: did you mean --gpus-per-node?"),
    Mistake(given="apptrain run --gpus-per-nod 4 -- my_script.py", found="unrecognized arguments: --gpus-per-nod 4: did you mean --gpus-per-node?"),
    Mistake(given="apptrain run --node 2 -- my_script.py", found="unrecognized arguments: --node 2: did you mean --nodes or --node-rank?"),
    Mistake(given="apptrain launch --gpu 4 -- my_script.py", found="unrecognized arguments: --gpu 4: did you mean --device cuda?"),
    Mistake(given="apptrain launch --gpus 4 -- my_script.py", found="unrecognized arguments: --gpus 4: did you mean --nproc-per-node?"),
    Mistake(given="apptrain run --device cuda --nproc-per-node 2 -- my_script.py", found="2 ranks on a node, but this task sees 0 GPUs (none was granted): give --gpus-per-node N, or start fewer ranks"),
    Mistake(given="apptrain run --nodes two -- my_script.py", found="--nodes=two: must be a number from 1"),
    Mistake(given="apptrain plan --profile perlmuter --nodes a --node-rank 0", found="--profile perlmuter: there is no {checkout}/clusters/perlmuter.yaml: did you mean perlmutter?"),
    Mistake(given="apptrain plan --env-file nothere", found="--env-file nothere cannot be read (No such file or directory): give a file as `env -0 >FILE` in a job writes it, or with one NAME=VALUE a line"),
    Mistake(given="apptrain plan -- my_script.py", found="no scheduler's job id is in the environment: on this machine: apptrain run -- CMD; from a login node: apptrain submit; inside a job whose variables a cleaned environment has dropped: --scheduler NAME; on machines of your own: --nodes a,b --node-rank I"),
    Mistake(given="apptrain plan --profile my.yaml --nodes a --node-rank 0", found="my.yaml: request: unknown key patition: did you mean partition?"),
    *(
        Mistake(given=f"apptrain {name} --nodes 2 --node-rank 0 -- my_script.py", found="--nodes 2: give a list of names, such as a,b; the number of nodes is --nnodes (on this machine: apptrain run --nodes N)")
        for name in ("plan", "launch")
    ),
    Mistake(given="apptrain launch -- my_script.py", found="no scheduler's job id is in the environment: on this machine: apptrain run -- CMD; from a login node: apptrain submit; inside a job whose variables a cleaned environment has dropped: --scheduler NAME; on machines of your own: --nodes a,b --node-rank I"),
    # the training
    Mistake(given="apptrain demo step=2", found="train: override: unknown key 'step': did you mean steps? (python -m train --help lists the keys)"),
    Mistake(given="apptrain demo --config digitz", found="train: --config digitz: no such file or shipped config: did you mean digits? give a path or one of cifar10-resnet18, digits, digits-short, imagenet-resnet50, synthetic-resnet50"),
    Mistake(given="apptrain demo --nodes 3 batch_size=128", found="train: batch_size is 128, no multiple of 3 ranks x accumulation 1 = 3: give a multiple of 3"),
    Mistake(given="apptrain run --run-dir of-another -- my_script.py", found="the run directory {folder}/of-another is that of other.py, not of my_script.py: give another with --run-dir, or, where that is its new name, remove {folder}/of-another/manifest.json"),
    # runs of before
    Mistake(given="apptrain compare nothere of-another", found="there is no directory nothere: give a run directory, such as runs/NAME-ID", who="apptrain"),
    Mistake(given="apptrain rerun nothere", found="there is no directory nothere: give a run directory, such as runs/NAME-ID", who="apptrain"),
    Mistake(given="apptrain rerun data", found="data cannot be run again: manifest.json: No such file or directory: give a run directory, such as runs/NAME-ID", who="apptrain"),
    # a submission
    Mistake(given="apptrain submit -- my_script.py", found="--cluster is missing: give one of delta, derecho, gadi, generic, generic-pbs, gwdg-grete, isambard-ai, leonardo, perlmutter, polaris, snellius, vista, or the path of a profile, or run `apptrain site -o {checkout}/clusters/mine.yaml` on your cluster's login node, which writes one; without a profile: sbatch slurm/multinode.sbatch -- CMD, qsub pbs/multinode.pbs"),
    Mistake(given="apptrain submit --cluster perlmuter -- my_script.py", found="--cluster perlmuter: there is no {checkout}/clusters/perlmuter.yaml: did you mean perlmutter?"),
    Mistake(given="apptrain submit --cluster generic --node 8 -- my_script.py", found="--node: no option of submit, of a job or of sbatch: did you mean --nodes or --node-rank?"),
    Mistake(given="apptrain submit --cluster generic --gpu 4 -- my_script.py", found="--gpu: no option of submit, of a job or of sbatch: did you mean --gpus-per-node or --gpu-bind?"),
    Mistake(given="apptrain submit --cluster generic --device cpu my_script.py --lr 1", found="my_script.py stands before --: did you mean `apptrain submit --cluster generic --device cpu -- my_script.py --lr 1`?"),
    Mistake(given="apptrain submit --cluster generic -- nothere.py", found="CMD nothere.py does not exist in {folder}: check the spelling; a module is given as -m NAME, a program that is no Python script needs --no-python"),
    Mistake(given="apptrain submit --cluster generic -- torchrun my_script.py", found="CMD begins with torchrun: leave it and its options out, apptrain starts the ranks: -- my_script.py"),
    Mistake(given="apptrain submit --cluster generic --nproc-per-node 8 -- my_script.py", found="8 ranks on a node, but this task sees 1 GPU (--gpus-per-node): request more GPUs per node, or start fewer ranks"),
    Mistake(given="apptrain submit --cluster generic --gpus-per-node 8 -- my_script.py", found="--gpus-per-node 8: a node of generic.yaml has 1: ask for more nodes"),
    Mistake(given="apptrain submit --cluster generic --time 00:02:00 -- my_script.py", found="--time 00:02:00: the ranks are asked to save 120 s before its end, which is before it begins: ask for more time, or warn later with --options=--signal=B:USR2@SECONDS"),
    Mistake(given="apptrain submit --cluster generic --run-dir of-another -- my_script.py", found="the run directory {folder}/of-another is that of other.py, not of my_script.py: give another with --run-dir, or, where that is its new name, remove {folder}/of-another/manifest.json"),
    Mistake(given="apptrain submit --cluster generic --nnodes 3 -- my_script.py", found="--nnodes 3, but this step has 2 nodes: request as many nodes as you want to use"),
    Mistake(given="apptrain submit --cluster generic --stop-before 60 -- my_script.py", found="--stop-before 60: under Slurm it is sbatch --signal=B:USR2@SECONDS"),
    Mistake(given="apptrain run --doctor --on-failure requeue", found="--doctor looks once: leave --on-failure requeue out"),
    Mistake(given="apptrain demo --doctor", found="--doctor takes no script, and CMD is `-m train --config digits`: leave one of them out (only --json may stand behind --)"),
    *(
        Mistake(given=f"apptrain {name} --doctor -- my_script.py", found="--doctor takes no script, and CMD is `my_script.py`: leave one of them out (only --json may stand behind --)", who=who)
        for name, who in COMMANDS.items()
    ),
    Mistake(given="apptrain submit --cluster generic --on-failure restat -- my_script.py", found="--on-failure=restat: must be one of stop, requeue, restart: did you mean restart?"),
    Mistake(given="apptrain submit --cluster generic -- -m train --config digits step=2", found="train: override: unknown key 'step': did you mean steps? (python -m train --help lists the keys)"),
    Mistake(given="apptrain submit --cluster my.yaml -- my_script.py", found="my.yaml: request: unknown key patition: did you mean partition?"),
    Mistake(given="apptrain submit --cluster good.yaml -- my_script.py", found="--cluster good.yaml: good.host is not made from good.yaml as that is now: make -C {checkout} profiles PROFILE='{folder}/good.yaml'"),
    Mistake(given="apptrain submit --cluster generic -- my_script.py", found="there is no image {folder}/none.sif: correct the path, or leave it out: `make -C {checkout} image` builds one of ours"),
    Mistake(given="apptrain submit --follow my_job", found="--follow my_job: give a job's id, as sbatch or qsub has printed it"),
    Mistake(given="apptrain submit --follow 123", found="--follow: neither scontrol nor qstat is in PATH: follow a job on a login node of its cluster"),
    # a job script that nobody submitted, before an image is there
    *(
        Mistake(given=f"bash {{checkout}}/slurm/multinode.sbatch{words}", found="this is no Slurm job: sbatch slurm/multinode.sbatch, or salloc and then bash slurm/multinode.sbatch", who="apptrain")
        for words in ("", " --help", " -- my_script.py")
    ),
    Mistake(given="python3 {checkout}/apptrain run -- my_script.py", found="this is a program of its own: start it as ./apptrain, without python3", who="apptrain"),
    Mistake(given="dash {checkout}/slurm/multinode.sbatch", found="this is for bash: sbatch slurm/multinode.sbatch, or salloc and then bash {checkout}/slurm/multinode.sbatch", who="apptrain"),
    Mistake(given="dash {checkout}/pbs/multinode.pbs", found="this is for bash: qsub pbs/multinode.pbs, or qsub -I and then bash {checkout}/pbs/multinode.pbs", who="apptrain"),
    # make
    Mistake(given="make -C {checkout} submit CLUSTER=generic NODE=8", found="*** NODE: no target reads this: did you mean NODES?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} demo node=3", found="*** node: no target reads this: did you mean NODES?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} demmo", found="*** demmo: no target has this name: did you mean demo?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} run", found="*** run: no target has this name: did you mean apptrain run?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} doctor", found="*** doctor: no target has this name: did you mean apptrain doctor?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} build", found="*** build: no target has this name: did you mean apptrain image build?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} install", found="*** install: no target has this name: did you mean make venv, or apptrain image build?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} train", found="*** train: no target has this name: did you mean apptrain demo?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} frobnicate", found="*** frobnicate: no target has this name: make help lists them.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} submit CLUSTER=generic my_script.py", found="*** my_script.py: no target has this name: did you mean make submit CLUSTER=generic ARGS='-- my_script.py'?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} demo my_script.py", found="*** my_script.py: no target has this name: did you mean ./apptrain run -- my_script.py?.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} submit CLUSTER=generic README.md", found="*** README.md: no target has this name: make help lists them.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} demo IN=imge", found="*** IN=imge: give IN=venv or IN=image.  Stop.", who="Makefile", status=2),
    Mistake(given="make -C {checkout} submit CLUSTER=generic ARGS=nothere.py", found="unrecognized arguments: nothere.py (CMD comes behind --): see `apptrain submit --help`", status=2),
    Mistake(given="make -C {checkout} submit CLUSTER=generic ARGS='-- nothere.py'", found="CMD nothere.py does not exist in {checkout}: check the spelling; a module is given as -m NAME, a program that is no Python script needs --no-python", status=2),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class User:
    folder: Path
    env: dict[str, str]

    def run(self, given: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-c", given],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )

    def started(self) -> list[str]:
        calls = Path(self.env["CALLS"])
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    """Somebody with a script, on a login node with this venv; whatever is started there, is told."""
    folder, bin_ = tmp_path / "work", tmp_path / "bin"
    for path in (folder / "data", folder / "of-another", bin_):
        path.mkdir(parents=True)
    for name in STARTED:
        (bin_ / name).write_text(RECORDS)
        (bin_ / name).chmod(0o755)
    (bin_ / "apptrain").symlink_to(CHECKOUT / "apptrain")
    for name in ("my_script.py", "run.sh", "data/train.py"):
        (folder / name).touch()
    (folder / "good.yaml").write_text(SITE)
    (folder / "my.yaml").write_text(SITE.replace("{time:", "{patition: gpu, time:"))
    before = {"attempts": [{"command": ["other.py", "--lr", "1"]}]}
    (folder / "of-another" / "manifest.json").write_text(json.dumps(before))
    env = {
        "PATH": f"{bin_}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "VENV": sys.prefix,
        "CALLS": str(tmp_path / "calls"),
        "APPTRAIN_IMAGE": str(folder / "none.sif"),
    }
    yield User(folder=folder, env=env)
    assert not (folder / "runs").exists()
    shutil.rmtree(folder)


def test_a_module_of_the_users_own_that_does_not_run_is_said_to_be_there(tmp_path: Path) -> None:
    def said(*command: str) -> str:
        return mistakes.own_module_left_out(command, tmp_path)

    assert said("-m", "train") == ""
    (tmp_path / "train").mkdir()
    how = "for yours: --no-python -- python -m"
    assert (
        said("-m", "train.main", "x") == f"-m train.main is apptrain's own, not train here: {how} train.main"
    )
    (tmp_path / "train.py").touch()
    assert said("-m", "train") == f"-m train is apptrain's own, not train.py here: {how} train"
    assert said("train.py") == said("-m", "trainer") == said("-m", "entrypoint.doctor") == ""


def test_there_are_thirty_and_none_twice() -> None:
    given = [mistake.given for mistake in TRIED]
    assert len(set(given)) == len(given) >= 30


IN_SHELL = {
    *(mistake.given for mistake in TRIED if not re.match("apptrain [^$&]*$", mistake.given)),
    *{mistake.given.split()[1]: mistake.given for mistake in TRIED}.values(),
}
"""What only a shell reads, and the last line of each command."""


@pytest.mark.parametrize(
    "mistake", [one for one in TRIED if one.given not in IN_SHELL], ids=lambda one: one.given
)
def test_a_mistake_is_one_line_that_has_the_remedy(
    mistake: Mistake, user: User, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(mistake.given)
    monkeypatch.chdir(user.folder)
    monkeypatch.setattr(sys, "argv", arguments)
    with patch.dict(os.environ, {**user.env, "PWD": str(user.folder)}, clear=True):
        status = apptrain.main()
    found = mistake.found.format(folder=user.folder, checkout=CHECKOUT)
    assert (status, *capsys.readouterr()) == (mistake.status, "", f"{mistake.who}: {found}\n")
    assert user.started() == []


@pytest.mark.parametrize(
    "mistake", [one for one in TRIED if one.given in IN_SHELL], ids=lambda one: one.given
)
def test_so_it_is_for_who_types_it(mistake: Mistake, user: User) -> None:
    ended = user.run(mistake.given.replace("{checkout}", str(CHECKOUT)))
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("make: ")]
    found = mistake.found.format(folder=user.folder, checkout=CHECKOUT)
    assert len(lines) == 1
    who, _, said = lines[0].partition(": ")
    assert (who.partition(":")[0], said) == (mistake.who, found)
    assert ended.returncode == mistake.status
    assert not [line for line in ended.stdout.splitlines() if not line.startswith("make: ")]
    assert user.started() == []


def test_a_submission_that_is_right_says_what_will_run_and_is_made(user: User) -> None:
    """So that the table above does not pass for another reason."""
    (user.folder / "none.sif").write_bytes(SIF)
    done = user.run("apptrain submit --cluster generic --nodes 3 -- my_script.py --lr 1")
    assert done.returncode == 0
    assert done.stderr == (
        "apptrain: 3 nodes x 1 rank on cuda, mode torchrun\n"
        f"apptrain: runs my_script.py --lr 1 in {user.folder}\n"
        f"apptrain: image {user.folder}/none.sif\n"
        f"apptrain: run directory {user.folder}/runs/NAME-JOB\n"
        "apptrain: generic.yaml was never run there (tested is empty): check this:\n"
    )
    (call,) = user.started()
    assert call.endswith("slurm/multinode.sbatch --profile generic -- my_script.py --lr 1")


def test_what_may_be_meant_is_not_refused(user: User) -> None:
    """Programs that need --no-python and have it, a launcher that CMD itself is, and words that leave open what is granted."""
    (user.folder / "none.sif").write_bytes(SIF)
    submit = "apptrain submit --cluster generic --dry-run"
    for given in (
        "--no-python -- bash run.sh",
        "--no-python -- python my_script.py",
        "--mode exec --no-python -- torchrun my_script.py",
        "--mode exec -- -m torch.distributed.run my_script.py",
        "--options=--gres=gpu:h100:4 --nproc-per-node 4 -- my_script.py",
        "--run-dir of-another -- ./other.py",
        "-- /not/on/this/node.py",
        "-- -m some.module",
    ):
        (user.folder / "other.py").touch()
        done = user.run(f"{submit} {given}")
        assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr


def test_the_bin_of_this_python_is_first_in_the_ranks_path_unless_its_python_is_found_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("chosen", "other", "empty"):
        (tmp_path / name).mkdir()
    for name in ("chosen/python", "chosen/python3", "other/python3"):
        (tmp_path / name).touch(mode=0o755)
    chosen, other, empty = (str(tmp_path / name) for name in ("chosen", "other", "empty"))
    monkeypatch.setattr(sys, "executable", f"{chosen}/python3")

    def path_for(*folders: str) -> list[str]:
        return mistakes.search_path({"PATH": ":".join(folders)}).split(":")

    assert path_for(other, chosen) == [chosen, other, chosen]
    assert path_for(empty) == [chosen, empty]
    assert path_for(empty, chosen, other) == [empty, chosen, other]
    (tmp_path / "other" / "python").touch(mode=0o755)
    assert path_for(other, chosen) == [chosen, other, chosen]
