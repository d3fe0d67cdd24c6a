"""The last rank asks for more memory than its GPU has, while the others wait for it in an all_reduce."""

import os

import torch
import torch.distributed as dist

rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
dist.all_reduce(torch.ones(1, device=device))
if rank == size - 1:
    torch.empty(8 * torch.cuda.get_device_properties(device).total_memory, dtype=torch.uint8, device=device)
dist.all_reduce(torch.ones(1, device=device))
torch.cuda.synchronize()
