"""Run in an image that is being built: what is installed, as JSON on stdout."""

import json
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch
import torchvision  # type: ignore[import-untyped]

release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
cudnn: int = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
found = {
    "os": f"Debian {Path('/etc/debian_version').read_text().strip()} ({release['VERSION_CODENAME']})",
    "python": platform.python_version(),
    "torch": torch.__version__.partition("+")[0],
    "torchvision": torchvision.__version__.partition("+")[0],
    "cuda": str(torch.version.cuda),
    "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    "compute_capability": [
        f"{int(name[3:-1])}.{name[-1]}"
        for name in str(torch._C._cuda_getArchFlags()).split()
        if name[:3] == "sm_"
    ],
}
packages = {
    distribution.metadata["Name"].lower().replace("_", "-"): distribution.version
    for distribution in metadata.distributions()
}
json.dump({"versions": found, "python_packages": dict(sorted(packages.items()))}, sys.stdout, indent=2)
