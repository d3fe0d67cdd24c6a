"""What a log, a run directory or a job script tells, offline: `apptrain explain`.

Begin at command.py. catalogue.yaml holds what is known; scan.py finds its lines in logs of any size, judge.py
names the first cause, run.py asks a run directory of ours first, jobscript.py reads job scripts. Nothing that
is read is run. Works with the Python of a login node, from 3.9 on, and without PyYAML.
"""
