"""The rules that turn what was granted and asked for into ranks: mode, device, number, threads, ports.

Pure: the same environment and options give the same plan anywhere, so a plan can be made from a recording.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from entrypoint.core.errors import BadInput
from entrypoint.core.plain import counted, file_part
from entrypoint.plan import commands, passed
from entrypoint.plan.launch_plan import LaunchPlan, Mode, placement, port_of
from entrypoint.plan.origin import DEFAULT, Origin, ValueSource, derived_from, from_profile, from_variable
from entrypoint.plan.profile import Profile, expanded
from entrypoint.plan.rendezvous import MANUAL_PORT, Rendezvous
from entrypoint.plan.sources import REFERENCE_JOB, Setting, Settings
from entrypoint.schedulers import hostnames
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.variables import CUDA_DEVICES

FEW_LINES = 8
"""Up to so many lines of a node file for each host are ranks that somebody asked for, even if they are as
many as its CPUs."""
REFERENCE_PRELOAD = ("torchvision.models", "train.loop")
"""What the reference job imports beside torch; torchvision's models take as long as torch itself."""


def build(env: Mapping[str, str], allocation: Allocation, settings: Settings, profile: Profile) -> LaunchPlan:
    """Composes the plan. Raises BadInput where what was granted and what was asked for do not fit, or nothing
    would carry out what was asked for."""
    allocation = _with_gpus_of_site(env, allocation, profile)
    allocation, lines_of_cores = _without_lines_of_cores(allocation, profile)
    members = tuple(range(_members(allocation, settings, spares=settings.on_failure.restarts_in_place)))
    attempt = _attempt(env, allocation)
    mode = _mode(allocation, settings)
    device = _device(allocation, settings)
    nproc, notes = _nproc_per_node(allocation, settings, mode.value, device.value)
    if nproc.origin is Origin.DEFAULT:
        notes += lines_of_cores
    rendezvous, hosts, rendezvous_sources = _rendezvous(allocation, settings, profile, attempt.value)
    run_dir = _run_dir(env, allocation, settings, profile)
    workers, worker_sources, thread_notes = _workers_env(
        env, allocation, settings, profile, nproc.value, run_dir, device
    )
    start_ranks, preload = _start_ranks(settings, mode.value)
    numa_binding = _numa_binding(settings, mode.value)
    placed = placement(mode.value, allocation, members, nproc.value, rendezvous)
    if rendezvous.backend == "c10d":
        notes += (
            "--rdzv-backend c10d: whoever reaches the store's port can run code in torchrun's agents, "
            "and ranks follow addresses, not node ranks; static has neither fault",
        )
    if preset := passed.preset(env):
        notes += (f"not passed on to the ranks, meant for another launcher: {', '.join(preset)}",)
    plan = LaunchPlan(
        allocation=allocation,
        members=members,
        hosts=hosts,
        attempt=attempt.value,
        mode=mode.value,
        device=device.value,
        nproc_per_node=nproc.value,
        rendezvous=rendezvous,
        command=settings.command,
        no_python=settings.value("no-python"),
        start_ranks=start_ranks.value,
        preload=preload.value,
        numa_binding=numa_binding.value,
        # With what follows a failure, --max-restarts bounds that, and torchrun would hide failures from it.
        max_restarts=0 if settings.on_failure.requeues else settings.value("max-restarts") or 0,
        env=workers | placed,
        run_dir=run_dir.value,
        venv=settings.value("venv"),
        sources={
            **{name: derived_from(variable) for name, variable in _allocation_sources(allocation).items()},
            "attempt": attempt.source,
            "mode": mode.source,
            "device": device.source,
            "nproc_per_node": nproc.source,
            **rendezvous_sources,
            "start_ranks": start_ranks.source,
            "preload": preload.source,
            "numa_binding": numa_binding.source,
            "venv": settings["venv"].source,
            **{f"env.{name}": source for name, source in worker_sources.items()},
            **{f"env.{name}": derived_from("mode") for name in placed},
        },
        notes=allocation.notes + notes + thread_notes + _spare_note(allocation, members),
    )
    _check_mode(plan, settings)
    return plan


