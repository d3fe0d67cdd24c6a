"""Has this node meet the others of its job: what it says of itself, where it listens, what it may wait for.
Begin at `Peers.meet`.

It reads in the run directory if a node that has not come has ended already.
"""

import asyncio
import contextlib
import importlib.metadata
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from entrypoint import __version__
from entrypoint.doctor import preflight
from entrypoint.doctor.preflight import Preflight
from entrypoint.job import outcome
from entrypoint.job.handover import has_host_half
from entrypoint.job.rundir import RunDirectory, read_key
from entrypoint.meet import join, reach, terms
from entrypoint.meet.identity import Identity
from entrypoint.meet.link import Link
from entrypoint.node import gpu, network
from entrypoint.plan.launch_plan import LaunchPlan, with_master_addr, with_members
from entrypoint.plan.origin import derived_from
from entrypoint.plan.sources import Settings
from entrypoint.run.restart import Restarts


@dataclass(kw_only=True)
class Peers:
    """Of one attempt. `granted`: its plan before anything was found out."""

    granted: LaunchPlan
    settings: Settings
    env: Mapping[str, str]
    run_dir: RunDirectory
    restarts: Restarts | None
    """Where they may follow."""
    is_restart: bool
    again: float
    """Seconds between the first two looks at ranks that make no step."""
    say: Callable[[str], None]
    say_once: Callable[[str], None]
    """Says what is the same for all nodes."""
    find: Callable[[LaunchPlan], Awaitable[network.Endpoint]]
    """Finds what only this node knows of the network."""
    preflight: Preflight | None = None
    """What this node has found of itself, once it goes to meet the others; None where nobody asked."""

    def planned(self, members: Sequence[int], first: str) -> LaunchPlan:
        """The plan for these nodes; `first`: node 0's address where its name misleads."""
        plan = with_members(self.granted, members, self.granted.attempt)
        return with_master_addr(plan, first, derived_from("join")) if first else plan

    async def meet(self, plan: LaunchPlan, endpoint: network.Endpoint) -> Link | None:
        """Meets the other nodes (in `rank` mode tasks); a single participant has nobody to meet."""
        muster = self.restarts.muster(self.run_dir, self._address_of) if self.restarts else None
        if plan.allocation.nnodes == 1 and (plan.local_rank is None or plan.nproc_per_node == 1):
            if muster:
                muster.seal([0])
            return None
        self.preflight = None if self.is_restart else await preflight.look(plan, self.settings, self.env)
        findings = self.preflight.findings if self.preflight else {}
        key_file = self.settings.value("join-key-file") or self.run_dir.key
        has_key = self.settings.given("join-key-file") or key_file.exists()
        if not has_key:
            self.say_once(
                f"there is no {key_file}: the nodes join by what they say they are, without a secret"
            )
        async with contextlib.AsyncExitStack() as listening:

            async def listen(endpoint: network.Endpoint) -> str:
                if not endpoint.joins_machines or plan.local_rank:
                    return ""
                listener = reach.Listener(endpoint.interface, endpoint.address)
                return str(await listening.enter_async_context(listener))

            async def move(address: str) -> str:
                return await listen(await self.find(self.planned(plan.members, address)))

            timeouts = terms.Timeouts(
                join=self.settings.value("join-timeout"),
                peer=self.settings.value("peer-timeout"),
                again=self.again,
            )
            return await join.meet(
                identity(plan, self.env, await listen(endpoint), findings),
                nodes=plan.allocation.nodes,
                address=endpoint.first,
                port=plan.rendezvous.join_port,
                key=read_key(key_file) if has_key else None,
                say=self.say,
                timeouts=self.restarts.timeouts(timeouts) if self.restarts else timeouts,
                never_started=lambda: None if self.is_restart else self._never_started(plan),
                begun=lambda: self._first_waits_at(plan),
                everywhere=network.has_name(plan),
                move=move,
                muster=muster,
            )

    def found(self, plan: LaunchPlan, link: Link, endpoint: network.Endpoint) -> list[str]:
        """Which network is used, and what the preflight says of all nodes; the first, and how long the second
        took, only of nodes that are machines of their own."""
        lines = [network.summary(plan, self.env, link.elsewhere)] if endpoint.joins_machines else []
        if self.preflight is None:
            return lines
        lines += preflight.in_words(link.findings, len(link.members), self.preflight.seconds)
        return lines if endpoint.joins_machines else lines[:-1]

    async def _address_of(self, hub: int) -> str:
        """Where a node listens if it is the first."""
        others = (place for place in range(self.granted.allocation.nnodes) if place != hub)
        plan = with_members(self.granted, [hub, *others], self.granted.attempt)
        find = asyncio.get_running_loop().run_in_executor(None, network.find, plan, self.env)
        return (await find).first

    def _first_waits_at(self, plan: LaunchPlan) -> str | None:
        """Without a job script that counts the attempts, its plan may be an older one."""
        if self.is_restart or not has_host_half(self.env):
            return None
        first = self.run_dir.plan(0, None if plan.local_rank is None else 0)
        return network.first_waits_at(plan, first)

    def _never_started(self, plan: LaunchPlan) -> str | None:
        """A node whose outcome stands there before all have met will not come. Without a job script that
        counts the attempts, the files may be older."""
        if not has_host_half(self.env):
            return None
        for path in (self.run_dir.path / "outcome").glob(f"{plan.attempt}.*"):
            if (ended := outcome.read(path)) is not None:
                return (
                    f"{ended.node or path.name} ended before it joined, status {ended.status}: {ended.reason}"
                )
        return None


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
        versions={"python": sys.version.split()[0], "apptrain": __version__, "torch": version("torch")},
        contact=contact,
        findings=dict(findings),
    )


def version(package: str) -> str:
    """From the package's metadata: nothing is imported. Empty where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""
