"""What one attempt of a launch is given, as values that do not change, and what follows from them alone.

`Given.of_launch` is the first attempt's; `following` is that of the one after it. Nothing is looked at here
but which torch is installed.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from entrypoint import __version__
from entrypoint.core import checkout
from entrypoint.core.frozen import dataclass
from entrypoint.job.handover import has_host_half
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet import terms
from entrypoint.meet.identity import Identity
from entrypoint.node import gpu
from entrypoint.plan import commands, mistakes, passed
from entrypoint.plan.launch_plan import LaunchPlan, with_master_addr, with_members
from entrypoint.plan.origin import derived_from
from entrypoint.plan.sources import Settings
from entrypoint.run.finished import FinishedAttempt
from entrypoint.run.node_state import HangPolicy
from entrypoint.run.restart import Restarts
from entrypoint.schedulers import embedded

OF_PASSING = (passed.NOT_PASSED, passed.PASSED)
FIRST_STEP = 60.0
"""Seconds after which a rank without a step is looked at for processes of its own that wait."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What an attempt begins with."""

    plan: LaunchPlan
    """Before anything was found out, with the nodes that are expected."""
    settings: Settings
    env: Mapping[str, str]
    """Of this process, without what tells which variables pass."""
    not_passed: tuple[str, ...]
    """Names of variables of the user that no rank gets."""
    wished: tuple[str, ...]
    """Names of those that somebody has set for the ranks."""
    restarts: Restarts | None
    """None if no attempt may follow inside the allocation."""
    before: FinishedAttempt | None = None
    """The attempt that this one restarts."""

    @classmethod
    def of_launch(cls, plan: LaunchPlan, settings: Settings, env: Mapping[str, str]) -> "Given":
        return cls(
            plan=plan,
            settings=settings,
            env={name: value for name, value in env.items() if name not in OF_PASSING},
            not_passed=tuple(sorted({*env.get(passed.NOT_PASSED, "").split()})),
            wished=tuple(passed.wished(env)),
            restarts=Restarts.of(plan, settings) if settings.on_failure.restarts_in_place else None,
        )

    def following(self, before: FinishedAttempt, restarts: Restarts) -> "Given":
        """For the attempt after that one, with the nodes that are not known to be lost."""
        plan = with_members(restarts.plan, restarts.members(), before.plan.attempt + 1)
        return replace(self, plan=plan, before=before, restarts=restarts)

    @property
    def run_dir(self) -> RunDirectory:
        return RunDirectory(Path(self.plan.run_dir), self.plan.attempt)

    @property
    def counts_attempts(self) -> bool:
        """Whether whoever started us does: then no file of this attempt's number is an older run's."""
        return has_host_half(self.env)

    @property
    def has_job_script(self) -> bool:
        """Whether one decides what follows; `apptrain run` counts attempts too, and ends with the last."""
        return self.counts_attempts and self.plan.allocation.scheduler != embedded.NAME

    @property
    def port_advice(self) -> str:
        """What to do about a port that another program has: a launch by hand has no next attempt."""
        is_last = not self.counts_attempts and self.restarts is None
        return terms.OTHER_PORT if self.plan.port_is_derived and not is_last else terms.CHOOSE_PORT

    def planned(self, members: Sequence[int], first: str) -> LaunchPlan:
        """The plan for these nodes; `first`: node 0's address if its name misleads, else empty."""
        plan = with_members(self.plan, members, self.plan.attempt)
        return with_master_addr(plan, first, derived_from("join")) if first else plan

    @property
    def again(self) -> float:
        """Seconds between the first two looks at ranks that make no step."""
        return float(self.settings.value("hang-timeout")) / 5 or terms.JobBounds.again

    @property
    def timeouts(self) -> terms.Timeouts:
        """The bounds of the meeting of the nodes."""
        given = terms.Timeouts(
            join=self.settings.value("join-timeout"),
            peer=self.settings.value("peer-timeout"),
            again=self.again,
        )
        return self.restarts.timeouts(given) if self.restarts else given

    @property
    def hang_policy(self) -> HangPolicy:
        return HangPolicy(
            step=self.settings.value("hang-timeout"),
            silence=self.settings.value("silence-timeout"),
            start=FIRST_STEP,
            is_chosen=self.settings.given("hang-timeout"),
            again=self.again,
        )

    def rank_env(self, plan: LaunchPlan, hooks: Path) -> dict[str, str]:
        """The whole environment of the ranks. `hooks`: a folder of modules that their Python imports."""
        dropped = passed.stale(self.env)
        env = {name: value for name, value in self.env.items() if name not in dropped} | dict(plan.env)
        env["PATH"] = mistakes.search_path(env)
        paths = env.get("PYTHONPATH", "")
        if not commands.our_package(plan.command):
            paths = checkout.behind(paths)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [paths, str(hooks)]))
        return env


def identity(
    plan: LaunchPlan, env: Mapping[str, str], contact: str, findings: Mapping[str, str] = MappingProxyType({})
) -> Identity:
    """What this node (in `rank` mode this task) tells of itself."""
    stack = gpu.stack_of_image(env)
    return Identity(
        job_id=plan.allocation.job_id,
        attempt=plan.attempt,
        node_rank=plan.place,
        local_rank=plan.local_rank,
        name=plan.node,
        nnodes=plan.allocation.nnodes,
        nproc_per_node=plan.nproc_per_node,
        mode=plan.mode,
        device=plan.device,
        image_id=env.get("APPTRAIN_IMAGE_ID", ""),
        lock_digest=stack.lock if stack else "",
        versions={"python": sys.version.split()[0], "apptrain": __version__, "torch": version_of_torch()},
        contact=contact,
        findings=dict(findings),
    )


def version_of_torch() -> str:
    """Nothing is imported. Empty where it is not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    folders = [path.stem for path in Path(spec.origin).parents[1].glob("torch-*.dist-info")]
    if len(folders) == 1:
        return folders[0].removeprefix("torch-")  # as its metadata say, whose reading takes 13 ms

    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return ""