def _check_mode(plan: LaunchPlan, settings: Settings) -> None:
    """Raises BadInput for options that nothing carries out in this mode: a plan shows what will run."""
    if settings.on_failure.restarts_in_place and plan.mode == "rank":
        raise BadInput(
            "restart-mode-rank",
            "--on-failure restart needs one task on every node, and --mode rank has one for each rank: start "
            "one task per node, or use --on-failure requeue",
        )
    if settings.value("doctor") and plan.mode == "exec":
        raise BadInput(
            "doctor-mode-exec",
            "--doctor starts a rank on each device, and --mode exec does not: leave --mode exec out",
        )
    if settings.value("doctor") and settings.on_failure.requeues:
        raise BadInput(
            "doctor-on-failure", f"--doctor looks once: leave --on-failure {settings.on_failure} out"
        )
    if plan.mode != "torchrun" and plan.max_restarts:
        raise BadInput(
            "max-restarts-mode",
            f"--max-restarts {plan.max_restarts} needs --mode torchrun, this is {plan.mode}: leave it out",
        )
    backend = settings["rdzv-backend"]
    if plan.mode == "torchrun" or backend.value == "static":
        return
    if backend.origin is Origin.PROFILE:
        raise BadInput(
            "profile-rdzv-backend-mode",
            f"rdzv_backend {backend.value} of the profile {backend.source.name} needs --mode torchrun, "
            f"this is {plan.mode}: give --rdzv-backend static",
        )
    raise BadInput(
        "rdzv-backend-mode",
        f"--rdzv-backend {backend.value} needs --mode torchrun, this is {plan.mode}: leave it out",
    )


def _allocation_sources(allocation: Allocation) -> dict[str, str]:
    shown = ("job_id", "step_id", "nodes", "node_rank")
    return {name: allocation.sources[name] for name in shown if name in allocation.sources}


def _spare_note(allocation: Allocation, members: Sequence[int]) -> tuple[str, ...]:
    if allocation.node_rank in members:
        return ()
    return (
        f"{allocation.nodes[allocation.node_rank]} is a spare: it takes the place of a node that is lost",
    )


def _members(allocation: Allocation, settings: Settings, *, spares: bool) -> int:
    """How many nodes take part; with `spares` more may be granted."""
    wanted = settings.value("nnodes")
    if wanted is None:
        return allocation.nnodes
    least, most = wanted
    if allocation.nnodes < least or (allocation.nnodes > most and not spares):
        span = str(least) if least == most else f"{least}:{most}"
        remedy = "request as many nodes as you want to use"
        if allocation.scheduler == "embedded":
            remedy = f"give --nodes {most}, or leave --nnodes out"
        raise BadInput(
            "nnodes-above-step",
            f"--nnodes {span}, but this step has {counted(allocation.nnodes, 'node')}: {remedy}",
        )
    return int(min(allocation.nnodes, most))


def _attempt(env: Mapping[str, str], allocation: Allocation) -> Setting:
    text = env.get("APPTRAIN_ATTEMPT")
    if text is None:
        source = allocation.sources.get("restart_count")
        return Setting(value=allocation.restart_count, source=derived_from(source) if source else DEFAULT)
    if not text.isdecimal():
        raise BadInput(
            "attempt-number",
            f"APPTRAIN_ATTEMPT={text}: must be a number from 0: unset it, the job script sets it",
        )
    return Setting(value=int(text), source=from_variable("APPTRAIN_ATTEMPT"))


def _derived(allocation: Allocation, *fields: str) -> ValueSource:
    for name in fields:
        if name in allocation.sources:
            return derived_from(allocation.sources[name])
    return DEFAULT


def _mode(allocation: Allocation, settings: Settings) -> Setting:
    tasks = allocation.tasks_per_node
    setting = settings["mode"]
    found = allocation.sources.get("tasks_per_node", "tasks per node")
    if len(set(tasks)) > 1:
        listed = ",".join(map(str, tasks[:8])) + (",..." if len(tasks) > 8 else "")
        raise BadInput(
            "uneven-tasks",
            f"{found} gives {listed} tasks on the {len(tasks)} nodes: start the same number on every node, "
            "one for torchrun or one for each rank",
        )
    if setting.value == "auto":
        return Setting(
            value="torchrun" if tasks[0] == 1 else "rank", source=_derived(allocation, "tasks_per_node")
        )
    if setting.value in ("torchrun", "exec") and tasks[0] > 1:
        raise BadInput(
            "mode-tasks",
            f"--mode {setting.value} needs one task on every node, but {found} gives {tasks[0]}: "
            "start one task per node, or use --mode rank",
        )
    return setting


