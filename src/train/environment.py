"""Reads what a rank is told by environment variables: torchrun's (RANK, WORLD_SIZE, ...) and ours
(APPTRAIN_RUN_DIR, APPTRAIN_NODE, APPTRAIN_ATTEMPT, APPTRAIN_JOB_ID, APPTRAIN_HEARTBEAT). `read_rank_info` is
the entry. No other module of the training names them.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from train.status import TrainingRefused

_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MASTER_NAMES = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This process among the others."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master: str | None = None
    """HOST:PORT of the store, IPv6 in brackets; None for a process that was started alone."""
    node: str
    """Display name of this node."""
    run_dir: Path | None = None
    """APPTRAIN_RUN_DIR; None where it is not set."""
    attempt: int = 0
    """APPTRAIN_ATTEMPT, the launcher's count."""
    job_id: str | None = None
    """APPTRAIN_JOB_ID, the scheduler's word for the job; None without a launcher."""
    heartbeat: Path | None = None
    """This rank's file in APPTRAIN_HEARTBEAT; None where it is not set."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Read what this process is told. Without RANK and WORLD_SIZE it is a world of its own.

    Raises TrainingRefused for a variable that is missing beside others, is no number, or is out of range.
    """
    node = environment.get("APPTRAIN_NODE") or socket.gethostname()
    run_dir = environment.get("APPTRAIN_RUN_DIR")
    path = Path(run_dir) if run_dir else None
    attempt = _number(environment, "APPTRAIN_ATTEMPT") if environment.get("APPTRAIN_ATTEMPT") else 0
    job_id = environment.get("APPTRAIN_JOB_ID") or None
    if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
        return RankInfo(node=node, run_dir=path, attempt=attempt, job_id=job_id)
    missing = [name for name in (*_RANK_NAMES, *_MASTER_NAMES) if not environment.get(name)]
    if missing:
        raise TrainingRefused(
            "ranks-not-set",
            f"{missing[0]} is not set beside RANK or WORLD_SIZE: start the ranks with torchrun",
        )
    rank, local_rank, world_size, local_world_size = (_number(environment, name) for name in _RANK_NAMES)
    _number(environment, "MASTER_PORT")
    if rank >= world_size or local_rank >= local_world_size or local_world_size > world_size:
        found = ", ".join(f"{name}={environment[name]}" for name in _RANK_NAMES)
        raise TrainingRefused(
            "ranks-differ", f"{found} do not fit together: start the ranks with torchrun", rank=rank
        )
    heartbeat = environment.get("APPTRAIN_HEARTBEAT")
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        node=node,
        run_dir=path,
        attempt=attempt,
        job_id=job_id,
        heartbeat=Path(heartbeat, str(rank)) if heartbeat else None,
    )


def says_threads(environment: Mapping[str, str]) -> bool:
    """Whether torch has been told how many threads to compute with."""
    return bool(environment.get("OMP_NUM_THREADS"))


def said_rank(environment: Mapping[str, str]) -> int:
    """The rank as far as it can be read, for messages that must not themselves fail; else 0."""
    text = environment.get("RANK", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise TrainingRefused(
            "ranks-number", f"{name}={text!r} is not a number: start the ranks with torchrun"
        )
    return int(text)
