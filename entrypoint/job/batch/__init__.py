"""What a job script's scheduler granted, and what it takes to start tasks there.

The secret: that the job scripts of all schedulers need the same few things. One module a scheduler, which
reads what that says of a job; it sees the job script's variables, before there are tasks. What a task sees is
entrypoint/schedulers, and what a login node is told clusters/follow.py."""

from collections.abc import Mapping

from entrypoint.job.batch import pbs, slurm
from entrypoint.job.batch.granted import Granted
from entrypoint.job.handover import Facts
from entrypoint.plan.profile import Profile
from entrypoint.plan.sources import Settings

__all__ = ["Granted", "granted"]
_MODULES = {"slurm": slurm.granted, "pbs": pbs.granted}


def granted(env: Mapping[str, str], facts: Facts, settings: Settings, site: Profile) -> Granted:
    """What the scheduler of this job script granted. Raises BadInput."""
    return _MODULES[facts.one("scheduler")](env, facts, settings, site)