def _start_ranks(settings: Settings, mode: Mode) -> tuple[Setting, Setting]:
    """(fork or spawn, what is imported before the forks)."""
    setting, preload = settings["start-ranks"], settings["preload"]
    no_python = settings.value("no-python")
    if mode == "torchrun" and not no_python:
        if setting.value == "auto":
            setting = Setting(value="fork", source=DEFAULT)
        if not preload.value and settings.command[:2] == REFERENCE_JOB[:2]:
            preload = Setting(value=REFERENCE_PRELOAD, source=derived_from("command"))
        return setting, preload
    if setting.value == "fork":
        found = "--no-python" if no_python else f"mode {mode}"
        raise BadInput(
            "fork-not-ours",
            f"--start-ranks fork, but with {found} nothing of ours starts the ranks: leave it out",
        )
    source = derived_from("no_python" if no_python else "mode")
    return Setting(value="spawn", source=source if setting.value == "auto" else setting.source), preload


def _numa_binding(settings: Settings, mode: Mode) -> Setting:
    """In mode `exec` CMD starts the ranks, and only a command line can have meant them to be bound."""
    setting = settings["numa-binding"]
    if mode != "exec" or setting.value == "none":
        return setting
    if setting.origin is Origin.PROFILE or setting.value == "auto":
        return Setting(value="none", source=derived_from("mode"))
    raise BadInput(
        "numa-mode-exec",
        f"--numa-binding {setting.value} binds ranks that apptrain starts, and with --mode exec CMD starts "
        "them: leave one of the two out",
    )


def _with_gpus_of_site(env: Mapping[str, str], allocation: Allocation, profile: Profile) -> Allocation:
    """With the GPUs of the profile's whole nodes, if the scheduler says nothing of GPUs."""
    nodes = profile.nodes
    is_its_job = profile.scheduler == allocation.scheduler
    if allocation.gpus is not None or CUDA_DEVICES in env or not (is_its_job and nodes.whole and nodes.gpus):
        return allocation
    return dataclasses.replace(allocation, gpus=nodes.gpus, gpus_unnamed=False, gpus_of_site=profile.name)


def _without_lines_of_cores(allocation: Allocation, profile: Profile) -> tuple[Allocation, tuple[str, ...]]:
    """(without a node file's number of lines that is only that of the CPUs, what to say if it would have
    counted). Some sites list each core there, and nothing tells that from mpiprocs that were asked for."""
    slots = set(allocation.slots_per_node or ())
    lines = min(slots, default=0)
    if len(slots) != 1 or lines <= FEW_LINES or lines not in (allocation.cpus, profile.nodes.cpus):
        return allocation, ()
    source = allocation.sources.get("slots_per_node", "the node file")
    note = (
        f"{source} has a line for each of the {lines} CPUs of a node, so its lines do not count as ranks: "
        "1 rank on each node (more: --nproc-per-node N)"
    )
    return dataclasses.replace(allocation, slots_per_node=None), (note,)


def _device(allocation: Allocation, settings: Settings) -> Setting:
    setting = settings["device"]
    if setting.value != "auto":
        return setting
    if allocation.gpus is None and allocation.cpu_by_default:
        return Setting(value="cpu", source=DEFAULT)
    if allocation.gpus is None:
        raise BadInput("gpus-unknown", _unknown_gpus(allocation))
    if allocation.gpus > 0:
        return Setting(value="cuda", source=_gpus_from(allocation))
    if allocation.cpu_by_default:
        return Setting(value="cpu", source=_derived(allocation, "gpus"))
    raise BadInput("gpus-none", _no_gpu(allocation))


def _gpus_from(allocation: Allocation) -> ValueSource:
    site = allocation.gpus_of_site
    return from_profile(site) if site else _derived(allocation, "gpus")


