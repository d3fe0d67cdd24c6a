"""Ranks that are forks of a process that has imported torch, against ranks that import it themselves.

test_demo.py has the reference training both ways.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.node import numa
from tests.embedded.jobs import Ended, run

WAYS = ("fork", "spawn")
SEEN = """
import json, os, random, sys, threading
import torch
import numpy
from torch.utils.data import DataLoader

def drawn():
    batches = DataLoader(range(64), batch_size=64, shuffle=True, num_workers=1)
    return [random.random(), numpy.random.rand(), torch.rand(1).item(), next(iter(batches)).tolist()]

by_chance = drawn()
seeds = [torch.initial_seed(), torch.cuda.initial_seed() if torch.cuda.is_available() else None]
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
told = {
    "seeded": drawn(),
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "env": sorted(name for name in os.environ if name != "TORCHELASTIC_ERROR_FILE"),
    "rank": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")],
    "python": [sys.flags.safe_path, sys.argv, os.path.samefile(sys.path[0], os.getcwd()), sys.stdout.write_through],
    "default": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.backends.mkldnn.is_available()],
    "matmul": torch.rand(40, 40).mm(torch.rand(40, 40)).sum().item().hex(),
}
print(json.dumps({"rank": int(os.environ["RANK"]), "by_chance": by_chance, "seed": seeds[0], "told": told}))
"""


def told(ended: Ended) -> list[dict[str, Any]]:
    """What each rank has printed, in their order."""
    assert ended.status == 0, ended.err
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda one: int(one["rank"]))


PLACED = """
import json, os
from pathlib import Path
import torch
from torch.utils.data import DataLoader

def cores(thread=0):
    return sorted(os.sched_getaffinity(thread))

class Places(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, _):
        return cores()

workers = list(DataLoader(Places(), batch_size=None, num_workers=1))
torch.rand(600, 600).mm(torch.rand(600, 600))
threads = [cores(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
told = {"own": cores(), "places": [*workers, *threads], "counts": [torch.get_num_threads(), torch.get_num_interop_threads()]}
print(json.dumps({"rank": int(os.environ["RANK"]), **told}))
"""


def physical_cores() -> set[int]:
    """The lowest core of each that this process may use a part of."""
    known = numa.topology(numa.granted())
    return {group[0] for group in known.physical_cores(known.granted)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for way in WAYS:
        folder = tmp_path_factory.mktemp(way)
        script = folder / "script.py"
        script.write_text(SEEN)
        options = ("--nodes", "1", "--nproc-per-node", "2", "--master-port", "61990", "--start-ranks", way)
        found[way] = told(run(folder, *options, "--", "script.py", "--lr", "0.1"))
    return found


def test_ranks_that_are_forks_draw_other_numbers_than_each_other(
    seen: dict[str, list[dict[str, Any]]],
) -> None:
    first, second = seen["fork"]
    assert first["seed"] != second["seed"]
    for mine, other in zip(first["by_chance"], second["by_chance"], strict=True):
        assert mine != other


def test_ranks_that_are_forks_see_what_others_see(seen: dict[str, list[dict[str, Any]]]) -> None:
    forks, spawned = ([one["told"] for one in seen[way]] for way in WAYS)
    assert forks == spawned


def test_a_script_that_sets_threads_imports_torch_itself_and_that_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint('threads', torch.get_num_threads())\n"
    )
    why = "script.py, line 2: it sets OMP_NUM_THREADS, which is read as torch is imported"
    ended = run(tmp_path, "--nodes", "1", "--omp-num-threads", "2", "--", str(script))
    assert (ended.status, ended.out) == (0, "threads 1\n"), ended.err
    assert f"apptrain: each rank imports torch for itself: {why}\n" in ended.err
    ended = run(tmp_path, "--nodes", "1", "--start-ranks", "fork", "--", str(script))
    assert (ended.status, ended.out) == (64, "")
    assert f"--start-ranks fork, but {why}: leave it out" in ended.err


def test_a_module_that_starts_a_thread_is_not_preloaded(tmp_path: Path) -> None:
    """Also where numpy has threads of its own, which end with each fork."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for name, text in {
        "threaded": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "computing": "import numpy\nnumpy.ones((500, 500)) @ numpy.ones((500, 500))\n",
    }.items():
        (modules / f"{name}.py").write_text(text)
    (tmp_path / "script.py").write_text("print('ran')\n")
    env = {"PYTHONPATH": str(modules), "APPTRAIN_PASS": "PYTHONPATH"}
    options = ("--nodes", "1", "--omp-num-threads", "2", "--preload")
    ended = run(tmp_path, *options, "threaded", "--", "script.py", env=env)
    assert (ended.status, ended.out) == (64, "")
    assert "--preload threaded starts threads: leave it out" in ended.err
    ended = run(tmp_path, *options, "computing", "--", "script.py", env=env)
    assert (ended.status, ended.out) == (0, "ran\n"), ended.err
    assert "imports torch for itself" not in ended.err


def test_a_module_that_cannot_be_preloaded_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    ended = run(tmp_path, "--nodes", "1", "--preload", "json,no_such_module", "--", str(script))
    assert ended.status == 64
    assert "--preload json,no_such_module: No module named 'no_such_module': correct it" in ended.err


@pytest.mark.ci_may_skip("two ranks cannot share out one physical core")
@pytest.mark.skipif(len(physical_cores()) < 2, reason="two ranks cannot share out one physical core")
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_its_threads_and_its_workers_run_on_its_cores(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLACED)
    options = ("--nodes", "1", "--nproc-per-node", "2", "--start-ranks", way, "--numa-binding", "exclusive")
    ranks = told(run(tmp_path, *options, "--", "script.py"))
    owned = [set(rank["own"]) for rank in ranks]
    assert not owned[0] & owned[1]
    assert owned[0] | owned[1] == numa.granted()
    for rank in ranks:
        assert all(place == rank["own"] for place in rank["places"]), rank
        assert max(rank["counts"]) <= len(rank["own"])
