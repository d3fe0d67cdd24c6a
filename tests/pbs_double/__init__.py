"""A double of OpenPBS: a server, a MoM on each host, and the commands that a job and its user call.

It is as unkind as the recordings under tests/recordings/openpbs, to which tests/unit/tests/test_pbs_double.py holds it.
Its own files run on hosts that have Python's standard library alone: only `cluster.py`, `daemons.py` and
`local.py`, which start it, are for tests.

    request.py   what a request asks for, and what the scheduler makes of it
    variables.py the environments of the script and of tasks
    wire.py      messages between the processes
    serving.py   how server and MoMs take them
    server.py    jobs, from submission to the end
    mom.py       one host: scripts, tasks, signals, output
    commands.py  qsub, qstat, qdel, qalter, qrerun, qsig, pbsdsh, pbs_tmrsh
"""