def _unknown_gpus(allocation: Allocation) -> str:
    by_hand = "give --device cuda --nproc-per-node N"
    if allocation.gpus_unnamed:
        return _unnamed_gpus(allocation, by_hand)
    found = f"how many GPUs {allocation.scheduler} granted is unknown ({allocation.gpus_unknown})"
    return f"{found}: {by_hand}, or --device cpu"


def _unnamed_gpus(allocation: Allocation, by_hand: str) -> str:
    """None was requested, or this site does not count them: no variable tells the two apart."""
    scheduler = allocation.scheduler
    return (
        f"job {allocation.job_id} was granted no GPU on this node that {scheduler} tells of: request GPUs, "
        f"or give --device cpu to train on CPUs; if {scheduler} does not count GPUs at this site, {by_hand}, "
        "or --profile with one that has nodes: {gpus: N, whole: true}"
    )


def _no_gpu(allocation: Allocation) -> str:
    ask = f"give {allocation.gpus_option}" if allocation.gpus_option else "request GPUs"
    found = f"job {allocation.job_id} was granted no GPU on this node"
    return f"{found}: {ask}, or give --device cpu to train on CPUs"


def _nproc_per_node(
    allocation: Allocation, settings: Settings, mode: Mode, device: str
) -> tuple[Setting, tuple[str, ...]]:
    setting = settings["nproc-per-node"]
    tasks = allocation.tasks_per_node[0]
    seen = allocation.gpus if allocation.gpus_visible is None else allocation.gpus_visible
    if mode == "rank":
        if setting.value not in (None, tasks):
            raise BadInput(
                "nproc-with-tasks",
                f"--nproc-per-node {setting.value}, but each of the {tasks} tasks on a node is one rank: "
                f"leave it out, or start {setting.value} tasks per node",
            )
        setting = Setting(value=tasks, source=_derived(allocation, "tasks_per_node"))
    elif setting.value is None:
        setting = _granted_processes(allocation, device)
    nproc = setting.value
    if device == "cpu":
        return setting, ()
    _check_slices(allocation, mode, nproc)
    if mode == "rank" and allocation.slices == 1:
        seen = allocation.gpus  # each task sees its own
    if seen is None:
        return setting, ()
    if nproc > seen:
        ask = f"give {allocation.gpus_option}" if allocation.gpus_option else "request more GPUs per node"
        remedy = f"{ask}, or start fewer ranks"
        if allocation.gpus_visible is not None:
            remedy = "request GPUs per node rather than per task (under srun also --gpu-bind=none), "
            remedy += "or start fewer ranks"
        where = allocation.sources.get("gpus_visible") or allocation.sources.get("gpus", "none was granted")
        if allocation.gpus_of_site:
            where = f"nodes gpus of {allocation.gpus_of_site}"
        raise BadInput(
            "gpus-too-few-for-ranks",
            f"{counted(nproc, 'rank')} on a node, but this task sees "
            f"{counted(seen, 'GPU')} ({where}): {remedy}",
        )
    return setting, (unused_gpus(nproc, seen),) if nproc < seen else ()


def _check_slices(allocation: Allocation, mode: Mode, nproc: int) -> None:
    """Raises BadInput where ranks would share the one slice of a GPU that CUDA shows to each of them."""
    slices = allocation.slices
    if slices > 1 and nproc > 1:
        start = "start one rank on each node (--nproc-per-node 1)"
        if mode == "rank":
            start = "start one task on each node, or give each its own (srun --gpus-per-task=1)"
        raise BadInput(
            "gpu-slices",
            f"the {slices} devices in {CUDA_DEVICES} are slices of GPUs (MIG), and a process sees one of "
            f"them: {start}, or request whole GPUs",
        )


def unused_gpus(nproc: int, seen: int) -> str:
    return f"{nproc} ranks on each node leave {seen - nproc} of its {seen} GPUs unused"


