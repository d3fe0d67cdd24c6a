"""One thread for torch: a test's tensors are so small that threads cost it ten times what they bring, and where
workers share the cores they wait for each other besides."""

import torch

torch.set_num_threads(1)
