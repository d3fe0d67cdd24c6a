"""`apptrain doctor` on a login node: what can be known without a job, a GPU and torch. Begin at `main`.

It looks for what a submission needs there: a program that starts the image, the image, a scheduler, and room.
Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from containers import lustre, stacks
from entrypoint.core import files, image_header
from entrypoint.core.checkout import make
from entrypoint.core.errors import BadInput
from entrypoint.doctor import facts, judge
from entrypoint.doctor.judge import Finding
from entrypoint.doctor.table import Report
from entrypoint.plan.profile import Profile, expanded, load
from entrypoint.schedulers.known import KNOWN

PROGRAMS = ("apptainer", "singularity")
SUBMIT = tuple(known.submits for known in KNOWN)
NEXT = "the nodes: apptrain submit --cluster NAME --doctor, or sbatch slurm/multinode.sbatch --doctor"
HERE = "this machine itself, without a scheduler: apptrain run --doctor"
"""What is next where no job can be submitted."""


def main(home: Path, profile: str, env: Mapping[str, str], *, as_json: bool) -> int:
    """Prints what is found; 0: healthy, 1: not. `home`: the checkout. Raises BadInput for a profile that is
    none."""
    began = time.monotonic()
    site = load(profile) if profile else Profile()
    node = os.uname().nodename
    scratch = expanded(site.scratch, env, site.path) if site.scratch else str(Path.cwd())
    folders = {facts.RUN_DIRECTORY: scratch, facts.TEMPORARY: facts.temporary(env)}
    found = facts.gather(node, folders, "", env)
    findings = [*judge.of_facts(found, Profile(), ""), *_of_submission(node, home, site, env)]
    report = Report(nodes=[found], findings=findings, seconds=time.monotonic() - began)
    following = NEXT if any(map(shutil.which, SUBMIT)) else HERE
    print(json.dumps(report.to_json(), indent=2) if as_json else f"{report.in_words()}\n{following}")
    return int(bool(findings))


def _of_submission(node: str, home: Path, site: Profile, env: Mapping[str, str]) -> Iterable[Finding]:
    program = env.get("APPTRAIN_APPTAINER") or expanded(site.container.program, env, site.path)
    if program and ("/" in program or not site.container.modules) and not shutil.which(program):
        text = f"{program} is no program here"
        yield Finding(node, "program", text, "correct it, in APPTRAIN_APPTAINER or the profile (program)")
    elif not program and not site.container.modules and not any(map(shutil.which, PROGRAMS)):
        text = "neither apptainer nor singularity is in PATH"
        yield Finding(node, "program", text, "load its module, or name it in APPTRAIN_APPTAINER or a profile")
    yield from _of_image(node, home, site, env)
    if not any(map(shutil.which, SUBMIT)):
        text = f"neither {' nor '.join(SUBMIT)} is in PATH"
        yield Finding(node, "scheduler", text, "log in where jobs are submitted")


def _of_image(node: str, home: Path, site: Profile, env: Mapping[str, str]) -> Iterable[Finding]:
    given, build = env.get("APPTRAIN_IMAGE", ""), "apptrain image build"
    if given:
        image = Path(given)
    else:
        try:
            stack = stacks.of_site(site.container.stack, site.nodes.driver, site.nodes.architecture)
        except ImportError:
            text = "which image jobs of this profile take is not known without PyYAML"
            remedy = f"python3 -m pip install --user pyyaml, or {make('venv-image')}"
            yield Finding(node, "image", text, remedy)
            return
        machine = site.nodes.architecture or os.uname().machine
        image = stacks.image_on(home / "containers" / stacks.image_of(stack).name, machine)
        build += f" --stack {stack}" if stack != stacks.names()[0] else ""
    remedy, theirs = f"{build}, or one that exists in APPTRAIN_IMAGE", site.nodes.architecture
    try:
        is_there = files.is_there(image)
        processor = image_header.check(image) if is_there else ""
    except BadInput as error:
        yield Finding(node, "image", str(error), remedy)
        return
    if not is_there:
        yield Finding(node, "image", f"there is no image {image}", remedy)
    elif processor and theirs and processor != theirs:
        text = f"the image {image} is for {processor}, and the nodes have {theirs}"
        yield Finding(node, "image", text, "build it on such a node, or name another in APPTRAIN_IMAGE")
    elif not given and not files.exists(image.with_suffix(".json")):
        text = f"no lock says what is in {image}: {image.with_suffix('.json').name} is not beside it"
        yield Finding(node, "image", text, "build it with apptrain image build, or copy both")
    if found := lustre.finding(image):
        yield Finding(node, "image", *found)
