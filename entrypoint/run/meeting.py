"""Has this node meet the others of its job, and says what they found. `meet` is the entry.

`OurNode` answers what the meeting asks of this node: where it listens, whether somebody will not come, who
takes part. For that it reads in the run directory.
"""

import contextlib
from collections.abc import Mapping, Sequence

from entrypoint.core.frozen import dataclass
from entrypoint.core.threads import run_in_thread
from entrypoint.doctor import preflight
from entrypoint.doctor.preflight import Preflight
from entrypoint.job import outcome
from entrypoint.job.rundir import read_key
from entrypoint.meet import join, reach
from entrypoint.meet.link import Link
from entrypoint.meet.terms import LocalNode
from entrypoint.node import network
from entrypoint.node.gpu import DriverReport
from entrypoint.node.network import Endpoint
from entrypoint.plan.launch_plan import LaunchPlan, with_members
from entrypoint.ranks.output import Voice
from entrypoint.run.given import Given, identity


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the nodes have met."""

    link: Link | None
    """None if this is the job's only participant."""
    plan: LaunchPlan
    """Of those that take part; the plan of before if they are those that were expected."""
    preflight: Preflight | None = None
    """What this node has found of itself; None if nobody asked."""

    def in_words(self, endpoint: Endpoint, env: Mapping[str, str]) -> list[str]:
        """Which network is used, and what the preflight says of all nodes. The first, and how long the second
        took, only if the nodes are machines of their own."""
        if self.link is None:
            return []
        is_joined = endpoint.joins_machines
        lines = [network.summary(endpoint.plan, env, self.link.elsewhere)] if is_joined else []
        if self.preflight is None:
            return lines
        found = self.preflight
        lines += preflight.in_words(self.link.findings, len(self.link.members), found.seconds, found.advice)
        return lines if is_joined else lines[:-1]


async def find_endpoint(given: Given, plan: LaunchPlan) -> Endpoint:
    """What only this node knows of the network; the store's port is still free there."""
    endpoint = await run_in_thread(network.find, plan, given.env)
    if plan.is_first:
        network.check_store_port(endpoint.plan, given.port_advice)
    return endpoint


async def meet(
    given: Given, plan: LaunchPlan, endpoint: Endpoint, voice: Voice, driver: DriverReport | None
) -> Meeting:
    """Meets the other nodes (in `rank` mode tasks); a single participant has nobody to meet. `driver`: what
    it said if it was asked."""
    if plan.allocation.nnodes == 1 and (plan.local_rank is None or plan.nproc_per_node == 1):
        if given.settings.given("join-key-file"):
            read_key(given.settings.value("join-key-file"))  # a mistake in it shows with one node, too
        if given.restarts:
            given.restarts.seal(given.run_dir, [0])
        return Meeting(link=None, plan=plan)
    found = None if given.before else await preflight.look(plan, given.settings, given.env, driver)
    key_file = given.settings.value("join-key-file") or given.run_dir.key
    has_key = given.settings.given("join-key-file") or key_file.exists()
    if not has_key:
        voice.once(f"there is no {key_file}: the nodes join by what they say they are, without a secret")
    async with contextlib.AsyncExitStack() as listening:
        ours = OurNode(given=given, plan=plan, endpoint=endpoint, voice=voice, listening=listening)
        contact = await ours.listen(endpoint)
        link = await join.meet(
            identity(plan, given.env, contact, found.findings if found else {}),
            local=ours,
            nodes=plan.allocation.nodes,
            port=plan.rendezvous.join_port,
            key=read_key(key_file) if has_key else None,
            timeouts=given.timeouts,
            everywhere=network.has_name(plan),
            muster=given.restarts.membership if given.restarts else None,
        )
    is_as_planned = link.members == plan.members and not link.moved
    return Meeting(
        link=link, plan=plan if is_as_planned else given.planned(link.members, link.moved), preflight=found
    )


@dataclass(frozen=True, kw_only=True)
class OurNode(LocalNode):
    """This node, as the meeting asks it."""

    given: Given
    plan: LaunchPlan
    endpoint: Endpoint
    voice: Voice
    listening: contextlib.AsyncExitStack
    """Closes the listeners of this node once all have met."""

    async def listen(self, endpoint: Endpoint) -> str:
        """Has the others try whether they reach this node. Returns where; empty if nobody needs to."""
        if not endpoint.joins_machines or self.plan.local_rank:
            return ""
        listener = reach.Listener(endpoint.interface, endpoint.address)
        return str(await self.listening.enter_async_context(listener))

    @property
    def port_advice(self) -> str:
        return self.given.port_advice

    def say(self, text: str) -> None:
        self.voice.say(text)

    async def move(self, address: str) -> str:
        moved = self.given.planned(self.plan.members, address)
        return await self.listen(await find_endpoint(self.given, moved))

    async def address(self, hub: int) -> str:
        if self.given.restarts is None:
            return self.endpoint.first
        granted = self.given.plan
        others = (place for place in range(granted.allocation.nnodes) if place != hub)
        plan = with_members(granted, [hub, *others], granted.attempt)
        return (await run_in_thread(network.find, plan, self.given.env)).first

    def seal(self, members: Sequence[int]) -> None:
        if self.given.restarts is not None:
            self.given.restarts.seal(self.given.run_dir, members)

    def begun(self) -> str | None:
        """Without a job script that counts the attempts, its plan may be an older one."""
        if self.given.before or not self.given.counts_attempts:
            return None
        first = self.given.run_dir.plan(0, None if self.plan.local_rank is None else 0)
        return network.first_waits_at(self.plan, first)

    def never_started(self) -> str | None:
        """A node whose outcome is there before all have met will not come. Without a job script that counts
        the attempts, the files may be older. Node 0 looks for all: the others need only know of node 0, and
        each of them would read a folder with as many files as there are nodes."""
        if self.given.before or not self.given.counts_attempts:
            return None
        run_dir, task = self.given.run_dir, None if self.plan.local_rank is None else 0
        everyone = (run_dir.path / "outcome").glob(f"{self.plan.attempt}.*")
        for path in everyone if self.plan.is_first else [run_dir.outcome(0, task)]:
            if (ended := outcome.read(path)) is not None:
                # What the starter of a task writes has no node's name.
                node = ended.node or self.plan.allocation.nodes[outcome.place(path.name)]
                return f"{node} ended before it joined, status {ended.status}: {ended.reason}"
        return None
