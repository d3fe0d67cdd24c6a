"""`LaunchPlan`: what will run on one node. It is a value; here are also what it prints (`describe`), and what
it becomes once more is known (`with_...`).

torchrun's command line is made here, and the variables that replace it in the modes without torchrun.
"""

from __future__ import annotations

import dataclasses
import shlex
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.plan import commands
from entrypoint.plan.cores import RankCores
from entrypoint.plan.origin import Origin, ValueSource, derived_from
from entrypoint.plan.rendezvous import Rendezvous, port_pair
from entrypoint.schedulers.allocation import Allocation, Context

SCHEMA_VERSION = 1
Mode = Literal["torchrun", "rank", "exec"]
StartRanks = Literal["fork", "spawn"]


@dataclass(frozen=True)
class LaunchPlan:
    """One node's (in `rank` mode one task's) part of a run."""

    allocation: Allocation
    """All that was granted, spare nodes among it."""
    members: tuple[int, ...]
    """The nodes that take part, in node-rank order, by their places in the allocation; others are spares."""
    hosts: tuple[str, ...]
    """Each granted node's name or address in the network of the rendezvous."""
    attempt: int
    """Counts from 0 over the retries, restarts and requeues of one run directory."""
    mode: Mode
    device: Literal["cpu", "cuda"]
    nproc_per_node: int
    rendezvous: Rendezvous
    command: tuple[str, ...]
    """CMD: the user's own arguments, or the reference job's."""
    no_python: bool
    start_ranks: StartRanks
    """Whether ranks are forks of a process that has imported torch, unless CMD speaks against it."""
    preload: tuple[str, ...]
    """Modules that this process imports beside torch."""
    max_restarts: int
    env: Mapping[str, str]
    """What is added for the workers."""
    run_dir: str
    venv: str | None
    """The venv whose Python runs the ranks; None for the Python that the entrypoint is started with."""
    numa_binding: str
    """Which cores each rank is to get (--numa-binding)."""
    sources: Mapping[str, ValueSource]
    """What gave each value, by its dotted key in the JSON."""
    cores: tuple[RankCores, ...] = ()
    """Those of this task's ranks. Empty: each rank may use all that were granted, or only launch, which sees
    the node, will know."""
    notes: tuple[str, ...] = ()

    @property
    def context(self) -> Context:
        return self.allocation.context

    @property
    def place(self) -> int:
        """This node's place in the allocation, the same over restarts."""
        return self.allocation.node_rank

    @property
    def node(self) -> str:
        return self.allocation.nodes[self.place]

    @property
    def is_spare(self) -> bool:
        return self.place not in self.members

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that take part, in node-rank order."""
        return tuple(self.allocation.nodes[place] for place in self.members)

    @property
    def nnodes(self) -> int:
        return len(self.members)

    @property
    def node_rank(self) -> int:
        """Of a spare the number of nodes, which is no node's rank."""
        return self.nnodes if self.is_spare else self.members.index(self.place)

    @property
    def is_first(self) -> bool:
        """Whether its task is the one that speaks for all: node 0's, in `rank` mode the first one there."""
        return self.node_rank == 0 and not self.local_rank

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def local_rank(self) -> int | None:
        return self.allocation.local_id if self.mode == "rank" else None

    @property
    def rank(self) -> int | None:
        if self.local_rank is None:
            return None
        return self.node_rank * self.nproc_per_node + self.local_rank

    @property
    def port_is_derived(self) -> bool:
        """Whether the port of torch's store follows from the job and the attempt: nobody chose it."""
        return self.sources["master_port"].origin is Origin.DERIVED

    @property
    def device_is_default(self) -> bool:
        """Whether nobody chose the device, and the scheduler's word did not decide it."""
        return self.sources["device"].origin is Origin.DEFAULT

    @property
    def nproc_is_derived(self) -> bool:
        """Whether the number of ranks on a node is that of what the scheduler granted."""
        return self.sources["nproc_per_node"].origin is Origin.DERIVED

    @property
    def preload_is_derived(self) -> bool:
        """Whether CMD decides what is imported beside torch: nobody chose it."""
        return self.sources["preload"].origin is Origin.DERIVED

    @property
    def venv_is_by_variable(self) -> bool:
        return self.sources["venv"].origin is Origin.ENVIRONMENT

    @property
    def program(self) -> list[str]:
        """CMD as it is started."""
        return commands.program(self.command, mode=self.mode, no_python=self.no_python)

    @property
    def argv(self) -> list[str]:
        """The command line that a person could paste."""
        if self.mode != "torchrun":
            return [*([] if self.no_python else ["python"]), *self.program]
        rendezvous = self.rendezvous
        argv = [
            "torchrun",
            f"--nnodes={self.nnodes}",
            f"--nproc-per-node={self.nproc_per_node}",
            f"--node-rank={self.node_rank}",
            f"--rdzv-backend={rendezvous.backend}",
            f"--rdzv-endpoint={rendezvous.endpoint}",
            f"--rdzv-id={rendezvous.id}",
            f"--local-addr={rendezvous.local_addr}",
            f"--max-restarts={self.max_restarts}",
        ]
        if rendezvous.backend == "c10d":
            argv.append(f"--rdzv-conf=is_host={int(rendezvous.is_host)}")
        if self.no_python:
            argv.append("--no-python")
        return [*argv, *(_as_torchrun_reads(word) for word in self.command)]

    def to_json(self) -> dict[str, Any]:
        """The object that `plan --json` prints (plan.schema.json)."""
        rendezvous = self.rendezvous
        return {
            "schema_version": SCHEMA_VERSION,
            "scheduler": self.allocation.scheduler,
            "job_id": self.allocation.job_id,
            "step_id": self.allocation.step_id,
            "attempt": self.attempt,
            "context": self.context,
            "mode": self.mode,
            "device": self.device,
            "nodes": list(self.nodes),
            "nnodes": self.nnodes,
            "node_rank": self.node_rank,
            "nproc_per_node": self.nproc_per_node,
            "world_size": self.world_size,
            "rank": self.rank,
            "local_rank": self.local_rank,
            "master_addr": rendezvous.master_addr,
            "master_port": rendezvous.master_port,
            "rendezvous": {
                "backend": rendezvous.backend,
                "endpoint": rendezvous.endpoint,
                "id": rendezvous.id,
                "is_host": rendezvous.is_host,
                "local_addr": rendezvous.local_addr,
                "join_port": rendezvous.join_port,
            },
            "start_ranks": self.start_ranks,
            "preload": list(self.preload),
            "numa_binding": self.numa_binding,
            "cores": [rank.to_json() for rank in self.cores] or None,
            "venv": self.venv,
            "argv": self.argv,
            "env": dict(self.env),
            "sources": {name: str(source) for name, source in self.sources.items()},
        }


