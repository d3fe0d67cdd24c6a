"""Reads what a scheduler granted to a job script, and what starts tasks there. `granted` is the entry; each
scheduler has a module.

These modules see the job script's variables, before there are tasks. What a task sees is in
entrypoint/schedulers, what a login node is told in clusters/follow.py.
"""

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
