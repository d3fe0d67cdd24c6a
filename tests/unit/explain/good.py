"""What good runs of many programs print, written by us: `lines` gives as many as are wanted, of a seed.

Each sentence has words of errors in a good sense, or is a warning that programs print at each start.
"""

import random
from collections.abc import Iterator

TEMPLATES = (
    "[rank{r}] step {n} loss {f:.4f} lr {f:.2e} images_per_s {n}.{r} grad_norm {f:.3f}",
    "2026-03-02 10:1{r}:21,{n:03} INFO trainer: epoch {r} validation error {f:.3f} error rate {f:.4f}",
    "Epoch {r}:  {r}%|###       | {n}/5000 [00:1{r}<02:10,  9.21it/s, loss={f:.3f}, v_num=0]\r",
    "W0302 10:10:21.{n:06} 4711 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "gpu-a0{r}:{n}:{n} [{r}] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.",
    "gpu-a0{r}:{n}:{n} [{r}] NCCL INFO NET/IB : No device found.",
    "gpu-a0{r}:{n}:{n} [{r}] NCCL INFO Bootstrap : Using eth0:10.0.0.{r}<0>",
    "gpu-a0{r}:{n}:{n} [{r}] NCCL INFO Connected all rings, use ring PXN 0 GDR 1",
    "gpu-a0{r}:{n}:{n} [{r}] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 4 nics)",
    "[rank{r}]:[W302 10:10:21.{n:06} ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called before program exit",
    "[W302 10:10:21.{n:06} socket.cpp:759] [c10d] The client socket has failed to connect to [gpu-a01]:29400 (errno: 111 - Connection refused).",
    "[W socket.cpp:697] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
    "UserWarning: The given NumPy array is not writable, and PyTorch does not support non-writable tensors.",
    "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated. Please use `torch.amp.autocast` instead.",
    "Some weights of BertModel were not initialized from the model checkpoint and are newly initialized: ['cls.weight']",
    "[2026-03-02 10:10:21,{n:03}] [INFO] [launch.py:351:main] Process {n} exits successfully.",
    "[2026-03-02 10:10:21,{n:03}] [INFO] [config.py:997:print]   dump_state ................... False",
    "GPU available: True (cuda), used: True",
    "TPU available: False, using: 0 TPU cores",
    "`Trainer.fit` stopped: `max_epochs=10` reached.",
    "INFO:    Environment variable SINGULARITY_BIND is set, but APPTAINER_BIND is preferred",
    "INFO:    gocryptfs not found, will not be able to use gocryptfs",
    "WARNING: while bind mounting '/etc/localtime:/etc/localtime': skipped",
    "Loading cuda/12.4  Loading requirement: gcc/12.2",
    "srun: job {n} queued and waiting for resources",
    "srun: job {n} has been allocated resources",
    "wandb: Tracking run with wandb version 0.19.{r}",
    "wandb: W&B syncing is set to `offline` in this directory.",
    "INFO:root:Added key: store_based_barrier_key:1 to store for rank: {r}",
    "INFO:root:Rank {r}: Completed store-based barrier for key:store_based_barrier_key:1 with 8 nodes.",
    "INFO:root:Reducer buckets have been rebuilt in this iteration.",
    "2026-03-02T10:10:2{r} data: 0 files failed, {n} files read, 0 timeouts, 0 errors",
    "test_timeout_is_raised ... ok: TimeoutError was expected",
    "checkpoint saved to /scratch/me/runs/{n}/step-{n}.pt in {f:.2f} s, memory {n} MiB of 81559 MiB",
    "max memory allocated: {n} MB; nothing was killed; no process exited early",
    "Downloading: 100%|##########| {n}/{n} [00:01<00:00, 1.02MB/s]",
    "apptrain: node {r} joined after {f:.1f} s",
    "Job {n} finished, exit status 0, used {n}kb of mem, walltime 00:1{r}:00",
    "resources_used.mem = {n}kb resources_used.walltime = 00:10:0{r} Exit_status=0",
)


def lines(count: int, seed: int = 1) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(count):
        yield draw.choice(TEMPLATES).format(
            r=draw.randrange(8), n=draw.randrange(1000, 9999), f=draw.random()
        )
