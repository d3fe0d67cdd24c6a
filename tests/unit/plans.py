"""Spells the whole object that `plan --json` must print from the numbers in recordings/*/expected.yaml.

Written from INTERFACES, not from the product: nothing of the entrypoint is imported here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

RECORDINGS = Path(__file__).parent.parent / "recordings"
CMD = ["train.py"]


@dataclass(frozen=True, kw_only=True)
class Try:
    """A recording, the options given with it, and what must come of them."""

    recording: str
    """Its path under tests/recordings, without `.env`."""
    options: list[str]
    add: dict[str, str] = field(default_factory=dict)
    refused: str | None = None
    plan: dict[str, Any] | None = None
    said: list[str] = field(default_factory=list)
    """Lines on stderr beside a plan."""

    @property
    def name(self) -> str:
        added = [f"{name}={value}" for name, value in self.add.items()]
        return " ".join([self.recording, *added, *self.options])

    @property
    def text(self) -> str:
        """The recording with what is added, as an --env-file holds it."""
        lines = (RECORDINGS / f"{self.recording}.env").read_text().splitlines()
        return "\n".join([*lines, *(f"{name}={value}" for name, value in self.add.items()), ""])

    @property
    def arguments(self) -> list[str]:
        """The options, the node file's place put in."""
        nodefile = str(self.nodefile)
        return [nodefile if option == "NODEFILE" else option for option in self.options]

    @property
    def nodefile(self) -> Path:
        return (RECORDINGS / self.recording).parent / "nodefile"


def cases(scheduler: str) -> dict[str, dict[str, Any]]:
    """Case name to its entry in the scheduler's table."""
    table: dict[str, dict[str, Any]] = yaml.safe_load((RECORDINGS / scheduler / "expected.yaml").read_text())
    return table


def slurm_tries() -> Iterator[Try]:
    for case, entry in cases("slurm").items():
        for place, differs in entry["places"].items():
            facts = SLURM | entry.get("facts", {}) | differs
            yield from _tries(entry, f"slurm/{case}.{place}", place, facts)


def pbs_tries() -> Iterator[Try]:
    for case, entry in cases("openpbs").items():
        for place, differs in entry["places"].items():
            recording = f"openpbs/{case}/{place}"
            facts = PBS | entry["facts"] | differs
            yield Try(
                recording=recording, options=["--device", "cpu"], refused=_without_nodefile(entry, place)
            )
            yield Try(recording=recording, options=["--nodefile", "NODEFILE"], refused=UNKNOWN_GPUS)
            yield from _tries(entry, recording, place, facts, ["--nodefile", "NODEFILE"])


UNKNOWN_GPUS = (
    "how many GPUs pbs granted is unknown (neither CUDA_VISIBLE_DEVICES nor APPTRAIN_NGPUS is set): give "
    "--device cuda --nproc-per-node N, or --device cpu"
)
DEFAULTS: dict[str, Any] = {
    "attempt": 0,
    "array_index": 0,
    "context": "task",
    "rank": None,
    "local_rank": None,
}
SLURM = {"scheduler": "slurm", "submitted_from": "/home/alice/fx", "gpus_from": "SLURM_GPUS_ON_NODE"}
PBS = {"scheduler": "pbs", "submitted_from": "/home/alice", "mode": "torchrun", "gpus_from": None}


def _without_nodefile(entry: dict[str, Any], place: str) -> str:
    if place in entry["no_nodefile_variable"]:
        return (
            "PBS_NODEFILE is not set: PBS leaves it out of tasks on the job's first host: copy the file in "
            "the job script and name the copy in APPTRAIN_NODEFILE (plan: --nodefile)"
        )
    return (
        f"PBS_NODEFILE /var/spool/pbs/aux/{entry['facts']['job_id']} cannot be read (No such file or "
        "directory): copy the file in the job script to where this node and container see it, and name the "
        "copy in APPTRAIN_NODEFILE (plan: --nodefile)"
    )


def _tries(
    entry: dict[str, Any], recording: str, place: str, facts: dict[str, Any], always: list[str] | None = None
) -> Iterator[Try]:
    for one in entry["tries"]:
        if place not in one.get("only", entry["places"]):
            continue
        options = one.get("options", [])
        plan = spelled(facts | one["plan"], options) if "plan" in one else None
        yield Try(
            recording=recording,
            options=[*(always or []), *options],
            add=one.get("add", {}),
            refused=one.get("refused"),
            plan=plan,
            said=one.get("said", []),
        )


