"""Whether nodes are fit to train: what each has, what is measured among them, and what to do if one is not.

`facts` reads, `probes` measures, `judge` says what is wrong, `table` prints it. `preflight` is the cheap part
before each launch, `fabric` the proof of the network while ranks run. `python -m entrypoint.doctor` is the
program of a rank.
"""
