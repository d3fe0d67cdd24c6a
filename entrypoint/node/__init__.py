"""What one machine is and has: its processes, addresses, GPUs, driver and memory.

The kernel and NVIDIA's libraries are asked here. gpu.py and network.py also refuse what cannot work on this
node.
"""