def _granted_processes(allocation: Allocation, device: str) -> Setting:
    if device == "cuda":
        if allocation.gpus_unnamed:
            raise BadInput(
                "gpus-unnamed", f"--device cuda, but {_unnamed_gpus(allocation, 'add --nproc-per-node N')}"
            )
        if allocation.gpus is None:
            raise BadInput(
                "gpus-unknown",
                "--device cuda, but how many GPUs this node has for us is unknown: add --nproc-per-node N",
            )
        if allocation.gpus == 0:
            raise BadInput("gpus-none", f"--device cuda, but {_no_gpu(allocation)}")
        return Setting(value=allocation.gpus, source=_gpus_from(allocation))
    slots = allocation.slots_per_node
    if slots is None:
        return Setting(value=1, source=DEFAULT)
    if len(set(slots)) > 1:
        raise BadInput(
            "uneven-slots",
            f"{allocation.sources.get('slots_per_node', 'the node file')} lists "
            f"{','.join(map(str, slots[:8]))}{',...' if len(slots) > 8 else ''} processes "
            f"on the {len(slots)} nodes: give --nproc-per-node N",
        )
    return Setting(value=slots[0], source=_derived(allocation, "slots_per_node"))


def _rendezvous(
    allocation: Allocation, settings: Settings, profile: Profile, attempt: int
) -> tuple[Rendezvous, tuple[str, ...], dict[str, ValueSource]]:
    """(the rendezvous with all that were granted, each node's host, their sources)."""
    backend, address, port = settings["rdzv-backend"], settings["master-addr"], settings["master-port"]
    nodes_from = _derived(allocation, "nodes")
    suffix = profile.host_suffix
    suffix_from = from_profile(profile.name) if suffix else nodes_from
    names = [hostnames.with_suffix(name, suffix) for name in allocation.nodes]
    is_given = address.value is not None
    if not is_given:
        address = Setting(value=names[0], source=suffix_from)
    if port.value is None and allocation.job_number is None:
        port = Setting(value=MANUAL_PORT, source=DEFAULT)
    elif port.value is None:
        port = Setting(value=port_of(allocation, attempt), source=_derived(allocation, "job_id"))
    hosts = [address.value.strip("[]"), *names[1:]]
    rendezvous = Rendezvous(
        backend=backend.value,
        master_addr=hosts[0],
        master_port=port.value,
        join_port=port.value + 1,
        id=f"{allocation.job_id}.{attempt}",
        is_host=allocation.node_rank == 0,
        local_addr=names[allocation.node_rank],
        host_suffix="" if is_given else suffix,
    )
    return (
        rendezvous,
        tuple(hosts),
        {
            "master_addr": address.source,
            "master_port": port.source,
            "rendezvous.backend": backend.source,
            "rendezvous.id": _derived(allocation, "job_id"),
            "rendezvous.local_addr": suffix_from,
            "rendezvous.join_port": port.source,
        },
    )


def _run_dir(env: Mapping[str, str], allocation: Allocation, settings: Settings, profile: Profile) -> Setting:
    setting = settings["run-dir"]
    if setting.value is not None:
        return Setting(value=str(setting.value), source=setting.source)
    path = run_directory(env, allocation.job_name, allocation.run_id, allocation.submit_dir, profile)
    source = from_profile(profile.name) if profile.scratch else derived_from("run_dir")
    return Setting(value=path, source=source)


def run_directory(
    env: Mapping[str, str], job_name: str, run_id: str, submit_dir: str | None, profile: Profile
) -> str:
    """Where a job's files go if nobody says."""
    name = file_part(f"{job_name}-{run_id}")
    scratch = expanded(profile.scratch, env, profile.path)
    return f"{(scratch or submit_dir or env.get('PWD') or '.').rstrip('/')}/runs/{name}"


