"""Compares the start of our Slurm job script with the tutorials' one and with the least that a start can take
(floor.sbatch): time to the first all_reduce, and CPU seconds. `slurm` is the entry.

All scripts run the same program in the same image on the same test cluster. First in PATH they find an `srun`
that notes the time and becomes Slurm's own. A file that bash reads before any script (BASH_ENV) notes when
the job's script began. The end is when the last rank has its sum; all nodes have this machine's clock.
"""

import os
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.cluster.images import built
from tests.host import Bind
from tests.vcluster import Cluster, up

NODES: Final = 3
RANKS: Final = 2
"""On each node."""
LIMIT: Final = 180.0
HERE: Final = Path(__file__).parent
CHECKOUT: Final = Path("/sw/apptrain")
"""Where the cluster's hosts show this checkout."""
IMAGE: Final = Path("/sw/images/image.sif")
WORK: Final = Path("/home/alice/bench")
NOTE_STEP: Final = """\
#!/bin/sh
date +%s.%N >"{work}/$SLURM_JOB_ID.step"
exec /usr/bin/srun "$@"
"""
NOTE_JOB: Final = """\
unset BASH_ENV
date +%s.%N >"{work}/$SLURM_JOB_ID.job"
"""
FORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "torchrun": ("--ntasks-per-node=1", "--cpus-per-task=2"),
    "rank": (f"--ntasks-per-node={RANKS}", "--cpus-per-task=1"),
}

SUM: Final = re.compile(
    rf"first sum {NODES * RANKS} of {NODES * RANKS} at (\d+\.\d{{6}}) "
    r"\(began \d+\.\d{6}, imported (\d+\.\d{6})\)"
)
STARTS: Final = ("step", "job")
"""Of the step, and of the job's script."""

Times = dict[str, float]
"""Seconds from each of STARTS to the first sum; `met`: of that, after all ranks had torch; `cpu`: of this
machine, until the nodes are idle again."""


def slurm(pairs: int) -> dict[str, Any]:
    """Both forms of the tutorials' script. Needs root, for the cluster.

    APPTRAIN_TEST_IMAGE is taken instead of an image that is built from this checkout.
    """
    given = os.environ.get("APPTRAIN_TEST_IMAGE")
    image = Path(given) if given else built("default").image
    shown = [Bind(source=image, target=IMAGE), Bind(source=HERE.parent, target=CHECKOUT)]
    with up("bench", binds=shown) as cluster:
        prepare(cluster)
        return {form: _compare(cluster, form, pairs) for form in FORMS}


def _compare(cluster: Cluster, form: str, pairs: int) -> dict[str, Any]:
    """One warm-up of each, then rounds whose order turns."""
    sides = {"ours": _ours, "tutorial": _tutorial, **({"floor": _floor} if form == "torchrun" else {})}
    found = []
    for number in range(pairs + 1):
        order = list(sides)[:: 1 if number % 2 else -1]
        times = {side: sides[side](cluster, form) for side in order}
        said = ", ".join(f"{side} {times[side]['job']:.2f}" for side in sides)
        print(f"  {form}, round {number or '(warm-up)'} of {pairs}: {said} s", flush=True)
        if number:
            found.append(times)
    marks = (*STARTS, "cpu")
    shown = (*marks, "met")
    ratios = {
        other: {mark: spread([one["ours"][mark] / one[other][mark] for one in found]) for mark in marks}
        for other in sides
        if other != "ours"
    }
    medians = {
        side: {mark: round(statistics.median(one[side][mark] for one in found), 2) for mark in shown}
        for side in sides
    }
    for side in sides:
        met = spread([one[side]["met"] for one in found])
        print(f"{form}, {side}: {medians[side]['job']} s, of which after all ranks had torch {met}")
    for other, ratio in ratios.items():
        print(
            f"{form}: ours / {other}: from the job script's start {ratio['job']}, CPU seconds {ratio['cpu']}"
        )
    return {"seconds": found, "median": medians, "ratio": ratios}


def prepare(cluster: Cluster) -> None:
    """The user's folder with the program and what notes the times."""
    files = {
        "bin/srun": NOTE_STEP.format(work=WORK),
        "note.sh": NOTE_JOB.format(work=WORK),
        "first_sum.py": (HERE / "first_sum.py").read_text(),
        "floor.py": (HERE / "floor.py").read_text(),
    }
    cluster.login.run(["mkdir", "-p", WORK / "bin"], user="alice").check_returncode()
    for name, text in files.items():
        cluster.login.run(["tee", WORK / name], input=text, user="alice").check_returncode()
    cluster.login.run(["chmod", "+x", WORK / "bin/srun"], user="alice").check_returncode()


def _ours(cluster: Cluster, form: str) -> Times:
    options = ["--device", "cpu", *(["--nproc-per-node", str(RANKS)] if form == "torchrun" else [])]
    return _run(cluster, form, CHECKOUT / "slurm/multinode.sbatch", *options, "--", "first_sum.py")


def _tutorial(cluster: Cluster, form: str) -> Times:
    return _run(cluster, form, CHECKOUT / "benchmarks/tutorial.sbatch", IMAGE, str(RANKS), "first_sum.py")


def _floor(cluster: Cluster, form: str) -> Times:
    return _run(cluster, form, CHECKOUT / "benchmarks/floor.sbatch", IMAGE, str(RANKS), "floor.py")


def _run(cluster: Cluster, form: str, script: Path, *arguments: Path | str) -> Times:
    """Submits one job, and waits until the nodes are idle again."""
    before = _cpu_seconds()
    number, printed = run(cluster, form, IMAGE, script, *arguments)
    used = _cpu_seconds() - before
    sums = [(float(at), float(imported)) for at, imported in SUM.findall(printed)]
    ended = max(at for at, _ in sums)
    met = ended - max(imported for _, imported in sums)
    return {"cpu": used, "met": met, **{start: ended - noted(cluster, number, start) for start in STARTS}}


def _cpu_seconds() -> float:
    """That this machine has worked so far: user, nice, system and interrupts of proc_stat(5)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def noted(cluster: Cluster, number: int, start: str) -> float:
    """When the job's script or its step began, in Unix seconds."""
    return float((cluster.folder / str(WORK).lstrip("/") / f"{number}.{start}").read_text())


def run(cluster: Cluster, form: str, image: Path, script: Path, *arguments: Path | str) -> tuple[int, str]:
    """(the job's number, what it printed), once its nodes are idle again."""
    request = (f"--nodes={NODES}", "--mem=4G", "--gpus-per-node=0", "--output=%j.out", *FORMS[form])
    env = {
        "APPTRAIN_IMAGE": str(image),
        "BASH_ENV": str(WORK / "note.sh"),
        "PATH": f"{WORK}/bin:/usr/local/bin:/usr/bin:/bin",
    }
    line = ["sbatch", "--parsable", *request, script, *arguments]
    submitted = cluster.login.run(line, user="alice", cwd=WORK, env=env)
    submitted.check_returncode()
    number = int(submitted.stdout)
    ended = cluster.wait(number, LIMIT)
    folder = cluster.folder / str(WORK).lstrip("/")
    printed = (folder / f"{number}.out").read_text()
    world = NODES * RANKS
    sums = SUM.findall(printed)
    if (ended.state, len(sums)) != ("COMPLETED", world):
        raise RuntimeError(f"job {number} of {script}: {ended.state}, {len(sums)} ranks:\n{printed[-3000:]}")
    cluster.wait_idle()
    return number, printed


def spread(values: list[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in named.items()}
