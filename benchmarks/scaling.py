"""`apptrain scaling --cluster` on a model of a cluster: the test cluster, each of whose nodes has half a core
and a bandwidth of its own. `scaling` is the entry.

Without these bounds three nodes on two cores would measure how ranks share a machine.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Final

from entrypoint.cli import profiles as render
from tests.cluster.account import PYYAML, REPOSITORY, WORK, Account, given_image, open_account
from tests.cluster.images import CHECKOUT, built
from tests.vcluster.shares import small_nodes

NODES: Final = "1,2,3"
CORES: Final = 0.5
"""Of each node."""
MBIT: Final = 400
"""A second, that each node sends. The gradients of ResNet-18 are 45 MB: 0.9 s at 400 Mbit/s."""
LIMIT: Final = 900.0
"""Seconds for a job to wait, and to run."""
PICTURES: Final = CHECKOUT / "docs/images"
DRAWN: Final = ("strong", "weak")
"""For docs/scaling.md."""
PROFILE: Final = "scheduler: slurm\nnodes: {gpus: 0, cpus: 2, memory_gib: 8}\nrequest: {partition: gpu}\n"
DIGITS: Final = (
    *("-m", "train", "--config", "digits", "data.image_size=24", "steps=10"),
    *("evaluate.every=0", "checkpoint.every=0"),
)
CASES: Final[Mapping[str, Sequence[str]]] = {
    "strong": ("--strong", "--", *DIGITS, "batch_size=96"),
    "weak": ("--weak", "--", *DIGITS, "batch_size=32"),
    "ddp": ("--", "ddp.py", "--steps", "200"),
}


def scaling(repeats: int) -> dict[str, Any]:
    """The reference program with the same work and with more work, and examples/ddp.py as it is. Needs root.

    APPTRAIN_TEST_IMAGE is taken instead of an image that is built from this checkout.
    """
    given = given_image()
    with open_account(given or built("default").image, patched=given is not None, binds=[PYYAML]) as user:
        profile = user.write("app train/clusters/model.yaml", PROFILE)
        render.render(user.on_disk(profile), write=True)
        shutil.copy(CHECKOUT / "Makefile", user.on_disk(REPOSITORY))
        for name in ("ddp.py", "stop.py"):
            user.write(WORK / name, (CHECKOUT / "examples" / name).read_text())
        with small_nodes(user.cluster, cores=CORES, mbit=MBIT):
            found = {name: _measure(user, name, words, repeats) for name, words in CASES.items()}
    return {"cores_of_a_node": CORES, "mbit_s_of_a_node": MBIT, "cores": os.cpu_count(), "found": found}


def _measure(user: Account, name: str, words: Sequence[str], repeats: int) -> dict[str, Any]:
    sizes = ("--nodes", NODES, "--repeats", str(repeats), "--dir", name)
    asked = ("--cluster", "model", "--device", "cpu", "--time", "20", *words)
    submitted = user.run(REPOSITORY / "apptrain", "scaling", *sizes, *asked)
    if submitted.returncode:
        raise RuntimeError(submitted.stderr)
    for job in re.findall(r"^apptrain: job (\d+): ", submitted.stderr, re.M):
        ran = user.end(int(job), LIMIT)
        if ran.ended != ("COMPLETED", 0):
            raise RuntimeError(f"job {job} ended with {ran.ended}:\n{ran.text[-2000:]}")
        print(f"  {name}: job {job} has ended", flush=True)
    shown = user.run(REPOSITORY / "apptrain", "scaling", name, "-o", f"{name}.svg")
    if shown.returncode:
        raise RuntimeError(shown.stderr)
    print(shown.stdout, flush=True)
    if name in DRAWN:
        drawn = user.on_disk(WORK / f"{name}.svg").read_text()
        (PICTURES / f"scaling-{name}.svg").write_text(drawn)
    said = user.run(REPOSITORY / "apptrain", "scaling", name, "--json")
    if said.returncode:
        raise RuntimeError(said.stderr)
    found: dict[str, Any] = json.loads(said.stdout)
    return found