def _workers_env(
    env: Mapping[str, str],
    allocation: Allocation,
    settings: Settings,
    profile: Profile,
    nproc: int,
    run_dir: Setting,
    device: Setting,
) -> tuple[dict[str, str], dict[str, ValueSource], tuple[str, ...]]:
    """(variables, their sources, notes)."""
    threads, notes = _threads(env, allocation, settings, nproc)
    found: dict[str, Setting] = {
        name: Setting(value=value, source=from_profile(profile.name))
        for name, value in profile.env.items()
        if name not in env
    }
    found["OMP_NUM_THREADS"] = threads
    found["APPTRAIN_RUN_DIR"] = run_dir
    found["APPTRAIN_NODE"] = Setting(
        value=allocation.nodes[allocation.node_rank], source=_derived(allocation, "nodes")
    )
    if settings.value("doctor"):
        found |= _of_doctor(allocation, settings, profile, device)
    if settings.value("fabric") == "efa" and "FI_PROVIDER" not in {**env, **profile.env}:
        # The plugin's libfabric would take sockets too.
        found["FI_PROVIDER"] = Setting(value="efa", source=settings["fabric"].source)
    interface = _interface(allocation, settings)
    if interface.value:
        names = {"GLOO_SOCKET_IFNAME": interface.value, "NCCL_SOCKET_IFNAME": nccl_names(interface.value)}
        for name, value in names.items():
            of_site = name in profile.env and not _is_one_machine(allocation)
            if interface.origin.is_user or not (name in env or of_site):
                found[name] = Setting(value=value, source=interface.source)
    if commands.our_package(settings.command):
        found["PYTHONSAFEPATH"] = Setting(value="1", source=derived_from("CMD"))
    return {n: s.value for n, s in found.items()}, {n: s.source for n, s in found.items()}, notes


def _of_doctor(
    allocation: Allocation, settings: Settings, profile: Profile, device: Setting
) -> dict[str, Setting]:
    """What the doctor must know that no training needs."""
    scheduler = Setting(value=allocation.scheduler, source=settings["scheduler"].source)
    found = {"APPTRAIN_DEVICE": device, "APPTRAIN_SCHEDULER": scheduler}
    if settings.value("fabric"):
        found["APPTRAIN_FABRIC"] = settings["fabric"]
    if profile.path:
        found["APPTRAIN_PROFILE"] = Setting(value=profile.path, source=from_profile(profile.name))
    return found


def nccl_names(names: str) -> str:
    """Interfaces as NCCL takes them, several with commas between them: a bare name is a beginning to it, and
    eth1 would match eth10 as well. A label such as eth0:1 it does not find so: see node/network.py."""
    return f"={names}"


def _interface(allocation: Allocation, settings: Settings) -> Setting:
    """A site's is that of its own nodes."""
    if _is_one_machine(allocation) and not settings["interface"].origin.is_user:
        return Setting(value="lo", source=_derived(allocation, "nodes"))
    return settings["interface"]


def _is_one_machine(allocation: Allocation) -> bool:
    """Whether all nodes are on this machine, as those of `apptrain run` are."""
    return all(node.startswith("127.") for node in allocation.nodes)


def _threads(
    env: Mapping[str, str], allocation: Allocation, settings: Settings, nproc: int
) -> tuple[Setting, tuple[str, ...]]:
    """OMP_NUM_THREADS, always set: torchrun's own default differs with the number of ranks per node. Sums on
    CPUs depend on it, so the reference program, whose runs are to agree, gets one everywhere."""
    setting = settings["omp-num-threads"]
    is_reference = settings.command[:2] == REFERENCE_JOB[:2]
    of_site = setting.origin is Origin.PROFILE
    if setting.value is not None and not of_site:
        return Setting(value=str(setting.value), source=setting.source), ()
    inherited = env.get("OMP_NUM_THREADS")
    if inherited is not None and inherited != allocation.omp_num_threads:
        if not all(part.isdecimal() and int(part) for part in inherited.split(",")):
            raise BadInput(
                "omp-threads",
                f"OMP_NUM_THREADS={inherited}: must be a positive number: correct it, or unset it",
            )
        return Setting(value=inherited, source=from_variable("OMP_NUM_THREADS")), ()
    if of_site and not is_reference:
        return Setting(value=str(setting.value), source=setting.source), ()
    threads, source = "1", DEFAULT
    if is_reference:
        source = derived_from("CMD")
    elif allocation.cpus is not None:
        threads, source = str(max(1, allocation.cpus // nproc)), _derived(allocation, "cpus")
    notes: tuple[str, ...] = ()
    if inherited is not None and inherited != threads:
        notes = (
            f"OMP_NUM_THREADS={inherited} is {allocation.scheduler}'s own, for the whole node: "
            f"each of the {nproc} ranks gets {threads} (set --omp-num-threads to choose)",
        )
    return Setting(value=threads, source=source), notes
