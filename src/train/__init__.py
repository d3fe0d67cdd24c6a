"""The reference training program: `python -m train --config digits`.

It knows ranks, not schedulers: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR ... as torchrun sets them.
Importing the package costs nothing; torch is imported when a run begins.
"""
