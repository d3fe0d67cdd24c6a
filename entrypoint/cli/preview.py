"""Works out what a job that is about to be submitted will run, and refuses a request that cannot hold it.
`preview_job` is the entry.

It makes the allocation that the scheduler would give, and the plan of that by the rules of every launch. Runs
with a login node's Python, from 3.9 on.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from entrypoint.batch import login
from entrypoint.batch import secrets as batch_secrets
from entrypoint.batch.login import JobRequest
from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import counted
from entrypoint.plan import mistakes, rules, secret_file, shown, sources
from entrypoint.plan.profile import Profile
from entrypoint.plan.sources import Settings
from entrypoint.record import tokens
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.known import words_of


def preview_job(request: JobRequest, env: Mapping[str, str], cwd: Path) -> list[str]:
    """What will run, a line each, for who submits from `cwd`; the job sees `env`. Raises BadInput where it
    could not run, or cannot be meant."""
    profile = request.profile
    flags, command = sources.merged(*sources.texts(request.arguments, job=True), env, job=True)
    if "profile" in flags:
        raise BadInput(
            "submit-profile", f"--profile {flags['profile']}: --cluster names the profile: leave it out"
        )
    settings = sources.resolve(flags, env, profile.launch, profile.name, command)
    if settings.value("scheduler") not in ("auto", profile.scheduler):
        raise BadInput(
            "submit-scheduler",
            f"--scheduler {settings.value('scheduler')}: {profile.name} has {profile.scheduler}: "
            "leave it out",
        )
    mistakes.check_job(settings, profile.scheduler)
    mistakes.check_command(
        settings.command, cwd, mode=settings.value("mode"), no_python=settings.value("no-python"), here=False
    )
    said, unclear = login.of(profile.scheduler).granted(request)
    _check_time(said, settings)
    lines = [f"{unclear} changes what is granted: ranks and devices are checked when the job starts"]
    if not unclear:
        plan = rules.build(env, _allocation(said), settings, replace(profile, scratch=""))
        mistakes.check_training(plan.program, plan.world_size, cwd)
        nodes, ranks = counted(plan.nnodes, "node"), counted(plan.nproc_per_node, "rank")
        lines = [f"{nodes} x {ranks} on {plan.device}, mode {plan.mode}", *plan.notes]
    there = "" if files.is_there(request.image) else f" (not there yet: {request.make_image})"
    secrets = settings.value("secrets")
    if secrets:
        secret_file.read(cwd / secrets)
    script = settings.command[0]
    if script.startswith("/") and not files.is_there(script):
        lines.append(f"CMD {script} is not seen from here: the job looks for it in its first second")
    if tokens.hide_words(settings.command, {}) != list(settings.command):
        lines.append(
            f"CMD seems to hold a secret, which the scheduler shows to others: {batch_secrets.REMEDY}"
        )
    shown.check(settings, profile, env, cwd)
    return [
        *lines,
        f"runs {shlex.join(settings.command)} in {cwd}",
        f"image {request.image}{there}",
        f"run directory {_run_dir(profile, settings, env, cwd)}",
    ]


def _run_dir(profile: Profile, settings: Settings, env: Mapping[str, str], cwd: Path) -> str:
    """Where the files go, as far as that is known before there is a job. Raises BadInput."""
    given = settings.value("run-dir")
    if given is not None:
        path = cwd / given
        mistakes.check_run_dir(path, settings.command)
        return str(path)
    try:
        return rules.run_directory(env, "NAME", "JOB", str(cwd), profile)
    except BadInput:  # of a variable that the site sets inside jobs alone
        return f"{profile.scratch}/runs/NAME-JOB"


# --- what is granted ----------------------------------------------------------------------------------------


def _allocation(request: JobRequest) -> Allocation:
    """As the scheduler's module would read it in the first task."""
    profile, nnodes = request.profile, request.nodes
    return Allocation(
        scheduler=profile.scheduler,
        job_id="of this request",
        job_number=0,
        run_id="JOB",
        nodes=tuple(f"node{number}" for number in range(1, nnodes + 1)),
        node_rank=0,
        tasks_per_node=(request.tasks,) * nnodes,
        slots_per_node=login.of(profile.scheduler).slots(request),
        gpus=request.gpus,
        cpus=request.cpus,
        sources={"gpus": "--gpus-per-node", "nodes": "--nodes", "tasks_per_node": "--ntasks-per-node"},
    )


# --- time ---------------------------------------------------------------------------------------------------


def _check_time(request: JobRequest, settings: Settings) -> None:
    """Raises BadInput where the ranks would be asked to save before they have begun."""
    whole = login.seconds(request.time)
    known = words_of(request.profile.scheduler)
    warns = request.warns if known.warning else settings.value("stop-before") or 0
    if whole is not None and warns >= whole:
        raise BadInput(
            "time-below-warning",
            f"--time {request.time}: the ranks are asked to save {warns} s before its end, which is before "
            f"it begins: ask for more time, or {known.warns_later}",
        )