def spelled(facts: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """The whole object. `facts` are a table's: a place's own, over its case's, over its scheduler's."""
    facts = DEFAULTS | facts
    nodes, node_rank = facts["nodes"], facts["node_rank"]
    job_id = facts.get("job_id", str(facts["job"]))
    store, join = ports(facts)
    plan = {
        "schema_version": 1,
        "scheduler": facts["scheduler"],
        "job_id": job_id,
        "step_id": _step(facts),
        "attempt": facts["attempt"],
        "context": facts["context"],
        "mode": facts["mode"],
        "device": facts["device"],
        "nodes": nodes,
        "nnodes": len(nodes),
        "node_rank": node_rank,
        "nproc_per_node": facts["nproc_per_node"],
        "world_size": facts["world_size"],
        "rank": facts["rank"] if facts["mode"] == "rank" else None,
        "local_rank": facts["local_rank"] if facts["mode"] == "rank" else None,
        "master_addr": nodes[0],
        "master_port": store,
        "rendezvous": {
            "backend": "static",
            "endpoint": f"{nodes[0]}:{store}",
            "id": f"{job_id}.{facts['attempt']}",
            "is_host": node_rank == 0,
            "local_addr": nodes[node_rank],
            "join_port": join,
        },
    }
    return plan | {
        "start_ranks": "fork" if facts["mode"] == "torchrun" else "spawn",
        "preload": [],
        "numa_binding": "none",
        "cores": None,
        "venv": None,
        "argv": _argv(plan),
        "env": _env(plan, facts),
        "sources": _sources(facts, options),
    }


def ports(facts: dict[str, Any]) -> tuple[int, int]:
    """A pair for every attempt (three of them), every step (eight), every job (94 neighbours)."""
    job = (facts["job"] + 37 * facts["array_index"]) % 94
    step = facts.get("step_modulo_8", 0)
    store = 61000 + 48 * job + 6 * step + 2 * (facts["attempt"] % 3)
    return store, store + 1


def _step(facts: dict[str, Any]) -> str | None:
    """In a batch script there is no step yet; an interactive shell is one."""
    if facts["scheduler"] != "slurm":
        return None
    step: str | None = facts.get("step")
    return None if facts["context"] == "batch" and step == "0" else step


def _argv(plan: dict[str, Any]) -> list[str]:
    if plan["mode"] == "rank":
        return ["python", *CMD]
    return [
        "torchrun",
        f"--nnodes={plan['nnodes']}",
        f"--nproc-per-node={plan['nproc_per_node']}",
        f"--node-rank={plan['node_rank']}",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={plan['rendezvous']['endpoint']}",
        f"--rdzv-id={plan['rendezvous']['id']}",
        f"--local-addr={plan['rendezvous']['local_addr']}",
        "--max-restarts=0",
        *CMD,
    ]


def _env(plan: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    env = {
        "OMP_NUM_THREADS": str(facts["threads"]),
        "APPTRAIN_RUN_DIR": f"{facts['submitted_from']}/runs/{facts['run']}",
        "APPTRAIN_NODE": plan["rendezvous"]["local_addr"],
    }
    if plan["mode"] != "rank":
        return env
    return env | {
        "MASTER_ADDR": plan["master_addr"],
        "MASTER_PORT": str(plan["master_port"]),
        "RANK": str(plan["rank"]),
        "LOCAL_RANK": str(plan["local_rank"]),
        "WORLD_SIZE": str(plan["world_size"]),
        "LOCAL_WORLD_SIZE": str(plan["nproc_per_node"]),
        "GROUP_RANK": str(plan["node_rank"]),
        "PYTHONUNBUFFERED": "1",
    }


def _sources(facts: dict[str, Any], options: list[str]) -> dict[str, str]:
    """Which variable or option each value comes from."""
    variables = _slurm_variables(facts) if facts["scheduler"] == "slurm" else PBS_VARIABLES
    derived = {field: f"derived:{name}" for field, name in variables.items()}
    gpus = f"derived:{facts['gpus_from']}"
    on_cpu = derived["slots"] if "slots" in variables else "default"
    nproc = gpus if facts["device"] == "cuda" else on_cpu
    if facts["mode"] == "rank":
        nproc = derived["tasks"]
    sources = {
        "job_id": derived["job_id"],
        "nodes": derived["nodes"],
        "attempt": facts.get("attempt_from", "default"),
        "mode": derived.get("tasks", "default"),
        "device": "flag" if "--device" in options else gpus,
        "nproc_per_node": "flag" if "--nproc-per-node" in options else nproc,
        "master_addr": derived["nodes"],
        "master_port": derived["job_id"],
        "rendezvous.backend": "default",
        "rendezvous.id": derived["job_id"],
        "rendezvous.local_addr": derived["nodes"],
        "rendezvous.join_port": derived["job_id"],
        "start_ranks": "default" if facts["mode"] == "torchrun" else "derived:mode",
        "preload": "default",
        "numa_binding": "default",
        "venv": "default",
        "env.OMP_NUM_THREADS": "flag" if "--omp-num-threads" in options else derived["cpus"],
        "env.APPTRAIN_RUN_DIR": "derived:run_dir",
        "env.APPTRAIN_NODE": derived["nodes"],
    }
    if _step(facts) is not None:
        sources["step_id"] = "derived:SLURM_STEP_ID"
    if facts.get("node_rank_from", "") is not None:
        sources["node_rank"] = derived["node_rank"]
    if facts["mode"] == "rank":
        placed = (
            "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK PYTHONUNBUFFERED"
        )
        sources |= {f"env.{name}": "derived:mode" for name in placed.split()}
    return sources


PBS_VARIABLES = {
    "job_id": "PBS_JOBID",
    "nodes": "--nodefile",
    "slots": "--nodefile",
    "node_rank": "PBS_NODENUM",
    "cpus": "NCPUS",
}


def _slurm_variables(facts: dict[str, Any]) -> dict[str, str]:
    """A step's own variables; where there is no step yet, the job's."""
    always = {"job_id": "SLURM_JOB_ID", "node_rank": "SLURM_NODEID"}
    if facts["context"] == "batch":
        return always | {
            "nodes": "SLURM_JOB_NODELIST",
            "tasks": "SLURM_TASKS_PER_NODE",
            "cpus": "SLURM_JOB_CPUS_PER_NODE",
        }
    return always | {
        "nodes": "SLURM_STEP_NODELIST",
        "tasks": "SLURM_STEP_TASKS_PER_NODE",
        "cpus": "SLURM_CPUS_ON_NODE",
    }
