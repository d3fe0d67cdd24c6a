"""The image's own test, on the CPU: what is shipped imports and runs. `apptainer test IMAGE`.

Each part prints one line; the first that fails ends it with status 1.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


def modules() -> str:
    """Everything that our packages and their requirements are used for imports."""
    names = ["torch", "torchvision", "yaml", "psutil", "safetensors.torch", "tqdm", "matplotlib.pyplot"]
    names += ["torch.utils.tensorboard", "torch.distributed.run", "entrypoint.cli.main", "train.__main__"]
    for name in names:
        importlib.import_module(name)
    return f"{len(names)} modules of {len(list(metadata.distributions()))} packages"


def stack() -> str:
    """The versions are those of the stack."""
    import torch

    said = json.loads(Path(os.environ["APPTRAIN_STACK"]).read_text())
    if torch.version.cuda != said["cuda"]:
        raise RuntimeError(f"torch has CUDA {torch.version.cuda}, the stack {said['name']} {said['cuda']}")
    return f"{said['name']}: torch {torch.__version__}, CUDA {torch.version.cuda}"


def rdma() -> str:
    """What NCCL opens at run time for InfiniBand and RoCE is there."""
    import ctypes

    names = ["libibverbs.so.1", "librdmacm.so.1", "libnl-3.so.200", "libnl-route-3.so.200", "libnuma.so.1"]
    for name in names:
        ctypes.CDLL(name)
    return " ".join(names)


def compiled_model() -> str:
    """torch.compile finds its compiler and its headers."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    images = torch.randn(4, 8)
    difference = float((torch.compile(model)(images) - model(images)).abs().max().detach())
    if difference > 1e-5:
        raise RuntimeError(f"a compiled model differs by {difference}")
    return f"torch.compile agrees to {difference:.1e}"


def world() -> str:
    """Two nodes meet through the launcher, with every option of torchrun that it uses, and sum over gloo."""
    command = [sys.executable, "-P", "-m", "entrypoint.cli.embedded", "--nodes", "2"]
    command += ["--", "-m", "train.hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=os.environ["TMPDIR"])
    if done.returncode or done.stdout.count("hello from") != 2:
        raise RuntimeError(f"status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return "2 nodes said hello and agreed on a sum"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        caches = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")
        os.environ.update(dict.fromkeys(caches, folder))
        tempfile.tempdir = folder
        for part in (modules, stack, rdma, compiled_model, world):
            try:
                print(f"apptrain: selftest: {part.__name__}: {part()}", flush=True)
            except Exception as error:
                print(f"apptrain: selftest: {part.__name__} failed: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
