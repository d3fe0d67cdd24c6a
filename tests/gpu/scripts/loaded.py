"""The file of the libcuda that torch has loaded, as JSON."""

import json
from pathlib import Path

import torch

torch.ones(1, device="cuda").sum().item()
mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
print(json.dumps(next(str(Path(name).resolve()) for name in mapped if "libcuda.so" in name)))
