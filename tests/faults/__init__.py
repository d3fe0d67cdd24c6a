"""A training run on the test cluster, broken in every way that jobs break, and measured.

`cases` says what can happen and how it is done, `run` goes through it with a real job, `watch` notes when what
appeared, `table` shows the figures. tests/cluster/test_faults.py goes through every case once, `make faults` as often
as one likes.
"""
