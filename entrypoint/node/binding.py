"""Completes a plan with the cores of its ranks, which only this node knows. Begin at `with_cores_of_ranks`.

It asks the kernel (entrypoint/node/numa.py) and, on GPUs, the driver in a process of its own, so that CUDA is
not started here. The driver heeds CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER, UUIDs and slices of GPUs, as it
will in the ranks. What follows is decided by entrypoint/plan/cores.py.
"""

from collections.abc import Callable, Mapping

from entrypoint.core.errors import BadInput
from entrypoint.core.threads import run_in_thread
from entrypoint.node import gpu, numa
from entrypoint.node.gpu import DriverReport
from entrypoint.plan import cores
from entrypoint.plan.cores import GpuPlace, TaskRanks, Topology
from entrypoint.plan.launch_plan import LaunchPlan, with_cores
from entrypoint.schedulers.known import cores_beside_gpus

READING = 10.0
"""Seconds for the kernel's files: two for each core."""


async def with_cores_of_ranks(
    plan: LaunchPlan, env: Mapping[str, str], found: DriverReport | None, say: Callable[[str], None]
) -> LaunchPlan:
    """The plan with each rank's cores, if --numa-binding asks for that. `env`: the ranks'. `found`: what the
    driver said if it was asked before. Raises BadInput if ranks cannot be bound so."""
    if plan.numa_binding == cores.NONE or plan.is_spare or plan.mode == "exec":
        return plan
    machine = await read_topology()
    task = ranks_of(plan, machine)
    try:
        gpus = await places(plan, env, found)
    except BadInput as error:
        if plan.numa_binding != cores.AUTO:
            raise
        say(f"--numa-binding auto binds nothing: {error}")
        return plan
    binding = cores.decide(plan.numa_binding, machine, gpus, task, plan.node)
    if not binding.ranks:
        say(binding.why_not)
        return plan
    say(f"--numa-binding {plan.numa_binding}: {cores.in_words(binding.ranks)}")
    return with_cores(plan, binding.ranks, cores.threads(binding.ranks))


async def read_topology() -> Topology:
    """Of this node's granted cores."""
    return await run_in_thread(lambda: numa.topology(numa.granted()), seconds=READING)


def ranks_of(plan: LaunchPlan, machine: Topology) -> TaskRanks:
    """The ranks of this task. Several tasks on a node have cores of their own if so many of this size fit
    into what was granted."""
    local = range(plan.nproc_per_node) if plan.local_rank is None else (plan.local_rank,)
    granted = plan.allocation.cpus
    own = len(machine.granted) * plan.nproc_per_node <= (granted or 0)
    return TaskRanks(
        local_ranks=tuple(local),
        nproc_per_node=plan.nproc_per_node,
        has_own_cores=plan.local_rank is not None and plan.nproc_per_node > 1 and own,
        remedy=cores_beside_gpus(plan.allocation.scheduler, one_task=plan.local_rank is None),
    )


async def places(
    plan: LaunchPlan, env: Mapping[str, str], found: DriverReport | None
) -> tuple[GpuPlace, ...] | None:
    """Where the GPUs are, as CUDA numbers them in the ranks; None on CPUs. Raises BadInput if the driver does
    not say."""
    if plan.device != "cuda":
        return None
    found = found or await gpu.ask_driver(env)
    why = "it does not answer" if found.silent else found.failed
    if found.error:
        why = f"CUDA does not start: {found.error[1]}"
    if why:
        raise BadInput(
            "numa-gpu-unknown",
            f"--numa-binding needs to know where the GPUs of {plan.node} are, and NVIDIA's driver does not "
            f"say it ({why}): leave --numa-binding out",
        )
    return await run_in_thread(lambda: tuple(numa.place(one.address) for one in found.gpus), seconds=READING)