def _as_torchrun_reads(word: str) -> str:
    """The word that torchrun makes this one of: it puts numbers in for ${local_rank}, and makes $ of $$."""
    is_read_otherwise = string.Template(word).safe_substitute(local_rank="") != word
    return word.replace("$", "$$") if is_read_otherwise else word


def describe(plan: LaunchPlan) -> str:
    """The plan as a person reads it: a line a field, with its source."""
    fields: dict[str, Any] = plan.to_json()
    nodes = fields["nodes"]
    fields["nodes"] = ",".join(nodes[:8]) + (f",... ({len(nodes)} nodes)" if len(nodes) > 8 else "")
    fields |= {f"rendezvous.{key}": value for key, value in fields.pop("rendezvous").items()}
    env = fields.pop("env")
    argv = fields.pop("argv")
    sources = fields.pop("sources")
    lines = [
        f"{name:<24} {value}" + (f"  [{sources[name]}]" if name in sources else "")
        for name, value in fields.items()
        if value is not None and name != "schema_version"
    ]
    lines.append("environment added for the workers:")
    lines += [f"  {name}={shlex.quote(value)}  [{sources[f'env.{name}']}]" for name, value in env.items()]
    lines += ["command:", f"  {shlex.join(argv)}"]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def in_brief(plan: LaunchPlan) -> str:
    """The plan in one line."""
    nodes = counted(plan.nnodes, "node")
    ranks = counted(plan.nproc_per_node, "rank")
    return (
        f"job {plan.allocation.job_id}, attempt {plan.attempt}: {nodes} x {ranks} on {plan.device}, "
        f"mode {plan.mode}, rendezvous {plan.rendezvous.endpoint}, "
        f"OMP_NUM_THREADS={plan.env['OMP_NUM_THREADS']}"
    )


