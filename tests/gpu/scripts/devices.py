"""The GPUs that torch sees, in its order: their names and UUIDs, as JSON."""

import json

import torch

every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[one.name, str(one.uuid)] for one in every]))
