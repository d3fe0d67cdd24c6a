"""Unpack the data once on each node, on its own disk: the first rank does it, the others wait.

This machine:  tar -cf data.tar -C dataset . && apptrain run -- examples/staged.py data.tar
Slurm:         sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch -- examples/staged.py /scratch/me/data.tar
PBS:           APPTRAIN_ARGS='-- examples/staged.py /scratch/me/data.tar' qsub -v APPTRAIN_ARGS pbs/multinode.pbs

Start one task a node, as these lines do: with one task a rank each task has a folder of its own.
"""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

dist.init_process_group(timeout=timedelta(hours=1))  # longer than the unpacking
run = hashlib.sha256(os.environ["APPTRAIN_RUN_DIR"].encode()).hexdigest()[:16]  # no other run has this one
folder = Path(tempfile.gettempdir(), f"data-{run}-{os.environ['APPTRAIN_NODE']}")
if os.environ["LOCAL_RANK"] == "0":
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier start, perhaps with other data
    folder.mkdir(mode=0o700)  # fails if it is there still: it may be another user's
    with tarfile.open(sys.argv[1]) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # from 3.11.4 on
        packed.extractall(folder)
dist.barrier()

print("rank", dist.get_rank(), "has", len(list(folder.iterdir())), "files", flush=True)
dist.destroy_process_group()
