"""A Slurm cluster in namespaces of this machine: a controller, a login host and compute nodes (root, Linux).

    with up(binds=[Bind(source=checkout, target=checkout)]) as cluster:
        job = cluster.submit(["--nodes=3", "--wrap=srun hostname"], user="alice")
        assert cluster.wait(job).state == "COMPLETED"

By hand: `python -m tests.vcluster --help`, and docs/cluster.md.
"""

from tests.vcluster.cluster import Cluster, boot, find, up
from tests.vcluster.jobs import Job

__all__ = ["Cluster", "Job", "boot", "find", "up"]
