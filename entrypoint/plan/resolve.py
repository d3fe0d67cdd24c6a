"""Makes the plan of an environment and a command line. `resolve` is the entry: it reads the profile first,
then the other options, then the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrypoint.plan import profile, rules, sources
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.plan.sources import Settings
from entrypoint.schedulers import choice
from entrypoint.schedulers.request import PlacementRequest


def resolve(
    env: Mapping[str, str], given: Mapping[str, str | None], command: Sequence[str], *, hostname: str | None
) -> tuple[LaunchPlan, Settings]:
    """The plan for an environment and the flags' texts. `hostname` is this machine's, None for a recording.

    Raises BadInput.
    """
    flags, cmd = sources.merged(given, command, env)
    profile_name = flags.get("profile") or env.get("APPTRAIN_PROFILE")
    site = profile.load(profile_name) if profile_name else profile.Profile()
    settings = sources.resolve(flags, env, site.launch, site.name, cmd)
    request = PlacementRequest(
        nodes=settings.value("nodes"),
        node_rank=settings.value("node-rank"),
        nodefile=settings.value("nodefile"),
        hostname=settings.value("hostname") or hostname,
    )
    allocation = choice.allocation(env, settings.value("scheduler"), request)
    return rules.build(env, allocation, settings, site), settings
