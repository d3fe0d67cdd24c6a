"""What no CPU can try, on a machine with NVIDIA GPUs: `make test-gpu`.

    python -P -m gpu [--list] [--only WORD] [--output FILE]      with tests/ in PYTHONPATH (tools/gpu.sh)

Needs a checkout and a Python with a CUDA torch and what the training program imports; no network, no root, no
scheduler, no venv, no pytest. The modules import each other as neighbours, because `tests` may be somebody
else's package on such a machine.
"""
