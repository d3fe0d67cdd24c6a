"""What a machine tells of its site, for a first profile: `apptrain site` (clusters/site.py).

`ask.py` asks, `slurm.py`, `pbs.py` and `host.py` each understand one source of answers, and `draft.py` writes
them down. An answer keeps where it came from, and what could not be known is a question. Python 3.9 runs it.
"""
