"""What one machine is and has: its processes, addresses, GPUs, driver and memory.

Here the kernel and NVIDIA's libraries are asked; what their answers mean for a job is decided elsewhere.
"""
