"""Python's debugger on one rank, over a file that only you can open.

Copy this file beside your script, and write there:     if dist.get_rank() == 1: attach.attach()

This machine:  apptrain run --hang-timeout 0 -- my_script.py
Slurm:         sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch --hang-timeout 0 -- my_script.py
PBS:           APPTRAIN_ARGS='--hang-timeout 0 -- my_script.py' qsub -v APPTRAIN_ARGS pbs/multinode.pbs

Then type, on the node of that rank, the line that it has printed: nc -U /tmp/tmpab12cd34/pdb
"""

import os
import pdb
import shutil
import socket
import sys
import tempfile


def attach():
    """Wait until somebody connects, and stop at the line that called this."""
    folder = tempfile.mkdtemp(dir="/tmp")  # TMPDIR may be long: the path of a socket has 107 bytes at most
    path = os.path.join(folder, "pdb")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("rank", os.environ["RANK"], "waits: nc -U", path, flush=True)
        connection, _ = server.accept()
    shutil.rmtree(folder)
    commands, answers = connection.makefile("r"), connection.makefile("w")
    pdb.Pdb(stdin=commands, stdout=answers).set_trace(sys._getframe(1))
