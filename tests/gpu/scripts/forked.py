"""Whether a forked child may use the device: forked.py cpu|cuda import|device_count, the answer as JSON.

before, after  whether CUDA is initialised in the parent before the fork, and once the child is done
child, parent  whether each could compute, the parent last
"""

import json
import os
import sys

import torch


def computes(device: str) -> bool:
    try:
        return torch.ones(8, device=device).sum().item() == 8
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return False


def main(device: str, first: str) -> None:
    if first == "device_count":
        torch.cuda.device_count()
    before = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    child = os.fork()
    if not child:
        os._exit(not computes(device))
    _, status = os.waitpid(child, 0)
    after = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    found = {"before": before, "child": status == 0, "after": after, "parent": computes(device)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