def with_members(plan: LaunchPlan, members: Sequence[int], attempt: int) -> LaunchPlan:
    """The plan as these nodes, by their places in the allocation, go on with another attempt."""
    allocation, first = plan.allocation, members[0]
    port = plan.rendezvous.master_port
    if plan.port_is_derived:
        port = port_of(allocation, attempt)
    rendezvous = dataclasses.replace(
        plan.rendezvous,
        master_addr=plan.hosts[first],
        master_port=port,
        join_port=port + 1,
        id=f"{allocation.job_id}.{attempt}",
        is_host=plan.place == first,
    )
    placed = placement(plan.mode, allocation, members, plan.nproc_per_node, rendezvous)
    return dataclasses.replace(
        plan,
        members=tuple(members),
        attempt=attempt,
        rendezvous=rendezvous,
        env={**plan.env, **placed},
    )


def with_master_addr(plan: LaunchPlan, address: str, source: ValueSource) -> LaunchPlan:
    """The plan with node 0 at this address, whatever its name means on this node."""
    rendezvous = dataclasses.replace(plan.rendezvous, master_addr=address, host_suffix="")
    placed = placement(plan.mode, plan.allocation, plan.members, plan.nproc_per_node, rendezvous)
    sources = {**plan.sources, "master_addr": source}
    return dataclasses.replace(plan, rendezvous=rendezvous, env={**plan.env, **placed}, sources=sources)


def with_local_addr(plan: LaunchPlan, address: str) -> LaunchPlan:
    """The plan once this node knows its own address."""
    rendezvous = dataclasses.replace(plan.rendezvous, local_addr=address)
    return dataclasses.replace(plan, rendezvous=rendezvous)


def with_env(plan: LaunchPlan, added: Mapping[str, str], source: ValueSource) -> LaunchPlan:
    """The plan with further variables for the workers."""
    sources = dict(plan.sources) | {f"env.{name}": source for name in added}
    return dataclasses.replace(plan, env={**plan.env, **added}, sources=sources)


def with_cores(plan: LaunchPlan, cores: Sequence[RankCores], threads: int) -> LaunchPlan:
    """The plan once launch knows the cores of this task's ranks. `threads`: for how many threads of a rank
    they are enough; a derived OMP_NUM_THREADS is not larger."""
    sources = {**plan.sources, "cores": derived_from("numa_binding")}
    plan = dataclasses.replace(plan, cores=tuple(cores), sources=sources)
    name = "OMP_NUM_THREADS"
    if plan.sources[f"env.{name}"].origin is not Origin.DERIVED or int(plan.env[name]) <= threads:
        return plan
    return with_env(plan, {name: str(threads)}, derived_from("numa_binding"))


def placement(
    mode: Mode, allocation: Allocation, members: Sequence[int], nproc: int, rendezvous: Rendezvous
) -> dict[str, str]:
    """What torchrun would tell a rank, in the modes without torchrun."""
    if mode == "torchrun":
        return {}
    meeting = {"MASTER_ADDR": rendezvous.master_addr, "MASTER_PORT": str(rendezvous.master_port)}
    place = allocation.node_rank
    node_rank = members.index(place) if place in members else len(members)
    if mode == "exec":
        nodes = {"NNODES": len(members), "NODE_RANK": node_rank, "NPROC_PER_NODE": nproc}
        return {**meeting, **{name: str(number) for name, number in nodes.items()}, "PYTHONUNBUFFERED": "1"}
    rank = {
        "RANK": node_rank * nproc + allocation.local_id,
        "LOCAL_RANK": allocation.local_id,
        "WORLD_SIZE": len(members) * nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": node_rank,
    }
    return {**meeting, **{name: str(number) for name, number in rank.items()}, "PYTHONUNBUFFERED": "1"}


def port_of(allocation: Allocation, attempt: int) -> int:
    """The port of torch's store; the join takes the next one."""
    step = allocation.step_id or ""
    return port_pair(
        job_number=allocation.job_number or 0,
        array_index=allocation.array_index,
        step=int(step) if step.isdecimal() else 0,
        attempt=attempt,
    )[0]
